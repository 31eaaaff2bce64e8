"""Files of documents: one reader per format, for streams and for `lm.prepare`."""

from __future__ import annotations

import csv
import glob
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.data.blocks import decode_utf8, is_compressed, read_line_blocks, read_text_blocks
from lm.data.json_lines import Record, read_json_lines
from lm.data.progress import progress_bar
from lm.data.signatures import check_pointer
from lm.errors import ConfigError
from lm.units import format_count

if TYPE_CHECKING:
    from datasets import IterableDataset
    from tqdm import tqdm

FORMATS = {
    "text": (".txt", ".md", ".py"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "hdf5": (".h5", ".hdf5"),
}
"""suffixes of files by format"""
_FORMAT_OF_SUFFIX = {suffix: name for name, known in FORMATS.items() for suffix in known}
STREAMED = {name: suffixes for name, suffixes in FORMATS.items() if name != "hdf5"}
"""those of records"""
_LIBRARY_FORMATS = ("parquet", "arrow")
"""formats that the `datasets` library streams"""
_READ_COMPRESSED = ("text", "jsonl", "csv", "tsv")
"""formats that are also read from .gz and .zst files"""
_MOST_EMPTY_LINES = 1 << 16
"""Bytes of a table in a row. A compressed file of 1 MB can have 200 MB, which take 30 s."""
_PARQUET_BATCH_ROWS = 1024
"""With the default of `datasets`, a file without rows is an error."""


class _Dialect(NamedTuple):
    """How a file separates the columns of a table."""

    name: str
    options: dict[str, Any]
    """of the standard library's reader"""
    remedy: str
    """for text that contains what separates"""


_DIALECTS = {
    "csv": _Dialect("CSV", {"delimiter": ","}, "quote text that contains commas"),
    "tsv": _Dialect(
        "TSV",
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
        "TSV has no quotes: use CSV for text that contains tabs or line breaks",
    ),
}


_CSV_PROBLEMS = {
    "new-line character": "a carriage return without a line feed; if it ends lines, convert them,"
    " tr '\\r' '\\n' < FILE > NEW, else delete it",
    "unexpected end of data": "a quote is not closed; close it, or write quotes in text twice",
    " expected after ": "text after a closing quote; write quotes in text twice",
}
"""what it means that the standard library's reader says so of a file"""


def format_of(path: Path, override: str | None = None) -> str | None:
    """Return the format of `path` by its suffix, or `override`.

    None if it is unknown or not readable compressed.
    """
    name = override
    if name is None:
        uncompressed = Path(path.stem) if is_compressed(path) else path
        name = _FORMAT_OF_SUFFIX.get(uncompressed.suffix.lower())
    if is_compressed(path) and name not in _READ_COMPRESSED:
        return None
    return name


class Table(NamedTuple):
    """A CSV or TSV file."""

    header: list[str]
    """empty for an empty file"""
    rows: Iterator[Record]


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Yield the records of a file of the format `name`, one that this package reads itself.

    A text file is one record, with the key "text".
    """
    match name:
        case "text":
            text = "".join(read_text_blocks(path))
            yield Record(str(path), {"text": text}, len(text.encode()))
        case "jsonl":
            yield from read_json_lines(path)
        case _:
            yield from read_table(path, name).rows


def read_table(path: Path, name: str) -> Table:
    """Read with the standard library: it knows line numbers, limits no field, guesses no types."""
    dialect = _DIALECTS[name]
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_read_text_lines(path), **dialect.options, strict=True)

    def read_rows() -> Iterator[tuple[str, list[str]]]:
        try:
            for row in reader:
                if row:
                    yield f"{path}:{reader.line_num}", row
        except csv.Error as error:
            problem = f"is not valid {dialect.name}: {_explain(error)}"
            raise ConfigError(f"{path}:{reader.line_num}: {problem}") from None

    rows = read_rows()
    place, header = next(rows, (str(path), []))
    for column, count in Counter(header).items():
        if column and count > 1:
            problem = f"has {count} columns {column!r}; rename all but one"
            raise ConfigError(f"{place}: {problem}")
    return Table(header, _read_fields(header, rows, dialect))


def _explain(error: csv.Error) -> str:
    message = str(error)
    for part, explanation in _CSV_PROBLEMS.items():
        if part in message:
            return explanation
    return message


def _read_fields(
    header: list[str], rows: Iterator[tuple[str, list[str]]], dialect: _Dialect
) -> Iterator[Record]:
    for place, row in rows:
        if len(row) != len(header):
            columns = f"{format_count(len(row), 'column')}, but the header has {len(header)}"
            remedy = dialect.remedy
            if len(row) > len(header) and not any(row[len(header) :]):
                remedy = "name the empty columns at the end in the header, or delete them"
            raise ConfigError(f"{place}: has {columns}; {remedy}")
        size = sum(map(len, row))
        yield Record(place, dict(zip(header, row, strict=True)), size)


def _read_text_lines(path: Path) -> Iterator[str]:
    offset = 0
    for block in read_line_blocks(path):
        if len(block) >= _MOST_EMPTY_LINES and not block.strip():
            problem = f"{len(block):,} bytes of empty lines from byte {offset}"
            raise ConfigError(f"{path}: {problem}; delete them")
        yield from io.StringIO(decode_utf8(path, block, offset))
        offset += len(block)


def stream_records(files: Sequence[Path], name: str) -> IterableDataset:
    """Open files of the format `name`, all but HDF5, as a dataset of records to stream."""
    from datasets import IterableDataset, load_dataset

    for file in files:
        check_pointer(file)
    if name not in _LIBRARY_FORMATS:
        # The library's readers name no line, guess types and drop columns.
        names = [str(file) for file in files]
        return IterableDataset.from_generator(
            _read_all_fields, gen_kwargs={"files": names, "name": name}
        )
    options: Any = {}
    if name == "parquet":
        options["batch_size"] = _PARQUET_BATCH_ROWS
    patterns = [glob.escape(str(file)) for file in files]
    return load_dataset(name, data_files=patterns, split="train", streaming=True, **options)


def _read_all_fields(files: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    for file in files:
        for record in read_records(Path(file), name):
            yield record.fields


def bar_of_files(
    what: str, files: Sequence[Path], file_format: str | None = None, *, hidden: bool = False
) -> tqdm[Any]:
    """Return a `progress_bar` that counts the bytes of `files`.

    Args:
        file_format: of all files; None = by suffix.
    """
    total = _text_bytes(files, file_format)
    return progress_bar(what, total, "B", unit_scale=True, hidden=hidden)


def _text_bytes(files: Sequence[Path], file_format: str | None) -> int | None:
    """Return the size of the text in `files`; None = unknown until they are read."""
    for path in files:
        if format_of(path, file_format) not in ("text", "jsonl") or is_compressed(path):
            return None
    return total_size(files)


def total_size(files: Sequence[Path]) -> int:
    """Return the bytes of `files`, without those that cannot be read: who reads them says why."""
    total = 0
    for path in files:
        with suppress(OSError):
            total += path.stat().st_size
    return total
