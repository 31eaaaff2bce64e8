"""Documents to tokens in worker processes: how they begin and end, and what they do."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.prepare import readers
from lm.prepare.readers import Chunk, TokenChunk, held_out, id_type, split


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes that start as they are needed, and end with this one, whatever ends it."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextmanager
def ctrl_c_left_to_this_process() -> Iterator[None]:
    """Processes that start in here never hear of it: they take over which signals are blocked."""
    resource_tracker.ensure_running()  # which unblocks it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_tokenizer = functools.cache(load_tokenizer)


def tokenise(chunk: Chunk, tokenizer_name: str, fraction: float) -> list[TokenChunk]:
    """The tokens of a chunk, each document that ends in it behind an end-of-text token, by side.

    Raises:
        ConfigError: a document in it cannot be read.
    """
    tokenizer = _tokenizer(tokenizer_name)
    dtype = id_type(tokenizer.vocab_size)
    texts = [text for text in chunk.read() if text]
    short = [text for text in texts if len(text) <= 2 * readers.CHUNK]
    encoded = iter(tokenizer.encode_serially(short, opening=chunk.opens))
    pieces: tuple[list[Any], list[Any]] = ([], [])
    ends: tuple[list[int], list[int]] = ([], [])
    counts = [0, 0]
    for text in texts:
        side = side_of(text, chunk, fraction)
        ids = [next(encoded)] if len(text) <= 2 * readers.CHUNK else _encode_long(tokenizer, text, chunk)
        if chunk.closes and tokenizer.end_of_text not in ids[-1][-1:]:
            ids.append(np.array([tokenizer.end_of_text], np.uint32))
        pieces[side].extend(ids)
        counts[side] += sum(map(len, ids))
        if chunk.closes:
            ends[side].append(counts[side])
    return [
        TokenChunk(np.concatenate(pieces[side], dtype=dtype, casting="unsafe"), np.array(ends[side], np.int64), side)
        for side in (False, True)
        if pieces[side]
    ]


def tokenise_into(path: Path, chunk: Chunk, tokenizer_name: str, fraction: float) -> list[bool]:
    """As `tokenise`, into a file that `read_parts` reads. Returns the side of each part.

    What a worker returns goes through a pipe, and one that is killed in the middle of megabytes leaves the
    reader waiting for the rest; a few bytes are there all at once or not at all.
    """
    parts = tokenise(chunk, tokenizer_name, fraction)
    content = io.BytesIO()  # on a real file np.save does not say that the disk is full
    for part in parts:
        np.save(content, part.ids)
        np.save(content, part.ends)
    path.write_bytes(content.getbuffer())
    return [part.held_out for part in parts]


def read_token_chunks(path: Path, sides: list[bool]) -> list[TokenChunk]:
    """What `tokenise_into` wrote; removes the file."""
    with path.open("rb") as file:
        parts = [TokenChunk(np.load(file), np.load(file), side) for side in sides]
    path.unlink()
    return parts


def _encode_long(tokenizer: Tokenizer, text: str, chunk: Chunk) -> list[Any]:
    size = readers.CHUNK
    pieces = split((text[at : at + size] for at in range(0, len(text), size)), tokenizer.splits_at, chunk.name)
    return [tokenizer.encode_serially([piece], opening=chunk.opens and not at)[0] for at, piece in enumerate(pieces)]


def side_of(text: str, chunk: Chunk, fraction: float) -> bool:
    """Whether a document in `chunk` is held out."""
    if chunk.held_out is not None:
        return chunk.held_out
    return bool(fraction) and held_out(text.encode(), fraction)
