"""Checkpoints at URLs, which are downloaded to be read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lm.checkpoint.bucket import Bucket
from lm.checkpoint.layout import require_sizes_of_model
from lm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NoManifestError,
    check_sizes,
    parse_manifest,
)
from lm.errors import RunError
from lm.fileio import MAX_JSON_BYTES
from lm.runtime.run_dir import TRANSFER_PREFIX

if TYPE_CHECKING:
    from lm.runtime.world import World


def read_manifest(url: str) -> Manifest:
    """Return the manifest of the checkpoint at `url`; see `manifest.read_manifest`."""
    bucket = Bucket(url)
    return parse_checked(url, bucket.sizes(), lambda: bucket.read(MANIFEST))


def parse_checked(url: str, sizes: Mapping[str, int], read: Callable[[], bytes]) -> Manifest:
    """Return the manifest of the checkpoint at `url`, which has files of these `sizes`, by name.

    Args:
        read: returns the content of the manifest.
    """
    size = sizes.get(MANIFEST, 0)
    if size == 0:
        raise NoManifestError(f"{url}: not a complete checkpoint, {MANIFEST}: missing")
    if size > MAX_JSON_BYTES:
        problem = f"{size:,} bytes, but at most {MAX_JSON_BYTES:,} are read"
        raise CheckpointError(f"{url}: not a complete checkpoint, {MANIFEST}: {problem}")
    try:
        content = read()
    except FileNotFoundError:
        raise CheckpointError(f"{url}: deleted while it was read") from None
    manifest = parse_manifest(f"{url}/{MANIFEST}", content)
    check_sizes(url, manifest, sizes.__getitem__)
    return manifest


def download(url: str, directory: Path) -> Path:
    """Download the checkpoint at `url` to the new directory `directory` and return it.

    Raises:
        CheckpointError: a file is missing, deleted meanwhile, or of another size than recorded or
            than its model can need; `verify` checks the rest.
    """
    manifest = read_manifest(url)
    require_sizes_of_model(url, manifest)
    needed = sum(entry.bytes for entry in manifest.files.values())
    free = shutil.disk_usage(directory.parent).free
    if free < needed:
        remedy = "free disk space, or set TMPDIR to a larger disk"
        problem = f"disk full: the download needs {needed:,} bytes, {free:,} are free"
        raise RunError(f"{directory}: {problem}; {remedy}")
    directory.mkdir()
    try:
        Bucket(url).download([*manifest.files, MANIFEST], directory)
    except FileNotFoundError:
        raise CheckpointError(f"{url}: deleted while it was read") from None
    return directory


@contextmanager
def downloaded(url: str, world: World, parent: Path | None) -> Iterator[Path]:
    """Yield a directory in `parent` with the checkpoint at `url`, downloaded once per machine."""
    with tempfile.TemporaryDirectory(prefix=TRANSFER_PREFIX, dir=parent) as directory:
        path = Path(directory) / url.rpartition("/")[2]
        world.run_in_thread_on_each_node(download, url, path)
        launch = world.launch
        paths = dict(world.all_gather_object(((launch.node_rank, launch.local_rank), path)))
        yield paths[launch.node_rank, 0]
