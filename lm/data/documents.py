"""Files of documents: one reader per format, for streams and for `lm.prepare`."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lm.data.blocks import check_pointer, decode_utf8, read_line_blocks
from lm.data.files import FORMATS, format_of, is_compressed
from lm.data.json_lines import Record, read_json_lines
from lm.data.progress import progress_bar
from lm.errors import ConfigError, error_text

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow import RecordBatch
    from tqdm import tqdm

RECORD_FORMATS = {
    name: suffixes for name, suffixes in FORMATS.items() if name not in ("text", "hdf5")
}
_ROWS_AT_ONCE = 1024
"""that are read from a Parquet file"""
_DIALECTS: dict[str, dict[str, Any]] = {
    "csv": {},
    "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
"""of the standard library's reader"""


def read_records(path: Path, name: str, field: str | None = None) -> Iterator[Record]:
    """Yield the records of a file of one of `RECORD_FORMATS`.

    Args:
        field: the column that is read of Parquet and Arrow files; None, or none of them = all.
    """
    match name:
        case "jsonl":
            yield from read_json_lines(path)
        case "csv" | "tsv":
            yield from _read_table(path, name)
        case _:
            yield from _read_columns(path, name, field)


def _read_table(path: Path, name: str) -> Iterator[Record]:
    """Read with the standard library: it knows line numbers, limits no field, guesses no types."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_read_text_lines(path), strict=True, **_DIALECTS[name])
    try:
        header = reader.fieldnames or []
        if reader.line_num > 0 and not header:
            raise ConfigError(f"{path}:1: is empty, and names no columns; delete the line")
        for column, count in Counter(header).items():
            if column and count > 1:
                problem = f"has {count} columns {column!r}; rename all but one"
                raise ConfigError(f"{path}:{reader.line_num}: {problem}")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():  # too many values, or too few
                problem = f"does not have the columns of the header, {', '.join(header)}"
                remedy = "quote text that contains what separates them; TSV has no quotes: use CSV"
                raise ConfigError(f"{place}: {problem}; {remedy}")
            yield Record(place, row, sum(map(len, row.values())))
    except csv.Error as error:
        problem = f"is not valid {name.upper()}: {error}"
        raise ConfigError(f"{path}:{reader.reader.line_num}: {problem}") from None


def _read_text_lines(path: Path) -> Iterator[str]:
    offset = 0
    for block in read_line_blocks(path):
        yield from io.StringIO(decode_utf8(path, block, offset))
        offset += len(block)


def _read_columns(path: Path, name: str, field: str | None) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file."""
    number = 0
    try:
        check_pointer(path)
        with path.open("rb") as file:
            for batch in _read_batches(file, name, field):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", row, batch.nbytes // len(batch))
    except (
        OSError,
        ValueError,
        KeyError,
        NotImplementedError,
    ) as error:  # pyarrow's errors are subclasses of these
        raise ConfigError(f"{path}: cannot be read as {name}: {error_text(error)}") from None


def _read_batches(file: BinaryIO, name: str, field: str | None) -> Iterator[RecordBatch]:
    """Yield the rows, with the column `field` only, if there is one."""
    import pyarrow
    from pyarrow import ipc, parquet

    if name == "parquet":
        opened = parquet.ParquetFile(file)
        columns = [field] if field in opened.schema_arrow.names else None
        yield from opened.iter_batches(_ROWS_AT_ONCE, columns=columns)
        return
    try:
        batches = iter(ipc.open_stream(file))  # as `datasets` writes
    except pyarrow.ArrowInvalid:
        opened = ipc.open_file(file)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
    for batch in batches:
        yield batch.select([field]) if field in batch.schema.names else batch


def stream_records(files: Sequence[Path], name: str, field: str | None) -> IterableDataset:
    """Open files of a format as a dataset of records to stream; see `read_records`.

    The readers of `datasets` name no line, guess types and drop columns.
    """
    from datasets import IterableDataset

    names = [str(file) for file in files]
    return IterableDataset.from_generator(
        _read_fields, gen_kwargs={"files": names, "name": name, "field": field}
    )


def _read_fields(files: Sequence[str], name: str, field: str | None) -> Iterator[dict[str, Any]]:
    for file in files:
        for record in read_records(Path(file), name, field):
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
