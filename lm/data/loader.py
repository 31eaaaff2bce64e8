"""Batches of the training and validation data on the device.

`lm.data.dataset` says which records they are made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.attention import SequencePart
from lm.context import ALONE, ContextGroup
from lm.data.config import DataConfig
from lm.data.dataset import Dataset, Sample, SampleBatch, StreamPosition, StreamState
from lm.data.run_data import Data
from lm.model_config import IGNORE_INDEX
from lm.runtime.world import World

_Ids = NDArray[np.int64]
_PADDING = -1
"""document of padding, so that its positions start again"""


class MicroBatch(NamedTuple):
    """Arguments of one forward pass: int64 tensors of shape (batch_size, seq_len) on the device.

    With `packing: false`, their length is that of the longest row, see `DataConfig.row_lengths`.
    With `context_parallel`, inputs and targets are of this rank's part of the sequences.
    """

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None
    part: SequencePart | None = None
    """None = the sequences are complete"""

    @property
    def n_terms(self) -> Tensor:
        """Terms of its loss: targets that are not ignored."""
        return (self.targets != IGNORE_INDEX).sum()


class PairBatch(NamedTuple):
    """Pairs of replies of one forward pass, each reply with its prompt a separate document."""

    inputs: Tensor
    """int64 on the device, as is all but `lengths`, `(batch_size, seq_len)`, see `MicroBatch`"""
    document_ids: Tensor | None
    """of the same shape; None = one document"""
    queries: Tensor
    """`(N,)`, the tokens that the targets come after, as indices into the flattened inputs"""
    targets: Tensor
    """`(N,)`, of one reply after the other"""
    lengths: list[int]
    """targets of each of R replies, those of a pair one after the other, the chosen one first; with
    `context_parallel` those of this rank"""
    lengths_on_device: Tensor
    """`(R,)`, all targets of each reply"""
    replies: Tensor
    """`(R,)`, their numbers, see `Sample`"""
    part: SequencePart | None = None
    """None = the sequences are complete"""

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the pairs, which all ranks with parts of them compute."""
        return self.part is None or self.part.is_first

    @property
    def n_terms(self) -> Tensor:
        """Terms of its loss: pairs."""
        n_pairs = len(self.lengths) // 2 if self.is_counted else 0
        return self.replies.new_full((), n_pairs)


class Batch(NamedTuple):
    """One rank's part of a global batch: `SampleBatch` on the device."""

    micro_batches: Sequence[MicroBatch | PairBatch]
    n_global_terms: int
    """terms of the loss of all ranks and micro-batches: targets that are not ignored, or pairs"""
    stream_state: StreamState | None
    """where the streams of this rank are after this batch; None = sampled datasets"""


