"""Metrics are sums over steps and ranks, time excludes pauses, and every sink has a report once."""

from __future__ import annotations

import errno
import json
import os
import queue
import re
import resource
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from determined.core import DummyTrainContext
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from lm.errors import RunError
from lm.launch.launch import Launch
from lm.metrics import accumulator
from lm.metrics.accumulator import MetricsAccumulator, MetricSums
from lm.metrics.device import peak_flops, peak_flops_by_name, peak_memory_gib
from lm.metrics.logger import MetricLogger
from lm.metrics.sinks import JSONL
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from tests.support import PATIENCE, REPOSITORY
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accumulator, "time", clock)
    return clock


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(Launch(), timeout=60) as world:
        yield world


@pytest.fixture
def metrics(world: World, clock: Clock) -> MetricsAccumulator:  # noqa: ARG001
    return MetricsAccumulator(CPU, world, ideal_seconds_per_token=None)


def add(to: MetricsAccumulator, *, n_terms: int = 4, n_tokens: int = 8, **scalars: float) -> None:
    scalars = {"loss_sum": 2.0, "grad_norm": 1.0, "skipped": 0.0} | scalars
    tensors = {name: torch.tensor(float(value)) for name, value in scalars.items()}
    to.add(n_terms=n_terms, n_tokens=n_tokens, **tensors)


# ---- accumulator


def report_of_two_steps(world: World) -> dict[str, float]:
    """The report of ranks whose loss, wait for data and memory grow with the rank."""
    clock = Clock()
    accumulator.time = clock  # type: ignore[assignment]  # in this process only
    metrics = MetricsAccumulator(CPU, world, ideal_seconds_per_token=1e-3)
    ballast = torch.ones(world.rank << 26)  # 256 MiB per rank
    for loss_sum in (2.0, 8.0):
        with metrics.waiting_for_data():
            clock.now += world.rank
        add(metrics, loss_sum=loss_sum * world.rank, n_terms=15, n_tokens=250)
    clock.now = 5
    own = peak_memory_gib(CPU)
    report, _ = metrics.report()
    del ballast
    return report | {"own_memory": own}


def test_accumulator_reports_all_ranks() -> None:
    reports = run_ranks(3, report_of_two_steps)
    last = reports[-1]
    assert [{**report, "own_memory": 0} for report in reports] == [{**last, "own_memory": 0}] * 3
    assert last["loss"] == (1 + 2) * (2 + 8) / 30
    assert (last["step_seconds"], last["waiting_for_data_percent"]) == (2.5, 80)
    assert (last["tokens_per_second"], last["mfu"]) == (100, pytest.approx(100 * 1e-3 / 3))
    assert last["peak_memory_gib"] == pytest.approx(
        max(report["own_memory"] for report in reports), rel=0.01
    )
    assert last["own_memory"] > 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_skipped_steps_do_not_count_in_loss_and_norm(
    metrics: MetricsAccumulator, clock: Clock, value: float
) -> None:
    add(metrics, loss_sum=2, n_terms=4, grad_norm=3)
    add(metrics, loss_sum=value, n_terms=4, grad_norm=value, skipped=1)
    clock.now = 4
    report, most_consecutive_skipped = metrics.report()
    assert (
        report["loss"],
        report["grad_norm"],
        report["skipped_steps"],
        most_consecutive_skipped,
    ) == (0.5, 3, 1, 1)
    assert (report["step_seconds"], report["tokens_per_second"]) == (2, 4)
    add(metrics, loss_sum=value, grad_norm=value, skipped=1)
    clock.now += 1
    report, _ = metrics.report()
    assert report["skipped_steps"] == 1
    assert not {"loss", "grad_norm", "mfu"} & report.keys()


@pytest.mark.parametrize("resumed_after", range(12))
def test_skip_nonfinite_counts_across_reports_and_resumes(
    metrics: MetricsAccumulator, world: World, clock: Clock, resumed_after: int
) -> None:
    most = []
    step = 0
    for steps in ([0, 1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0]):
        for skipped in steps:
            if step == resumed_after:
                saved = MetricSums.model_validate_json(metrics.state_dict().model_dump_json())
                metrics = MetricsAccumulator(CPU, world, ideal_seconds_per_token=None)
                metrics.reset([saved])
            add(metrics, skipped=skipped)
            step += 1
        clock.now += 1
        most.append(metrics.report()[1])
    assert most == [2, 3, 1]


