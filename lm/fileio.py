"""Reading of files that are not trusted, up to a limit; checksums; crash-safe writing.

The limits keep what a stranger's checkpoint, model or dataset can cost below 1 GB of memory and 10
s beyond its real tensors; what its tokenizer and chat template compute has none. Parsed JSON takes
up to 25 times its size.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Set
from io import BufferedWriter
from pathlib import Path
from typing import Any

import google_crc32c

MAX_JSON_BYTES = 8 << 20
"""Of a manifest, a config.json, an index or a safetensors header.

It is enough for 40,000 tensors, or some 10,000 ranks.
"""
MAX_JSON_DEPTH = 32
"""Of a manifest, a config.json or an index. Ours have 6 levels."""
MAX_TOKENIZER_BYTES = 40 << 20
"""Of a tokenizer.json. The largest in use has 33 MB."""
MAX_INDEX_BYTES = 512 << 20
"""Of the index of a token file, which lists its sources: some 3 million."""
MAX_SLICES = 1 << 16
"""Entries in the headers of a checkpoint or a model, in addition to one per KiB of its files."""
_CHECKSUM_BLOCK_BYTES = 1 << 22
_POINTERS = {
    b"version https://git-lfs": ("Git LFS pointer", "git lfs pull"),
    b"/annex/objects/": ("git-annex pointer", "git annex get"),
}
"""what a file contains that was not downloaded with its repository, and the command that does it"""


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file `path` and return its descriptor.

    No link is followed, and a FIFO does not block. The function can be the `opener` of `open`.

    Raises:
        OSError: the file cannot be opened, or is a link, a FIFO or a device.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, not a regular file", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of the regular file `path`, which has at most `limit` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, is larger, or a pointer to the content.
    """
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, but at most {limit:,} are read", str(path))
        content = file.read(limit)
    pointer = find_pointer(content)
    if pointer is not None:
        name, remedy = pointer
        raise OSError(errno.EINVAL, f"a {name}; {remedy}", str(path))
    return content


def find_pointer(start: bytes) -> tuple[str, str] | None:
    """Return what a file is that starts with `start`, and the remedy, if it is not downloaded."""
    for content, (name, command) in _POINTERS.items():
        if start.startswith(content):
            return name, f"download the file, `{command}` in its repository"
    return None


def parse_json(text: bytes) -> Any:
    """Return the value of the JSON `text`.

    Raises:
        ValueError: it is invalid, or nested more than `MAX_JSON_DEPTH` levels deep.
    """
    too_deep = f"more than {MAX_JSON_DEPTH} levels"
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [content]  # the values at one depth
    for _ in range(MAX_JSON_DEPTH + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
        level = next_level
    if level:
        raise ValueError(too_deep)
    return content


def read_records(path: Path, keys: Set[str]) -> list[dict[str, Any]]:
    """Return the lines of a file that are JSON objects with all of `keys` and an integer step.

    A kill can truncate a line. Of a file that does not exist, the list is empty.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.keys() >= keys and type(record["step"]) is int:
            records.append(record)
    return records


def crc32c(path: Path) -> int:
    """Return the CRC-32C of the regular file at `path`; processors have an instruction for it.

    Raises:
        OSError: the file cannot be read.
    """
    value = 0
    with open(path, "rb", opener=open_regular) as file:
        while block := file.read(_CHECKSUM_BLOCK_BYTES):
            value = google_crc32c.extend(value, block)
    return value


def sync(file: BufferedWriter) -> None:
    """Flush `file` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of the directory `path` to disk: which files exist, under which names."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def replace_durably(path: Path, content: bytes) -> None:
    """Write `content` to `path`; a crash leaves either the old file or the complete new one."""
    draft = path.with_name(f"{path.name}.draft")
    write_durably(draft, content)
    draft.replace(path)


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` to a new file at `path`, in place of any other, and flush it to disk."""
    path.unlink(missing_ok=True)  # "xb" does not follow a link that someone makes here
    with path.open("xb") as file:
        file.write(content)
        sync(file)
