"""Encoding of documents by threads: the `tokenizers` library releases Python's global lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lm.data.tokenizer import ByteCheck, Tokenizer, encode_documents
from lm.prepare.readers import CHUNK_SIZE, Document, TokenChunk

CHUNKS_PER_THREAD = 3
"""Chunks that are encoded or wait to be written, for each thread."""


@dataclass
class _TextChunk:
    held_out: bool
    texts: list[str] = field(default_factory=list)
    size: int = 0
    """bytes of input"""


def encode_in_threads(
    documents: Iterable[Document], tokenizer: Tokenizer, n_threads: int
) -> Iterator[TokenChunk]:
    """Yield the tokens of `documents`, each with an end-of-text token, in order for each split.

    Encoding a chunk per thread, and not the documents of one chunk in parallel, keeps all threads
    busy where a chunk is a single long document.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the threads has one core
    pool = ThreadPoolExecutor(n_threads)
    pending: deque[Future[TokenChunk]] = deque()
    try:
        for chunk in _group_documents(documents):
            pending.append(pool.submit(_encode_chunk, chunk, tokenizer))
            if len(pending) > CHUNKS_PER_THREAD * n_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _group_documents(documents: Iterable[Document]) -> Iterator[_TextChunk]:
    """Yield chunks of at least `CHUNK_SIZE` bytes of input, and what remains at the end."""
    chunks = {False: _TextChunk(held_out=False), True: _TextChunk(held_out=True)}
    for document in documents:
        chunk = chunks[document.held_out]
        chunk.texts.append(document.text)
        chunk.size += document.size
        if chunk.size >= CHUNK_SIZE:
            yield chunk
            chunks[document.held_out] = _TextChunk(document.held_out)
    for chunk in chunks.values():
        if chunk.texts:
            yield chunk


def _encode_chunk(chunk: _TextChunk, tokenizer: Tokenizer) -> TokenChunk:
    check = ByteCheck()
    documents = encode_documents(tokenizer, chunk.texts, check)
    ids = np.concatenate(documents)
    ends = np.cumsum([len(document) for document in documents])
    return TokenChunk(ids, ends, chunk.held_out, chunk.size, check.is_exact)