def test_accumulator_resets_sums_and_clock(metrics: MetricsAccumulator, clock: Clock) -> None:
    for start in (metrics.reset, metrics.report):
        add(metrics, loss_sum=100, n_tokens=1000)
        clock.now += 50
        start()
        add(metrics, loss_sum=2, n_terms=4, n_tokens=8)
        clock.now += 2
        report, _ = metrics.report()
        assert (report["loss"], report["tokens_per_second"], report["step_seconds"]) == (0.5, 4, 2)


def test_accumulator_time_excludes_pauses_and_saves(
    metrics: MetricsAccumulator, clock: Clock
) -> None:
    seen = []
    for saves in ([3, 4], []):
        clock.now += 1
        add(metrics, n_tokens=100)
        with metrics.paused():
            clock.now += 50
        for seconds in saves:
            with metrics.saving():
                clock.now += seconds
        report, _ = metrics.report()
        seen.append(
            (report["tokens_per_second"], report["step_seconds"], report.get("save_stall_seconds"))
        )
    assert seen == [(100, 1, 7), (100, 1, None)]


def test_peak_flops_follow_from_the_name_of_the_gpu() -> None:
    tflops = {
        "NVIDIA B200": 2250,
        "NVIDIA H200": 989,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
    }
    tflops |= {
        "NVIDIA H100 NVL": 835,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100-PCIE-40GB": 312,
        "NVIDIA L40S": 362,
    }
    tflops |= {
        "NVIDIA L4": 121,
        "Tesla V100-SXM2-16GB": 125,
        "Tesla V100-PCIE-32GB": 112,
        "Tesla T4": 65,
    }
    tflops |= {
        "NVIDIA H800 PCIe": 756,
        "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA GeForce RTX 4090": 165.2,
    }
    assert {name: peak_flops_by_name(name) for name in tflops} == {
        name: peak * 1e12 for name, peak in tflops.items()
    }
    unknown = (
        "L40",
        "A10",
        "GeForce RTX 3060",
        "GeForce RTX 4090 Laptop GPU",
        "A100 MIG 1g.5gb",
        "A100-SXM-64GB",
        "GeForce RTX 4090 D",
        "GeForce RTX 5090 D",
        "H20-3e",
    )
    assert [name for name in unknown if peak_flops_by_name(f"NVIDIA {name}")] == []


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", None)])
def test_peak_flops_of_cpus_and_float32_are_unknown(device: str, dtype: torch.dtype | None) -> None:
    assert peak_flops(torch.device(device), dtype) is None


# ---- logger and sinks


class Cluster(DummyTrainContext):
    """Core API's train context; records its calls."""

    def __init__(self, board: Path | None = None) -> None:
        super().__init__(board)
        self.progress: list[float] = []
        self.statuses: queue.SimpleQueue[str] = queue.SimpleQueue()

    def report_progress(self, progress: float) -> None:
        self.progress.append(progress)

    def set_status(self, status: str) -> None:
        self.statuses.put(status)


TRAINING = {
    "loss": 3.14159,
    "tokens_per_second": 12345.6,
    "lr": 1e-4,
    "mfu": 0.4567,
    "step_seconds": 0.1,
}
VALIDATION = {"loss": 2.5, "perplexity": 12.18249, "batches": 10}


def started(
    run_dir: Path | None, *, step: int = 0, rank: int = 0, cluster: Cluster | None = None
) -> MetricLogger:
    logger = MetricLogger(rank, run_dir, cluster or Cluster(), max_steps=100)
    logger.open(step)
    return logger


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def scalars(run_dir: Path, group: str, key: str) -> dict[int, float]:
    events = EventAccumulator(str(run_dir / group)).Reload()
    return {
        event.step: event.value
        for event in events.Scalars(key if key == "loss" else f"{group}/{key}")
    }


