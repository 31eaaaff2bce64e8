"""Documents in files of any format: found in order, and handed over in chunks of about a megabyte.

A chunk is read where it is tokenised, by a worker process, as far as its format allows. Nothing here holds more
than a few chunks, however large a file is, but for a document that can be cut nowhere.
"""

from __future__ import annotations

import codecs
import collections
import csv
import functools
import glob
import hashlib
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.files import blocks, is_compressed, is_empty_parquet, parse_line, whole_lines
from lm.errors import ConfigError

CHUNK = 1 << 20
"""Text in a chunk (about; bytes or characters)."""

AROUND = 1000
"""Characters on both sides that decide whether a document can be cut at a place."""

WHOLE = 64 << 20
"""The longest text without any such place (characters)."""

FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
_PACKED = ("text", "jsonl", "csv")
"""Formats that may be compressed as a whole."""

Cut = Callable[[str, str], bool]
"""Whether a text may be cut between the two strings: its ids are then those of both parts."""


class Chunk(NamedTuple):
    """Some documents, or a piece of one that is long."""

    read: Callable[[], list[str]]
    """their text; may be called in another process"""
    bytes: int
    """of the file, or of the text where the file is compressed or in columns"""
    name: str
    """of the (first) file"""
    opens: bool = True
    """false: the piece continues the document of the chunk before"""
    closes: bool = True
    """false: the next chunk continues it"""
    held_out: bool | None = None
    """whether the document is for validation; null: the hash of each text says"""


class TokenChunk(NamedTuple):
    """Tokens of whole documents, or of pieces of some, for one of both sides."""

    ids: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]
    """in `ids`, the position behind each document's last token"""
    held_out: bool


