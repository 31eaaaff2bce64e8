"""The interface of datasets, and the records that lead from them to batches.

    record        made by                         holds
    Sample        a `Dataset`, a stream           one sequence, as NumPy arrays
    SampleBatch   a sampled or streamed source    one rank's samples in one global batch
    MicroBatch    `Loader` (lm.data.loader)       samples of one forward pass: tensors on the device
    PairBatch     `Loader`                        the same, of pairs of replies
    Batch         `Loader`                        one rank's micro-batches in one global batch

The terms of the loss are counted over all ranks, in `SampleBatch` and `Batch`: a step divides its
loss by their number. Both records also carry the state of streams after the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict


class Sample(NamedTuple):
    """A training sample: int64 arrays of shape (seq_len,)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """the next token at each position, or `model.IGNORE_INDEX`"""
    document_ids: NDArray[np.int64] | None = None
    """document of each position, numbered from 0; attention does not cross documents; None = one"""
    replies: NDArray[np.int64] | None = None
    """numbers of the documents among the replies of all pairs, those of a pair one after the other,
    the chosen one first; None = the samples are no pairs"""


class Dataset(ABC):
    """A map-style dataset. It is the same on every rank."""

    seq_len: int
    note: str | None = None
    """for the log"""
    has_bytes: bool = True
    """whether the tokens tell how many bytes of text they are"""
    n_replies: int = 0
    """two of each pair; 0 = the samples are no pairs"""
    first_reply: int = 0
    """number of its first reply among those of all datasets of a run"""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Sample: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes when the samples change."""

    def count_terms(self, _index: int, /) -> int:
        """Return how many terms the loss of a sample has: by default its targets, all of them."""
        return self.seq_len


def set_key(name: str | None) -> str:
    """Return what errors call the set `name` of `val_data`; None = `val_data` is not a mapping."""
    if name is None:
        return "val_data"
    return f"val_data.{name}"


class ValidationSet(NamedTuple):
    """Data that a run is validated on, with separate metrics if they have a name."""

    name: str | None
    """in `val_data`; None = `val_data` is not a mapping"""
    dataset: Dataset

    @property
    def key(self) -> str:
        return set_key(self.name)

    def metric(self, metric: str) -> str:
        """Return the name of its value of `metric`, e.g. `loss_wiki` of `loss`."""
        return f"{metric}_{self.name}"


_Count = Annotated[int, Field(ge=0, lt=2**63)]


@with_config(ConfigDict(extra="forbid"))
class StreamPosition(TypedDict, total=False):
    """Where a stream is, e.g. where the window starts that is read next; {} = its start."""

    block: _Count
    """number, over all epochs, of the block of documents that are shuffled together"""
    read: _Count
    """documents before the block, over all epochs"""
    dataset: dict[str, Any] | None
    """of the `datasets` library, at the start of the block; None = the start of an epoch"""
    digest: str
    """of the documents in the block"""
    token: _Count
    """of those in the block, in the order in which they are shuffled"""
    documents: _Count
    """that were read, over all epochs; how many, if some are empty, is not exact"""
    skip: _Count
    """documents that are skipped first"""


@dataclass(frozen=True)
class StreamState:
    """Where the streams of one rank are. Checkpoints hold it as JSON."""

    streams: Sequence[StreamPosition]
    """of each stream, that of the window that was read last"""
    turn: _Count = 0
    """index of the stream that the next micro-batch is read from"""


class SampleBatch(NamedTuple):
    """The samples of one rank in one global batch."""

    samples: list[Sample]
    n_global_terms: int
    """terms of the loss of all ranks: targets that are not ignored, or pairs"""
    stream_state: StreamState | None = None
    """where the streams of this rank are after this batch; None = sampled datasets"""


def has_perplexity(sets: Sequence[ValidationSet]) -> bool:
    """Return whether the terms of the loss of all `sets` are targets, and not pairs of replies."""
    return all(each.dataset.n_replies == 0 for each in sets)


def validation_metric_names(
    sets: Sequence[ValidationSet], has_text: bool, statistics: Sequence[str] = ()
) -> list[str]:
    """Return the metrics of validations, of which the smallest value is the best.

    Args:
        has_text: the tokens have a tokenizer.
        statistics: those of an objective that are wanted instead; () = the losses.
    """
    of_each: list[dict[str, float]] = []
    for each in sets:
        names = [*statistics] or ["loss"]
        if not statistics and has_text and each.dataset.has_bytes:
            names.append("bits_per_byte")
        of_each.append(dict.fromkeys(names, 0.0))
    return list(combine_metrics(sets, of_each))


def combine_metrics(
    sets: Sequence[ValidationSet], of_each: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of a validation: means over the sets, then those of each named set.

    Args:
        of_each: the metrics of each set.
    """
    metrics: dict[str, float] = {}
    for name in of_each[0]:
        values = [of_set[name] for of_set in of_each if name in of_set]
        if len(values) == len(of_each):
            metrics[name] = fmean(values)
        if name == "loss" and has_perplexity(sets):
            metrics["perplexity"] = math.exp(min(metrics["loss"], 100))  # as large as is read
    for validation_set, of_set in zip(sets, of_each, strict=True):
        if validation_set.name is not None:
            for name, value in of_set.items():
                metrics[validation_set.metric(name)] = value
    return metrics