def test_logger_writes_lines_and_scalars_at_once(tmp_path: Path) -> None:
    logger = started(tmp_path)
    reports = {"training": TRAINING, "validation": VALIDATION}
    for number, (group, metrics) in enumerate(reports.items(), 1):
        logger.log(group, 10, metrics)
        assert len(lines(tmp_path)) == number
    logger.close()
    for line, (group, metrics) in zip(lines(tmp_path), reports.items(), strict=True):
        assert line == {"group": group, "step": 10, "time": line["time"]} | metrics
        for key, value in metrics.items():
            assert scalars(tmp_path, group, key) == {10: pytest.approx(value)}


@pytest.mark.parametrize("start", [0, 12_345, 20_000])
def test_logger_resumes_long_files_as_short_ones(tmp_path: Path, start: int) -> None:
    path = tmp_path / "metrics.jsonl"
    reports = [
        json.dumps({"group": group, "step": step, "time": 1.0, "loss": step})
        for step in range(1, 20_001)
        for group in ("training", "validation")
    ]
    path.write_text("\n".join(reports) + "\n")
    with MetricLogger(0, tmp_path, Cluster(), max_steps=100) as logger:
        logger.open(start, {"training"})
    kept = [line for line in reports if json.loads(line)["step"] <= start]
    if start:
        del kept[-2]
    assert path.read_text().splitlines() == kept


@pytest.mark.parametrize("start", [0, 20])
def test_logger_logs_repeated_steps_once(tmp_path: Path, start: int) -> None:
    killed = started(tmp_path)
    for step in (10, 20, 30, 40):
        killed.log("training", step, {"loss": float(step)})
    killed.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 1}\n[1]\n{}\n"\xff"\n{"group": "training", "st'
        )  # truncated by the kill
    time.sleep(1)  # TensorBoard reads the files of one second in the order of their names
    resumed = started(tmp_path, step=start)
    resumed.log("training", 30, {"loss": 31.0})
    resumed.close()
    expected = {step: float(step) for step in (10, 20) if step <= start} | {30: 31.0}
    written = [line for line in lines(tmp_path) if "loss" in line]
    assert [(line["step"], line["loss"]) for line in written] == list(expected.items())
    assert scalars(tmp_path, "training", "loss") == expected


def test_logger_error_of_a_file_is_one_line(tmp_path: Path) -> None:
    logger = started(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(RunError, match=f"^{tmp_path}: .*File too large"):
            logger.log("training", 10, TRAINING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with suppress(RunError):  # TensorBoard's thread may have reached the limit, too
        logger.close()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=re.escape(str(tmp_path))):
        started(tmp_path)


def test_logger_error_of_tensorboards_thread_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = set(threading.enumerate())
    logger = started(tmp_path)
    threads = set(threading.enumerate()) - before
    monkeypatch.setattr(RecordWriter, "write", fail)
    with pytest.raises(RunError, match=f"^{tmp_path}: .*No space left"):  # noqa: PT012  # in either call
        logger.log("training", 1, {"loss": 1.0})
        for thread in threads:
            thread.join(1)
        logger.log("training", 2, {"loss": 1.0})
    with pytest.raises(RunError, match="the first error"), logger:
        raise RunError("the first error")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "method"), [(RecordWriter, "close"), (JSONL, "write")])
