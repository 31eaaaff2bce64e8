"""Which checkpoints of a run are kept, and which are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lm.checkpoint.manifest import (
    COMMITTED,
    DELETED,
    CheckpointError,
    read_manifest,
)


class SavedCheckpoint(NamedTuple):
    """What retention looks at: when a checkpoint was written, how good it is, and its uuid."""

    time: float
    validation_loss: float | None
    name: str


def expired(whole: list[SavedCheckpoint], keep: int | None) -> list[SavedCheckpoint]:
    """All of `whole` but the `keep` last written and the one of the lowest validation loss; none for None."""
    if keep is None:
        return []
    judged = [entry for entry in whole if entry.validation_loss is not None]
    best = min(judged, key=lambda entry: (entry.validation_loss, -entry.time), default=None)
    return [entry for entry in sorted(whole, key=lambda entry: entry.time)[:-keep] if entry is not best]


def list_saved(folder: Path, damaged: Collection[str]) -> list[SavedCheckpoint]:
    """The checkpoints below `folder`, but for those that are not whole.

    Args:
        damaged: names of those that look whole and are known not to be.
    """
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith(DELETED) and path.name not in damaged:
            with suppress(CheckpointError):
                manifest = read_manifest(path)
                found.append(SavedCheckpoint(manifest.time, manifest.validation_loss, path.name))
    return found


def prune(folder: Path, keep: int | None, damaged: Collection[str]) -> None:
    """Delete the superfluous checkpoints of `kept`."""
    (folder / COMMITTED).touch()
    for entry in expired(list_saved(folder, damaged), keep):
        # Renamed first: whatever happens next, it is no checkpoint any more, and not half of one.
        (folder / entry.name).rename(folder / f"{DELETED}{entry.name}")
    for gone in folder.glob(f"{DELETED}*"):  # also what a kill, or a reader on a network's disk, left
        shutil.rmtree(gone, ignore_errors=True)
