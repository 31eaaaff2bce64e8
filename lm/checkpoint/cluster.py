"""The checkpoints of a trial in a cluster's storage, and the choice of a run's store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import determined as det
from determined import core

from lm.checkpoint.location import ClusterLocation, Location
from lm.checkpoint.manifest import MANIFEST, PARTS, CheckpointError, Manifest, read_manifest
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import (
    CheckpointStore,
    LocalCheckpoints,
    NewCheckpoint,
    SavedCheckpoint,
    expired,
)
from lm.determined import master
from lm.errors import error_prefix
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from lm.storage.folder import scratch


def open_store(
    context: core.CheckpointContext,
    trial: det.ClusterInfo | None,
    run_dir: RunDir | None,
    world: World,
) -> CheckpointStore:
    """Return where checkpoints are: in a cluster's storage, in a bucket, on a disk.

    Args:
        trial: on a cluster.
        run_dir: off the cluster.
    """
    if trial is not None:
        in_place = master.storage_is_file_system(trial)
        return ClusterCheckpoints(context, trial.latest_checkpoint, writes_in_place=in_place)
    assert run_dir is not None
    if run_dir.url is None:
        return LocalCheckpoints(run_dir.checkpoints, context)
    with error_prefix("checkpoint_storage"), world.all_or_none():
        return BucketCheckpoints(run_dir.url, run_dir.path)


class ClusterCheckpoints(CheckpointStore):
    """The checkpoints of a trial, through Core API's checkpoint context, which reports them.

    Their names are UUIDs. Only those that this process saved, and the one of this trial that it
    resumed from, are counted.

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
        return self._saved, {}

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
            self._saved.append(SavedCheckpoint(location.name, manifest))

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        if keep is None:
            del self._saved[:-1]  # none is deleted, and their manifests take memory
        for entry in expired(self._saved, keep, damaged):
            self._context.delete(entry.name)
            self._saved.remove(entry)
