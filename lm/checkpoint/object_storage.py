"""Runs in object storage: checkpoints, metrics and the report are under one URL, to which one run at a time writes.

URL/checkpoints/UUID/       as on a disk; manifest.json is uploaded last, once all ranks have uploaded their files
URL/metrics.jsonl etc.      the files of runs/<run_name>/, uploaded before every manifest and at the end
URL/lease/NNNNNN            names the process that writes; the highest number counts

`ObjectStorage` is one of Determined's storage managers, so that its checkpoint context works here as on a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from lm.checkpoint.bucket import Bucket
from lm.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, check_sizes, parse_manifest
from lm.checkpoint.retention import COMMITTED, Directory, SavedCheckpoint, expired, saved_checkpoint
from lm.errors import ConfigError, RunError, naming, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, write_durably
from lm.runtime.run_dir import ASIDE, TRANSFER_PREFIX, RunDir, in_use, move_aside, this_process
from lm.runtime.world import World

LEASE_SECONDS = 60.0
"""After this time without a renewal, the holder of a lease counts as dead."""
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "sessions.jsonl", "tracker_id", "report.md", "report.png")


def is_url(where: str | Path) -> bool:
    """Return whether `where` is a URL instead of a path."""
    return "://" in str(where)


class ObjectStorage(storage.CloudStorageManager):
    """A run or a checkpoint in object storage, at `url`. Paths are relative to it.

    Methods raise what those of `Bucket` raise.
    """

    def __init__(self, url: str) -> None:
        super().__init__(tempfile.gettempdir())
        self.bucket = Bucket(url)
        self.url = self.bucket.url
        self._manifests: dict[str, bytes] = {}
        self._manifest = b""
        self._lease = ""  # its path
        self._run_dir: Path | None = None  # once its files are those of the storage
        self._closed = threading.Event()

    def locate(self, name: str) -> str:
        """Return the URL of a checkpoint of this run."""
        return f"{self.url}/checkpoints/{name}"

    def checkpoints(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each checkpoint."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.bucket.sizes("checkpoints").items():
            name, _, file = path.partition("/")
            if not name.startswith("."):
                found.setdefault(name, {})[file] = size
        return found

    def list_saved(self) -> tuple[list[SavedCheckpoint], dict[str, CheckpointError]]:
        """Return the complete checkpoints, oldest first, and the error of each incomplete one, by its URL."""
        saved: list[SavedCheckpoint] = []
        incomplete: dict[str, CheckpointError] = {}
        for name, sizes in sorted(self.checkpoints().items()):
            try:
                saved.append(saved_checkpoint(name, self._read(f"checkpoints/{name}/", sizes)))
            except CheckpointError as error:
                incomplete[self.locate(name)] = error
        return sorted(saved), incomplete

    def __str__(self) -> str:
        return f"{self.url}/checkpoints"

    def was_committed(self) -> bool:
        """Return whether a checkpoint of this run was ever complete."""
        return any(path == COMMITTED or path.endswith(MANIFEST) for path in self.bucket.sizes("checkpoints"))

    def read_manifest(self) -> Manifest:
        """Return the manifest of the checkpoint at `url`; see `manifest.read_manifest`."""
        return self._read("", self.bucket.sizes())

    def _read(self, path: str, sizes: Mapping[str, int]) -> Manifest:
        where, file, size = f"{self.url}/{path}".rstrip("/"), f"{path}{MANIFEST}", sizes.get(MANIFEST, 0)
        if not 0 < size <= MAX_JSON_BYTES:
            problem = f"{size:,} bytes, but at most {MAX_JSON_BYTES:,} are read" if size else "missing"
            raise CheckpointError(f"{where}: not a complete checkpoint, {MANIFEST}: {problem}")
        if file not in self._manifests:
            try:
                self._manifests[file] = self.bucket.call("cat_file", file)
            except FileNotFoundError:
                raise CheckpointError(f"{where}: deleted while it was read") from None
        manifest = parse_manifest(f"{where}/{MANIFEST}", self._manifests[file])
        check_sizes(where, manifest, sizes.__getitem__)
        return manifest

    def fetch_checkpoint(self, directory: Path) -> Path:
        """Download the checkpoint at `url` to the new directory `directory` and return it.

        Raises:
            CheckpointError: a file is missing, deleted meanwhile, or of another size; `verify` compares checksums.
        """
        manifest = self.read_manifest()
        needed, free = sum(entry.bytes for entry in manifest.files.values()), shutil.disk_usage(directory.parent).free
        if free < needed:
            remedy = "free disk space, or set TMPDIR to a larger disk"
            raise RunError(f"{directory}: disk full: the download needs {needed:,} bytes, {free:,} are free; {remedy}")
        directory.mkdir()
        try:
            self.bucket.transfer("get_file", ((name, str(directory / name)) for name in manifest.files))
        except FileNotFoundError:
            raise CheckpointError(f"{self.url}: deleted while it was read") from None
        (directory / MANIFEST).write_bytes(self._manifests[MANIFEST])
        return directory

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        """Delete the checkpoints that are `expired`, and those that were never completed."""
        gone = [entry.name for entry in expired(self.list_saved()[0], keep, damaged)]
        for name, sizes in self.checkpoints().items():
            if name in gone:  # from now on it is no checkpoint, even if deleting it is interrupted
                self.bucket.call("rm", [f"checkpoints/{name}/{MANIFEST}"])
                del self._manifests[f"checkpoints/{name}/{MANIFEST}"]
            if name in gone or MANIFEST not in sizes:
                self.bucket.call("rm", [f"checkpoints/{name}/{file}" for file in sizes if file != MANIFEST])

    def move_aside(self) -> None:
        """Move all files and checkpoints of the run to `before-<time>/`, here and on this machine's disk."""
        aside = time.strftime(ASIDE)
        if old := [path for path in self.bucket.sizes() if not path.startswith(("before-", "lease/"))]:
            if self.url.startswith("az:"):  # which copies after it has answered
                problem = "has files of an earlier run; choose another run_name"
                raise ConfigError(f"{self.url}: {problem}", keys=("run_name",))
            self.bucket.transfer("cp_file", ((path, f"{aside}/{path}") for path in old))
            self.bucket.call("rm", old)
        assert self._run_dir is not None
        move_aside(self._run_dir)

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Collection[str] | None = None) -> None:
        """Upload files of a checkpoint, except its manifest, which `commit` uploads."""
        files = sorted(paths or ())
        if MANIFEST in files:
            self._manifest = (Path(src) / MANIFEST).read_bytes()
            files.remove(MANIFEST)
        self.bucket.transfer("put_file", ((f"{os.fspath(src)}/{name}", f"checkpoints/{dst}/{name}") for name in files))

    def commit(self, name: str) -> None:
        """Complete a checkpoint whose files have all been uploaded."""
        self.require_lease()
        self.put_files()  # first, so that the metrics up to a complete checkpoint are never missing
        self.bucket.call("pipe_file", f"checkpoints/{name}/{MANIFEST}", self._manifest)
        self.bucket.call("pipe_file", f"checkpoints/{COMMITTED}", b"\n")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError  # `downloaded` loads checkpoints by their URL, and `prune` deletes them

    download = delete = _refuse

    @oserror_as_config_error
    def start(self, run_dir: Path) -> None:
        """Acquire the lease and download the run's files to `run_dir`, the working copy of this machine.

        The holder of a lease renews it. A lease is replaced if it is not renewed for `LEASE_SECONDS`, or if an earlier
        process in `run_dir`, which the caller has locked, held it: a conditional put creates the lease with the next
        number.

        Raises:
            RunError: another run has the lease.
        """
        if Directory(run_dir / "checkpoints").was_committed():
            remedy = f"use another run_name, with resume={run_dir} to continue from the newest"
            raise ConfigError(f"{run_dir}: has checkpoints on this disk; {remedy}", keys=("checkpoint_storage",))
        token_file = run_dir / "lease"
        former = token_file.read_text() if token_file.is_file() else None
        self._content = {"holder": this_process(), "token": uuid.uuid4().hex}
        number, first = self._last_lease()
        lease, deadline = first, time.monotonic() + LEASE_SECONDS
        if lease.get("holder") and lease["token"] != former:
            wait = f"waiting up to {LEASE_SECONDS:g} s to see whether it still runs"
            print(f"{self.url}: the last run was {lease['holder']}; {wait}", file=sys.stderr, flush=True)
        while lease.get("holder") and lease["token"] != former and time.monotonic() < deadline:
            if lease != first:
                raise in_use(self.url, lease.get("holder"))
            time.sleep(LEASE_SECONDS / 60)
            number, lease = self._last_lease()
        write_durably(token_file, self._content["token"].encode())
        self._lease = f"lease/{number + 1:06}"
        with suppress(FileExistsError):
            self._put_lease("create")
        self.require_lease()
        found = self.bucket.sizes()
        if old := [name for name in found if name.startswith("lease/") and name < self._lease]:
            self.bucket.call("rm", old)
        threading.Thread(target=self._renew, name="lease", daemon=True).start()
        for name in found.keys() & set(FILES):
            write_durably(run_dir / name, self.bucket.call("cat_file", name))
        self._run_dir = run_dir

    def _put_lease(self, mode: str = "overwrite") -> None:
        content = json.dumps(self._content | {"time": time.time()}).encode()
        self.bucket.call("pipe_file", self._lease, content, mode=mode)

    def _last_lease(self) -> tuple[int, dict[str, Any]]:
        number = max((int(name) for name in self.bucket.sizes("lease") if name.isdecimal()), default=0)
        with suppress(FileNotFoundError, ValueError):  # replaced meanwhile, or never complete
            return number, json.loads(self.bucket.call("cat_file", f"lease/{number:06}"))
        return number, {}

    def require_lease(self) -> None:
        """Raise RunError unless this process still has the lease."""
        _, lease = self._last_lease()
        if lease.get("token") != self._content["token"]:
            raise in_use(self.url, lease.get("holder"))

    def _renew(self) -> None:
        while not self._closed.wait(LEASE_SECONDS / 6):
            with suppress(RunError):  # the next one may succeed, and `commit` checks
                self._put_lease()

    def put_files(self) -> None:
        """Upload the files of the run."""
        assert self._run_dir is not None
        paths = [self._run_dir / name for name in FILES]
        self.bucket.transfer("put_file", ((str(path), path.name) for path in paths if path.is_file()))

    def close(self) -> None:
        """Upload the files of the run and release the lease, if this process has it."""
        if self._run_dir is None or self._closed.is_set():
            return
        self.require_lease()
        self.put_files()
        self._closed.set()
        self._content["holder"] = ""
        self._put_lease()

    def close_after_error(self) -> None:
        """Try to close, once: the metrics up to an error can explain it."""
        self.bucket.retry_seconds = 0
        with suppress(Exception):  # the lease expires
            self.close()


