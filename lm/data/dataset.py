"""Interface of map-style datasets, and what the training sources yield."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    note: str | None = None
    """for the log"""

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
