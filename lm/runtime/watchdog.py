"""Watchdog that names the rank for which a failed collective was waiting.

A collective that exceeds its timeout fails on the ranks that joined it and does not know which rank
did not. So the ranks tell each other, by keys of the store:

watchdog/RANK         heartbeat of each rank: its step, and whether a collective failed there
watchdog/failed_step  step of a rank on which a collective timed out; a rank that has completed no
                      more steps, and on which none failed, prints its stack
watchdog/error        error that ended a rank, for the ranks that lose the connection to it

A rank on which a collective failed then reads the heartbeats twice. A rank whose heartbeats do not
increase is dead; of the live ones, those without a failed collective did not join it.
"""

from __future__ import annotations

import faulthandler
import json
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

HEARTBEAT_INTERVAL = 0.25
"""seconds"""

_FAILED_STEP_KEY = "watchdog/failed_step"
_ERROR_KEY = "watchdog/error"

_TIMED_OUT = "Timed out waiting"
"""part of gloo's message"""
_DISCONNECTED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)
"""parts of gloo's messages"""

_SILENT = "which does not respond: stopped, killed or disconnected"
_UNKNOWN = "an unknown rank, as the store of rank 0 does not respond; see the errors of other ranks"


class Heartbeat(NamedTuple):
    """State that a rank publishes periodically."""

    step: int
    beats: int
    """increases as long as the rank is alive"""
    collective_failed: bool
    stack_printed: bool
    """this is the last heartbeat of the rank, which is alive"""


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
        self._step = 0
        self._collective_failed = False
        self._stopped = threading.Event()

    # While the run goes well, and when another rank asks for the stack.

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            threading.Thread(target=self._publish_heartbeats, name="watchdog", daemon=True).start()
        return self

    def on_step_start(self, step: int) -> None:
        """Record that this rank has completed `step` steps and starts the next one."""
        self._step = step

    def _publish_heartbeats(self) -> None:
        """Publish heartbeats until the run ends on this rank, or its stack is printed."""
        store = cast(Any, self._store).clone()  # a connection to the store serves one thread
        beats = 0
        stack_printed = False
        with suppress(RuntimeError):  # rank 0 has exited, and its store with it
            while not self._stopped.is_set() and not stack_printed:
                beats += 1
                if not self._collective_failed:
                    # Takes effect if this thread stops running because a thread that hangs holds
                    # the GIL.
                    faulthandler.dump_traceback_later(self._timeout + HEARTBEAT_INTERVAL)
                    if self._is_asked_for_stack(store):
                        self._print_stack()
                        stack_printed = True
                heartbeat = Heartbeat(self._step, beats, self._collective_failed, stack_printed)
                store.set(_heartbeat_key(self._rank), json.dumps(heartbeat))
                if not stack_printed:
                    self._stopped.wait(HEARTBEAT_INTERVAL)
        faulthandler.cancel_dump_traceback_later()

    def _is_asked_for_stack(self, store: dist.Store) -> bool:
        if not store.check([_FAILED_STEP_KEY]):
            return False
        failed_step = int(store.get(_FAILED_STEP_KEY))
        return self._step <= failed_step

    def _print_stack(self) -> None:
        main_thread = cast(int, threading.main_thread().ident)
        stack = traceback.format_stack(sys._current_frames()[main_thread])
        where = f"rank {self._rank} (last completed step {self._step})"
        sys.stderr.write(f"{where}, stack:\n{''.join(stack)}")
        sys.stderr.flush()

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
        faulthandler.cancel_dump_traceback_later()
        timed_out = _is_timeout(error)
        if self._size == 1 or not (timed_out or _is_lost_connection(error)):
            self._stopped.set()
            return
        self._collective_failed = True  # the next heartbeats say so
        cause = self._find_cause(timed_out)
        self._stopped.set()
        what = "lost the connection to"
        if timed_out:
            what = f"timed out after {self._timeout:g} s (collective_timeout) waiting for"
        where = f"rank {self._rank} (last completed step {self._step})"
        problems = [f"{where}: {what} {problem}" for problem in cause.problems]
        if cause.exit_code == ConfigError.exit_code:
            raise ConfigError(*problems, rank_local=True) from error
        raise RunError(*problems, rank_local=True) from error

    def _find_cause(self, timed_out: bool) -> Cause:
        """Return the ranks that the collective waited for, or the error that ended another rank."""
        cause = Cause([f"rank 0, {_SILENT}"])
        # In a thread, because the store ignores its timeout while the process that hosts it is
        # stopped.
        thread = threading.Thread(target=self._ask_store, args=(timed_out, cause), daemon=True)
        thread.start()
        thread.join(6 * HEARTBEAT_INTERVAL)
        return cause

    def _ask_store(self, timed_out: bool, cause: Cause) -> None:
        """Update `cause` after every answer of the store, which can end at any time."""
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=2 * HEARTBEAT_INTERVAL))
            if timed_out:
                self._store.set(_FAILED_STEP_KEY, str(self._step))
            before = self._read_heartbeats()
            cause.problems = [_UNKNOWN]
            if self._read_published_error(cause):
                return  # the store may end now, with the rank that published it
            time.sleep(3 * HEARTBEAT_INTERVAL)  # the heartbeats of a live rank increase
            cause.problems = [find_straggler(before, self._read_heartbeats())]
            self._read_published_error(cause)

    def _read_heartbeats(self) -> list[Heartbeat]:
        # In one request: hundreds of ranks read hundreds of keys at once.
        texts = self._store.multi_get([_heartbeat_key(rank) for rank in range(self._size)])
        return [Heartbeat(*json.loads(text)) for text in texts]

    def _read_published_error(self, cause: Cause) -> bool:
        """Make `cause` the error that ended another rank, if there is one."""
        if not self._store.check([_ERROR_KEY]):
            return False
        published = json.loads(self._store.get(_ERROR_KEY))
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
    if isinstance(error, dist.DistBackendError):  # NCCL has no other errors than this and timeouts
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(part in str(error) for part in _DISCONNECTED)


def find_straggler(before: list[Heartbeat], now: list[Heartbeat]) -> str:
    """Return the ranks that did not join a collective, in words.

    Args:
        before: the heartbeat of each rank, a few intervals earlier than `now`.
    """
    silent = []
    missing = []
    for rank, last in enumerate(now):
        if last.beats == before[rank].beats and not last.stack_printed:
            silent.append(rank)
        if not last.collective_failed:
            missing.append(rank)
    if silent:
        return f"{_describe_ranks(silent, now)}, {_SILENT}"
    if missing:
        return f"{_describe_ranks(missing, now)}, which did not join; its stack is printed"
    return "another rank: every rank waits in a collective"


def _describe_ranks(ranks: list[int], now: list[Heartbeat]) -> str:
    step = now[ranks[0]].step
    if len(ranks) == 1:
        return f"rank {ranks[0]} (last completed step {step})"
    return f"each of ranks {ranks} (last completed step {step})"
