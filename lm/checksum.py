"""The checksum that checkpoints and token files are held against: CRC-32C, which processors have an instruction for."""

from __future__ import annotations

from pathlib import Path

import google_crc32c


def crc32c(path: Path) -> int:
    """Of the bytes in the file at `path`.

    Raises:
        OSError: it cannot be read.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = google_crc32c.extend(value, block)
    return value
