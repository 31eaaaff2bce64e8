"""Progress bars that count the bytes of input files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.documents import format_of
from lm.data.files import is_compressed

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_SECONDS = 30.0
"""Time between progress lines if stderr is not a terminal."""


def progress_bar(
    what: str, files: Sequence[Path], file_format: str | None = None, *, hidden: bool = False
) -> tqdm[Any]:
    """Return a bar on a terminal, or a line every `LOG_SECONDS`, on stderr.

    Args:
        file_format: of all files; None = by suffix.
    """
    from tqdm import tqdm  # a run on random tokens does not need it

    seconds = LOG_SECONDS
    if sys.stderr.isatty():
        seconds = 0.1
    return tqdm(
        desc=what,
        total=_text_bytes(files, file_format),
        delay=seconds,
        mininterval=seconds,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=hidden,
    )


def _text_bytes(files: Sequence[Path], file_format: str | None) -> int | None:
    """Return the size of the text in `files`; None = unknown until they are read."""
    for path in files:
        if format_of(path, file_format) not in ("text", "jsonl") or is_compressed(path):
            return None
    return total_size(files)


def total_size(files: Sequence[Path]) -> int:
    """Return the bytes of `files`, without those that cannot be read: who reads them says why."""
    total = 0
    for path in files:
        with suppress(OSError):
            total += path.stat().st_size
    return total
