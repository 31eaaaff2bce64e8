"""Token files: written as drafts, installed all at once, and verified by their checksums.

    NAME.bin    the ids of all documents, concatenated: little-endian uint16, or uint32 if the vocabulary needs it
    NAME.ends   uint64: the position after the last token of each document in NAME.bin (tokens)
    NAME.json   `TokenIndex`: what both contain, their sources, and their checksums

NAME is train or validation. A directory with train.json is a complete dataset: installing moves train.json last, and
replacing a dataset deletes it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from lm.data.tokenizer import FILES
from lm.data.tokens import SourceRecord, TokenIndex, read_index
from lm.errors import RunError
from lm.fileio import crc32c, sync, sync_directory, write_durably
from lm.prepare.readers import TokenChunk

DRAFTS, READY = ".drafts", ".ready"
"""Directories of files that are being written, and of complete files that are being installed."""
LOCK = "lock"
SPLITS = TRAIN, VALIDATION = "train", "validation"
OUTPUT = {LOCK, *FILES, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "ends", "json"))}


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which ids below `vocab_size` are stored."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class SplitWriter:
    """Writer of the draft of the split `name` of the dataset in `directory`; all ids are below `vocab_size`."""

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self._directory, self._name = directory, name
        self._vocab_size, self._dtype = vocab_size, id_dtype(vocab_size)
        self._files = [(directory / DRAFTS / f"{name}.{suffix}").open("wb") for suffix in ("bin", "ends")]
        self._checksums = [0, 0]
        self.n_tokens = self.n_documents = 0

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        ids, ends = chunk.ids.astype(self._dtype, copy=False), (chunk.ends + self.n_tokens).astype("<u8")
        for i, content in enumerate((ids.tobytes(), ends.tobytes())):
            self._files[i].write(content)
            self._checksums[i] = google_crc32c.extend(self._checksums[i], content)
        self.n_tokens += len(chunk.ids)
        self.n_documents += len(chunk.ends)

    def finish(self, tokenizer: str | None, sources: Sequence[SourceRecord], options: Mapping[str, Any]) -> str:
        """Write the index, after which the draft is complete. Return a description of the token file."""
        for file in self._files:
            with file:
                sync(file)
        index = TokenIndex(
            format=1,
            tokenizer=tokenizer,
            vocab_size=self._vocab_size,
            tokens=self.n_tokens,
            documents=self.n_documents,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            crc32c=self._checksums[0],
            ends_crc32c=self._checksums[1],
            sources=list(sources),
            options=dict(options),
        )
        name = f"{self._name}.json"
        write_durably(self._directory / DRAFTS / name, index.model_dump_json(indent=1).encode())
        return describe(self._directory / name, index)


def install(directory: Path) -> None:
    """Replace the dataset in `directory` by the one in `READY`, if any; finish what a killed process has started."""
    ready = directory / READY
    if ready.is_symlink() or not ready.is_dir():
        return
    first, last = f"{TRAIN}.bin", [f"{VALIDATION}.json", f"{TRAIN}.json"]
    names = {path.name for path in ready.iterdir()}
    if first in names:  # nothing has been moved yet, so the directory holds the old dataset
        for name in (*reversed(last), *sorted(OUTPUT - {LOCK, *last})):
            (directory / name).unlink(missing_ok=True)
    for name in (first, *sorted(names - {first, *last}), *last):
        if name in names:
            (ready / name).rename(directory / name)
    ready.rmdir()
    sync_directory(directory)


def describe(path: Path, index: TokenIndex) -> str:
    """Return a line about a token file; `path` is its index."""
    return f"{path.with_suffix('.bin')}: {index.tokens:,} tokens ({index.dtype}) in {index.documents:,} documents"


def source_record(path: Path) -> SourceRecord:
    """Return what identifies the input file `path`."""
    name = os.fsencode(path).decode(errors="backslashreplace")  # file names need not be UTF-8
    return SourceRecord(name=name, bytes=path.stat().st_size, crc32c=crc32c(path.resolve()))


def verify(directory: Path) -> list[str]:
    """Compare the token files in `directory` with their checksums. Return a line for each split."""
    lines, problems = [], []
    for path in (directory / f"{split}.json" for split in SPLITS):
        if path.stem == VALIDATION and not path.exists():
            continue
        index = read_index(path)
        lines.append(f"{describe(path, index)}: verified")
        for suffix, checksum in ((".bin", index.crc32c), (".ends", index.ends_crc32c)):
            file = path.with_suffix(suffix)
            if not file.exists() or crc32c(file) != checksum:
                what = "does not match its checksum" if file.exists() else "is missing"
                problems.append(f"{file}: {what}; write the dataset again: python -m lm.prepare --overwrite")
    if problems:
        raise RunError(*problems)
    return lines
