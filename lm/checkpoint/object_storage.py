"""Runs in object storage: everything is under one URL, to which one run at a time writes.

URL/checkpoints/UUID/    as on a disk; manifest.json is uploaded last, after the files of all ranks
URL/metrics.jsonl etc.   files of runs/<run_name>/, uploaded before every manifest and at the end
URL/lease/NNNNNN         names the process that writes; the highest number counts
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.checkpoint.location import Location, UrlLocation
from lm.checkpoint.manifest import DRAFT, MANIFEST, PARTS, CheckpointError
from lm.checkpoint.retention import SavedCheckpoint, expired, saved_checkpoint
from lm.checkpoint.store import LocalCheckpoints, NewCheckpoint, RunCheckpoints
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import write_durably
from lm.runtime.run_state import (
    ASIDE,
    STATE,
    RunState,
    finish_move,
    has_files,
    parse_state,
    read_state,
    write_state,
)
from lm.storage.bucket import Bucket
from lm.storage.folder import scratch, settle
from lm.storage.lease import Lease, is_leased

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
        self.url = self.bucket.url
        self.place = str(self)
        self._run_dir = run_dir
        if run_dir is not None:
            self.transfers = run_dir / "checkpoints"
        self._lease: Lease | None = None
        self._manifests: dict[str, bytes] = {}

    def __str__(self) -> str:
        return f"{self.url}/checkpoints"

    def locate(self, name: str) -> UrlLocation:
        return UrlLocation(f"{self.url}/checkpoints/{name}")

    def files(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each checkpoint, complete or not."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.bucket.sizes("checkpoints").items():
            name, _, file = path.partition("/")
            if not name.startswith("."):
                found.setdefault(name, {})[file] = size
        return found

    def list_saved(
        self, parts: Collection[str] = PARTS
    ) -> tuple[list[SavedCheckpoint], dict[Location, CheckpointError]]:
        saved: list[SavedCheckpoint] = []
        incomplete: dict[Location, CheckpointError] = {}
        for name, sizes in sorted(self.files().items()):
            try:
                read = partial(self._read_manifest, name)
                manifest = self.locate(name).parse_checked(sizes, read, parts)
                saved.append(saved_checkpoint(name, manifest))
            except CheckpointError as error:
                incomplete[self.locate(name)] = error
        return sorted(saved), incomplete

    def _read_manifest(self, name: str) -> bytes:
        if name not in self._manifests:
            self._manifests[name] = self.bucket.read(f"checkpoints/{name}/{MANIFEST}")
        return self._manifests[name]

    def is_in_use(self) -> bool:
        return is_leased(self.bucket)

    def has_manifest(self) -> bool:
        return any(MANIFEST in sizes for sizes in self.files().values())

    def read_state(self) -> RunState:
        """Return the state in the bucket, or else that of this machine's working copy."""
        with suppress(FileNotFoundError):
            return parse_state(f"{self.url}/{STATE}", self.bucket.read(STATE))
        if self._run_dir is None:
            return RunState()
        return read_state(self._run_dir)

    def write_state(self, state: RunState) -> None:
        assert self._run_dir is not None
        write_state(self._run_dir, state)
        self.bucket.upload([STATE], self._run_dir)

    # The run that writes

    def start(self, world: World) -> None:
        world.run_in_thread(self.files)  # every machine can read
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
        if LocalCheckpoints(self._run_dir / "checkpoints").was_committed():
            problem = f"{self._run_dir}: has checkpoints on this disk"
            remedy = (
                f"use another run_name, with resume={self._run_dir} to continue from the newest"
            )
            raise ConfigError(f"{problem}, but checkpoint_storage is {self.url}; {remedy}")
        lease = Lease(self.bucket, self._run_dir / "lease")
        self._finish_move()
        for name in self.bucket.sizes().keys() & set(RUN_FILES):
            write_durably(self._run_dir / name, self.bucket.read(name))
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

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        saved, _ = self.list_saved()
        gone = [entry.name for entry in expired(saved, keep, damaged)]
        for name, sizes in self.files().items():
            if name in gone:  # from now on it is no checkpoint, even if deleting it is interrupted
                self.bucket.delete([f"checkpoints/{name}/{MANIFEST}"])
                del self._manifests[name]
            if name in gone or MANIFEST not in sizes:
                files = [file for file in sizes if file != MANIFEST]
                self.bucket.delete([f"checkpoints/{name}/{file}" for file in files])

    def record_early(self, state: RunState) -> None:
        assert self._run_dir is not None
        if not self._movable() and not has_files(self._run_dir):
            self.write_state(state)

    def record_start(self, state: RunState, *, fresh: bool) -> None:
        """Record a start, and if `fresh` move the files of earlier runs here and on this disk."""
        assert self._run_dir is not None
        is_stored = len(self._movable()) > 0
        if fresh and is_stored and self.url.startswith("az:"):  # which copies after it has answered
            raise ConfigError(
                f"run_name: {self.url} has files of an earlier run; choose another run_name"
            )
        if fresh and (is_stored or has_files(self._run_dir)):
            aside = time.strftime(ASIDE)
            if STATE in self.bucket.sizes():
                self.bucket.copy([STATE], f"{aside}/")
            url, _, name = (state.resumed_from or "").rpartition("/")
            if url == str(self):
                state = state.replace(resumed_from=f"{self.url}/{aside}/checkpoints/{name}")
            state = state.replace(moving_to=aside)
        self.write_state(state)
        self._finish_move()

    def _finish_move(self) -> None:
        """Move aside what the state in the bucket says, also after a kill; see `finish_move`."""
        assert self._run_dir is not None
        state = self.read_state()
        if state.moving_to is None:
            return
        old = self._movable()
        if old:
            self.bucket.copy(old, f"{state.moving_to}/")
            self.bucket.delete(old)
        write_state(self._run_dir, state)  # the machine that has begun may be another one
        finish_move(self._run_dir)
        self.write_state(state.replace(moving_to=None))

    def _movable(self) -> list[str]:
        stays = ("before-", "lease/", STATE)
        return [path for path in self.bucket.sizes() if not path.startswith(stays)]

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
