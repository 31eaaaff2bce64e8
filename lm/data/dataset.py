"""Interface of map-style datasets; mixtures of datasets."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """A training sample: int64 arrays of shape (seq_len,)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """the next token at each position, or `model.IGNORE_INDEX`"""
    document_ids: NDArray[np.int64] | None = None
    """document of each position, numbered from 0: attention does not cross documents; None = one document"""


class Dataset(ABC):
    """A map-style dataset. It is the same on every rank."""

    seq_len: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Sample: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes when the samples change."""

    def n_target_tokens(self, _index: int, /) -> int:
        """Return how many targets of a sample are not ignored."""
        return self.seq_len


class SampleBatch(NamedTuple):
    """The samples of one rank in one global batch."""

    samples: list[Sample]
    n_target_tokens: int
    """targets of all ranks that are not ignored"""
    state: dict[str, Any] | None = None
    """`state_dict` of the source after this batch"""


class MixtureDataset(Dataset):
    """Concatenation of datasets that are sampled by weight.

    Args:
        weights: share of each dataset in every batch, positive, in any unit.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] = (1.0,)) -> None:
        self._datasets = datasets
        self.weights = weights
        self.sizes = [len(dataset) for dataset in datasets]
        self._offsets = [0, *itertools.accumulate(self.sizes)]

    def __len__(self) -> int:
        return self._offsets[-1]

    def _locate(self, index: int) -> tuple[Dataset, int]:
        i = bisect.bisect_right(self._offsets, index) - 1
        return self._datasets[i], index - self._offsets[i]

    def __getitem__(self, index: int) -> Sample:
        dataset, local_index = self._locate(index)
        return dataset[local_index]

    def n_target_tokens(self, index: int) -> int:
        dataset, local_index = self._locate(index)
        return dataset.n_target_tokens(local_index)

    def fingerprint(self) -> str:
        parts = [dataset.fingerprint() for dataset in self._datasets]
        if len(parts) > 1:
            total = sum(self.weights)
            parts = [f"{weight / total:.6g} of {part}" for weight, part in zip(self.weights, parts, strict=True)]
        return "; ".join(parts)
