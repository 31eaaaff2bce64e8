"""Batches: picks the source, puts its samples in order, and gives each rank its slice.

The order is a pure function of seed and epoch, and does not know of ranks: global batch k holds the samples
order[k B : (k + 1) B] of an endless row of shuffled epochs, whatever the world size. A rank takes its part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lm.data import files, jsonl, stream, text, tokens
from lm.data.dataset import Dataset, MixtureDataset, Sample
from lm.data.sampler import Sampler
from lm.data.stream import StreamingDataset
from lm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lm.errors import ConfigError, oserror_as_config_error
from model import IGNORE_INDEX

SYNTHETIC_BATCHES = 10
LARGEST_BATCH = 2**24
"""Most sequences of a step, whose order is drawn in memory."""


class DataConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: Literal["synthetic", "text", "tokens", "jsonl", "hf"] = Field(
        "synthetic",
        description="random tokens, UTF-8 files, files of `python -m lm.prepare`, JSON lines to fine-tune on, or a"
        " streamed Hugging Face dataset",
    )
    train_data: str | dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None,
        description="a file, folder or glob (text: null = the Python standard library's source); for tokens a folder,"
        " or several with weights; for hf also a name on the hub",
    )
    val_data: str | None = Field(
        None,
        description="likewise; null = the last 5 % of the text, the folder's own validation part (tokens), or the split"
        " validation (hf; also the name of another)",
    )
    tokenizer: str | None = Field(
        None,
        description="bytes (257 ids), a tokenizer.json, a folder with one, or a Hugging Face name; null = bytes, or the"
        " one that token files were made with",
    )
    text_field: str = Field("text", description="key or column of the text (jsonl, hf)")
    loss_on: Literal["all", "completion"] = Field("all", description="what of a sample is learned (jsonl)")
    packing: bool = Field(
        True,
        description="jsonl: fill sequences with several samples, attention inside each; false = one, cut or padded",
    )
    data_workers: int = Field(1, gt=0, description="processes per rank that read and tokenise (hf)")
    hf_config: str | None = Field(None, description="configuration of a dataset on the hub, e.g. en for C4 (hf)")
    shuffle: bool = Field(True, description="a new seeded order of samples in every epoch")
    batch_size: int = Field(1, gt=0, description="sequences per device in one forward pass")
    total_batch_size: int | None = Field(
        None, gt=0, description="sequences per optimizer step over all ranks; null = batch_size x ranks"
    )
    validation_batches: int = Field(10, gt=0, description="batches of the total size that a validation looks at")


def derive_global_batch_size(config: DataConfig, dp_size: int) -> int:
    """Sequences per optimizer step.

    Raises:
        ConfigError: too many, or `total_batch_size` is no multiple of batch_size x ranks; names the nearest that are.
    """
    together = config.batch_size * dp_size
    global_batch_size = config.total_batch_size or together
    if global_batch_size > LARGEST_BATCH:
        raise ConfigError(
            f"batch_size: {global_batch_size} sequences a step are too many; {LARGEST_BATCH} are the most"
        )
    if global_batch_size % together:
        lower, upper = global_batch_size // together * together, (global_batch_size // together + 1) * together
        near = " or ".join(str(value) for value in (lower, upper) if value)
        raise ConfigError(
            f"total_batch_size: {global_batch_size} is no multiple of batch_size {config.batch_size} x {dp_size} ranks;"
            f" use {near}"
        )
    return global_batch_size


class MicroBatch(NamedTuple):
    """What the model is called with: `(batch_size, seq_len)` int64 each, on the device."""

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None
    """numbers that change where attention must not look back further"""


class Batch(NamedTuple):
    """This rank's part of one global batch."""

    micro_batches: list[MicroBatch]
    targets: int
    """positions that count in the loss, over all ranks"""
    state: dict[str, Any] | None = None
    """a streamed dataset's, behind this batch"""


