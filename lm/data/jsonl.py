"""JSON Lines for fine-tuning, packed into sequences or one sample per sequence.

A line, or an element of a file that is one JSON array, is an object whose keys are those of
`lm.data.record_fields`, or named by `fields`. The chat template renders messages and the record's
`tools`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, Sample
from lm.data.files import TOKENIZING_PACKAGES, name_files
from lm.data.records import (
    RecordOptions,
    TokenizedPiece,
    TokenizedSample,
    check_first_lines,
    tokenize_files,
)
from lm.data.rendering import describe_notes, describe_template
from lm.data.tokenizer.loading import Tokenizer, describe_tokenizer
from lm.errors import ConfigError
from lm.model_config import IGNORE_INDEX
from lm.program import describe_program
from lm.storage.cache import cached, describe_files
from lm.units import format_count


class JsonlDataset(Dataset):
    """Samples of JSON Lines files.

    Packed, a sequence holds several samples, each in one piece, and attention stays inside each;
    otherwise one sample. The rest of a sequence is padding. Samples longer than a sequence are
    truncated, those without targets dropped.

    Args:
        fields: what the keys of records hold; None = they are known by their names.
        held_out: True = only every 20th line, for validation; False = only the others; None = all.
        pairs: a sample is a pair of preferences: two documents, each a prompt with a reply, the
            chosen one first.

    Raises:
        ConfigError: invalid lines (the first of each file), or no targets at all.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        seq_len: int,
        fields: Mapping[str, str] | None = None,
        completion_only: bool = False,
        packing: bool = True,
        held_out: bool | None = None,
        pairs: bool = False,
    ) -> None:
        options = RecordOptions(seq_len, fields, completion_only or pairs, held_out, pairs)
        facts = {
            "program": describe_program(__name__, TOKENIZING_PACKAGES),
            "kind": "jsonl",
            "files": describe_files(files),
            "tokenizer": describe_tokenizer(tokenizer),
            "template": describe_template(tokenizer),
            "options": asdict(options),
            "packing": packing,
        }
        directory = cached(facts, lambda draft: _write(draft, files, tokenizer, options, packing))
        self.seq_len = seq_len
        self._has_documents = packing or pairs
        self._inputs = _open(directory, "inputs")
        self._targets = _open(directory, "targets")
        self._document_starts = _open(directory, "document_starts")
        self._sequence_starts = _open(directory, "sequence_starts")
        self._term_counts = _open(directory, "term_counts")
        described = json.loads((directory / _DESCRIPTION).read_text())
        self.note = described["note"]
        self.has_bytes = described["has_bytes"]
        if pairs:
            self.n_replies = len(self._document_starts) - 1
            self.has_bytes = False  # of a preference
        self._fingerprint = described["fingerprint"]

    def __len__(self) -> int:
        return len(self._sequence_starts) - 1

    def __getitem__(self, index: int) -> Sample:
        start = self._sequence_starts[index]
        stop = self._sequence_starts[index + 1]
        n_tokens = stop - start
        inputs = np.zeros(self.seq_len, np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        inputs[:n_tokens] = self._inputs[start:stop]
        targets[:n_tokens] = self._targets[start:stop]
        if not self._has_documents:
            return Sample(inputs, targets)
        # Positions at or after `stop` are padding, which is one more document.
        positions = np.minimum(np.arange(start, start + self.seq_len), stop)
        documents = np.searchsorted(self._document_starts, positions, side="right")
        sample = Sample(inputs, targets, documents - documents[0])
        if self.n_replies == 0:
            return sample
        first = documents[0] - 1
        last = np.searchsorted(self._document_starts, stop) - 1
        return sample._replace(replies=self.first_reply + np.arange(first, last + 1))

    def count_terms(self, index: int) -> int:
        return int(self._term_counts[index])

    def fingerprint(self) -> str:
        return self._fingerprint


# ---- the arrays of a dataset, written once


_DESCRIPTION = "description.json"
"""the note, the fingerprint, and whether the tokens tell their bytes"""


def _open(directory: Path, name: str) -> NDArray[Any]:
    return np.load(directory / f"{name}.npy", mmap_mode="r")


def _write(
    directory: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: RecordOptions,
    packing: bool,
) -> None:
    """Tokenize the lines of all files, and write the arrays of their dataset."""
    check_first_lines(files, tokenizer, options)
    with (
        tempfile.TemporaryFile(dir=directory) as inputs,
        tempfile.TemporaryFile(dir=directory) as targets,
        closing(tokenize_files(files, tokenizer, options)) as pieces,
    ):
        writer = _SampleWriter(inputs, targets)
        for piece in pieces:
            writer.add(piece)
        counts = writer.counts
        if counts.n_samples == 0:
            raise ConfigError(f"{name_files(files)}: {_why_no_samples(counts, options)}")
        order = writer.find_order(options.seq_len, packing)
        digest = hashlib.sha256()
        writer.write_tokens(directory, order, digest)
    for name, positions in order.starts.items():
        np.save(directory / name, positions)
        digest.update(positions.data)
    np.save(directory / "term_counts", order.term_counts)
    n_sequences = len(order.term_counts)
    size = f"{counts.n_samples} samples in {n_sequences} sequences"
    description = {
        "fingerprint": f"{size}, sha256 {digest.hexdigest()}",
        "note": _describe(counts, n_sequences, options),
        "has_bytes": counts.has_bytes,
    }
    (directory / _DESCRIPTION).write_text(json.dumps(description))


@dataclass
class _Counts:
    """What is said of the samples."""

    n_samples: int = 0
    n_tokens: int = 0
    n_full_tokens: int = 0
    """before truncation"""
    n_truncated: int = 0
    n_dropped: int = 0
    needed_length: int = 0
    """sequence length with which each dropped record has a target that has any; 0 = none has"""
    has_bytes: bool = True
    notes: Counter[str] = field(default_factory=Counter)
    """see `RecordRenderer`"""


class _Order(NamedTuple):
    """The order of the samples in the sequences."""

    samples: NDArray[np.int64]
    """their numbers as they were added"""
    starts: dict[str, NDArray[np.int64]]
    """where documents and sequences start in the arrays of tokens, and the end of the last"""
    term_counts: NDArray[np.int64]
    """terms of the loss of each sequence: targets, or pairs"""


class _SampleWriter:
    """Appends the inputs and targets of samples to two files, and keeps what is said of them."""

    def __init__(self, inputs: IO[bytes], targets: IO[bytes]) -> None:
        self._inputs = inputs
        self._targets = targets
        self.counts = _Counts()
        # Of each sample.
        self._lengths = array("i")
        self._document_lengths = array("i")
        self._term_counts = array("i")
        self._turns = array("q")

    def add(self, piece: TokenizedPiece) -> None:
        counts = self.counts
        counts.n_dropped += len(piece.dropped)
        counts.needed_length = max([counts.needed_length, *piece.dropped])
        counts.has_bytes = counts.has_bytes and piece.has_bytes
        counts.notes.update(piece.notes)
        for sample in piece.samples:
            self._add_sample(sample)

    def _add_sample(self, sample: TokenizedSample) -> None:
        n_tokens = 0
        n_terms = 0
        for document in sample.documents:
            ids = document.ids.astype(np.int32)
            is_target = document.is_target[1:]
            targets = np.where(is_target, ids[1:], np.int32(IGNORE_INDEX))
            self._inputs.write(ids[:-1].tobytes())
            self._targets.write(targets.tobytes())
            self._document_lengths.append(len(targets))
            n_tokens += len(targets)
            n_terms += int(is_target.sum())
        if len(sample.documents) > 1:  # a pair
            n_terms = 1
        self.counts.n_samples += 1
        self.counts.n_tokens += n_tokens
        self.counts.n_full_tokens += sample.full_length
        self.counts.n_truncated += sample.full_length > n_tokens
        self._lengths.append(n_tokens)
        self._term_counts.append(n_terms)
        self._turns.append(sample.turn)

    def find_order(self, seq_len: int, packing: bool) -> _Order:
        in_turn = np.argsort(np.array(self._turns), kind="stable")
        lengths = np.array(self._lengths, np.int64)[in_turn]
        sequence_numbers = np.arange(len(lengths))
        if packing:
            sequence_numbers = pack_best_fit(lengths, seq_len)
        order = np.argsort(sequence_numbers, kind="stable")
        samples = in_turn[order]
        document_lengths = np.array(self._document_lengths, np.int64).reshape(len(lengths), -1)
        document_starts = np.cumsum(np.append(0, document_lengths[samples]))
        is_first_of_sequence = np.diff(sequence_numbers[order], prepend=-1) > 0
        first_samples = np.flatnonzero(is_first_of_sequence)
        sample_starts = np.cumsum(np.append(0, lengths[order]))
        sequence_starts = sample_starts[np.append(first_samples, len(lengths))]
        term_counts = np.array(self._term_counts, np.int64)[samples]
        return _Order(
            samples,
            {"document_starts": document_starts, "sequence_starts": sequence_starts},
            np.add.reduceat(term_counts, first_samples),
        )

    def write_tokens(self, directory: Path, order: _Order, digest: hashlib._Hash) -> None:
        """Write the inputs and targets of all samples in `order`; `digest` is of both."""
        lengths = 4 * np.array(self._lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        header = {"descr": "<i4", "fortran_order": False, "shape": (self.counts.n_tokens,)}
        for name, source in (("inputs", self._inputs), ("targets", self._targets)):
            source.flush()
            # Not through a memory map: on a full disk that would end the process with SIGBUS.
            with (directory / f"{name}.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for sample in order.samples:
                    values = os.pread(source.fileno(), int(lengths[sample]), int(starts[sample]))
                    file.write(values)
                    digest.update(values)


def _describe(counts: _Counts, n_sequences: int, options: RecordOptions) -> str:
    """Return a line on the samples, on what was truncated and dropped, and on what was read."""
    seq_len = options.seq_len
    padding = 1 - counts.n_tokens / (n_sequences * seq_len)
    samples = format_count(counts.n_samples, "pair" if options.pairs else "sample")
    sequences = format_count(n_sequences, "sequence")
    note = f"{samples} in {sequences}, {100 * padding:.1f} % padding"
    if counts.n_truncated > 0:
        lost = 1 - counts.n_tokens / counts.n_full_tokens
        note += f"; {counts.n_truncated:,} truncated to max_seq_len {seq_len}"
        note += f", {100 * lost:.1f} % of the tokens dropped"
    if counts.n_dropped > 0:
        note += f"; {counts.n_dropped:,} more dropped"
        note += f", without targets within max_seq_len {seq_len}"
    return "; ".join([note, *describe_notes(counts.notes)])


def _why_no_samples(counts: _Counts, options: RecordOptions) -> str:
    """Return the problem of files that have no sample with targets."""
    needed_length = counts.needed_length
    if needed_length > 0:
        return f"max_seq_len {options.seq_len} cuts off all targets; use {needed_length} or more"
    if counts.n_dropped > 0 and options.completion_only:
        return "no line has targets; add completions, or set loss_on: all"
    if counts.n_dropped > 0:
        return "no line has two tokens, one to predict from the other; add text"
    if options.held_out is False:
        problem = "its only sample is held out, as every 20th is, from the first on"
        return f"{problem}; add lines, or set val_data"
    return "no samples; add lines"


def pack_best_fit(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return the sequence of each sample, by the best-fit decreasing algorithm of bin packing.

    The longest samples are placed first, each into the sequence with the least space left in which
    it fits, or into a new one. A sequence is numbered by the first of its samples in the order of
    the files, so that sequences keep this order.

    Args:
        lengths: tokens of each sample, from 1 to `seq_len`.
    """
    sequences = np.empty(len(lengths), np.int64)  # of each sample, numbered by the longest in it
    by_space: list[list[int]] = [
        [] for _ in range(seq_len + 1)
    ]  # sequences with so much space left
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
