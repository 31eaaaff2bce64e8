"""Writes records of JSON Lines as token files, tokenized in pieces on all cores.

A line, or an element of a file that is one JSON array, is an object whose keys are those of
`lm.data.record_fields`, or named by `fields`. The chat template renders messages and the record's
`tools`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from lm.data.documents import total_size
from lm.data.json_lines import Record, parse_line, read_raw_lines
from lm.data.parallel import count_workers, map_in_order
from lm.data.readers import is_held_out, splits_by_content
from lm.data.record_fields import RecordFields
from lm.data.rendering import RecordRenderer, RenderedRecord
from lm.data.stream import read_once
from lm.data.token_writer import TokenChunk, write_splits
from lm.data.tokenized import HELD_OUT, RecordOptions
from lm.data.tokenizer.loading import Tokenizer, end_text
from lm.errors import ConfigError, error_prefix
from lm.launch.machine import usable_cores

_PIECE_BYTES = 1 << 17
"""after which a piece ends; the tokenizer takes 200 bytes for each"""


def write(
    directory: Path, files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions
) -> None:
    """Write the token files of JSON Lines to `directory`.

    Raises:
        ConfigError: an invalid line, or none.
    """
    by_content = options.holds_out and _splits_by_content(files, options)
    tokenize = _PieceTokenizer(tokenizer, options, by_content)
    _check_first_lines(files, tokenize)
    write_splits(
        directory,
        partial(_tokenize_files, files, tokenize),
        files,
        tokenizer,
        options,
    )


@dataclass
class _Piece:
    """Lines of a file that are tokenized together."""

    first_line: int
    """its number over all files"""
    lines: list[Record] = field(default_factory=list)
    size: int = 0
    """bytes of input"""


def _tokenize_files(
    files: Sequence[Path], tokenize: _PieceTokenizer, n_skipped: int
) -> Generator[Sequence[TokenChunk]]:
    """Yield the tokens of all files in order, tokenized on all cores.

    The first `n_skipped` pieces are not.

    Raises:
        ConfigError: an invalid line.
    """
    pieces = itertools.islice(_read_pieces(files, tokenize.options), n_skipped, None)
    n_workers = count_workers(total_size(files))
    if tokenize.options.split is not None:
        n_workers = usable_cores()
    with closing(map_in_order(tokenize, pieces, n_workers)) as tokenized:
        yield from tokenized


def _read_pieces(files: Sequence[Path], options: RecordOptions) -> Iterator[_Piece]:
    n_lines = 0
    for path in files:
        piece = _Piece(n_lines)
        for line in _read_lines(path, options):
            piece.lines.append(line)
            piece.size += line.size
            n_lines += 1
            if piece.size >= _PIECE_BYTES:
                yield piece
                piece = _Piece(n_lines)
        yield piece


def _read_lines(path: Path, options: RecordOptions) -> Iterator[Record]:
    """Yield the lines of a file, or the records of a dataset of the Hub."""
    if options.split is None:
        yield from read_raw_lines(path)
        return
    records = read_once(str(path), "train_data", options.split, options.hf_config)
    for number, record in enumerate(records):
        yield Record(f"{path}: record {number}", record, len(str(record)))


def _check_first_lines(files: Sequence[Path], tokenize: _PieceTokenizer) -> None:
    """Raise ConfigError if the first line of a file is invalid, before all lines are tokenized."""
    for path in files:
        tokenize(_Piece(0, list(itertools.islice(_read_lines(path, tokenize.options), 1))))


def _splits_by_content(files: Sequence[Path], options: RecordOptions) -> bool:
    fields = RecordFields(options.fields, options.of_pairs)
    lines = itertools.chain.from_iterable(_read_lines(path, options) for path in files)
    sizes = ((line.size, _is_held_out(parse_line(line), fields)) for line in lines)
    try:
        return splits_by_content(sizes, HELD_OUT)
    except (ConfigError, RecursionError):  # of a line that is read again, and named
        return False


def _is_held_out(record: Record, fields: RecordFields) -> bool:
    """Return whether a record is for validation by its content, of which what is read counts."""
    with error_prefix(record.place):
        values = fields.select(record.fields)
    content = {what: value.content for what, value in values.items()}
    text = json.dumps(content, sort_keys=True, default=str)  # of a dataset, it need not be JSON's
    return is_held_out([text.encode()], HELD_OUT)


@dataclass(frozen=True)
class _PieceTokenizer:
    tokenizer: Tokenizer
    options: RecordOptions
    by_content: bool
    """whether records are held out by their content, and not every 20th"""

    @cached_property
    def _renderer(self) -> RecordRenderer:
        options = self.options
        fields = RecordFields(options.fields, options.of_pairs)
        completion_only = options.loss_on == "completion" or options.of_pairs
        return RecordRenderer(self.tokenizer, fields, completion_only)

    def _is_held_out(self, record: Record, number: int) -> bool:
        if self.by_content:
            return _is_held_out(record, self._renderer.fields)
        return self.options.holds_out and number % round(1 / HELD_OUT) == 0

    def __call__(self, piece: _Piece) -> list[TokenChunk]:
        """Return the tokens of each split that has records in a piece."""
        chunks: dict[bool, TokenChunk] = {}
        rendered: list[tuple[TokenChunk, str, RenderedRecord]] = []
        for number, raw_line in enumerate(piece.lines, piece.first_line):
            line = parse_line(raw_line)
            held_out = self._is_held_out(line, number)
            chunk = chunks.setdefault(held_out, TokenChunk(held_out))
            chunk.size += line.size
            records = self._renderer.render(line)
            rendered += [(chunk, line.place, record) for record in records]
        for chunk, place, record in rendered:  # faster than between renderings
            with error_prefix(place):
                self._tokenize(record, chunk)
        return list(chunks.values())

    def _tokenize(self, record: RenderedRecord, chunk: TokenChunk) -> None:
        """Add the tokens of a record, or of one document of a pair."""
        tokenizer = self.tokenizer
        ids, ends = tokenizer.encode_with_ends(record.text, with_start=not record.is_chat)
        if chunk.has_bytes:
            chunk.has_bytes = tokenizer.tells_bytes(record.text, ids)
        if record.target_spans is None:
            is_target = np.ones(len(ids), np.bool_)
        else:
            is_target = np.zeros(len(ids), np.bool_)
            for span in record.target_spans:
                is_target |= (ends > span.start) & (ends <= span.stop)
        if not record.is_chat:
            ids = end_text(ids, tokenizer.eos_id)  # a target, too, also if the text had it
            is_target = np.append(is_target[: len(ids) - 1], True)
        chunk.add(ids)
        chunk.are_targets.append(is_target)
        chunk.ends.append(chunk.n_tokens)
