"""Runs in object storage: checkpoints, metrics and the report are under one URL, to which one run at a time writes.

URL/checkpoints/UUID/       as on a disk; manifest.json is put last, once all ranks have put their files
URL/metrics.jsonl etc.      the files of runs/<run_name>/, put before every manifest and at the end
URL/lease/NNNNNN            says which process writes; the highest number counts

Lists, transfers and conditional puts are fsspec's, with s3fs, gcsfs or adlfs. `ObjectStorage` is one of Determined's
storage managers, so that its checkpoint context works here as on a cluster.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from lm.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, check_sizes, parse_manifest
from lm.checkpoint.retention import COMMITTED, Directory, SavedCheckpoint, expired, saved_checkpoint
from lm.errors import ConfigError, RunError
from lm.fileio import MAX_JSON_BYTES, write_durably
from lm.runtime.run_dir import TRANSFER_PREFIX, RunDir
from lm.runtime.world import World

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
RETRY_SECONDS = 120.0
"""How long a failing request is repeated."""
REQUEST_SECONDS = 30.0
"""Longest wait for an answer."""
MIN_UPLOAD_RATE = 1 << 20
"""Bytes per second; the slower upload of a file is repeated."""
LEASE_SECONDS = 60.0
"""After this time without a renewal, the holder of a lease counts as dead."""
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "sessions.jsonl", "tracker_id", "report.md", "report.png")
MAX_TRANSFERS = 4
"""Files that a process transfers at the same time, each in parts."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}},
    "gs": {"requests_timeout": 60},
}
_PERMANENT = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT)


def is_url(where: str | Path) -> bool:
    """Return whether `where` is a URL instead of a path."""
    return "://" in str(where)


