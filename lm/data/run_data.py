"""The data of a run: a training source, a validation dataset and their tokenizer."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.data.config import DataConfig
from lm.data.dataset import Dataset, ValidationSet, set_key
from lm.data.files import find_files, format_of
from lm.data.packing import PackedDataset
from lm.data.sampler import SampledSource
from lm.data.token_file import (
    TRAIN,
    VALIDATION,
    TokenFile,
    find_token_files,
    open_token_files,
    read_index,
)
from lm.data.tokenized import HELD_OUT, RecordOptions, TextOptions, describe_tokenizer, tokenize
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.loading import Tokenizer, load_tokenizer
from lm.data.windows import SyntheticDataset, WindowDataset, cut_file
from lm.errors import ConfigError, error_prefix, oserror_as_config_error
from lm.fileio import home_path
from lm.model_config import IGNORE_INDEX
from lm.storage.folder import recover
from lm.units import format_count

if TYPE_CHECKING:
    from datasets import IterableDataset

    from lm.data.stream import StreamedSource

SYNTHETIC_BATCHES = 10
PROMPT_TOKENS = 32
"""Tokens of the validation data that samples continue unless prompt is set."""
_OF_VALIDATION = (VALIDATION, TRAIN)
"""parts that a directory as `val_data` can have: the first, or only the second"""
_READING = (
    "tokenizer",
    "chat_template",
    "chat_template_kwargs",
    "fields",
    "loss_on",
    "objective",
)
"""hyperparameters that decide what token files have of records"""


@dataclass(frozen=True)
class Data:
    """One rank's training source, the validation data, and their tokenizer."""

    train: SampledSource | StreamedSource
    validation: Sequence[ValidationSet]
    """at least one"""
    tokenizer: Tokenizer | None
    """None = the tokens are synthetic"""
    notes: Sequence[str] = ()
    """for the log"""
    datasets: Sequence[Dataset] = ()
    """all, unless they are streamed"""

    def prompt(self) -> list[int]:
        """Return the start of the (first) validation data.

        It is all before the first completion, or at most `PROMPT_TOKENS` if there is no prompt.
        """
        sample = self.validation[0].dataset[0]
        is_target = sample.targets != IGNORE_INDEX
        # The target of position i is token i + 1.
        n_tokens = int(is_target.argmax()) + 1
        if n_tokens == 1:
            n_tokens = max(1, min(is_target.sum(), PROMPT_TOKENS))
        return sample.inputs[:n_tokens].tolist()

    @property
    def n_replies(self) -> int:
        """Replies of all pairs; 0 = the data are no pairs."""
        return sum(dataset.n_replies for dataset in self.datasets)

    def fingerprints(self) -> dict[str, Any]:
        """Return the identities of tokenizer and data, which a resumed run compares."""
        identity = None
        if self.tokenizer is not None:
            identity = self.tokenizer.identity
        sets: list[str] = []
        for name, dataset in self.validation:
            fingerprint = dataset.fingerprint()
            if name is not None:
                fingerprint = f"{name}: {fingerprint}"
            sets.append(fingerprint)
        data = {"train": self.train.fingerprint(), "validation": "; ".join(sets)}
        return {"tokenizer": identity, "data": data}


def open_data(
    config: DataConfig,
    vocab_size: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    pairs: bool = False,
) -> Data:
    """Open and check the data that `config` names.

    Args:
        pairs: the records are preferences.

    Raises:
        ConfigError: files are missing, invalid or damaged, a token is not below vocab_size, or
            there are too few samples.
    """
    if isinstance(config.train_data, dict) and config.dataset != "tokens":
        problem = f"weights require dataset: tokens, not {config.dataset}"
        raise ConfigError(f"train_data: {problem}; use one file, directory or glob")
    if config.dataset == "hf":
        data = _open_stream(config, vocab_size, seq_len, global_batch_size, seed, dp_rank, dp_size)
    else:
        opened = _open_datasets(config, vocab_size, seq_len, global_batch_size, seed, pairs)
        weights = [1.0]
        if isinstance(config.train_data, dict):
            weights = list(config.train_data.values())
        source = SampledSource(
            opened.train, weights, global_batch_size, dp_rank, dp_size, seed, config.shuffle
        )
        data = Data(
            source,
            opened.validation,
            opened.tokenizer,
            _notes(config, opened),
            [*opened.train, *(each.dataset for each in opened.validation)],
        )
        n_replies = 0
        for dataset in data.datasets:
            if dataset.n_replies > 0:
                dataset.first_reply = n_replies
                n_replies += dataset.n_replies
    n_samples = data.train.samples_per_epoch
    if n_samples is not None and n_samples < global_batch_size:
        raise _too_few("train_data", n_samples, seq_len, global_batch_size)
    for each in data.validation:
        if len(each.dataset) == 0:
            raise _too_few(each.key, 0, seq_len, 1)
    return data


