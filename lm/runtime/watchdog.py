"""Watchdog that names the rank for which a collective was waiting.

A collective that exceeds its timeout fails on the ranks that joined it and does not know which rank
did not. Of NCCL, it does not even fail there in time: the main thread waits for the GPU. So a
thread on every rank looks at the collectives that are pending there, and another one tells the
other ranks, by keys of the store, which does not answer while the process of rank 0 is stopped:

watchdog/RANK         heartbeat of each rank: its step, and whether it waits in a collective
watchdog/failed_step  step of a rank on which a collective timed out; a rank that has completed no
                      more steps, and does not wait in a collective, prints its stacks
watchdog/error        error that ended a rank, for the ranks that lose the connection to it

A rank on which a collective failed then reads the heartbeats twice. A rank whose heartbeats do not
increase is dead; of the live ones, those that do not wait did not join the collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from lm.errors import ConfigError, RunError
from lm.launch.console import record_error
from lm.runtime.failures import is_disconnection
from lm.runtime.flight_recorder import PendingCollectives

INTERVAL = 0.25
"""seconds between two looks"""
_MOST_HEARTBEATS = 200
"""within the timeout, but one a second, by which a failure is explained"""
MARGIN = 2.0
"""Seconds after the timeout in which the collective can raise its own error."""

_FAILED_STEP_KEY = "watchdog/failed_step"
_ERROR_KEY = "watchdog/error"

_TIMED_OUT = "Timed out waiting"
"""part of gloo's message"""

_SILENT = "which does not respond: stopped, killed or disconnected"
_UNKNOWN = "an unknown rank, as the store of rank 0 does not respond; see the errors of other ranks"


class Heartbeat(NamedTuple):
    """State that a rank publishes periodically."""

    step: int
    beats: int
    """increases as long as the rank is alive"""
    waiting: bool
    """a collective is pending on the rank, or has failed there"""


@dataclass
class Cause:
    """Why a collective failed on this rank."""

    problems: list[str]
    """one line each"""
    exit_code: int = RunError.exit_code
    """of the rank that caused it"""


