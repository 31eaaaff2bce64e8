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

import numpy as np

from lm.data.files import TOKENIZING_PACKAGES
from lm.data.token_file import TRAIN, VALIDATION, TokenFile
from lm.data.tokenizer.loading import Tokenizer, describe_tokenizer
from lm.data.worker import Call, call_in_worker
from lm.errors import ConfigError
from lm.program import describe_program
from lm.storage.cache import cached, describe_files, remembered

_TEXT = "lm.data.text"
_RECORDS = "lm.data.records"
_HOLD_OUT_EVERY = 20
"""One of so many lines is for validation, unless there is a file for it."""
_HASHED_TOGETHER = 1 << 18
"""tokens"""


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
    """every 20th line is for validation"""

    @property
    def splits(self) -> Sequence[str]:
        """The names of the token files."""
        if self.holds_out:
            return (TRAIN, VALIDATION)
        return (TRAIN,)

    def is_held_out(self, number: int) -> bool:
        """Return whether the line `number` is for validation."""
        return self.holds_out and number % _HOLD_OUT_EVERY == 0


def tokenize_text(
    files: Sequence[Path], tokenizer: Tokenizer, *, with_ends: bool = True
) -> TokenFile:
    """Return the tokens of text files, with an end-of-text token after each file.

    Files are ordered by a hash of their names, so that a cut anywhere leaves a fair sample on both
    sides.

    Args:
        with_ends: open where the files end in the tokens, too.

    Raises:
        ConfigError: files cannot be read.
    """
    directory = _make(_TEXT, "write_text", in_order(files), tokenizer)
    return TokenFile(directory / f"{TRAIN}.json", with_ends=with_ends, remedy=_remedy(directory))


def tokenize_records(
    files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions
) -> list[TokenFile]:
    """Return the tokens of JSON Lines, and those of the records that are held out, if any are.

    Raises:
        ConfigError: invalid lines (the first of each file), or none.
    """
    facts = {"template": {"kwargs": tokenizer.template_kwargs}, "options": asdict(options)}
    directory = _make(_RECORDS, "write_records", files, tokenizer, options, **facts)
    remedy = _remedy(directory)
    return [TokenFile(directory / f"{split}.json", remedy=remedy) for split in options.splits]


def _make(
    module: str,
    function: str,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *arguments: object,
    **facts: object,
) -> Path:
    """Return a directory that `function` of `module` has written, now or earlier.

    Args:
        arguments: of `function` after the directory, the files and the tokenizer.
        facts: what the tokens depend on besides the files and the tokenizer.
    """
    identity = {
        "program": describe_program(module, TOKENIZING_PACKAGES),
        "files": describe_files(files),
        "tokenizer": describe_tokenizer(tokenizer),
        **facts,
    }

    def write(draft: Path) -> None:
        call_in_worker(Call(module, function, (draft, files, tokenizer, *arguments)))

    return cached(identity, write)


def _remedy(directory: Path) -> str:
    return f"delete {directory}: it is written again"


def in_order(files: Sequence[Path]) -> list[Path]:
    """Return text files in the order in which they are read, that of a hash of their names."""
    return sorted(files, key=lambda path: sha256(os.fsencode(path.name)).digest())


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
        described["fields"] = json.dumps(dict(options.fields))
    if template is not None:
        described["chat_template"] = f"sha256 {sha256(template.encode()).hexdigest()}"
    described["chat_template_kwargs"] = json.dumps(tokenizer.template_kwargs)
    described["loss_on"] = "completion" if options.completion_only else "all"
    described["objective"] = "dpo" if options.pairs else "next-token"
    return described


def hash_tokens(text: TokenFile, start: int, stop: int) -> str:
    """Return the SHA-256 of some of the tokens, as uint32, which is computed once."""
    facts = (text.path.parent.name, start, stop)
    return remembered(facts, lambda: _hash_tokens(text, start, stop))


def _hash_tokens(text: TokenFile, start: int, stop: int) -> str:
    digest = sha256()
    for first in range(start, stop, _HASHED_TOGETHER):
        ids = text[first : min(first + _HASHED_TOGETHER, stop)]
        digest.update(ids.astype(np.uint32).data)
    return digest.hexdigest()
