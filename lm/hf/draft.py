"""A directory that appears when it is complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lm.errors import ConfigError, RunError
from lm.runtime.lease import InUseError
from lm.runtime.run_dir import lease_directory, lease_instead


@contextmanager
def make_draft(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out` on success and is deleted on failure.

    Args:
        needed: bytes of the disk.

    Raises:
        ConfigError: `out` cannot be created.
        RunError: the disk is full or fails.
    """
    draft = out.with_name(f".{out.name}.draft")
    try:
        draft.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be created: {error.strerror}") from None
    try:
        with lock_directory(draft), ExitStack() as on_exit:
            on_exit.callback(shutil.rmtree, draft, ignore_errors=True)
            for left in draft.iterdir():  # by a command that was killed
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            free = shutil.disk_usage(draft).free
            if free < needed:
                raise RunError(f"{out}: disk full: {needed:,} bytes are needed, {free:,} are free")
            yield draft
            draft.rename(out)
    except (BlockingIOError, InUseError):
        problem = "another process exports to it; wait for it, or use another directory"
        raise RunError(f"{out}: {problem}") from None
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` until this process ends or leaves.

    Raises:
        BlockingIOError, InUseError: another process has locked it.
    """
    with ExitStack() as on_exit:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        on_exit.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lease = lease_instead(directory, error)
            on_exit.callback(shutil.rmtree, lease_directory(directory), ignore_errors=True)
            on_exit.callback(lease.release)
        yield
