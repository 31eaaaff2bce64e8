"""Batches of the training and validation data on the device.

`lm.data.dataset` says which records they are made from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.config import DataConfig
from lm.data.dataset import Position, Sample, SampleBatch, StreamState
from lm.data.run_data import Data
from lm.data.stream import resume_streams
from lm.model_config import IGNORE_INDEX

LENGTHS = 8
"""How many lengths micro-batches of one sample a row have: each is compiled."""


class MicroBatch(NamedTuple):
    """Arguments of one forward pass: int64 tensors of shape (batch_size, seq_len) on the device.

    With `packing: false`, their length is that of the longest row, see `LENGTHS`.
    """

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None


class Batch(NamedTuple):
    """One rank's part of a global batch: `SampleBatch` on the device."""

    micro_batches: list[MicroBatch]
    n_terms: int
    """terms of the loss of all ranks: targets that are not ignored"""
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
    ) -> None:
        self._batch_size = config.batch_size
        self._data_workers = config.data_workers
        self._packing = config.packing
        self._data = data
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = device
        n_samples = config.validation_batches * global_batch_size
        self._validation_sizes = [min(len(each.dataset), n_samples) for each in data.validation]
        """samples of each validation set that are used"""
        self.validation_bytes = [self._count_bytes(i) for i in range(len(data.validation))]
        """of text of the targets of each validation set; 0 = unknown"""
        self._stream_state = data.train.initial_stream_state

    def _count_bytes(self, number: int) -> int:
        dataset = self._data.validation[number].dataset
        if self._data.tokenizer is None or not dataset.has_bytes:
            return 0
        n_bytes = 0
        for i in range(self._validation_sizes[number]):
            inputs, targets, _ = dataset[i]
            is_target = targets != IGNORE_INDEX
            n_bytes += self._data.tokenizer.count_bytes(inputs[is_target], targets[is_target])
        return n_bytes

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the streams are after the training batch that was yielded last.

        None = the datasets are sampled, and the position follows from the step.
        """
        if self._stream_state is None:
            return None
        return dataclasses.asdict(self._stream_state)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Set the position of streams; return a note for the log.

        Args:
            states: the state dicts of all ranks that saved.
        """
        if not states or self._stream_state is None:
            return None
        saved = [StreamState(state["streams"], state["turn"]) for state in states]
        self._stream_state, note = resume_streams(
            saved, self._dp_rank, self._dp_size, self._data_workers
        )
        return note

    def training(self, start_step: int) -> Iterator[Batch]:
        """Yield batches from step `start_step` on, endlessly."""
        sample_batches = self._data.train.batches(Position(start_step, self._stream_state))

        def assemble_next() -> Batch:
            return self._assemble(next(sample_batches))

        thread = ThreadPoolExecutor(1, "loader")
        upcoming = thread.submit(assemble_next)
        try:
            while True:
                batch = upcoming.result()
                upcoming = thread.submit(assemble_next)
                self._stream_state = batch.stream_state
                yield batch
        finally:
            upcoming.cancel()
            # Closing stops data workers, which are killed when the thread that started them ends.
            thread.submit(sample_batches.close)
            thread.shutdown(wait=False)

    def validation(self) -> Iterator[tuple[int, MicroBatch]]:
        """Yield this rank's validation micro-batches, equally many on every rank.

        Each comes with the number of its set. The last ones of a set are padded with sequences of
        token 0 whose targets are all ignored.
        """
        for number in range(len(self._data.validation)):
            for micro_batch in self._validation_batches(number):
                yield number, micro_batch

    def _validation_batches(self, number: int) -> Iterator[MicroBatch]:
        dataset = self._data.validation[number].dataset
        size = self._validation_sizes[number]
        inputs, targets, document_ids = dataset[0]
        padding = Sample(np.zeros_like(inputs), np.full_like(targets, IGNORE_INDEX), document_ids)
        indices = range(self._dp_rank, size, self._dp_size)
        most_of_a_rank = math.ceil(size / self._dp_size)
        for start in range(0, most_of_a_rank, self._batch_size):
            samples = [dataset[i] for i in indices[start : start + self._batch_size]]
            while len(samples) < self._batch_size:
                samples.append(padding)
            yield self._collate(samples)

    def _assemble(self, sample_batch: SampleBatch) -> Batch:
        """Return a batch on the device."""
        samples, n_terms, stream_state = sample_batch
        size = self._batch_size
        starts = range(0, len(samples), size)
        micro_batches = [self._collate(samples[start : start + size]) for start in starts]
        return Batch(micro_batches, n_terms, stream_state)

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch:
        inputs, targets, document_ids = zip(*samples, strict=True)
        if not self._packing:
            length = self._needed_length(targets)
            inputs = [row[:length] for row in inputs]
            targets = [row[:length] for row in targets]
        micro_batch = MicroBatch(self._stack(inputs), self._stack(targets))
        if document_ids[0] is not None:
            micro_batch = micro_batch._replace(document_ids=self._stack(document_ids))
        return micro_batch

    def _needed_length(self, targets: Sequence[NDArray[np.int64]]) -> int:
        """Return the length that holds the targets of all rows, one of `LENGTHS`.

        What comes after a row's last target changes nothing, as attention is causal.
        """
        seq_len = len(targets[0])
        last = 0
        for row in targets:
            last = max(last, int(np.flatnonzero(row != IGNORE_INDEX).max(initial=0)))
        unit = math.ceil(seq_len / LENGTHS)
        return min(seq_len, unit * (last // unit + 1))

    def _stack(self, arrays: Sequence[NDArray[np.int64]]) -> Tensor:
        stacked = torch.from_numpy(np.stack(arrays))
        if self._device.type == "cuda":
            return stacked.pin_memory().to(self._device, non_blocking=True)
        return stacked
