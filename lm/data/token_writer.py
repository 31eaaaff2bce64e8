"""Writes token files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from lm.data.documents import bar_of_files
from lm.data.files import name_files
from lm.data.token_file import TokenIndex
from lm.data.tokenized import Options
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError
from lm.fileio import MAX_INDEX_BYTES, parse_json, read_bytes, sync, write_durably
from lm.launch.launch import is_rank0
from lm.units import format_count

SAVE_SECONDS = 60.0
"""of work that a kill can lose"""
_PROGRESS = ".progress.json"


@dataclass
class TokenChunk:
    """Tokens of documents of one split."""

    held_out: bool
    size: int = 0
    """bytes of input"""
    n_tokens: int = 0
    ids: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    """in parts, (tokens,)"""
    are_targets: list[NDArray[np.bool_]] = field(default_factory=list)
    """of each part, whether each token is learned; [] = all are"""
    ends: list[int] = field(default_factory=list)
    """the number of tokens up to the end of each document; the last document may continue in the
    next chunk"""
    has_bytes: bool = True
    """whether the ids tell how many bytes of text they are"""

    def add(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append tokens."""
        self.ids.append(ids)
        self.n_tokens += len(ids)


@dataclass
class _Written:
    """What a token file has, of which a part is written."""

    tokens: int = 0
    documents: int = 0
    max_id: int = 0
    bits: list[bool] = field(default_factory=list)
    """of the mask, which do not fill a byte yet"""
    has_bytes: bool = True


class TokenFileWriter:
    """Writer of the token file `name` in `directory`, which is complete with its index.

    Args:
        written: what the files have already; what follows that is deleted.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        tokenizer: Tokenizer,
        options: Options,
        written: _Written,
    ) -> None:
        self._path = directory / f"{name}.json"
        self._tokenizer = tokenizer
        self._options = options
        self.written = written
        self._dtype: Literal["uint16", "uint32"] = "uint16"
        if tokenizer.vocab_size > 2**16:
            self._dtype = "uint32"
        sizes = {
            ".bin": written.tokens * np.dtype(self._dtype).itemsize,
            ".ends": written.documents * 8,
        }
        if options.has_mask:
            sizes[".mask"] = written.tokens // 8
        self._files: dict[str, BinaryIO] = {}
        for suffix, size in sizes.items():
            self._files[suffix] = self._path.with_suffix(suffix).open("ab")
            self._files[suffix].truncate(size)

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        written = self.written
        ids = np.concatenate(chunk.ids)
        self._append(".bin", ids.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False))
        self._append(".ends", np.array(chunk.ends, "<u8") + np.uint64(written.tokens))
        if chunk.are_targets:
            bits = np.concatenate([np.array(written.bits, np.bool_), *chunk.are_targets])
            n_bits = len(bits) // 8 * 8
            self._append(".mask", np.packbits(bits[:n_bits], bitorder="little"))
            written.bits = bits[n_bits:].tolist()
        written.tokens += chunk.n_tokens
        written.documents += len(chunk.ends)
        written.max_id = max(written.max_id, int(ids.max(initial=0)))
        written.has_bytes = written.has_bytes and chunk.has_bytes

    def _append(self, suffix: str, values: NDArray[Any]) -> None:
        self._files[suffix].write(values.tobytes())

    def sync(self) -> None:
        """Return when what is written is on the disk."""
        for file in self._files.values():
            sync(file)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self) -> None:
        """Write the index."""
        if self.written.bits:
            bits = np.array(self.written.bits, np.bool_)
            self._append(".mask", np.packbits(bits, bitorder="little"))
        self.sync()
        self.close()
        contents = asdict(self.written)
        del contents["bits"]
        index = TokenIndex(
            format=1,
            tokenizer=self._tokenizer.identity,
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype,
            pairs=self._options.of_pairs,
            **contents,
        )
        write_durably(self._path, index.model_dump_json(indent=1).encode())


@dataclass
class _Progress:
    """How far the token files of a directory are written."""

    written: list[_Written]
    """of each split"""
    n_pieces: int = 0
    size: int = 0
    """bytes of input"""

    @classmethod
    def load(cls, directory: Path, n_splits: int) -> _Progress:
        """Return what a killed process has saved in the directory, else a start."""
        try:
            saved = parse_json(read_bytes(directory / _PROGRESS, MAX_INDEX_BYTES))
        except (OSError, ValueError):
            return cls([_Written() for _ in range(n_splits)])
        written = [_Written(**each) for each in saved.pop("written")]
        return cls(written, **saved)

    def save(self, directory: Path) -> None:
        write_durably(directory / _PROGRESS, json.dumps(asdict(self)).encode())


def write_splits(
    directory: Path,
    read: Callable[[int], Generator[Sequence[TokenChunk]]],
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: Options,
) -> None:
    """Write the token file of each split to `directory`, with a progress bar.

    Args:
        read: yields the tokens of `files` in pieces, without the first ones, whose number it is
            passed: those that a killed process has written to `directory`.

    Raises:
        ConfigError: a split has no documents.
    """
    with ExitStack() as stack:
        progress = _Progress.load(directory, len(options.splits))
        writers: list[TokenFileWriter] = []
        for name, written in zip(options.splits, progress.written, strict=True):
            writer = TokenFileWriter(directory, name, tokenizer, options, written)
            writers.append(stack.enter_context(closing(writer)))
        bar = bar_of_files("tokenizing", files, options.format, hidden=not is_rank0())
        stack.enter_context(bar)
        bar.update(progress.size)
        saved_at = time.monotonic()
        for chunks in stack.enter_context(closing(read(progress.n_pieces))):
            for chunk in chunks:
                writers[chunk.held_out].add(chunk)
                progress.size += chunk.size
                bar.update(chunk.size)
            progress.n_pieces += 1
            if time.monotonic() >= saved_at + SAVE_SECONDS:
                for writer in writers:
                    writer.sync()
                progress.save(directory)
                saved_at = time.monotonic()
        n_documents = sum(written.documents for written in progress.written)
        if n_documents == 0:
            raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
        for name, written in zip(options.splits, progress.written, strict=True):
            if written.documents == 0:
                problem = f"none of {format_count(n_documents, 'document')} is for {name}"
                separate = "name other data for validation (val_data), or another fraction"
                remedy = f"add data, {separate} (--validation-fraction)"
                raise ConfigError(f"{name_files(files)}: {problem}; {remedy}")
        (directory / _PROGRESS).unlink(missing_ok=True)
        for writer in writers:
            writer.finish()
