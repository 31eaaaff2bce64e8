"""What a run says of itself: sums kept on the device, one exchange per report, written to every place from here.

Places: `metrics.jsonl` and TensorBoard scalars off the cluster, Core API's reports on it (which the Web UI
and its TensorBoard show), and the terminal.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

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


class MetricsAccumulator:
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

    def add(self, loss_sum: Tensor, targets: int, tokens: int, norm: Tensor, skipped: Tensor) -> None:
        """Take note of a step, without waiting for it.

        Args:
            nats: sum of the loss over this rank's targets.
            targets: number of targets, over all ranks.
            tokens: sequence positions, over all ranks.
            norm: gradient norm.
            skipped: 1.0 if the step was not made, else 0.0. Its loss and norm are left out.
        """
        loss_sum, norm, skipped = (value.to(self._device, torch.float64) for value in (loss_sum, norm, skipped))
        made = 1 - skipped
        self._streak = (self._streak + 1) * skipped
        loss_sum, norm = torch.stack([loss_sum, norm]).masked_fill(skipped > 0, 0.0)  # inf x 0 would be NaN
        self._sums[:5] += torch.stack([loss_sum, targets * made, norm, made, skipped])
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
        loss_sum, waits, memories = zip(*everyone, strict=True)
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
            metrics = {"loss": math.fsum(loss_sum) / targets, "grad_norm": norms / made} | metrics
        if self._stall_seconds is not None:
            metrics["save_stall_seconds"] = self._stall_seconds
        if self._peak is not None:
            metrics["mfu"] = speed * self._flops_per_token / (self._peak * len(everyone))
        self.restart()
        return metrics, int(longest)
