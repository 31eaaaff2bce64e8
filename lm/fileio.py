"""What has to be found again as it was: files' checksums, and writing that outlasts a crash."""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path

import google_crc32c


def crc32c(path: Path) -> int:
    """CRC-32C, which processors have an instruction for, of the bytes in the file at `path`.

    Raises:
        OSError: it cannot be read.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = google_crc32c.extend(value, block)
    return value


def sync(file: BufferedWriter) -> None:
    """Bring to disk what was written to `file`."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring to disk which files are in the folder at `path`, and what they are called."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        sync(file)
