"""The order of training samples: a pure function of seed and position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import MixtureDataset, SampleBatch
from lm.errors import ConfigError
from lm.seeds import derive_seed

BLOCK = 1024
"""Samples in which each dataset of a mixture has exactly its share; so 1 / 1024 is the smallest share."""


class Sampler:
    """An endless sequence of sample indices: epoch after epoch, each in another order.

    Several datasets are mixed in blocks of `BLOCK` samples: each block holds every dataset's share, in an order drawn
    for the block. Each dataset has its own epochs.

    Args:
        sizes: samples of each dataset; indices count through the datasets in order.
        weights: share of each dataset, positive, in any unit.
        shuffle: False = every epoch in index order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self._sizes = sizes
        self._offsets = np.cumsum([0, *sizes])
        self._seed = seed
        self._shuffle = shuffle
        self._quotas = _quotas(weights)
        self._epochs = [(-1, np.empty(0, np.int64)) for _ in sizes]
        self._mixed = (-1, np.empty(0, np.int64))

    def __getitem__(self, position: int) -> int:
        dataset = 0
        if len(self._sizes) > 1:
            block, i = divmod(position, BLOCK)
            mixed = self._mix(block)
            dataset = int(mixed[i])
            position = block * self._quotas[dataset] + int((mixed[:i] == dataset).sum())
        epoch, i = divmod(position, self._sizes[dataset])
        return int(self._offsets[dataset] + self._permutation(dataset, epoch)[i])

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
            rng = np.random.default_rng(derive_seed("order", self._seed, epoch, *([dataset] if dataset else [])))
            self._epochs[dataset] = epoch, rng.permutation(size) if self._shuffle else np.arange(size)
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
        raise ConfigError(f"train_data: {problem}; raise the smallest weight", keys=("train_data",))
    return quotas


class SampledSource:
    """Training source of a map-style dataset: global batch k holds samples `order[k * B : (k + 1) * B]`.

    The order does not depend on the number of ranks; each rank trains on its slice. B is `global_batch_size`.
    """

    def __init__(
        self, dataset: MixtureDataset, global_batch_size: int, dp_rank: int, dp_size: int, seed: int, shuffle: bool
    ) -> None:
        self.dataset = dataset
        self.samples_per_epoch = len(dataset)
        self.fingerprint = dataset.fingerprint
        self._global_batch_size = global_batch_size
        share = global_batch_size // dp_size
        self._slice = slice(dp_rank * share, (dp_rank + 1) * share)
        self._order = Sampler(dataset.sizes, dataset.weights, seed, shuffle)

    def sample_ids(self, step: int) -> list[int]:
        """Return the indices of the samples in global batch `step`, over all ranks."""
        size = self._global_batch_size
        return [self._order[position] for position in range(step * size, (step + 1) * size)]

    def batches(self, start_step: int) -> Iterator[SampleBatch]:
        for step in itertools.count(start_step):
            indices = self.sample_ids(step)
            samples = [self.dataset[i] for i in indices[self._slice]]
            yield SampleBatch(samples, sum(map(self.dataset.n_target_tokens, indices)))

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: the position follows from the step."""
