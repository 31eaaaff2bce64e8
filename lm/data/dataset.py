"""What a source of training samples is.

It is the same on every rank and has no position: which samples make up a batch is the loader's business.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """One sample: `(seq_len,)` int64 each."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """the ids that follow, or `model.IGNORE` where none is to be learned"""
    document_ids: NDArray[np.int64] | None = None
    """which document each position belongs to, numbered from 0: attention stays inside; None = all one"""


@runtime_checkable
class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...

    def targets(self, index: int, /) -> int:
        """How many targets of a sample count in the loss."""
        ...

    def fingerprint(self) -> str:
        """A text that changes when the samples do."""
        ...


class MixtureDataset:
    """Several sources as one: samples are numbered through, source by source.

    Args:
        shares: of each source in every batch, positive, in any unit; matter where there is more than one.
    """

    def __init__(self, sources: Sequence[Dataset], shares: Sequence[float] = (1.0,)) -> None:
        self._sources = sources
        self.shares = shares
        self.counts = [len(source) for source in sources]
        self._ends = list(itertools.accumulate(self.counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, number: int) -> tuple[Dataset, int]:
        at = bisect.bisect_right(self._ends, number)
        return self._sources[at], number - self._ends[at] + self.counts[at]

    def __getitem__(self, number: int) -> Sample:
        source, index = self._place(number)
        return source[index]

    def targets(self, number: int) -> int:
        source, index = self._place(number)
        return source.targets(index)

    def fingerprint(self) -> str:
        parts = [source.fingerprint() for source in self._sources]
        if len(parts) > 1:
            shares = [share / sum(self.shares) for share in self.shares]
            parts = [f"{share:.6g} of {part}" for share, part in zip(shares, parts, strict=True)]
        return "; ".join(parts)