def test_logger_that_cannot_write_does_not_fail_a_saved_run(
    kind: type,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with started(tmp_path) as logger:
        monkeypatch.setattr(kind, method, fail)
        logger.log_checkpoint(8, "uuid")
    printed = capsys.readouterr().out
    assert f"{tmp_path}: cannot write metrics (No space left on device)" in printed


def test_logger_reports_progress_and_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster()
    logger = started(None, cluster=cluster)
    assert cluster.statuses.get(timeout=PATIENCE) == "training"
    with logger.status("validating"):
        assert cluster.statuses.get(timeout=PATIENCE) == "validating"
    assert cluster.statuses.get(timeout=PATIENCE) == "training"
    reports = [
        ("training", 25, TRAINING),
        ("validation", 25, VALIDATION),
        ("training", 100, TRAINING),
    ]
    for report in reports:
        logger.log(*report)
    logger.close()
    assert cluster.progress in ([0.25, 1.0], [1.0])  # reported in the background, the newest only
    assert cluster.statuses.empty()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_logger_reports_the_status_of_an_early_failure() -> None:
    class SlowCluster(Cluster):
        def set_status(self, status: str) -> None:
            time.sleep(0.2)
            super().set_status(status)

    cluster = SlowCluster()
    with pytest.raises(RunError), MetricLogger(0, None, cluster, max_steps=100):
        raise RunError("no such file")
    assert cluster.statuses.get_nowait() == "failed"


def test_log_sample_writes_file_tensorboard_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path / "cluster")
    for run_dir in (tmp_path, None):
        logger = started(run_dir, cluster=cluster)
        logger.log_sample(10, "to be", " or\n\x1b[2Jnot")
        logger.close()
        assert "sample      step  10/100\nto be or\n\\x1b[2Jnot\n" in capsys.readouterr().out
    (line,) = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert line == {
        "group": "sample",
        "step": 10,
        "time": line["time"],
        "prompt": "to be",
        "text": " or\n\x1b[2Jnot",
    }
    for folder in (tmp_path / "validation", tmp_path / "cluster"):
        (text,) = EventAccumulator(str(folder)).Reload().Tensors("sample/text_summary")
        assert (text.step, text.tensor_proto.string_val[0]) == (10, b"    to be or\n    \x1b[2Jnot")


def test_logger_of_other_ranks_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster()
    for run_dir in (tmp_path, None):
        logger = started(run_dir, rank=1, cluster=cluster)
        logger.info("hello")
        logger.on_step_end()
        with logger.status("validating"):
            logger.log("training", 10, TRAINING)
        logger.close()
    assert not list(tmp_path.iterdir())
    assert cluster.statuses.empty()
    assert capsys.readouterr() == ("", "")


def test_console_without_a_terminal_prints_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = started(tmp_path, step=5)
    logger.log("training", 10, TRAINING)
    logger.log("validation", 10, VALIDATION)
    logger.log("validation", 20, {"loss": 2.5, "eval_arc_easy_acc": 0.25, "eval_arc_easy_bpb": 1.5})
    logger.close()
    logger.info("after the end")
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 5
    assert re.search(
        r"training +step +10/100 +loss +3.1416 +lr 1.00e-04 +tokens/s +12,346 +MFU 45.7% +left",
        output,
    )
    assert re.search(r"validation +step +10/100 +loss +2.5000 +perplexity 12.18\n", output)
    assert re.search(r"loss +2.5000 +arc_easy acc 0.250 +arc_easy bpb 1.500\n", output)


def test_console_shows_what_training_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    table = page.partition("## Training\n")[2].partition("\n- ")[0]
    reported = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert {"skipped_steps", "idle_experts"} <= set(reported)
    logger = started(tmp_path)
    outputs: list[str] = []
    for value in (0, 37):
        logger.log("training", 10, dict.fromkeys(reported, value))
        outputs.append(capsys.readouterr().out)
    logger.close()
    usual, unusual = outputs
    # tokens_per_second says it.
    assert len(re.findall(r"(?<=\s)3\.?7", unusual)) == len(reported) - 1
    for label in ("skipped steps", "waiting for data", "blocked by saving", "idle experts"):
        assert label in unusual
        assert label not in usual


def test_console_on_a_terminal_has_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (24, 120))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        logger = started(tmp_path, step=5)
        for _ in range(10):
            logger.on_step_end()
        logger.log("training", 15, TRAINING)
        logger.log("validation", 15, VALIDATION)
        logger.close()
    output = b""
    with suppress(OSError):  # EIO: all was read
        while block := os.read(reading, 1 << 16):
            output += block
    os.close(reading)
    shown = output.decode()
    assert "15/100" in shown
    assert "training    step  15/100  loss  3.1416" in shown
    assert "validation  step  15/100  loss  2.5000" in shown
    assert "left" not in shown  # the bar shows it
