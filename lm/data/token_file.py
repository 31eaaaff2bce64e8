"""Token files: the ids of documents, and where each document ends.

    NAME.bin    the ids of all documents, concatenated: little-endian uint16, or uint32 if the
                vocabulary needs it
    NAME.ends   uint64: the position after the last token of each document in NAME.bin (tokens)
    NAME.json   `TokenIndex`: what both contain, their sources, and their checksums

The cache of a run has one for the text in each of its folders; `lm.prepare` writes train and
validation.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from lm.data.encoder import END_OF_TEXT, TokenChunk
from lm.data.signatures import check_pointer
from lm.data.tokenizer.files import TOKENIZER_FILES
from lm.errors import ConfigError, RunError
from lm.fileio import (
    MAX_INDEX_BYTES,
    crc32c,
    open_regular,
    read_bytes,
    sync,
    write_durably,
)
from lm.storage.cache import checksum
from lm.units import format_count

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
_SPLIT_FILES = ("train.bin", "train.ends", "train.json")
_SPLIT_FILES += ("validation.bin", "validation.ends", "validation.json")
OUTPUT_FILES = {*TOKENIZER_FILES, *_SPLIT_FILES}
_REWRITE = "write the dataset again: python -m lm.prepare --overwrite"
_WRITE_AGAIN = "write it again with python -m lm.prepare"


class SourceRecord(BaseModel, frozen=True, extra="forbid"):
    """An input file of `python -m lm.prepare`."""

    name: str
    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0, lt=2**32)


class TokenIndex(BaseModel, frozen=True, extra="forbid"):
    """Contents of NAME.json: description of NAME.bin and NAME.ends."""

    format: Literal[1]
    tokenizer: str | None = Field(description="identity of the tokenizer; null = unknown")
    vocab_size: int = Field(gt=0, description="exclusive upper bound of the ids")
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"] = Field(
        description="of NAME.bin, little-endian; NAME.ends is uint64"
    )
    crc32c: int = Field(ge=0, lt=2**32, description="of NAME.bin")
    ends_crc32c: int = Field(ge=0, lt=2**32, description="of NAME.ends")
    has_bytes: bool = Field(
        True, description="the ids tell how many bytes of text they are, if the tokenizer is known"
    )
    unread_ends: int = Field(
        0, ge=0, description="<|endoftext|> in the text that is not the tokenizer's end of text"
    )
    sources: list[SourceRecord]
    options: dict[str, str | int | float | None] = Field(
        default_factory=dict, description="of `lm.prepare`"
    )


def read_index(path: Path) -> TokenIndex:
    """Read NAME.json and check the size of NAME.bin."""
    tokens_path = path.with_suffix(".bin")
    try:
        content = read_bytes(path, MAX_INDEX_BYTES)
        check_pointer(path, content)
        index = TokenIndex.model_validate_json(content)
        size = tokens_path.stat().st_size
    except OSError as error:
        advice = "write token files with python -m lm.prepare"
        raise ConfigError(f"{error.filename}: {error.strerror}; {advice}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "contents"
        problem = f"not the index of a token file: {field}: {first['msg']}"
        raise ConfigError(f"{path}: {problem}") from None
    expected = index.tokens * np.dtype(index.dtype).itemsize
    if size != expected:
        check_pointer(tokens_path)
        problem = f"{size} bytes, but {index.tokens} tokens of {index.dtype} are {expected} bytes"
        advice = "the file is damaged or truncated; write it again with python -m lm.prepare"
        raise ConfigError(f"{tokens_path}: {problem}: {advice}")
    return index


class TokenFile:
    """The ids of a token file.

    They are read with pread: the page cache serves it like a memory map, and a file that is
    truncated during the run raises an error instead of SIGBUS.

    Args:
        path: NAME.json.
        vocab_size: exclusive upper bound of the ids that may be read; None = all may.
        with_ends: open NAME.ends, too.
        remedy: what to do if the files are damaged.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int | None = None,
        *,
        with_ends: bool = True,
        remedy: str = _WRITE_AGAIN,
    ) -> None:
        self.index = read_index(path)
        self.path = path.with_suffix(".bin")
        self._remedy = remedy
        self.ends: NDArray[np.int64] | None = None
        """the position after the last token of each document"""
        if with_ends:
            self.ends = self._open_ends()
        self._file = open_regular(self.path)
        weakref.finalize(self, os.close, self._file)
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self.index.tokens

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        start, stop, _ = positions.indices(len(self))
        token_bytes = self._dtype.itemsize
        offset = start * token_bytes
        n_bytes = (stop - start) * token_bytes
        content = os.pread(self._file, n_bytes, offset)
        if len(content) < n_bytes:
            problem = f"ends at byte {offset + len(content)}: it was truncated during the run"
            raise ConfigError(f"{self.path}: {problem}", rank_local=True)
        ids = np.frombuffer(content, self._dtype).astype(np.int64)
        if self._vocab_size is not None and ids.max() >= self._vocab_size:
            at = int(ids.argmax())
            place = f"{self.path}: byte {offset + at * token_bytes}"
            problem = f"id {ids[at]} is not less than vocab_size {self._vocab_size}"
            advice = f"set vocab_size to {self.index.vocab_size}"
            raise ConfigError(f"{place}: {problem}; {advice}", rank_local=True)
        return ids

    @property
    def may_exceed(self) -> bool:
        """Whether it may have ids that may not be read."""
        return self._vocab_size is not None and self.index.vocab_size > self._vocab_size

    def fingerprint(self) -> str:
        return f"{self.index.tokens} tokens, crc32c {self.index.crc32c:08x}"

    def _open_ends(self) -> NDArray[np.int64]:
        """Map NAME.ends; its checksum is compared with that of NAME.bin."""
        path = self.path.with_suffix(".ends")
        n_documents = self.index.documents
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; {self._remedy}") from None
        if size != 8 * n_documents:
            problem = f"{size} bytes, but the ends of {n_documents} documents are 8 bytes each"
            raise ConfigError(f"{path}: {problem}; {self._remedy}")
        return np.memmap(
            path, "<i8", "r"
        )  # written as unsigned, which NumPy would compare as floats

    def verify(self) -> None:
        """Compare the files with their checksums.

        A file is read once: what was intact is remembered in the user's cache until it changes.

        Raises:
            ConfigError: a file is damaged or cannot be read.
        """
        self._verify(self.path, self.index.crc32c)
        if self.ends is not None:
            self._verify(self.path.with_suffix(".ends"), self.index.ends_crc32c)

    def _verify(self, path: Path, expected: int) -> None:
        try:
            is_damaged = checksum(path) != expected
        except OSError as error:
            problem = f"{path}: {error.strerror}; {self._remedy}"
            raise ConfigError(problem, rank_local=True) from None
        if is_damaged:
            problem = f"damaged: differs from {path.stem}.json"
            raise ConfigError(f"{path}: {problem}; {self._remedy}", rank_local=True)


