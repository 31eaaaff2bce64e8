"""Writes records of JSON Lines as token files, tokenized in pieces on all cores.

A line, or an element of a file that is one JSON array, is an object whose keys are those of
`lm.data.record_fields`, or named by `fields`. The chat template renders messages and the record's
`tools`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.documents import total_size
from lm.data.json_lines import RawLine, Record, parse_line, read_raw_lines
from lm.data.parallel import count_workers, map_in_order
from lm.data.readers import is_held_out
from lm.data.record_fields import RecordFields
from lm.data.rendering import RecordRenderer, RenderedRecord
from lm.data.stream import read_once
from lm.data.token_file import SourceRecord, TokenIndex
from lm.data.token_writer import TokenChunk, write_splits
from lm.data.tokenized import HELD_OUT, RecordOptions, describe_records
from lm.data.tokenizer.loading import ByteCheck, Tokenizer, end_text
from lm.errors import ConfigError, error_prefix, raise_together
from lm.launch.machine import usable_cores

_PIECE_BYTES = 1 << 17
"""after which a piece ends; the tokenizer takes 200 bytes for each"""


def write_records(
    directory: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: RecordOptions,
    sources: Sequence[SourceRecord] = (),
) -> list[TokenIndex]:
    """Write the token files of JSON Lines to `directory`. Return their indexes.

    Raises:
        ConfigError: invalid lines (the first of each file), or none.
    """
    _check_first_lines(files, tokenizer, options)
    by_content = options.holds_out and _splits_by_content(files, options)
    tokenize = _PieceTokenizer(tokenizer, options, by_content)
    return write_splits(
        directory,
        options.splits,
        partial(_tokenize_files, files, tokenize),
        tokenizer,
        files,
        sources,
        describe_records(tokenizer, options),
        file_format="jsonl",
        has_mask=True,
        pairs=options.pairs,
    )


@dataclass(frozen=True)
class _Document:
    """The text of a record, or one of the two of a pair: arrays of shape (tokens,)."""

    ids: NDArray[np.uint32]
    is_target: NDArray[np.bool_]
    """whether the token is learned"""


@dataclass(frozen=True)
class _TokenizedPiece:
    """Consecutive lines of a file."""

    file: Path
    chunks: Sequence[TokenChunk]
    error: ConfigError | None
    """that ends the file"""


def _tokenize_files(
    files: Sequence[Path], tokenizer: _PieceTokenizer, n_skipped: int
) -> Generator[Sequence[TokenChunk]]:
    """Yield the tokens of all files in order, tokenized on all cores.

    The first `n_skipped` pieces are not.

    Raises:
        ConfigError: invalid lines, the first of each file.
    """
    errors: dict[Path, ConfigError] = {}
    pieces = itertools.islice(_read_pieces(files, tokenizer.options, errors), n_skipped, None)
    n_workers = count_workers(total_size(files))
    if tokenizer.options.split is not None:
        n_workers = usable_cores()
    with closing(map_in_order(tokenizer.tokenize, pieces, n_workers)) as tokenized:
        for piece in tokenized:
            if piece.error is not None:
                errors.setdefault(piece.file, piece.error)
            if not errors:
                yield piece.chunks
    raise_together(list(errors.values()))


def _read_lines(path: Path, options: RecordOptions) -> Iterator[RawLine]:
    """Yield the lines of a file, or the records of a dataset of the Hub."""
    if options.split is None:
        yield from read_raw_lines(path)
        return
    records = read_once(str(path), "train_data", options.split, options.hf_config)
    for number, record in enumerate(records):
        yield RawLine(f"{path}: record {number}", record, len(str(record)))


def _splits_by_content(files: Sequence[Path], options: RecordOptions) -> bool:
    """Return whether `_is_held_out` is true of some records, and false of others.

    Reads no more of them than it needs.
    """
    fields = RecordFields(options.fields, options.pairs)
    found: set[bool] = set()
    with suppress(ConfigError, RecursionError):  # of a line that is read again, and named
        for path in files:
            for line in _read_lines(path, options):
                found.add(_is_held_out(parse_line(line, path), fields))
                if len(found) == 2:
                    return True
    return False


def _is_held_out(record: Record, fields: RecordFields) -> bool:
    """Return whether a record is for validation by its content, of which what is read counts."""
    with error_prefix(record.place):
        values = fields.select(record.fields)
    content = {what: value.content for what, value in values.items()}
    text = json.dumps(content, sort_keys=True, default=str)  # of a dataset, it need not be JSON's
    return is_held_out([text.encode()], HELD_OUT)


def _check_first_lines(files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions) -> None:
    """Raise ConfigError if the first line of a file is invalid, before all lines are tokenized."""
    tokenize = _PieceTokenizer(tokenizer, options).tokenize
    errors: list[ConfigError] = []
    for path in files:
        piece = _Piece(path, first_line=0)
        try:
            piece.lines += itertools.islice(_read_lines(path, options), 1)
        except ConfigError as error:
            piece.error = error
        tokenized = tokenize(piece)
        if tokenized.error is not None:
            errors.append(tokenized.error)
    raise_together(errors)


@dataclass
class _Piece:
    """Lines that are tokenized together."""

    file: Path
    first_line: int
    """its number over all files"""
    lines: list[RawLine] = field(default_factory=list)
    size: int = 0
    """bytes of input"""
    error: ConfigError | None = None
    """of what follows in the file"""


def _read_pieces(
    files: Sequence[Path], options: RecordOptions, errors: Mapping[Path, ConfigError]
) -> Iterator[_Piece]:
    """Yield the lines of each file up to an error, which is added to `errors` meanwhile."""
    n_lines = 0
    for path in files:
        piece = _Piece(path, n_lines)
        try:
            for line in _read_lines(path, options):
                piece.lines.append(line)
                piece.size += line.size
                n_lines += 1
                if piece.size >= _PIECE_BYTES:
                    yield piece
                    piece = _Piece(path, n_lines)
                if path in errors:
                    break
        except ConfigError as error:
            piece.error = error
        yield piece


@dataclass
class _RenderedLines:
    """Records of one split, to be tokenized together."""

    held_out: bool
    size: int = 0
    """bytes of input"""
    records: list[RenderedRecord] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """see `RecordRenderer`"""


@dataclass(frozen=True)
class _PieceTokenizer:
    tokenizer: Tokenizer
    options: RecordOptions
    by_content: bool = False
    """whether records are held out by their content, and not every 20th"""

    @cached_property
    def _renderer(self) -> RecordRenderer:
        options = self.options
        fields = RecordFields(options.fields, options.pairs)
        return RecordRenderer(self.tokenizer, fields, options.completion_only or options.pairs)

    def _is_held_out(self, record: Record, number: int) -> bool:
        if self.by_content:
            return _is_held_out(record, self._renderer.fields)
        return self.options.holds_out and number % round(1 / HELD_OUT) == 0

    def tokenize(self, piece: _Piece) -> _TokenizedPiece:
        error = piece.error
        chunks: list[TokenChunk] = []
        try:
            chunks = [self._tokenize_lines(lines) for lines in self._render(piece)]
        except ConfigError as raised:
            error = raised
        return _TokenizedPiece(piece.file, chunks, error)

    def _render(self, piece: _Piece) -> list[_RenderedLines]:
        """Return the records of each split that has some."""
        splits = [_RenderedLines(held_out=False), _RenderedLines(held_out=True)]
        notes = self._renderer.notes
        for number, raw_line in enumerate(piece.lines, piece.first_line):
            line = parse_line(raw_line, piece.file)
            rendered = list(self._renderer.render_lines([line]))
            split = splits[self._is_held_out(line, number)]
            split.size += line.size
            split.records += rendered
            split.notes.update(notes)
            notes.clear()
        return [split for split in splits if split.records]

    def _tokenize_lines(self, lines: _RenderedLines) -> TokenChunk:
        """Return the tokens of all records, in their order."""
        check = ByteCheck()
        documents: dict[int, _Document] = {}
        for is_chat in (False, True):
            numbers = [i for i, record in enumerate(lines.records) if record.is_chat is is_chat]
            batch = [lines.records[i] for i in numbers]
            tokenized = _tokenize_batch(batch, self.tokenizer, check, are_chats=is_chat)
            documents.update(zip(numbers, tokenized, strict=True))
        in_order = [documents[i] for i in range(len(lines.records))]
        return TokenChunk(
            ids=np.concatenate([document.ids for document in in_order]),
            ends=np.cumsum([len(document.ids) for document in in_order]),
            held_out=lines.held_out,
            size=lines.size,
            has_bytes=check.is_exact,
            is_target=np.concatenate([document.is_target for document in in_order]),
            notes=lines.notes,
        )


def _tokenize_batch(
    records: Sequence[RenderedRecord], tokenizer: Tokenizer, check: ByteCheck, *, are_chats: bool
) -> Iterator[_Document]:
    """Yield the tokens of records, all of them chats, or none."""
    texts = [record.text for record in records]
    try:
        encodings = tokenizer.encode_with_ends(texts, add_special_tokens=not are_chats)
    except ConfigError:
        for record in records:
            with error_prefix(record.place):
                tokenizer.encode_with_ends([record.text], add_special_tokens=not are_chats)
        raise
    for record, (ids, ends) in zip(records, encodings, strict=True):
        check.add(tokenizer, record.text, ids)
        if record.target_spans is None:
            is_target = np.full(len(ids), True)
        else:
            is_target = np.full(len(ids), False)
            for span in record.target_spans:
                is_target |= (ends > span.start) & (ends <= span.stop)
        if are_chats:
            yield _Document(ids, is_target)
        else:
            ended = end_text(ids, tokenizer.eos_id)
            # The end of the text is a target, too.
            yield _Document(ended, np.append(is_target[: len(ended) - 1], True))
