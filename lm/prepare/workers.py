"""Worker processes that encode documents."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.tokenizer import encode_documents, load_tokenizer
from lm.prepare.readers import CHUNK, Document, TokenChunk
from lm.prepare.token_writer import id_dtype

CHUNKS_PER_WORKER = 3
"""Chunks that are encoded or wait to be written, for each worker."""


class WorkerPool(ProcessPoolExecutor):
    """Processes that end with this one, however it ends, and that Ctrl-C does not interrupt."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, multiprocessing.get_context("spawn"), _start_worker)
        self._max_pending = CHUNKS_PER_WORKER * workers

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule a call; see `concurrent.futures.Executor.submit`."""
        resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process started here inherits the mask
        try:
            return super().submit(function, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def encode(
        self, documents: Iterable[Document], tokenizer: str, directory: Path
    ) -> Iterator[tuple[int, TokenChunk]]:
        """Yield the tokens of all documents in order, with their bytes of input; `directory` is for temporary files."""
        pending: deque[tuple[int, bool, Path, Future[None]]] = deque()
        for number, (size, held_out, texts) in enumerate(_chunks(documents)):
            path = directory / f"{number}.part"
            pending.append((size, held_out, path, self.submit(_encode_chunk, path, texts, tokenizer)))
            if len(pending) > self._max_pending:
                yield _read_result(*pending.popleft())
        while pending:
            yield _read_result(*pending.popleft())


def _chunks(documents: Iterable[Document]) -> Iterator[tuple[int, bool, list[str]]]:
    """Yield the bytes of input, the split and the texts of documents: at least `CHUNK` bytes, at the end fewer."""
    texts, sizes = [list[str](), list[str]()], [0, 0]
    for text, size, held_out in documents:
        texts[held_out].append(text)
        sizes[held_out] += size
        if sizes[held_out] >= CHUNK:
            yield sizes[held_out], held_out, texts[held_out]
            texts[held_out], sizes[held_out] = [], 0
    yield from ((sizes[held_out], held_out, texts[held_out]) for held_out in (False, True) if texts[held_out])


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


_tokenizer = functools.cache(load_tokenizer)


def _encode_chunk(path: Path, texts: list[str], tokenizer_name: str) -> None:
    """Write the tokens of `texts`, each with an end-of-text token, to `path`.

    A file, because a worker killed while it writes megabytes to the pool's pipe leaves the reader waiting for the rest.
    """
    tokenizer = _tokenizer(tokenizer_name)
    documents = encode_documents(tokenizer, texts)
    content = io.BytesIO()  # np.save to a file does not report a full disk
    np.save(content, np.concatenate(documents, dtype=id_dtype(tokenizer.vocab_size), casting="unsafe"))
    np.save(content, np.cumsum(list(map(len, documents))))
    path.write_bytes(content.getbuffer())


def _read_result(size: int, held_out: bool, path: Path, written: Future[None]) -> tuple[int, TokenChunk]:
    written.result()
    with path.open("rb") as file:
        chunk = TokenChunk(np.load(file), np.load(file), held_out)
    path.unlink()
    return size, chunk
