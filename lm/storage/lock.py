"""A lock file: one process at a time holds it, by `flock`, and deletes it afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lm.errors import RunError, make_printable
from lm.fileio import open_regular, read_bytes
from lm.launch.machine import describe_this_process

GRACE_SECONDS = 5.0
"""The kernel releases the lock of a killed process only after its last write."""
_POLL_SECONDS = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
"""of `flock`, where the file system does not implement it"""
_MAX_BYTES = 1000
"""of the line in a lock file, which names its holder"""


@contextmanager
def hold(
    path: Path, what: Path, *, waits: bool = False, seconds: float = GRACE_SECONDS
) -> Iterator[bool]:
    """Hold the lock file `path`. Yield whether that excludes others.

    It does not where the file system has no locks, or gives the same one to everybody.

    Args:
        what: what it is the lock of, for messages.
        waits: for as long as another process holds it, with a line after `seconds`.

    Raises:
        RunError: another process holds it for `seconds`, and `waits` is False.
        OSError: the file cannot be created, or is a link or a FIFO.
    """
    file = _acquire(path, what, seconds, waits=waits)
    try:
        yield _excludes_others(path)
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _acquire(path: Path, what: Path, seconds: float, *, waits: bool) -> int:
    deadline = time.monotonic() + seconds
    is_told = False
    file = _try_to_acquire(path)
    while file is None:
        if time.monotonic() >= deadline and not is_told:
            holder = _read_holder(path)
            if not waits:
                raise RunError(f"{what}: in use by {holder}; wait until it ends, or stop it")
            print(f"{what}: waiting for {holder}, which writes it", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(_POLL_SECONDS)
        file = _try_to_acquire(path)
    return file


def _try_to_acquire(path: Path) -> int | None:
    """Return the lock file, open and locked; None if another process holds it."""
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


def _excludes_others(path: Path) -> bool:
    """Return whether the lock of `path`, which this process holds, is refused to another one."""
    try:
        other = open_regular(path, os.O_RDWR)
    except FileNotFoundError:  # another process that holds it has deleted it
        return False
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(other)
    return False


def _read_holder(path: Path) -> str:
    holder = ""
    with suppress(OSError):
        holder = make_printable(read_bytes(path, _MAX_BYTES).decode(errors="replace").strip())
    return holder or "another process"
