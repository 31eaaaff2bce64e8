"""Find the checkpoint that a user names by its directory or URL, or by that of its run."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lm.checkpoint import remote
from lm.checkpoint.bucket import Bucket, is_url
from lm.checkpoint.manifest import FILE_NAME, MANIFEST
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import CheckpointStore, LocalCheckpoints
from lm.errors import ConfigError, oserror_as_config_error
from lm.launch.cleanup import at_exit


@oserror_as_config_error
def find_checkpoint(where: Path | str) -> Path:
    """Return the directory of the checkpoint at `where`; one at a URL is downloaded."""
    location = locate_checkpoint(where)
    if not is_url(location):
        return Path(location)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    at_exit(shutil.rmtree, directory, ignore_errors=True)
    return remote.download(location, directory / Path(location).name)


@oserror_as_config_error
def locate_checkpoint(where: Path | str) -> str:
    """Return the absolute path or URL of the checkpoint at `where`, or of the run's newest there.

    Raises:
        ConfigError: `where` is neither, or the run has not saved a checkpoint.
        CheckpointError: the run has checkpoints, but none is complete.
    """
    if not is_url(where) and Path(where).exists() and not Path(where).is_dir():
        problem = "is a file; name the directory of a checkpoint or a run"
        raise ConfigError(f"{where}: {problem}")
    candidates = store_at(where).resume_candidates()
    if candidates:
        return candidates[0]
    if is_url(where):
        location = str(where).rstrip("/")
        names = list(Bucket(location).sizes())
    else:
        location = str(Path(where).absolute())
        names = [path.name for path in Path(location).iterdir()]
    if MANIFEST not in names and "config.json" in names:
        problem = "a Hugging Face model, not a checkpoint of a run"
        advice = "name the run or the checkpoint that it was exported from, or use transformers"
        raise ConfigError(f"{location}: {problem}; {advice}")
    if not any(name == MANIFEST or FILE_NAME.fullmatch(name) for name in names):
        problem = "neither a checkpoint nor a run that has saved one"
        advice = f"name a directory that contains {MANIFEST} or checkpoints, or for init_from one"
        advice += " with the config.json of a Hugging Face model"
        raise ConfigError(f"{location}: {problem}; {advice}")
    return location


def store_at(where: Path | str) -> CheckpointStore:
    """Return the checkpoints of the run at `where`, a path or URL, to read them."""
    if is_url(where):
        return BucketCheckpoints(str(where))
    return LocalCheckpoints(Path(where) / "checkpoints")
