"""What is reported is true: sums over steps and ranks, clocks without pauses, and every report in every place once."""

from __future__ import annotations

import errno
import json
import os
import queue
import re
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from determined.core import DummyTrainContext
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from lm.errors import RunError
from lm.metrics import accumulator
from lm.metrics.accumulator import MetricsAccumulator, peak_flops, peak_flops_by_name
from lm.metrics.logger import MetricLogger

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accumulator, "time", clock)
    return clock


def meter(*others: list[float], peak: float | None = None) -> MetricsAccumulator:
    """A meter of the first of several ranks, of which the others say `others`: nats, seconds of waiting, GiB."""
    return MetricsAccumulator(CPU, lambda mine: [mine, *others], flops_per_token=1e6, peak=peak)


def add(
    to: MetricsAccumulator,
    *,
    loss_sum: float = 2.0,
    targets: int = 4,
    tokens: int = 8,
    norm: float = 1.0,
    skipped: int = 0,
) -> None:
    to.add(torch.tensor(loss_sum), targets, tokens, torch.tensor(norm), torch.tensor(float(skipped)))


# ---- the meter -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_all_targets_of_all_steps_and_ranks(clock: Clock) -> None:
    measured = meter([30.0, 0.0, 0.0], [5.0, 0.0, 0.0])
    add(measured, loss_sum=2, targets=10, norm=1)
    add(measured, loss_sum=8, targets=20, norm=4)
    clock.now = 1
    report, longest = measured.report()
    assert report["loss"] == (2 + 8 + 30 + 5) / 30
    assert (report["grad_norm"], report["skipped_steps"], longest) == (2.5, 0, 0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_skipped_steps_count_as_skipped_and_in_nothing_else_but_time(clock: Clock, poison: float) -> None:
    measured = meter()
    add(measured, loss_sum=2, targets=4, norm=3)
    add(measured, loss_sum=poison, targets=4, norm=poison, skipped=1)
    clock.now = 4
    report, longest = measured.report()
    assert (report["loss"], report["grad_norm"], report["skipped_steps"], longest) == (0.5, 3, 1, 1)
    assert (report["step_seconds"], report["tokens_per_second"]) == (2, 4)


def test_loss_and_norm_are_missing_where_every_step_was_skipped(clock: Clock) -> None:
    measured = meter()
    add(measured, loss_sum=float("nan"), norm=float("nan"), skipped=1)
    clock.now = 1
    report, _ = measured.report()
    assert report["skipped_steps"] == 1
    assert not {"loss", "grad_norm"} & report.keys()


def test_the_longest_row_of_skipped_steps_is_counted_across_reports(clock: Clock) -> None:
    measured = meter()
    rows = []
    for steps in ([0, 1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0]):
        for skipped in steps:
            add(measured, skipped=skipped)
        clock.now += 1
        rows.append(measured.report()[1])
    assert rows == [2, 3, 1]


def test_a_report_begins_new_sums(clock: Clock) -> None:
    measured = meter()
    add(measured, loss_sum=100, tokens=1000)
    clock.now = 1
    measured.report()
    add(measured, loss_sum=2, targets=4, tokens=8)
    clock.now = 3
    report, _ = measured.report()
    assert (report["loss"], report["tokens_per_second"], report["step_seconds"]) == (0.5, 4, 2)


def test_paused_time_is_no_training_time(clock: Clock) -> None:
    measured = meter()
    for _ in range(2):
        clock.now += 1
        add(measured, tokens=100)
        with measured.paused():
            clock.now += 50
    report, _ = measured.report()
    assert (report["tokens_per_second"], report["step_seconds"]) == (100, 1)


def test_time_lost_to_saving_is_reported_apart_and_once(clock: Clock) -> None:
    measured = meter()
    seen = []
    for saves in ([3, 4], []):
        clock.now += 1
        add(measured)
        for seconds in saves:
            with measured.saving():
                clock.now += seconds
        report, _ = measured.report()
        seen.append((report["step_seconds"], report.get("save_stall_seconds")))
    assert seen == [(1, 7), (1, None)]


def test_the_clock_can_be_started_when_training_begins(clock: Clock) -> None:
    measured = meter()
    clock.now = 50
    measured.restart()
    clock.now = 52
    add(measured)
    assert measured.report()[0]["step_seconds"] == 2


def test_waiting_for_data_is_that_of_the_slowest_rank(clock: Clock) -> None:
    measured = meter([0.0, 9.0, 1.5], [0.0, 4.0, 10_000.0])
    for _ in range(3):
        with measured.waiting_for_data():
            clock.now += 1
        clock.now += 4
        add(measured)
    report, _ = measured.report()
    assert (report["data_seconds"], report["step_seconds"]) == (3, 5)
    assert report["peak_memory_gib"] == 10_000


def test_mfu_is_the_share_of_all_ranks_peak(clock: Clock) -> None:
    measured = meter([0.0, 0.0, 0.0], peak=1e9)
    add(measured, tokens=500)
    clock.now = 1
    assert measured.report()[0]["mfu"] == 500 * 1e6 / (2 * 1e9)


def test_mfu_is_absent_where_the_peak_is_unknown(clock: Clock) -> None:
    measured = meter()
    add(measured)
    clock.now = 1
    assert "mfu" not in measured.report()[0]


def test_memory_is_what_this_process_used() -> None:
    before = accumulator.peak_memory_gib(CPU)
    ballast = torch.ones(1 << 26)  # 256 MiB
    after = accumulator.peak_memory_gib(CPU)
    assert 0.05 < before <= after < 1000
    del ballast


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA B200", 2250),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_of_this_name_and_no_other(name: str, tflops: float | None) -> None:
    assert peak_flops_by_name(name) == (tflops and tflops * 1e12)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", None)])
def test_no_peak_is_claimed_for_a_cpu_or_for_float32(device: str, dtype: torch.dtype | None) -> None:
    assert peak_flops(torch.device(device), dtype) is None


# ---- the reporter --------------------------------------------------------------------------------------------


class Cluster(DummyTrainContext):
    """Core API's train context, keeping what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[str, int, dict[str, Any]]] = []
        self.progress: list[float] = []
        self.statuses: queue.SimpleQueue[str] = queue.SimpleQueue()

    def _report_trial_metrics(
        self, group: str, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        assert batch_metrics is None
        self.metrics.append((group, steps_completed, metrics))

    def report_progress(self, progress: float) -> None:
        self.progress.append(progress)

    def set_status(self, status: str) -> None:
        self.statuses.put(status)


TRAINING = {"loss": 3.14159, "tokens_per_second": 12345.6, "lr": 1e-4, "mfu": 0.4567, "step_seconds": 0.1}
VALIDATION = {"loss": 2.5, "perplexity": 12.18249, "batches": 10}


def reporter(folder: Path | None, *, start: int = 0, rank: int = 0, train: Cluster | None = None) -> MetricLogger:
    made = MetricLogger(rank, folder, train or Cluster(), max_steps=100)
    made.begin(start)
    return made


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path, tag: str) -> dict[int, float]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {event.step: event.value for event in board.Scalars(tag)}


def test_a_report_is_a_line_and_scalars(tmp_path: Path) -> None:
    written = reporter(tmp_path)
    written.report("training", 10, TRAINING)
    written.report("validation", 10, VALIDATION)
    written.close()
    first, second = lines(tmp_path)
    assert first == {"group": "training", "step": 10, "time": first["time"]} | TRAINING
    assert second == {"group": "validation", "step": 10, "time": second["time"]} | VALIDATION
    for group, reported in (("training", TRAINING), ("validation", VALIDATION)):
        for key, value in reported.items():
            assert scalars(tmp_path, f"{group}/{key}") == {10: pytest.approx(value)}


def test_a_line_is_on_disk_as_soon_as_it_is_reported(tmp_path: Path) -> None:
    written = reporter(tmp_path)
    written.report("training", 10, TRAINING)
    assert len(lines(tmp_path)) == 1
    written.close()


def test_steps_that_are_made_again_are_reported_once(tmp_path: Path) -> None:
    killed = reporter(tmp_path)
    for step in (10, 20, 30, 40):
        killed.report("training", step, {"loss": float(step)})
    killed.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"group": "training", "st')  # cut short by the kill
    resumed = reporter(tmp_path, start=20)
    resumed.report("training", 30, {"loss": 31.0})
    resumed.close()
    expected = {10: 10.0, 20: 20.0, 30: 31.0}
    assert {line["step"]: line["loss"] for line in lines(tmp_path)} == expected
    assert len(lines(tmp_path)) == 3
    assert scalars(tmp_path, "training/loss") == expected


def test_a_run_that_begins_again_at_step_0_leaves_nothing_of_its_first_attempt(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        attempt = reporter(tmp_path)
        attempt.report("training", 10, {"loss": loss})
        attempt.close()
    assert [line["loss"] for line in lines(tmp_path)] == [2.0]
    assert scalars(tmp_path, "training/loss") == {10: 2.0}


def test_a_place_that_cannot_be_written_is_one_line_and_lines_of_others_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n[1]\n{}\n"\xff"\n{"step": 9}\n')
    made = reporter(tmp_path, start=5)
    assert lines(tmp_path) == [{"step": 1}]
    assert made._lines is not None
    made._lines.close()
    made._lines = Path("/dev/full").open("w")  # noqa: SIM115
    refusal = f"{tmp_path}: metrics cannot be written (No space left on device); the last checkpoint is kept"
    with pytest.raises(RunError, match=re.escape(refusal)):
        made.report("training", 10, TRAINING)
    with pytest.raises(RunError, match=re.escape(refusal)):
        made.close()
    made._lines = None
    made.close()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=re.escape(f"{tmp_path}: metrics cannot be written (Is a directory)")):
        reporter(tmp_path)


def test_a_disk_that_fills_up_behind_tensorboards_back_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = set(threading.enumerate())
    reported = reporter(tmp_path)
    (worker,) = set(threading.enumerate()) - before
    monkeypatch.setattr(RecordWriter, "write", fail)
    with pytest.raises(RunError, match=r"metrics cannot be written \(No space left on device\)"):  # noqa: PT012
        reported.report("training", 1, {"loss": 1.0})
        worker.join(30)
        reported.report("training", 2, {"loss": 1.0})
    with pytest.raises(RunError, match="another thing"), reported:
        raise RunError("another thing")
    assert "Traceback" not in capsys.readouterr().err


def test_the_cluster_is_told_metrics_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster()
    told = reporter(None, train=cluster)
    told.report("training", 25, TRAINING)
    told.report("validation", 25, VALIDATION)
    told.report("training", 100, TRAINING)
    told.close()
    assert cluster.metrics == [("training", 25, TRAINING), ("validation", 25, VALIDATION), ("training", 100, TRAINING)]
    assert cluster.progress in ([0.25, 1.0], [1.0])  # the newest, in the background
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_cluster_is_told_what_the_trial_is_at() -> None:
    cluster = Cluster()
    told = reporter(None, train=cluster)
    assert cluster.statuses.get(timeout=10) == "training"
    with told.status("validating"):
        assert cluster.statuses.get(timeout=10) == "validating"
    assert cluster.statuses.get(timeout=10) == "training"
    told.close()
    assert cluster.statuses.empty()


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster()
    silent = reporter(tmp_path, rank=1, train=cluster)
    silent.log("hello")
    silent.step()
    silent.report("training", 10, TRAINING)
    silent.close()
    assert not list(tmp_path.iterdir())
    assert not cluster.metrics
    assert capsys.readouterr() == ("", "")


def test_a_plain_line_says_what_where_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = reporter(tmp_path, start=5)
    plain.report("training", 10, TRAINING)
    plain.report("validation", 10, VALIDATION)
    plain.close()
    training, validation = capsys.readouterr().out.splitlines()
    expected = "training    step  10/100  loss 3.1416  lr 1.00e-04  tokens/s 12,346  mfu 45.7%  left "
    assert training.startswith(expected)
    assert re.fullmatch(r"\d\d:\d\d", training.removeprefix(expected))
    assert validation == "validation  step  10/100  loss 2.5000  perplexity 12.18"


def test_on_a_terminal_a_bar_shows_training_and_lines_stand_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.openpty()
    os.set_blocking(reading, False)
    termios.tcsetwinsize(writing, (24, 120))
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        shown = reporter(tmp_path, start=5)
        for _ in range(10):
            shown.step()
        shown.report("training", 15, TRAINING)
        shown.report("validation", 15, VALIDATION)
        shown.close()
        output = os.read(reading, 1 << 16).decode()
    os.close(reading)
    assert "15/100" in output
    assert "loss=3.1416" in output
    assert "validation  step  15/100  loss 2.5000" in output
    assert "training  " not in output
