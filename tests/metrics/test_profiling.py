"""Profilers run if they are enabled, and their output is kept however the run ends."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import torch
from determined.core import DummyProfilerContext

from lm.launch.spawn import reserve_port
from lm.training import profiling
from tests.support import PATIENCE, REPOSITORY
from tests.support.hyperparameters import TINY
from tests.support.runs import read_reports, run_fsdp


class ClusterProfiler(DummyProfilerContext):
    """Core API's profiler, which cannot run outside of a cluster."""

    is_on = False

    def on(self, sampling_interval: int = 1, samples_per_report: int = 10) -> None:
        del sampling_interval, samples_per_report
        self.is_on = True

    def off(self) -> None:
        self.is_on = False


def profile_steps(
    directory: Path,
    steps: int,
    *,
    profiled: tuple[int, int, int],
    rank: int = 0,
    fail: bool = False,
) -> None:
    """Profile so many steps, the last of which may fail."""
    with profiling.torch_profiler(profiled, directory, rank, steps_left=100, log=print) as profiler:
        for step in range(steps):
            with torch.profiler.record_function(f"step number {step}"):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            if fail and step == steps - 1:
                raise RuntimeError("on purpose")
            profiler.step()


def events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def steps_in(trace: Path) -> list[int]:
    names = {event.get("name", "") for event in events(trace)}
    return sorted(int(name.rpartition(" ")[2]) for name in names if name.startswith("step number "))


def traces(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "test" / "traces").glob("*.pt.trace.json.gz"))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two ranks with traces and samples; `output` is what it printed."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    text = TINY | {
        "dataset": "text",
        "train_data": "text.txt",
        "vocab_size": 264,
        "num_tokens": 5,
        "tie_embeddings": True,
    }
    overrides = (
        "max_steps=20",
        "report_rate=2",
        "validation_rate=10",
        "torch_profiler=true",
        "core_api_profiler=true",
    )
    how: dict[str, Any] = {"config": text | {"prompt": "to be"}, "MPLBACKEND": "agg"}
    done = run_fsdp(folder, *overrides, ranks=2, code=0, **how)
    (folder / "output").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_torch_profiler_traces_shapes_memory_and_modules(profiled: Path) -> None:
    assert [trace.name.partition(".")[0] for trace in traces(profiled)] == ["rank0", "rank1"]
    for trace in traces(profiled):
        assert trace.stat().st_size < 1e6  # so that real models stay below 50 MB
        names = {event.get("name", "") for event in events(trace)}
        assert {
            "FSDP::pre_forward (blocks.0)",
            "FSDP::pre_backward (blocks.1)",
            "[memory]",
        } <= names
        products = [event["args"] for event in events(trace) if event.get("name") == "aten::mm"]
        assert any([16, 32] in product["Input Dims"] for product in products)  # tokens x d_model


