"""Folders that appear complete: written as a draft next to their place, then renamed.

    NAME                        the folder
    .NAME.lock                  held by the process that writes it
    .NAME.draft-HOST-XXXXXXXX   what that process writes
    .NAME.unfinished            what a killed one has written, if the next continues it
    .NAME.replaced              the folder before, while a new one takes its place
    .NAME.deleted-XXXXXXXX      a folder that is being deleted

A draft that exists while nobody holds the lock is that of a killed process, and the next one to
hold it deletes it. Where machines do not see the locks of each other, each deletes its own drafts
only, and one of several results stays.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from lm.errors import ConfigError, RunError
from lm.fileio import (
    MAX_INDEX_BYTES,
    crc32c,
    describe_invalid,
    parse_json,
    read_bytes,
    sync_directory,
    write_durably,
)
from lm.storage.lock import GRACE_SECONDS, hold

MANIFEST = "manifest.json"
DRAFT = f"{MANIFEST}.draft"
"""File in a folder at its place that is not complete yet: it becomes the manifest."""
IDLE_SECONDS = 86400.0
"""After so long without a write, a draft of another machine is one of a killed process."""
CONTINUED_IDLE_SECONDS = 600.0
"""the same, of one that is written to all the time, as it can be continued"""
_MADE_FROM = ".made_from.json"
"""in a draft that can be continued"""
_HOST = re.sub(r"\W", "_", socket.gethostname())
_TRACE = re.compile(r"\.(.+)\.(lock|draft-\w+-\w+|unfinished|deleted-\w+|replaced)")
"""what is next to the folder of a name while it is written"""
_IS_THERE = (errno.EEXIST, errno.ENOTEMPTY)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, *_IS_THERE)


class FileRecord(BaseModel, frozen=True, extra="forbid"):
    """A file of a folder."""

    bytes: int = Field(ge=0, lt=2**63)
    crc32c: int = Field(ge=0, lt=2**32)


def record(path: Path) -> FileRecord:
    """Return the size and checksum of the file at `path`."""
    return FileRecord(bytes=path.stat().st_size, crc32c=crc32c(path))


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """What a folder was made from, and its files by their names."""

    made_from: dict[str, Any]
    files: dict[Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")], FileRecord]


@contextmanager
def writing(
    path: Path, *, waits: bool = False, seconds: float = GRACE_SECONDS, remedy: str = ""
) -> Iterator[None]:
    """Let only this process write the folder `path`, after what killed ones have left of it.

    Args:
        waits: for another process that writes it; see `hold`.
        remedy: what to do if the disk is full.

    Raises:
        ConfigError: it cannot be created there.
        RunError: another process writes it, or the disk is full or fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with hold(lock, path, waits=waits, seconds=seconds) as excludes_others:
            if excludes_others:
                _settle(path)
            yield
    except OSError as error:
        problem = f"{error.filename or path}: cannot be written: {error.strerror or error}"
        if error.errno in _NOT_WRITABLE:
            raise ConfigError(f"{problem}; use another directory") from None
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free"
        raise RunError("; ".join(filter(None, [problem, free, remedy]))) from None


def settle(directory: Path) -> None:
    """Delete what killed processes have left next to the folders in `directory`."""
    names: set[str] = set()
    for path in directory.iterdir():
        trace = _TRACE.fullmatch(path.name)
        if trace:
            names.add(trace[1])
    for name in names:
        with suppress(RunError), writing(directory / name, seconds=0):  # nobody does
            pass


def recover(path: Path) -> None:
    """Put the folder `path` back if a kill has left it aside while it was replaced.

    Raises:
        ConfigError, RunError: see `writing`.
    """
    if not path.exists() and _replaced(path).exists():
        with writing(path):
            pass


def _settle(path: Path) -> None:
    """Delete what killed processes have left of `path`; no living one holds its lock."""
    replaced = _replaced(path)
    if replaced.exists():
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)
    unfinished = _unfinished(path)
    if unfinished.exists() and _is_idle(unfinished, IDLE_SECONDS):
        shutil.rmtree(unfinished, ignore_errors=True)
    for draft in path.parent.glob(f".{glob.escape(path.name)}.draft-*"):
        is_continued = (draft / _MADE_FROM).exists()
        seconds = CONTINUED_IDLE_SECONDS if is_continued else IDLE_SECONDS
        if f".draft-{_HOST}-" not in draft.name and not _is_idle(draft, seconds):
            continue
        if is_continued and not unfinished.exists():
            draft.rename(unfinished)
        else:
            shutil.rmtree(draft, ignore_errors=True)
    for deleted in path.parent.glob(f".{glob.escape(path.name)}.deleted-*"):
        shutil.rmtree(deleted, ignore_errors=True)


