"""What a run off the cluster started from, and whether it ever had a checkpoint: `state.json`.

It is written before a run's first step and after its first checkpoint, so that a run that is killed
at any moment neither forgets its start nor starts again at step 0 after its checkpoints are lost.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from lm.errors import MAX_LINE, ConfigError, RunError
from lm.fileio import describe_invalid, parse_json, read_bytes, replace_durably, sync_directory

STATE = "state.json"
"""File of a run's directory or URL."""
ASIDE = "before-%Y%m%d-%H%M%S"
"""Format of the names of directories to which a new start moves what earlier runs wrote."""

_STAYS = re.compile(rf"lock|lease|before-.*|{re.escape(STATE)}")
"""Files of a run's directory that are not moved."""


class RunState(BaseModel, frozen=True, extra="forbid"):
    """The content of `state.json`."""

    resume: str | None = Field(
        default=None,
        description="the hyperparameter, as it was when the run started; null = unknown",
    )
    launch: dict[str, str] = Field(
        default={}, description="what identifies the start to its later attempts: `launch_ids`"
    )
    resumed_from: str | None = Field(
        default=None,
        description="checkpoint that it resumed from, another run's or one in `before-*`",
    )
    init_from: str | None = Field(
        default=None, description="the hyperparameter: its initial weights"
    )
    had_checkpoint_at: str | None = Field(
        default=None,
        description="where it had a complete one: `checkpoints` of its directory, or a URL",
    )
    moving_to: str | None = Field(
        default=None,
        pattern=r"^before-[0-9-]{15}(-again)*$",
        description="directory to which files of earlier runs are being moved",
    )

    def replace(self, **changes: str | bool | None) -> RunState:
        """Return a copy with `changes`."""
        return self.model_copy(update=changes)


def parse_state(path: Path | str, content: bytes) -> RunState:
    """Return the state whose file at `path` has this content.

    Raises:
        ConfigError: it is not valid.
    """
    try:
        return RunState.model_validate(parse_json(content))
    except ValidationError as error:
        problem = describe_invalid(error)
    except ValueError as error:
        problem = str(error)
    raise ConfigError(f"{path}: damaged: {problem}; move it out of the run's directory")


def read_state(run_dir: Path) -> RunState:
    """Return the state of the run in `run_dir`: the default of one that has not started.

    Raises:
        ConfigError: the file is not a regular one, or damaged.
    """
    path = run_dir / STATE
    try:
        content = read_bytes(path, 10 * MAX_LINE)
    except FileNotFoundError:
        return RunState()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(f"{path}: {problem}; move it out of the run's directory") from None
    return parse_state(path, content)


def write_state(run_dir: Path, state: RunState) -> None:
    """Write the state of the run in `run_dir`, durably."""
    replace_durably(run_dir / STATE, f"{state.model_dump_json(indent=1)}\n".encode())
    sync_directory(run_dir)


def begin_run(run_dir: Path, state: RunState, *, fresh: bool) -> None:
    """Record a start that is none of the run before, and if `fresh` move the files of that aside.

    A checkpoint of that run from which this one resumes is moved, too: the state names where to.

    Raises:
        RunError: a file cannot be moved.
    """
    if fresh and has_files(run_dir):
        aside = run_dir / time.strftime(ASIDE)
        while aside.exists():  # two starts within one second
            aside = aside.with_name(f"{aside.name}-again")
        aside.mkdir(mode=0o775)
        if (run_dir / STATE).exists():
            write_state(aside, read_state(run_dir))
        resumed_from = Path(state.resumed_from or "")
        if resumed_from.parent.resolve() == (run_dir / "checkpoints").resolve():
            moved = aside.absolute() / "checkpoints" / resumed_from.name
            state = state.replace(resumed_from=str(moved))
        state = state.replace(moving_to=aside.name)
    write_state(run_dir, state)
    finish_move(run_dir)


def finish_move(run_dir: Path) -> None:
    """Move aside what the state says, also after a kill of the process that has begun it.

    Raises:
        RunError: a file cannot be moved.
    """
    state = read_state(run_dir)
    if state.moving_to is None:
        return
    aside = run_dir / state.moving_to
    try:
        aside.mkdir(mode=0o775, exist_ok=True)
        for path in _movable(run_dir):
            if not (aside / path.name).exists():  # or else it is a new directory
                path.rename(aside / path.name)
        for name in ("checkpoints", "traces"):
            (run_dir / name).mkdir(mode=0o775, exist_ok=True)
        write_state(run_dir, state.replace(moving_to=None))
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be moved ({error.strerror})") from None


def has_files(run_dir: Path) -> bool:
    """Return whether a run has written files to `run_dir` that a new start moves aside."""
    return any(not path.is_dir() or any(path.iterdir()) for path in _movable(run_dir))


def _movable(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if not _STAYS.fullmatch(path.name)]