class Watchdog:
    """Context manager around the run of one rank.

    Args:
        timeout: seconds after which a collective fails.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._interval = min(max(INTERVAL, timeout / _MOST_HEARTBEATS), 1.0)
        self._step = 0
        self._collective_pending = False
        self._collective_failed = False
        self._stacks_printed = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(target=self._publish_heartbeats, name="heartbeats", daemon=True),
        ]

    # While the run goes well, and when another rank waits for this one.

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            for thread in self._threads:
                thread.start()
        return self

    def on_step_start(self, step: int) -> None:
        """Record that this rank has completed `step` steps and starts the next one."""
        self._step = step

    def _watch(self) -> None:
        """Look at the pending collectives until the run ends on this rank.

        Asks no other process, so that the thread stands still only if this process does.
        """
        pending = PendingCollectives(check_after=self._timeout / 2)
        seconds_running = 0.0
        last_look = time.monotonic()
        while not self._stopped.wait(INTERVAL):
            now = time.monotonic()
            seconds_running += min(now - last_look, 4 * INTERVAL)  # more: this process was stopped
            last_look = now
            seconds_pending = pending.longest(seconds_running)
            self._collective_pending = seconds_pending > 0
            if self._collective_failed or self._stacks_printed:
                faulthandler.cancel_dump_traceback_later()
            else:
                # Takes effect if this thread stops running because one that hangs holds the GIL.
                faulthandler.dump_traceback_later(self._timeout + INTERVAL)
            if seconds_pending > self._timeout + MARGIN and not self._collective_failed:
                self._collective_failed = True
                self._end_process()
        faulthandler.cancel_dump_traceback_later()

    def _publish_heartbeats(self) -> None:
        """Publish heartbeats, and print the stacks once if asked, until the run ends here."""
        beats = 0
        while not self._stopped.is_set():
            with suppress(RuntimeError):  # of one request, or as rank 0 has exited
                store = cast(Any, self._store).clone()  # a connection serves one thread
                while not self._stopped.is_set():
                    waiting = self._collective_pending or self._collective_failed
                    if not waiting and not self._stacks_printed and self._is_waited_for(store):
                        self._print_stacks()
                        self._stacks_printed = True
                    beats += 1
                    heartbeat = Heartbeat(self._step, beats, waiting)
                    store.set(_heartbeat_key(self._rank), json.dumps(heartbeat))
                    self._stopped.wait(self._interval)
            self._stopped.wait(self._interval)

    def _is_waited_for(self, store: dist.Store) -> bool:
        if not store.check([_FAILED_STEP_KEY]):
            return False
        failed_step = int(store.get(_FAILED_STEP_KEY))
        return self._step <= failed_step

    def _print_stacks(self) -> None:
        """Print the stack of every thread but the watchdog's, the main thread's last."""
        frames = sys._current_frames()
        lines = [f"{self._where()}, stacks of its threads:\n"]
        for thread in reversed(threading.enumerate()):  # the main thread was the first to start
            if thread.ident in frames and thread not in self._threads:
                lines.append(f"thread {thread.name}:\n")
                lines += traceback.format_stack(frames[thread.ident])
        sys.stderr.write("".join(lines))
        sys.stderr.flush()

    def _where(self) -> str:
        return f"rank {self._rank} (last completed step {self._step})"

    # When this rank fails.

    def publish_error(self, error: RunError) -> None:
        """Publish the error that ends this rank, for the ranks that lose the connection to it."""
        if self._collective_failed:
            return  # another rank is the cause
        problems = [f"rank {self._rank}, which failed: {problem}" for problem in error.problems]
        cause = Cause(problems, error.exit_code)
        with suppress(RuntimeError):  # rank 0 has exited, and its store with it
            self._store.set(_ERROR_KEY, json.dumps(asdict(cause)))

    # When a collective fails on this rank.

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Stop; replace the error of a failed collective by a RunError that names the cause."""
        timed_out = _is_timeout(error)
        if self._size == 1 or not (timed_out or _is_lost_connection(error)):
            self._stopped.set()
            return
        self._collective_failed = True  # the next heartbeats say so
        explained = self._explain_failure(timed_out, error)
        self._stopped.set()
        raise explained from error

    def _end_process(self) -> None:
        """Print for what a collective waits that raises no error, and exit.

        In a thread: the main thread may wait for the GPU.
        """
        error = self._explain_failure(timed_out=True)
        record_error(error)
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    def _explain_failure(self, timed_out: bool, error: BaseException | None = None) -> RunError:
        """Return the error that names what a collective waited for, or lost.

        Args:
            error: of the collective; None = it raised none.
        """
        where = self._where()
        if self._stacks_printed:
            return RunError(
                f"{where}: other ranks waited for it longer than {self._timeout:g} s"
                " (collective_timeout) and ended; its stacks are printed above",
                rank_local=True,
            )
        cause = self._find_cause(timed_out)
        what = "lost the connection to"
        if timed_out:
            what = f"timed out after {self._timeout:g} s (collective_timeout) waiting for"
        problems = [f"{where}: {what} {problem}" for problem in cause.problems]
        if cause.exit_code == ConfigError.exit_code:
            return ConfigError(*problems, rank_local=True)
        if not timed_out and isinstance(error, dist.DistBackendError):  # which may be the cause
            _, _, reason = str(error).rpartition("Last error:")
            problems.append(f"{where}: NCCL: {' '.join(reason.split())}")
        return RunError(*problems, rank_local=True)

    def _find_cause(self, timed_out: bool) -> Cause:
        """Return the ranks that the collective waited for, or the error that ended another rank."""
        cause = Cause([f"rank 0, {_SILENT}"])
        # In a thread, because the store ignores its timeout while the process that hosts it is
        # stopped.
        thread = threading.Thread(target=self._ask_store, args=(timed_out, cause), daemon=True)
        thread.start()
        thread.join(6 * self._interval)
        return cause

    def _ask_store(self, timed_out: bool, cause: Cause) -> None:
        """Update `cause` after every answer of the store, which can end at any time."""
        with suppress(RuntimeError):
            store = cast(Any, self._store).clone()  # the main thread may use the other connection
            store.set_timeout(timedelta(seconds=2 * self._interval))
            if timed_out:
                store.set(_FAILED_STEP_KEY, str(self._step))
            before = self._read_heartbeats(store)
            cause.problems = [_UNKNOWN]
            if _read_published_error(store, cause):
                return  # the store may end now, with the rank that published it
            time.sleep(3 * self._interval)  # the heartbeats of a live rank increase
            cause.problems = [find_straggler(before, self._read_heartbeats(store))]
            _read_published_error(store, cause)

    def _read_heartbeats(self, store: dist.Store) -> list[Heartbeat]:
        # In one request: hundreds of ranks read hundreds of keys at once.
        texts = store.multi_get([_heartbeat_key(rank) for rank in range(self._size)])
        return [Heartbeat(*json.loads(text)) for text in texts]


def _read_published_error(store: dist.Store, cause: Cause) -> bool:
    """Make `cause` the error that ended another rank, if there is one."""
    if not store.check([_ERROR_KEY]):
        return False
    published = json.loads(store.get(_ERROR_KEY))
    cause.problems = published["problems"]
    cause.exit_code = published["exit_code"]
    return True


def _heartbeat_key(rank: int) -> str:
    return f"watchdog/{rank}"


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether `error` says that a collective of gloo or NCCL exceeded its timeout."""
    if isinstance(error, dist.DistBackendError) and "timeout" in str(error):
        return True
    return isinstance(error, RuntimeError) and _TIMED_OUT in str(error)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return whether `error` says that gloo or NCCL lost another rank."""
    if isinstance(error, dist.DistBackendError):  # of NCCL, whose text may name another cause
        return True
    return is_disconnection(error)


def find_straggler(before: list[Heartbeat], now: list[Heartbeat]) -> str:
    """Return the ranks that did not join a collective, in words.

    Args:
        before: the heartbeat of each rank, a few intervals earlier than `now`.
    """
    silent = []
    missing = []
    for rank, last in enumerate(now):
        if last.beats == before[rank].beats:
            silent.append(rank)
        if not last.waiting:
            missing.append(rank)
    if silent:
        return f"{_describe_ranks(silent, now)}, {_SILENT}"
    if missing:
        return f"{_describe_ranks(missing, now)}, which did not join; its stacks are printed"
    return "another rank: every rank waits in a collective, or for its GPU"


def _describe_ranks(ranks: list[int], now: list[Heartbeat]) -> str:
    step = now[ranks[0]].step
    if len(ranks) == 1:
        return f"rank {ranks[0]} (last completed step {step})"
    return f"each of ranks {ranks} (last completed step {step})"
