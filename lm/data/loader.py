"""Batches of the training and validation data on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.dataset import Sample
from lm.data.run_data import Data, DataConfig
from lm.errors import ConfigError
from model import IGNORE_INDEX


def derive_global_batch_size(config: DataConfig, dp_size: int) -> int:
    """Return the sequences per optimizer step over all ranks.

    Raises:
        ConfigError: it is not a multiple of batch_size * dp_size; names the nearest ones.
    """
    micro = config.batch_size * dp_size
    total = config.total_batch_size or micro
    if total % micro:
        nearest = " or ".join(
            str(value) for value in (total // micro * micro, (total // micro + 1) * micro) if value
        )
        problem = f"total_batch_size: {total} is not a multiple of batch_size {config.batch_size} x {dp_size} ranks"
        raise ConfigError(f"{problem}; use {nearest}")
    return total


class MicroBatch(NamedTuple):
    """Arguments of one forward pass: int64 tensors of shape (batch_size, seq_len), on the device."""

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None


class Batch(NamedTuple):
    """One rank's part of a global batch."""

    micro_batches: list[MicroBatch]
    n_target_tokens: int
    """targets of all ranks that are not ignored"""


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
        self._data = data
        self._n_validation = min(
            len(data.validation), config.validation_batches * global_batch_size
        )
        self._validation_bytes = 0
        if data.tokenizer:
            targets = (data.validation[i].targets for i in range(self._n_validation))
            self._validation_bytes = sum(
                int(data.tokenizer.text_bytes[ids[ids >= 0]].sum()) for ids in targets
            )
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = device
        self._state = data.train.state_dict()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position after the training batch that was yielded last; None = it follows from the step."""
        return self._state

    def load_state_dict(self, states: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Set the position from the state dicts of all ranks that saved; return a note for the log."""
        note = self._data.train.load_state_dict(states) if states else None
        self._state = self._data.train.state_dict()
        return note

    def training(self, start_step: int) -> Iterator[Batch]:
        """Yield batches from step `start_step` on, endlessly."""
        batches = self._data.train.batches(start_step)

        def assemble() -> tuple[Batch, dict[str, Any] | None]:
            samples, n_target_tokens, state = next(batches)
            starts = range(0, len(samples), self._batch_size)
            micro_batches = [self._collate(samples[i : i + self._batch_size]) for i in starts]
            return Batch(micro_batches, n_target_tokens), state

        pool = ThreadPoolExecutor(1, "loader")
        ahead = pool.submit(assemble)
        try:
            while True:
                batch, state = ahead.result()
                ahead = pool.submit(assemble)
                self._state = state
                yield batch
        finally:
            ahead.cancel()
            pool.submit(
                batches.close
            )  # stops data workers, which are killed when the thread that started them ends
            pool.shutdown(wait=False)

    def bits_per_byte(self, loss_sum: float) -> dict[str, float]:
        """Return the metric of text for the loss of all validation targets (nats); {} if their text is unknown."""
        n_bytes = self._validation_bytes
        return {"bits_per_byte": loss_sum / math.log(2) / n_bytes} if n_bytes else {}

    def validation(self) -> Iterator[MicroBatch]:
        """Yield this rank's validation micro-batches, equally many on every rank.

        The last ones are padded with sequences of token 0 whose targets are all ignored.
        """
        dataset, size = self._data.validation, self._batch_size
        indices = range(self._dp_rank, self._n_validation, self._dp_size)
        inputs, targets, document_ids = dataset[0]
        padding = Sample(np.zeros_like(inputs), np.full_like(targets, IGNORE_INDEX), document_ids)
        for start in range(0, math.ceil(self._n_validation / self._dp_size), size):
            samples = [dataset[i] for i in indices[start : start + size]]
            yield self._collate(samples + [padding] * (size - len(samples)))

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch:
        inputs, targets, document_ids = zip(*samples, strict=True)
        documents = self._stack(document_ids) if document_ids[0] is not None else None
        return MicroBatch(self._stack(inputs), self._stack(targets), documents)

    def _stack(self, arrays: Sequence[NDArray[np.int64]]) -> Tensor:
        stacked = torch.from_numpy(np.stack(arrays))
        if self._device.type == "cuda":
            return stacked.pin_memory().to(self._device, non_blocking=True)
        return stacked
