"""What the runs of a user compute once and keep: folders of arrays, and small values.

An entry is a folder, named by a hash of everything that it was computed from: the contents of the
data, the tokenizer, the options, and the code. It never changes; one that is damaged is computed
again. Whoever needs an entry first computes it, once for all that share the cache.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import google_crc32c

from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.fileio import crc32c, find_stranger, home_path, print_once, read_bytes, write_durably
from lm.launch.console import warn
from lm.launch.process import at_exit
from lm.storage.folder import discard, drafted, read_manifest, settle, write_manifest, writing
from lm.storage.lock import hold

KEPT_DAYS = 30
"""Entries that no run has used for so long are deleted when another one is added."""
_REMEMBERED_BYTES = 16 << 20
"""from which the hash and the checksum of a file are remembered"""
_MAX_VALUE_BYTES = 1 << 16
_TEMPORARY = "lm-tokens-"
"""Prefix of what replaces the cache."""


def cache_directory() -> Path:
    """Return the directory for what this user's runs compute."""
    return home_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lm"


@oserror_as_config_error
def cached(
    facts: Mapping[str, Any],
    build: Callable[[Path], None],
    *,
    continued_if: Mapping[str, Any] | None = None,
) -> Path:
    """Return the folder that `build` has filled, by now or earlier.

    Without a cache that only this user can write to, it is a temporary one of this process.

    Args:
        facts: what the content depends on, as JSON, with the code (`describe_program`).
        continued_if: what must be as it was, as JSON, besides `facts`, for `build` to continue what
            a killed process has left in the folder; None = it never does.
    """
    text = json.dumps(facts, sort_keys=True)
    made_from = json.loads(text)
    root = cache_directory() / "tokens"
    remedy = "set XDG_CACHE_HOME to a directory of another disk"
    if not _is_usable(root):
        root = _temporary_root()
        remedy = "set TMPDIR to a directory of another disk"
    settle(root)
    entry = root / sha256(text.encode()).hexdigest()
    with writing(entry, waits=True, remedy=remedy):
        damage = None
        if os.path.lexists(entry):
            damage = _find_damage(entry, made_from)
        if damage is not None:
            print(f"{damage}: computed again", file=sys.stderr, flush=True)
            discard(entry)
        if not entry.exists():
            started_from = None
            if continued_if is not None:
                started_from = made_from | dict(continued_if)
            with drafted(entry, if_exists="keep", made_from=started_from) as draft:
                draft.chmod(0o700)
                build(draft)
                write_manifest(draft, made_from)
            _delete_unused(root)
        os.utime(entry)
    return entry


def _find_damage(entry: Path, made_from: Mapping[str, Any]) -> str | None:
    """Return why `entry` is not what was made from `made_from`, by this user; None = it is."""
    stranger = find_stranger(entry, entry.parent.stat().st_uid)
    if stranger is not None:
        return f"{entry}: {stranger}"
    try:
        manifest = read_manifest(entry, checksum)
    except ConfigError as error:
        return str(error)
    if manifest.made_from != made_from:
        return f"{entry}: made from something else"
    return None


@functools.cache
def _is_usable(directory: Path) -> bool:
    """Return whether `directory`, which is created, can be written to, and by this user alone."""
    if directory.parts[0] == "~":  # the user has no home
        return False
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            owner = os.fstat(probe.fileno()).st_uid  # NFS can give the files of all to one user
    except OSError:
        return False
    stranger = find_stranger(directory, owner)
    if stranger is not None:
        remedy = "delete it, or set XDG_CACHE_HOME to a directory of yours"
        warn(f"{directory}: not used, as it {stranger}; {remedy}")
    return stranger is None


@functools.cache
def _temporary_root() -> Path:
    """Return a new directory, deleted at the end of this process, or by a later one after a kill.

    Its lock says whether its process lives.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(RunError, OSError):  # its process lives
            _delete_left(left)
    new = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}"))
    held = ExitStack()
    held.enter_context(hold(new / "lock", new))
    root = new.rename(new.with_name(new.name.removeprefix(".")))
    at_exit(held.close)
    at_exit(shutil.rmtree, root, ignore_errors=True)
    return root


def _delete_left(root: Path) -> None:
    """Delete a temporary directory of this user, whose process has ended.

    Raises:
        RunError: the process lives.
    """
    if find_stranger(root, os.getuid()) is not None:
        return
    with hold(root / "lock", root, seconds=0) as excludes_others:
        if excludes_others:
            shutil.rmtree(root, ignore_errors=True)


def _delete_unused(root: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for path in root.iterdir():
        with suppress(OSError):  # another process deletes it, too
            if path.stat().st_mtime < oldest:
                discard(path)


@oserror_as_config_error
def describe_files(files: Sequence[Path]) -> list[str]:
    """Return the name of each file with the hash of its content."""
    described: list[str] = []
    for path in files:
        name = os.fsencode(path.name).decode(errors="backslashreplace")  # as UTF-8
        described.append(f"{name}, sha256 {_content_hash(path)}")
    return described


def _content_hash(path: Path) -> str:
    """Return the SHA-256 of a file; that of a large one is remembered until the file changes."""
    if path.stat().st_size < _REMEMBERED_BYTES:
        return _hash_file(path)
    return remembered(("sha256", path.absolute(), file_state(path)), lambda: _hash_file(path))


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> int:
    """Return the CRC-32C of a regular file; that of a large one is remembered, too."""
    if path.stat().st_size < _REMEMBERED_BYTES:
        return crc32c(path)
    return int(remembered(("crc32c", path.absolute(), file_state(path)), lambda: str(crc32c(path))))


def file_states(files: Sequence[Path]) -> dict[str, list[int]]:
    """Return the `file_state` of each file that exists by its path."""
    return {str(path): file_state(path) for path in files if path.is_file()}


def file_state(path: Path) -> list[int]:
    """Return what changes when a file is written, also if that restores its content.

    Not its inode: mounted object storage can number a file anew at each look.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def remembered(facts: object, compute: Callable[[], str]) -> str:
    """Return what `compute` returned, now or earlier, for what `facts` identify."""
    directory = cache_directory() / "values"
    if not _is_usable(directory):
        return compute()
    known = directory / sha256(repr(facts).encode()).hexdigest()
    try:
        return _read_value(known)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        print_once(f"{known}: damaged ({error}): computed again")
    found = compute()
    with suppress(OSError):
        draft = known.with_name(f"{known.name}.{os.getpid()}")
        content = found.encode()
        write_durably(draft, f"{google_crc32c.value(content):08x} {found}".encode())
        draft.rename(known)
    return found


def _read_value(path: Path) -> str:
    """Return a value that `remembered` has written.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it differs from its checksum.
    """
    written, _, value = read_bytes(path, _MAX_VALUE_BYTES).partition(b" ")
    if int(written, 16) != google_crc32c.value(value):
        raise ValueError("differs from its checksum")
    return value.decode()
