"""Text and records as token files, made once in a separate process and kept in the user's cache.

A run opens token files. What makes them, `lm.data.text` and `lm.data.records`, is imported by the
process that makes them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from lm.data.files import TOKENIZING_PACKAGES
from lm.data.token_file import SPLITS, TRAIN, TokenFile, open_token_files
from lm.data.tokenizer.loading import Tokenizer
from lm.data.worker import call_in_worker
from lm.errors import RunError
from lm.program import describe_program
from lm.storage.cache import cached, describe_files, file_states

HELD_OUT = 0.05
"""Share of the data that is for validation, unless there are data for it."""


@dataclass(frozen=True)
class TextOptions:
    """What the tokens of documents depend on besides the tokenizer."""

    maker = "lm.data.text"
    """module whose `write` makes them"""
    has_mask = False
    """whether they say which tokens are learned; else all are"""
    of_pairs = False
    """whether documents are the replies of pairs"""
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

    maker = "lm.data.records"
    """see `TextOptions`"""
    has_mask = True
    format = "jsonl"
    fields: Mapping[str, str] | None = None
    """the hyperparameters of these names"""
    loss_on: Literal["all", "completion"] = "all"
    objective: Literal["next-token", "dpo"] = "next-token"
    holds_out: bool = False
    """`HELD_OUT` of the records are for validation"""
    split: str | None = None
    """see `TextOptions`"""
    hf_config: str | None = None

    @property
    def splits(self) -> Sequence[str]:
        """The names of the token files."""
        return SPLITS if self.holds_out else (TRAIN,)

    @property
    def of_pairs(self) -> bool:
        """Whether records are preferences, each with a chosen and a rejected reply."""
        return self.objective == "dpo"


Options = TextOptions | RecordOptions


def tokenize(files: Sequence[Path], tokenizer: Tokenizer, options: Options) -> list[TokenFile]:
    """Return the tokens of `files`, made now or earlier, and those that are held out, if any are.

    Raises:
        ConfigError: files cannot be read, or have an invalid line, or no text.
    """
    states = file_states(files)
    facts = describe_making(tokenizer, options) | {"input": describe_files(files)}

    def write(draft: Path) -> None:
        call_in_worker(options.maker, "write", draft, files, tokenizer, options)
        require_unchanged(states)

    directory = cached(facts, write, continued_if={"files": states})
    return open_token_files(directory, options.splits, tokenizer.n_model_ids)


def require_unchanged(states: Mapping[str, list[int]]) -> None:
    """Raise RunError if a file was written since its state was one of the `file_states`."""
    after = file_states([Path(path) for path in states])
    for path, state in states.items():
        if after.get(path) != state:
            raise RunError(f"{path}: changed while it was read; run the command again")


def describe_making(tokenizer: Tokenizer | None, options: Options) -> dict[str, Any]:
    """Return what tokens depend on besides the data, as JSON, by hyperparameter if there is one."""
    described = {"program": describe_program(options.maker, TOKENIZING_PACKAGES), **asdict(options)}
    if tokenizer is not None:
        described |= describe_tokenizer(tokenizer)
    return described


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokens and chats depend on of a tokenizer, as JSON."""
    template = tokenizer.template_text
    if template is not None:
        template = f"sha256 {sha256(template.encode()).hexdigest()}"
    files = {name: sha256(content).hexdigest() for name, content in tokenizer.files.items()}
    return {
        "tokenizer": tokenizer.identity,
        "tokenizer_files": files,
        "chat_template": template,
        "chat_template_kwargs": dict(tokenizer.template_kwargs),
    }
