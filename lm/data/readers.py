"""Readers of documents: one generator per file format, and the ids in HDF5 files."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.blocks import check_pointer, read_text_blocks
from lm.data.documents import read_records
from lm.data.encoder import Document
from lm.data.files import format_of
from lm.data.json_lines import Record
from lm.data.record_fields import get_text
from lm.data.stream import read_once
from lm.data.token_writer import TokenChunk
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT
from lm.errors import ConfigError, error_prefix
from lm.launch.requirements import requires

IDS_AT_ONCE = 1 << 20
"""that are read from an HDF5 file"""
_FEW_DOCUMENTS = 1000
"""of which the share that is held out by content can be far from the fraction"""


class Text(NamedTuple):
    """The text of a document, which is read in blocks, as a file can be larger than the memory."""

    document: Document
    """without its text"""
    blocks: Callable[[], Iterator[str]]
    """of the text, from its start"""


def is_held_out(document: Iterable[bytes], fraction: float) -> bool:
    """Return whether a document, in blocks, is for validation, as `fraction` of all documents are.

    Its content decides it, neither its place nor other documents, so that equal ones stay together.
    """
    if fraction == 0:
        return False
    digest = hashlib.blake2b(digest_size=8)
    for block in document:
        digest.update(block)
    return int.from_bytes(digest.digest(), "big") < fraction * 2**64


def is_held_out_text(text: Text, fraction: float) -> bool:
    """Return whether a text is for validation; see `is_held_out`."""
    return is_held_out(map(str.encode, text.blocks()), fraction)


def split_text(text: Text, fraction: float) -> Iterator[Text]:
    """Yield a text without its last `fraction`, then that. No `END_OF_TEXT` is cut."""
    document = text.document
    n_characters = sum(map(len, text.blocks()))
    n_kept = n_characters - round(n_characters * fraction)
    first = max(0, n_kept - len(END_OF_TEXT) + 1)
    around_cut = "".join(_cut(text, first, n_kept + len(END_OF_TEXT) - 1))
    if END_OF_TEXT in around_cut:
        n_kept = first + around_cut.index(END_OF_TEXT) + len(END_OF_TEXT)
    if n_kept > 0:
        yield Text(document, partial(_cut, text, 0, n_kept))
    if n_kept < n_characters:
        size = None if document.size is None else 0  # the other part has it
        held_out = replace(document, size=size, held_out=True)
        yield Text(held_out, partial(_cut, text, n_kept, n_characters))


def _cut(text: Text, start: int, stop: int) -> Iterator[str]:
    """Yield the characters from `start` to `stop` of a text, in blocks."""
    position = 0
    for block in text.blocks():
        yield block[max(0, start - position) : max(0, stop - position)]
        position += len(block)


def splits_by_content(documents: Iterable[tuple[int, bool]], fraction: float) -> bool:
    """Return whether documents are held out by their content, and not by their place.

    They are if this holds out at least half, and at most twice, of `fraction` of the data, or if
    there are `_FEW_DOCUMENTS`; more are not read.

    Args:
        documents: the size of each, and whether it is held out by its content.
    """
    held_out_size = 0
    total_size = 0
    n_documents = 0
    for size, held_out in itertools.islice(documents, _FEW_DOCUMENTS):
        if held_out:
            held_out_size += size
        total_size += size
        n_documents += 1
    expected = total_size * fraction
    return n_documents == _FEW_DOCUMENTS or expected / 2 <= held_out_size <= 2 * expected


def read_documents(paths: Iterable[Path], override: str | None, field: str) -> Iterator[Text]:
    """Yield the documents of files of any format but HDF5 in order, without empty ones.

    Args:
        override: the format of all files; None: by suffix.
        field: column or key of the text.
    """
    for path in paths:
        name = format_of(path, override)
        if name != "text":
            for record in read_records(path, str(name), field):
                yield from _read_field(record, field)
            continue
        document = Document("", None, str(path), is_file=True)
        text = Text(document, partial(read_text_blocks, path))
        if any(text.blocks()):
            yield text


def read_dataset(where: str, split: str, name: str | None, field: str) -> Iterator[Text]:
    """Yield the documents of a dataset of the Hub, without empty ones; see `open_documents`."""
    for number, fields in enumerate(read_once(where, "INPUT", split, name, field)):
        record = Record(f"{where}: record {number}", fields, len(str(fields)))
        yield from _read_field(record, field)


def _read_field(record: Record, field: str) -> Iterator[Text]:
    """Yield the text of a record, unless it is empty."""
    with error_prefix(record.place):
        text = get_text(record.fields, field, "--text-field")
    if text:
        yield Text(Document("", record.size, record.place), partial(iter, (text,)))


def read_ids(path: Path, vocab_size: int, eos_id: int) -> Iterator[TokenChunk]:
    """Yield the ids in `input_ids` of an HDF5 file: (samples, tokens), all below `vocab_size`.

    Consecutive samples are parts of one sequence. A document ends at an end-of-text id and at the
    end of the file; repeated end-of-text ids, which pad short samples, count as one.
    """
    try:
        import h5py
    except ImportError:
        raise ConfigError(f"{path}: {requires('h5py')}") from None
    check_pointer(path)
    previous_id = eos_id  # as between documents
    try:
        with h5py.File(path) as file:
            for ids in _read_samples(path, _open_ids(path, file), vocab_size):
                ids = _without_repeated(ids, eos_id, previous_id)
                if len(ids) > 0:
                    ends = np.flatnonzero(ids == eos_id) + 1
                    yield TokenChunk(False, ids.nbytes, len(ids), [ids], ends=ends.tolist())
                    previous_id = int(ids[-1])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as HDF5: {error}") from None
    if previous_id != eos_id:  # the last document has no end yet
        yield TokenChunk(False, 0, 1, [np.array([eos_id])], ends=[1])


def _open_ids(path: Path, file: Any) -> Any:
    """Return the dataset `input_ids`, which is in this file."""
    import h5py

    data = file.get("input_ids")
    if not isinstance(data, h5py.Dataset) or data.ndim != 2 or data.dtype.kind not in "iu":
        problem = "has no input_ids, integers of shape (samples, tokens)"
        raise ConfigError(f"{path}: {problem}; write them, or choose another file")
    link = file.get("input_ids", getlink=True)
    if not isinstance(link, h5py.HardLink) or data.is_virtual or data.external:
        problem = "input_ids is a link, a virtual dataset or stored outside this file"
        raise ConfigError(f"{path}: {problem}; write it into this file")
    return data


def _read_samples(path: Path, data: Any, vocab_size: int) -> Iterator[NDArray[np.integer[Any]]]:
    """Yield the ids of one sample, or of several consecutive ones, as one array."""
    n_samples, sample_length = data.shape
    n_at_once = max(1, IDS_AT_ONCE // max(1, sample_length))
    for first in range(0, n_samples, n_at_once):
        samples = data[first : first + n_at_once]
        is_wrong = (samples < 0) | (samples >= vocab_size)
        if is_wrong.any():
            row, column = np.argwhere(is_wrong)[0]
            place = f"{path}: sample {first + row}, token {column}"
            problem = f"id {samples[row, column]} is not below the vocabulary size, {vocab_size}"
            advice = "choose the tokenizer that the file was made with"
            raise ConfigError(f"{place}: {problem}; {advice}")
        yield samples.ravel()


def _without_repeated(
    ids: NDArray[np.integer[Any]], eos_id: int, previous_id: int
) -> NDArray[np.integer[Any]]:
    """Return `ids`, which follow `previous_id`, without each `eos_id` that follows another."""
    is_end = ids == eos_id
    follows_end = np.concatenate([[previous_id == eos_id], is_end[:-1]])
    return ids[~(is_end & follows_end)]
