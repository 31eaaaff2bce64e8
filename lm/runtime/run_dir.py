"""Directory of a run off the cluster, `runs/<run_name>/`, used by one run at a time.

A run of a group is `runs/<group>/<name>/`, e.g. a trial of a search.

For a run in object storage, each machine has its own, and that of rank 0 has the files.

config.yaml               all hyperparameters of the run
metrics.jsonl             one line per report
samples.jsonl             one line per sample
checkpoints.jsonl         one line per complete checkpoint, deleted ones included
sessions.jsonl            one line per start
report.md, report.png     the run in a table and curves, written when it ends or stops
events.out.*              hyperparameters for TensorBoard
training/, validation/    event files of TensorBoard
traces/                   of the profilers
checkpoints/              one directory per checkpoint
state.json                what the run started from, and whether it ever had a checkpoint
tracker_id                names the run to trackers
lock                      names the process that uses the directory
lease                     identifies the process that used the directory, in object storage
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError, RunError
from lm.fileio import (
    Line,
    drop_records,
    open_regular,
    print_once,
    read_records,
    replace_durably,
    sync_directory,
)
from lm.runtime.run_state import STATE, finish_move, read_state
from lm.storage.folder import scratch
from lm.storage.lock import hold_until_exit, holds, read_holder
from lm.storage.place import Directory

if TYPE_CHECKING:
    from lm.runtime.world import World

RUNS = Path("runs")
"""Directory of all runs, below the one that the command is started in."""

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{,199}"
"""Regular expression of a directory's name."""

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_OURS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EINVAL)
"""where a file has the name of a directory, or the other way around, or a FIFO"""


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
        self._was_started = False
        """whether an earlier start has recorded what it starts from"""
        events = (self.path / "training", self.path / "validation")
        self._subdirectories = (self.checkpoints, self.traces, *events)

    def lock(self, world: World) -> None:
        """Create the directory on rank 0, and lock it until the process ends.

        Raises:
            RunError: another process has locked it.
            ConfigError: it cannot be created, its file system cannot do what saving needs, or a
                rank of another machine does not see this lock.
        """
        world.run_in_thread_on_rank0(self._create_and_lock)
        holder = world.on_rank0(read_holder, self._lock)
        with world.all_or_none():
            if self.url is None:
                self._require_same_directory(holder)
            else:  # each machine has its own
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                self.traces.mkdir(parents=True, exist_ok=True)

    def remove_unused(self) -> None:
        """Remove what `lock` has created if this process holds the lock, and no run has started."""
        if not holds(self._lock) or self.config.exists() or self._was_started:
            return
        with suppress(OSError, ConfigError):  # other files are there, or a damaged state
            for path in self._subdirectories:
                path.rmdir()
            start = read_state([Directory(self.path)]).resumed_from
            if start is None or not Path(start).is_relative_to(self.path.absolute()):
                # Of a start whose weights were not loaded. Else it alone says where they are now.
                (self.path / STATE).unlink(missing_ok=True)
            if [*self.path.iterdir()] == [self._lock]:
                self._lock.unlink()
                os.removedirs(self.path)  # with `RUNS`, if it is empty now

    def _create_and_lock(self) -> None:
        if not self.config.exists() and any(self.path.glob("*/lock")):
            problem = f"{self.path}: is a group of runs, e.g. a search"  # that `fresh` would move
            raise ConfigError(f"{problem}; choose another name: run_name=NAME")
        group = self.path.parent
        if group != RUNS and (group / self.config.name).exists():  # `fresh` would move this one
            raise ConfigError(f"{group}: is a run, and no group of runs; use run_name=GROUP/NAME")
        try:
            for path in (self.path, *self._subdirectories):
                make_directory(path)
            hold_until_exit(self._lock)
            self._was_started = (self.path / STATE).exists()
        except OSError as error:
            remedy = "start in another directory"
            cause = error.strerror
            if error.errno in _NOT_WRITABLE:
                remedy = f"make {RUNS.absolute()} writable for this user, or {remedy}"
            elif error.errno in _NOT_OURS:
                cause = f"{error.filename}: {error.strerror}"
                remedy = f"in {RUNS.absolute()} rename what no run has written, or {remedy}"
            problem = f"{self.path}: cannot be created and locked ({cause})"
            raise ConfigError(f"{problem}; {remedy}") from None
        place = [Directory(self.path)]
        finish_move(place)
        if read_state(place).has_saved:  # the file system has shown that it can save
            return
        try:
            _try_to_save(self.checkpoints)
        except OSError as error:
            raise ConfigError(
                f"{self.checkpoints.absolute()}: a test of what saving needs (write, flush, rename)"
                f" failed: {error.strerror}; free space, or start on another file system"
            ) from None

    def _require_same_directory(self, holder: str) -> None:
        found = "no lock file"
        if self._lock.exists():
            found = read_holder(self._lock)
        if found != holder:
            raise ConfigError(
                f"{self.path.absolute()}: not the same directory on all machines: locked by"
                f" {holder}, but {socket.gethostname()} sees {found}; start in a directory that all"
                " machines share"
            )

    def add_session(self, hyperparameters: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        """Write config.yaml, which resumes the run, and add `session` to sessions.jsonl."""
        from lm.strict_yaml import dump_yaml  # benchmarks.gpu runs without PyYAML

        name = self.path.relative_to(RUNS).as_posix()
        resumable = {**hyperparameters, "run_name": name, "resume": "auto", "stop_at_step": None}
        config = dump_yaml({"hyperparameters": resumable})
        try:
            replace_durably(self.config, config.encode())
            last_write = last_logged(self.path)  # by the session before
            drop_records(self.sessions, Line, lambda _: True)  # what a full disk has cut short
            line = json.dumps({"time": time.time(), "last_write": last_write, **session})
            with open(self.sessions, "a", opener=open_regular) as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise RunError(
                f"{error.filename or self.path}: cannot be written ({error.strerror})"
            ) from None


def last_logged(run: Path) -> float | None:
    """Return when the run in a directory last logged something, as its lines say; None = never.

    The files are newer than their lines where they were copied, or downloaded from a bucket.
    """
    names = ("metrics.jsonl", "samples.jsonl", "checkpoints.jsonl")
    lines = chain.from_iterable(read_records(run / name, Line) for name in names)
    # By the step first: clocks are set back. What only evaluates logs the same step again.
    last = max(lines, key=lambda line: (line.step, line.time), default=None)
    return None if last is None else last.time


def _try_to_save(directory: Path) -> None:
    """Do once what saving a checkpoint does; raise OSError as that would after many steps."""
    with scratch(directory) as name:
        draft = Path(name) / "draft"
        draft.mkdir()
        replace_durably(draft / "file", b"\n")
        draft.rename(Path(name) / "saved")
        sync_directory(Path(name))


def make_directory(path: Path) -> None:
    """Create `path`, which is `RUNS` or inside of it, and its parents, unless they exist.

    Raises:
        ConfigError: another user owns one of them, or it is a link.
        OSError: it cannot be created.
    """
    if path != RUNS:
        make_directory(path.parent)
    path.mkdir(mode=0o775, exist_ok=True)
    _require_private(path)


def _require_private(path: Path) -> None:
    """Raise ConfigError if another user owns `path` or chooses where it is; warn if all can write.

    Some file systems show every directory as writable by all. `RUNS` may be a link, another user's,
    or have the permissions of /tmp.
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
    if _is_open_to_all(path) and (path == RUNS or not _is_open_to_all(path.parent)):
        print_once(
            f"{path}: writable by all users, who can replace what is in it; if that is not as it"
            f" should be: chmod o-w {path}"
        )


def _is_open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    if path == RUNS and mode & stat.S_ISVTX:
        return False  # each user can rename and delete only their own files
    return bool(mode & stat.S_IWOTH)


def _owner_of_new_files(directory: Path) -> int:
    """Return the user to whom a file of this process belongs; NFS can give all to another one."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
