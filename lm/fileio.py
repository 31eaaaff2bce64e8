"""Checksums and crash-safe file writes."""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path

import google_crc32c


def crc32c(path: Path) -> int:
    """Return the CRC-32C of the file at `path`, computed by the processor's own instruction.

    Raises:
        OSError: the file cannot be read.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = google_crc32c.extend(value, block)
    return value


def sync(file: BufferedWriter) -> None:
    """Flush `file` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the entries of the directory `path` to disk: which files exist, under which names."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` to `path` and flush it to disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)