def _too_few(what: str, n_samples: int, seq_len: int, needed: int) -> ConfigError:
    found = f"{format_count(n_samples, 'sequence')} of max_seq_len {seq_len}"
    remedy = "add data, or lower max_seq_len"
    if n_samples > 0:
        remedy += " or the batch size"
    return ConfigError(f"{what}: {found}, but the run needs at least {needed}; {remedy}")


class _OpenedDatasets(NamedTuple):
    train: Sequence[Dataset]
    validation: Sequence[ValidationSet]
    tokenizer: Tokenizer | None


def _open_datasets(
    config: DataConfig,
    vocab_size: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    pairs: bool,
) -> _OpenedDatasets:
    match config.dataset:
        case "synthetic":
            return _open_synthetic(vocab_size, seq_len, global_batch_size, seed)
        case "tokens":
            return _open_tokens(config, vocab_size, seq_len)
        case _:  # "text", "jsonl"; "hf" is streamed
            return _open_files(config, vocab_size, seq_len, pairs)


def _notes(config: DataConfig, opened: _OpenedDatasets) -> list[str]:
    notes = [f"train_data: {dataset.note}" for dataset in opened.train if dataset.note]
    notes += [f"{each.key}: {each.dataset.note}" for each in opened.validation if each.dataset.note]
    trained_on: set[str] = set()
    if config.dataset != "synthetic":  # whose fingerprint is the size
        trained_on = {dataset.fingerprint() for dataset in opened.train}
    same = [each.key for each in opened.validation if each.dataset.fingerprint() in trained_on]
    notes += [f"{key}: its content is what the model is trained on" for key in same]
    if config.val_data is None and config.dataset in ("text", "jsonl") and not same:
        n_held_out = len(opened.validation[0].dataset)
        n_all = n_held_out + len(opened.train[0])
        verb = "is" if n_held_out == 1 else "are"
        notes.append(
            f"{n_held_out:,} of the {n_all:,} sequences of train_data {verb} held out for"
            " validation, as val_data is not set"
        )
    return notes


def _open_synthetic(
    vocab_size: int, seq_len: int, global_batch_size: int, seed: int
) -> _OpenedDatasets:
    n_samples = SYNTHETIC_BATCHES * global_batch_size
    train = SyntheticDataset(vocab_size, seq_len, n_samples, (seed, "training"))
    validation = SyntheticDataset(vocab_size, seq_len, n_samples, (seed, "validation"))
    return _OpenedDatasets([train], [ValidationSet(None, validation)], None)


def _open_files(config: DataConfig, vocab_size: int, seq_len: int, pairs: bool) -> _OpenedDatasets:
    tokenizer = load_run_tokenizer(config, vocab_size)

    def read(where: str | None, key: str, *, holds_out: bool) -> Sequence[Dataset]:
        if config.dataset == "text":
            texts = _read_text(where, key, tokenizer, holds_out=holds_out)
            return [cut_file(text, seq_len, config.attend_across_documents) for text in texts]
        options = record_options(config, pairs=pairs, holds_out=holds_out)
        records = _read_records(where, key, tokenizer, options)
        with error_prefix(f"{key}: {where}"):
            return [PackedDataset(each, seq_len, packing=config.packing) for each in records]

    where = config.train_data
    assert not isinstance(where, dict)  # as only token files have weights
    train, *held_out = read(where, "train_data", holds_out=config.val_data is None)
    validation = [ValidationSet(None, dataset) for dataset in held_out]
    for name, path in config.named_val_data.items():
        (dataset,) = read(path, set_key(name), holds_out=False)
        validation.append(ValidationSet(name, dataset))
    return _OpenedDatasets([train], validation, tokenizer)


def _read_text(
    where: str | None, key: str, tokenizer: Tokenizer, *, holds_out: bool
) -> list[TokenFile]:
    """Return the tokens of text files, and those that are held out, if any are.

    Files are ordered by a hash of their names, so that the first ones, which are all that a short
    validation reads, are a fair sample.
    """
    found = find_files(where, key)
    for path in found:
        if format_of(path) not in ("text", None):
            problem = f"{key}: {path}: has records, which dataset: text does not read"
            remedy = "choose text by a glob, or write token files of records, python -m lm.prepare"
            raise ConfigError(f"{problem}; {remedy}")
    in_order = sorted(found, key=lambda path: sha256(os.fsencode(path.name)).digest())
    options = TextOptions("text", validation_fraction=HELD_OUT if holds_out else 0.0)
    with error_prefix(key):
        return tokenize(in_order, tokenizer, options)


