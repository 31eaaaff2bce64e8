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
from typing import Any

ROOT = Path(__file__).parent.parent

Interval = tuple[float, float]

STEP = "benchmark step"
"""Annotation of the step that `shares` divides."""
NAMES = {
    "attention": r"attention|sdpa|fmha|flash|flex",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|scaled_mm|triton_tem|aten::(mm|addmm|bmm)$",
    "FSDP": r"nccl|^gloo:",
}
SHARES = ("optimizer", *NAMES, "other", "idle")


def launched(processes: int, script: str, *arguments: str) -> list[str]:
    """Return the command that runs the project's file `script` on `processes` ranks, in `environment`."""
    return [
        sys.executable,
        "-m",
        "lm.launch",
        "--nproc",
        str(processes),
        str(ROOT / script),
        *arguments,
    ]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a benchmark's processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def spread(values: Sequence[float], digits: int) -> str:
    """Format median, minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def shares(events: Iterable[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return the parts `SHARES` of `seconds`; what runs at the same time counts once, for the first of them.

    FSDP's are its collectives and copies.

    Args:
        events: of a profiler trace. If it has GPU kernels they count, else the CPU operators. What
            lies outside of the annotation `STEP`, if any, does not count.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    on_gpu = any(event["cat"] == "kernel" for event in spans)
    work = {"kernel", "gpu_memcpy", "gpu_memset"} if on_gpu else {"cpu_op"}
    marks = "gpu_user_annotation" if on_gpu else "user_annotation"
    steps = [
        event for event in spans if event["name"] == STEP and event["cat"] == "user_annotation"
    ]
    first, last = (
        (steps[0]["ts"], steps[0]["ts"] + steps[0]["dur"]) if steps else (-math.inf, math.inf)
    )
    marked: dict[tuple[str, Any], list[Interval]] = {}  # by kind, and stream or thread
    for event in spans:
        if event["cat"] == marks and event["name"].startswith(("Optimizer.step", "FSDP::")):
            kind = "FSDP" if event["name"].startswith("FSDP") else "optimizer"
            marked.setdefault((kind, event.get("tid")), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    marked = {key: _union(own) for key, own in marked.items()}
    intervals: dict[str, list[Interval]] = {kind: [] for kind in SHARES[:-1]}
    for event in spans:
        name, start, end = event["name"], event["ts"], event["ts"] + event["dur"]
        counts = (
            event["cat"] in work and "c10d" not in name
        )  # c10d's operators wait for the collective
        if not on_gpu:
            counts |= name.startswith(("gloo:", "## Call Compiled"))
        if counts and first < end and start < last:
            kinds = [
                kind
                for kind in ("optimizer", "FSDP")
                if _contain(marked.get((kind, event.get("tid")), []), start)
            ]
            kinds += [
                kind for kind, pattern in NAMES.items() if re.search(pattern, name, re.IGNORECASE)
            ]
            intervals[[*kinds, "other"][0]].append((max(start, first), min(end, last)))
    found, everything, busy = {}, [], 0.0
    for kind, own in intervals.items():
        everything = _union([*everything, *own])
        total = sum(end - start for start, end in everything) / 1e6
        found[kind], busy = (total - busy) / seconds, total
    return found | {"idle": max(0.0, 1 - busy / seconds)}


def _contain(disjoint: Sequence[Interval], time: float) -> bool:
    number = bisect(disjoint, (time, math.inf)) - 1
    return number >= 0 and time < disjoint[number][1]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint ones."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(end, disjoint[-1][1])
        else:
            disjoint.append((start, end))
    return disjoint
