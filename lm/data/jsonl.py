"""JSON Lines for fine-tuning, packed into sequences or one sample per sequence.

A line, or an element of a file that is one JSON array, is an object with `text`, with `prompt` and
`completion`, or with a chat or a question and its reply in any of the layouts of `lm.data.layouts`.
The chat template renders messages and the record's `tools`.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, Sample
from lm.data.files import JsonLine, name_files, raise_together, read_json_lines
from lm.data.rendering import RecordRenderer, RenderedRecord
from lm.data.tokenizer import Tokenizer, end_text
from lm.errors import ConfigError, error_prefix
from model import IGNORE_INDEX

_HOLD_OUT_EVERY = 20
"""One of so many lines is for validation, unless there is a file for it."""
_SAMPLES_PER_CALL = 1024
"""Samples in one call of the tokenizer."""


class _TokenizedRecord(NamedTuple):
    """Arrays of shape (tokens,)."""

    ids: NDArray[np.uint32]
    is_target: NDArray[np.bool_]


class _TokenizedSample(NamedTuple):
    """The inputs and targets of a record, truncated: arrays of shape (tokens,)."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    full_length: int
    """tokens before truncation"""


class _TokenizedFiles(NamedTuple):
    """The samples of all files, and those that were dropped."""

    samples: list[_TokenizedSample]
    dropped: list[int]
    """of each sample without targets: the sequence length that it needs for one; 0 = it has none"""


class JsonlDataset(Dataset):
    """Samples of JSON Lines files.

    Packed, a sequence holds several samples, each in one piece, and attention stays inside each;
    otherwise one sample. The rest of a sequence is padding. Samples longer than a sequence are
    truncated, those without targets dropped.

    Args:
        held_out: True = only every 20th line, for validation; False = only the others; None = all.

    Raises:
        ConfigError: invalid lines (the first of each file), or no targets at all.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        seq_len: int,
        text_field: str = "text",
        completion_only: bool = False,
        packing: bool = True,
        held_out: bool | None = None,
    ) -> None:
        renderer = RecordRenderer(tokenizer, text_field, completion_only)
        samples, dropped = _tokenize_files(files, renderer, seq_len, held_out)
        if not samples:
            problem = _why_no_samples(dropped, seq_len, held_out, completion_only)
            raise ConfigError(f"{name_files(files)}: {problem}")
        self.seq_len = seq_len
        self._packing = packing
        self._lay_out(samples)
        self.note = self._describe(samples, dropped, renderer)

    def _lay_out(self, samples: Sequence[_TokenizedSample]) -> None:
        """Concatenate the samples, sequence by sequence, and index both."""
        lengths = np.array([len(sample.inputs) for sample in samples], np.int64)
        if self._packing:
            sequence_numbers = pack_best_fit(lengths, self.seq_len)
        else:
            sequence_numbers = np.arange(len(samples))
        order = np.argsort(sequence_numbers, kind="stable")
        ordered = [samples[i] for i in order.tolist()]
        self._inputs = np.concatenate([sample.inputs for sample in ordered])
        self._targets = np.concatenate([sample.targets for sample in ordered])
        # Where the samples and the sequences start in these arrays, and their end. The shapes are
        # (samples + 1,) and (sequences + 1,).
        self._document_starts = np.cumsum(np.append(0, lengths[order]))
        is_first_of_sequence = np.diff(sequence_numbers[order], prepend=-1) > 0
        self._sequence_starts = self._document_starts[np.append(is_first_of_sequence, True)]
        self._target_counts = np.add.reduceat(
            self._targets != IGNORE_INDEX, self._sequence_starts[:-1], dtype=np.int64
        )

    def _describe(
        self,
        samples: Sequence[_TokenizedSample],
        dropped: Sequence[int],
        renderer: RecordRenderer,
    ) -> str:
        n_tokens = len(self._inputs)
        padding = 1 - n_tokens / (len(self) * self.seq_len)
        note = f"{len(samples)} samples in {len(self)} sequences, {100 * padding:.1f} % padding"
        full_lengths = [sample.full_length for sample in samples]
        n_truncated = sum(length > self.seq_len for length in full_lengths)
        if n_truncated > 0:
            lost = 1 - n_tokens / sum(full_lengths)
            note += f"; {n_truncated} truncated to max_seq_len {self.seq_len}"
            note += f", {100 * lost:.1f} % of the tokens dropped"
        if dropped:
            note += f"; {len(dropped)} more dropped"
            note += f", without targets within max_seq_len {self.seq_len}"
        note += "".join(f"; {layout}" for layout in renderer.layouts.describe())
        for what, how_many in renderer.notes.items():
            note += f"; {how_many} {what}"
        return note

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
        if not self._packing:
            return Sample(inputs, targets)
        # Positions at or after `stop` are padding, which is one more document.
        positions = np.minimum(np.arange(start, start + self.seq_len), stop)
        documents = np.searchsorted(self._document_starts, positions, side="right")
        return Sample(inputs, targets, documents - documents[0])

    def count_targets(self, index: int) -> int:
        return int(self._target_counts[index])

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self._inputs, self._targets, self._document_starts, self._sequence_starts):
            digest.update(array.tobytes())
        n_samples = len(self._document_starts) - 1
        return f"{n_samples} samples in {len(self)} sequences, sha256 {digest.hexdigest()}"


def _tokenize_files(
    files: Sequence[Path], renderer: RecordRenderer, seq_len: int, held_out: bool | None
) -> _TokenizedFiles:
    """Read and tokenize the lines of all files; raise the first error of each file together."""
    samples: list[_TokenizedSample] = []
    dropped: list[int] = []
    errors: list[ConfigError] = []
    numbers = itertools.count()
    for file in files:
        lines = _select_lines(read_json_lines(file), numbers, held_out)
        records = renderer.render_lines(lines)
        try:
            for record in _tokenize_records(records, renderer.tokenizer):
                # The target of position i is token i + 1.
                if record.is_target[1 : seq_len + 1].any():
                    samples.append(_make_sample(record, seq_len))
                else:
                    dropped.append(_needed_length(record))
        except ConfigError as error:
            errors.append(error)
    raise_together(errors)
    return _TokenizedFiles(samples, dropped)


def _select_lines(
    lines: Iterator[JsonLine], numbers: Iterator[int], held_out: bool | None
) -> Iterator[JsonLine]:
    """Yield the lines for validation, the others, or all of them; `numbers` counts all files'."""
    for line, number in zip(lines, numbers, strict=False):
        if held_out is None or held_out == (number % _HOLD_OUT_EVERY == 0):
            yield line


