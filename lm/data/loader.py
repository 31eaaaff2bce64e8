"""Batches: picks the source, puts its samples in order, and gives each rank its slice.

The order is a pure function of seed and epoch, and does not know of ranks: global batch k holds the samples
order[k B : (k + 1) B] of an endless row of shuffled epochs, whatever the world size. A rank takes its part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lm import seeds
from lm.data import text, tokens
from lm.errors import ConfigError
from model import IGNORE

SYNTHETIC_BATCHES = 10


class DataConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: Literal["synthetic", "text"] = Field("synthetic", description="random tokens, or UTF-8 files")
    train_data: str | None = Field(
        None, description="for text: a file, folder or glob; null = the Python standard library's source"
    )
    val_data: str | None = Field(None, description="likewise; null = the last 5 % of the training text, held out")
    tokenizer: Literal["bytes"] = Field("bytes", description="bytes: 257 ids, nothing to download")
    shuffle: bool = Field(True, description="a new seeded order of samples in every epoch")
    batch_size: int = Field(1, gt=0, description="sequences per device in one forward pass")
    total_batch_size: int | None = Field(
        None, gt=0, description="sequences per optimizer step over all ranks; null = batch_size x ranks"
    )
    validation_batches: int = Field(10, gt=0, description="batches of the total size that a validation looks at")


class Source(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]: ...
    def fingerprint(self) -> str: ...


def total_batch(config: DataConfig, ranks: int) -> int:
    """Sequences per optimizer step.

    Raises:
        ConfigError: `total_batch_size` is no multiple of batch_size x ranks; names the nearest that are.
    """
    together = config.batch_size * ranks
    total = config.total_batch_size or together
    if total % together:
        lower, upper = total // together * together, (total // together + 1) * together
        near = " or ".join(str(value) for value in (lower, upper) if value)
        raise ConfigError(
            f"total_batch_size: {total} is no multiple of batch_size {config.batch_size} x {ranks} ranks; use {near}"
        )
    return total


class Micro(NamedTuple):
    """Input of one forward pass: ids and their targets, `(batch_size, seq_len)` int64 on the device."""

    inputs: Tensor
    targets: Tensor


class Batch(NamedTuple):
    """This rank's part of one global batch."""

    micros: list[Micro]
    targets: int
    """positions that count in the loss, over all ranks"""


@dataclass(frozen=True)
class Data:
    """Training and validation samples, and the tokenizer they were made with (None: no text)."""

    train: Source
    validation: Source
    tokenizer: text.ByteTokenizer | None

    def fingerprint(self) -> dict[str, str]:
        """What changes when the data do: kept in checkpoints, compared on resuming."""
        return {"train": self.train.fingerprint(), "validation": self.validation.fingerprint()}


def open_data(config: DataConfig, vocab_size: int, seq_len: int, total: int, seed: int) -> Data:
    """Find, read and check the data that `config` names.

    Raises:
        ConfigError: files are missing or bad, the vocabulary is too small, or there is too little text.
    """
    match config.dataset:
        case "synthetic":
            samples = SYNTHETIC_BATCHES * total
            train = tokens.SyntheticTokens(vocab_size, seq_len, samples, (seed, "training"))
            validation = tokens.SyntheticTokens(vocab_size, seq_len, samples, (seed, "validation"))
            return Data(train, validation, None)
        case "text":
            tokenizer = text.ByteTokenizer()
            if tokenizer.vocab_size > vocab_size:
                raise ConfigError(
                    f"vocab_size: {vocab_size} is less than the tokenizer's: {tokenizer.name} needs"
                    f" {tokenizer.vocab_size} or more"
                )
            row = text.read_tokens(text.find_files(config.train_data, "train_data"), tokenizer)
            if config.val_data is None:
                row, held_out = text.split_validation(row)
            else:
                held_out = text.read_tokens(text.find_files(config.val_data, "val_data"), tokenizer)
            train, validation = tokens.TokenWindows(row, seq_len), tokens.TokenWindows(held_out, seq_len)
            for key, source, needed, count in (
                ("train_data", train, total, len(row)),
                ("val_data", validation, 1, len(held_out)),
            ):
                if len(source) < needed:
                    raise ConfigError(
                        f"{key}: {count} tokens make {len(source)} samples of max_seq_len {seq_len}, but {needed}"
                        " are needed: give more text, or lower max_seq_len or the batch size"
                    )
            return Data(train, validation, tokenizer)


class Loader:
    """Turns samples into this rank's batches on its device.

    Args:
        total: sequences per global batch, a multiple of batch_size x ranks.
    """

    def __init__(
        self, config: DataConfig, data: Data, total: int, rank: int, ranks: int, seed: int, device: torch.device
    ) -> None:
        self._config = config
        self._data = data
        self._total = total
        self._rank = rank
        self._ranks = ranks
        self._seed = seed
        self._device = device
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def sample_ids(self, step: int) -> list[int]:
        """The samples of global batch `step`, over all ranks."""
        count = len(self._data.train)
        places = range(step * self._total, (step + 1) * self._total)
        return [int(self._epoch_order(place // count)[place % count]) for place in places]

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            count = len(self._data.train)
            random = np.random.default_rng(seeds.derive("order", self._seed, epoch))
            self._order = random.permutation(count) if self._config.shuffle else np.arange(count)
            self._epoch = epoch
        return self._order

    def training(self, start: int) -> Iterator[Batch]:
        """Endless batches from step `start` on."""
        size = self._config.batch_size
        share = self._total // self._ranks
        for step in itertools.count(start):
            mine = self.sample_ids(step)[self._rank * share : (self._rank + 1) * share]
            rows = [self._data.train[i] for i in mine]
            micros = [self._micro(rows[at : at + size]) for at in range(0, share, size)]
            yield Batch(micros, self._total * micros[0].targets.shape[1])

    def validation(self) -> Iterator[Micro]:
        """The validation samples that fall to this rank; every rank gets equally many forward passes.

        Where samples run out, rows are filled up with token 0 and targets that are all ignored.
        """
        source = self._data.validation
        size = self._config.batch_size
        count = min(len(source), self._config.validation_batches * self._total)
        mine = range(self._rank, count, self._ranks)
        filler = np.full_like(source[0], IGNORE)
        for at in range(0, math.ceil(count / self._ranks), size):
            rows = [source[i] for i in mine[at : at + size]]
            micro = self._micro(rows + [filler] * (size - len(rows)))
            yield micro._replace(inputs=micro.inputs.clamp(min=0))

    def _micro(self, rows: list[NDArray[np.int64]]) -> Micro:
        samples = torch.from_numpy(np.stack(rows))  # (batch_size, seq_len + 1)
        if self._device.type == "cuda":
            samples = samples.pin_memory().to(self._device, non_blocking=True)
        return Micro(samples[:, :-1].contiguous(), samples[:, 1:].contiguous())
