"""Training metrics: sums kept on the device, and one exchange between ranks per report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lm.metrics.device import allocation_retries, peak_memory_gib
from lm.metrics.records import MetricSums
from lm.runtime.world import World

SUMS = ("loss_sum", "n_terms", "grad_norm_sum", "n_taken", "n_skipped")
"""The sums that are computed on the device, in the order of `MetricsAccumulator._sums`."""
ON_DEVICE = (*SUMS, "consecutive_skipped", "most_consecutive_skipped")


class MetricsAccumulator:
    """Sums of the metrics between two reports, kept without synchronizing with the device.

    Args:
        ideal_seconds_per_token: that its FLOPs take at the peak of a device; None = no MFU.
        statistics: names of what the objective reports besides the loss.
    """

    def __init__(
        self,
        device: torch.device,
        world: World,
        ideal_seconds_per_token: float | None,
        statistics: Sequence[str] = (),
    ) -> None:
        self._device = device
        self._world = world
        self._ideal_seconds_per_token = ideal_seconds_per_token
        self._names = statistics
        self._load(MetricSums())

    def _load(self, sums: MetricSums) -> None:
        on_device = self._on_device([getattr(sums, key) for key in ON_DEVICE])
        self._sums = on_device[: len(SUMS)]
        self._consecutive_skipped = on_device[ON_DEVICE.index("consecutive_skipped")]
        self._most_consecutive_skipped = on_device[ON_DEVICE.index("most_consecutive_skipped")]
        self._statistics = self._on_device([sums.statistics.get(name, 0) for name in self._names])
        self.n_steps = sums.n_steps
        self._n_tokens = sums.n_tokens
        self._data_seconds = sums.data_seconds
        self._save_seconds: float | None = None
        self._retries_before = allocation_retries(self._device)
        self._start_time = time.perf_counter() - sums.seconds

    def _on_device(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def reset(self, ranks: Sequence[MetricSums] | None = None) -> None:
        """Start the clock, and the sums: from those of all ranks that saved, or from zero."""
        if not ranks:
            self._load(MetricSums())
        elif len(ranks) == self._world.size:
            self._load(ranks[self._world.rank])
        else:  # of another world size: rank 0 continues with the sums of all terms
            loss_sum = 0.0
            statistics: dict[str, float] = {}
            if self._world.rank == 0:
                loss_sum = math.fsum(sums.loss_sum for sums in ranks)
                for name in self._names:
                    statistics[name] = math.fsum(sums.statistics.get(name, 0) for sums in ranks)
            update = {"loss_sum": loss_sum, "statistics": statistics}
            self._load(ranks[0].model_copy(update=update))

    def state_dict(self) -> MetricSums:
        """Return the sums since the last report; synchronizes with the device."""
        skipped = torch.stack([self._consecutive_skipped, self._most_consecutive_skipped])
        values = torch.cat([self._sums, skipped]).tolist()
        return MetricSums(
            **dict(zip(ON_DEVICE, values, strict=True)),
            n_steps=self.n_steps,
            n_tokens=self._n_tokens,
            seconds=time.perf_counter() - self._start_time,
            data_seconds=self._data_seconds,
            statistics=dict(zip(self._names, self._statistics.tolist(), strict=True)),
        )

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
        """Exclude the time of the block from training time; it is reported as `save_stall_seconds`.

        The block does not wait for what it starts on the device, such as the copy of an
        asynchronous checkpoint.
        """
        start = self._now()
        yield
        seconds = time.perf_counter() - start
        self._start_time += seconds
        self._save_seconds = (self._save_seconds or 0.0) + seconds

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Report the time of the block in `waiting_for_data_percent`."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def add(
        self,
        loss_sum: Tensor,
        n_terms: int,
        n_tokens: int,
        grad_norm: Tensor,
        skipped: Tensor,
        statistics: Tensor | None = None,
    ) -> None:
        """Add a step, without waiting for it.

        Args:
            loss_sum: over the terms of this rank (nats); all other values are over all ranks.
            skipped: 1.0 if the optimizer skipped the step, else 0.0. The loss and norm of a skipped
                step do not count.
            statistics: of the objective, over the terms of this rank; None = none.
        """
        loss_sum = loss_sum.to(self._device, torch.float64)
        grad_norm = grad_norm.to(self._device, torch.float64)
        skipped = skipped.to(self._device, torch.float64)
        taken = 1 - skipped
        # Not multiplied by `taken`: they can be inf, and inf x 0 is NaN.
        counted = torch.stack([loss_sum, grad_norm]).masked_fill(skipped > 0, 0.0)
        loss_sum, grad_norm = counted.unbind()
        self._sums += torch.stack([loss_sum, n_terms * taken, grad_norm, taken, skipped])

        if statistics is not None:
            self._statistics += statistics.masked_fill(skipped > 0, 0.0)
        self._consecutive_skipped = (self._consecutive_skipped + 1) * skipped
        self._most_consecutive_skipped = torch.maximum(
            self._most_consecutive_skipped, self._consecutive_skipped
        )
        self.n_steps += 1
        self._n_tokens += n_tokens

    def add_listed_step(self) -> None:
        """Add a step that `skip_steps` lists, in which nothing was computed."""
        self._sums[SUMS.index("n_skipped")] += 1
        self.n_steps += 1

    def report(self) -> tuple[dict[str, float], int]:
        """Return the training metrics of all ranks since the last report, and start again.

        Returns:
            The metrics, without `loss` and `grad_norm` if all steps were skipped; and the most
            consecutive skipped steps.
        """
        sums = self.state_dict()
        retries = allocation_retries(self._device) - self._retries_before
        own = [sums.loss_sum, sums.data_seconds, peak_memory_gib(self._device), retries]
        own += sums.statistics.values()
        ranks = self._world.all_gather(self._on_device(own))
        loss_sums, data_seconds, memory, all_retries, *statistics = ranks.T.tolist()

        metrics: dict[str, float] = {}
        if sums.n_taken:
            metrics["loss"] = math.fsum(loss_sums) / sums.n_terms
            for name, its_sums in zip(self._names, statistics, strict=True):
                metrics[name] = math.fsum(its_sums) / sums.n_terms
            metrics["grad_norm"] = sums.grad_norm_sum / sums.n_taken
        tokens_per_second = sums.n_tokens / sums.seconds
        metrics["peak_memory_gib"] = max(memory)
        if any(all_retries):
            metrics["allocation_retries"] = sum(all_retries)
        metrics["skipped_steps"] = sums.n_skipped
        metrics["step_seconds"] = sums.seconds / sums.n_steps
        metrics["tokens_per_second"] = tokens_per_second
        metrics["waiting_for_data_percent"] = 100 * max(data_seconds) / sums.seconds
        if self._save_seconds is not None:
            metrics["save_stall_seconds"] = self._save_seconds
        if self._ideal_seconds_per_token is not None:
            # Model FLOPs utilization, of all devices together.
            metrics["mfu"] = tokens_per_second * self._ideal_seconds_per_token / len(ranks)

        self._load(MetricSums(consecutive_skipped=sums.consecutive_skipped))
        return metrics, int(sums.most_consecutive_skipped)
