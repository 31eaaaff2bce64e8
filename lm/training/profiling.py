"""Profilers: system metrics to Determined, PyTorch traces, and GPU memory snapshots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from determined import core
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from lm.determined import private
from lm.errors import ConfigError
from lm.training.config import ProfilingConfig

MAX_ALLOCATIONS = 100_000
"""Most recent allocations in a memory snapshot: tens of megabytes with their stacks."""


@contextmanager
def run_core_api_profiler(
    profiler: core.ProfilerContext, log: Callable[[str], None]
) -> Iterator[None]:
    """Run Core API's profiler, which samples the machine, in the block."""
    if isinstance(profiler, core.DummyProfilerContext):
        other = "torch_profiler works everywhere"
        log(f"core_api_profiler: does nothing outside a Determined cluster; {other}")
    profiler.on()
    try:
        yield
    finally:
        profiler.off()
        private.join_profiler(profiler, timeout=10)


def check_memory_snapshot(config: ProfilingConfig) -> None:
    """Raise ConfigError if snapshots of memory are asked for where they cannot be taken."""
    if config.memory_snapshot and not torch.cuda.is_available():
        remedy = "to profile memory on a CPU use torch_profiler: true"
        raise ConfigError(f"memory_snapshot: true needs a GPU; {remedy}")


@contextmanager
def record_memory(path: Path) -> Iterator[None]:
    """Record the allocations of the block, and write a snapshot to `path`, also after an error."""
    # PyTorch documents this function and `_dump_snapshot`, but has no public names for them.
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as failure:  # that of the block, e.g. out of memory, is the one to be told
            print(f"{path}: no snapshot of memory: {failure.strerror}", file=sys.stderr)
        torch.cuda.memory._record_memory_history(enabled=None)


def torch_profiler(
    steps: tuple[int, int, int],
    directory: Path,
    rank: int,
    *,
    steps_left: int,
    log: Callable[[str], None],
) -> profile:
    """Return PyTorch's profiler, which writes `rank<N>.*.pt.trace.json.gz` to `directory`.

    Args:
        steps: to wait, to warm up and to trace.
        steps_left: of this process; `log` receives a warning if none of them is traced.
    """
    wait, warmup, active = steps
    skipped = wait + warmup
    traces_nothing = skipped >= steps_left
    if traces_nothing:
        remedy = "use less to wait and to warm up"
        why = f"torch_profiler_steps skips {skipped}, {steps_left} are left; {remedy}"
        log(f"torch_profiler: no step is traced: {why}")
    write_trace = tensorboard_trace_handler(
        str(directory), worker_name=f"rank{rank}", use_gzip=True
    )

    def on_trace_ready(profiler: profile) -> None:
        if traces_nothing:  # it has recorded what follows the last step, e.g. a checkpoint
            return
        write_trace(profiler)
        log(f"traces: {directory}/rank*.pt.trace.json.gz")

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=on_trace_ready,
        record_shapes=True,
        profile_memory=True,
    )
