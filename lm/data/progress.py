"""Progress bars of what precedes the first step: the reading of files, the reference of DPO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.blocks import is_compressed
from lm.data.documents import format_of

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_SECONDS = 30.0
"""Time between progress lines if stderr is not a terminal."""


def bar_of_files(
    what: str, files: Sequence[Path], file_format: str | None = None, *, hidden: bool = False
) -> tqdm[Any]:
    """Return a `progress_bar` that counts the bytes of `files`.

    Args:
        file_format: of all files; None = by suffix.
    """
    total = _text_bytes(files, file_format)
    return progress_bar(what, total, "B", unit_scale=True, hidden=hidden)


def progress_bar(
    what: str, total: int | None, unit: str, *, unit_scale: bool = False, hidden: bool = False
) -> tqdm[Any]:
    """Return a bar on a terminal, or a line every `LOG_SECONDS`, on stderr."""
    from tqdm import tqdm  # a run on random tokens does not need it

    seconds = LOG_SECONDS
    if sys.stderr.isatty():
        seconds = 0.1
    return tqdm(
        desc=what,
        total=total,
        delay=seconds,
        mininterval=seconds,
        unit=unit,
        unit_scale=unit_scale,
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