def _tokenize_records(
    records: Iterator[RenderedRecord], tokenizer: Tokenizer
) -> Iterator[_TokenizedRecord]:
    """Yield the tokens of records. Of the records tokenized together, chats are last."""
    while batch := list(itertools.islice(records, _SAMPLES_PER_CALL)):
        texts = [record for record in batch if not record.is_chat]
        for ids, is_target in _tokenize_batch(texts, tokenizer, add_special_tokens=True):
            ended = end_text(ids, tokenizer.eos_id)
            # The end of the text is a target, too.
            yield _TokenizedRecord(ended, np.append(is_target[: len(ended) - 1], True))
        chats = [record for record in batch if record.is_chat]
        yield from _tokenize_batch(chats, tokenizer, add_special_tokens=False)


def _tokenize_batch(
    records: Sequence[RenderedRecord], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> Iterator[_TokenizedRecord]:
    texts = [record.text for record in records]
    try:
        encodings = tokenizer.encode_with_ends(texts, add_special_tokens=add_special_tokens)
    except ConfigError:
        for record in records:
            with error_prefix(record.place):
                tokenizer.encode_with_ends([record.text], add_special_tokens=add_special_tokens)
        raise
    for record, (ids, ends) in zip(records, encodings, strict=True):
        if record.target_spans is None:
            is_target = np.full(len(ids), True)
        else:
            is_target = np.full(len(ids), False)
            for span in record.target_spans:
                is_target |= (ends > span.start) & (ends <= span.stop)
        yield _TokenizedRecord(ids, is_target)


def _needed_length(record: _TokenizedRecord) -> int:
    """Return the shortest sequence length with a target; 0 = the record has none."""
    positions = np.flatnonzero(record.is_target[1:])
    if len(positions) == 0:
        return 0
    return int(positions[0]) + 1


def _make_sample(record: _TokenizedRecord, seq_len: int) -> _TokenizedSample:
    inputs = record.ids[:-1]
    next_ids = record.ids[1:].astype(np.int32)
    targets = np.where(record.is_target[1:], next_ids, np.int32(IGNORE_INDEX))
    return _TokenizedSample(inputs[:seq_len].astype(np.int32), targets[:seq_len], len(inputs))


def _why_no_samples(
    dropped: Sequence[int], seq_len: int, held_out: bool | None, completion_only: bool
) -> str:
    """Return the problem of files that have no sample with targets."""
    needed_length = max(dropped, default=0)
    if needed_length > 0:
        return f"max_seq_len {seq_len} cuts off all targets; use {needed_length} or more"
    if dropped and completion_only:
        return "no line has targets; add completions, or set loss_on: all"
    if dropped:
        return "no line has two tokens, one to predict from the other; add text"
    if held_out is None:
        return "no samples; add lines"
    return "no samples; add lines, or set val_data: without it, every 20th line is held out"


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
