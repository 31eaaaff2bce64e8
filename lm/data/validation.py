"""What a validation says: the names of its metrics, and their values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from lm.data.dataset import ValidationSet, has_perplexity
from lm.runtime.world import World


class ValidationSums:
    """Sums over the terms of the loss of each validation set, on this rank's device.

    Args:
        n_bytes: of text of the targets of each set; 0 = unknown.
        statistics: names of what the objective reports besides the loss.
    """

    def __init__(
        self,
        sets: Sequence[ValidationSet],
        n_bytes: Sequence[int],
        world: World,
        statistics: Sequence[str] = (),
    ) -> None:
        self._sets = sets
        self._n_bytes = n_bytes
        self._world = world
        self._names = statistics
        n_sums = 2 + len(statistics)
        self._sums = torch.zeros(len(sets), n_sums, dtype=torch.float64, device=world.device)

    def add(self, number: int, loss_sum: Tensor, n_terms: Tensor, statistics: Tensor) -> None:
        """Add what the objective computed of a micro-batch of the set `number`."""
        sums = [loss_sum[None].double(), n_terms[None].double(), statistics.double()]
        self._sums[number] += torch.cat(sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks: means over the sets, then those of each named set."""
        of_ranks = self._world.all_gather(self._sums).cpu()  # R, sets, sums
        of_each: list[dict[str, float]] = []
        of_named_sets: dict[str, float] = {}
        for number, validation_set in enumerate(self._sets):
            loss_sum, n_terms, *sums = map(math.fsum, of_ranks[:, number].T.tolist())
            of_set = {"loss": loss_sum / n_terms}
            for name, its_sum in zip(self._names, sums, strict=True):
                of_set[name] = its_sum / n_terms
            n_bytes = self._n_bytes[number]
            if n_bytes > 0:
                of_set["bits_per_byte"] = loss_sum / math.log(2) / n_bytes
            of_each.append(of_set)
            if validation_set.name is not None:
                for name, value in of_set.items():
                    of_named_sets[validation_set.metric(name)] = value

        metrics: dict[str, float] = {}
        for name in of_each[0]:
            values = [of_set[name] for of_set in of_each if name in of_set]
            if len(values) == len(of_each):
                metrics[name] = statistics.fmean(values)
            if name == "loss" and has_perplexity(self._sets):
                metrics["perplexity"] = math.exp(min(metrics["loss"], 700))  # a finite float
        return metrics | of_named_sets