def _train_directories(config: DataConfig) -> list[str]:
    if not config.train_data:
        problem = "dataset: tokens requires a directory written by python -m lm.prepare"
        raise ConfigError(f"train_data: {problem}")
    if isinstance(config.train_data, str):
        return [config.train_data]
    return list(config.train_data)


def _find_directory(where: str, key: str) -> Path:
    """Return the directory of token files that `where`, the value of `key`, names."""
    with error_prefix(key):
        return find_token_files(home_path(where))


def _open_part(where: str, key: str, splits: Sequence[str], vocab_size: int) -> TokenFile:
    """Open the first of the parts `splits` that a directory of token files has."""
    directory = _find_directory(where, key)
    found = [split for split in splits if (directory / f"{split}.json").exists()]
    split = found[0] if found else splits[0]
    with error_prefix(key):
        (file,) = open_token_files(directory, [split], vocab_size)
    return file


@oserror_as_config_error
def default_vocab_size(config: DataConfig) -> int:
    """Return the number of ids of the tokenizer, or of the token files, as a multiple of 64."""
    if config.dataset == "tokens":
        n_ids = 0
        for where in _train_directories(config):
            directory = _find_directory(where, "train_data")
            with error_prefix("train_data"):
                n_ids = max(n_ids, read_index(directory / f"{TRAIN}.json").vocab_size)
    else:
        n_ids = load_tokenizer(config.tokenizer or "bytes").vocab_size
    return 64 * math.ceil(n_ids / 64)


@oserror_as_config_error
def _open_tokens(config: DataConfig, vocab_size: int, seq_len: int) -> _OpenedDatasets:
    directories = _train_directories(config)
    opened: list[TokenFile] = []

    def open_windows(where: str, key: str, splits: Sequence[str]) -> WindowDataset:
        file = _open_part(where, key, splits, vocab_size)
        opened.append(file)
        if file.has_mask:
            problem = f"{key}: {file.path} has records, of which a mask says what is learned"
            raise ConfigError(f"{problem}; set dataset: jsonl")
        if file.index.tokenizer != opened[0].index.tokenizer:
            problem = f"{key}: {file.path} was made with another tokenizer than {opened[0].path}"
            raise ConfigError(f"{problem}; prepare them with one")
        dataset = cut_file(file, seq_len, config.attend_across_documents)
        if len(dataset) == 0:
            raise _too_few(f"{key}: {file.path}", 0, seq_len, 1)
        return dataset

    train = [open_windows(where, "train_data", [TRAIN]) for where in directories]
    named = config.named_val_data or _find_validation_parts(directories)
    validation: list[ValidationSet] = []
    for name, where in named.items():
        validation.append(ValidationSet(name, open_windows(where, set_key(name), _OF_VALIDATION)))
    tokenizer = _load_token_files_tokenizer(config, opened[0])
    tokenizer.limit_ids(vocab_size)
    return _OpenedDatasets(train, validation, tokenizer)


def _find_validation_parts(directories: Sequence[str]) -> dict[str | None, str]:
    """Return directories of token files, each with the name of its validation set.

    One directory needs no name; several have those of the directories.

    Raises:
        ConfigError: a directory has no validation part.
    """
    named: dict[str | None, str] = {}
    for where in directories:
        directory = home_path(where)
        if not (directory / f"{VALIDATION}.json").exists():
            problem = f"val_data: {where} has no validation part"
            raise ConfigError(f"{problem}; prepare it with --validation-fraction, or set val_data")
        directory_name = re.sub(r"[^A-Za-z0-9_-]", "_", directory.resolve().name)[:30] or "root"
        name = directory_name
        number = len(named)
        while name in named:
            name = f"{directory_name}-{number}"
            number += 1
        named[name if len(directories) > 1 else None] = where
    return named


def _load_token_files_tokenizer(config: DataConfig, train: TokenFile) -> Tokenizer:
    """Load the tokenizer that token files were made with."""
    identity = train.index.tokenizer
    if config.tokenizer:
        name = config.tokenizer
    elif identity == ByteTokenizer.identity:
        name = "bytes"
    else:
        name = str(train.path.parent)
    tokenizer = load_tokenizer(name)
    if tokenizer.identity != identity:
        problem = f"{name} is not the tokenizer that the token files were made with ({identity})"
        remedy = "remove tokenizer: the directory has its own"
        if not config.tokenizer:
            remedy = "install the version of tokenizers that it was made with, or prepare it again"
        raise ConfigError(f"tokenizer: {problem}; {remedy}")
    return tokenizer


