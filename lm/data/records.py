"""Records of JSON Lines as arrays of tokens, tokenized in pieces on all cores."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.json_lines import RawLine, Record, parse_line, read_raw_lines
from lm.data.parallel import count_workers, map_in_order
from lm.data.progress import bar_of_files, total_size
from lm.data.record_fields import RecordFields
from lm.data.rendering import RecordRenderer, RenderedRecord
from lm.data.tokenizer.loading import ByteCheck, Tokenizer, end_text
from lm.errors import ConfigError, error_prefix, raise_together
from lm.launch.launch import is_rank0

_HOLD_OUT_EVERY = 20
"""One of so many lines is for validation, unless there is a file for it."""
_CHATS_LAST = 1024
"""Records of a file of which those that are chats come last."""
_PIECE_BYTES = 1 << 17
"""after which a piece ends; the tokenizer takes 200 bytes for each"""


@dataclass(frozen=True)
class RecordOptions:
    """What the tokens of records depend on besides the tokenizer."""

    seq_len: int
    fields: Mapping[str, str] | None
    """the hyperparameter of this name"""
    completion_only: bool
    held_out: bool | None
    """True = only every 20th line, for validation; False = only the others; None = all"""
    pairs: bool = False
    """records are preferences, each with a chosen and a rejected reply"""

    def selects(self, number: int) -> bool:
        """Return whether the line `number` is read."""
        return self.held_out is None or self.held_out == (number % _HOLD_OUT_EVERY == 0)


class TokenizedDocument(NamedTuple):
    """The text of a record, or one of the two of a pair: arrays of shape (tokens,)."""

    ids: NDArray[np.uint32]
    is_target: NDArray[np.bool_]
    """whether the token is learned; the first has none before it to be predicted from"""

    @property
    def needed_length(self) -> int:
        """The shortest sequence length with a target; 0 = it has none."""
        positions = np.flatnonzero(self.is_target[1:])
        if len(positions) == 0:
            return 0
        return int(positions[0]) + 1


class TokenizedSample(NamedTuple):
    """A record, truncated to a sequence."""

    documents: Sequence[TokenizedDocument]
    """one, or of preferences the chosen and the rejected reply, each with the prompt"""
    full_length: int
    """tokens before truncation"""
    turn: int
    """samples are ordered by it; those of one turn are as they are yielded"""


@dataclass(frozen=True)
class TokenizedPiece:
    """Consecutive lines of a file."""

    file: Path
    size: int
    """bytes of input"""
    samples: Sequence[TokenizedSample]
    dropped: Sequence[int]
    """of each record without targets: the sequence length that it needs for one; 0 = none"""
    notes: Counter[str]
    """see `RecordRenderer`"""
    has_bytes: bool
    """whether the ids tell how many bytes of text they are"""
    error: ConfigError | None
    """that ends the file"""


def tokenize_files(
    files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions
) -> Generator[TokenizedPiece]:
    """Yield the samples of all files in order, tokenized on all cores.

    Raises:
        ConfigError: invalid lines, the first of each file.
    """
    errors: dict[Path, ConfigError] = {}
    pieces = _read_pieces(files, options, errors)
    tokenize = _PieceTokenizer(tokenizer, options).tokenize
    tokenized = map_in_order(tokenize, pieces, count_workers(total_size(files)))
    progress = bar_of_files("tokenizing", files, "jsonl", hidden=not is_rank0())
    with progress, closing(tokenized):
        for piece in tokenized:
            progress.update(piece.size)
            if piece.error is not None:
                errors.setdefault(piece.file, piece.error)
            if not errors:
                yield piece
    raise_together(list(errors.values()))


def check_first_lines(files: Sequence[Path], tokenizer: Tokenizer, options: RecordOptions) -> None:
    """Raise ConfigError if the first line of a file is invalid, before all lines are tokenized."""
    tokenize = _PieceTokenizer(tokenizer, replace(options, held_out=None)).tokenize
    errors: list[ConfigError] = []
    for path in files:
        piece = _Piece(path, first_line=0, first_record=0)
        try:
            piece.lines += itertools.islice(read_raw_lines(path), 1)
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
    first_record: int
    """the number of the first selected one; that of a file is a multiple of `_CHATS_LAST`"""
    lines: list[RawLine] = field(default_factory=list)
    size: int = 0
    error: ConfigError | None = None
    """of what follows in the file"""


def _read_pieces(
    files: Sequence[Path], options: RecordOptions, errors: Mapping[Path, ConfigError]
) -> Iterator[_Piece]:
    """Yield the lines of each file up to an error, which is added to `errors` meanwhile."""
    n_lines = 0
    n_records = 0
    for path in files:
        n_records += -n_records % _CHATS_LAST
        piece = _Piece(path, n_lines, n_records)
        try:
            for line in read_raw_lines(path):
                piece.lines.append(line)
                piece.size += line.size
                n_records += options.selects(n_lines)
                n_lines += 1
                if piece.size >= _PIECE_BYTES:
                    yield piece
                    piece = _Piece(path, n_lines, n_records)
                if path in errors:
                    break
        except ConfigError as error:
            piece.error = error
        yield piece


@dataclass(frozen=True)
class _PieceTokenizer:
    tokenizer: Tokenizer
    options: RecordOptions

    @functools.cached_property
    def _renderer(self) -> RecordRenderer:
        options = self.options
        fields = RecordFields(options.fields, options.pairs)
        return RecordRenderer(self.tokenizer, fields, options.completion_only)

    def tokenize(self, piece: _Piece) -> TokenizedPiece:
        error = piece.error
        samples: list[TokenizedSample] = []
        dropped: list[int] = []
        check = ByteCheck()
        n_documents = 2 if self.options.pairs else 1
        try:
            records = list(self._renderer.render_lines(self._parse(piece)))
            for is_chat in (False, True):
                numbers = [i for i, record in enumerate(records) if record.is_chat is is_chat]
                batch = [records[i] for i in numbers]
                tokenized = _tokenize_batch(batch, self.tokenizer, check, are_chats=is_chat)
                # Of a pair both are chats, or neither, so that they stay next to each other.
                for i in numbers[::n_documents]:
                    documents = list(itertools.islice(tokenized, n_documents))
                    truncated = _truncate(documents, self.options.seq_len)
                    if not all(document.needed_length for document in truncated):
                        needed = max(document.needed_length for document in documents)
                        dropped.append(n_documents * needed)
                        continue
                    full_length = sum(len(document.ids) - 1 for document in documents)
                    number = piece.first_record + i // n_documents
                    turn = 2 * (number // _CHATS_LAST) + is_chat
                    samples.append(TokenizedSample(truncated, full_length, turn))
        except ConfigError as raised:
            error = raised
        notes = self._renderer.notes.copy()
        self._renderer.notes.clear()
        return TokenizedPiece(
            piece.file, piece.size, samples, dropped, notes, check.is_exact, error
        )

    def _parse(self, piece: _Piece) -> Iterator[Record]:
        """Yield the selected lines of a piece; the others must be valid, too."""
        for number, raw_line in enumerate(piece.lines, piece.first_line):
            line = parse_line(raw_line, piece.file)
            if self.options.selects(number):
                yield line


def _tokenize_batch(
    records: Sequence[RenderedRecord], tokenizer: Tokenizer, check: ByteCheck, *, are_chats: bool
) -> Iterator[TokenizedDocument]:
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
            yield TokenizedDocument(ids, is_target)
        else:
            ended = end_text(ids, tokenizer.eos_id)
            # The end of the text is a target, too.
            yield TokenizedDocument(ended, np.append(is_target[: len(ended) - 1], True))


def _truncate(documents: Sequence[TokenizedDocument], seq_len: int) -> list[TokenizedDocument]:
    """Return documents that fit into a sequence together.

    Those of a pair are cut at the same length, so that none is preferred for it.
    """
    limit = seq_len
    if len(documents) > 1:
        shorter = min(len(document.ids) - 1 for document in documents)
        limit = max(seq_len // 2, seq_len - shorter)
    # The target of position i is token i + 1.
    stop = limit + 1
    return [TokenizedDocument(each.ids[:stop], each.is_target[:stop]) for each in documents]