class ObjectStorage(storage.CloudStorageManager):
    """A run or a checkpoint in object storage, at `url`. Paths are relative to it.

    Methods raise ConfigError if access is denied or the bucket is missing, RunError if the server fails for too long.
    """

    def __init__(self, url: str) -> None:
        super().__init__(tempfile.gettempdir())
        self.url = url.rstrip("/")
        scheme, _, self._root = self.url.partition("://")
        if scheme not in PACKAGES or not re.fullmatch(r"[\w.-]+(/[\w.=+-]+)*", self._root):
            near = difflib.get_close_matches(scheme.lower(), PACKAGES, 1, 0.5)
            hint = f"; did you mean {near[0]}://?" if near and near[0] != scheme else ""
            kinds = " or ".join(f"{known}://BUCKET/PREFIX" for known in PACKAGES)
            shown = f"{scheme}://..." if self._root else "this"  # without what may be a password
            problem = f"{shown} is not of the form {kinds} with only letters, digits and . _ - = +{hint}"
            raise ConfigError(f"checkpoint_storage: {problem}", keys=("checkpoint_storage",))
        import fsspec

        try:
            self._fs = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        except ImportError:
            raise ConfigError(f"{self.url}: requires a package: pip install {PACKAGES[scheme]}") from None
        except Exception as error:
            raise self._denied(error) from None
        self.retry_seconds = RETRY_SECONDS
        self._manifests: dict[str, bytes] = {}
        self._manifest = b""
        self._lease = ""  # its path, once held
        self._closed = threading.Event()

    def _denied(self, error: Exception) -> ConfigError:
        advice = "log in, or set this storage's credentials in the environment, and check their permissions"
        return ConfigError(f"{self.url}: access denied ({_first_line(error)}); {advice}", keys=("checkpoint_storage",))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of fsspec's file system; if the server fails, again."""
        deadline, pause = None, 1.0  # of the retries
        # Without a timeout, some requests wait without end for an answer to "Expect: 100-continue".
        if method not in ("get_file", "cp_file"):  # how long these take is unknown
            size = Path(args[0]).stat().st_size if method == "put_file" else 0
            options["timeout"] = REQUEST_SECONDS + size / MIN_UPLOAD_RATE
        while True:
            try:
                return getattr(self._fs, method)(*args, **options)
            except FileExistsError:
                raise
            except FileNotFoundError as error:
                if method == "cat_file":
                    raise
                if method == "rm":
                    return None
                problem = f"{_first_line(error)}; create the bucket, or use another checkpoint_storage"
                raise ConfigError(f"{self.url}: {problem}", keys=("checkpoint_storage",)) from None
            except Exception as error:
                is_denied = isinstance(error, PermissionError) or getattr(error, "code", 0) in (401, 403)
                if is_denied or "Credential" in type(error).__name__:
                    raise self._denied(error) from None
                if getattr(error, "errno", None) in _PERMANENT:
                    raise ConfigError(f"{self.url}: {method} failed ({_first_line(error)})") from None
                deadline = deadline or time.monotonic() + self.retry_seconds
                if time.monotonic() + pause > deadline:
                    problem = f"{method} failed for {self.retry_seconds:g} s ({_first_line(error)})"
                    raise RunError(f"{self.url}: {problem}; check the network and the server") from None
                if pause == 1:
                    line = f"{self.url}: {method} failed ({_first_line(error)}), retrying for {self.retry_seconds:g} s"
                    print(line, file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 15)

    def _transfer(self, method: str, pairs: Iterable[tuple[str, str]]) -> None:
        with ThreadPoolExecutor(MAX_TRANSFERS) as pool:
            list(pool.map(lambda pair: self._call(method, *pair), pairs))

    def _list(self, path: str = "") -> dict[str, int]:
        """Return the sizes of the files under `path`, by their paths relative to it."""
        prefix = f"{self._at(path)}/"
        found = self._call("find", prefix, detail=True)
        return {name.removeprefix(prefix): info["size"] for name, info in found.items() if name.startswith(prefix)}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def locate(self, name: str) -> str:
        """Return the URL of a checkpoint of this run."""
        return f"{self.url}/checkpoints/{name}"

    def checkpoints(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each checkpoint."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self._list("checkpoints").items():
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
                saved.append(saved_checkpoint(name, self._read(f"checkpoints/{name}", sizes)))
            except CheckpointError as error:
                incomplete[self.locate(name)] = error
        return sorted(saved), incomplete

    def __str__(self) -> str:
        return f"{self.url}/checkpoints"

    def has_checkpoints(self) -> bool:
        """Return whether a run with checkpoints is at `url`; raise if the storage cannot be read."""
        return bool(self._list("checkpoints"))

    def was_committed(self) -> bool:
        """Return whether a checkpoint of this run was ever complete."""
        return any(path == COMMITTED or path.endswith(MANIFEST) for path in self._list("checkpoints"))

    def read_manifest(self) -> Manifest:
        """Return the manifest of the checkpoint at `url`; see `manifest.read_manifest`."""
        return self._read("", self._list())

    def _read(self, path: str, sizes: Mapping[str, int]) -> Manifest:
        where, file = f"{self.url}/{path}".rstrip("/"), self._at(f"{path}/{MANIFEST}".lstrip("/"))
        if not 0 < sizes.get(MANIFEST, 0) <= MAX_JSON_BYTES:
            raise CheckpointError(f"{where}: not a complete checkpoint, {MANIFEST}: missing, or too large")
        if file not in self._manifests:
            self._manifests[file] = self._call("cat_file", file)
        manifest = parse_manifest(f"{where}/{MANIFEST}", self._manifests[file])
        check_sizes(where, manifest, sizes.__getitem__)
        return manifest

    def fetch_checkpoint(self, folder: Path) -> Path:
        """Download the checkpoint at `url` to the new directory `folder` and return it.

        Raises:
            CheckpointError: a file is missing or has another size; checksums are compared by `verify`.
        """
        manifest = self.read_manifest()
        needed, free = sum(entry.bytes for entry in manifest.files.values()), shutil.disk_usage(folder.parent).free
        if free < needed:
            remedy = "free disk space, or set TMPDIR to a larger disk"
            raise RunError(f"{folder}: disk full: the download needs {needed:,} bytes, {free:,} are free; {remedy}")
        folder.mkdir()
        self._transfer("get_file", ((self._at(name), str(folder / name)) for name in manifest.files))
        (folder / MANIFEST).write_bytes(self._manifests[self._at(MANIFEST)])
        return folder

    def prune(self, keep: int | None, damaged: Collection[str]) -> None:
        """Delete the checkpoints that are `expired`, and those that were never completed."""
        saved, _ = self.list_saved()
        gone = [entry.name for entry in expired(saved, keep, damaged)]
        for name, sizes in self.checkpoints().items():
            if name in gone or MANIFEST not in sizes:
                files = [self._at(f"checkpoints/{name}/{file}") for file in sizes if file != MANIFEST]
                if name in gone:  # from now on it is no checkpoint, even if deleting it is interrupted
                    self._call("rm", [self._at(f"checkpoints/{name}/{MANIFEST}")])
                self._call("rm", files)

    def move_aside(self) -> None:
        """Move all files and checkpoints of the run to `before-<time>/`."""
        aside = time.strftime("before-%Y%m%d-%H%M%S")
        old = [path for path in self._list() if not path.startswith(("before-", "lease/"))]
        if old and self.url.startswith("az:"):  # which copies after it has answered
            raise ConfigError(f"{self.url}: has files of an earlier run; choose another run_name", keys=("run_name",))
        self._transfer("cp_file", ((self._at(path), self._at(f"{aside}/{path}")) for path in old))
        if old:
            self._call("rm", [self._at(path) for path in old])

    # ---- Determined's storage manager --------------------------------------------------------------------------------

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Collection[str] | None = None) -> None:
        """Put files of a checkpoint, except its manifest, which `commit` puts."""
        files = sorted(paths or ())
        if MANIFEST in files:
            self._manifest = (Path(src) / MANIFEST).read_bytes()
            files.remove(MANIFEST)
        folder = self._at(f"checkpoints/{dst}")
        self._transfer("put_file", ((f"{os.fspath(src)}/{name}", f"{folder}/{name}") for name in files))

    def commit(self, name: str) -> None:
        """Complete a checkpoint whose files have all been put."""
        self.require_lease()
        self.put_files()  # first, so that the metrics up to a complete checkpoint are never missing
        self._call("pipe_file", self._at(f"checkpoints/{name}/{MANIFEST}"), self._manifest)
        self._call("pipe_file", self._at(f"checkpoints/{COMMITTED}"), b"\n")

    def download(self, src: str, dst: str | os.PathLike[str], selector: Callable[[str], bool] | None = None) -> None:
        """Refuse: `downloaded` loads checkpoints by their URL."""
        raise NotImplementedError

    def delete(self, tgt: str, globs: list[str]) -> dict[str, int]:
        """Refuse: `prune` deletes checkpoints."""
        raise NotImplementedError

    # ---- files and lease of a run ------------------------------------------------------------------------------------

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
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._content = {"holder": f"process {os.getpid()} on {socket.gethostname()} since {since}"}
        self._content |= {"token": uuid.uuid4().hex}
        number, first = self._last_lease()
        lease, deadline = first, time.monotonic() + LEASE_SECONDS
        if lease.get("holder") and lease["token"] != former:
            wait = f"waiting up to {LEASE_SECONDS:g} s to see whether it still runs"
            print(f"{self.url}: the last run was {lease['holder']}; {wait}", file=sys.stderr, flush=True)
        while lease.get("holder") and lease["token"] != former and time.monotonic() < deadline:
            if lease != first:
                raise self._in_use(lease)
            time.sleep(LEASE_SECONDS / 60)
            number, lease = self._last_lease()
        write_durably(token_file, self._content["token"].encode())
        path = self._at(f"lease/{number + 1:06}")
        with suppress(FileExistsError):
            self._call("pipe_file", path, self._encode(0), mode="create")
        self._lease = path
        self.require_lease()
        if old := [self._at(f"lease/{name}") for name in self._list("lease") if int(name) <= number]:
            self._call("rm", old)
        threading.Thread(target=self._renew, name="lease", daemon=True).start()
        for name in self._list().keys() & set(FILES):
            write_durably(run_dir / name, self._call("cat_file", self._at(name)))
        self._run_dir = run_dir

    def _encode(self, renewals: int) -> bytes:
        return json.dumps(self._content | {"renewals": renewals}).encode()

    def _last_lease(self) -> tuple[int, dict[str, Any]]:
        number = max((int(name) for name in self._list("lease") if name.isdecimal()), default=0)
        with suppress(FileNotFoundError, ValueError):  # replaced meanwhile, or never complete
            return number, json.loads(self._call("cat_file", self._at(f"lease/{number:06}")))
        return number, {}

    def _in_use(self, lease: Mapping[str, Any]) -> RunError:
        advice = "wait until it ends, stop it, or choose another run_name"
        return RunError(f"{self.url}: in use by {lease.get('holder')}; {advice}", keys=("run_name",))

    def require_lease(self) -> None:
        """Raise RunError unless this process still has the lease."""
        _, lease = self._last_lease()
        if lease.get("token") != self._content["token"]:
            raise self._in_use(lease)

    def _renew(self) -> None:
        renewals = 0
        while not self._closed.wait(LEASE_SECONDS / 6):
            renewals += 1
            with suppress(Exception):  # the next one may succeed, and `commit` checks
                self._fs.pipe_file(self._lease, self._encode(renewals), timeout=REQUEST_SECONDS)

    def put_files(self) -> None:
        """Put the files of the run."""
        names = [name for name in FILES if (self._run_dir / name).is_file()]
        self._transfer("put_file", ((str(self._run_dir / name), self._at(name)) for name in names))

    def close(self) -> None:
        """Put the files of the run and release the lease, if this process has it."""
        if not self._lease or self._closed.is_set():
            return
        self.require_lease()
        self.put_files()
        self._closed.set()
        self._content["holder"] = ""
        self._call("pipe_file", self._lease, self._encode(0))


