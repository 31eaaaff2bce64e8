"""Encoding of documents by threads: the `tokenizers` library releases Python's global lock."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lm.data.token_writer import TokenChunk
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT
from lm.data.tokenizer.loading import Tokenizer, end_text
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


def encode_in_threads(
    parts: Iterable[Document], tokenizer: Tokenizer, n_threads: int, n_skipped: int = 0
) -> Generator[list[TokenChunk]]:
    """Yield the tokens of parts of documents, each with an end-of-text token, in order.

    The first `n_skipped` chunks are not encoded.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the threads has one core
    pool = ThreadPoolExecutor(n_threads)
    pending: deque[Future[list[TokenChunk]]] = deque()
    try:
        for chunk in itertools.islice(_group_parts(parts), n_skipped, None):
            pending.append(pool.submit(_encode_parts, chunk, tokenizer))
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
    seen = ""
    while piece:
        if document.is_file:
            seen += piece
            if END_OF_TEXT in seen:
                with error_prefix(document.place):
                    _check_end_of_text(tokenizer)
            seen = seen[-len(END_OF_TEXT) :]  # of which the next piece may have the rest
        following = next(pieces, "")
        size = document.size
        if size is None:
            size = len(piece.encode())
        elif not is_start:
            size = 0
        yield replace(document, text=piece, size=size, is_start=is_start, is_end=not following)
        is_start = False
        piece = following


def _group_parts(parts: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield parts that have together at least `CHUNK_SIZE` characters, and what remains."""
    chunk: list[Document] = []
    n_characters = 0
    for part in parts:
        chunk.append(part)
        n_characters += len(part.text)
        if n_characters >= CHUNK_SIZE:
            yield chunk
            chunk = []
            n_characters = 0
    if chunk:
        yield chunk


def _encode_parts(parts: Sequence[Document], tokenizer: Tokenizer) -> list[TokenChunk]:
    """Return the tokens of each split that has parts."""
    chunks: dict[bool, TokenChunk] = {}
    for part in parts:
        chunk = chunks.setdefault(part.held_out, TokenChunk(part.held_out))
        with error_prefix(part.place):
            ids = _encode_part(part, tokenizer)
        if chunk.has_bytes:
            chunk.has_bytes = tokenizer.tells_bytes(part.text, ids, is_start=part.is_start)
        if part.is_end:
            ids = end_text(ids, tokenizer.eos_id)
        if part.is_file:
            inner_ends = chunk.n_tokens + 1 + np.flatnonzero(ids == tokenizer.eos_id)
            chunk.ends += inner_ends.tolist()
        elif part.is_end:
            chunk.ends.append(chunk.n_tokens + len(ids))
        chunk.add(ids)
        chunk.size += part.size or 0
    return list(chunks.values())


def _encode_part(part: Document, tokenizer: Tokenizer) -> NDArray[np.uint32]:
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
