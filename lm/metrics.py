"""What a run says of itself: sums kept on the device, one exchange per report, written to every place from here.

Places: `metrics.jsonl` and TensorBoard scalars off the cluster, Core API's reports on it (which the Web UI
and its TensorBoard show), and the terminal.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from determined import core
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lm.cluster import Courier
from lm.errors import RunError

GIB = 2**30

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense peak of a GPU in FLOP/s for 16-bit matrix products, by words of its name, the first that fit (vendors'
data sheets, without sparsity). bfloat16, where a GPU has it, is as fast as float16."""


class MetricsConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    report_rate: int = Field(10, gt=0, description="steps between training reports")
    validation_rate: int | None = Field(None, gt=0, description="steps between validations; null = report_rate")


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Dense peak of `device` for matrix products in `dtype` (FLOP/s); None where it is not known."""
    if device.type != "cuda" or dtype is None:
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """Dense 16-bit peak of the GPU that calls itself `name` (FLOP/s); None where it is not known."""
    if "MIG" in name:  # a slice of the GPU that the rest of the name says
        return None
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far: allocated on the GPU, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Meter:
    """Adds up what happens between two reports, without waiting for the device.

    Args:
        device: where losses are.
        gather: hands every rank's list of numbers to every rank.
        flops_per_token: forward and backward.
        peak: of one device, in FLOP/s, or None.
    """

    def __init__(
        self,
        device: torch.device,
        gather: Callable[[list[float]], list[list[float]]],
        flops_per_token: float,
        peak: float | None,
    ) -> None:
        self._device = device
        self._gather = gather
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._streak = torch.zeros((), dtype=torch.float64, device=device)
        self.restart()

    def restart(self) -> None:
        """Start the sums and the clock anew: when training begins, and behind every report."""
        # nats, targets, gradient norm, steps made, steps skipped, longest row of skipped steps
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        self._steps = 0
        self._tokens = 0
        self._data_seconds = 0.0
        self._stall_seconds: float | None = None
        self._began = time.perf_counter()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock: for validation and saving, which are no training."""
        self._wait_for_device()
        stopped = time.perf_counter()
        yield
        self._wait_for_device()
        self._began += time.perf_counter() - stopped

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Stops the clock, and counts the time as lost to saving."""
        with self.paused():
            start = time.perf_counter()
            yield
            self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - start

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def add(self, nats: Tensor, targets: int, tokens: int, norm: Tensor, skipped: Tensor) -> None:
        """Take note of a step, without waiting for it.

        Args:
            nats: sum of the loss over this rank's targets.
            targets: number of targets, over all ranks.
            tokens: sequence positions, over all ranks.
            norm: gradient norm.
            skipped: 1.0 if the step was not made, else 0.0. Its loss and norm are left out.
        """
        nats, norm, skipped = (value.to(self._device, torch.float64) for value in (nats, norm, skipped))
        made = 1 - skipped
        self._streak = (self._streak + 1) * skipped
        nats, norm = torch.stack([nats, norm]).masked_fill(skipped > 0, 0.0)  # inf x 0 would be NaN
        self._sums[:5] += torch.stack([nats, targets * made, norm, made, skipped])
        self._sums[5] = torch.maximum(self._sums[5], self._streak)
        self._steps += 1
        self._tokens += tokens

    def report(self) -> tuple[dict[str, float], int]:
        """Exchange the sums with all ranks, and start new ones.

        Returns:
            The training metrics since the last report, and the longest row of skipped steps among them.
            `loss` and `grad_norm` are missing where every step was skipped.
        """
        sums = self._sums.tolist()  # waits for the device
        seconds = time.perf_counter() - self._began
        everyone = self._gather([sums[0], self._data_seconds, peak_memory_gib(self._device)])
        nats, waits, memories = zip(*everyone, strict=True)
        _, targets, norms, made, skipped, longest = sums
        speed = self._tokens / seconds
        metrics = {
            "tokens_per_second": speed,
            "step_seconds": seconds / self._steps,
            "data_seconds": max(waits) / self._steps,
            "peak_memory_gib": max(memories),
            "skipped_steps": skipped,
        }
        if made:
            metrics = {"loss": math.fsum(nats) / targets, "grad_norm": norms / made} | metrics
        if self._stall_seconds is not None:
            metrics["save_stall_seconds"] = self._stall_seconds
        if self._peak is not None:
            metrics["mfu"] = speed * self._flops_per_token / (self._peak * len(everyone))
        self.restart()
        return metrics, int(longest)


class Reporter:
    """Rank 0's voice: writes every report to all places; on other ranks it is silent.

    Args:
        folder: the run's folder off the cluster; None on it.
        train: Core API's train context.
        max_steps: length of the run.
    """

    def __init__(self, rank: int, folder: Path | None, train: core.TrainContext, max_steps: int) -> None:
        self._speaks = rank == 0
        self._folder = folder
        self._train = train
        self._max_steps = max_steps
        self._start = 0
        self._began = 0.0
        self._lines: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._bar: tqdm[Any] | None = None
        self._print_failure = threading.excepthook
        self._courier = Courier() if self._speaks and folder is None else None

    def begin(self, start: int) -> None:
        """Open the files behind step `start`: what an earlier process wrote beyond it will be written again."""
        self._start, self._began = start, time.monotonic()
        self._tell(self._train.set_status, "training")
        if not self._speaks or self._folder is None:
            return
        threading.excepthook = self._on_failure
        with self._writing():
            self._lines = _open_lines(self._folder / "metrics.jsonl", start)
            self._board = SummaryWriter(self._folder / "tensorboard", purge_step=start + 1, flush_secs=10)
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._max_steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self._folder}: metrics cannot be written ({error.strerror}); the last checkpoint is kept"
            raise RunError(problem) from None

    def _on_failure(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread keeps its error for the next report, which says it in a line; others' are printed."""
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self._print_failure(failure)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._speaks:
            print(line, flush=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show in the Web UI that the trial is at `what`, and at training behind it."""
        self._tell(self._train.set_status, what)
        yield
        self._tell(self._train.set_status, "training")

    def _tell(self, deliver: Callable[[Any], None], news: Any) -> None:
        if self._courier is not None:
            self._courier.tell(deliver, news)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def report(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write one report.

        Args:
            group: "training" or "validation".
            step: steps completed.
        """
        if not self._speaks:
            return
        self._train.report_metrics(group, steps_completed=step, metrics=dict(metrics))
        with self._writing():
            if self._lines is not None:
                record: dict[str, Any] = {"group": group, "step": step, "time": round(time.time(), 3)}
                self._lines.write(json.dumps(record | dict(metrics)) + "\n")
                self._lines.flush()
            if self._board is not None:
                for key, value in metrics.items():
                    self._board.add_scalar(f"{group}/{key}", value, step)
        if group == "training":
            self._tell(self._train.report_progress, min(1.0, step / self._max_steps))
        self._show(group, step, metrics)

    def _show(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        shown = {key: text(metrics[key]) for key, text in _SHOWN.items() if key in metrics}
        if self._bar is not None and group == "training":
            self._bar.set_postfix({_NAMES.get(key, key): value for key, value in shown.items() if key != "lr"})
            return
        left = ""
        if group == "training" and step > self._start:
            seconds = (time.monotonic() - self._began) / (step - self._start) * (self._max_steps - step)
            left = f"  left {tqdm.format_interval(seconds)}"
        values = "  ".join(f"{_NAMES.get(key, key)} {value}" for key, value in shown.items())
        end = f"/{self._max_steps}" if self._max_steps else ""
        self.say(f"{group:<10}  step {step:>{max(len(end) - 1, 1)}}{end}  {values}{left}")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with suppress(RunError) if error else nullcontext():  # the first thing that went wrong is what is said
            self.close()

    def close(self) -> None:
        """Close the files and the progress bar; `say` still speaks."""
        threading.excepthook = self._print_failure
        places, self._bar = (self._bar, self._courier, self._lines, self._board), None
        for place in places:
            if place is not None:
                with self._writing():
                    place.close()


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": "{:.4f}".format,
    "perplexity": "{:.4g}".format,
    "lr": "{:.2e}".format,
    "tokens_per_second": "{:,.0f}".format,
    "mfu": "{:.1%}".format,
}
_NAMES = {"tokens_per_second": "tokens/s"}


def _open_lines(path: Path, start: int) -> TextIO:
    """Open the metrics file to append behind step `start`, without the lines of steps that will be made again."""
    kept = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # cut short by a kill, or no line of ours
                if json.loads(line)["step"] <= start:
                    kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept))
    draft.replace(path)
    return path.open("a")
