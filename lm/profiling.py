"""Profilers behind one context manager: system metrics to the cluster, PyTorch traces to TensorBoard, and what
lay in GPU memory when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from determined import core
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from lm.errors import ConfigError

ALLOCATIONS = 100_000
"""The latest ones that a memory snapshot tells of; with their stacks, some tens of megabytes."""


class ProfilingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    core_api_profiler: bool = Field(False, description="report GPU, CPU, memory, disk and network use to the Web UI")
    torch_profiler: bool = Field(False, description="write PyTorch traces, a file per rank, for TensorBoard")
    torch_profiler_steps: tuple[int, int, int] = Field(
        (1, 1, 2), description="steps to wait, to warm up, and to trace, from the run's first step (once)"
    )
    memory_snapshot: bool = Field(
        False, description="at the end, also one out of memory, write what each rank's GPU memory was used for"
    )

    @field_validator("torch_profiler_steps")
    @classmethod
    def _some_steps(cls, steps: tuple[int, int, int]) -> tuple[int, int, int]:
        if min(steps) < 0 or steps[2] < 1:
            raise ValueError(f"{list(steps)}: waits and warm-ups count from 0, traced steps from 1")
        return steps


@contextmanager
def profiling(
    config: ProfilingConfig, system: core.ProfilerContext, folder: Path, rank: int
) -> Iterator[Callable[[], None]]:
    """Run the profilers that `config` turns on, and stop them whatever happens.

    Args:
        system: Core API's profiler (it does nothing off the cluster).
        folder: for traces, `rank<N>.*.pt.trace.json.gz`, and memory snapshots, `rank<N>.memory.pickle`.

    Yields:
        A function to call behind every step.

    Raises:
        ConfigError: a memory snapshot is wanted where there is no GPU.
    """
    if config.memory_snapshot and not torch.cuda.is_available():
        raise ConfigError("memory_snapshot: true needs a GPU; for memory on a CPU use torch_profiler: true")
    with ExitStack() as stack:
        if config.core_api_profiler:
            system.on()
            stack.callback(_stop, system)
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
            stack.callback(_dump_memory, folder / f"rank{rank}.memory.pickle")
        if not config.torch_profiler:
            yield lambda: None
            return
        wait, warmup, active = config.torch_profiler_steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        tracer = stack.enter_context(
            profile(
                activities=activities,
                schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
                on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}", use_gzip=True),
                record_shapes=True,
                profile_memory=True,
            )
        )
        yield tracer.step


def _stop(system: core.ProfilerContext) -> None:
    """Stop the library's profiler, and wait for its last report: behind `off` it would come too late to be sent."""
    system.off()
    collector = getattr(system, "_collector", None)  # rank 0 of a node has one
    if collector is not None:
        collector.join(10)


def _dump_memory(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
