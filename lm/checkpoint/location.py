"""Where a checkpoint is: in a directory, at a URL, or in a cluster's storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
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
    check_files,
    read_manifest,
)
from lm.storage.bucket import Bucket, is_url
from lm.storage.folder import require_space, scratch
from lm.storage.place import Place, place_at

if TYPE_CHECKING:
    from lm.runtime.world import World


@dataclass(frozen=True)
class Location:
    """The absolute path of a checkpoint's directory, or its URL in object storage."""

    where: str

    def __str__(self) -> str:
        return self.where

    @property
    def name(self) -> str:
        """UUID, unless a user has renamed it."""
        return self.where.rpartition("/")[2]

    @property
    def path(self) -> Path | None:
        """The directory; None = it has to be downloaded."""
        return None if is_url(self.where) else Path(self.where)

    def open_place(self) -> Place:
        """Return its files. Not kept: ranks send locations, and a bucket has credentials."""
        return place_at(self.where)

    def read_manifest(self, parts: Collection[str] = WEIGHTS) -> Manifest:
        """Return the manifest, if the files of `parts` have the sizes that it says."""
        place = self.open_place()
        manifest = read_manifest(place)
        check_files(place, manifest, parts)
        return manifest

    @contextmanager
    def fetch(self, parts: Collection[str] = PARTS) -> Iterator[Path]:
        """Yield a directory with `parts` of the checkpoint; a copy is deleted at the end."""
        if self.path is not None:
            yield self.path
            return
        with scratch(None) as directory:
            yield self.download(Path(directory) / self.name, parts)

    def download(self, directory: Path, parts: Collection[str] = PARTS) -> Path:
        """Download `parts` of the checkpoint to the new directory `directory` and return it.

        Raises:
            CheckpointError: a file is missing, deleted meanwhile, or of another size than recorded,
                or the weights are smaller than their model; `verify` checks the rest.
        """
        manifest = self.read_manifest(parts)
        require_sizes_of_model(self.where, manifest)
        files = manifest.files_of(parts)
        needed = sum(entry.bytes for entry in files.values())
        require_space(directory.parent, needed, "free space, or set TMPDIR to a larger disk")
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
        if self.path is not None:
            yield self.path
            return
        with scratch(transfers) as directory:
            path = Path(directory) / self.name
            world.run_in_thread_on_each_node(self.download, path, parts)
            launch = world.launch
            paths = dict(world.all_gather_object(((launch.node_rank, launch.local_rank), path)))
            yield paths[launch.node_rank, 0]


class ClusterLocation(Location):
    """A UUID of a checkpoint in a cluster's storage, which only the trial's store can open."""

    @property
    def path(self) -> None:
        return None


def parse_location(where: Path | str) -> Location:
    """Return what a user names by a path or a URL: a checkpoint, or else a run."""
    if is_url(where):
        return Location(str(where).rstrip("/"))
    return Location(str(Path(where).absolute()))
