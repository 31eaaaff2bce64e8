"""Open the data of a run, files or a streamed dataset: a training source, a validation dataset and their tokenizer."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from lm.data import files, stream
from lm.data.dataset import Dataset, TrainSource
from lm.data.jsonl import JsonlDataset
from lm.data.sampler import SampledSource
from lm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lm.data.tokens import (
    SyntheticDataset,
    TokenFileDataset,
    TokenWindowDataset,
    read_index,
    read_tokens,
)
from lm.errors import ConfigError, error_prefix, oserror_as_config_error
from lm.fields import Fixed, Logged
from model import IGNORE_INDEX

SYNTHETIC_BATCHES = 10
VALIDATION_SHARE = 0.05
"""Fraction of the text that is held out unless val_data is set."""
MAX_BATCH_SIZE = 2**24
"""Sequences; the order of a global batch is drawn in memory."""
PROMPT_TOKENS = 32
"""Tokens of the validation data that samples continue unless prompt is set."""


class DataConfig(BaseModel, frozen=True, extra="forbid"):
    """Hyperparameters of the data."""

    dataset: Fixed[Literal["synthetic", "text", "tokens", "jsonl", "hf"]] = Field(
        "synthetic",
        description="random tokens, UTF-8 text, token files (`python -m lm.prepare`), JSON Lines or a streamed dataset",
    )
    train_data: Fixed[str | dict[str, Annotated[float, Field(gt=0)]] | None] = Field(
        None,
        description="a file, directory or glob; text: null = the Python standard library's source; tokens: a"
        " directory, or several with weights; hf: also a dataset on the hub",
    )
    val_data: Logged[str | None] = Field(
        None,
        description="a file, directory or glob; null = held out of train_data: the last 5 % (text), every 20th line"
        " (jsonl), the directory's validation part (tokens); hf: also a split, null = `validation`",
    )
    tokenizer: Fixed[str | None] = Field(
        None,
        description="`bytes` (257 ids), a tokenizer.json, its directory, or a Hugging Face name; null = that of the"
        " token files (tokens), else bytes",
    )
    text_field: Logged[str] = Field("text", description="field that holds the text (jsonl, hf)")
    loss_on: Logged[Literal["all", "completion"]] = Field(
        "all", description="tokens that are targets (jsonl)"
    )
    chat_template_kwargs: Logged[dict[str, Any] | None] = Field(
        None,
        description="variables of the chat template, e.g. {enable_thinking: false}; date_string replaces today's date"
        " (jsonl)",
    )
    chat_template_date: Logged[datetime.date | None] = Field(
        None,
        description="today's date (YYYY-MM-DD) for the chat template; null = the day on which the run first starts"
        " (jsonl)",
    )
    packing: Logged[bool] = Field(
        True,
        description="several samples in a sequence, each in one piece; false = one sample (jsonl)",
    )
    data_workers: Logged[int] = Field(
        1, gt=0, description="processes per rank that read and tokenize (hf)"
    )
    hf_config: Logged[str | None] = Field(
        None, description="configuration of the dataset on the hub, e.g. en for C4 (hf)"
    )
    shuffle: Fixed[bool] = Field(True, description="shuffle the samples in each epoch, by the seed")
    batch_size: Logged[int] = Field(
        1,
        gt=0,
        le=MAX_BATCH_SIZE,
        description="sequences per device in a micro-batch",
        json_schema_extra={"aliases": ["per_device_train_batch_size"]},
    )
    total_batch_size: Fixed[int | None] = Field(
        None,
        gt=0,
        le=MAX_BATCH_SIZE,
        description="sequences per optimizer step over all ranks; null = batch_size x ranks",
        json_schema_extra={"aliases": ["gradient_accumulation_steps"]},
    )
    validation_batches: Logged[int] = Field(
        10, gt=0, description="batches of total_batch_size in a validation"
    )


@dataclass(frozen=True)
class Data:
    """One rank's training source, the validation dataset, and their tokenizer (None: synthetic or unknown)."""

    train: TrainSource
    validation: Dataset
    tokenizer: Tokenizer | None
    notes: Sequence[str] = ()
    """for the log"""
    datasets: Sequence[Dataset] = ()
    """all, unless they are streamed"""

    def prompt(self) -> list[int]:
        """Return the start of the validation data: all before its first completion, or at most `PROMPT_TOKENS`."""
        inputs, targets, _ = self.validation[0]
        is_target = targets != IGNORE_INDEX
        n_tokens = int(is_target.argmax()) + 1
        return inputs[
            : n_tokens if n_tokens > 1 else max(1, min(is_target.sum(), PROMPT_TOKENS))
        ].tolist()

    def fingerprints(self) -> dict[str, Any]:
        """Return what a resumed run compares with its checkpoint: identities of tokenizer and data."""
        data = {"train": self.train.fingerprint(), "validation": self.validation.fingerprint()}
        return {"tokenizer": self.tokenizer and self.tokenizer.identity, "data": data}


