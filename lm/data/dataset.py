"""Interfaces of datasets and training sources; mixtures of datasets."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """A training sample: int64 arrays of shape (seq_len,)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """the next token at each position, or `model.IGNORE_INDEX`"""
    document_ids: NDArray[np.int64] | None = None
    """document of each position, numbered from 0: attention does not cross documents; None = one document"""


class Dataset(Protocol):
    """A map-style dataset. It is the same on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...

    def n_target_tokens(self, index: int, /) -> int:
        """Return how many targets of a sample are not ignored."""
        ...

    def fingerprint(self) -> str:
        """Return a string that changes when the samples change."""
        ...


class SampleBatch(NamedTuple):
    """The samples of one rank in one global batch."""

    samples: list[Sample]
    n_target_tokens: int
    """targets of all ranks that are not ignored"""
    state: dict[str, Any] | None = None
    """`state_dict` of the source after this batch"""


class TrainingSource(Protocol):
    """One rank's endless sequence of training batches."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in one epoch over all ranks; None = unknown, because they are streamed."""

    def batches(self, start_step: int) -> Iterator[SampleBatch]:
        """Yield batches from step `start_step`, or from the loaded state if the source has one."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of this rank as JSON; None = it follows from the step."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> str | None:
        """Set the position from the state dicts of all ranks that saved; return a note for the log."""

    def fingerprint(self) -> str: ...


class MixtureDataset:
    """Concatenation of datasets that are sampled by weight.

    Args:
        weights: share of each dataset in every batch, positive, in any unit.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] = (1.0,)) -> None:
        self._datasets = datasets
        self.weights = weights
        self.sizes = [len(dataset) for dataset in datasets]
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[Dataset, int]:
        i = bisect.bisect_right(self._ends, index)
        return self._datasets[i], index - self._ends[i] + self.sizes[i]

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
