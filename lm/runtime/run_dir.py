"""Directory of a run off the cluster, `runs/<run_name>/`, used by one run at a time.

A run of a group is `runs/<group>/<name>/`, e.g. a trial of a search.

For a run in object storage, each machine has its own, and that of rank 0 has the files.

config.yaml               all hyperparameters of the run
metrics.jsonl             one line per report
samples.jsonl             one line per sample
sessions.jsonl            one line per start
report.md, report.png     the run in a table and curves, written when it ends or stops
events.out.*              hyperparameters for TensorBoard
training/, validation/    event files of TensorBoard
traces/                   of the profilers
checkpoints/              one directory per checkpoint
first_checkpoint          names the run's first checkpoint: there was one, if all were deleted
tracker_id                names the run to trackers
lock                      names the process that uses the directory
lease                     identifies the process that used the directory, in object storage
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lm.errors import ConfigError, RunError
from lm.fileio import open_regular, read_bytes, replace_durably

if TYPE_CHECKING:
    from lm.runtime.world import World

RUNS = Path("runs")
"""Directory of all runs, below the one that the command is started in."""
TRANSFER_PREFIX = ".transfer-"
"""Prefix of temporary directories for transfers to and from object storage."""
ASIDE = "before-%Y%m%d-%H%M%S"
"""Format of the names of directories to which `resume=fresh` moves what earlier runs wrote."""
FIRST_CHECKPOINT = "first_checkpoint"
"""File of the run whose content is the location of a checkpoint; see `CheckpointStore`."""
SEARCH_FILE = "search.json"
"""File of a directory that belongs to `lm.search`, with the directories of its trials in it."""
LOCK_TIMEOUT = 5.0
"""Seconds. The kernel releases the lock of a killed process only after its last write."""

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{,199}"
"""Regular expression of a directory's name."""

_locks: list[FileLock] = []  # a lock without a reference would be released


