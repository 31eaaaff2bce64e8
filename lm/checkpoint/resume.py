"""Find the checkpoint that a run resumes from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import determined as det

from lm.checkpoint.checkpointer import CheckpointConfig
from lm.checkpoint.manifest import (
    COMMITTED,
    FILE_NAME,
    MANIFEST,
    CheckpointError,
    read_manifest,
)
from lm.errors import ConfigError, oserror_as_config_error


def complete_checkpoints(folder: Path, log: Callable[[str], None]) -> list[Path]:
    """The checkpoints below `folder` that look whole, the last written first; none where none was ever begun.

    That is not always the one of the highest step: a run may have gone on from an earlier one.

    Args:
        say: is told of each folder that is passed over.

    Raises:
        CheckpointError: there was one, and none is left. What a kill inside the first save leaves is no reason.
    """
    found: list[tuple[float, Path]] = []
    problems = []
    lost = (folder / COMMITTED).exists()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            try:
                found.append((read_manifest(path).time, path))
            except CheckpointError as error:
                problems.append(str(error))
                lost |= (path / MANIFEST).exists()
    if lost and problems and not found:
        raise CheckpointError(*problems, f"{folder}: no whole checkpoint to go on from; resume=fresh starts anew")
    for problem in problems:
        log(f"passing over {problem}")
    if problems and not found:
        log(f"{folder}: none was ever completed, starting at step 0")
    return [path for _, path in sorted(found, reverse=True)]


@oserror_as_config_error
def find_checkpoint(where: Path) -> Path:
    """The checkpoint that `where` means: itself, or the newest one of a run's folder.

    Raises:
        ConfigError: there is no such folder, it is none of both, or no checkpoint is in the run yet.
        CheckpointError: the run has checkpoints, but none is whole.
    """
    if not where.is_dir():
        raise ConfigError(f"{where}: no such folder; give a checkpoint's or a run's")
    checkpoints = where / "checkpoints"
    if not checkpoints.is_dir():
        if not any(path.name == MANIFEST or FILE_NAME.fullmatch(path.name) for path in where.iterdir()):
            raise ConfigError(f"{where}: is neither a checkpoint's folder nor a run's")
        return where
    whole = complete_checkpoints(checkpoints, lambda line: print(line, file=sys.stderr))
    if not whole:
        raise ConfigError(f"{where}: no checkpoint yet")
    return whole[0]


def find_initial(init_from: str | None, on_cluster: bool) -> list[str]:
    """What `init_from` names: the absolute path of a checkpoint or of a run's newest, or on a cluster a uuid.

    Raises:
        ConfigError, CheckpointError: as `find_checkpoint`.
    """
    if init_from is None or (on_cluster and "/" not in init_from):
        return [init_from] if init_from else []
    try:
        return [str(find_checkpoint(Path(init_from)).absolute())]
    except ConfigError as error:
        raise ConfigError(f"init_from: {error}") from None


@oserror_as_config_error
def find_checkpoints(
    config: CheckpointConfig, info: det.ClusterInfo | None, folder: Path | None, restarted: bool
) -> list[str]:
    """What to go on from, best first: uuids on the cluster, folders off it; nothing to start anew.

    Args:
        folder: where a run off the cluster keeps its checkpoints.
        restarted: a launcher repeats an earlier start, whose checkpoints then come before what `resume` asked for.

    Raises:
        ConfigError: `resume` names a folder that is not there, or holds no checkpoint.
        CheckpointError: there were checkpoints, and none is whole.
    """
    named: list[str] = []
    if config.resume not in ("auto", "fresh"):
        try:
            named = [config.resume if info else str(find_checkpoint(Path(config.resume)).absolute())]
        except ConfigError as error:
            raise ConfigError(f"resume: {error}; or use auto or fresh") from None
    if config.resume != "auto" and not restarted:
        own: list[str] = []
    elif folder is None:
        own = [info.latest_checkpoint] if info and info.latest_checkpoint else []
    else:
        whole = complete_checkpoints(folder, lambda line: print(line, file=sys.stderr))
        own = [str(path.absolute()) for path in whole]
    return own + named
