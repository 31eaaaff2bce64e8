"""Token files: written as drafts, installed all at once, and verified by their checksums.

    NAME.bin    the ids of all documents, concatenated: little-endian uint16, or uint32 if the
                vocabulary needs it
    NAME.ends   uint64: the position after the last token of each document in NAME.bin (tokens)
    NAME.json   `TokenIndex`: what both contain, their sources, and their checksums

NAME is train or validation. A directory with train.json is a complete dataset: installing moves
train.json last, and replacing a dataset deletes it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from lm.data.encoder import TokenChunk
from lm.data.tokenizer import TOKENIZER_FILES
from lm.data.tokens import SourceRecord, TokenIndex, read_index
from lm.errors import RunError
from lm.fileio import crc32c, sync, sync_directory, write_durably

DRAFTS = ".drafts"
"""Directory of files that are being written."""
READY = ".ready"
"""Directory of complete files that are being installed."""
LOCK = "lock"
TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
_SPLIT_FILES = ("train.bin", "train.ends", "train.json")
_SPLIT_FILES += ("validation.bin", "validation.ends", "validation.json")
OUTPUT_FILES = {LOCK, *TOKENIZER_FILES, *_SPLIT_FILES}
_REWRITE = "write the dataset again: python -m lm.prepare --overwrite"


class _DraftFile:
    """A file that is being written, and the checksum of what it contains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.crc32c = 0

    def write(self, values: NDArray[Any]) -> None:
        content = values.tobytes()
        self._file.write(content)
        self.crc32c = google_crc32c.extend(self.crc32c, content)

    def close(self) -> None:
        with self._file:
            sync(self._file)


class SplitWriter:
    """Writer of the draft of the split `name` of the dataset in `directory`."""

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self.name = name
        self._directory = directory
        self._vocab_size = vocab_size
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._ids = _DraftFile(directory / DRAFTS / f"{name}.bin")
        self._ends = _DraftFile(directory / DRAFTS / f"{name}.ends")
        self.n_tokens = 0
        self.n_documents = 0
        self._has_bytes = True

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        little_endian = np.dtype(self._dtype).newbyteorder("<")
        self._ids.write(chunk.ids.astype(little_endian, copy=False))
        self._ends.write((chunk.ends + self.n_tokens).astype("<u8"))
        self.n_tokens += len(chunk.ids)
        self.n_documents += len(chunk.ends)
        self._has_bytes = self._has_bytes and chunk.has_bytes

    def finish(
        self, tokenizer: str | None, sources: Sequence[SourceRecord], options: Mapping[str, Any]
    ) -> str:
        """Write the index, after which the draft is complete. Return a line about the split."""
        self._ids.close()
        self._ends.close()
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
            sources=list(sources),
            options=dict(options),
        )
        name = f"{self.name}.json"
        content = index.model_dump_json(indent=1).encode()
        write_durably(self._directory / DRAFTS / name, content)
        return describe_split(self._directory / name, index)


def install_dataset(directory: Path) -> None:
    """Replace the dataset in `directory` by the one in `READY`, if any.

    Finishes what a killed process has started.
    """
    ready = directory / READY
    if ready.is_symlink() or not ready.is_dir():
        return
    # The index of the training data says that a dataset is complete: deleted first, moved last.
    first = f"{TRAIN}.bin"
    last = [f"{VALIDATION}.json", f"{TRAIN}.json"]
    new = {path.name for path in ready.iterdir()}
    if first in new:  # nothing has been moved yet, so the directory holds the old dataset
        others = OUTPUT_FILES - {LOCK, *last}
        for name in [*reversed(last), *sorted(others)]:
            (directory / name).unlink(missing_ok=True)
    others = new - {first, *last}
    for name in [first, *sorted(others), *last]:
        if name in new:
            (ready / name).rename(directory / name)
    ready.rmdir()
    sync_directory(directory)


def describe_split(path: Path, index: TokenIndex) -> str:
    """Return a line about a token file; `path` is its index."""
    tokens = f"{index.tokens:,} tokens ({index.dtype})"
    return f"{path.with_suffix('.bin')}: {tokens} in {index.documents:,} documents"


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
        for suffix, checksum in ((".bin", index.crc32c), (".ends", index.ends_crc32c)):
            file = path.with_suffix(suffix)
            if not file.exists():
                problems.append(f"{file}: is missing; {_REWRITE}")
            elif crc32c(file) != checksum:
                problems.append(f"{file}: does not match its checksum; {_REWRITE}")
    if problems:
        raise RunError(*problems)
    return lines