class Board:
    """TensorBoard as `make board` starts it; its answers are what the pages in a browser draw."""

    OPTIONS = ("--logdir", "runs", "--host", "127.0.0.1", "--port")

    def __init__(self, folder: Path) -> None:
        port = reserve_port()
        self.url = f"http://127.0.0.1:{port}/data/plugin"
        program = Path(sys.executable).parent / "tensorboard"
        with (folder / "tensorboard.log").open("wb") as log:
            self.process = subprocess.Popen(
                [program, *self.OPTIONS, str(port)],
                cwd=folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"NO_PROXY": "*"},
            )

    def get(self, path: str, ready: str) -> Any:
        """Return the answer as soon as it contains `ready`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/{path}") as answer:
                    text = answer.read().decode()
            except OSError as error:
                text = str(error)
            if ready in text:
                return json.loads(text)
            assert time.monotonic() < deadline, text
            time.sleep(0.1)


@pytest.fixture(scope="module")
def board(profiled: Path) -> Iterator[Board]:
    if importlib.util.find_spec("torch_tb_profiler") is None:
        pytest.skip("torch-tb-profiler is missing")
    board = Board(profiled)
    yield board
    board.process.terminate()
    board.process.wait(30)


@pytest.mark.slow
def test_make_board_starts_tensorboard() -> None:
    assert " ".join(Board.OPTIONS) in (REPOSITORY / "Makefile").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("group", ["training", "validation"])
def test_tensorboard_draws_the_curves(board: Board, profiled: Path, group: str) -> None:
    tags = board.get("scalars/tags", "validation/perplexity")
    assert tags.keys() == {"test/training", "test/validation"}
    assert min(tags[f"test/{group}"]) == "loss", "both lines are in the first chart"
    points = board.get(f"scalars/scalars?run=test/{group}&tag=loss", "20,")
    reported = {step: line["loss"] for step, line in read_reports(profiled, group).items()}
    assert {step: loss for _, step, loss in points} == pytest.approx(reported)


@pytest.mark.slow
def test_tensorboard_shows_the_samples(board: Board, profiled: Path) -> None:
    lines = (profiled / "runs/test/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20]
    texts = board.get("text/text?run=test/validation&tag=sample/text_summary", '"step": 20')
    assert "to be" in texts[0]["text"]


@pytest.mark.slow
def test_tensorboard_shows_the_hyperparameters(board: Board, profiled: Path) -> None:
    request = {
        "allowedStatuses": ["STATUS_SUCCESS"],
        "colParams": [
            {"metric": {"group": "validation", "tag": "loss"}},
            {"metric": {"group": "training", "tag": "loss"}},
        ],
        "sliceSize": 9,
    }
    path = f"hparams/session_groups?request={quote(json.dumps(request))}"
    (row,) = board.get(path, "d_model")["sessionGroups"]
    expected = {"d_model": 32, "lr_schedule": "constant", "dataset": "text", "tie_embeddings": True}
    assert row["hparams"].items() >= expected.items()
    assert "sharding" not in row["hparams"], "a default that is rarely varied"
    assert row["name"] == "test"
    assert [session["name"] for session in row["sessions"]] == ["test"]
    for group, metric in zip(("validation", "training"), row["metricValues"], strict=True):
        assert metric["value"] == pytest.approx(read_reports(profiled, group)[20]["loss"])
    columns = board.get("hparams/experiment?request={}", "d_model")
    assert {column["name"] for column in columns["hparamInfos"]} == row["hparams"].keys() | {
        "total_batch_size"  # null
    }
    assert [column["displayName"] for column in columns["metricInfos"]] == [
        "validation loss",
        "training loss",
    ]


@pytest.mark.slow
def test_tensorboard_shows_the_traces_of_both_ranks(board: Board) -> None:
    (run,) = board.get("pytorch_profiler/runs", "test")["runs"]
    views = board.get(f"pytorch_profiler/views?run={run}", "Trace")
    assert {"Overview", "Operator", "Trace"} <= set(views)
    workers = board.get(f"pytorch_profiler/workers?run={run}&view=Trace", "rank1")
    assert workers == ["rank0", "rank1"]


@pytest.mark.slow
def test_console_shows_phases_samples_and_traces(profiled: Path) -> None:
    output = (profiled / "output").read_text()
    first = next(line for line in output.splitlines() if line)
    assert float(first.split()[0]) < 20, "something appears before PyTorch is imported"
    shown = [
        line
        for line in output.splitlines()
        if re.match(r" *\d+\.\d s  |core_api|traces|sample|curves", line)
    ]
    parts = [
        "checking the hyperparameters",
        "importing",
        "reading",
        "building",
        "running the first",
        "core_api",
        "first step completed",
        "traces: ",
    ]
    parts += ["sample      step 10/20", "sample      step 20/20", "curves and traces: make board"]
    assert all(part in line for part, line in zip(parts, shown, strict=True)), shown
    assert "traces: runs/test/traces/rank*.pt.trace.json.gz" in shown
    assert (profiled / "runs/test/report.png").read_bytes().startswith(b"\x89PNG")
    assert "20 of 20" in (profiled / "runs/test/report.md").read_text()


@pytest.mark.slow
def test_torch_profiler_warns_of_a_run_that_is_too_short(tmp_path: Path) -> None:
    for steps, left in ((3, 3), (7, 4)):  # the second run resumes from step 3
        profiler = ("torch_profiler=true", "torch_profiler_steps=[3, 1, 2]")
        done = run_fsdp(tmp_path, f"max_steps={steps}", *profiler, code=0)
        lines = done.stdout.splitlines()
        (warning,) = [line for line in lines if line.startswith("torch_profiler")]
        assert f"torch_profiler_steps skips 4, {left} are left; use less" in warning
        assert not traces(tmp_path)
        assert "\ntraces: " not in done.stdout


def test_torch_profiler_steps_are_traced(tmp_path: Path) -> None:
    profile_steps(tmp_path / "traces", 12, rank=3, profiled=(2, 1, 3))
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("rank3.")
    assert steps_in(trace) == [3, 4, 5]


def test_torch_profiler_trace_of_a_run_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        profile_steps(tmp_path, 4, fail=True, profiled=(1, 1, 5))
    (trace,) = tmp_path.iterdir()
    assert steps_in(trace) == [2, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_core_api_profiler_is_on_during_the_run(fails: bool) -> None:
    profiler = ClusterProfiler()
    end = pytest.raises(RuntimeError) if fails else nullcontext()
    with end, profiling.run_core_api_profiler(profiler, print):
        assert profiler.is_on
        if fails:
            raise RuntimeError
    assert not profiler.is_on


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyTorch's recorder of GPU memory, which cannot run without a GPU."""
    memory = SimpleNamespace(is_recording=False)

    def record(enabled: str | None = "all", **_: object) -> None:
        memory.is_recording = enabled is not None

    def dump(path: str) -> None:
        Path(path).write_text("recorded" if memory.is_recording else "empty")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return memory


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_snapshot_after_out_of_memory(
    tmp_path: Path, gpu_memory: SimpleNamespace, error: Exception | None
) -> None:
    snapshot = tmp_path / "traces" / "rank3.memory.pickle"
    end = pytest.raises(torch.OutOfMemoryError) if error else nullcontext()
    with end, profiling.record_memory(snapshot):
        assert gpu_memory.is_recording
        if error:
            raise error
    assert snapshot.read_text() == "recorded"
    assert not gpu_memory.is_recording


def test_memory_snapshot_that_cannot_be_written_hides_no_error(
    tmp_path: Path, gpu_memory: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "traces" / "rank3.memory.pickle"
    snapshot.parent.touch()
    with pytest.raises(torch.OutOfMemoryError), profiling.record_memory(snapshot):
        raise torch.OutOfMemoryError
    assert capsys.readouterr().err.startswith(f"{snapshot}: no snapshot")
    assert not gpu_memory.is_recording


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_memory_snapshot_without_a_gpu_is_refused_before_the_run(tmp_path: Path) -> None:
    for arguments in (("--dry-run",), ()):
        refused = run_fsdp(tmp_path, "memory_snapshot=true", *arguments, code=2)
        assert "memory_snapshot: true needs a GPU; " in refused.stderr
        assert not (tmp_path / "runs" / "test" / "metrics.jsonl").exists()