@dataclass(frozen=True)
class Data:
    """Training and validation samples, and the tokenizer they were made with (None: no text)."""

    train: MixtureDataset | StreamingDataset
    validation: Dataset
    tokenizer: Tokenizer | None
    notes: Sequence[str] = ()
    """what a person should know about the data"""

    @property
    def samples(self) -> int | None:
        """Of an epoch; None: nobody knows, they are streamed."""
        return None if isinstance(self.train, StreamingDataset) else len(self.train)

    def describe(self) -> dict[str, Any]:
        """What changes when the tokenizer or the data do: kept in checkpoints, compared on resuming."""
        fingerprints = {"train": self.train.fingerprint(), "validation": self.validation.fingerprint()}
        return {"tokenizer": self.tokenizer and self.tokenizer.identity, "data": fingerprints}

    def files(self) -> Mapping[str, bytes]:
        """The tokenizer's, to be kept in every checkpoint."""
        return self.tokenizer.files if self.tokenizer else {}


# ---- opening ------------------------------------------------------------------------------------------


def open_data(
    config: DataConfig,
    vocab_size: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Data:
    """Find, read and check the data that `config` names.

    Raises:
        ConfigError: files are missing or bad, the vocabulary is too small, or there is too little to train on.
    """
    match config.dataset:
        case "synthetic":
            for key in ("train_data", "val_data", "tokenizer"):
                if getattr(config, key) is not None:
                    raise ConfigError(f"{key}: dataset: synthetic reads none; choose text, tokens, jsonl or hf")
            samples = SYNTHETIC_BATCHES * global_batch_size
            train = tokens.SyntheticDataset(vocab_size, seq_len, samples, (seed, "training"))
            validation = tokens.SyntheticDataset(vocab_size, seq_len, samples, (seed, "validation"))
            data = Data(MixtureDataset([train]), validation, None)
        case "text":
            data = _open_text(config, seq_len)
        case "tokens":
            data = _open_tokens(config, vocab_size, seq_len)
        case "jsonl":
            data = _open_jsonl(config, seq_len)
        case "hf":
            data = _open_stream(config, seq_len, global_batch_size, seed, dp_rank, dp_size)
    tokenizer = data.tokenizer
    if tokenizer and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"vocab_size: {vocab_size} is less than the tokenizer's: {tokenizer.identity} needs"
            f" {tokenizer.vocab_size} or more"
        )
    if data.samples is not None and data.samples < global_batch_size:
        raise _too_little("train_data", data.samples, seq_len, global_batch_size)
    if not len(data.validation):
        raise _too_little("val_data", 0, seq_len, 1)
    return data


def _too_little(key: str, samples: int, seq_len: int, needed: int) -> ConfigError:
    return ConfigError(
        f"{key}: makes {samples} samples of max_seq_len {seq_len}, but {needed} are needed: give more data, or lower"
        " max_seq_len or the batch size"
    )


def _open_text(config: DataConfig, seq_len: int) -> Data:
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    row = text.read_tokens(files.find_files(_one_name(config), "train_data"), tokenizer)
    if config.val_data is None:
        row, held_out = text.split_validation(row)
    else:
        held_out = text.read_tokens(files.find_files(config.val_data, "val_data"), tokenizer)
    train, validation = (tokens.TokenWindowDataset(part, seq_len) for part in (row, held_out))
    return Data(MixtureDataset([train]), validation, tokenizer)


