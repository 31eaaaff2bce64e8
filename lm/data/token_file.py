"""Token files: the ids of documents, where each ends, and which tokens are learned.

    NAME.bin    the ids of all documents, concatenated: little-endian uint16, or uint32 if the
                vocabulary needs it
    NAME.ends   uint64: the position after the last token of each document in NAME.bin (tokens)
    NAME.mask   of records: a bit for each token, from the lowest of each byte on, 1 = it is learned
    NAME.json   `TokenIndex`: what these contain

The manifest of their folder has their checksums, and says what they were made from.

A text is a document, so is a chat. A pair is two, each the prompt with a reply, the chosen one
first. Documents are whole: no length of a sequence cuts them.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from lm.data.tokenizer.files import TOKENIZER_FILES
from lm.errors import ConfigError
from lm.fileio import MAX_JSON_BYTES, describe_invalid, open_regular, read_bytes
from lm.storage.cache import checksum
from lm.storage.folder import MANIFEST, Manifest, read_manifest, recover

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
_SUFFIXES = (".bin", ".ends", ".mask", ".json")


def _files_of(splits: Iterable[str]) -> set[str]:
    return {f"{split}{suffix}" for split in splits for suffix in _SUFFIXES}


OUTPUT_FILES = {*TOKENIZER_FILES, *_files_of(SPLITS), MANIFEST}
_REMEDY = (
    "write the dataset again: python -m lm.prepare --overwrite; or if it is in the cache of runs,"
    " start the run again, which makes it again"
)


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
    pairs: bool = Field(False, description="documents are the replies of pairs")
    has_bytes: bool = Field(True, description="the ids tell how many bytes of text they are")


def read_index(path: Path) -> TokenIndex:
    """Read NAME.json."""
    try:
        return TokenIndex.model_validate_json(read_bytes(path, MAX_JSON_BYTES))
    except OSError as error:
        problem = error.strerror
    except ValidationError as error:
        problem = f"not the index of a token file: {describe_invalid(error)}"
    raise ConfigError(f"{path}: {problem}; {_REMEDY}")


class TokenFile:
    """The ids of a token file.

    They are read with pread: the page cache serves it like a memory map, and a file that is
    truncated during the run raises an error instead of SIGBUS.

    Args:
        path: NAME.json.
        manifest: that of its folder.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.index = read_index(path)
        self.path = path.with_suffix(".bin")
        self.made_from = manifest.made_from
        self._checksums: dict[str, str] = {}
        self._files: dict[str, int] = {}
        for suffix in (".bin", ".ends", ".mask"):
            file = path.with_suffix(suffix)
            if file.name in manifest.files:
                self._checksums[suffix] = f"{manifest.files[file.name].crc32c:08x}"
                self._files[suffix] = open_regular(file)
                weakref.finalize(self, os.close, self._files[suffix])
        self.has_mask = ".mask" in self._files
        """whether it says which tokens are learned; else all are"""
        # They are written as unsigned, which NumPy would compare as floats.
        self.ends: NDArray[np.int64] = np.memmap(path.with_suffix(".ends"), "<i8", "r")
        """the position after the last token of each document"""
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")

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
        sums = self._checksums
        fingerprint = f"{len(self)} tokens, crc32c {sums['.bin']}"
        if of_documents:
            fingerprint += f", ends {sums['.ends']}"
        if self.has_mask:
            fingerprint += f", mask {sums['.mask']}"
        return fingerprint


def find_token_files(directory: Path) -> Path:
    """Return `directory` if it has token files, after what a kill has left of it is put back."""
    recover(directory)
    if not (directory / MANIFEST).exists():
        problem = f"{directory} is not a directory of token files, as it has no {MANIFEST}"
        remedy = "name one of python -m lm.prepare, which replaces older ones with --overwrite"
        raise ConfigError(f"{problem}; {remedy}")
    return directory


def open_token_files(
    directory: Path, splits: Sequence[str], vocab_size: int | None = None
) -> list[TokenFile]:
    """Open token files of a directory, which are compared with its manifest, as is the tokenizer.

    What the checksum of a large file was is remembered in the user's cache until it changes.

    Args:
        vocab_size: exclusive upper bound of the ids that may be read; None = all may.

    Raises:
        ConfigError: a file is damaged, missing or cannot be read, or has an id that may not be
            read.
    """
    try:
        manifest = read_manifest(directory, checksum, _files_of({*SPLITS} - {*splits}))
    except ConfigError as error:
        raise ConfigError(f"{error}; {_REMEDY}") from None
    opened: list[TokenFile] = []
    for split in splits:
        if f"{split}.bin" not in manifest.files:
            remedy = "set val_data, or write the dataset again, python -m lm.prepare --overwrite"
            raise ConfigError(f"{directory}: {MANIFEST} has no {split}.bin; {remedy}")
        opened.append(TokenFile(directory / f"{split}.json", manifest))
    for file in opened:
        max_id = file.index.max_id
        if vocab_size is not None and max_id >= vocab_size:
            problem = f"id {max_id} is not less than vocab_size {vocab_size}"
            raise ConfigError(f"{file.path}: {problem}; use vocab_size={file.index.vocab_size}")
    return opened
