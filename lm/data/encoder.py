"""Encoding of documents by threads: the `tokenizers` library releases Python's global lock."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lm.data.token_writer import TokenChunk
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT
from lm.data.tokenizer.loading import ByteCheck, Tokenizer, end_text
from lm.errors import ConfigError, error_prefix

CHUNK_SIZE = 1 << 17
"""Characters after which a chunk is encoded; the library takes 120 bytes for each."""
CHUNKS_PER_THREAD = 3
"""Chunks that are encoded or wait to be written, for each thread."""


@dataclass(slots=True)
class Document:
    """The text of a document, or a part of it."""

    text: str
    size: int | None
    """bytes of input; None = those of the text"""
    place: str
    """in errors"""
    is_file: bool = False
    """a file of text, in which an end of text ends a document"""
    held_out: bool = False
    is_start: bool = True
    is_end: bool = True


@dataclass
class _TextChunk:
    held_out: bool
    parts: list[Document] = field(default_factory=list)
    n_characters: int = 0


def encode_in_threads(
    documents: Iterable[Document], tokenizer: Tokenizer, n_threads: int, n_skipped: int = 0
) -> Generator[TokenChunk]:
    """Yield the tokens of `documents`, each with an end-of-text token, in order for each split.

    The first `n_skipped` chunks are not encoded.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the threads has one core
    pool = ThreadPoolExecutor(n_threads)
    pending: deque[Future[TokenChunk]] = deque()
    try:
        for chunk in itertools.islice(_group_parts(documents), n_skipped, None):
            pending.append(pool.submit(_encode_chunk, chunk, tokenizer))
            if len(pending) > CHUNKS_PER_THREAD * n_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def split_document(
    document: Document, blocks: Iterable[str], tokenizer: Tokenizer
) -> Iterator[Document]:
    """Yield the parts of a document that are encoded one by one; the first one has its size.

    Args:
        blocks: of its text.
    """
    pieces = filter(None, tokenizer.split(blocks))
    piece = next(pieces, "")
    is_start = True
    while piece:
        following = next(pieces, "")
        size = document.size
        if size is None:
            size = len(piece.encode())
        elif not is_start:
            size = 0
        yield replace(document, text=piece, size=size, is_start=is_start, is_end=not following)
        is_start = False
        piece = following


def _group_parts(parts: Iterable[Document]) -> Iterator[_TextChunk]:
    """Yield chunks of at least `CHUNK_SIZE` characters, and what remains at the end."""
    chunks = {False: _TextChunk(held_out=False), True: _TextChunk(held_out=True)}
    for part in parts:
        chunk = chunks[part.held_out]
        chunk.parts.append(part)
        chunk.n_characters += len(part.text)
        if chunk.n_characters >= CHUNK_SIZE:
            yield chunk
            chunks[part.held_out] = _TextChunk(part.held_out)
    for chunk in chunks.values():
        if chunk.parts:
            yield chunk


def _encode_chunk(chunk: _TextChunk, tokenizer: Tokenizer) -> TokenChunk:
    check = ByteCheck()
    encoded: list[NDArray[np.uint32]] = []
    ends: list[int] = []
    n_tokens = 0
    for part in chunk.parts:
        with error_prefix(part.place):
            ids = _encode_part(part, tokenizer)
        check.add(tokenizer, part.text, ids, is_start=part.is_start)
        if part.is_end:
            ids = end_text(ids, tokenizer.eos_id)
        if part.is_file:
            inner_ends = n_tokens + 1 + np.flatnonzero(ids == tokenizer.eos_id)
            ends += inner_ends.tolist()
        elif part.is_end:
            ends.append(n_tokens + len(ids))
        encoded.append(ids)
        n_tokens += len(ids)
    ids = np.concatenate(encoded)
    size = sum(part.size or 0 for part in chunk.parts)
    return TokenChunk(ids, np.array(ends, np.int64), chunk.held_out, size, check.is_exact)


def _encode_part(part: Document, tokenizer: Tokenizer) -> NDArray[np.uint32]:
    if part.is_file and END_OF_TEXT in part.text:
        _check_end_of_text(tokenizer)
    if not part.is_start:
        return tokenizer.encode_piece(part.text)
    (ids,) = tokenizer.encode_batch([part.text])
    return ids


def _check_end_of_text(tokenizer: Tokenizer) -> None:
    """Raise ConfigError if what separates the documents of published files ends none here."""
    if tokenizer.encode_piece(END_OF_TEXT).tolist() != [tokenizer.eos_id]:
        problem = f"has {END_OF_TEXT}, which is not the end of text of this tokenizer"
        remedy = "use one that ends texts with it, or write each document as a line of JSON Lines"
        raise ConfigError(f"{problem}; {remedy}")
