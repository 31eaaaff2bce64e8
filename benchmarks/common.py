"""Helpers of the benchmarks: start ranks and format measurements."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def launched(processes: int, script: str, *arguments: str) -> list[str]:
    """Return the command that runs the project's file `script` on `processes` ranks, in `environment`."""
    return [sys.executable, "-m", "lm.launch", "--nproc", str(processes), str(ROOT / script), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a benchmark's processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def spread(values: Sequence[float], digits: int) -> str:
    """Format median, minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
