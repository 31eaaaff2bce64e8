"""Progress bars: of files that are read, of the reference of DPO, of tasks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_SECONDS = 30.0
"""Time between progress lines if stderr is not a terminal."""


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
