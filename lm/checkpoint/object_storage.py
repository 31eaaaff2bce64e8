"""Runs in object storage: everything is under one URL, to which one run at a time writes.

URL/checkpoints/UUID/    as on a disk; manifest.json is uploaded last, after the files of all ranks
URL/metrics.jsonl etc.   files of runs/<run_name>/, uploaded before every manifest and at the end
URL/lease/NNNNNN         names the process that writes; the highest number counts
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.checkpoint.store import NewCheckpoint, RunCheckpoints
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import write_durably
from lm.runtime.run_state import STATE, finish_move
from lm.storage.bucket import Bucket
from lm.storage.folder import DRAFT, MANIFEST, scratch, settle
from lm.storage.lease import Lease
from lm.storage.place import Directory

if TYPE_CHECKING:
    from lm.runtime.world import World


RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "checkpoints.jsonl",
    "sessions.jsonl",
    "tracker_id",
    STATE,
    "report.md",
    "report.png",
)


class BucketCheckpoints(RunCheckpoints):
    """The checkpoints and the files of a run in object storage, at `url`.

    Methods raise what those of `Bucket` raise.

    Args:
        run_dir: the working copy of this machine, which has the files on rank 0; None = only to
            read checkpoints.
    """

    writes_in_place = False

    def __init__(self, url: str, run_dir: Path | None = None) -> None:
        self.bucket = Bucket(url)
        super().__init__(self.bucket)
        self._run_dir = run_dir
        if run_dir is not None:
            self.places = [self.bucket, Directory(run_dir)]
            self.transfers = run_dir / "checkpoints"
        self._lease: Lease | None = None

    # The run that writes

    def start(self, world: World) -> None:
        world.run_in_thread(self.folders)  # every machine can read
        world.run_in_thread_on_rank0(self.acquire)
        assert self.transfers is not None
        with world.all_or_none():
            settle(self.transfers)

    @oserror_as_config_error
    def acquire(self) -> None:
        """Acquire the lease and download the run's files to this machine, on rank 0.

        Raises:
            RunError: another run has the lease.
        """
        assert self._run_dir is not None
        on_disk = Directory(self._run_dir).folders("checkpoints")
        if any(MANIFEST in files for files in on_disk.values()):
            problem = f"{self._run_dir}: has checkpoints on this disk"
            remedy = (
                f"use another run_name, with resume={self._run_dir} to continue from the newest"
            )
            raise ConfigError(f"{problem}, but checkpoint_storage is {self.bucket.url}; {remedy}")
        lease = Lease(self.bucket, self._run_dir / "lease")
        finish_move(self.places)
        sizes = self.bucket.sizes()
        for name in sizes.keys() & set(RUN_FILES):  # of any length, e.g. of many reports
            write_durably(self._run_dir / name, self.bucket.read(name, sizes[name]))
        # Only now: `release` uploads the run's files, which have to be those of the bucket.
        self._lease = lease

    @contextmanager
    def new_checkpoint(self, metadata: Mapping[str, Any], world: World) -> Iterator[NewCheckpoint]:
        name = str(world.on_rank0(uuid.uuid4))
        with scratch(self.transfers) as directory:
            path = Path(directory)
            yield NewCheckpoint(path, name)
            if world.rank == 0:
                (path / "metadata.json").write_text(json.dumps(metadata))  # as Core API
            draft = f"checkpoints/{name}/{DRAFT}"
            world.run_in_thread_on_rank0(self.bucket.write, draft, b"")
            world.run_in_thread(self._upload, path, name)
            world.run_in_thread_on_rank0(self.commit, path, name)

    def _upload(self, path: Path, name: str) -> None:
        files = [file.name for file in path.iterdir() if file.name not in (MANIFEST, DRAFT)]
        self.bucket.upload(files, path, f"checkpoints/{name}/")

    def commit(self, path: Path, name: str) -> None:
        """Complete a checkpoint whose files have all been uploaded, on rank 0."""
        assert self._lease is not None
        self._lease.require()
        self._put_run_files()  # first: a complete checkpoint never lacks the metrics up to it
        self.bucket.upload([MANIFEST], path, f"checkpoints/{name}/")
        self.bucket.delete([f"checkpoints/{name}/{DRAFT}"])

    def _put_run_files(self) -> None:
        assert self._run_dir is not None
        existing = [name for name in RUN_FILES if (self._run_dir / name).is_file()]
        self.bucket.upload(existing, self._run_dir)

    def close(self, world: World) -> None:
        world.run_in_thread(self.release)

    def release(self) -> None:
        """Upload the files of the run and release the lease, if this process holds it."""
        if self._lease is not None and not self._lease.is_released:
            self._lease.require()
            self._put_run_files()
            self._lease.release()

    def close_after_error(self) -> None:
        self.bucket.retry_for(0.0)
        with suppress(Exception):  # the lease expires
            self.release()
