"""Where the checkpoints of a run are: on a disk, in object storage, or in a cluster's storage."""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.checkpoint.location import ClusterLocation, DirectoryLocation, Location, PlainLocation
from lm.checkpoint.manifest import (
    DRAFT,
    MANIFEST,
    PARTS,
    CheckpointError,
    Manifest,
    read_manifest,
)
from lm.checkpoint.retention import SavedCheckpoint, expired, saved_checkpoint
from lm.errors import ConfigError
from lm.runtime.run_state import RunState, begin_run, has_files, read_state, write_state
from lm.storage.folder import discard, scratch, settle
from lm.storage.lock import is_held, require_held

if TYPE_CHECKING:
    from determined import core

    from lm.runtime.world import World


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

    def read_state(self) -> RunState | None:
        """Return what the run started from; None on a cluster, where the platform knows."""
        return None

    @abstractmethod
    def was_committed(self) -> bool:
        """Return whether a checkpoint of this run was ever complete."""

    def is_in_use(self) -> bool:
        """Return whether a run writes here now."""
        return False

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
            ConfigError: all were deleted.
        """
        saved, incomplete = self.list_saved(parts)
        if not saved and self.was_committed():  # and not merely killed during the first save
            if not incomplete:
                raise ConfigError(f"{self}: all checkpoints of the run were deleted; {remedy}")
            problem = f"{self}: no complete checkpoint is left; {remedy}"
            raise CheckpointError(*map(str, incomplete.values()), problem)
        for error in incomplete.values():
            print(f"skipping {error}", file=sys.stderr)
        if incomplete and not saved:
            print(f"{self}: no checkpoint was ever completed", file=sys.stderr)
        return [self.locate(entry.name) for entry in reversed(saved)]

    def read_manifest(self, location: Location) -> Manifest:
        """Return the manifest of the checkpoint at `location`; not all of its files are checked."""
        assert isinstance(location, PlainLocation)
        return location.read_manifest()

    def open(
        self, location: Location, world: World, parts: Collection[str]
    ) -> AbstractContextManager[Path]:
        """Return a directory with `parts` of the checkpoint at `location`, on all ranks together.

        If it is not downloaded, files can be missing.
        """
        assert isinstance(location, PlainLocation)
        return location.open(world, self.transfers, parts)

    # Save

    def require_lock(self) -> None:  # noqa: B027
        """Raise InUseError if another run writes here, too."""

    def remove_failed(self, path: Path) -> None:
        """Remove what a failed save has written to `path`, if all ranks share it."""
        if self.writes_in_place:
            shutil.rmtree(path, ignore_errors=True)

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

    def record_early(self, state: RunState) -> None:  # noqa: B027
        """Record a start before its weights are loaded, if it has no files to move aside."""

    def record_start(self, state: RunState, *, fresh: bool) -> None:  # noqa: B027
        """Record a start that does not resume from a checkpoint of this run, off the cluster.

        Args:
            fresh: move all files of earlier runs, their checkpoints included, to `before-<time>/`.
        """

    def close(self, world: World) -> None:  # noqa: B027
        """Complete what `start` began."""

    def close_after_error(self) -> None:  # noqa: B027
        """Try to `close`, once, without the other ranks: metrics up to an error can explain it."""


class RunCheckpoints(CheckpointStore):
    """The checkpoints of a run off the cluster, whose `state.json` says if it ever had one.

    It says so after a manifest is written, or when a run resumes from what a kill in between left.
    """

    place: str
    """of the checkpoints, as `state.json` names it"""

    @abstractmethod
    def has_manifest(self) -> bool:
        """Return whether there is a checkpoint that was complete."""

    @abstractmethod
    def read_state(self) -> RunState:
        """Return what the run started from."""

    @abstractmethod
    def write_state(self, state: RunState) -> None:
        """Replace what `read_state` returns."""

    def was_committed(self) -> bool:
        return self.has_manifest() or self.read_state().had_checkpoint_at == self.place

    def add(self, location: Location, manifest: Manifest) -> None:  # noqa: ARG002
        state = self.read_state()
        is_ours = location == self.locate(location.name)
        if is_ours and state.had_checkpoint_at != self.place:
            self.write_state(state.replace(had_checkpoint_at=self.place))


class LocalCheckpoints(RunCheckpoints):
    """The checkpoints of a run in a directory that all machines share.

    Args:
        context: Core API's, to save; None = only to read.
    """

    place = "checkpoints"

    def __init__(self, path: Path, context: core.CheckpointContext | None = None) -> None:
        self.path = path
        self.transfers = path
        self._context = context

    def __str__(self) -> str:
        return str(self.path)

    def locate(self, name: str) -> DirectoryLocation:
        return DirectoryLocation(str((self.path / name).absolute()))

    def list_saved(
        self, parts: Collection[str] = PARTS
    ) -> tuple[list[SavedCheckpoint], dict[Location, CheckpointError]]:
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path}: is a symbolic link, which is not followed")
        saved: list[SavedCheckpoint] = []
        incomplete: dict[Location, CheckpointError] = {}
        if not self.path.is_dir():
            return saved, incomplete
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                location = self.locate(path.name)
                try:
                    saved.append(saved_checkpoint(path.name, location.read_manifest(parts)))
                except CheckpointError as error:
                    incomplete[location] = error
        return sorted(saved), incomplete

    def is_in_use(self) -> bool:
        with suppress(OSError):  # another user's
            return is_held(self.path.parent / "lock")
        return False

    def read_state(self) -> RunState:
        return read_state(self.path.parent)

    def write_state(self, state: RunState) -> None:
        write_state(self.path.parent, state)

    def has_manifest(self) -> bool:
        return any(self.path.glob(f"[!.]*/{MANIFEST}"))

    def require_lock(self) -> None:
        require_held(self.path.parent / "lock")

    @contextmanager
    def new_checkpoint(self, metadata: Mapping[str, Any], world: World) -> Iterator[NewCheckpoint]:  # noqa: ARG002
        assert self._context is not None
        with self._context.store_path(dict(metadata), shard=True) as (path, name):
            yield NewCheckpoint(path, name)

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        saved: list[SavedCheckpoint] = []
        if keep is not None:  # else there may be thousands
            saved, _ = self.list_saved()
        for entry in expired(saved, keep, damaged):
            discard(self.path / entry.name)
        # This run, which has the lock, is not saving.
        for path in list(self.path.glob("[!.]*/")):
            is_draft = (path / DRAFT).exists() or not any(path.iterdir())
            if is_draft and not path.is_symlink():
                discard(path)
        settle(self.path)

    def record_early(self, state: RunState) -> None:
        if not has_files(self.path.parent):
            self.write_state(state)

    def record_start(self, state: RunState, *, fresh: bool) -> None:
        begin_run(self.path.parent, state, fresh=fresh)


class ClusterCheckpoints(CheckpointStore):
    """The checkpoints of a trial, through Core API's checkpoint context, which reports them.

    Their names are UUIDs. Only those that this process saved and the one that it resumed from are
    counted.

    Args:
        latest: checkpoint from which the platform resumes, or forks, the trial.
        writes_in_place: the storage is a file system, to which ranks write without an upload.
    """

    shows_completion = False

    def __init__(
        self, context: core.CheckpointContext, latest: str | None, *, writes_in_place: bool
    ) -> None:
        self.writes_in_place = writes_in_place
        self._context = context
        self._latest = latest
        self._saved: list[SavedCheckpoint] = []

    def locate(self, name: str) -> Location:
        return ClusterLocation(name)

    def is_name(self, where: str) -> bool:
        return "/" not in where

    def list_saved(
        self,
        parts: Collection[str] = PARTS,  # noqa: ARG002
    ) -> tuple[list[SavedCheckpoint], dict[Location, CheckpointError]]:
        return sorted(self._saved), {}

    def was_committed(self) -> bool:
        return bool(self._saved)

    def find_candidates(self, parts: Collection[str], remedy: str) -> list[Location]:  # noqa: ARG002
        return [ClusterLocation(self._latest)] if self._latest else []

    def read_manifest(self, location: Location) -> Manifest:
        if not isinstance(location, ClusterLocation):
            return super().read_manifest(location)
        from determined.core import DownloadMode

        mode = DownloadMode.NoSharedDownload
        with self._context.restore_path(
            location.name, mode, selector=lambda name: name == MANIFEST
        ) as path:
            return read_manifest(path)

    def open(
        self, location: Location, world: World, parts: Collection[str]
    ) -> AbstractContextManager[Path]:
        if isinstance(location, ClusterLocation):
            return self._context.restore_path(location.name)
        return super().open(location, world, parts)

    @contextmanager
    def new_checkpoint(self, metadata: Mapping[str, Any], world: World) -> Iterator[NewCheckpoint]:  # noqa: ARG002
        if self.writes_in_place:
            with self._context.store_path(dict(metadata), shard=True) as (path, name):
                yield NewCheckpoint(path, name)
            return
        # `store_path` would report the checkpoint before all ranks have uploaded their files.
        with scratch(None) as directory:
            new = NewCheckpoint(Path(directory))
            yield new
            # Without a selector, directories on two nodes with equal device and inode are taken
            # for the same one.
            new.name = self._context.upload(
                directory, dict(metadata), shard=True, selector=lambda _: True
            )

    def add(self, location: Location, manifest: Manifest) -> None:
        if isinstance(location, ClusterLocation):
            self._saved.append(saved_checkpoint(location.name, manifest))

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        for entry in expired(self._saved, keep, damaged):
            self._context.delete(entry.name)
            self._saved.remove(entry)
