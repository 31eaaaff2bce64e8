"""Profilers: system metrics to Determined, PyTorch traces for TensorBoard, and GPU memory snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from determined import core
from pydantic import BaseModel, Field, field_validator
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from lm.errors import ConfigError
from lm.fields import Unlogged

MAX_ALLOCATIONS = 100_000
"""Most recent allocations in a memory snapshot: tens of megabytes with their stacks."""


class ProfilingConfig(BaseModel, frozen=True, extra="forbid"):
    """Profilers of Core API and PyTorch."""

    core_api_profiler: Unlogged[bool] = Field(
        False, description="report GPU, CPU, memory, disk and network use to the Web UI"
    )
    torch_profiler: Unlogged[bool] = Field(
        False, description="write PyTorch traces for TensorBoard, one file per rank"
    )
    torch_profiler_steps: Unlogged[tuple[int, int, int]] = Field(
        (1, 1, 2),
        description="steps to wait, to warm up and to trace, once, counted from the first step of the process",
    )
    memory_snapshot: Unlogged[bool] = Field(
        False,
        description="write a snapshot of GPU memory per rank at the end, also after running out of memory",
    )

    @field_validator("torch_profiler_steps")
    @classmethod
    def _check_steps(cls, steps: tuple[int, int, int]) -> tuple[int, int, int]:
        if min(steps) < 0 or steps[2] < 1:
            raise ValueError(
                f"{list(steps)}: wait and warm-up must be at least 0, traced steps at least 1"
            )
        return steps


@contextmanager
def profiling(
    config: ProfilingConfig,
    core_profiler: core.ProfilerContext,
    directory: Path,
    rank: int,
    n_steps: int,
    log: Callable[[str], None],
) -> Iterator[Callable[[], None]]:
    """Run the profilers that `config` enables, and stop them also after an exception.

    Args:
        directory: for traces, `rank<N>.*.pt.trace.json.gz`, and memory snapshots,
            `rank<N>.memory.pickle`.
        n_steps: steps of this process; `log` receives a warning if none of them is traced.

    Yields:
        `profiler_step`, to call after every step.
    """
    if config.memory_snapshot and not torch.cuda.is_available():
        problem = (
            "memory_snapshot: true needs a GPU; to profile memory on a CPU use torch_profiler: true"
        )
        raise ConfigError(problem)
    with ExitStack() as stack:
        if config.core_api_profiler:
            if isinstance(core_profiler, core.DummyProfilerContext):
                log(
                    "core_api_profiler: does nothing outside a Determined cluster; torch_profiler works everywhere"
                )
            core_profiler.on()
            stack.callback(_stop, core_profiler)
        if config.memory_snapshot:
            # PyTorch documents this function and `_dump_snapshot`, and has no public names for
            # them.
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
            stack.callback(_dump_memory_snapshot, directory / f"rank{rank}.memory.pickle")
        if not config.torch_profiler:
            yield lambda: None
            return
        wait, warmup, active = config.torch_profiler_steps
        if wait + warmup >= n_steps:
            log(
                f"torch_profiler: no step is traced: torch_profiler_steps skips {wait + warmup}, {n_steps} are left"
            )
        write_trace = tensorboard_trace_handler(
            str(directory), worker_name=f"rank{rank}", use_gzip=True
        )

        def on_trace_ready(torch_profiler: profile) -> None:
            write_trace(torch_profiler)
            log(f"traces: {directory}/rank*.pt.trace.json.gz")

        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
        ]
        torch_profiler = stack.enter_context(
            profile(
                activities=activities,
                schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
                on_trace_ready=on_trace_ready,
                record_shapes=True,
                profile_memory=True,
            )
        )
        yield torch_profiler.step


def _stop(core_profiler: core.ProfilerContext) -> None:
    core_profiler.off()
    # The collector's last report is sent only if its thread ends before the context closes.
    collector = getattr(
        core_profiler, "_collector", None
    )  # on rank 0 of a node; 0.38.1 is the last release
    if collector is not None:
        collector.join(10)


def _dump_memory_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
