"""Token files: written as drafts, put in place all at once, and compared with their checksums later.

    NAME.bin    every document's ids in one row, little-endian uint16, or uint32 where the vocabulary needs it
    NAME.ends   uint64: the position in it (tokens) behind each document's last token
    NAME.json   `TokenIndex`: what both hold, what they were made of, and their checksums

NAME is train or validation. Drafts lie in a folder of their own; train.json is put in place last, and where a
dataset is replaced it is the first to go, so a folder that holds one is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from lm.data.tokenizer import FILES, Tokenizer
from lm.data.tokens import SourceRecord, TokenIndex, read_index
from lm.errors import RunError
from lm.fileio import crc32c, sync, sync_folder, write_durably
from lm.prepare.readers import TokenChunk, id_type

DRAFTS, READY = ".drafts", ".ready"
"""Folders of files that are being written, and that are all written and only have to be put in place."""
LOCK = "lock"
TRAIN, VALIDATION = "train", "validation"
OUTPUT = {LOCK, *FILES, *(f"{side}.{suffix}" for side in (TRAIN, VALIDATION) for suffix in ("bin", "ends", "json"))}


class _Side:
    """The drafts of NAME.bin and NAME.ends, and what NAME.json will say of them."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self.tokens = self.documents = self.crc32c = self.ends_crc32c = 0
        self._dtype = dtype
        self._bin = (folder / f"{name}.bin").open("wb")
        self._ends = (folder / f"{name}.ends").open("wb")

    def add(self, part: TokenChunk) -> None:
        ids = part.ids.astype(self._dtype, copy=False).tobytes()
        ends = (part.ends + self.tokens).astype("<u8").tobytes()
        self._bin.write(ids)
        self._ends.write(ends)
        self.crc32c = google_crc32c.extend(self.crc32c, ids)
        self.ends_crc32c = google_crc32c.extend(self.ends_crc32c, ends)
        self.tokens += len(part.ids)
        self.documents += len(part.ends)

    def close(self) -> None:
        for file in (self._bin, self._ends):
            with file:
                sync(file)


class DatasetWriter:
    """Writes one dataset into `folder`, of which the caller holds the lock.

    Args:
        vocab_size: ids are below it.
        sides: TRAIN, or both.
    """

    def __init__(self, folder: Path, vocab_size: int, sides: Sequence[str]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self.drafts = folder / DRAFTS
        self._sides = {name: _Side(self.drafts, name, id_type(vocab_size)) for name in sides}

    def add(self, part: TokenChunk) -> None:
        self._sides[VALIDATION if part.held_out else TRAIN].add(part)

    def documents(self) -> dict[str, int]:
        """How many there are so far, by side."""
        return {name: side.documents for name, side in self._sides.items()}

    def commit(
        self,
        tokenizer: Tokenizer | None,
        sources: Sequence[SourceRecord],
        options: Mapping[str, str | int | float | None],
    ) -> list[str]:
        """Put the drafts in place. Returns a line of what is there now for each side."""
        files = dict(tokenizer.files) if tokenizer else {}
        lines = []
        for name, side in self._sides.items():
            side.close()
            index = TokenIndex(
                format=1,
                tokenizer=tokenizer and tokenizer.identity,
                vocab_size=self._vocab_size,
                tokens=side.tokens,
                documents=side.documents,
                dtype="uint16" if id_type(self._vocab_size).itemsize == 2 else "uint32",
                crc32c=side.crc32c,
                ends_crc32c=side.ends_crc32c,
                sources=list(sources),
                options=dict(options),
            )
            files[f"{name}.json"] = index.model_dump_json(indent=1).encode()
            lines.append(describe(self._folder / f"{name}.json", index))
        for name, content in files.items():
            write_durably(self.drafts / name, content)
        self.drafts.rename(self._folder / READY)
        install(self._folder)
        return lines


def install(folder: Path) -> None:
    """Put a complete set of drafts in place of the dataset in `folder`. A second call finishes what a kill cut off."""
    ready = folder / READY
    if not ready.is_dir():
        return
    first, last = f"{TRAIN}.bin", [f"{VALIDATION}.json", f"{TRAIN}.json"]
    names = {path.name for path in ready.iterdir()}
    if first in names:  # nothing was moved yet, and what is there is the old one's
        for name in (*reversed(last), *sorted(OUTPUT - {LOCK, *last})):
            (folder / name).unlink(missing_ok=True)
    for name in (first, *sorted(names - {first, *last}), *last):
        if name in names:
            (ready / name).rename(folder / name)
    ready.rmdir()
    sync_folder(folder)


def is_output(path: Path, folder: Path) -> bool:
    """Whether `path` is, or is to become, a file of the dataset in `folder`; both resolved."""
    return path.parent == folder and path.name in OUTPUT


def clean_drafts(folder: Path) -> Path:
    """An empty folder for drafts, whatever an earlier process left there."""
    remove_drafts(folder)
    (folder / DRAFTS).mkdir()
    return folder / DRAFTS


def remove_drafts(folder: Path) -> None:
    shutil.rmtree(folder / DRAFTS, ignore_errors=True)


def describe(path: Path, index: TokenIndex) -> str:
    return f"{path.with_suffix('.bin')}: {index.tokens:,} tokens ({index.dtype}) in {index.documents:,} documents"


def source(path: Path) -> SourceRecord:
    """What tells the input file `path` from another."""
    name = os.fsencode(path).decode(errors="backslashreplace")  # a name need not be UTF-8
    return SourceRecord(name=name, bytes=path.stat().st_size, crc32c=crc32c(path))


def verify(folder: Path) -> list[str]:
    """Compare the token files in `folder` with the checksums that were taken of what was written.

    Returns:
        A line for each of both sides that is there.

    Raises:
        ConfigError: there is no dataset, or its index is broken.
        RunError: a file is not what was written.
    """
    said, problems = [], []
    for name in (TRAIN, VALIDATION):
        path = folder / f"{name}.json"
        if name == VALIDATION and not path.exists():
            continue
        index = read_index(path)
        for suffix, checksum in ((".bin", index.crc32c), (".ends", index.ends_crc32c)):
            file = path.with_suffix(suffix)
            if not file.exists() or crc32c(file) != checksum:
                what = "is not what was written" if file.exists() else "is missing"
                problems.append(f"{file}: {what}; write the dataset anew with python -m lm.prepare --overwrite")
        said.append(f"{describe(path, index)}: whole")
    if problems:
        raise RunError(*problems)
    return said
