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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import TypedDict

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
_REMEDY = (
    "write the dataset again: python -m lm.prepare --overwrite; or if it is in the cache of runs,"
    " start the run again, which makes it again"
)


_Crc32c = Annotated[int, Field(ge=0, lt=2**32)]
Checksums = TypedDict(
    "Checksums", {".bin": _Crc32c, ".ends": _Crc32c, ".mask": NotRequired[_Crc32c]}
)
"""by the suffixes of files"""


class TokenIndex(BaseModel, frozen=True, extra="forbid"):
    """Contents of NAME.json: description of the other files."""

    format: Literal[1]
    tokenizer: str = Field(description="identity of the tokenizer")
    vocab_size: int = Field(gt=0, description="its ids")
    max_id: int = Field(ge=0, description="largest id in NAME.bin")
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"] = Field(
        description="of NAME.bin, little-endian; NAME.ends is uint64"
    )
    checksums: Checksums = Field(
        description="CRC-32C of each file; without a mask, all tokens are learned"
    )
    pairs: bool = Field(False, description="documents are the replies of pairs")
    has_bytes: bool = Field(True, description="the ids tell how many bytes of text they are")
    sources: list[str] = Field(description="inputs of `lm.prepare`, with their hashes")
    options: dict[str, bool | str | int | float | None] = Field(
        default_factory=dict, description="of `lm.prepare`"
    )


def read_index(path: Path) -> TokenIndex:
    """Read NAME.json."""
    try:
        return TokenIndex.model_validate_json(read_bytes(path, MAX_INDEX_BYTES))
    except OSError as error:
        advice = "write token files with python -m lm.prepare"
        raise ConfigError(f"{error.filename}: {error.strerror}; {advice}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "contents"
        problem = f"not the index of a token file: {field}: {first['msg']}"
        raise ConfigError(f"{path}: {problem}; {_REMEDY}") from None


class TokenFile:
    """The ids of a token file.

    They are read with pread: the page cache serves it like a memory map, and a file that is
    truncated during the run raises an error instead of SIGBUS. What the checksum of a large file
    was is remembered in the user's cache until it changes.

    Args:
        path: NAME.json.
        vocab_size: exclusive upper bound of the ids that may be read; None = all may.

    Raises:
        ConfigError: a file differs from its checksum or cannot be read, or has an id that may not
            be read.
    """

    def __init__(self, path: Path, vocab_size: int | None = None) -> None:
        self.index = read_index(path)
        self.path = path.with_suffix(".bin")
        problems = _find_damage(path, self.index, checksum)
        if problems:
            raise ConfigError(*problems)
        max_id = self.index.max_id
        if vocab_size is not None and max_id >= vocab_size:
            problem = f"id {max_id} is not less than vocab_size {vocab_size}"
            raise ConfigError(f"{self.path}: {problem}; set it to {self.index.vocab_size}")
        self.has_mask = ".mask" in self.index.checksums
        """whether it says which tokens are learned"""
        # They are written as unsigned, which NumPy would compare as floats.
        self.ends: NDArray[np.int64] = np.memmap(path.with_suffix(".ends"), "<i8", "r")
        """the position after the last token of each document"""
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._files: dict[str, int] = {}
        for suffix in self.index.checksums:
            self._files[suffix] = open_regular(path.with_suffix(suffix))
            weakref.finalize(self, os.close, self._files[suffix])

    def __len__(self) -> int:
        return self.index.tokens

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        start, stop, _ = positions.indices(len(self))
        n_bytes = self._dtype.itemsize
        content = self._read(".bin", start * n_bytes, stop * n_bytes)
        return np.frombuffer(content, self._dtype).astype(np.int64)

    def is_target(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether the tokens from `start` to `stop` are learned."""
        if not self.has_mask:
            return np.full(stop - start, True)
        first_byte = start // 8
        content = self._read(".mask", first_byte, math.ceil(stop / 8))
        bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little").view(np.bool_)
        offset = start % 8
        return bits[offset : offset + stop - start]

    def _read(self, suffix: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file."""
        content = os.pread(self._files[suffix], stop - start, start)
        if len(content) < stop - start:
            path = self.path.with_suffix(suffix)
            problem = f"ends at byte {start + len(content)}: it was truncated during the run"
            raise ConfigError(f"{path}: {problem}", rank_local=True)
        return content

    def fingerprint(self, of_documents: bool) -> str:
        """Return what identifies the tokens, and what is learned of them.

        Args:
            of_documents: whether that depends on where documents end.
        """
        sums = {suffix: f"{value:08x}" for suffix, value in self.index.checksums.items()}
        fingerprint = f"{len(self)} tokens, crc32c {sums['.bin']}"
        if of_documents:
            fingerprint += f", ends {sums['.ends']}"
        if self.has_mask:
            fingerprint += f", mask {sums['.mask']}"
        return fingerprint


def _find_damage(path: Path, index: TokenIndex, checksum: Callable[[Path], int]) -> list[str]:
    """Return a line for each file of a token file that differs from its checksum.

    Args:
        path: of one of the files.
        checksum: returns the CRC-32C of a file.
    """
    problems: list[str] = []
    for suffix, expected in index.checksums.items():
        file = path.with_suffix(suffix)
        try:
            if checksum(file) != expected:
                problem = f"damaged: differs from {file.stem}.json"
                problems.append(f"{file}: {problem}; {_REMEDY}")
        except OSError as error:
            problems.append(f"{file}: {error.strerror}; {_REMEDY}")
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
        problems += _find_damage(path, index, crc32c)
    if problems:
        raise RunError(*problems)
    return lines


def describe_split(path: Path, index: TokenIndex) -> str:
    """Return a line about a token file; `path` is its index."""
    tokens = f"{index.tokens:,} tokens ({index.dtype})"
    return f"{path.with_suffix('.bin')}: {tokens} in {format_count(index.documents, 'document')}"
