"""Profilers run while they are wanted, and what they saw is kept however the run ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from determined.core import DummyProfilerContext
from pydantic import ValidationError

from lm.profiling import ProfilingConfig, profiling
from tests import support


class Cluster(DummyProfilerContext):
    """Core API's profiler, keeping what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def on(self, sampling_interval: int = 1, samples_per_report: int = 10) -> None:
        del sampling_interval, samples_per_report
        self.told.append("on")

    def off(self) -> None:
        self.told.append("off")


def config(**settings: Any) -> ProfilingConfig:
    return ProfilingConfig.model_validate(settings)


def profile_steps(folder: Path, steps: int, *, rank: int = 0, fail: bool = False, **settings: Any) -> None:
    """Multiply matrices for so many steps under the profiler, and fail behind the last one if told to."""
    with profiling(config(**settings), DummyProfilerContext(), folder, rank) as trace:
        for step in range(steps):
            with torch.profiler.record_function(f"step number {step}"):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            if fail and step == steps - 1:
                raise RuntimeError("on purpose")
            trace()


def steps_in(trace: Path) -> list[int]:
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(int(name.rpartition(" ")[2]) for name in names if name.startswith("step number "))


def test_every_rank_of_a_run_writes_a_trace(tmp_path: Path) -> None:
    done = support.run(tmp_path, "max_steps=5", "torch_profiler=true", ranks=2)
    assert done.returncode == 0, done.stderr
    traces = (tmp_path / "runs" / "test" / "tensorboard").glob("*.pt.trace.json")
    assert sorted(trace.name.partition(".")[0] for trace in traces) == ["rank0", "rank1"]


def test_a_trace_holds_the_steps_that_were_asked_for_once(tmp_path: Path) -> None:
    profile_steps(tmp_path / "traces", 12, rank=3, torch_profiler=True, torch_profiler_steps=[2, 1, 3])
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("rank3.")
    assert steps_in(trace) == [3, 4, 5]


def test_what_was_traced_is_kept_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        profile_steps(tmp_path, 4, fail=True, torch_profiler=True, torch_profiler_steps=[1, 1, 5])
    (trace,) = tmp_path.iterdir()
    assert steps_in(trace) == [2, 3]


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    profile_steps(tmp_path, 5)
    profile_steps(tmp_path, 5, core_api_profiler=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_the_cluster_profiler_is_on_for_the_run_and_off_behind_it(tmp_path: Path, fails: bool) -> None:
    cluster = Cluster()
    try:
        with profiling(config(core_api_profiler=True), cluster, tmp_path, 0):
            assert cluster.told == ["on"]
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert cluster.told == ["on", "off"]


def test_the_cluster_profiler_stays_off_unless_asked(tmp_path: Path) -> None:
    cluster = Cluster()
    with profiling(config(), cluster, tmp_path, 0):
        pass
    assert cluster.told == []


@pytest.mark.parametrize("steps", [[1, 1, 0], [-1, 1, 2], [1, -1, 2], [1, 2], [1, 1, "two"]])
def test_steps_that_make_no_schedule_are_refused(steps: list[Any]) -> None:
    with pytest.raises(ValidationError, match="torch_profiler_steps"):
        config(torch_profiler_steps=steps)
