"""Processes that read data ahead, or tokenize them.

A worker ends when the process that started it ends, even by SIGKILL, and even while the worker
itself starts.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from queue import Queue
from threading import Thread
from typing import Any

from lm.errors import ConfigError, RunError
from lm.launch.process import die_with_parent
from lm.launch.signals import STOP_SIGNALS

_GRACE_SECONDS = 30
"""How long a worker runs after SIGTERM."""
_PREFETCHED = 4
"""Items that a worker prepares ahead."""
FEWER_CORES = "start the run on fewer cores, e.g. with taskset"
"""what to do if the memory of the workers that share work runs out"""
_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)
"""Signals that a scheduler or a terminal sends to every process of a job."""


class Worker(Iterator[Any]):
    """A process that yields what a function makes of what is sent to it.

    Args:
        function: of an iterator over what is sent; pickle must be able to send it.
        key: the hyperparameter that errors name.
        remedy: what to do if memory runs out.

    It is not one of multiprocessing: those import the main program before they could ask the kernel
    to end with it, and their queues have semaphores in /dev/shm.
    """

    def __init__(
        self,
        function: Callable[[Iterator[Any]], Iterable[Any]],
        key: str = "data_workers",
        remedy: str = "lower data_workers",
    ) -> None:
        self._key = key
        self._remedy = remedy
        self._connection, its_end = Pipe()
        arguments = [str(os.getpid()), str(its_end.fileno())]
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        variables["USE_TORCH"] = "0"  # `datasets` imports PyTorch otherwise
        # Blocked until the worker ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lm.data.worker", *arguments],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        its_end.close()
        self.send(function)

    def send(self, item: Any) -> None:
        """Send an item, or wait until the worker reads the one before."""
        try:
            self._connection.send_bytes(pickle.dumps(item))
        except OSError:
            raise self._killed() from None

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            ConfigError, RunError, OSError: the function raised it.
            RunError: the worker was killed.
        """
        try:
            item = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._killed() from None
        if isinstance(item, Exception):
            raise item
        return item

    def _killed(self) -> RunError:
        code = self._process.wait()
        ended = f"ended with code {code}"
        if code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
        problem = f"{self._key}: a data worker {ended}; if memory ran out, {self._remedy}"
        return RunError(problem, rank_local=True)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def call_in_worker(module: str, function: str, *arguments: Any) -> Any:
    """Return what a function returns in a new process, which alone imports its module."""
    with closing(Worker(partial(map, _call), "dataset", FEWER_CORES)) as worker:
        worker.send((module, function, arguments))
        return next(worker)


def _call(call: tuple[str, str, Sequence[Any]]) -> Any:
    module, function, arguments = call
    return getattr(importlib.import_module(module), function)(*arguments)


def main() -> None:
    """Run a worker, whose arguments are the process that started it and a descriptor."""
    parent, descriptor = map(int, sys.argv[1:])
    # The rank may need one more item before it saves and exits.
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(parent, signal.SIGKILL)
    connection = Connection(descriptor)
    received = _receive(connection)
    function = next(received)  # imports what the function needs, for seconds
    ahead: Queue[Any] = Queue(_PREFETCHED)
    Thread(target=_send, args=(ahead, connection), daemon=True).start()
    try:
        for item in function(received):
            ahead.put(item)
    except (ConfigError, RunError, OSError) as error:
        ahead.put(error)
    ahead.join()


def _receive(connection: Connection) -> Iterator[Any]:
    with suppress(EOFError, OSError):  # the rank has ended
        while True:
            yield pickle.loads(connection.recv_bytes())


def _send(ahead: Queue[Any], connection: Connection) -> None:
    while True:
        item = ahead.get()
        try:
            connection.send_bytes(pickle.dumps(item))
        except OSError:
            os._exit(0)  # the rank has ended
        ahead.task_done()


if __name__ == "__main__":
    main()
