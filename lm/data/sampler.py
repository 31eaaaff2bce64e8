"""The order of training samples: a pure function of seed and position."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, SampleBatch, StreamState
from lm.errors import ConfigError
from lm.seeds import derive_seed

MIXTURE_BLOCK = 1024
"""Samples in which each dataset of a mixture has exactly its share: 1 / 1024 is the smallest."""


LISTED = 2**24
"""Samples of an epoch up to which their order is a list."""
_ROUNDS = 6
_MASK = 2**64 - 1


class Permutation:
    """A random permutation of 0 .. size - 1 that is computed index by index, without a list.

    A Feistel network permutes the numbers of so many bits; what it maps out of the range is mapped
    again until it is inside (cycle walking: Black and Rogaway, 2002).
    """

    def __init__(self, size: int, *purpose: object) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [derive_seed("permutation", *purpose, number) for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        half_mask = (1 << self._half) - 1
        while True:
            left = index >> self._half
            right = index & half_mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & half_mask)
            index = left << self._half | right
            if index < self._size:
                return index


def _mix(value: int) -> int:
    """Return a hash of 64 bits: the finalizer of SplitMix64 (Steele et al., 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class Sampler:
    """An endless sequence of samples, each a dataset and an index in it.

    The positions of one dataset are those of its epochs, one after the other: position p is sample
    p mod size of epoch p // size, in an order that is drawn for this epoch.

    Several datasets are mixed in blocks of `MIXTURE_BLOCK` positions. A block holds each dataset's
    quota, in an order that is drawn for this block. The k-th position of a mixture that belongs to
    a dataset is position k of this dataset: datasets have their own epochs.

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
        self._quotas = block_quotas(weights)
        # Consecutive positions are in the same block and epochs, so the orders drawn last are kept.
        self._block_order = functools.lru_cache(1)(self._draw_block)
        self._epoch_order = functools.lru_cache(len(sizes))(self._draw_epoch)

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return the number of a dataset, and the index of the sample in it."""
        dataset = 0
        if len(self._sizes) > 1:
            dataset, position = self._position_in_dataset(position)
        epoch, position_in_epoch = divmod(position, self._sizes[dataset])
        return dataset, int(self._epoch_order(dataset, epoch)[position_in_epoch])

    def _position_in_dataset(self, position: int) -> tuple[int, int]:
        """Return the dataset at `position` of the mixture, and how many samples of it come before.

        Each block before this one holds the dataset's quota; this one holds what is counted.
        """
        block, position_in_block = divmod(position, MIXTURE_BLOCK)
        datasets = self._block_order(block)
        dataset = int(datasets[position_in_block])
        n_in_earlier_blocks = block * self._quotas[dataset]
        n_in_this_block = int((datasets[:position_in_block] == dataset).sum())
        return dataset, n_in_earlier_blocks + n_in_this_block

    def passes(self, n_samples: int) -> list[float]:
        """Return how many epochs of each dataset are in `n_samples`, to a block."""
        blocks = n_samples / MIXTURE_BLOCK
        return [blocks * n / size for n, size in zip(self._quotas, self._sizes, strict=True)]

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        """Return the dataset of each position in `block`: a permutation of the quotas."""
        datasets = np.repeat(np.arange(len(self._quotas)), self._quotas)
        rng = np.random.default_rng(derive_seed("mixture", self._seed, block))
        return rng.permutation(datasets)

    def _draw_epoch(self, dataset: int, epoch: int) -> NDArray[np.int64] | Permutation | range:
        """Return the index of each sample of `epoch`: a permutation of the dataset's indices."""
        size = self._sizes[dataset]
        if not self._shuffle:
            return range(size)
        purpose = ["order", self._seed, epoch]
        if dataset > 0:  # the first has the order that it has without the others
            purpose.append(dataset)
        if size > LISTED:
            return Permutation(size, *purpose)
        return np.random.default_rng(derive_seed(*purpose)).permutation(size)


def block_quotas(weights: Sequence[float]) -> list[int]:
    """Return the samples of each dataset in a block, by the largest remainder method.

    Each dataset has the whole part of its exact share. The samples that are left go one each to the
    datasets with the largest remainders.
    """
    total_weight = sum(weights)
    shares = [MIXTURE_BLOCK * weight / total_weight for weight in weights]
    quotas = [math.floor(share) for share in shares]
    n_left = MIXTURE_BLOCK - sum(quotas)
    remainders = [share - quota for share, quota in zip(shares, quotas, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: remainders[i], reverse=True)
    for i in by_remainder[:n_left]:
        quotas[i] += 1
    if not all(quotas):
        smallest = min(weights) / total_weight
        problem = f"a share of {smallest:.2g} is less than one sample in {MIXTURE_BLOCK}"
        raise ConfigError(f"train_data: {problem}; raise the smallest weight")
    return quotas


class SampledSource:
    """Training source of map-style datasets.

    Global batch k holds samples k * B to (k + 1) * B - 1 in the order of `Sampler`, where B is
    `global_batch_size`. It does not depend on the number of ranks; each rank trains on its slice.
    """

    initial_stream_state = None
    """where streams start: there are none"""

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
        sizes = [len(dataset) for dataset in datasets]
        self.samples_per_epoch = sum(sizes)
        self._datasets = datasets
        self._weights = weights
        self._global_batch_size = global_batch_size
        samples_per_rank = global_batch_size // dp_size
        self._rank_slice = slice(dp_rank * samples_per_rank, (dp_rank + 1) * samples_per_rank)
        self._sampler = Sampler(sizes, weights, seed, shuffle)

    def global_batch(self, step: int) -> list[tuple[Dataset, int]]:
        """Return the dataset and the index of each sample in global batch `step`."""
        first = step * self._global_batch_size
        batch: list[tuple[Dataset, int]] = []
        for position in range(first, first + self._global_batch_size):
            dataset, index = self._sampler[position]
            batch.append((self._datasets[dataset], index))
        return batch

    def passes(self, n_steps: int) -> list[float]:
        """Return how often `n_steps` steps read each dataset."""
        return self._sampler.passes(n_steps * self._global_batch_size)

    def batches(
        self,
        step: int,
        stream_state: StreamState | None,  # noqa: ARG002 - the step determines the batch
    ) -> Generator[SampleBatch]:
        """Yield this rank's batches from `step` on, endlessly."""
        for number in itertools.count(step):
            batch = self.global_batch(number)
            samples = [dataset[index] for dataset, index in batch[self._rank_slice]]
            n_terms = sum(dataset.count_terms(index) for dataset, index in batch)
            yield SampleBatch(samples, n_terms)

    def fingerprint(self) -> str:
        if len(self._datasets) == 1:
            return self._datasets[0].fingerprint()
        total_weight = sum(self._weights)
        parts: list[str] = []
        for dataset, weight in zip(self._datasets, self._weights, strict=True):
            parts.append(f"{weight / total_weight:.6g} of {dataset.fingerprint()}")
        return "; ".join(parts)
