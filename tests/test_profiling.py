"""Profilers run while they are wanted, and what they saw is kept however the run ends."""

from __future__ import annotations

import gzip
import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from determined.core import DummyProfilerContext
from pydantic import ValidationError

from lm.errors import ConfigError
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


def events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def steps_in(trace: Path) -> list[int]:
    names = {event.get("name", "") for event in events(trace)}
    return sorted(int(name.rpartition(" ")[2]) for name in names if name.startswith("step number "))


def test_every_rank_of_a_run_writes_a_small_trace_with_shapes_memory_and_the_blocks_names(tmp_path: Path) -> None:
    done = support.run(tmp_path, "max_steps=5", "torch_profiler=true", ranks=2)
    assert done.returncode == 0, done.stderr
    traces = list((tmp_path / "runs" / "test" / "tensorboard").glob("*.pt.trace.json.gz"))
    assert sorted(trace.name.partition(".")[0] for trace in traces) == ["rank0", "rank1"]
    for trace in traces:
        assert trace.stat().st_size < 1e6  # tens of these layers and of accumulated batches stay below 50 MB
        names = {event.get("name", "") for event in events(trace)}
        assert {"FSDP::pre_forward (blocks.0)", "FSDP::pre_backward (blocks.1)", "[memory]"} <= names
        products = [event["args"] for event in events(trace) if event.get("name") == "aten::mm"]
        assert any([16, 32] in product["Input Dims"] for product in products)  # tokens x d_model


def test_a_run_too_short_for_its_trace_says_so(tmp_path: Path) -> None:
    said = "torch_profiler: no step is traced; torch_profiler_steps begins behind 4, 3 are left\n"
    for steps, short in ((3, True), (8, False)):  # the second goes on from step 3
        done = support.run(tmp_path, f"max_steps={steps}", "torch_profiler=true", "torch_profiler_steps=[3, 1, 2]")
        assert done.returncode == 0, done.stderr
        assert (said in done.stdout) == short
        traces = list((tmp_path / "runs" / "test" / "tensorboard").glob("*.pt.trace.json.gz"))
        assert bool(traces) != short


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


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_gpu_memory_is_recorded_and_dumped_also_when_it_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    memory, calls = torch.cuda.memory, []
    for name in ("_record_memory_history", "_dump_snapshot"):
        takes = inspect.signature(getattr(memory, name))

        def call(*args: Any, name: str = name, takes: inspect.Signature = takes, **kwargs: Any) -> None:
            calls.append((name, dict(takes.bind(*args, **kwargs).arguments)))

        monkeypatch.setattr(memory, name, call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folder = tmp_path / "tensorboard"
    expected = pytest.raises(torch.OutOfMemoryError) if error else nullcontext()
    with expected, profiling(config(memory_snapshot=True), DummyProfilerContext(), folder, 3):
        if error:
            raise error
    assert [name for name, _ in calls] == ["_record_memory_history", "_dump_snapshot", "_record_memory_history"]
    assert calls[0][1].get("enabled", "all") == "all"
    assert calls[1][1] == {"filename": str(folder / "rank3.memory.pickle")}
    assert calls[2][1]["enabled"] is None
    assert folder.is_dir()


def test_a_memory_snapshot_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = support.run(tmp_path, "memory_snapshot=true")
    assert done.returncode == ConfigError.exit_code
    assert done.stderr == "memory_snapshot: true needs a GPU; for memory on a CPU use torch_profiler: true\n"
