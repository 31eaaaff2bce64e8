"""The two profilers behind one context manager: system metrics to the cluster, and PyTorch traces to TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from determined import core
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler


class ProfilingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    core_api_profiler: bool = Field(False, description="report GPU, CPU, memory, disk and network use to the Web UI")
    torch_profiler: bool = Field(False, description="write PyTorch traces, a file per rank, for TensorBoard")
    torch_profiler_steps: tuple[int, int, int] = Field(
        (1, 1, 2), description="steps to wait, to warm up, and to trace, from the run's first step (once)"
    )

    @field_validator("torch_profiler_steps")
    @classmethod
    def _some_steps(cls, steps: tuple[int, int, int]) -> tuple[int, int, int]:
        if min(steps) < 0 or steps[2] < 1:
            raise ValueError(f"{list(steps)}: waits and warm-ups count from 0, traced steps from 1")
        return steps


@contextmanager
def profiling(
    config: ProfilingConfig, system: core.ProfilerContext, traces: Path, rank: int
) -> Iterator[Callable[[], None]]:
    """Run the profilers that `config` turns on, and stop them whatever happens.

    Args:
        system: Core API's profiler (it does nothing off the cluster).
        traces: folder for trace files, `rank<N>.*.pt.trace.json`.

    Yields:
        A function to call behind every step.
    """
    with ExitStack() as stack:
        if config.core_api_profiler:
            system.on()
            stack.callback(system.off)
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
                on_trace_ready=tensorboard_trace_handler(str(traces), worker_name=f"rank{rank}"),
                record_shapes=True,
                profile_memory=True,
            )
        )
        yield tracer.step
