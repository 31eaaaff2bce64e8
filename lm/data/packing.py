"""Documents of token files as sequences: packed, or one sample in each.

A sample is a document, or the two of a pair. Packed, a sequence holds several samples, each in one
piece, and attention stays inside each; the rest of a sequence is padding. Samples longer than a
sequence are truncated, those without targets dropped. With `a b c d .` and `e f .`, of which `c`,
`d`, `f` and both ends are learned, a sequence of 8 tokens is

    inputs          a b c d e f 0 0
    targets         - c d . f . - -
    document_ids    0 0 0 0 1 1 2 2
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, Sample
from lm.data.token_file import TokenFile
from lm.errors import ConfigError
from lm.model_config import IGNORE_INDEX
from lm.units import format_count

_MASK_AT_ONCE = 1 << 20
"""tokens whose mask is read, and more if a document is longer"""
_DOCUMENT = np.dtype(
    [
        ("start", np.int64),  # its first token in the token file
        ("n_inputs", np.int64),  # all tokens but the last
        ("length", np.int64),  # of these, what fits into a sequence
        ("n_targets", np.int64),  # in what fits
    ]
)


class PackedDataset(Dataset):
    """Samples of a token file.

    Args:
        packing: False = one sample in a sequence.

    Raises:
        ConfigError: no sample has a target.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, *, packing: bool) -> None:
        documents = _cut_documents(tokens, seq_len)
        samples = documents.reshape(-1, 2 if tokens.index.pairs else 1)
        has_targets = (samples["n_targets"] > 0).all(axis=1)
        if not has_targets.any():
            longest = samples["n_inputs"].sum(axis=1).max()
            problem = f"no sample has a target in max_seq_len {seq_len} (the longest has {longest})"
            raise ConfigError(f"{problem}; raise it, add completions, or set loss_on: all")
        samples = samples[has_targets]
        sequences = np.arange(len(samples))
        if packing:
            sequences = pack_best_fit(samples["length"].sum(axis=1), seq_len)
        self.tokens = tokens
        self.seq_len = seq_len
        self.has_bytes = tokens.index.has_bytes
        self._order = _order_samples(samples, sequences)
        self._has_documents = packing
        if tokens.index.pairs:
            self._has_documents = True
            self.has_bytes = False  # of a preference
            self.n_replies = samples.size
        n_dropped = int((~has_targets).sum())
        self.note = "; ".join(_describe(samples, len(self), n_dropped, seq_len))
        size = f"{len(samples)} samples in {len(self)} sequences of {seq_len}"
        self._fingerprint = f"{size}: {tokens.fingerprint(of_documents=True)}"

    def __len__(self) -> int:
        return len(self._order.term_counts)

    def __getitem__(self, index: int) -> Sample:
        order = self._order
        first, last = order.first_documents[index : index + 2].tolist()
        inputs = np.zeros(self.seq_len, np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        document_ids = np.full(self.seq_len, last - first)  # padding is one more document
        position = 0
        for number in range(first, last):
            start = int(order.starts[number])
            length = int(order.lengths[number])
            ids = self.tokens[start : start + length + 1]
            is_target = self.tokens.is_target(start + 1, start + length + 1)
            here = slice(position, position + length)
            inputs[here] = ids[:-1]
            targets[here] = np.where(is_target, ids[1:], IGNORE_INDEX)
            document_ids[here] = number - first
            position += length
        if not self._has_documents:
            return Sample(inputs, targets)
        if self.n_replies == 0:
            return Sample(inputs, targets, document_ids)
        return Sample(inputs, targets, document_ids, self.first_reply + np.arange(first, last))

    def count_terms(self, index: int) -> int:
        return int(self._order.term_counts[index])

    def fingerprint(self) -> str:
        return self._fingerprint


@dataclass(frozen=True)
class _Order:
    """The documents of all sequences, one after the other."""

    starts: NDArray[np.int64]
    """of each document: its first token in the token file"""
    lengths: NDArray[np.int64]
    """of each document: its inputs"""
    first_documents: NDArray[np.int64]
    """of each sequence: its first document; and at the end the number of documents"""
    term_counts: NDArray[np.int64]
    """of each sequence: its targets, or pairs"""


def _cut_documents(tokens: TokenFile, seq_len: int) -> NDArray[Any]:
    """Return a `_DOCUMENT` for each document of a token file, cut to a sequence.

    Those of a pair fit into a sequence together, and are cut at the same length, so that none is
    preferred for it.
    """
    ends = tokens.ends
    documents = np.zeros(len(ends), _DOCUMENT)
    documents["start"][1:] = ends[:-1]
    n_inputs = np.maximum(ends - documents["start"] - 1, 0)
    limits = np.full(len(ends), seq_len)
    if tokens.index.pairs:
        shorter = n_inputs.reshape(-1, 2).min(axis=1)
        limits = np.repeat(np.maximum(seq_len // 2, seq_len - shorter), 2)
    documents["n_inputs"] = n_inputs
    documents["length"] = np.minimum(n_inputs, limits)
    first = 0
    while first < len(ends):
        start = documents["start"][first]
        last = max(first + 1, int(np.searchsorted(ends, start + _MASK_AT_ONCE, side="right")))
        _count_targets(documents[first:last], tokens, int(start), int(ends[last - 1]))
        first = last
    return documents


def _count_targets(documents: NDArray[Any], tokens: TokenFile, start: int, stop: int) -> None:
    """Count the targets of consecutive documents, the tokens from `start` to `stop`."""
    targets = start + np.flatnonzero(tokens.is_target(start, stop))  # their positions, sorted
    second = documents["start"] + 1  # the first has no token before it to be predicted from
    first_target = np.searchsorted(targets, second)
    after_last = np.searchsorted(targets, second + documents["length"])
    documents["n_targets"] = after_last - first_target


def _order_samples(samples: NDArray[Any], sequences: NDArray[np.int64]) -> _Order:
    """Return the documents of `samples`, `_DOCUMENT` of shape (samples, 1 or 2), by sequence."""
    order = np.argsort(sequences, kind="stable")
    is_first = np.diff(sequences[order], prepend=-1) > 0
    first_samples = np.flatnonzero(is_first)
    samples = samples[order]
    n_samples, n_documents = samples.shape
    n_terms = samples["n_targets"].sum(axis=1)
    if n_documents == 2:
        n_terms = np.ones(n_samples, np.int64)  # a pair
    return _Order(
        starts=samples["start"].ravel(),
        lengths=samples["length"].ravel(),
        first_documents=n_documents * np.append(first_samples, n_samples),
        term_counts=np.add.reduceat(n_terms, first_samples),
    )


def _describe(samples: NDArray[Any], n_sequences: int, n_dropped: int, seq_len: int) -> list[str]:
    """Return what is said of `samples`, `_DOCUMENT` of shape (samples, 1 or 2)."""
    lengths = samples["length"].sum(axis=1)
    full_lengths = samples["n_inputs"].sum(axis=1)
    n_tokens = lengths.sum()
    padding = 1 - n_tokens / (n_sequences * seq_len)
    counted = format_count(len(samples), "sample" if samples.shape[1] == 1 else "pair")
    sequences = format_count(n_sequences, "sequence")
    notes = [f"{counted} in {sequences}, {100 * padding:.1f} % padding"]
    n_truncated = (full_lengths > lengths).sum()
    if n_truncated > 0:
        lost = 1 - n_tokens / full_lengths.sum()
        truncated = f"{n_truncated:,} truncated to max_seq_len {seq_len}"
        notes.append(f"{truncated}, {100 * lost:.1f} % of the tokens dropped")
    if n_dropped > 0:
        notes.append(f"{n_dropped:,} more dropped, without targets within max_seq_len {seq_len}")
    return notes


def pack_best_fit(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return the sequence of each sample, by the best-fit decreasing algorithm of bin packing.

    The longest samples are placed first, each into the sequence with the least space left in which
    it fits, or into a new one. A sequence is numbered by the first of its samples in the order of
    the files, so that sequences keep this order.

    Args:
        lengths: tokens of each sample, from 1 to `seq_len`.
    """
    sequences = np.empty(len(lengths), np.int64)  # of each sample, numbered by the longest in it
    # The sequences with so much space left.
    by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces: list[int] = []  # those of which there is a sequence, sorted
    longest_first = np.argsort(-lengths, kind="stable")
    for sample, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        least = bisect_left(spaces, length)
        if least < len(spaces):
            space = spaces[least]
            sequence = by_space[space].pop()
            if not by_space[space]:
                del spaces[least]
        else:
            space = seq_len
            sequence = sample
        sequences[sample] = sequence
        space_left = space - length
        if not by_space[space_left]:
            insort(spaces, space_left)
        by_space[space_left].append(sequence)
    _, first_samples, numbers = np.unique(sequences, return_index=True, return_inverse=True)
    return first_samples[numbers]