Place = Directory | ObjectStorage
"""Where the checkpoints of a run are, outside Determined."""


class ObjectStorageContext(core.DummyCheckpointContext):
    """Core API's checkpoint context outside Determined: reporting a checkpoint puts its manifest."""

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:  # noqa: ARG002
        assert isinstance(self._storage_manager, ObjectStorage)
        self._storage_manager.commit(storage_id)


@contextmanager
def stored(run_dir: RunDir | None, context: core.Context, world: World) -> Iterator[None]:
    """Keep the checkpoints of `context` and the files of `run_dir` under its URL, if it has one."""
    if run_dir is None or run_dir.url is None:
        yield
        return
    url = run_dir.url
    place = world.all_or_none(lambda: ObjectStorage(url))
    context.checkpoint = ObjectStorageContext(context.distributed, place)
    yield
    # Not after an error, which is printed at once: the lease runs out, and steps made again are reported again.
    world.on_rank0(place.close)


@contextmanager
def downloaded(url: str, world: World, parent: Path | None) -> Iterator[Path]:
    """Yield a directory in `parent` with the checkpoint at `url`, downloaded once by each machine."""
    with tempfile.TemporaryDirectory(prefix=TRANSFER_PREFIX, dir=parent) as folder:
        path = Path(folder) / url.rpartition("/")[2]
        is_first = world.launch.local_rank == 0
        with ThreadPoolExecutor(1) as pool:
            world.wait_for(pool.submit(lambda: ObjectStorage(url).fetch_checkpoint(path) if is_first else None))
        node = world.launch.node_rank
        places = world.all_gather_object((node, path) if is_first else None)
        yield next(place[1] for place in places if place and place[0] == node)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