CheckpointStorage = Directory | ObjectStorage
"""Where the checkpoints of a run are, outside Determined."""


class ObjectStorageContext(core.DummyCheckpointContext):
    """Core API's checkpoint context outside Determined: reporting a checkpoint uploads its manifest."""

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:  # noqa: ARG002
        assert isinstance(self._storage_manager, ObjectStorage)
        self._storage_manager.commit(storage_id)


@contextmanager
def stored(run_dir: RunDir | None, context: core.Context, world: World, after_error: ExitStack) -> Iterator[None]:
    """Keep the checkpoints of `context` and the files of `run_dir` under its URL, if it has one.

    After a RunError, the files are uploaded by a callback of `after_error`, as the error must be printed first.
    """
    if run_dir is None or run_dir.url is None:
        yield
        return
    url = run_dir.url
    with naming("checkpoint_storage"):
        run_storage = world.all_or_none(lambda: ObjectStorage(url))
    context.checkpoint = ObjectStorageContext(context.distributed, run_storage)
    try:
        yield
    except RunError:
        if world.rank == 0:
            after_error.callback(run_storage.close_after_error)
        raise
    world.run_in_thread(lambda: run_storage.close() if world.rank == 0 else None)


@contextmanager
def downloaded(url: str, world: World, parent: Path | None) -> Iterator[Path]:
    """Yield a directory in `parent` with the checkpoint at `url`, downloaded once by each machine."""
    with tempfile.TemporaryDirectory(prefix=TRANSFER_PREFIX, dir=parent) as directory:
        path = Path(directory) / url.rpartition("/")[2]
        node, is_first = world.launch.node_rank, world.launch.local_rank == 0
        world.run_in_thread(lambda: ObjectStorage(url).fetch_checkpoint(path) if is_first else None)
        paths = dict(filter(None, world.all_gather_object((node, path) if is_first else None)))
        yield paths[node]