def open_data(
    config: DataConfig,
    vocab_size: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Data:
    """Open and check the data that `config` names.

    Raises:
        ConfigError: files are missing or invalid, the tokenizer exceeds vocab_size, or there are
            too few samples.
    """
    if isinstance(config.train_data, dict) and config.dataset != "tokens":
        problem = f"train_data: weights require dataset: tokens, not {config.dataset}; use one file, directory or glob"
        raise ConfigError(problem)
    if config.dataset == "hf":
        data = _open_stream(config, seq_len, global_batch_size, seed, dp_rank, dp_size)
    else:
        match config.dataset:
            case "synthetic":
                train, validation, tokenizer = _open_synthetic(
                    config, vocab_size, seq_len, global_batch_size, seed
                )
            case "text":
                train, validation, tokenizer = _open_text(config, seq_len)
            case "tokens":
                train, validation, tokenizer = _open_tokens(config, vocab_size, seq_len)
            case "jsonl":
                train, validation, tokenizer = _open_jsonl(config, seq_len)
        weights = list(config.train_data.values()) if isinstance(config.train_data, dict) else [1.0]
        source = SampledSource(
            train, weights, global_batch_size, dp_rank, dp_size, seed, config.shuffle
        )
        datasets = [*(("train_data", dataset) for dataset in train), ("val_data", validation)]
        notes = [f"{key}: {dataset.note}" for key, dataset in datasets if dataset.note]
        if config.val_data is None and config.dataset in ("text", "jsonl"):
            counts = f"{len(validation):,} of {len(validation) + len(train[0]):,} sequences"
            notes.append(f"val_data: null: {counts} of train_data are held out for validation")
        if config.tokenizer is not None and tokenizer is None:
            notes.append(
                f"tokenizer: {config.tokenizer}: not used, as the token files name no tokenizer"
            )
        data = Data(source, validation, tokenizer, notes, [*train, validation])
    tokenizer, n_samples = data.tokenizer, data.train.samples_per_epoch
    if tokenizer and tokenizer.vocab_size > vocab_size:
        problem = (
            f"vocab_size: {vocab_size} is less than the {tokenizer.vocab_size} ids of tokenizer"
        )
        raise ConfigError(
            f"{problem} {tokenizer.identity}; use {tokenizer.vocab_size} or more, or null"
        )
    if n_samples is not None and n_samples < global_batch_size:
        raise _too_few("train_data", n_samples, seq_len, global_batch_size)
    if not len(data.validation):
        raise _too_few("val_data", 0, seq_len, 1)
    return data


def _too_few(what: str, n_samples: int, seq_len: int, needed: int) -> ConfigError:
    problem = f"{what}: {n_samples} sequences of max_seq_len {seq_len}, but the run needs at least {needed}"
    return ConfigError(f"{problem}; add data, or lower max_seq_len or the batch size")


Opened = tuple[Sequence[Dataset], Dataset, Tokenizer | None]
"""Training datasets, validation dataset, and their tokenizer."""


def _open_synthetic(
    config: DataConfig, vocab_size: int, seq_len: int, global_batch_size: int, seed: int
) -> Opened:
    for key in ("train_data", "val_data", "tokenizer"):
        if getattr(config, key) is not None:
            problem = f"{key}: dataset: synthetic reads no data; remove it, or choose text, tokens, jsonl or hf"
            raise ConfigError(problem)
    n_samples, parts = SYNTHETIC_BATCHES * global_batch_size, ("training", "validation")
    train, validation = (
        SyntheticDataset(vocab_size, seq_len, n_samples, (seed, part)) for part in parts
    )
    return [train], validation, None


def _open_text(config: DataConfig, seq_len: int) -> Opened:
    tokenizer = load_tokenizer(config.tokenizer or "bytes")

    def read(key: str) -> NDArray[np.uint32]:
        found = files.find_files(getattr(config, key), key)
        with error_prefix(key):
            return read_tokens(found, tokenizer)

    train = read("train_data")
    if config.val_data is None:
        train, validation = np.split(
            train, [-max(seq_len + 1, round(len(train) * VALIDATION_SHARE))]
        )
    else:
        validation = read("val_data")
    return [TokenWindowDataset(train, seq_len)], TokenWindowDataset(validation, seq_len), tokenizer


def _train_indexes(config: DataConfig) -> list[Path]:
    if not config.train_data:
        raise ConfigError(
            "train_data: dataset: tokens requires a directory written by python -m lm.prepare"
        )
    directories = config.train_data if isinstance(config.train_data, dict) else [config.train_data]
    return [
        path / "train.json" if path.is_dir() else path
        for path in map(Path.expanduser, map(Path, directories))
    ]


@oserror_as_config_error
def default_vocab_size(config: DataConfig) -> int:
    """Return the number of ids of the tokenizer, or of the token files, rounded up to a multiple of 64."""
    if config.dataset == "tokens":
        paths = _train_indexes(config)
        with error_prefix("train_data"):
            n_ids = max(read_index(path).vocab_size for path in paths)
    else:
        n_ids = load_tokenizer(config.tokenizer or "bytes").vocab_size
    return 64 * math.ceil(n_ids / 64)


@oserror_as_config_error
def _open_tokens(config: DataConfig, vocab_size: int, seq_len: int) -> Opened:
    paths = _train_indexes(config)
    with error_prefix("train_data"):
        train = [TokenFileDataset(path, seq_len, vocab_size) for path in paths]
    directory = str(paths[0].parent)
    held_out = Path(config.val_data or directory).expanduser()
    if held_out.is_dir():
        held_out /= "validation.json" if (held_out / "validation.json").exists() else "train.json"
    if config.val_data is None and held_out.stem == "train":
        problem = f"val_data: {directory} has no validation part"
        raise ConfigError(f"{problem}; prepare it with --validation-fraction, or set val_data")
    with error_prefix("val_data"):
        validation = TokenFileDataset(held_out, seq_len, vocab_size)
    identity = train[0].index.tokenizer
    for part in (*train, validation):
        key = "val_data" if part is validation else "train_data"
        if not len(part):
            raise _too_few(f"{key}: {part.path}", 0, seq_len, 1)
        if part.index.tokenizer != identity:
            problem = f"{key}: {part.path} was made with another tokenizer than {train[0].path}"
            raise ConfigError(f"{problem}; prepare them with one")
    name = config.tokenizer or ("bytes" if identity == ByteTokenizer.identity else directory)
    tokenizer = load_tokenizer(name) if identity is not None else None
    if tokenizer and tokenizer.identity != identity:
        problem = f"tokenizer: {name} is not the tokenizer that the token files were made with ({identity})"
        raise ConfigError(f"{problem}; use that one")
    return train, validation, tokenizer


def _open_jsonl(config: DataConfig, seq_len: int) -> Opened:
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    tokenizer.template_kwargs, tokenizer.date = (
        config.chat_template_kwargs or {},
        config.chat_template_date,
    )

    def read(key: str, held_out: bool) -> JsonlDataset:
        if (where := getattr(config, key)) is None:
            raise ConfigError(
                f"{key}: dataset: jsonl requires it; set it to a file, a directory or a glob"
            )
        found = files.find_files(where, key)
        completion_only = config.loss_on == "completion"
        part = held_out if config.val_data is None else None
        with error_prefix(key):
            return JsonlDataset(
                found, tokenizer, seq_len, config.text_field, completion_only, config.packing, part
            )

    validation = read("train_data" if config.val_data is None else "val_data", held_out=True)
    return [read("train_data", held_out=False)], validation, tokenizer


def _open_stream(
    config: DataConfig, seq_len: int, global_batch_size: int, seed: int, dp_rank: int, dp_size: int
) -> Data:
    where, val_data = config.train_data, config.val_data
    if not isinstance(where, str):
        raise ConfigError("train_data: dataset: hf requires a dataset on the hub, or local files")
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    documents, fingerprint = stream.open_documents(where, "train_data", "train", config.hf_config)
    if val_data is not None and stream.is_local(val_data):
        held_out, _ = stream.open_documents(val_data, "val_data", "train", None)
    elif stream.is_local(where):
        raise ConfigError(
            "val_data: local files of dataset: hf have no validation split; set it to a file, directory or glob"
        )
    else:
        held_out, _ = stream.open_documents(
            where, "val_data", val_data or "validation", config.hf_config
        )
    n_tokens = config.validation_batches * global_batch_size * seq_len + 1
    validation = TokenWindowDataset(
        stream.first_tokens(held_out, config.text_field, tokenizer, n_tokens), seq_len
    )
    shuffle_seed = seed if config.shuffle else None
    tokens = stream.TokenStream(documents, config.text_field, tokenizer, seq_len, shuffle_seed)
    sizes = config.batch_size, global_batch_size, dp_rank, dp_size, config.data_workers
    train = stream.StreamedSource(tokens, fingerprint, *sizes)
    return Data(train, validation, tokenizer, [train.note] if train.note else [])
