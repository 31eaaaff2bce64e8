"""Text and records as token files, made once in a separate process and kept in the user's cache.

A run opens token files. What makes them, `lm.data.text` and `lm.data.records`, is imported by the
process that makes them only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lm.data.files import TOKENIZING_PACKAGES
from lm.data.token_file import SPLITS, TRAIN, TokenFile
from lm.data.tokenizer.loading import Tokenizer, describe_tokenizer
from lm.data.worker import Call, call_in_worker
from lm.errors import ConfigError
from lm.program import describe_program
from lm.storage.cache import cached, describe_files

_TEXT = "lm.data.text"
_RECORDS = "lm.data.records"
HELD_OUT = 0.05
"""Share of the data that is for validation, unless there are data for it."""


@dataclass(frozen=True)
class TextOptions:
    """What the tokens of documents depend on besides the tokenizer."""

    format: str | None = None
    """of all files; None = by suffix"""
    text_field: str = "text"
    """column or key of the text"""
    validation_fraction: float = 0.0
    train_tokenizer: int | None = None
    """tokens of a tokenizer that is trained on the text"""
    split: str | None = None
    """of a dataset of the Hub, whose name stands for files; None = there are files"""
    hf_config: str | None = None
    """its configuration"""

    @property
    def splits(self) -> Sequence[str]:
        """The names of the token files."""
        return SPLITS if self.validation_fraction > 0 else (TRAIN,)


@dataclass(frozen=True)
class RecordOptions:
    """What the tokens of records depend on besides the tokenizer."""

    fields: Mapping[str, str] | None = None
    """the hyperparameter of this name"""
    completion_only: bool = False
    """only completions and the assistant's messages are learned"""
    pairs: bool = False
    """records are preferences, each with a chosen and a rejected reply"""
    holds_out: bool = False
    """`HELD_OUT` of the records are for validation"""
    split: str | None = None
    """see `TextOptions`"""
    hf_config: str | None = None

    @property
    def splits(self) -> Sequence[str]:
        """The names of the token files."""
        return SPLITS if self.holds_out else (TRAIN,)


def tokenize_text(
    files: Sequence[Path], tokenizer: Tokenizer, *, holds_out: bool = False
) -> list[TokenFile]:
    """Return the tokens of text files, and those that are held out, if any are.

    Files are ordered by a hash of their names, so that the first ones, which are all that a short
    validation reads, are a fair sample.

    Raises:
        ConfigError: files cannot be read.
    """
    options = TextOptions("text", validation_fraction=HELD_OUT if holds_out else 0.0)
    in_order = sorted(files, key=lambda path: sha256(os.fsencode(path.name)).digest())
    return _make(_TEXT, "write_text", in_order, tokenizer, options)


def tokenize_records(
    files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions
) -> list[TokenFile]:
    """Return the tokens of JSON Lines, and those of the records that are held out, if any are.

    Raises:
        ConfigError: an invalid line, or none.
    """
    return _make(_RECORDS, "write_records", files, tokenizer, options)


def describe_making(
    module: str, tokenizer: Tokenizer, options: TextOptions | RecordOptions
) -> dict[str, Any]:
    """Return what the tokens that `module` makes depend on besides the data, as JSON."""
    return {
        "program": describe_program(module, TOKENIZING_PACKAGES),
        "tokenizer": describe_tokenizer(tokenizer),
        "template": {"kwargs": tokenizer.template_kwargs},
        "options": asdict(options),
    }


def _make(
    module: str,
    function: str,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: TextOptions | RecordOptions,
) -> list[TokenFile]:
    """Open the token files that `function` of `module` has written, now or earlier."""
    facts = describe_making(module, tokenizer, options) | {"files": describe_files(files)}

    def write(draft: Path) -> None:
        call_in_worker(Call(module, function, (draft, files, tokenizer, options)))

    directory = cached(facts, write, continues=True)
    return [TokenFile(directory / f"{split}.json") for split in options.splits]


def find_template_text(tokenizer: Tokenizer) -> str | None:
    """Return the chat templates of a tokenizer as one text; None = it has none."""
    try:
        return tokenizer.all_templates.text
    except ConfigError:
        return None


def describe_records(tokenizer: Tokenizer, options: RecordOptions) -> dict[str, str | None]:
    """Return what the index of token files says of how records were read, by hyperparameter."""
    template = find_template_text(tokenizer)
    described: dict[str, str | None] = dict.fromkeys(("fields", "chat_template"))
    if options.fields is not None:
        described["fields"] = json.dumps(dict(options.fields), sort_keys=True)
    if template is not None:
        described["chat_template"] = f"sha256 {sha256(template.encode()).hexdigest()}"
    described["chat_template_kwargs"] = json.dumps(tokenizer.template_kwargs, sort_keys=True)
    described["loss_on"] = "completion" if options.completion_only else "all"
    described["objective"] = "dpo" if options.pairs else "next-token"
    return described
