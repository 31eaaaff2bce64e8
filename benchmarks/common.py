"""What the benchmarks share: where the project lies, how ranks of it are started, and how figures are said."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def launched(processes: int, script: str, *arguments: str) -> list[str]:
    """The command that runs the file `script` of the project as so many ranks here, in `environment`."""
    return [sys.executable, "-m", "lm.launch", "--nproc", str(processes), str(ROOT / script), *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def spread(values: Sequence[float], digits: int) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
