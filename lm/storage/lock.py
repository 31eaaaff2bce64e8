"""Lock files: one process at a time holds one, by `flock`."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lm.errors import ConfigError, RunError, make_printable
from lm.fileio import open_regular, read_bytes
from lm.launch.machine import describe_this_process

GRACE_SECONDS = 5.0
"""The kernel releases the lock of a killed process only after its last write."""
_POLL_SECONDS = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
"""of `flock`, where the file system does not implement it"""
_MAX_BYTES = 1000
"""of the line in a lock file, which names its holder"""
_held: dict[Path, tuple[int, str]] = {}
"""what this process holds until it ends: the open files, and what it has written to them"""


class InUseError(RunError):
    """Another process uses what this one needs for itself."""


def in_use_error(where: Path | str, holder: str) -> InUseError:
    """Return the error that another run is at `where`."""
    advice = "wait until it ends, stop it, or choose another run_name"
    return InUseError(f"{where}: in use by {holder}; {advice}")


@contextmanager
def hold(
    path: Path, what: Path, *, waits: bool = False, seconds: float = GRACE_SECONDS
) -> Iterator[bool]:
    """Hold the lock file `path`, and delete it afterwards. Yield whether that excludes others.

    It does not where the file system has no locks, or gives the same one to everybody.

    Args:
        what: what it is the lock of, for messages.
        waits: for as long as another process holds it, with a line after `seconds`.

    Raises:
        RunError: another process holds it for `seconds`, and `waits` is False.
        OSError: the file cannot be created, or is a link or a FIFO.
    """
    file = _acquire(path, seconds)
    if file is None:
        holder = read_holder(path)
        if not waits:
            raise RunError(f"{what}: in use by {holder}; wait until it ends, or stop it")
        print(f"{what}: waiting for {holder}, which writes it", file=sys.stderr, flush=True)
        file = _acquire(path, math.inf)
        assert file is not None
    try:
        yield is_held(path)
    finally:
        with suppress(OSError):  # a lock file that nobody holds keeps nobody out
            path.unlink()
        os.close(file)


def hold_until_exit(path: Path) -> None:
    """Hold the lock file `path` of the run in its directory until this process ends.

    The file stays, and its forks do not hold it.

    Raises:
        InUseError: another process holds it.
        ConfigError: the file system has no locks.
        OSError: the file cannot be created, or is a link or a FIFO.
    """
    file = _acquire(path, GRACE_SECONDS)
    if file is None:
        raise in_use_error(path.parent, read_holder(path))
    os.fsync(file)  # other machines read it next
    if not is_held(path):
        os.close(file)
        problem = "the file system has no locks, which keep a second run out"
        remedy = "mount it with them (Lustre: mount -o flock), or start on another file system"
        raise ConfigError(f"{path.absolute()}: {problem}; {remedy}")
    _held[path.absolute()] = file, read_holder(path)


def _release_in_fork() -> None:
    for file, _ in _held.values():
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_fork)


def holds(path: Path) -> bool:
    """Return whether this process holds the lock file `path` until it ends."""
    return path.absolute() in _held


def require_held(path: Path) -> None:
    """Raise InUseError if another process has received the lock file `path` that this one holds.

    There are file systems on which machines have separate locks. The last process has it.
    """
    if holds(path) and path.exists():
        _, written = _held[path.absolute()]
        holder = read_holder(path)
        if holder != written:
            raise in_use_error(path.parent, holder)


def _acquire(path: Path, seconds: float) -> int | None:
    """Return the lock file, open and locked; None if another process holds it for `seconds`."""
    deadline = time.monotonic() + seconds
    file = _try_to_acquire(path)
    while file is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        file = _try_to_acquire(path)
    return file


def _try_to_acquire(path: Path) -> int | None:
    """Return the lock file, open and locked; None if another process holds it now."""
    file = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise
    if not _is_at(path, file):  # its holder has deleted it meanwhile
        os.close(file)
        return None
    with suppress(OSError):  # a full disk; it is for people
        os.ftruncate(file, 0)
        os.pwrite(file, f"{describe_this_process()}\n".encode(), 0)
    return file


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Return whether a process, maybe this one, holds the lock file `path`.

    Raises:
        OSError: it cannot be opened, e.g. as it is another user's.
    """
    try:
        file = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(file)
    return False


def read_holder(path: Path) -> str:
    """Return what names the process that holds the lock file `path`, or held it last."""
    holder = ""
    with suppress(OSError):
        holder = make_printable(read_bytes(path, _MAX_BYTES).decode(errors="replace").strip())
    return holder or "another process"
