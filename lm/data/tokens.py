"""Sources whose samples are token ids already.

A source is a sequence of samples: `len(source)`, and `source[i]`, an int64 array of `seq_len + 1` ids, of
which the first `seq_len` are inputs and the last `seq_len` their targets. It is the same on every rank and
has no position: which samples make up a batch is the loader's business.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lm import seeds


class SyntheticTokens:
    """Uniformly random tokens, each sample drawn from its own seed: nothing to learn but the samples themselves.

    Args:
        samples: how many different samples there are.
        key: what sets this source apart from others, e.g. the run's seed and "training".
    """

    def __init__(self, vocab_size: int, seq_len: int, samples: int, key: tuple[object, ...]) -> None:
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._samples = samples
        self._key = key

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        random = np.random.default_rng(seeds.derive("synthetic", *self._key, index))
        return random.integers(0, self._vocab_size, self._seq_len + 1, dtype=np.int64)

    def fingerprint(self) -> str:
        return f"synthetic {self._samples} x {self._seq_len} of {self._vocab_size}"


class TokenWindows:
    """A long row of tokens cut into windows of `seq_len`; a window's last target is the next one's first input."""

    def __init__(self, tokens: NDArray[np.integer], seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        start = index * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int64)

    def fingerprint(self) -> str:
        return f"{len(self._tokens)} tokens, sha256 {hashlib.sha256(self._tokens.tobytes()).hexdigest()}"
