"""Token files: the ids of documents, where each ends, and which tokens are learned.

    NAME.bin    the ids of all documents, concatenated: little-endian uint16, or uint32 if the
                vocabulary needs it
    NAME.ends   uint64: the position after the last token of each document in NAME.bin (tokens)
    NAME.mask   of records: a bit for each token, from the lowest of each byte on, 1 = it is learned
    NAME.json   `TokenIndex`: what these contain, their sources, and their checksums

A text is a document, so is a chat. A pair is two, each the prompt with a reply, the chosen one
first. Documents are whole: no length of a sequence cuts them.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

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
_SUFFIXES = (".bin", ".ends", ".mask", ".json")
_SPLIT_FILES = {f"{split}{suffix}" for split in SPLITS for suffix in _SUFFIXES}
OUTPUT_FILES = {*TOKENIZER_FILES, *_SPLIT_FILES}
END_OF_TEXT = "<|endoftext|>"
"""what separates the documents in published files of text"""
_REWRITE = "write the dataset again: python -m lm.prepare --overwrite"
_WRITE_AGAIN = "write it again with python -m lm.prepare"


@dataclass(slots=True)
class TokenChunk:
    """Tokens of documents of one split."""

    ids: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]
    """the position in `ids` after the last token of each document; the last document may continue
    in the next chunk"""
    held_out: bool
    size: int
    """bytes of input"""
    has_bytes: bool = True
    """whether the ids tell how many bytes of text they are"""
    n_unread_ends: int = 0
    """times that files of text have `END_OF_TEXT`, which is not the tokenizer's end of text"""
    is_target: NDArray[np.bool_] | None = None
    """of each token, whether it is learned; None = all are"""
    notes: Mapping[str, int] = field(default_factory=dict)
    """see `RecordRenderer`"""


class SourceRecord(BaseModel, frozen=True, extra="forbid"):
    """An input file of `python -m lm.prepare`."""

    name: str
    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0, lt=2**32)


