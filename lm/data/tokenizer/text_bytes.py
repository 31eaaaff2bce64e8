"""How many bytes of text ids are."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer.library import Library


class TextBytes:
    """The bytes of UTF-8 that the ids of a tokenizer add to a text.

    Args:
        n_ids: of the tokenizer.
        special: the tokens that are no text, by id.
    """

    def __init__(self, library: Library, n_ids: int, special: Mapping[int, str]) -> None:
        self._library = library
        self._n_ids = n_ids
        self._special = special

    @functools.cached_property
    def _after_text(self) -> NDArray[np.int64]:
        """Bytes of UTF-8 that each id adds to a text, (vocab_size,); 0 for special tokens."""
        return self._measure_ids(self._library.encode("a"))

    @functools.cached_property
    def _at_start(self) -> NDArray[np.int64]:
        """`_after_text` at the start of a text, before which some tokenizers put a space."""
        return self._measure_ids([])

    def _measure_ids(self, before: list[int]) -> NDArray[np.int64]:
        """Return the bytes that each id adds after the ids `before`."""
        n_bytes_before = len(self._library.decode(before).encode())
        with self._library.errors():
            texts = self._library.encoder.decode_batch([[*before, i] for i in range(self._n_ids)])
        n_bytes = [len(text.encode()) for text in texts]
        sizes = np.array(n_bytes) - n_bytes_before
        for i, text in enumerate(texts):
            if "\ufffd" not in text:
                continue
            token = str(self._library.encoder.id_to_token(i))
            if token.startswith("<0x"):  # one byte of a character, such as <0xE2>
                sizes[i] = 1
            elif "\ufffd" not in token:  # bytes of a character, each written as another one
                sizes[i] = len(token)
        sizes[self._is_special] = 0
        return sizes

    @functools.cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        """Whether each id is no text, (vocab_size,)."""
        is_special = np.zeros(self._n_ids, np.bool_)
        is_special[list(self._special)] = True
        return is_special

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        longest_first = sorted(self._special.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def count(self, inputs: NDArray[Any], targets: NDArray[Any]) -> int:
        """Return the bytes of UTF-8 of `targets`, each the token after its input.

        A text starts after a special token.
        """
        is_first = self._is_special[inputs]
        sizes = np.where(is_first, self._at_start[targets], self._after_text[targets])
        return int(sizes.sum())

    def tells(self, text: str, ids: NDArray[Any], *, is_start: bool = True) -> bool:
        """Return whether `count` of the ids of `text` are its own bytes.

        They are not where the tokenizer replaces characters, e.g. by their normal form.

        Args:
            is_start: False = of a piece that is not the first of its text.
        """
        without_special = self._special_text.sub("", text)
        counted = self.count(ids[:-1], ids[1:])
        first = ids[:1]  # none of an empty text
        of_first = self._at_start if is_start else self._after_text
        counted += int(of_first[first].sum())
        return counted == len(without_special.encode())