def _is_idle(draft: Path, seconds: float) -> bool:
    last_write = 0.0
    for path in [draft, *draft.rglob("*")]:
        with suppress(FileNotFoundError):
            last_write = max(last_write, path.lstat().st_mtime)
    return time.time() - last_write > seconds


def _new_draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft-{_HOST}-{uuid.uuid4().hex[:8]}")


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


@contextmanager
def drafted(
    path: Path,
    n_bytes: int = 0,
    *,
    if_exists: Literal["fail", "replace", "keep"] = "fail",
    made_from: Mapping[str, Any] | None = None,
) -> Iterator[Path]:
    """Yield a new folder that becomes `path` at the end, unless an exception ends it before.

    To be used inside of `writing(path)`.

    Args:
        n_bytes: that the disk must have free.
        if_exists: what is done at the end if `path` is a folder that is not empty. It is replaced,
            so that at any moment one of both is there or is put back by `writing` or `recover`, or
            kept.
        made_from: as JSON. What a killed process has written of a folder made from the same is in
            the new one, if it passed this, too.

    Raises:
        RunError: the disk is full.
    """
    require_space(path.parent, n_bytes, "free space, or use another disk")
    draft = _new_draft(path)
    if made_from is None or not _continue(path, draft, made_from):
        draft.mkdir()
    try:
        if made_from is not None:
            write_durably(draft / _MADE_FROM, json.dumps(made_from).encode())
        yield draft
        (draft / _MADE_FROM).unlink(missing_ok=True)
        _flush(draft)
        replaced = _replaced(path)
        if if_exists == "replace" and path.exists():
            path.rename(replaced)
        try:
            draft.rename(path)
        except OSError as error:
            if replaced.exists():
                with suppress(OSError):  # else `recover` puts it back
                    replaced.rename(path)
            if error.errno not in _IS_THERE or if_exists != "keep":
                raise
        sync_directory(path.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _continue(path: Path, draft: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether `draft` is now what a killed process has written of `path`."""
    unfinished = _unfinished(path)
    with suppress(OSError, ValueError):  # there is none, or another process has taken it
        found = parse_json(read_bytes(unfinished / _MADE_FROM, MAX_INDEX_BYTES))
        if found == made_from and unfinished.lstat().st_uid == os.getuid():
            unfinished.rename(draft)
            return True
    shutil.rmtree(unfinished, ignore_errors=True)
    return False


def require_space(directory: Path, needed: int, remedy: str) -> None:
    """Raise RunError unless the disk of `directory` has `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        space = f"{needed:,} bytes are needed, {free:,} are free"
        raise RunError(f"{directory}: disk full: {space}; {remedy}")


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(folder)


def write_manifest(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Write the manifest of the files that are in `folder`."""
    (folder / MANIFEST).unlink(missing_ok=True)  # of a killed process, whose draft is continued
    files: dict[str, FileRecord] = {}
    for path in sorted(folder.glob("[!.]*")):
        files[path.name] = record(path)
    manifest = Manifest(made_from=dict(made_from), files=files)
    write_durably(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())


def read_manifest(
    folder: Path,
    checksum: Callable[[Path], int] = crc32c,
    unread: Collection[str] = (),
) -> Manifest:
    """Return the manifest of `folder`, which has the files of it.

    Args:
        checksum: CRC-32C of a file.
        unread: names of files that are not compared with it.

    Raises:
        ConfigError: a file differs from the manifest, or cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(read_bytes(path, MAX_INDEX_BYTES))
        for name, record in manifest.files.items():
            if name in unread:
                continue
            path = folder / name
            if path.lstat().st_size != record.bytes or checksum(path) != record.crc32c:
                raise ConfigError(f"{path}: damaged: differs from {MANIFEST}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: not a manifest: {describe_invalid(error)}") from None
    return manifest


def discard(path: Path) -> None:
    """Delete what is at `path`, which is no longer there at any moment of that."""
    aside = path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex[:8]}")
    path.rename(aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a directory in `directory`, which `settle` deletes if a kill leaves it.

    Args:
        directory: None = the system's for temporary files.
    """
    return tempfile.TemporaryDirectory(prefix=f".scratch.draft-{_HOST}-", dir=directory)
