"""Arrays that are computed once from a run's data, and kept in the user's cache.

An entry is a directory, named by a hash of everything that it was computed from: the contents of
the data, the tokenizer, the options, and the code. It appears complete, by a rename, and never
changes. Whoever needs an entry first computes it, once for all that share the cache.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from lm.errors import oserror_as_config_error
from lm.fileio import write_durably
from lm.launch.cleanup import at_exit

KEPT_DAYS = 30
"""Entries that no run has used for so long are deleted when another one is added."""
_REMEMBERED_BYTES = 16 << 20
"""from which the hash of a file is remembered"""
TOKENIZING_PACKAGES = ("jinja2", "numpy", "tokenizers", "transformers", "trl")
"""whose versions the tokens of data depend on"""


def cache_directory() -> Path:
    """Return the directory for what this user's runs compute."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lm"


@oserror_as_config_error
def cached(facts: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return the directory that `build` has filled, by now or earlier.

    Without a cache that can be written, it is a temporary one of this process.

    Args:
        facts: what the content depends on, as JSON, with the code (`describe_program`).
    """
    text = json.dumps(facts, sort_keys=True)
    entry = _root() / sha256(text.encode()).hexdigest()
    with _lock(entry.with_suffix(".lock")):
        if not entry.is_dir():
            _build(build, entry)
            _delete_unused(entry.parent)
        os.utime(entry)
    return entry


def _root() -> Path:
    root = cache_directory() / "tokens"
    with suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.access(root, os.W_OK | os.X_OK):
        return root
    return _temporary_root()


@functools.cache
def _temporary_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="lm-tokens-"))
    at_exit(shutil.rmtree, root, ignore_errors=True)
    return root


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for whoever computes the same entry. Without locks, both do, and one result stays."""
    lock = FileLock(path, fallback_to_soft=False)
    with suppress(NotImplementedError, OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(build: Callable[[Path], None], entry: Path) -> None:
    for draft in entry.parent.glob(f".{entry.name}-*"):
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        build(draft)
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        draft.rename(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _delete_unused(root: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for path in root.iterdir():
        with suppress(OSError):  # another process deletes it, too
            if path.stat().st_mtime < oldest:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def describe_files(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the name of each file, and the hash of its content."""
    described: list[tuple[str, str]] = []
    for path in files:
        try:
            described.append((path.name, _content_hash(path)))
        except OSError:  # who reads the file says why
            described.append((path.name, f"not read at {time.time_ns()}"))
    return described


def _content_hash(path: Path) -> str:
    """Return the SHA-256 of a file; that of a large one is remembered until the file changes."""
    if path.stat().st_size < _REMEMBERED_BYTES:
        return _hash_file(path)
    return remembered(("sha256", file_state(path)), lambda: _hash_file(path))


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def file_state(path: Path) -> tuple[Path, int, int, int, int, int]:
    """Return what changes when the content of a file does."""
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (path.absolute(), status.st_dev, status.st_ino, status.st_size, *times)


def remembered(facts: object, compute: Callable[[], str]) -> str:
    """Return what `compute` returned, now or earlier, for what `facts` identify."""
    known = cache_directory() / "hashes" / sha256(repr(facts).encode()).hexdigest()
    with suppress(OSError):
        return known.read_text()
    found = compute()
    with suppress(OSError):
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = known.with_name(f"{known.name}.{os.getpid()}")
        write_durably(draft, found.encode())
        draft.rename(known)
    return found
