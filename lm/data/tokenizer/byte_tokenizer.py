"""The tokenizer of UTF-8 bytes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from lm.errors import ConfigError


class TokenizedText(NamedTuple):
    """The tokens of a text: arrays of shape (tokens,)."""

    ids: NDArray[np.uint32]
    ends: NDArray[np.int64]
    """the number of the first character after each token"""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "bytes"
    vocab_size = 257
    n_model_ids = vocab_size
    eos_id = 256
    stop_ids = frozenset((eos_id,))
    chat_stop_ids = stop_ids
    bos_id: int | None = None
    template_text: str | None = None
    template_kwargs: Mapping[str, Any] = {}
    files: Mapping[str, bytes] = {}

    def count_bytes(self, inputs: NDArray[Any], targets: NDArray[Any]) -> int:  # noqa: ARG002
        """Return the bytes of UTF-8 of `targets`, each the token after its input."""
        return int((targets < 256).sum())

    def tells_bytes(self, *_: Any, **__: Any) -> bool:
        """Return whether `count_bytes` of the ids of a text are its own bytes."""
        return True

    def limit_ids(self, n_ids: int) -> None:
        """Raise ConfigError if the model has not all ids: texts have any byte."""
        if n_ids < self.vocab_size:
            problem = f"has {self.vocab_size} ids, and the model {n_ids} (vocab_size)"
            raise ConfigError(
                f"tokenizer: {self.identity}: {problem}; {advise_size(self.vocab_size)}"
            )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return list(map(self.encode_piece, texts))

    def split(self, blocks: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a text that can be encoded one by one: each of its blocks."""
        yield from blocks

    def encode_piece(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def encode_with_ends(self, text: str, *, with_start: bool) -> TokenizedText:  # noqa: ARG002
        n_bytes = [len(character.encode()) for character in text]
        ends = np.repeat(np.arange(1, len(text) + 1), n_bytes)
        return TokenizedText(self.encode_piece(text), ends)

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Return the text of `ids`; see `stream`."""
        return "".join(self.stream(ids, after))

    def stream(
        self,
        ids: Iterable[int],
        after: Sequence[int] = (),  # noqa: ARG002 - bytes are the same after any others
    ) -> Iterator[str]:
        """Yield text while `ids` arrive, each character once all of its bytes have.

        End-of-text tokens become blank lines, and invalid UTF-8 becomes U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if token < 256:
                yield decoder.decode(bytes([token]))
                continue
            incomplete = decoder.decode(b"", final=True)
            if token == self.eos_id:
                yield incomplete + "\n\n"
            else:
                yield incomplete + "\ufffd"
        yield decoder.decode(b"", final=True)

    def find_template(self, tools: Any = None) -> NoReturn:  # noqa: ARG002 - there is none
        raise self._no_template()

    def render(self, *_: Any, **__: Any) -> NoReturn:
        raise self._no_template()

    def _no_template(self) -> ConfigError:
        problem = f"{self.identity}: has no chat template for messages"
        return ConfigError(f"tokenizer: {problem}; use a Hugging Face tokenizer that has one")


def advise_size(n_ids: int) -> str:
    """Return what to do about a model that has fewer than `n_ids`."""
    resize = "resize_token_embeddings() of a pretrained model with transformers"
    return f"set vocab_size to {n_ids} or more ({resize})"
