"""Checkpoint retention: which checkpoints of a run are kept, and which are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lm.checkpoint.manifest import CheckpointError, read_manifest

DELETED = ".deleted-"
COMMITTED = ".committed"
"""File that exists next to a run's checkpoints once one of them was complete."""


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint, as retention sees it."""

    time: float
    name: str
    validation_loss: float | None
    validation_data: str = ""
    """fingerprint of the data of `validation_loss`"""


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the newest of `saved` with the lowest validation loss on the newest's validation data, if any has one."""
    data = max(saved).validation_data if saved else ""
    evaluated = [entry for entry in saved if entry.validation_loss is not None and entry.validation_data == data]
    return min(evaluated, key=lambda entry: (entry.validation_loss, -entry.time), default=None)


def expired(saved: Sequence[SavedCheckpoint], keep: int | None) -> list[SavedCheckpoint]:
    """Return all of `saved` except the `keep` newest and the best; none if None."""
    if keep is None:
        return []
    best = find_best(saved)
    return [entry for entry in sorted(saved)[:-keep] if entry is not best]


def list_saved(directory: Path) -> tuple[list[SavedCheckpoint], dict[Path, CheckpointError]]:
    """Return the complete checkpoints in `directory`, oldest first, and the error of each incomplete one.

    Files are checked by size only; `verify` compares checksums.
    """
    saved: list[SavedCheckpoint] = []
    incomplete: dict[Path, CheckpointError] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            try:
                manifest = read_manifest(path)
                loss, data = manifest.validation_loss, manifest.data["validation"]
                saved.append(SavedCheckpoint(manifest.time, path.name, loss, data))
            except CheckpointError as error:
                incomplete[path] = error
    return sorted(saved), incomplete


def prune(directory: Path, keep: int | None, damaged: Collection[str]) -> None:
    """Delete the expired checkpoints in `directory`; those named in `damaged` are neither counted nor deleted."""
    with suppress(FileExistsError):
        (directory / COMMITTED).open("x").close()
    saved, _ = list_saved(directory)
    for entry in expired([entry for entry in saved if entry.name not in damaged], keep):
        # After the rename it is no longer a checkpoint, even if deleting it is interrupted.
        (directory / entry.name).rename(directory / f"{DELETED}{entry.name}")
    for path in directory.glob(f"{DELETED}*"):  # includes what an interrupted deletion left
        shutil.rmtree(path, ignore_errors=True)
