"""Who keeps the others waiting: every rank says how far it is, so that a hung one can be named.

A collective that waits longer than its timeout fails on the ranks that came to it, and knows nothing of the one
that did not. So each rank posts its step where all can read it; the ranks that fail post that, too, and say
who has not: that one lives and prints where in its code it stands, or does not answer any more.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from lm.errors import RankError, RunError

PERIOD = 0.25
"""seconds between two posts of a rank"""

_GONE = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed")
_LATE = "Timed out waiting"
"""what gloo says when another rank has gone, or does not come"""
_GAVE_UP = "progress/gave up"
_REASON = "progress/reason"


class Heartbeat(NamedTuple):
    """What a rank says of itself."""

    step: int
    beats: int
    """goes on for as long as the rank lives"""
    gave_up: bool
    """a collective failed here"""
    asked: bool
    """it has printed its stack, and says nothing more"""


class Watchdog:
    """One rank's part.

    Args:
        store: that all ranks have joined.
        timeout: of collectives, in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._step = 0
        self._gave_up = False
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            threading.Thread(target=self._post, name="watch", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End; where a collective failed, say who kept the others waiting.

        Raises:
            RankError: in place of the RuntimeError of a failed collective.
        """
        faulthandler.cancel_dump_traceback_later()
        sign = _sign(error)
        if sign is None or self._size == 1:
            self._ended.set()
            return
        self._gave_up = True
        late = sign == _LATE
        culprit = self._find_culprit(late)
        self._ended.set()
        what = f"waited {self._timeout:g} s (collective_timeout) for" if late else "lost its connection to"
        where = f"rank {self._rank}, behind step {self._step}"
        raise RankError(*(f"{where}, {what} another: {line}" for line in culprit.splitlines())) from error

    def explain(self, error: RunError) -> None:
        """Leave to the others, who are about to lose this rank, why it ends; unless it ends for having lost one."""
        if not self._gave_up:
            with suppress(RuntimeError):  # rank 0 has gone, and the store with it
                self._store.set(_REASON, str(error))

    def on_step_start(self, step: int) -> None:
        """Take note that this rank begins the step behind `step` completed ones."""
        self._step = step

    def _post(self) -> None:
        store = cast(Any, self._store).clone()  # a store's connection serves one thread
        beats = 0
        asked = False
        with suppress(RuntimeError):  # rank 0 has gone, and the store with it
            while not asked and not self._ended.wait(PERIOD if beats else 0):
                beats += 1
                if not self._gave_up:
                    # Comes to pass where this thread gets no turn, because another holds the interpreter and hangs.
                    faulthandler.dump_traceback_later(self._timeout + PERIOD)
                    asked = store.check([_GAVE_UP]) and self._step <= int(store.get(_GAVE_UP))
                if asked:
                    self._print_stack()
                store.set(f"progress/{self._rank}", json.dumps(Heartbeat(self._step, beats, self._gave_up, asked)))
        faulthandler.cancel_dump_traceback_later()

    def _print_stack(self) -> None:
        frame = sys._current_frames()[cast(int, threading.main_thread().ident)]
        stack = "".join(traceback.format_stack(frame))
        print(f"rank {self._rank} is behind step {self._step}, here:\n{stack}", end="", file=sys.stderr, flush=True)

    def _find_culprit(self, late: bool) -> str:
        """What a rank said that ended, or who is to blame, from what all have posted. Takes a second.

        Args:
            late: ask those that are no further than this one to print their stacks.
        """
        verdict: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                self._store.set_timeout(timedelta(seconds=2 * PERIOD))
                if late:
                    self._store.set(_GAVE_UP, str(self._step))
                before = self._read()
                time.sleep(3 * PERIOD)  # by its own clock alone: machines' clocks differ
                blamed = find_straggler(before, self._read())
                verdict.append(self._store.get(_REASON).decode() if self._store.check([_REASON]) else blamed)

        # The store does not keep to its timeout where the rank that holds it is stopped: it waits for ever.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(6 * PERIOD)
        return verdict[0] if verdict else "rank 0 does not answer: stopped, killed or cut off"

    def _read(self) -> list[Heartbeat]:
        return [Heartbeat(*json.loads(self._store.get(f"progress/{rank}"))) for rank in range(self._size)]


def find_straggler(before: list[Heartbeat], now: list[Heartbeat]) -> str:
    """Who is to blame, of what the ranks posted at two moments, some periods apart."""
    silent = [r for r, post in enumerate(now) if post.beats == before[r].beats and not post.asked]
    if silent:
        return f"{_name(silent)} does not answer: stopped, killed or cut off, behind step {now[silent[0]].step}"
    behind = [r for r, post in enumerate(now) if not post.gave_up]
    if behind:
        return f"{_name(behind)} did not come, behind step {now[behind[0]].step}; its stack is printed"
    return "all ranks wait for one another"


def _sign(error: BaseException | None) -> str | None:
    """What tells `error` for that of a collective that another rank failed; None = it is something else."""
    if isinstance(error, dist.DistBackendError):
        return _LATE
    return next((sign for sign in (_LATE, *_GONE) if isinstance(error, RuntimeError) and sign in str(error)), None)


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks}"