def load_run_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of a run, with the chat template that `config` names."""
    tokenizer = load_tokenizer(config.tokenizer or "bytes", config.chat_template)
    tokenizer.limit_ids(vocab_size)
    if config.chat_template_kwargs:
        mentioned = re.findall(r"\w+", tokenizer.template_text or "")
        unread = config.chat_template_kwargs.keys() - mentioned
        if unread:
            problem = f"the chat template does not read {', '.join(sorted(unread))}"
            raise ConfigError(f"chat_template_kwargs: {problem}; correct or remove it")
        tokenizer.template_kwargs = config.chat_template_kwargs
    return tokenizer


def record_options(config: DataConfig, *, pairs: bool, holds_out: bool) -> RecordOptions:
    """Return what the tokens of records depend on besides the tokenizer."""
    objective = "dpo" if pairs else "next-token"
    return RecordOptions(config.fields, config.loss_on, objective, holds_out)


def find_record_files(where: str | None, key: str) -> list[Path]:
    """Return the files of JSON Lines that `where`, the value of the hyperparameter `key`, names."""
    if where is None:
        advice = "set it to a file, a directory or a glob"
        raise ConfigError(f"{key}: dataset: jsonl requires it; {advice}")
    return find_files(where, key)


def _read_records(
    where: str | None, key: str, tokenizer: Tokenizer, options: RecordOptions
) -> list[TokenFile]:
    if where is not None and _names_token_files(where):
        return _open_prepared(where, key, tokenizer, options)
    found = find_record_files(where, key)
    with error_prefix(key):
        return tokenize(found, tokenizer, options)


def _names_token_files(where: str) -> bool:
    """Return whether `where` is a directory of token files."""
    with suppress(OSError):  # of a name that cannot be one, which the reader of files refuses
        recover(home_path(where))
        return (home_path(where) / f"{TRAIN}.bin").exists()
    return False


def _open_prepared(
    where: str, key: str, tokenizer: Tokenizer, options: RecordOptions
) -> list[TokenFile]:
    """Open token files of records, made as the run would make them.

    Raises:
        ConfigError: they are damaged, or were made otherwise.
    """
    parts: list[Sequence[str]] = [[split] for split in options.splits]
    if key != "train_data":
        parts = [_OF_VALIDATION]
    expected = describe_tokenizer(tokenizer) | asdict(options)
    opened: list[TokenFile] = []
    for splits in parts:
        file = _open_part(where, key, splits, tokenizer.n_model_ids)
        if not file.has_mask:
            problem = f"{key}: {where} has token files of text"
            raise ConfigError(f"{problem}; set dataset: tokens")
        for name in _READING:
            found = file.made_from.get(name)
            if found != expected[name]:
                problem = f"{name}: {where} was prepared with another"
                use = f"{name}: {json.dumps(found)}"
                if name in ("tokenizer", "chat_template") and found != ByteTokenizer.identity:
                    use = f"tokenizer: {where} without chat_template"  # the directory has both
                remedy = f"set {use}, or prepare it again with python -m lm.prepare --config"
                raise ConfigError(f"{problem}; {remedy}")
        opened.append(file)
    return opened


def _open_stream(
    config: DataConfig,
    vocab_size: int,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    dp_rank: int,
    dp_size: int,
) -> Data:
    from lm.data import stream  # reads and tokenizes, which no other run does in its ranks

    where = config.train_data
    if not isinstance(where, str):
        problem = "dataset: hf requires a dataset on the hub, or local files"
        raise ConfigError(f"train_data: {problem}")
    tokenizer = load_run_tokenizer(config, vocab_size)
    field = config.text_source
    documents, fingerprint = stream.open_documents(
        where, "train_data", "train", config.hf_config, field
    )
    n_samples = config.validation_batches * global_batch_size
    validation: list[ValidationSet] = []
    for name, val_data in (config.named_val_data or {None: None}).items():
        key = set_key(name)
        held_out = _open_held_out_documents(config, where, val_data, key)
        dataset = stream.open_windows(held_out, field, tokenizer, n_samples, seq_len, key)
        validation.append(ValidationSet(name, dataset))
    shuffle_seed = None
    if config.shuffle:
        shuffle_seed = seed
    token_stream = stream.TokenStream(documents, field, tokenizer, seq_len, shuffle_seed)
    train = stream.StreamedSource(
        token_stream,
        fingerprint,
        config.batch_size,
        global_batch_size,
        dp_rank,
        dp_size,
        config.data_workers,
    )
    return Data(train, validation, tokenizer)


def _open_held_out_documents(
    config: DataConfig, train_data: str, val_data: str | None, key: str
) -> IterableDataset:
    """Open the validation data of a streamed dataset: local files, or one of its splits."""
    from lm.data import stream

    if val_data is not None and stream.is_local(val_data):
        documents, _ = stream.open_documents(val_data, key, "train", None, config.text_source)
        return documents
    if stream.is_local(train_data):
        problem = "local files of dataset: hf have no validation split"
        raise ConfigError(f"{key}: {problem}; set it to a file, directory or glob")
    split = val_data or "validation"
    documents, _ = stream.open_documents(train_data, key, split, config.hf_config)
    return documents