def id_type(vocab_size: int) -> np.dtype[Any]:
    """How ids below `vocab_size` are kept."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def held_out(document: bytes, fraction: float) -> bool:
    """Whether a document is for validation: a function of its content alone, true for `fraction` of all."""
    return held_out_blocks([document], fraction)


def held_out_blocks(content: Iterable[bytes], fraction: float) -> bool:
    """As `held_out`, of a document in blocks."""
    if not fraction:
        return False
    state = hashlib.blake2b(digest_size=8)
    for block in content:
        state.update(block)
    return int.from_bytes(state.digest(), "big") < fraction * 2**64


def format_of(path: Path, given: str | None) -> str | None:
    """The name of the format of `path` by its suffix, or `given`; None: the suffix is not known."""
    packed = is_compressed(path)
    name = given or FORMATS.get((Path(path.stem) if packed else path).suffix.lower())
    return None if packed and name not in _PACKED else name


def read_chunks(paths: Sequence[Path], given: str | None, field: str, fraction: float, cut: Cut) -> Iterator[Chunk]:
    """The documents of files of any format but HDF5, in order.

    Args:
        given: the files' format, whatever their names; None: by suffix.
        field: column or key of the text.
        fraction: of the documents that is for validation.

    Raises:
        ConfigError: a file or a document cannot be read, with the place (also from `Chunk.read`).
    """
    few: list[Path] = []
    size = 0
    for path in paths:
        kind = format_of(path, given)
        length = path.stat().st_size
        small = kind == "text" and not is_compressed(path) and length <= CHUNK
        if few and (not small or size >= CHUNK):
            yield Chunk(functools.partial(_whole_files, few), size, str(few[0]))
            few, size = [], 0
        if small:
            few, size = [*few, path], size + length
        elif kind == "text":
            side = held_out_blocks(blocks(path), fraction)
            yield from _pieces(_decoded(path, blocks(path, CHUNK)), side, cut, str(path))
        elif kind == "jsonl":
            yield from _jsonl(path, field)
        else:
            rows = _csv(path, field) if kind == "csv" else _columns(path, kind or "", field)
            yield from _rows(rows, fraction, cut, str(path))
    if few:
        yield Chunk(functools.partial(_whole_files, few), size, str(few[0]))


# ---- text ----------------------------------------------------------------------------------------------------


def _decoded(path: Path, content: Iterable[bytes]) -> Iterator[str]:
    rest, offset = b"", 0
    for block in itertools.chain(content, [None]):
        data = rest + (block or b"")
        try:
            text, used = codecs.utf_8_decode(data, "strict", block is None)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: byte {offset + error.start} is not UTF-8; convert the file, e.g. with iconv"
            ) from None
        rest, offset = data[used:], offset + used
        yield text


def _whole_files(paths: Sequence[Path]) -> list[str]:
    return ["".join(_decoded(path, blocks(path, CHUNK))) for path in paths]


def split(content: Iterable[str], cut: Cut, name: str) -> Iterator[str]:
    """A document in pieces of about `CHUNK` characters whose ids are, one behind the other, the document's.

    Tokenizers cut a text into words before they look for tokens in each; a piece ends where they do so whatever
    comes further away than `AROUND` characters, or before a space that no token reaches over. Not every tokenizer
    leaves such a place.

    Args:
        content: the document in blocks of any size.

    Raises:
        ConfigError: there is no place to cut in `WHOLE` characters.
    """
    text = ""
    for block in content:
        text += block
        while len(text) > CHUNK + AROUND and (place := _seam(text, cut)):
            yield text[:place]
            text = text[place:]
        if len(text) > WHOLE:
            raise ConfigError(
                f"{name}: {len(text):,} characters that the tokenizer cannot be given in pieces; it has to be held"
                " whole: divide it into several documents"
            )
    if text:
        yield text


_PLACES = [re.compile(place) for place in (r"(?<=\S\n)(?=\S)", r"(?<=\n)(?=\S)", r"(?<=\S)(?=\s\S)", r"\b", "")]
"""Where to try to cut, best first: behind a line, before a word, anywhere."""


def _seam(text: str, cut: Cut) -> int:
    """A good place to cut near the end of `text`; 0: there is none."""
    start = max(CHUNK // 2, len(text) - CHUNK)
    end = len(text) - AROUND
    for pattern in _PLACES:
        last = collections.deque((match.start() for match in pattern.finditer(text, start, end)), maxlen=20)
        for place in reversed(last):
            if cut(text[place - AROUND : place], text[place : place + AROUND]):
                return place
    return 0


def _pieces(content: Iterable[str], side: bool, cut: Cut, name: str) -> Iterator[Chunk]:
    opens, pieces = True, split(content, cut, name)
    piece = next(pieces, None)
    while piece is not None:
        following = next(pieces, None)
        yield Chunk(functools.partial(list, [piece]), len(piece.encode()), name, opens, following is None, side)
        opens, piece = False, following


# ---- records and rows ----------------------------------------------------------------------------------------


def text_of(record: Mapping[str, Any], field: str, place: str) -> str:
    """The text in a record.

    Raises:
        ConfigError: it has none under `field`, naming the keys that are there, or that is no text.
    """
    if field not in record:
        raise ConfigError(f"{place}: has no {field!r}, only {', '.join(map(repr, record))}; name one as --text-field")
    return _checked(record[field], field, place)


def _checked(text: Any, field: str, place: str) -> str:
    if not isinstance(text, str):
        what = "null" if text is None else f"of type {type(text).__name__}"
        raise ConfigError(f"{place}: {field!r} is {what}, but it has to be text; leave the record out or mend it")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{place}: {field!r} is no Unicode: character {error.start} is half a surrogate pair"
            ) from None
    return text


def _jsonl(path: Path, field: str) -> Iterator[Chunk]:
    line = 1
    for data in whole_lines(blocks(path, CHUNK)):
        yield Chunk(functools.partial(_records, path, line, data, field), len(data), str(path))
        line += data.count(b"\n")


def _records(path: Path, first: int, data: bytes, field: str) -> list[str]:
    lines = enumerate(data.split(b"\n"), first)
    return [text_of(parse_line(path, line, raw), field, f"{path}:{line}") for line, raw in lines if raw.strip()]


def _csv(path: Path, field: str) -> Iterator[str]:
    """By the standard library: it names the line, takes fields of any length, and guesses no types."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        text_of(dict.fromkeys(header, ""), field, f"{path}:1")
        column = header.index(field)
        for row in reader:
            if row and len(row) != len(header):
                counts = f"{len(row)} columns, and the first line names {len(header)}"
                raise ConfigError(f"{path}:{reader.line_num}: has {counts}; a text with commas in it needs quotes")
            if row:
                yield row[column]
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: is no CSV: {error}") from None


def _lines(path: Path) -> Iterator[str]:
    for text in _decoded(path, whole_lines(blocks(path, CHUNK))):
        yield from io.StringIO(text)


