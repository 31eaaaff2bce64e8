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
    MORE_TEMPLATES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)
from lm.errors import ConfigError, error_text

_READ = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE)
"""files that decide what a tokenizer does"""
_MODEL_SETTINGS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


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
        read: dict[str, bytes] = {}
        for each, content in files.items():
            if each in _READ or each.startswith(MORE_TEMPLATES):
                read[each] = content
                self._check_utf8(each, content)
        content = files[TOKENIZER_JSON]
        try:
            with self.errors():
                in_file = _parse(content)
        except ConfigError:
            self._check_json(content)
            raise
        with self.errors():
            tokenizer = _load(tuple(read.items()), tuple(class_settings.items()))
        self.tokenizer = tokenizer
        """of transformers; it is shared, and must not be changed"""
        self.encoder = tokenizer.backend_tokenizer
        """the one of the `tokenizers` library inside of it, which threads can use together"""
        self.differences = _find_differences(self.encoder, in_file)
        """what it encodes otherwise than its tokenizer.json alone, as JSON; empty = nothing"""

    def _check_utf8(self, name: str, content: bytes) -> None:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{name}: byte {error.start} is not UTF-8") from None

    def _check_json(self, content: bytes) -> None:
        try:
            json.loads(content.decode())
        except ValueError as error:
            problem = f"{TOKENIZER_JSON}: not valid JSON: {error}"
            raise self.error(f"{problem}; download the file again") from None
        except RecursionError:
            pass

    def error(self, problem: str) -> ConfigError:
        """Return the error that this tokenizer has a problem."""
        return ConfigError(f"tokenizer: {self._name}: {problem}")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise ConfigError where a library raises, or panics in Rust."""
        try:
            yield
        except BaseException as error:  # they raise nothing narrower than Exception
            is_panic = type(error).__name__ == "PanicException"  # which is no Exception
            if not isinstance(error, Exception) and not is_panic:
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
def _parse(content: bytes) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content)


@functools.lru_cache(maxsize=2)
def _load(files: tuple[tuple[str, bytes], ...], class_settings: tuple[tuple[str, str], ...]) -> Any:
    """Load a tokenizer once: a run needs its vocabulary before it opens the data.

    It is loaded from a directory of these files alone, without code and pickles.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        for name, content in files:
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if class_settings:
            Path(directory, MODEL_CONFIG).write_text(json.dumps(dict(class_settings)))
        tokenizer: Any = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, mistral_format=False
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _find_differences(encoder: Any, in_file: Any) -> bytes:
    """Return what `encoder` has that the tokenizer of a `tokenizer.json` has not, as JSON."""
    differences = b""
    settings = _settings(encoder)
    if settings != _settings(in_file):
        differences += json.dumps(settings).encode()
    known = {repr(token) for token in in_file.get_added_tokens_decoder().values()}
    added = sorted(encoder.get_added_tokens_decoder().items())
    new = [token.__getstate__() for _, token in added if repr(token) not in known]
    if new:
        differences += json.dumps(new).encode()
    return differences


def _settings(encoder: Any) -> list[Any]:
    """Return what decides the ids of a text besides the vocabulary, as JSON."""
    settings: list[Any] = []
    for name in _MODEL_SETTINGS:
        value = getattr(encoder.model, name, None)
        settings.append(value or None)  # an affix of "" is none
    for step in (encoder.normalizer, encoder.pre_tokenizer, encoder.post_processor):
        state = None if step is None else json.loads(step.__getstate__())
        settings.append(state)
    return settings