@oserror_as_config_error
def _open_tokens(config: DataConfig, vocab_size: int, seq_len: int) -> Data:
    """Token files: `train.json` of one or several folders, and `validation.json` of the first, or what is named."""
    if not config.train_data:
        raise ConfigError("train_data: dataset: tokens needs a folder written by python -m lm.prepare")
    weighted = config.train_data if isinstance(config.train_data, dict) else {config.train_data: 1.0}
    train = [_token_file(where, "train", seq_len, vocab_size) for where in weighted]
    first = Path(next(iter(weighted)))
    beside = str(first if first.is_dir() else first.parent)
    if config.val_data is None and not (Path(beside) / "validation.json").exists():
        raise ConfigError(
            f"val_data: {beside} has no validation part: prepare it with --validation-fraction, or name one"
        )
    validation = _token_file(config.val_data or beside, "validation", seq_len, vocab_size)
    for where, part in zip(weighted, train, strict=True):
        if not len(part):
            raise _too_little(f"train_data: {where}", 0, seq_len, 1)
        if part.index.tokenizer != train[0].index.tokenizer:
            raise ConfigError(f"train_data: {where}: was made with another tokenizer than {next(iter(weighted))}")
    made_with = train[0].index.tokenizer
    if validation.index.tokenizer != made_with:
        raise ConfigError("val_data: was made with another tokenizer than train_data")
    name = config.tokenizer or ("bytes" if made_with == ByteTokenizer.identity else beside)
    tokenizer = load_tokenizer(name) if made_with is not None else None
    if tokenizer and tokenizer.identity != made_with:
        raise ConfigError(f"tokenizer: {name}: is not the one that the token files were made with ({made_with})")
    return Data(MixtureDataset(train, list(weighted.values())), validation, tokenizer)


def _token_file(where: str, name: str, seq_len: int, vocab_size: int) -> tokens.TokenFileDataset:
    path = Path(where)
    return tokens.TokenFileDataset(path / f"{name}.json" if path.is_dir() else path, seq_len, vocab_size)


def _open_jsonl(config: DataConfig, seq_len: int) -> Data:
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    names = {"train_data": _one_name(config), "val_data": config.val_data}
    for key, where in names.items():
        if where is None:
            raise ConfigError(f"{key}: dataset: jsonl needs it: a file, a folder or a glob")
    train, validation = (
        jsonl.JsonlDataset(
            files.find_files(where, key),
            tokenizer,
            seq_len,
            text_field=config.text_field,
            completion_only=config.loss_on == "completion",
            packing=config.packing,
        )
        for key, where in names.items()
    )
    notes = []
    if train.overlong and not config.packing:
        lost = train.documents - len(train)
        left_out = f"; {lost} have nothing to learn in what is left, and are left out" if lost else ""
        notes.append(f"{train.overlong} of {train.documents} samples are cut to max_seq_len {seq_len}{left_out}")
    return Data(MixtureDataset([train]), validation, tokenizer, notes)


def _open_stream(
    config: DataConfig, seq_len: int, global_batch_size: int, seed: int, dp_rank: int, dp_size: int
) -> Data:
    where = _one_name(config)
    if where is None:
        raise ConfigError("train_data: dataset: hf needs a dataset's name on the hub, or local files")
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    documents, identity = stream.open_documents(where, "train_data", "train", config.hf_config)
    if config.val_data is not None and stream.is_local(config.val_data):
        held_out, _ = stream.open_documents(config.val_data, "val_data", "train", None)
    elif stream.is_local(where):
        raise ConfigError("val_data: local files of a streamed dataset need some beside them")
    else:
        held_out, _ = stream.open_documents(where, "val_data", config.val_data or "validation", config.hf_config)
    row = stream.first_tokens(
        held_out, config.text_field, tokenizer, config.validation_batches * global_batch_size * seq_len + 1
    )
    streams = StreamingDataset(
        documents,
        identity,
        config.text_field,
        tokenizer,
        seq_len,
        batch_size=config.batch_size,
        rank=dp_rank,
        ranks=dp_size,
        workers=config.data_workers,
        seed=seed if config.shuffle else None,
    )
    notes = [streams.note] if streams.note else []
    return Data(streams, tokens.TokenWindowDataset(row, seq_len), tokenizer, notes)


def _one_name(config: DataConfig) -> str | None:
    if isinstance(config.train_data, dict):
        raise ConfigError("train_data: files with weights need dataset: tokens")
    return config.train_data


