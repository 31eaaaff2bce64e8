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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from lm.data.signatures import check_pointer
from lm.data.tokenizer.files import TOKENIZER_FILES
from lm.errors import ConfigError, RunError
from lm.fileio import MAX_INDEX_BYTES, crc32c, open_regular, read_bytes
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


class SourceRecord(BaseModel, frozen=True, extra="forbid"):
    """An input of `python -m lm.prepare`: a file, or a dataset of the Hub by its name alone."""

    name: str
    bytes: int | None = Field(ge=0)
    crc32c: int | None = Field(ge=0, lt=2**32)


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
    options: dict[str, bool | str | int | float | None] = Field(
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
        unread: list[str] = []
        if self.ends is None:
            unread.append(".ends")
        problems = _find_damage(self.path, self.index, checksum, self._remedy, unread)
        if problems:
            raise ConfigError(*problems, rank_local=True)


def _find_damage(
    path: Path,
    index: TokenIndex,
    checksum: Callable[[Path], int],
    remedy: str,
    unread: Collection[str] = (),
) -> list[str]:
    """Return a line for each file of a token file that differs from its checksum.

    Args:
        path: of one of the files.
        checksum: returns the CRC-32C of a file.
        unread: suffixes of those that are not compared.
    """
    problems: list[str] = []
    for suffix, expected in index.checksums.items():
        if suffix in unread:
            continue
        file = path.with_suffix(suffix)
        try:
            if checksum(file) != expected:
                problem = f"damaged: differs from {file.stem}.json"
                problems.append(f"{file}: {problem}; {remedy}")
        except OSError as error:
            problems.append(f"{file}: {error.strerror}; {remedy}")
    return problems


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
        problems += _find_damage(path, index, crc32c, _REWRITE)
    if problems:
        raise RunError(*problems)
    return lines


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