class Loader:
    """Batches of one rank on its device. A thread assembles the next training batch."""

    def __init__(
        self,
        config: DataConfig,
        data: Data,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        context_group: ContextGroup = ALONE,
    ) -> None:
        self._batch_size = config.batch_size
        self._data_workers = config.data_workers
        self._packing = config.packing
        self._row_lengths = config.row_lengths
        self._data = data
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = device
        self._context_group = context_group
        n_samples = config.validation_batches * global_batch_size
        self._validation_sizes = [min(len(each.dataset), n_samples) for each in data.validation]
        """samples of each validation set that are used"""
        self.validation_bytes = [self._count_bytes(i) for i in range(len(data.validation))]
        """of text of the targets of each validation set; 0 = unknown"""
        self.stream_state = data.train.initial_stream_state
        """where the streams are after the batch that `training` yielded last; None = no streams"""

    def _count_bytes(self, number: int) -> int:
        dataset = self._data.validation[number].dataset
        if self._data.tokenizer is None or not dataset.has_bytes:
            return 0
        n_bytes = 0
        for i in range(self._validation_sizes[number]):
            sample = dataset[i]
            is_target = sample.targets != IGNORE_INDEX
            n_bytes += self._data.tokenizer.count_bytes(
                sample.inputs[is_target], sample.targets[is_target]
            )
        return n_bytes

    def load_state(self, states: Sequence[StreamState] | None, log: Callable[[str], None]) -> None:
        """Set the position of streams; `log` receives a line if it is not exact.

        Args:
            states: those of all data-parallel ranks that saved.
        """
        if not states or self.stream_state is None:
            return
        self.stream_state, note = resume_streams(
            states, self._dp_rank, self._dp_size, self._data_workers
        )
        if note is not None:
            log(note)

    def gather_state(self, world: World) -> list[StreamState] | None:
        """Return the position of each data-parallel rank's streams, on all ranks together.

        None = the datasets are sampled, and the position follows from the step.
        """
        if self.stream_state is None:
            return None
        states = world.all_gather_object(self.stream_state)
        return states[:: self._context_group.size]

    def training(self, start_step: int) -> Iterator[Batch]:
        """Yield batches from step `start_step` on, endlessly."""
        sample_batches = self._data.train.batches(start_step, self.stream_state)

        def assemble_next() -> Batch:
            return self._assemble(next(sample_batches))

        thread = ThreadPoolExecutor(1, "loader")
        upcoming = thread.submit(assemble_next)
        try:
            while True:
                batch = upcoming.result()
                upcoming = thread.submit(assemble_next)
                self.stream_state = batch.stream_state
                yield batch
        finally:
            upcoming.cancel()
            # Closing stops data workers, which are killed when the thread that started them ends.
            thread.submit(sample_batches.close)
            thread.shutdown(wait=False)

    def validation(self) -> Iterator[tuple[int, MicroBatch | PairBatch]]:
        """Yield this rank's validation micro-batches, equally many on every rank.

        Each comes with the number of its set. The last ones of a set are padded with sequences of
        token 0 whose targets are all ignored.
        """
        for number, validation_set in enumerate(self._data.validation):
            size = self._validation_sizes[number]
            for micro_batch in self._batches_in_order(validation_set.dataset, size):
                yield number, micro_batch

    @property
    def n_pair_batches(self) -> int:
        """Micro-batches of `all_pairs`, equally many on every rank."""
        return sum(self._count_batches(len(dataset)) for dataset in self._data.datasets)

    def all_pairs(self) -> Iterator[PairBatch]:
        """Yield this rank's micro-batches of the pairs of all datasets, `n_pair_batches` of them.

        They are padded as in `validation`.
        """
        for dataset in self._data.datasets:
            for pairs in self._batches_in_order(dataset, len(dataset)):
                assert isinstance(pairs, PairBatch)
                yield pairs

    def _batches_in_order(self, dataset: Dataset, size: int) -> Iterator[MicroBatch | PairBatch]:
        """Yield micro-batches of the first `size` samples."""
        first = dataset[0]
        padding = first._replace(
            inputs=np.zeros_like(first.inputs),
            targets=np.full_like(first.targets, IGNORE_INDEX),
        )
        if first.replies is not None:
            padding = padding._replace(replies=first.replies[:0])
        indices = range(self._dp_rank, size, self._dp_size)
        for number in range(self._count_batches(size)):
            start = number * self._batch_size
            samples = [dataset[i] for i in indices[start : start + self._batch_size]]
            while len(samples) < self._batch_size:
                samples.append(padding)
            yield self._collate(samples)

    def _count_batches(self, size: int) -> int:
        """Return how many micro-batches of each rank have all of `size` samples."""
        most_of_a_rank = math.ceil(size / self._dp_size)
        return math.ceil(most_of_a_rank / self._batch_size)

    def _assemble(self, sample_batch: SampleBatch) -> Batch:
        """Return a batch on the device."""
        samples, n_terms, stream_state = sample_batch
        size = self._batch_size
        starts = range(0, len(samples), size)
        micro_batches = [self._collate(samples[start : start + size]) for start in starts]
        return Batch(micro_batches, n_terms, stream_state)

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch | PairBatch:
        length = len(samples[0].inputs)
        if not self._packing:
            length = self._needed_length([sample.targets for sample in samples])
        inputs = np.stack([sample.inputs[:length] for sample in samples])
        targets = np.stack([sample.targets[:length] for sample in samples])
        ids = [each.document_ids[:length] for each in samples if each.document_ids is not None]
        document_ids = np.stack(ids) if ids else None
        own: slice | _Ids = slice(None)
        part: SequencePart | None = None
        if self._context_group.size > 1:
            if document_ids is None:
                document_ids = np.zeros_like(inputs)
            inputs, targets, document_ids = self._pad(inputs, targets, document_ids)
            own = self._context_group.own_indices(inputs.shape[1])
            part = self._context_group.part(self._to_device(own).expand(len(inputs), -1))
        inputs_on_device = self._to_device(inputs[:, own])
        ids_on_device = None
        if document_ids is not None:
            ids_on_device = self._to_device(document_ids)
        replies = [each.replies for each in samples if each.replies is not None]
        if not replies:
            return MicroBatch(
                inputs_on_device, self._to_device(targets[:, own]), ids_on_device, part
            )
        assert document_ids is not None
        documents = np.arange(len(samples))[:, None] * inputs.shape[1] + document_ids
        numbers, lengths = np.unique(documents[targets != IGNORE_INDEX], return_counts=True)
        targets = targets[:, own]
        is_target = targets != IGNORE_INDEX
        reply_of_each = np.searchsorted(numbers, documents[:, own][is_target])
        own_lengths = np.bincount(reply_of_each, minlength=len(numbers))
        return PairBatch(
            inputs=inputs_on_device,
            document_ids=ids_on_device,
            queries=self._to_device(np.flatnonzero(is_target)),
            targets=self._to_device(targets[is_target]),
            lengths=own_lengths.tolist(),
            lengths_on_device=self._to_device(lengths),
            replies=self._to_device(np.concatenate(replies)),
            part=part,
        )

    def _pad(self, inputs: _Ids, targets: _Ids, document_ids: _Ids) -> tuple[_Ids, _Ids, _Ids]:
        """Return sequences that can be divided among the ranks of the group."""
        n_padding = -inputs.shape[1] % (2 * self._context_group.size)
        pad = partial(np.pad, pad_width=((0, 0), (0, n_padding)))
        return (
            pad(inputs),
            pad(targets, constant_values=IGNORE_INDEX),
            pad(document_ids, constant_values=_PADDING),
        )

    def _needed_length(self, targets: Sequence[NDArray[np.int64]]) -> int:
        """Return the shortest of `DataConfig.row_lengths` that holds the targets of all rows.

        What comes after a row's last target changes nothing, as attention is causal.
        """
        last = 0
        for row in targets:
            last = max(last, int(np.flatnonzero(row != IGNORE_INDEX).max(initial=0)))
        return next(length for length in self._row_lengths(len(targets[0])) if length > last)

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def resume_streams(
    saved: Sequence[StreamState], dp_rank: int, dp_size: int, workers: int
) -> tuple[StreamState, str | None]:
    """Return where the streams of a rank resume, and a note for the log.

    If the number of streams differs, each resumes after its share of the documents that were read,
    not at the exact token, and the note says so.

    Args:
        saved: states of all data-parallel ranks that saved.
        workers: streams of each rank.
    """
    streams: list[StreamPosition] = []
    for state in saved:
        streams.extend(state.streams)
    n_streams = dp_size * workers
    if len(streams) == n_streams:
        first = dp_rank * workers
        return StreamState(streams[first : first + workers], saved[0].turn % workers), None
    n_read = 0
    for stream in streams:
        n_read += stream.get("documents", stream.get("skip", 0))
    skip = n_read // n_streams
    change = f"{len(streams)} over all ranks in the checkpoint, {n_streams} now"
    note = f"data_workers: {change}: each worker resumes after {skip} documents of its share"
    return StreamState([{"skip": skip} for _ in range(workers)]), note
