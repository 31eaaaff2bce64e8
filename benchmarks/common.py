"""Helpers of the benchmarks: start ranks, format measurements, and divide a profiled step."""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
from bisect import bisect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parent.parent

STEP = "benchmark step"
"""Annotation of the step that `compute_shares` divides."""
KERNEL_NAMES = {
    "attention": r"attention|sdpa|fmha|flash|flex",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|scaled_mm|triton_tem"
    r"|aten::(mm|addmm|bmm)$",
    "FSDP": r"nccl|^gloo:",
}
"""Patterns of the names of kernels and operators, by part of a step."""
SHARES = ("optimizer", "attention", "matrix products", "FSDP", "other", "idle")
"""Parts of a step; of those that run at the same time, the first counts."""

Event = dict[str, Any]
"""Of a profiler trace in Chrome's format; times are in microseconds."""


class Interval(NamedTuple):
    """Microseconds."""

    start: float
    end: float


def launch_command(processes: int, script: str, *arguments: str) -> list[str]:
    """Return the command that runs the project's file `script` on `processes` ranks.

    It needs the environment of `make_environment`.
    """
    launcher = [sys.executable, "-m", "lm.launch", "--nproc", str(processes)]
    return [*launcher, str(REPOSITORY / script), *arguments]


def make_environment(**more: str) -> dict[str, str]:
    """Return the environment of a benchmark's processes."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


def format_spread(values: Sequence[float], digits: int) -> str:
    """Format median, minimum and maximum."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def summarize_clocks(samples: Sequence[str]) -> str:
    """Return median, least and most MHz and watts, and all that slowed the card; "" if empty.

    Args:
        samples: lines of nvidia-smi.
    """
    rows = [line.split(", ") for line in samples]
    complete = [row for row in rows if len(row) == 4 and "[N/A]" not in row]
    if not complete:
        return ""
    columns = list(zip(*complete, strict=True))
    megahertz = format_spread([float(value) for value in columns[0]], 0)
    watts = format_spread([float(value) for value in columns[1]], 0)
    reasons = 0
    for value in columns[3]:
        reasons |= int(value, 16)
    return f"{megahertz} MHz, {watts} W, {reasons:#x}"


def compute_shares(events: Iterable[Event], seconds: float) -> dict[str, float]:
    """Return the parts `SHARES` of `seconds`.

    FSDP's part are its collectives and copies.

    Args:
        events: of a profiler trace. If it has GPU kernels they count, else the CPU operators. What
            lies outside of the annotation `STEP`, if any, does not count.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    on_gpu = any(span["cat"] == "kernel" for span in spans)
    step = _find_step(spans)
    annotated = _find_annotated(spans, on_gpu)
    intervals: dict[str, list[Interval]] = {part: [] for part in SHARES if part != "idle"}
    for span in spans:
        start, end = _interval_of(span)
        in_step = Interval(max(start, step.start), min(end, step.end))
        if _is_work(span, on_gpu) and in_step.start < in_step.end:
            intervals[_classify(span, annotated)].append(in_step)

    # The share of a part is what it adds to the time of the parts before it.
    shares: dict[str, float] = {}
    united: list[Interval] = []
    busy = 0.0  # seconds
    for part, own in intervals.items():
        united = _unite([*united, *own])
        total = sum(interval.end - interval.start for interval in united) / 1e6
        shares[part] = (total - busy) / seconds
        busy = total
    shares["idle"] = max(0.0, 1 - busy / seconds)
    return shares


def _interval_of(span: Event) -> Interval:
    return Interval(span["ts"], span["ts"] + span["dur"])


def _find_step(spans: Iterable[Event]) -> Interval:
    for span in spans:
        if span["name"] == STEP and span["cat"] == "user_annotation":
            return _interval_of(span)
    return Interval(-math.inf, math.inf)


def _find_annotated(spans: Iterable[Event], on_gpu: bool) -> dict[tuple[str, Any], list[Interval]]:
    """Return when the optimizer and FSDP run, by part and stream or thread."""
    category = "user_annotation"
    if on_gpu:
        category = "gpu_user_annotation"
    annotated: dict[tuple[str, Any], list[Interval]] = {}
    for span in spans:
        for part, prefix in (("optimizer", "Optimizer.step"), ("FSDP", "FSDP::")):
            if span["cat"] == category and span["name"].startswith(prefix):
                annotated.setdefault((part, span.get("tid")), []).append(_interval_of(span))
    return {key: _unite(intervals) for key, intervals in annotated.items()}


def _is_work(span: Event, on_gpu: bool) -> bool:
    """Return whether `span` is a kernel or a copy, or on a CPU an operator."""
    if "c10d" in span["name"]:  # waits for the collective
        return False
    if on_gpu:
        return span["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
    is_compiled_or_gloo = span["name"].startswith(("gloo:", "## Call Compiled"))
    return span["cat"] == "cpu_op" or is_compiled_or_gloo


def _classify(span: Event, annotated: dict[tuple[str, Any], list[Interval]]) -> str:
    """Return the part of a step that `span` belongs to."""
    for part in ("optimizer", "FSDP"):
        intervals = annotated.get((part, span.get("tid")), [])
        if _contain(intervals, span["ts"]):
            return part
    for part, pattern in KERNEL_NAMES.items():
        if re.search(pattern, span["name"], re.IGNORECASE):
            return part
    return "other"


def _contain(disjoint: Sequence[Interval], time: float) -> bool:
    """Return whether one of the sorted intervals contains `time`."""
    number = bisect(disjoint, (time, math.inf)) - 1  # of the last one that starts before
    return number >= 0 and time < disjoint[number].end


def _unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint ones."""
    disjoint: list[Interval] = []
    for interval in sorted(intervals):
        if disjoint and interval.start <= disjoint[-1].end:
            last = disjoint.pop()
            interval = Interval(last.start, max(interval.end, last.end))
        disjoint.append(interval)
    return disjoint
