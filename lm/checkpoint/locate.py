"""Find the checkpoint that a user names by its directory or URL, or by that of its run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lm.checkpoint.location import Location, parse_location
from lm.checkpoint.manifest import MANIFEST, TENSOR_FILE, WEIGHTS
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import LocalCheckpoints, RunCheckpoints
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, oserror_as_config_error
from lm.launch.process import open_until_exit
from lm.storage.bucket import is_url


@oserror_as_config_error
def find_checkpoint(where: Path | str) -> Path:
    """Return the directory of the checkpoint at `where`, of which the weights are used.

    One at a URL is downloaded; the copy is deleted when the process ends.
    """
    return open_until_exit(locate_checkpoint(where).fetch(WEIGHTS))


@oserror_as_config_error
def locate_checkpoint(where: Path | str, parts: Collection[str] = WEIGHTS) -> Location:
    """Return the location of the checkpoint at `where`, or of the newest of the run there.

    Args:
        parts: what of the run's checkpoints has to be complete.

    Raises:
        ConfigError: `where` is neither, or the run has not saved a checkpoint.
        CheckpointError: the run has checkpoints, but none is complete.
    """
    named = parse_location(where)
    if named.path is not None and named.path.exists() and not named.path.is_dir():
        problem = "is a file; name the directory of a checkpoint, a run or a Hugging Face model"
        raise ConfigError(f"{where}: {problem}")
    candidates = store_at(where).find_candidates(parts, "name another run or checkpoint")
    if candidates:
        return candidates[0]
    names = named.open_place().names()
    if MANIFEST in names or any(TENSOR_FILE.fullmatch(name) for name in names):
        return named
    problem = "neither a checkpoint nor a run that has saved one"
    advice = f"a checkpoint has {MANIFEST}, a run checkpoints, a Hugging Face model {MODEL_CONFIG}"
    raise ConfigError(f"{named}: {problem}; {advice}")


def store_at(where: Path | str) -> RunCheckpoints:
    """Return the checkpoints of the run at `where`, a path or URL, to read them."""
    if is_url(where):
        return BucketCheckpoints(str(where).rstrip("/"))
    return LocalCheckpoints(Path(where) / "checkpoints")