# ---- loading ------------------------------------------------------------------------------------------


class Loader:
    """Turns samples into this rank's batches on its device, one batch ahead.

    Args:
        total: sequences per global batch, a multiple of batch_size x ranks.
    """

    def __init__(
        self,
        config: DataConfig,
        data: Data,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._data = data
        self._total = global_batch_size
        self._rank = dp_rank
        self._ranks = dp_size
        self._device = device
        self.state: dict[str, Any] | None = None
        """a streamed dataset's, behind the batch handed out last"""
        if isinstance(data.train, StreamingDataset):
            self.state = data.train.state()
            return
        try:
            self._order = Sampler(data.train.counts, data.train.shares, seed, config.shuffle)
        except ValueError as error:
            raise ConfigError(f"train_data: {error}") from None

    def resume(self, states: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Go on where a streamed dataset stood; returns what there is to say about it.

        Args:
            states: `state` of every rank, by rank.
        """
        if not isinstance(self._data.train, StreamingDataset) or states is None:
            return None
        note = self._data.train.resume(states)
        self.state = self._data.train.state()
        return note

    def sample_ids(self, step: int) -> list[int]:
        """The samples of global batch `step`, over all ranks, numbered through source by source."""
        return [self._order[place] for place in range(step * self._total, (step + 1) * self._total)]

    def training(self, start: int) -> Iterator[Batch]:
        """Endless batches from step `start` on, each made while the one before it is trained on."""
        batches = (
            self._streamed(self._data.train)
            if isinstance(self._data.train, StreamingDataset)
            else self._ordered(self._data.train, start)
        )
        pool = ThreadPoolExecutor(1, "loader")
        try:
            ahead = pool.submit(next, batches)
            while True:
                batch = ahead.result()
                ahead = pool.submit(next, batches)
                self.state = batch.state
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ordered(self, source: MixtureDataset, start: int) -> Iterator[Batch]:
        size = self._config.batch_size
        share = self._total // self._ranks
        for step in itertools.count(start):
            numbers = self.sample_ids(step)
            rows = [source[number] for number in numbers[self._rank * share : (self._rank + 1) * share]]
            micro_batches = [self._micro(rows[at : at + size]) for at in range(0, share, size)]
            yield Batch(micro_batches, sum(map(source.targets, numbers)))

    def _streamed(self, streams: StreamingDataset) -> Iterator[Batch]:
        windows = iter(streams)
        for _ in itertools.count():
            taken = [next(windows) for _ in range(self._total // self._ranks // self._config.batch_size)]
            micro_batches = [self._micro([tokens.window(ids) for ids in many]) for many, _ in taken]
            yield Batch(micro_batches, self._total * micro_batches[0].targets.shape[1], taken[-1][1])

    def validation(self) -> Iterator[MicroBatch]:
        """The validation samples that fall to this rank; every rank gets equally many forward passes.

        Where samples run out, rows are filled up with token 0 and targets that are all ignored.
        """
        source = self._data.validation
        size = self._config.batch_size
        count = min(len(source), self._config.validation_batches * self._total)
        mine = range(self._rank, count, self._ranks)
        inputs, targets, document_ids = source[0]
        filler = Sample(np.zeros_like(inputs), np.full_like(targets, IGNORE_INDEX), document_ids)
        for at in range(0, math.ceil(count / self._ranks), size):
            rows = [source[i] for i in mine[at : at + size]]
            yield self._micro(rows + [filler] * (size - len(rows)))

    def _micro(self, rows: Sequence[Sample]) -> MicroBatch:
        inputs, targets, document_ids = zip(*rows, strict=True)
        apart = self._on_device(document_ids) if document_ids[0] is not None else None
        return MicroBatch(self._on_device(inputs), self._on_device(targets), apart)

    def _on_device(self, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        together = torch.from_numpy(np.stack(rows))
        if self._device.type == "cuda":
            return together.pin_memory().to(self._device, non_blocking=True)
        return together
