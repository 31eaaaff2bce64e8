"""Work that is done by several processes, with its results in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

from lm.data.worker import Worker
from lm.launch.machine import usable_cores

T = TypeVar("T")

_BYTES_PER_WORKER = 4 << 20
"""of input that a worker is started for: it takes 1 to 2 s to start"""
_REMEDY = "start the run on fewer cores, e.g. with taskset"


def count_workers(n_bytes: int) -> int:
    """Return how many processes share work on `n_bytes` of input."""
    return max(1, min(usable_cores(), n_bytes // _BYTES_PER_WORKER))


@dataclass(frozen=True)
class _Share(Iterable[Any]):
    """The results of every n-th job, and None at the end."""

    jobs: Iterable[Callable[[], Any]]
    number: int
    n_workers: int

    def __iter__(self) -> Iterator[Any]:
        for job in itertools.islice(self.jobs, self.number, None, self.n_workers):
            yield job()
        yield None


def run_in_order(jobs: Iterable[Callable[[], T]], n_workers: int) -> Generator[T]:
    """Yield the results of `jobs`, which each of the workers iterates over and does its share of.

    Args:
        jobs: the same in each process, to which pickle can send it. No result is None.
    """
    if n_workers == 1:
        for job in jobs:
            yield job()
        return
    with ExitStack() as stack:
        workers: list[Worker] = []
        for number in range(n_workers):
            worker = Worker(_Share(jobs, number, n_workers), "dataset", _REMEDY)
            workers.append(stack.enter_context(closing(worker)))
        for worker in itertools.cycle(workers):
            result = next(worker)
            if result is None:
                return
            yield result
