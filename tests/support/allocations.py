"""Memory that is allocated on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import profile


def measure_peak(action: Callable[[], object]) -> int:
    """Return the largest number of bytes that PyTorch has allocated at a time in `action`."""
    with profile(profile_memory=True) as profiler:
        action()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))
