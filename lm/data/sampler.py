"""The order of training samples: a pure function of seed and position."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, SampleBatch
from lm.errors import ConfigError
from lm.seeds import derive_seed

BLOCK = 1024
"""Samples in which each dataset of a mixture has exactly its share; so 1 / 1024 is the smallest share."""


class Sampler:
    """An endless sequence of samples, each a dataset and an index in it: epoch after epoch, each in another order.

    Several datasets are mixed in blocks of `BLOCK` samples: each block holds every dataset's share,
    in an order drawn for the block. Each dataset has its own epochs.

    Args:
        sizes: samples of each dataset.
        weights: share of each dataset, positive, in any unit.
        shuffle: False = every epoch in index order.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        self._sizes = sizes
        self._seed = seed
        self._shuffle = shuffle
        self._quotas = _quotas(weights)
        self._epochs = [(-1, np.empty(0, np.int64)) for _ in sizes]
        self._mixed = (-1, np.empty(0, np.int64))

    def __getitem__(self, position: int) -> tuple[int, int]:
        dataset = 0
        if len(self._sizes) > 1:
            block, i = divmod(position, BLOCK)
            mixed = self._mix(block)
            dataset = int(mixed[i])
            position = block * self._quotas[dataset] + int((mixed[:i] == dataset).sum())
        epoch, i = divmod(position, self._sizes[dataset])
        return dataset, int(self._permutation(dataset, epoch)[i])

    def _mix(self, block: int) -> NDArray[np.int64]:
        """Return the dataset of each position in `block`."""
        if self._mixed[0] != block:
            datasets = np.repeat(np.arange(len(self._quotas)), self._quotas)
            rng = np.random.default_rng(derive_seed("mixture", self._seed, block))
            self._mixed = block, rng.permutation(datasets)
        return self._mixed[1]

    def _permutation(self, dataset: int, epoch: int) -> NDArray[np.int64]:
        if self._epochs[dataset][0] != epoch:
            size = self._sizes[dataset]
            rng = np.random.default_rng(
                derive_seed("order", self._seed, epoch, *([dataset] if dataset else []))
            )
            self._epochs[dataset] = (
                epoch,
                rng.permutation(size) if self._shuffle else np.arange(size),
            )
        return self._epochs[dataset][1]


def _quotas(weights: Sequence[float]) -> list[int]:
    """Return the samples of each dataset in a block, by the largest remainder method."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quotas = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(quotas)]:
        quotas[i] += 1
    if not all(quotas):
        problem = f"a share of {min(weights) / sum(weights):.2g} is less than one sample in {BLOCK}"
        raise ConfigError(f"train_data: {problem}; raise the smallest weight")
    return quotas


class SampledSource:
    """Training source of map-style datasets: global batch k holds samples `order[k * B : (k + 1) * B]`.

    The order is that of `Sampler` and does not depend on the number of ranks; each rank trains on
    its slice. B is `global_batch_size`.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        sizes = list(map(len, datasets))
        self.samples_per_epoch = sum(sizes)
        """over all ranks; None in a streamed source, whose size is unknown"""
        self._datasets, self._weights = datasets, weights
        self._global_batch_size = global_batch_size
        share = global_batch_size // dp_size
        self._slice = slice(dp_rank * share, (dp_rank + 1) * share)
        self._order = Sampler(sizes, weights, seed, shuffle)

    def global_batch(self, step: int) -> list[tuple[Dataset, int]]:
        """Return the dataset and the index of each sample in global batch `step`, over all ranks."""
        size = self._global_batch_size
        order = (self._order[position] for position in range(step * size, (step + 1) * size))
        return [(self._datasets[dataset], index) for dataset, index in order]

    def batches(self, start_step: int) -> Generator[SampleBatch]:
        for step in itertools.count(start_step):
            batch = self.global_batch(step)
            samples = [dataset[index] for dataset, index in batch[self._slice]]
            yield SampleBatch(
                samples, sum(dataset.n_target_tokens(index) for dataset, index in batch)
            )

    def fingerprint(self) -> str:
        parts = [dataset.fingerprint() for dataset in self._datasets]
        if len(parts) > 1:
            total = sum(self._weights)
            parts = [
                f"{weight / total:.6g} of {part}"
                for weight, part in zip(self._weights, parts, strict=True)
            ]
        return "; ".join(parts)

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: the position follows from the step."""
