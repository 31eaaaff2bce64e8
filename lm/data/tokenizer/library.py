"""The `tokenizers` library."""

from __future__ import annotations

import codecs
import contextlib
import copy
import functools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm.data.signatures import ENCODINGS
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.errors import ConfigError, error_text

if TYPE_CHECKING:
    from tokenizers import AddedToken


class Library:
    """The library's tokenizer of a `tokenizer.json`, whose errors are those of a configuration.

    Args:
        content: of the `tokenizer.json`.
        name: of the tokenizer in errors.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self._name = name
        self.encoder: Any = self._parse(content)

    def error(self, problem: str) -> ConfigError:
        """Return the error that this tokenizer has a problem."""
        return ConfigError(f"tokenizer: {self._name}: {problem}")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise ConfigError where the library raises, or panics in Rust."""
        try:
            yield
        except BaseException as error:  # the library raises nothing narrower than Exception
            is_panic = type(error).__name__ == "PanicException"  # which is no Exception
            if not isinstance(error, Exception) and not is_panic:
                raise
            problem = f"fails in the tokenizers library: {error_text(error)}"
            raise self.error(f"{problem}; use another tokenizer") from None

    def _parse(self, content: bytes) -> Any:
        """Return the library's tokenizer; where it can read none, maybe the content is not JSON."""
        try:
            with self.errors():
                return _parse_tokenizer(content)
        except ConfigError:
            problem = _describe_no_json(content)
            if problem is None:
                raise
            remedy = "download the file again, or write it as JSON in UTF-8 without a mark"
            raise self.error(f"{TOKENIZER_JSON}: {problem}; {remedy}") from None

    def prefix_spaces(self) -> set[bool]:
        """Return `add_prefix_space` of the pre-tokenizers by bytes: whether texts get a space."""
        if self.encoder.pre_tokenizer is None:
            return set()
        state = json.loads(self.encoder.pre_tokenizer.__getstate__())
        steps = state.get("pretokenizers", [state])
        return {step["add_prefix_space"] for step in steps if step["type"] == "ByteLevel"}

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        """Add tokens to this tokenizer, and to no other that was parsed from the same content."""
        self.encoder = copy.deepcopy(self.encoder)
        self.encoder.add_tokens(tokens)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any that the tokenizer adds."""
        with self.errors():
            (encoding,) = self.encoder.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with self.errors():
            return self.encoder.decode(ids)


def _describe_no_json(content: bytes) -> str | None:
    """Return why `content` is not JSON in UTF-8; None = it is."""
    marks = {codecs.BOM_UTF8: "UTF-8", **ENCODINGS}
    for mark, encoding in marks.items():
        if content.startswith(mark):
            return f"starts with the byte-order mark of {encoding}"
    try:
        json.loads(content)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except ValueError as error:
        return f"not valid JSON: {error}"
    except RecursionError:
        return None
    return None


@functools.lru_cache(maxsize=2)
def _parse_tokenizer(content: bytes) -> Any:
    """Parse a `tokenizer.json` once: a run needs its vocabulary before it opens the data."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_buffer(content)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