class RunDir:
    """Paths of the run `name`, and its URL below that of `storage`.

    The constructor changes nothing on disk.
    """

    def __init__(self, name: str, storage: str | None = None) -> None:
        if not re.fullmatch(rf"{_NAME}(/{_NAME})?", name):
            # It could point outside of runs/.
            raise ConfigError(
                f"run_name: {name!r} is not a directory name; use letters, digits, '.', '_' and"
                " '-', starting with a letter or digit: run_name=NAME or run_name=GROUP/NAME"
            )
        self.path = RUNS / name
        self.url: str | None = None
        """of a run in object storage"""
        if storage is not None:
            self.url = f"{storage.rstrip('/')}/{name}"
        self.checkpoints = self.path / "checkpoints"
        self.traces = self.path / "traces"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.sessions = self.path / "sessions.jsonl"
        self._lock = self.path / "lock"

    def lock(self, world: World) -> None:
        """Create the directory on rank 0, and lock it until the process ends.

        Raises:
            RunError: another process has locked it.
            ConfigError: it cannot be created, others could write to it, or a rank of another
                machine does not see this lock.
        """
        holder = world.on_rank0(self._create_and_lock)
        with world.all_or_none():
            if self.url is None:
                self._require_same_directory(holder)
            else:  # each machine has its own
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                self.traces.mkdir(parents=True, exist_ok=True)

    def _create_and_lock(self) -> str:
        """Return what the lock then says of this process."""
        if (self.path / SEARCH_FILE).exists():
            raise ConfigError(
                f"{self.path}: is a search of lm.search, with its trials; choose another name:"
                " run_name=NAME"
            )
        events = [self.path / "training", self.path / "validation"]
        try:
            for path in (self.path, self.checkpoints, self.traces, *events):
                make_directory(path)
            holder = lock_file(self._lock)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be created and locked ({error.strerror}); make"
                f" {RUNS.absolute()} writable for this user, or start in another directory"
            ) from None
        if holder is not None:
            raise in_use_error(self.path, holder)
        return _read_lock(self._lock)

    def _require_same_directory(self, holder: str) -> None:
        try:
            found = _read_lock(self._lock)
        except OSError as error:
            found = f"no lock file: {error.strerror}"
        if found != holder:
            raise ConfigError(
                f"{self.path.absolute()}: not the same directory on all machines: locked by"
                f" {holder.strip()}, but {socket.gethostname()} sees {found.strip()}; start in a"
                " directory that all machines share"
            )

    def start(self, hyperparameters: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        """Write config.yaml, which resumes the run, and add `session` to sessions.jsonl."""
        import yaml

        name = self.path.relative_to(RUNS).as_posix()
        resumable = dict(hyperparameters) | {"run_name": name, "resume": "auto"}
        config = yaml.safe_dump({"hyperparameters": resumable}, sort_keys=False)
        try:
            replace_durably(self.config, config.encode())
            last_write = None  # by the session before
            if self.metrics.exists():
                last_write = self.metrics.stat().st_mtime
            line = json.dumps({"time": time.time(), "last_write": last_write, **session})
            with open(self.sessions, "a", opener=open_regular) as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise RunError(
                f"{error.filename or self.path}: cannot be written ({error.strerror})"
            ) from None


def describe_this_process() -> str:
    """Return what names this process to others as the holder of a lock."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"


def in_use_error(where: Path | str, holder: str) -> RunError:
    """Return the error that another run is at `where`; `holder` may be empty."""
    if not holder:
        holder = "another process"
    advice = "wait until it ends, stop it, or choose another run_name"
    return RunError(f"{where}: in use by {holder}; {advice}")


def move_aside(run_dir: Path) -> None:
    """Move all files of the run in `run_dir` to a new directory in it, named like `ASIDE`."""
    stays = re.compile("lock|lease|before-.*")
    old = [path for path in run_dir.iterdir() if not stays.fullmatch(path.name)]
    old.sort(key=lambda path: path.name != FIRST_CHECKPOINT)  # a kill must not leave it alone
    aside = run_dir / time.strftime(ASIDE)
    while aside.exists():  # two starts within one second
        aside = aside.with_name(f"{aside.name}-again")
    try:
        if all(path.is_dir() and not any(path.iterdir()) for path in old):
            return
        aside.mkdir(mode=0o775)
        for path in old:
            path.rename(aside / path.name)
        for name in ("checkpoints", "traces"):
            (run_dir / name).mkdir(mode=0o775)
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be moved ({error.strerror})") from None


def lock_file(path: Path) -> str | None:
    """Lock the file `path` until this process ends.

    Returns:
        None if this process now holds the lock, else the holder: "process PID on HOST since TIME".
    """
    lock = FileLock(path.absolute(), LOCK_TIMEOUT, thread_local=False, on_acquired=_write_lock)
    try:
        lock.acquire()
    except Timeout:
        holder = _read_lock(path).strip()
        if not holder:  # it has not written the file yet
            holder = "another process"
        return holder
    _locks.append(lock)
    return None


def is_locked(path: Path) -> bool:
    """Return whether a process has locked the file `path`."""
    if not path.exists():
        return False
    lock = FileLock(path.absolute(), 0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def _write_lock(lock: int) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{describe_this_process()}\n".encode(), 0)
    os.fsync(lock)  # other machines read it next


def _read_lock(lock: Path) -> str:
    return read_bytes(lock, 1000).decode(errors="replace")


def make_directory(path: Path) -> None:
    """Create `path`, which is `RUNS` or inside of it, and its parents, unless they exist.

    Raises:
        ConfigError: others can write to one of them.
        OSError: it cannot be created.
    """
    if path != RUNS:
        make_directory(path.parent)
    path.mkdir(mode=0o775, exist_ok=True)
    _require_private(path)


def _require_private(path: Path) -> None:
    """Raise ConfigError if users other than this one can write to `path`, or choose where it is.

    `RUNS` may be a link, another user's, or have the permissions of /tmp.
    """
    if path == RUNS:
        status = path.stat()
    else:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(
                f"{path}: is a symbolic link, which is not followed; to write elsewhere, make"
                f" {RUNS} a link"
            )
        if status.st_uid != os.getuid() and status.st_uid != _owner_of_new_files(path.parent):
            raise ConfigError(
                f"{path}: belongs to user {status.st_uid}, not to you ({os.getuid()}); choose"
                " another run_name"
            )
    is_open_to_all = bool(status.st_mode & stat.S_IWOTH)
    if path == RUNS and status.st_mode & stat.S_ISVTX:
        is_open_to_all = False  # each user can rename and delete only their own files
    if is_open_to_all:
        raise ConfigError(
            f"{path}: writable by all users; check its contents, then run: chmod o-w {path}"
            " (CIFS: mount it with dir_mode=0770)"
        )


def _owner_of_new_files(directory: Path) -> int:
    """Return the user to whom a file of this process belongs; NFS can give all to another one."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
