"""Where the checkpoints of a run are: on a disk, in object storage, or in a cluster's storage."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.checkpoint.location import Location, parse_location
from lm.checkpoint.manifest import PARTS, CheckpointError, Manifest, check_files, read_manifest
from lm.errors import ConfigError
from lm.runtime.run_state import read_state, write_state
from lm.storage.folder import DRAFT, MANIFEST, settle
from lm.storage.lock import require_held
from lm.storage.place import Directory, Place

if TYPE_CHECKING:
    from determined import core

    from lm.runtime.world import World


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run."""

    name: str
    manifest: Manifest


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the one with the lowest validation loss, the newest of equals.

    Only those that were validated on the same data as the newest of all are compared.

    Args:
        saved: oldest first.
    """
    best: SavedCheckpoint | None = None
    lowest = math.inf
    for entry in saved:
        loss = entry.manifest.validation_loss
        is_same_data = entry.manifest.data["validation"] == saved[-1].manifest.data["validation"]
        if loss is not None and is_same_data and loss <= lowest:
            best = entry
            lowest = loss
    return best


def expired(
    saved: Sequence[SavedCheckpoint], keep: int | None, damaged: Collection[str] = ()
) -> list[SavedCheckpoint]:
    """Return all of `saved` except the `keep` newest and the best; an empty list if `keep` is None.

    Args:
        saved: oldest first.
        damaged: names of those that are neither counted nor returned.
    """
    if keep is None:
        return []
    saved = [entry for entry in saved if entry.name not in damaged]
    best = find_best(saved)
    return [entry for entry in saved[:-keep] if entry is not best]


class DraftError(CheckpointError):
    """A checkpoint is being saved, or was when a kill ended it."""


@dataclass
class NewCheckpoint:
    """A checkpoint that is being saved."""

    path: Path
    """directory for this rank's files; the same on all ranks if the store writes in place"""
    name: str = ""
    """UUID; known once the checkpoint is complete"""


class CheckpointStore(ABC):
    """The checkpoints of one run. Methods without `world` are called on one rank."""

    writes_in_place = True
    """whether all ranks write to, and read from, the same directory"""
    shows_completion = True
    """whether the newest checkpoint shows that the run is complete; of trials, the platform does"""
    places: Sequence[Place] = ()
    """where the run has its files, `state.json` among them; the first one counts"""
    transfers: Path | None = None
    """where uploads and downloads have directories; None = the system's temporary directory"""

    # Resume

    @abstractmethod
    def list_saved(
        self, parts: Collection[str] = PARTS
    ) -> tuple[list[SavedCheckpoint], dict[Location, CheckpointError]]:
        """Return the checkpoints with all `parts`, oldest first, and the errors of others.

        Files are checked by size only; `verify` compares checksums.
        """

    @abstractmethod
    def was_committed(self) -> bool:
        """Return whether a checkpoint of this run was ever complete."""

    @abstractmethod
    def locate(self, name: str) -> Location:
        """Return the location of the checkpoint `name`."""

    def is_name(self, where: str) -> bool:  # noqa: ARG002
        """Return whether `where`, which a user has passed, is a checkpoint's name in this store."""
        return False

    def find_candidates(self, parts: Collection[str], remedy: str) -> list[Location]:
        """Return the locations of the checkpoints with all `parts`, last written first.

        Prints to stderr what is skipped.

        Args:
            remedy: what to do if none is left.

        Raises:
            CheckpointError: all are damaged.
            ConfigError: none of them is here any more.
        """
        saved, incomplete = self.list_saved(parts)
        if not saved and self.was_committed():  # and not merely killed during the first save
            if not incomplete:
                problem = "its checkpoints are in another checkpoint_storage, or were all deleted"
                raise ConfigError(f"{self}: {problem}; {remedy}")
            problem = f"{self}: no complete checkpoint is left; {remedy}"
            raise CheckpointError(*map(str, incomplete.values()), problem)
        for error in incomplete.values():
            print(f"skipping {error}", file=sys.stderr)
        if incomplete and not saved:
            print(f"{self}: no checkpoint was ever completed", file=sys.stderr)
        return [self.locate(entry.name) for entry in reversed(saved)]

    def read_manifest(self, location: Location) -> Manifest:
        """Return the manifest of the checkpoint at `location`; not all of its files are checked."""
        return location.read_manifest()

    def open(
        self, location: Location, world: World, parts: Collection[str]
    ) -> AbstractContextManager[Path]:
        """Return a directory with `parts` of the checkpoint at `location`, on all ranks together.

        If it is not downloaded, files can be missing.
        """
        return location.open(world, self.transfers, parts)

    # Save

    def require_lock(self) -> None:  # noqa: B027
        """Raise InUseError if another run writes here, too."""

    def start(self, world: World) -> None:  # noqa: B027
        """Make this run the only one that writes here; before that, a store is only read."""

    @abstractmethod
    def new_checkpoint(
        self, metadata: Mapping[str, Any], world: World
    ) -> AbstractContextManager[NewCheckpoint]:
        """Yield a new directory to all ranks; at the end, their files become a checkpoint.

        Args:
            metadata: what Determined shows of the checkpoint.
        """

    def add(self, location: Location, manifest: Manifest) -> None:  # noqa: B027
        """Count the complete checkpoint at `location`, which this run has saved or resumed from."""

    @abstractmethod
    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        """Delete the checkpoints that are `expired`, and what killed saves left."""

    def close(self, world: World) -> None:  # noqa: B027
        """Complete what `start` began."""

    def close_after_error(self) -> None:  # noqa: B027
        """Try to `close`, once, without the other ranks: metrics up to an error can explain it."""


