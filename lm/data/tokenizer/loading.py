"""Tokenizers by their names, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.chat_template import read_chat_template
from lm.data.hub import download_from_hub
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT, FileTokenizer
from lm.data.tokenizer.files import (
    MODEL_CONFIG,
    SOURCE_FILES,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    read_class_settings,
    read_tokenizer_file,
    read_tokenizer_files,
)
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import home_path

Tokenizer = ByteTokenizer | FileTokenizer


@oserror_as_config_error
def load_tokenizer(name: str, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "bytes", a `tokenizer.json`, a directory with one, or a Hugging Face Hub name.
        chat_template: replaces its chat template; see `read_chat_template`.
    """
    template = None
    if chat_template is not None:
        template = read_chat_template(chat_template)
    if name == "bytes":
        if template is not None:
            problem = f"{chat_template}: requires a Hugging Face tokenizer, not bytes"
            raise ConfigError(f"chat_template: {problem}; set tokenizer")
        return ByteTokenizer()
    path = home_path(name)
    if path.is_file() and path.name != TOKENIZER_JSON:
        content = read_tokenizer_file(path.resolve(), TOKENIZER_JSON)
        return FileTokenizer({TOKENIZER_JSON: content}, name, template)
    if path.is_file():
        directory = path.parent
    elif path.exists():
        directory = path
    else:
        directory = download_from_hub(name, (*SOURCE_FILES, MODEL_CONFIG), "tokenizer")
    files = read_tokenizer_files(directory)
    if TOKENIZER_JSON not in files:
        raise ConfigError(f"tokenizer: {name}: has no {TOKENIZER_JSON}")
    return FileTokenizer(files, name, template, read_class_settings(directory))


@oserror_as_config_error
def load_saved_tokenizer(
    identity: str, directory: Path, names: Collection[str], hyperparameters: Mapping[str, Any]
) -> Tokenizer:
    """Load the tokenizer `identity` of the checkpoint in `directory`, for chats as in its run.

    Args:
        names: the files that the checkpoint lists.
    """
    if identity == ByteTokenizer.identity:
        return ByteTokenizer()
    if TOKENIZER_JSON not in names:
        raise ConfigError(f"tokenizer: {directory}: the checkpoint lists no {TOKENIZER_JSON}")
    listed = [name for name in TOKENIZER_FILES if name in names]
    files = {name: read_tokenizer_file(directory / name, name) for name in listed}
    tokenizer = FileTokenizer(files, str(directory))
    if tokenizer.identity != identity:
        problem = f"has {tokenizer.identity}, the checkpoint was written with {identity}"
        remedy = "restore its files, or install the version of tokenizers that the run had"
        raise ConfigError(f"tokenizer: {directory}: {TOKENIZER_JSON} {problem}; {remedy}")
    try:
        tokenizer.template_kwargs = dict(hyperparameters.get("chat_template_kwargs") or {})
    except (ValueError, TypeError) as error:
        problem = f"chat_template_kwargs of the checkpoint: {error}"
        raise ConfigError(f"tokenizer: {directory}: {problem}") from None
    return tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE tokenizer like GPT-2's, and return its `tokenizer.json`.

    It has at most `vocab_size` tokens.
    """
    from tokenizers import ByteLevelBPETokenizer

    encoder = ByteLevelBPETokenizer()
    encoder.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return encoder.to_str().encode()


def end_text(ids: NDArray[np.uint32], eos_id: int) -> NDArray[np.uint32]:
    """Return `ids` with an end of text, which a text may have itself."""
    if len(ids) > 0 and ids[-1] == eos_id:
        return ids
    return np.append(ids, np.uint32(eos_id))
