"""A tokenizer of transformers, entered by `AutoTokenizer`, and the Rust tokenizer inside of it."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.data.tokenizer.files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    MODEL_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)
from lm.errors import ConfigError, error_text, is_panic

_READ = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE)
"""files that decide what a tokenizer does"""


class Library:
    """A tokenizer as transformers loads it, whose errors are those of a configuration.

    Args:
        files: contents by name.
        name: of the tokenizer in errors.
        class_settings: those of the model's config.json that decide its class.
    """

    def __init__(
        self, files: Mapping[str, bytes], name: str, class_settings: Mapping[str, str]
    ) -> None:
        self._name = name
        read = [(each, content) for each, content in files.items() if each in _READ]
        with self.errors():
            tokenizer = _load(tuple(read), tuple(class_settings.items()))
        self.tokenizer = tokenizer
        """of transformers; it is shared, and must not be changed"""
        self.encoder = tokenizer.backend_tokenizer
        """the one of the `tokenizers` library inside of it, which threads can use together"""

    def error(self, problem: str) -> ConfigError:
        """Return the error that this tokenizer has a problem."""
        return ConfigError(f"tokenizer: {self._name}: {problem}")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise ConfigError where a library raises, or panics in Rust."""
        try:
            yield
        except BaseException as error:  # they raise nothing narrower than Exception
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            problem = f"transformers cannot use it: {error_text(error)}"
            raise self.error(f"{problem}; correct its files, or use another") from None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any that the tokenizer adds."""
        with self.errors():
            (encoding,) = self.encoder.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with self.errors():
            return self.encoder.decode(ids)


@functools.lru_cache(maxsize=2)
def _load(files: tuple[tuple[str, bytes], ...], class_settings: tuple[tuple[str, str], ...]) -> Any:
    """Load a tokenizer once: a run needs its vocabulary before it opens the data.

    It is loaded from a directory of these files alone, without code and pickles.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        for name, content in files:
            Path(directory, name).write_bytes(content)
        if class_settings:
            Path(directory, MODEL_CONFIG).write_text(json.dumps(dict(class_settings)))
        tokenizer: Any = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, mistral_format=False
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
