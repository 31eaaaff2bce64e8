"""JSON Lines for fine-tuning, packed into sequences or one sample per sequence.

A line, or an element of a file that is one JSON array, is an object with `text`, with `prompt` and
`completion`, or with a chat or a question and its reply in any of the layouts of `lm.data.layouts`.
The chat template renders messages and the record's `tools`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.cache import cached, describe_files
from lm.data.dataset import Dataset, Sample
from lm.data.files import JsonLine, name_files, raise_together, read_json_lines
from lm.data.rendering import RecordRenderer, RenderedRecord
from lm.data.tokenizer import ByteCheck, Tokenizer, describe_tokenizer, end_text
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
        options = _Options(seq_len, text_field, completion_only, packing, held_out)
        facts = {
            "kind": "jsonl",
            "files": describe_files(files),
            "tokenizer": describe_tokenizer(tokenizer),
            "options": options._asdict(),
        }
        directory = cached(facts, lambda draft: _write(draft, files, tokenizer, options))
        self.seq_len = seq_len
        self._packing = packing
        self._inputs = _open(directory, "inputs")
        self._targets = _open(directory, "targets")
        self._document_starts = _open(directory, "document_starts")
        self._sequence_starts = _open(directory, "sequence_starts")
        self._target_counts = _open(directory, "target_counts")
        described = json.loads((directory / _DESCRIPTION).read_text())
        self.note = described["note"]
        self.has_bytes = described["has_bytes"]
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
        if not self._packing:
            return Sample(inputs, targets)
        # Positions at or after `stop` are padding, which is one more document.
        positions = np.minimum(np.arange(start, start + self.seq_len), stop)
        documents = np.searchsorted(self._document_starts, positions, side="right")
        return Sample(inputs, targets, documents - documents[0])

    def count_targets(self, index: int) -> int:
        return int(self._target_counts[index])

    def fingerprint(self) -> str:
        return self._fingerprint


# ---- the arrays of a dataset, written once


_DESCRIPTION = "description.json"
"""the note, the fingerprint, and whether the tokens tell their bytes"""


class _Options(NamedTuple):
    seq_len: int
    text_field: str
    completion_only: bool
    packing: bool
    held_out: bool | None


def _open(directory: Path, name: str) -> NDArray[Any]:
    return np.load(directory / f"{name}.npy", mmap_mode="r")


class _SampleWriter:
    """Appends the inputs and targets of samples to two files, and keeps what is said of each."""

    def __init__(self, directory: Path, seq_len: int) -> None:
        self._seq_len = seq_len
        self._paths = (directory / "inputs.raw", directory / "targets.raw")
        self._files = [path.open("wb") for path in self._paths]
        self.lengths = array("q")
        self.full_lengths = array("q")
        """tokens before truncation"""
        self.target_counts = array("q")
        self.dropped = array("q")
        """of each sample without targets: the sequence length that it needs for one; 0 = none"""

    def __enter__(self) -> _SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, record: _TokenizedRecord) -> None:
        """Append a record, truncated, unless that leaves no target."""
        # The target of position i is token i + 1.
        is_target = record.is_target[1 : self._seq_len + 1]
        if not is_target.any():
            self.dropped.append(_needed_length(record))
            return
        inputs = record.ids[:-1][: self._seq_len].astype(np.int32)
        next_ids = record.ids[1 : self._seq_len + 1].astype(np.int32)
        targets = np.where(is_target, next_ids, np.int32(IGNORE_INDEX))
        for file, values in zip(self._files, (inputs, targets), strict=True):
            file.write(values.tobytes())
        self.lengths.append(len(inputs))
        self.full_lengths.append(len(record.ids) - 1)
        self.target_counts.append(int(is_target.sum()))

    def read(self) -> list[NDArray[np.int32]]:
        """Return the inputs and the targets of all samples, one after the other, and delete them.

        They exist until they are released.
        """
        found: list[NDArray[np.int32]] = []
        for path in self._paths:
            found.append(np.memmap(path, np.int32, "r"))
            path.unlink()
        return found


def _write(directory: Path, files: Sequence[Path], tokenizer: Tokenizer, options: _Options) -> None:
    """Tokenize the lines of all files, and write the arrays of their dataset."""
    renderer = RecordRenderer(tokenizer, options.text_field, options.completion_only)
    check = ByteCheck()
    with _SampleWriter(directory, options.seq_len) as writer:
        _tokenize_files(files, renderer, options.held_out, writer, check)
    if not writer.lengths:
        raise ConfigError(f"{name_files(files)}: {_why_no_samples(writer.dropped, options)}")
    lengths = np.array(writer.lengths)
    sequence_numbers = np.arange(len(lengths))
    if options.packing:
        sequence_numbers = pack_best_fit(lengths, options.seq_len)
    order = np.argsort(sequence_numbers, kind="stable")
    # Where the samples and the sequences start in the arrays of tokens, and their end. The shapes
    # are (samples + 1,) and (sequences + 1,).
    document_starts = np.cumsum(np.append(0, lengths[order]))
    is_first_of_sequence = np.diff(sequence_numbers[order], prepend=-1) > 0
    first_samples = np.flatnonzero(is_first_of_sequence)
    sequence_starts = document_starts[np.append(first_samples, len(lengths))]
    target_counts = np.add.reduceat(np.array(writer.target_counts)[order], first_samples)
    arrays = {
        "document_starts": document_starts,
        "sequence_starts": sequence_starts,
        "target_counts": target_counts,
    }
    digest = hashlib.sha256()
    for name, values in zip(("inputs", "targets"), writer.read(), strict=True):
        _write_in_order(directory / f"{name}.npy", values, lengths, order)
        digest.update(_open(directory, name).data)
    for name, values in arrays.items():
        np.save(directory / name, values)
    digest.update(document_starts.data)
    digest.update(sequence_starts.data)
    n_sequences = len(first_samples)
    fingerprint = f"{len(lengths)} samples in {n_sequences} sequences, sha256 {digest.hexdigest()}"
    note = _describe(writer, n_sequences, options.seq_len, renderer)
    description = {"note": note, "fingerprint": fingerprint, "has_bytes": check.is_exact}
    (directory / _DESCRIPTION).write_text(json.dumps(description))


def _write_in_order(
    path: Path, values: NDArray[np.int32], lengths: NDArray[np.int64], order: NDArray[np.int64]
) -> None:
    """Write the values of all samples, which are one after the other in `values`, in `order`."""
    ends = np.cumsum(lengths)
    dtype = np.lib.format.dtype_to_descr(values.dtype)
    header = {"descr": dtype, "fortran_order": False, "shape": values.shape}
    # Not through a memory map: on a full disk that would end the process with SIGBUS.
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for sample in order.tolist():
            file.write(values[ends[sample] - lengths[sample] : ends[sample]].tobytes())


def _describe(
    writer: _SampleWriter, n_sequences: int, seq_len: int, renderer: RecordRenderer
) -> str:
    """Return a line on the samples, on what was truncated and dropped, and on what was read."""
    n_tokens = sum(writer.lengths)
    n_samples = len(writer.lengths)
    padding = 1 - n_tokens / (n_sequences * seq_len)
    note = f"{n_samples} samples in {n_sequences} sequences, {100 * padding:.1f} % padding"
    n_truncated = sum(length > seq_len for length in writer.full_lengths)
    if n_truncated > 0:
        lost = 1 - n_tokens / sum(writer.full_lengths)
        note += f"; {n_truncated} truncated to max_seq_len {seq_len}"
        note += f", {100 * lost:.1f} % of the tokens dropped"
    if writer.dropped:
        note += f"; {len(writer.dropped)} more dropped"
        note += f", without targets within max_seq_len {seq_len}"
    note += "".join(f"; {layout}" for layout in renderer.layouts.describe())
    for what, how_many in renderer.notes.items():
        note += f"; {how_many} {what}"
    return note


def _tokenize_files(
    files: Sequence[Path],
    renderer: RecordRenderer,
    held_out: bool | None,
    writer: _SampleWriter,
    check: ByteCheck,
) -> None:
    """Read and tokenize the lines of all files; raise the first error of each file together."""
    errors: list[ConfigError] = []
    numbers = itertools.count()
    for file in files:
        lines = _select_lines(read_json_lines(file), numbers, held_out)
        records = renderer.render_lines(lines)
        try:
            for record in _tokenize_records(records, renderer.tokenizer, check):
                writer.add(record)
        except ConfigError as error:
            errors.append(error)
    raise_together(errors)


def _select_lines(
    lines: Iterator[JsonLine], numbers: Iterator[int], held_out: bool | None
) -> Iterator[JsonLine]:
    """Yield the lines for validation, the others, or all of them; `numbers` counts all files'."""
    for line, number in zip(lines, numbers, strict=False):
        if held_out is None or held_out == (number % _HOLD_OUT_EVERY == 0):
            yield line