class RunCheckpoints(CheckpointStore):
    """The checkpoints of a run off the cluster, in its directory or its bucket.

    `state.json` says whether one was ever complete: if none is left, they were lost.

    Args:
        place: where the run is.
        folder: of the checkpoints, there.
    """

    def __init__(self, place: Place, folder: str = "checkpoints") -> None:
        self.place = place
        self.places = [place]
        self._folder = folder

    def __str__(self) -> str:
        return f"{self.place}/{self._folder}"

    def locate(self, name: str) -> Location:
        return parse_location(f"{self}/{name}")

    def list_saved(
        self, parts: Collection[str] = PARTS
    ) -> tuple[list[SavedCheckpoint], dict[Location, CheckpointError]]:
        saved: list[SavedCheckpoint] = []
        incomplete: dict[Location, CheckpointError] = {}
        for name, files in sorted(self.folders().items()):
            folder = f"{self._folder}/{name}"
            location = self.locate(name)
            try:
                if _is_draft(files):
                    raise DraftError(f"{location}: is being saved, or was when a kill ended it")
                manifest = read_manifest(self.place, folder)
                check_files(self.place, manifest, parts, folder)
                saved.append(SavedCheckpoint(name, manifest))
            except CheckpointError as error:
                incomplete[location] = error
        return sorted(saved, key=lambda entry: entry.manifest.time), incomplete

    def folders(self) -> dict[str, set[str]]:
        """Return the names of the files of each checkpoint, complete or not."""
        return self.place.folders(self._folder)

    def was_committed(self) -> bool:
        has_manifest = any(MANIFEST in files for files in self.folders().values())
        return has_manifest or read_state(self.places).has_saved

    def add(self, location: Location, manifest: Manifest) -> None:  # noqa: ARG002
        state = read_state(self.places)
        if not state.has_saved and location == self.locate(location.name):
            write_state(self.places, state.replace(has_saved=True))

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        folders = self.folders().items()
        # This run, which has the lock, is not saving.
        gone = [name for name, files in folders if _is_draft(files)]
        if keep is not None:  # else there may be thousands
            saved, _ = self.list_saved()
            gone += [entry.name for entry in expired(saved, keep, damaged)]
        for name in gone:
            self.place.delete_folder(f"{self._folder}/{name}")


def _is_draft(files: Collection[str]) -> bool:
    return not files or (DRAFT in files and MANIFEST not in files)


class LocalCheckpoints(RunCheckpoints):
    """The checkpoints of a run in a directory that all machines share.

    Args:
        context: Core API's, to save; None = only to read.
    """

    def __init__(self, path: Path, context: core.CheckpointContext | None = None) -> None:
        super().__init__(Directory(path.parent), path.name)
        self.path = path
        self.transfers = path
        self._lock = path.parent / "lock"
        self._context = context

    def require_lock(self) -> None:
        require_held(self._lock)

    @contextmanager
    def new_checkpoint(self, metadata: Mapping[str, Any], world: World) -> Iterator[NewCheckpoint]:  # noqa: ARG002
        assert self._context is not None
        with self._context.store_path(dict(metadata), shard=True) as (path, name):
            yield NewCheckpoint(path, name)

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        super().prune(keep, damaged)
        settle(self.path)
