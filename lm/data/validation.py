"""What a validation says: the names of its metrics, and their values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from lm.data.dataset import ValidationSet
from lm.model_config import IGNORE_INDEX
from lm.runtime.world import World


class ValidationSums:
    """Loss sums and targets of each validation set, on this rank's device.

    Args:
        n_bytes: of text of the targets of each set; 0 = unknown.
    """

    def __init__(self, sets: Sequence[ValidationSet], n_bytes: Sequence[int], world: World) -> None:
        self._sets = sets
        self._n_bytes = n_bytes
        self._world = world
        self._sums = torch.zeros(len(sets), 2, dtype=torch.float64, device=world.device)

    def add(self, number: int, loss_sum: Tensor, targets: Tensor) -> None:
        """Add the loss sum (nats) of a micro-batch of the set `number`."""
        n_targets = (targets != IGNORE_INDEX).sum()
        self._sums[number] += torch.stack([loss_sum.double(), n_targets])

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks: means over the sets, then those of each named set."""
        of_ranks = self._world.all_gather(self._sums).cpu()  # R, sets, 2
        losses: list[float] = []
        bits_per_byte: list[float] = []
        of_sets: dict[str, float] = {}
        for number, validation_set in enumerate(self._sets):
            loss_sums, n_targets = of_ranks[:, number].T.tolist()
            loss_sum = math.fsum(loss_sums)
            loss = loss_sum / math.fsum(n_targets)
            losses.append(loss)
            of_set = {"loss": loss}
            n_bytes = self._n_bytes[number]
            if n_bytes > 0:
                bits = loss_sum / math.log(2)
                of_set["bits_per_byte"] = bits / n_bytes
                bits_per_byte.append(bits / n_bytes)
            if validation_set.name is not None:
                for name, value in of_set.items():
                    of_sets[validation_set.metric(name)] = value

        mean_loss = statistics.fmean(losses)
        perplexity = math.exp(min(mean_loss, 700))  # a finite float
        metrics = {"loss": mean_loss, "perplexity": perplexity}
        if len(bits_per_byte) == len(losses):
            metrics["bits_per_byte"] = statistics.fmean(bits_per_byte)
        return metrics | of_sets
