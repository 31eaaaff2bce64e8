"""Training metrics: sums kept on the device between reports, and one exchange between ranks per report."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lm.runtime.world import World

GIB = 2**30

PEAK_TFLOPS = {"B200": 2250, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312}
PEAK_TFLOPS |= {"L40S": 362, "L4": 121, "V100-PCIE": 112, "V100": 125, "T4": 65}
"""Dense 16-bit peak (TFLOP/s, without sparsity) by a part of the GPU's name, from the vendors' data sheets; the first
match counts. Where a GPU supports bfloat16, it is as fast as float16."""


class MetricsConfig(BaseModel):
    """How often metrics are reported."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    report_rate: int = Field(10, gt=0, description="steps between training reports")
    validation_rate: int | None = Field(None, gt=0, description="steps between validations; null = report_rate")


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the dense peak of `device` for matrix products in `dtype` (FLOP/s), or None if unknown."""
    known = device.type == "cuda" and dtype is not None
    return peak_flops_by_name(torch.cuda.get_device_name(device)) if known else None


def peak_flops_by_name(name: str) -> float | None:
    """Return the dense 16-bit peak of the GPU called `name` (FLOP/s), or None if unknown."""
    if "MIG" in name:  # a slice of the GPU
        return None
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on the GPU, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class MetricsAccumulator:
    """Sums of the metrics between two reports, kept without synchronizing with the device.

    Args:
        flops_per_token: forward and backward.
        peak_flops: of one device (FLOP/s); None = unknown, no MFU.
    """

    def __init__(self, device: torch.device, world: World, flops_per_token: float, peak_flops: float | None) -> None:
        self._device, self._world = device, world
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._consecutive_skipped = torch.zeros((), dtype=torch.float64, device=device)
        self.restart()

    def restart(self) -> None:
        """Reset the sums and the clock: before the first step and after each report."""
        # loss_sum, target tokens, gradient norms, optimizer steps, skipped steps; most consecutive skipped steps
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        self._n_steps = self._n_tokens = 0
        self._data_seconds = 0.0
        self._save_seconds: float | None = None
        self._start_time = time.perf_counter()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from training time, e.g. for validation."""
        start = self._now()
        yield
        self._start_time += self._now() - start

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Exclude the time of the block from training time, and report it as `save_stall_seconds`."""
        with self.paused():
            start = time.perf_counter()
            yield
            self._save_seconds = (self._save_seconds or 0.0) + time.perf_counter() - start

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Report the time of the block as `data_seconds`."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def add(self, loss_sum: Tensor, n_target_tokens: int, n_tokens: int, grad_norm: Tensor, skipped: Tensor) -> None:
        """Add a step, without waiting for it.

        Args:
            loss_sum: over the target tokens of this rank (nats); all other values are over all ranks.
            skipped: 1.0 if the optimizer skipped the step, else 0.0. The loss and norm of a skipped step do not count.
        """
        loss_sum, grad_norm, skipped = (x.to(self._device, torch.float64) for x in (loss_sum, grad_norm, skipped))
        taken = 1 - skipped
        self._consecutive_skipped = (self._consecutive_skipped + 1) * skipped
        loss_sum, grad_norm = torch.stack([loss_sum, grad_norm]).masked_fill(skipped > 0, 0.0)  # inf x 0 is NaN
        self._sums[:5] += torch.stack([loss_sum, n_target_tokens * taken, grad_norm, taken, skipped])
        self._sums[5] = torch.maximum(self._sums[5], self._consecutive_skipped)
        self._n_steps += 1
        self._n_tokens += n_tokens

    def report(self) -> tuple[dict[str, float], int]:
        """Return the training metrics of all ranks since the last report and the most consecutive skipped steps.

        `loss` and `grad_norm` are missing if all steps were skipped.
        """
        sums = self._sums.tolist()  # synchronizes with the device
        seconds = time.perf_counter() - self._start_time
        ranks = self._world.all_gather_object([sums[0], self._data_seconds, peak_memory_gib(self._device)])
        loss_sums, data_seconds, memory = zip(*ranks, strict=True)
        _, n_target_tokens, grad_norms, taken, skipped, most_consecutive_skipped = sums
        tokens_per_second = self._n_tokens / seconds
        metrics = {
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds / self._n_steps,
            "data_seconds": max(data_seconds) / self._n_steps,
            "peak_memory_gib": max(memory),
            "skipped_steps": skipped,
        }
        if taken:
            metrics = {"loss": math.fsum(loss_sums) / n_target_tokens, "grad_norm": grad_norms / taken} | metrics
        if self._save_seconds is not None:
            metrics["save_stall_seconds"] = self._save_seconds
        if self._peak_flops is not None:
            metrics["mfu"] = tokens_per_second * self._flops_per_token / (self._peak_flops * len(ranks))
        self.restart()
        return metrics, int(most_consecutive_skipped)
