"""Datasets that say nothing of targets: windows of a token file, and random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, Sample
from lm.data.token_file import TokenFile
from lm.model_config import IGNORE_INDEX
from lm.seeds import derive_seed


def next_token_sample(ids: NDArray[np.int64]) -> Sample:
    """Return the sample of `ids`, (seq_len + 1,): each target is the token after its input."""
    return Sample(inputs=ids[:-1], targets=ids[1:])


@dataclass(frozen=True)
class SyntheticDataset(Dataset):
    """Uniformly random tokens, each sample with its own seed: a model can only memorize samples.

    Args:
        key: parts of the seed, e.g. the run's seed and "training".
    """

    vocab_size: int
    seq_len: int
    n_samples: int
    key: tuple[object, ...]

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng(derive_seed("synthetic", *self.key, index))
        ids = rng.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)
        return next_token_sample(ids)

    def fingerprint(self) -> str:
        return f"synthetic {self.n_samples} x {self.seq_len} of {self.vocab_size}"


@dataclass(frozen=True, eq=False)
class WindowDataset(Dataset):
    """Tokens cut into windows: a window's last target is the next one's first input.

    Args:
        document_ends: the position after the last token of each document, sorted; documents do not
            see each other. None = attention crosses them.
    """

    tokens: NDArray[np.integer[Any]] | TokenFile
    seq_len: int
    document_ends: NDArray[np.int64] | None = None
    has_bytes: bool = True

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self.seq_len
        ids = np.asarray(self.tokens[start : start + self.seq_len + 1], np.int64)
        sample = next_token_sample(ids)
        if self.document_ends is None:
            return sample
        positions = np.arange(start, start + self.seq_len)
        document_ids = np.searchsorted(self.document_ends, positions, side="right")
        # The last token of a document has no target, as what follows is another one.
        ends = self.document_ends[document_ids[0] : document_ids[-1] + 1]
        targets = np.where(np.isin(positions + 1, ends), IGNORE_INDEX, sample.targets)
        return Sample(sample.inputs, targets, document_ids - document_ids[0])

    def count_terms(self, index: int) -> int:
        if self.document_ends is None:
            return self.seq_len
        start = index * self.seq_len
        stop = start + self.seq_len
        first, last = np.searchsorted(self.document_ends, [start, stop], side="right")
        return self.seq_len - int(last - first)

    def fingerprint(self) -> str:
        if isinstance(self.tokens, TokenFile):
            return self.tokens.fingerprint(of_documents=self.document_ends is not None)
        digest = sha256(np.ascontiguousarray(self.tokens).data).hexdigest()
        return f"{len(self.tokens)} tokens, sha256 {digest}"


def cut_file(file: TokenFile, seq_len: int, attend_across_documents: bool) -> WindowDataset:
    """Return the windows of a token file."""
    ends = None if attend_across_documents else file.ends
    return WindowDataset(file, seq_len, ends, file.index.has_bytes)
