"""Writes token files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from lm.data.documents import bar_of_files
from lm.data.files import name_files
from lm.data.token_file import SourceRecord, TokenIndex
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError
from lm.fileio import sync, write_durably
from lm.launch.launch import is_rank0
from lm.units import format_count


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
        tokenizer: Tokenizer,
        *,
        has_mask: bool = False,
        pairs: bool = False,
    ) -> None:
        self._index_path = directory / f"{name}.json"
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._dtype: Literal["uint16", "uint32"] = "uint16"
        if tokenizer.vocab_size > 2**16:
            self._dtype = "uint32"
        self._ids = _DraftFile(directory / f"{name}.bin")
        self._ends = _DraftFile(directory / f"{name}.ends")
        self._mask: _DraftFile | None = None
        if has_mask:
            self._mask = _DraftFile(directory / f"{name}.mask")
        self._bits = np.empty(0, np.bool_)
        """of the mask, which do not fill a byte yet"""
        self._n_tokens = 0
        self.n_documents = 0
        self._has_bytes = True
        self._n_unread_ends = 0
        self._notes: Counter[str] = Counter()

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`."""
        little_endian = np.dtype(self._dtype).newbyteorder("<")
        self._ids.write(chunk.ids.astype(little_endian, copy=False))
        self._ends.write((chunk.ends + self._n_tokens).astype("<u8"))
        if chunk.is_target is not None:
            assert self._mask is not None
            bits = np.concatenate([self._bits, chunk.is_target])
            n_written = len(bits) // 8 * 8
            self._mask.write(np.packbits(bits[:n_written], bitorder="little"))
            self._bits = bits[n_written:]
        self._n_tokens += len(chunk.ids)
        self.n_documents += len(chunk.ends)
        self._has_bytes = self._has_bytes and chunk.has_bytes
        self._n_unread_ends += chunk.n_unread_ends
        self._notes.update(chunk.notes)

    def close(self) -> None:
        for draft in (self._ids, self._ends, self._mask):
            if draft is not None:
                draft.file.close()

    def finish(self, sources: Sequence[SourceRecord], options: Mapping[str, Any]) -> TokenIndex:
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
            tokenizer=self._tokenizer.identity,
            vocab_size=self._tokenizer.vocab_size,
            tokens=self._n_tokens,
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
            options=dict(options),
        )
        write_durably(self._index_path, index.model_dump_json(indent=1).encode())
        return index


def write_splits(
    directory: Path,
    splits: Sequence[str],
    chunks: Generator[TokenChunk],
    tokenizer: Tokenizer,
    files: Sequence[Path],
    sources: Sequence[SourceRecord],
    options: Mapping[str, Any],
    *,
    file_format: str | None = None,
    has_mask: bool = False,
    pairs: bool = False,
) -> list[TokenIndex]:
    """Write the token file of each split to `directory`, with a progress bar. Return their indexes.

    Args:
        splits: their names; the second is held out.
        chunks: the tokens of `files`.
        options: what the indexes say.
        file_format: of all files; None = by suffix.

    Raises:
        ConfigError: a split has no documents.
    """
    with ExitStack() as stack:
        writers: list[TokenFileWriter] = []
        for name in splits:
            writer = TokenFileWriter(directory, name, tokenizer, has_mask=has_mask, pairs=pairs)
            writers.append(stack.enter_context(closing(writer)))
        bar = bar_of_files("tokenizing", files, file_format, hidden=not is_rank0())
        progress = stack.enter_context(bar)
        for chunk in stack.enter_context(closing(chunks)):
            writers[chunk.held_out].add(chunk)
            progress.update(chunk.size)
        counts = [writer.n_documents for writer in writers]
        if sum(counts) == 0:
            raise ConfigError(f"{name_files(files)}: no text; use files that are not empty")
        for name, count in zip(splits, counts, strict=True):
            if count == 0:
                problem = f"{format_count(sum(counts), 'document')} leave none for {name}"
                separate = "name other data for validation (val_data), or another fraction"
                remedy = f"add data, {separate} (--validation-fraction)"
                raise ConfigError(f"{name_files(files)}: {problem}; {remedy}")
        return [writer.finish(sources, options) for writer in writers]