def _columns(path: Path, kind: str, field: str) -> Iterator[str]:
    try:
        from datasets import load_dataset, logging
    except ImportError:
        raise ConfigError(f"{path}: reading {kind} needs a package: pip install datasets") from None
    logging.set_verbosity(logging.CRITICAL)  # what is wrong is said once, below
    if kind == "parquet" and is_empty_parquet(path):
        return
    try:
        stream: Any = load_dataset(kind, data_files=glob.escape(str(path)), split="train", streaming=True)
        text_of(dict.fromkeys(stream.features, ""), field, str(path))
        row = 0
        for table in stream.select_columns([field]).with_format("arrow").iter(batch_size=1000):
            for text in table.column(field).to_pylist():
                row += 1
                yield _checked(text, field, f"{path}: row {row}")
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ConfigError(f"{path}: cannot be read as {kind}: {str(error).splitlines()[0]}") from None


def _rows(texts: Iterator[str], fraction: float, cut: Cut, name: str) -> Iterator[Chunk]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if len(text) > CHUNK:
            if batch:
                yield Chunk(functools.partial(list, batch), size, name)
                batch, size = [], 0
            side = held_out(text.encode(), fraction)
            yield from _pieces((text[at : at + CHUNK] for at in range(0, len(text), CHUNK)), side, cut, name)
        else:
            batch.append(text)
            size += len(text)
            if size >= CHUNK:
                yield Chunk(functools.partial(list, batch), size, name)
                batch, size = [], 0
    if batch:
        yield Chunk(functools.partial(list, batch), size, name)


# ---- ids -----------------------------------------------------------------------------------------------------


def read_ids(path: Path, vocab_size: int, end: int | None, fraction: float) -> Iterator[TokenChunk]:
    """The ids of an HDF5 file: `input_ids`, (samples, tokens), integers.

    Samples of one length are pieces of a text that was cut without regard to what it says, so they are joined as
    they stand. A document ends at an end-of-text id, and with the file; a row of several such ids, as fills up
    samples that end early, counts as one. Where a fraction is held out, it is by samples, and a
    document ends also where a neighbour goes to the other side.

    Args:
        vocab_size: ids must be below it.
        end: the end-of-text id; None: not known, documents end without one.

    Raises:
        ConfigError: it cannot be read, or an id is out of range, with the place.
    """
    try:
        import h5py
    except ImportError:
        raise ConfigError(f"{path}: reading HDF5 needs a package: pip install h5py") from None
    try:
        with h5py.File(path) as file:
            data: Any = file.get("input_ids")
            if not isinstance(data, h5py.Dataset) or data.ndim != 2 or data.dtype.kind not in "iu":
                there = ", ".join(f"{key} {getattr(item, 'shape', '')}".strip() for key, item in file.items())
                raise ConfigError(
                    f"{path}: has no input_ids of whole numbers, samples x tokens, only: {there or 'nothing'}"
                )
            yield from _joined(_samples(path, data, vocab_size), end, fraction)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as HDF5: {error}") from None


def _samples(path: Path, data: Any, vocab_size: int) -> Iterator[NDArray[np.integer[Any]]]:
    step = max(1, CHUNK // max(1, data.shape[1]))
    for first in range(0, data.shape[0], step):
        block = data[first : first + step]
        bad = (block < 0) | (block >= vocab_size)
        if bad.any():
            sample, place = np.argwhere(bad)[0]
            raise ConfigError(
                f"{path}: sample {first + sample}, token {place}: id {block[sample, place]} is not below the"
                f" vocabulary's size, {vocab_size}; give the tokenizer that the file was made with"
            )
        yield block


def _joined(
    blocks_of_ids: Iterable[NDArray[np.integer[Any]]], end: int | None, fraction: float
) -> Iterator[TokenChunk]:
    closing = np.array([] if end is None else [end], np.uint32)
    side: bool | None = None
    last = end  # of what was handed over; as good as ended before the first
    for block in blocks_of_ids:
        sides = np.array([held_out(row.astype("<u4").tobytes(), fraction) for row in block] if fraction else [False])
        for rows in np.split(np.arange(len(sides)), np.flatnonzero(np.diff(sides)) + 1):
            now = bool(sides[rows[0]])
            if side is not None and now != side and last != end:
                yield TokenChunk(closing, np.array([len(closing)]), side)
                last = end
            side = now
            ids = (block[rows[0] : rows[-1] + 1] if fraction else block).ravel()
            if end is not None:
                is_end = ids == end
                ids = ids[~(is_end & np.concatenate([[last == end], is_end[:-1]]))]
            if len(ids):
                yield TokenChunk(
                    ids, np.flatnonzero(ids == end) + 1 if end is not None else np.array([], np.int64), now
                )
                last = int(ids[-1])
    if side is not None and last != end:
        yield TokenChunk(closing, np.array([len(closing)]), side)