class TokenIndex(BaseModel, frozen=True, extra="forbid"):
    """Contents of NAME.json: description of the other files."""

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
    mask_crc32c: int | None = Field(
        None, ge=0, lt=2**32, description="of NAME.mask; null = there is none, all is learned"
    )
    pairs: bool = Field(False, description="documents are the replies of pairs")
    has_bytes: bool = Field(
        True, description="the ids tell how many bytes of text they are, if the tokenizer is known"
    )
    unread_ends: int = Field(
        0, ge=0, description="<|endoftext|> in the text that is not the tokenizer's end of text"
    )
    notes: dict[str, int] = Field(
        default_factory=dict, description="how many records were read otherwise than they are"
    )
    sources: list[SourceRecord]
    options: dict[str, str | int | float | None] = Field(
        default_factory=dict, description="of `lm.prepare`"
    )

    @property
    def checksums(self) -> dict[str, int]:
        """The CRC-32C of each file, by its suffix."""
        checksums = {".bin": self.crc32c, ".ends": self.ends_crc32c}
        if self.mask_crc32c is not None:
            checksums[".mask"] = self.mask_crc32c
        return checksums


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
        with_ends: open NAME.ends, too; it is of a file with a mask.
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
        self.has_mask = self.index.mask_crc32c is not None
        """whether it says which tokens are learned"""
        self._remedy = remedy
        self.ends: NDArray[np.int64] | None = None
        """the position after the last token of each document"""
        if with_ends or self.has_mask:
            self.ends = self._open_ends()
        self._file = self._open(self.path)
        self._mask: int | None = None
        if self.has_mask:
            self._mask = self._open(self.path.with_suffix(".mask"))
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

    def is_target(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether the tokens from `start` to `stop` are learned."""
        if self._mask is None:
            return np.full(stop - start, True)
        first_byte = start // 8
        n_bytes = math.ceil(stop / 8) - first_byte
        content = os.pread(self._mask, n_bytes, first_byte)
        if len(content) < n_bytes:
            path = self.path.with_suffix(".mask")
            problem = f"ends at byte {first_byte + len(content)}: it was truncated during the run"
            raise ConfigError(f"{path}: {problem}", rank_local=True)
        bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little").view(np.bool_)
        offset = start % 8
        return bits[offset : offset + stop - start]

    def fingerprint(self) -> str:
        """Return what identifies the tokens, and their documents if some are not learned."""
        index = self.index
        fingerprint = f"{index.tokens} tokens, crc32c {index.crc32c:08x}"
        if index.mask_crc32c is None:
            return fingerprint
        return f"{fingerprint}, ends {index.ends_crc32c:08x}, mask {index.mask_crc32c:08x}"

    def _open(self, path: Path) -> int:
        try:
            file = open_regular(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; {self._remedy}") from None
        weakref.finalize(self, os.close, file)
        return file

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
        # They are written as unsigned, which NumPy would compare as floats.
        return np.memmap(path, "<i8", "r")

    def verify(self) -> None:
        """Compare the files with their checksums.

        A file is read once: what was intact is remembered in the user's cache until it changes.

        Raises:
            ConfigError: a file is damaged or cannot be read.
        """
        for suffix, expected in self.index.checksums.items():
            is_open = suffix != ".ends" or self.ends is not None
            if is_open:
                self._verify(self.path.with_suffix(suffix), expected)

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
    """Writer of the token file `name` in `directory`, which is complete with its index.

    Args:
        has_mask: chunks say which tokens are learned.
        pairs: documents are the replies of pairs.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        vocab_size: int,
        *,
        has_mask: bool = False,
        pairs: bool = False,
    ) -> None:
        self.name = name
        self._directory = directory
        self._vocab_size = vocab_size
        self._pairs = pairs
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._ids = _DraftFile(directory / f"{name}.bin")
        self._ends = _DraftFile(directory / f"{name}.ends")
        self._mask: _DraftFile | None = None
        if has_mask:
            self._mask = _DraftFile(directory / f"{name}.mask")
        self._bits = np.empty(0, np.bool_)
        """of the mask, which do not fill a byte yet"""
        self.n_tokens = 0
        self.n_documents = 0
        self._has_bytes = True
        self._n_unread_ends = 0
        self._notes: Counter[str] = Counter()

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        little_endian = np.dtype(self._dtype).newbyteorder("<")
        self._ids.write(chunk.ids.astype(little_endian, copy=False))
        self._ends.write((chunk.ends + self.n_tokens).astype("<u8"))
        if chunk.is_target is not None:
            assert self._mask is not None
            bits = np.concatenate([self._bits, chunk.is_target])
            n_written = len(bits) // 8 * 8
            self._mask.write(np.packbits(bits[:n_written], bitorder="little"))
            self._bits = bits[n_written:]
        self.n_tokens += len(chunk.ids)
        self.n_documents += len(chunk.ends)
        self._has_bytes = self._has_bytes and chunk.has_bytes
        self._n_unread_ends += chunk.n_unread_ends
        self._notes.update(chunk.notes)

    def close(self) -> None:
        for draft in (self._ids, self._ends, self._mask):
            if draft is not None:
                draft.file.close()

    def finish(
        self,
        tokenizer: str | None,
        sources: Sequence[SourceRecord] = (),
        options: Mapping[str, Any] | None = None,
    ) -> TokenIndex:
        """Write and return the index."""
        mask_crc32c: int | None = None
        if self._mask is not None:
            self._mask.write(np.packbits(self._bits, bitorder="little"))
            mask_crc32c = self._mask.crc32c
            sync(self._mask.file)
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
            mask_crc32c=mask_crc32c,
            pairs=self._pairs,
            has_bytes=self._has_bytes,
            unread_ends=self._n_unread_ends,
            notes=self._notes,
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
        for suffix, expected in index.checksums.items():
            file = path.with_suffix(suffix)
            if not file.exists():
                problems.append(f"{file}: is missing; {_REWRITE}")
            elif crc32c(file) != expected:
                problems.append(f"{file}: does not match its checksum; {_REWRITE}")
    if problems:
        raise RunError(*problems)
    return lines
