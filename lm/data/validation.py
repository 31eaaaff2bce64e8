"""What a validation says: the names of its metrics, and their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lm.data.dataset import ValidationSet, combine_metrics
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
        by_rank = self._world.all_gather(self._sums)  # R, sets, sums
        by_sum = by_rank.permute(1, 2, 0).tolist()
        of_each: list[dict[str, float]] = []
        for sums_of_ranks, n_bytes in zip(by_sum, self._n_bytes, strict=True):
            loss_sum, n_terms, *others = [math.fsum(values) for values in sums_of_ranks]
            of_set = {"loss": loss_sum / n_terms}
            for name, its_sum in zip(self._names, others, strict=True):
                of_set[name] = its_sum / n_terms
            if n_bytes > 0:
                of_set["bits_per_byte"] = loss_sum / math.log(2) / n_bytes
            of_each.append(of_set)
        return combine_metrics(self._sets, of_each)
