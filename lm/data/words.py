"""Byte-level BPE at several times the library's speed, id for id the same.

A text is cut into words by a regular expression, and a word always has the same tokens. The library cuts with
Unicode's classes of characters, keeps where every byte came from, and makes an object of every token; where text
is ASCII, the standard library's `re` cuts the same words, and a dictionary knows what most of them become.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Encoder

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` cuts by if it is not told otherwise."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_KNOWN = {GPT2, _LLAMA3, _QWEN2}
"""Expressions under which every character is in a word, and a line's end between two printed characters ends one."""

_ALPHABET = {byte: 256 + byte for byte in range(33)} | {127: 289}
"""How byte-level BPE writes those ASCII bytes that it does not write as they are."""

_LINES = re.compile(r"(?<=[!-~]\n)(?=[!-~])")
_CACHED, _LONGEST = 1_000_000, 64
"""Words that are remembered, and how long they may be: what is longer (characters) hardly comes again."""


class Words(dict[str, list[int]]):
    """The tokens of ASCII words, looked up once each.

    Args:
        encoder: a tokenizer for which `word_pattern` knows the expression.
        pattern: that expression.
    """

    def __init__(self, encoder: Encoder, pattern: str) -> None:
        super().__init__()
        self._model = encoder.model
        self._encoder = encoder
        self._split = re.compile(_in_ascii(pattern), re.ASCII).findall
        special = [token.content for token in encoder.get_added_tokens_decoder().values()]
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def __missing__(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.translate(_ALPHABET))]
        if len(word) <= _LONGEST:
            if len(self) >= _CACHED:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> NDArray[np.uint32]:
        """The ids of `text`, without what a tokenizer adds at its beginning or end."""
        if self._special and self._special.search(text):
            return self._by_library(text)
        if text.isascii():
            return self._of_ascii(text)
        lines = itertools.groupby(_LINES.split(text), str.isascii)
        return np.concatenate(
            [self._of_ascii("".join(run)) if ascii_ else self._by_library("".join(run)) for ascii_, run in lines]
        )

    def _of_ascii(self, text: str) -> NDArray[np.uint32]:
        return np.fromiter(itertools.chain.from_iterable(map(self.__getitem__, self._split(text))), np.uint32)

    def _by_library(self, text: str) -> NDArray[np.uint32]:
        (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)


def word_pattern(tokenizer: Mapping[str, Any]) -> str | None:
    """The expression by which the tokenizer of a tokenizer.json finds words.

    None if it is none of those that are known to cut ASCII as `Words` does, or words have no fixed tokens.
    """
    normalizer, model = tokenizer.get("normalizer"), tokenizer["model"]
    if model["type"] != "BPE" or model.get("dropout") or (normalizer and normalizer["type"] != "NFC"):
        return None  # NFC leaves ASCII as it is
    match tokenizer.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _KNOWN:
            return pattern
    return None


def _in_ascii(pattern: str) -> str:
    """`pattern` with the ASCII members of Unicode's classes, inside of brackets and out of them."""
    inside = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9"), pattern)
    return inside.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")