def _tokenize_records(
    records: Iterator[RenderedRecord], tokenizer: Tokenizer, check: ByteCheck
) -> Iterator[_TokenizedRecord]:
    """Yield the tokens of records. Of the records tokenized together, chats are last."""
    while batch := list(itertools.islice(records, _SAMPLES_PER_CALL)):
        texts = [record for record in batch if not record.is_chat]
        for ids, is_target in _tokenize_batch(texts, tokenizer, check, add_special_tokens=True):
            ended = end_text(ids, tokenizer.eos_id)
            # The end of the text is a target, too.
            yield _TokenizedRecord(ended, np.append(is_target[: len(ended) - 1], True))
        chats = [record for record in batch if record.is_chat]
        yield from _tokenize_batch(chats, tokenizer, check, add_special_tokens=False)


def _tokenize_batch(
    records: Sequence[RenderedRecord],
    tokenizer: Tokenizer,
    check: ByteCheck,
    *,
    add_special_tokens: bool,
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
        check.add(tokenizer, record.text, ids)
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


def _why_no_samples(dropped: Sequence[int], options: _Options) -> str:
    """Return the problem of files that have no sample with targets."""
    needed_length = max(dropped, default=0)
    if needed_length > 0:
        return f"max_seq_len {options.seq_len} cuts off all targets; use {needed_length} or more"
    if dropped and options.completion_only:
        return "no line has targets; add completions, or set loss_on: all"
    if dropped:
        return "no line has two tokens, one to predict from the other; add text"
    if options.held_out is None:
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
