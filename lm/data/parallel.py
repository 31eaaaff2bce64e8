"""Work that is done by several processes, with its results in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

from lm.data.worker import FEWER_CORES, Worker
from lm.launch.machine import usable_cores

S = TypeVar("S")
T = TypeVar("T")

_BYTES_PER_WORKER = 4 << 20
"""of input that a worker is started for: it takes 1 to 2 s to start"""
_PENDING = 2
"""items that a worker has: one that it works on, and the next"""


def count_workers(n_bytes: int) -> int:
    """Return how many processes share work on `n_bytes` of input."""
    return max(1, min(usable_cores(), n_bytes // _BYTES_PER_WORKER))


def map_in_order(function: Callable[[S], T], items: Iterable[S], n_workers: int) -> Generator[T]:
    """Yield the result of `function` for each of `items`.

    This process iterates over the items, and workers take turns. Pickle must be able to send all
    three.
    """
    if n_workers == 1:
        yield from map(function, items)
        return
    with ExitStack() as stack:
        workers: list[Worker] = []
        for _ in range(n_workers):
            worker = Worker(partial(map, function), "dataset", FEWER_CORES)
            workers.append(stack.enter_context(closing(worker)))
        pending: deque[Worker] = deque()
        for item, worker in zip(items, itertools.cycle(workers), strict=False):
            if len(pending) == _PENDING * n_workers:
                yield next(pending.popleft())
            worker.send(item)
            pending.append(worker)
        while pending:
            yield next(pending.popleft())
