"""Where the checkpoints of a run are, which are kept, and which are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lm.checkpoint.manifest import DRAFT, MANIFEST, CheckpointError, Manifest, read_manifest
from lm.runtime.run_dir import move_aside

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


def expired(saved: Sequence[SavedCheckpoint], keep: int | None, damaged: Collection[str] = ()) -> list[SavedCheckpoint]:
    """Return all of `saved` except the `keep` newest and the best; an empty list if `keep` is None.

    Those named in `damaged` are neither counted nor returned.
    """
    if keep is None:
        return []
    saved = [entry for entry in saved if entry.name not in damaged]
    best = find_best(saved)
    return [entry for entry in sorted(saved)[:-keep] if entry is not best]


def saved_checkpoint(name: str, manifest: Manifest) -> SavedCheckpoint:
    """Return what retention knows of the checkpoint `name`."""
    return SavedCheckpoint(manifest.time, name, manifest.validation_loss, manifest.data["validation"])


class Directory:
    """The checkpoints of a run on a disk that all machines share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def locate(self, name: str) -> str:
        """Return the absolute path of a checkpoint."""
        return str((self.path / name).absolute())

    def list_saved(self) -> tuple[list[SavedCheckpoint], dict[str, CheckpointError]]:
        """Return the complete checkpoints, oldest first, and the error of each incomplete one, by its path.

        Files are checked by size only; `verify` compares checksums.
        """
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path}: is a symbolic link, which is not followed")
        saved: list[SavedCheckpoint] = []
        incomplete: dict[str, CheckpointError] = {}
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            if path.is_dir() and not path.name.startswith("."):
                try:
                    saved.append(saved_checkpoint(path.name, read_manifest(path)))
                except CheckpointError as error:
                    incomplete[str(path)] = error
        return sorted(saved), incomplete

    def was_committed(self) -> bool:
        """Return whether a checkpoint was ever complete here."""
        return (self.path / COMMITTED).exists() or any(self.path.glob(f"[!.]*/{MANIFEST}"))

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        """Delete the checkpoints that are `expired`, and what killed saves left."""
        with suppress(FileExistsError):
            (self.path / COMMITTED).open("x").close()
        saved, _ = self.list_saved()
        for entry in expired(saved, keep, damaged):
            # After the rename it is no longer a checkpoint, even if deleting it is interrupted.
            (self.path / entry.name).rename(self.path / f"{DELETED}{entry.name}")
        for draft in self.path.glob(f"[!.]*/{DRAFT}"):  # this run, which has the lock, is not saving
            if not draft.parent.is_symlink():
                draft.parent.rename(self.path / f"{DELETED}{draft.parent.name}")
        for path in self.path.glob(f"{DELETED}*"):  # includes what an interrupted deletion left
            shutil.rmtree(path, ignore_errors=True)

    def move_aside(self) -> None:
        """Move all files of the run, these checkpoints included, to `before-<time>/`."""
        move_aside(self.path.parent)
