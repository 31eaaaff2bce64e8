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

from lm.data.tokenizer import load_tokenizer
from lm.prepare.readers import CHUNK, Document, TokenChunk
from lm.prepare.token_writer import id_dtype

Split = Callable[[str], list[tuple[str, bool]]]
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
        self, documents: Iterable[Document], tokenizer: str, split: Split, folder: Path
    ) -> Iterator[tuple[int, TokenChunk]]:
        """Yield the tokens of all documents in order, with their bytes of input; `folder` is for temporary files."""
        pending: deque[tuple[int, Path, Future[list[bool]]]] = deque()
        for number, (size, texts) in enumerate(_chunks(documents)):
            path = folder / f"{number}.part"
            pending.append((size, path, self.submit(_encode_chunk, path, texts, tokenizer, split)))
            if len(pending) > self._max_pending:
                yield from _read_results(*pending.popleft())
        while pending:
            yield from _read_results(*pending.popleft())


def _chunks(documents: Iterable[Document]) -> Iterator[tuple[int, list[str]]]:
    """Yield the bytes of input and the texts of consecutive documents of at least `CHUNK` bytes; the last are fewer."""
    texts, size = list[str](), 0
    for document in documents:
        texts.append(document.text)
        size += document.size
        if size >= CHUNK:
            yield size, texts
            texts, size = [], 0
    if texts:
        yield size, texts


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


_tokenizer = functools.cache(load_tokenizer)


def _encode_chunk(path: Path, texts: list[str], tokenizer_name: str, split: Split) -> list[bool]:
    """Write the tokens of `texts`, each with an end-of-text token, to `path`, by split. Return the splits.

    A file, because a worker killed while it writes megabytes to the pool's pipe leaves the reader waiting for the rest.
    """
    tokenizer = _tokenizer(tokenizer_name)
    documents: dict[bool, list[Any]] = {}
    parts = [part for text in texts for part in split(text)]
    for (_, held_out), ids in zip(parts, tokenizer.encode_batch([text for text, _ in parts]), strict=True):
        ended = ids if tokenizer.eos_id in ids[-1:] else np.append(ids, np.uint32(tokenizer.eos_id))
        documents.setdefault(held_out, []).append(ended)
    content = io.BytesIO()  # np.save to a file does not report a full disk
    for ended in documents.values():
        np.save(content, np.concatenate(ended, dtype=id_dtype(tokenizer.vocab_size), casting="unsafe"))
        np.save(content, np.cumsum(list(map(len, ended))))
    path.write_bytes(content.getbuffer())
    return list(documents)


def _read_results(size: int, path: Path, splits: Future[list[bool]]) -> Iterator[tuple[int, TokenChunk]]:
    names = splits.result()
    with path.open("rb") as file:
        for held_out in names:
            yield size, TokenChunk(np.load(file), np.load(file), held_out)
            size = 0
    path.unlink()
