"""Where a checkpoint is: in a directory, at a URL, or in a cluster's storage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm.checkpoint.layout import require_sizes_of_model
from lm.checkpoint.manifest import (
    MANIFEST,
    PARTS,
    WEIGHTS,
    CheckpointError,
    Manifest,
    NoManifestError,
    check_files,
    check_sizes,
    parse_manifest,
    read_manifest,
)
from lm.errors import RunError
from lm.fileio import MAX_JSON_BYTES
from lm.storage.bucket import Bucket, is_url
from lm.storage.folder import scratch

if TYPE_CHECKING:
    from lm.runtime.world import World


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is: one of the three classes below."""

    where: str

    def __str__(self) -> str:
        return self.where

    @property
    def name(self) -> str:
        """UUID, unless a user has renamed it."""
        return self.where.rpartition("/")[2]


class ClusterLocation(Location):
    """A UUID of a checkpoint in a cluster's storage, which only the trial's store can open."""


class DirectoryLocation(Location):
    """The absolute path of a directory. Methods are those of `UrlLocation`."""

    @property
    def path(self) -> Path:
        return Path(self.where)

    def list_files(self) -> list[str]:
        return [path.name for path in self.path.iterdir()]

    def read_manifest(self, parts: Collection[str] = WEIGHTS) -> Manifest:
        manifest = read_manifest(self.path)
        check_files(self.path, manifest, parts)
        return manifest

    def fetch(self, _parts: Collection[str] = PARTS) -> AbstractContextManager[Path]:
        return nullcontext(self.path)

    def open(
        self, _world: World, _transfers: Path | None, _parts: Collection[str]
    ) -> AbstractContextManager[Path]:
        return nullcontext(self.path)


class UrlLocation(Location):
    """A URL of a checkpoint in object storage, which is downloaded to be read."""

    def list_files(self) -> list[str]:
        """Return the names of the files."""
        return list(Bucket(self.where).sizes())

    def read_manifest(self, parts: Collection[str] = WEIGHTS) -> Manifest:
        """Return the manifest, if the files of `parts` have the sizes that it says."""
        bucket = Bucket(self.where)
        return self.parse_checked(bucket.sizes(), lambda: bucket.read(MANIFEST), parts)

    def parse_checked(
        self, sizes: Mapping[str, int], read: Callable[[], bytes], parts: Collection[str]
    ) -> Manifest:
        """Return the manifest, if the files of `parts` have the sizes that it says.

        Args:
            sizes: of the files, by name.
            read: returns the content of the manifest.
        """
        size = sizes.get(MANIFEST, 0)
        if size == 0:
            raise NoManifestError(f"{self}: not a complete checkpoint, {MANIFEST}: missing")
        if size > MAX_JSON_BYTES:
            problem = f"{size:,} bytes, but at most {MAX_JSON_BYTES:,} are read"
            raise CheckpointError(f"{self}: not a complete checkpoint, {MANIFEST}: {problem}")
        try:
            content = read()
        except FileNotFoundError:
            raise CheckpointError(f"{self}: deleted while it was read") from None
        manifest = parse_manifest(f"{self}/{MANIFEST}", content)
        check_sizes(self.where, manifest, sizes.__getitem__, parts)
        return manifest

    @contextmanager
    def fetch(self, parts: Collection[str] = PARTS) -> Iterator[Path]:
        """Yield a directory with `parts` of the checkpoint: a copy, which is deleted at the end."""
        with scratch(None) as directory:
            yield self.download(Path(directory) / self.name, parts)

    def download(self, directory: Path, parts: Collection[str] = PARTS) -> Path:
        """Download `parts` of the checkpoint to the new directory `directory` and return it.

        Raises:
            CheckpointError: a file is missing, deleted meanwhile, or of another size than recorded
                or than its model can need; `verify` checks the rest.
        """
        manifest = self.read_manifest(parts)
        require_sizes_of_model(self.where, manifest)
        files = manifest.files_of(parts)
        needed = sum(entry.bytes for entry in files.values())
        free = shutil.disk_usage(directory.parent).free
        if free < needed:
            remedy = "free disk space, or set TMPDIR to a larger disk"
            problem = f"disk full: the download needs {needed:,} bytes, {free:,} are free"
            raise RunError(f"{directory}: {problem}; {remedy}")
        directory.mkdir()
        try:
            Bucket(self.where).download([*files, MANIFEST], directory)
        except FileNotFoundError:
            raise CheckpointError(f"{self}: deleted while it was read") from None
        return directory

    @contextmanager
    def open(self, world: World, transfers: Path | None, parts: Collection[str]) -> Iterator[Path]:
        """Yield a directory with `parts` of the checkpoint, on all ranks together.

        Args:
            transfers: where downloads have directories; None = the system's temporary directory.
        """
        with scratch(transfers) as directory:
            path = Path(directory) / self.name
            world.run_in_thread_on_each_node(self.download, path, parts)
            launch = world.launch
            paths = dict(world.all_gather_object(((launch.node_rank, launch.local_rank), path)))
            yield paths[launch.node_rank, 0]


PlainLocation = DirectoryLocation | UrlLocation
"""What can be read without the store of its run."""


def parse_location(where: Path | str) -> PlainLocation:
    """Return what a user names by a path or a URL: a checkpoint, or else a run."""
    if is_url(where):
        return UrlLocation(str(where).rstrip("/"))
    return DirectoryLocation(str(Path(where).absolute()))
