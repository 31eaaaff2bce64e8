"""Which checkpoints of a run are kept, and which are deleted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from lm.checkpoint.manifest import Manifest


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint, as retention sees it."""

    time: float
    name: str
    validation_loss: float | None
    validation_data: str = ""
    """fingerprint of the data of `validation_loss`"""


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the one of `saved` with the lowest validation loss, the newest of equals.

    Only those that were validated on the same data as the newest of all are compared.
    """
    data = max(saved).validation_data if saved else ""
    evaluated = [
        entry
        for entry in saved
        if entry.validation_loss is not None and entry.validation_data == data
    ]
    return min(evaluated, key=lambda entry: (entry.validation_loss, -entry.time), default=None)


def expired(
    saved: Sequence[SavedCheckpoint], keep: int | None, damaged: Collection[str] = ()
) -> list[SavedCheckpoint]:
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
    return SavedCheckpoint(
        manifest.time, name, manifest.validation_loss, manifest.data["validation"]
    )
