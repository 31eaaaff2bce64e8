"""The order of samples: a pure function of seed and place, which knows of neither ranks nor batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm import seeds

BLOCK = 1024
"""Samples in which every source has its share exactly, and the smallest share there is (1 / 1024)."""


class Sampler:
    """An endless row of sample numbers: one epoch after the other, each a permutation of its own.

    Several sources with shares are mixed in blocks of `BLOCK` samples, each of which holds every source's share,
    in an order drawn for the block. Each source goes through epochs of its own.

    Args:
        counts: samples of each source; they are numbered through, source by source.
        shares: of each source in the row, positive, in any unit.
        shuffle: false = every epoch as the samples are numbered.

    Raises:
        ValueError: a share is less than half a sample in a block.
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], seed: int, shuffle: bool) -> None:
        self._counts = counts
        self._first = np.cumsum([0, *counts])
        self._seed = seed
        self._shuffle = shuffle
        self._quotas = _quotas(shares)
        self._epochs = [(-1, np.empty(0, np.int64)) for _ in counts]
        self._mixed = (-1, np.empty(0, np.int64))

    def __getitem__(self, place: int) -> int:
        """The number of the sample at `place`."""
        source = 0
        if len(self._counts) > 1:
            block, within = divmod(place, BLOCK)
            mixed = self._mix(block)
            source = int(mixed[within])
            place = block * self._quotas[source] + int((mixed[:within] == source).sum())
        epoch, within = divmod(place, self._counts[source])
        return int(self._first[source] + self._permutation(source, epoch)[within])

    def _mix(self, block: int) -> NDArray[np.int64]:
        """The source of each place in `block`."""
        if self._mixed[0] != block:
            row = np.repeat(np.arange(len(self._quotas)), self._quotas)
            random = np.random.default_rng(seeds.derive_seed("mixture", self._seed, block))
            self._mixed = block, random.permutation(row)
        return self._mixed[1]

    def _permutation(self, source: int, epoch: int) -> NDArray[np.int64]:
        if self._epochs[source][0] != epoch:
            count = self._counts[source]
            key = ("order", self._seed, epoch, *([source] if source else []))
            random = np.random.default_rng(seeds.derive_seed(*key))
            self._epochs[source] = epoch, random.permutation(count) if self._shuffle else np.arange(count)
        return self._epochs[source][1]


def _quotas(shares: Sequence[float]) -> list[int]:
    """`shares` as whole samples of a block, by the largest remainders."""
    exact = [BLOCK * share / sum(shares) for share in shares]
    quotas = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: quotas[at] - exact[at])
    for at in by_remainder[: BLOCK - sum(quotas)]:
        quotas[at] += 1
    if not all(quotas):
        raise ValueError(f"a share of {min(shares) / sum(shares):.2g} is less than one sample in {BLOCK}")
    return quotas
