"""Watchdog that names the rank for which a failed collective was waiting.

A collective that exceeds its timeout fails on the ranks that joined it and does not know which rank
did not. So each rank publishes a heartbeat with its step in the store. A rank on which a collective
failed publishes that, too, and names the rank that did not join: a live one is asked to print its
stack, a dead one no longer responds.
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

_TIMED_OUT = "Timed out waiting"
_DISCONNECTED = tuple(
    f"Connection {what}" for what in ("closed by peer", "reset by peer", "refused")
)
_DISCONNECTED += ("Broken pipe", "Socket closed")
"""parts of gloo's messages"""

_SILENT = "which does not respond: stopped, killed or disconnected"
_UNKNOWN = "an unknown rank, as the store of rank 0 does not respond; see the errors of other ranks"
_FAILED_STEP_KEY = "watchdog/failed_step"
_ERROR_KEY = "watchdog/error"


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
    """Why a collective failed on this rank: one line per problem, and the exit code of the rank that caused it."""

    problems: list[str]
    exit_code: int = RunError.exit_code


class Watchdog:
    """Context manager around the run of one rank; `timeout` is the seconds after which a collective fails."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._step = 0
        self._collective_failed = False
        self._stopped = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            threading.Thread(target=self._publish_heartbeats, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Stop; replace the RuntimeError of a failed collective by a RunError that names the cause."""
        faulthandler.cancel_dump_traceback_later()
        text = str(error) if isinstance(error, RuntimeError) else ""
        is_nccl = isinstance(error, dist.DistBackendError)  # timeout or lost peer
        timed_out = _TIMED_OUT in text or (is_nccl and "timeout" in text)
        if self._size == 1 or not (
            timed_out or is_nccl or any(sign in text for sign in _DISCONNECTED)
        ):
            self._stopped.set()
            return
        self._collective_failed = True
        cause = self._find_cause(timed_out)
        self._stopped.set()
        what = "lost the connection to"
        if timed_out:
            what = f"timed out after {self._timeout:g} s (collective_timeout) waiting for"
        where = f"rank {self._rank} (last completed step {self._step})"
        problems = [f"{where}: {what} {problem}" for problem in cause.problems]
        error_type = ConfigError if cause.exit_code == ConfigError.exit_code else RunError
        raise error_type(*problems, rank_local=True) from error

    def publish_error(self, error: RunError) -> None:
        """Publish the error that ends this rank, for the ranks that lose the connection to it."""
        if not self._collective_failed:
            problems = [f"rank {self._rank}, which failed: {problem}" for problem in error.problems]
            cause = Cause(problems, error.exit_code)
            with suppress(RuntimeError):  # rank 0 has exited, and its store with it
                self._store.set(_ERROR_KEY, json.dumps(asdict(cause)))

    def on_step_start(self, step: int) -> None:
        """Record that this rank has completed `step` steps and starts the next one."""
        self._step = step

    def _publish_heartbeats(self) -> None:
        store = cast(Any, self._store).clone()  # a connection to the store serves one thread
        count = 0
        stack_printed = False
        with suppress(RuntimeError):  # rank 0 has exited, and its store with it
            while not stack_printed and not self._stopped.wait(HEARTBEAT_INTERVAL if count else 0):
                count += 1
                if not self._collective_failed:
                    # Takes effect if this thread stops running because a thread that hangs holds
                    # the GIL.
                    faulthandler.dump_traceback_later(self._timeout + HEARTBEAT_INTERVAL)
                    stack_printed = store.check([_FAILED_STEP_KEY]) and self._step <= int(
                        store.get(_FAILED_STEP_KEY)
                    )
                if stack_printed:
                    self._print_stack()
                heartbeat = Heartbeat(self._step, count, self._collective_failed, stack_printed)
                store.set(f"watchdog/{self._rank}", json.dumps(heartbeat))
        faulthandler.cancel_dump_traceback_later()

    def _print_stack(self) -> None:
        stack = traceback.format_stack(
            sys._current_frames()[cast(int, threading.main_thread().ident)]
        )
        sys.stderr.write(
            f"rank {self._rank} (last completed step {self._step}), stack:\n{''.join(stack)}"
        )
        sys.stderr.flush()

    def _find_cause(self, timed_out: bool) -> Cause:
        """Return the ranks that the collective waited for, or the error that another rank published.

        After a timeout, the ranks that have completed no more steps than this one print their
        stacks.
        """
        cause = Cause([f"rank 0, {_SILENT}"])
        # In a thread, because the store ignores its timeout while the process that hosts it is
        # stopped.
        thread = threading.Thread(target=self._ask_store, args=(timed_out, cause), daemon=True)
        thread.start()
        thread.join(6 * HEARTBEAT_INTERVAL)
        return cause

    def _ask_store(self, timed_out: bool, cause: Cause) -> None:
        """Update `cause` with every answer of the store, which can end at any time."""
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=2 * HEARTBEAT_INTERVAL))
            if timed_out:
                self._store.set(_FAILED_STEP_KEY, str(self._step))
            before = self._read_heartbeats()
            cause.problems = [_UNKNOWN]
            if self._read_published_error(
                cause
            ):  # the store can end with the rank that published it
                return
            time.sleep(3 * HEARTBEAT_INTERVAL)  # the heartbeats of a live rank increase
            cause.problems = [find_straggler(before, self._read_heartbeats())]
            self._read_published_error(cause)

    def _read_published_error(self, cause: Cause) -> bool:
        if not self._store.check([_ERROR_KEY]):
            return False
        published = json.loads(self._store.get(_ERROR_KEY))
        cause.problems = published["problems"]
        cause.exit_code = published["exit_code"]
        return True

    def _read_heartbeats(self) -> list[Heartbeat]:
        # In one request: hundreds of ranks read hundreds of keys at once.
        texts = self._store.multi_get([f"watchdog/{rank}" for rank in range(self._size)])
        return [Heartbeat(*json.loads(text)) for text in texts]


def find_straggler(before: list[Heartbeat], now: list[Heartbeat]) -> str:
    """Return the ranks that did not join a collective, from two heartbeats of each rank a few intervals apart."""
    silent = [
        r for r, last in enumerate(now) if last.beats == before[r].beats and not last.stack_printed
    ]
    if silent:
        return f"{_name(silent, now)}, {_SILENT}"
    missing = [r for r, last in enumerate(now) if not last.collective_failed]
    if missing:
        return f"{_name(missing, now)}, which did not join; its stack is printed"
    return "another rank: every rank waits in a collective"


def _name(ranks: list[int], now: list[Heartbeat]) -> str:
    name = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks}"
    return f"{name} (last completed step {now[ranks[0]].step})"