class _DraftFile:
    """A file that is being written, and the checksum of what it contains."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.crc32c = 0

    def write(self, values: NDArray[Any]) -> None:
        content = values.tobytes()
        self.file.write(content)
        self.crc32c = google_crc32c.extend(self.crc32c, content)


class TokenFileWriter:
    """Writer of the token file `name` in `directory`, which is complete with its index."""

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self.name = name
        self._directory = directory
        self._vocab_size = vocab_size
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._ids = _DraftFile(directory / f"{name}.bin")
        self._ends = _DraftFile(directory / f"{name}.ends")
        self.n_tokens = 0
        self.n_documents = 0
        self._has_bytes = True
        self._n_unread_ends = 0

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        little_endian = np.dtype(self._dtype).newbyteorder("<")
        self._ids.write(chunk.ids.astype(little_endian, copy=False))
        self._ends.write((chunk.ends + self.n_tokens).astype("<u8"))
        self.n_tokens += len(chunk.ids)
        self.n_documents += len(chunk.ends)
        self._has_bytes = self._has_bytes and chunk.has_bytes
        self._n_unread_ends += chunk.n_unread_ends

    def close(self) -> None:
        self._ids.file.close()
        self._ends.file.close()

    def finish(
        self,
        tokenizer: str | None,
        sources: Sequence[SourceRecord] = (),
        options: Mapping[str, Any] | None = None,
    ) -> TokenIndex:
        """Write and return the index."""
        sync(self._ids.file)
        sync(self._ends.file)
        self.close()
        index = TokenIndex(
            format=1,
            tokenizer=tokenizer,
            vocab_size=self._vocab_size,
            tokens=self.n_tokens,
            documents=self.n_documents,
            dtype=self._dtype,
            crc32c=self._ids.crc32c,
            ends_crc32c=self._ends.crc32c,
            has_bytes=self._has_bytes,
            unread_ends=self._n_unread_ends,
            sources=list(sources),
            options=dict(options or {}),
        )
        content = index.model_dump_json(indent=1).encode()
        write_durably(self._directory / f"{self.name}.json", content)
        return index


def describe_unread_ends(index: TokenIndex) -> list[str]:
    """Return a line if the text has ends of documents that the tokenizer does not read as such."""
    if index.unread_ends == 0:
        return []
    problem = f"{END_OF_TEXT} is {index.unread_ends:,} times in the text"
    cause = "which is not the end of text of this tokenizer, and ends no document"
    remedy = "use a tokenizer that has it, or write each document as a line of JSON Lines"
    return [f"{problem}, {cause}; {remedy}"]


def describe_split(path: Path, index: TokenIndex) -> str:
    """Return a line about a token file; `path` is its index."""
    tokens = f"{index.tokens:,} tokens ({index.dtype})"
    return f"{path.with_suffix('.bin')}: {tokens} in {format_count(index.documents, 'document')}"


def make_source_record(path: Path) -> SourceRecord:
    """Return what identifies the input file `path`."""
    name = os.fsencode(path).decode(errors="backslashreplace")  # file names need not be UTF-8
    return SourceRecord(name=name, bytes=path.stat().st_size, crc32c=crc32c(path.resolve()))


def verify_dataset(directory: Path) -> list[str]:
    """Compare the token files in `directory` with their checksums. Return a line for each split."""
    lines: list[str] = []
    problems: list[str] = []
    for split in SPLITS:
        path = directory / f"{split}.json"
        if split == VALIDATION and not path.exists():
            continue
        index = read_index(path)
        lines.append(f"{describe_split(path, index)}: verified")
        for suffix, expected in ((".bin", index.crc32c), (".ends", index.ends_crc32c)):
            file = path.with_suffix(suffix)
            if not file.exists():
                problems.append(f"{file}: is missing; {_REWRITE}")
            elif crc32c(file) != expected:
                problems.append(f"{file}: does not match its checksum; {_REWRITE}")
    if problems:
        raise RunError(*problems)
    return lines
