"""Who keeps the others waiting: every rank says how far it is, so that a hung one can be named.

A collective that waits longer than its timeout fails on the ranks that came to it, and knows nothing of the one
that did not. So each rank posts its step where all can read it; the ranks that fail read it and say who
is behind, and the one that is behind prints where in its code it stands.
"""

from __future__ import annotations

import faulthandler
import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from lm.errors import RankError

PERIOD = 0.5
"""seconds between two posts of a rank"""
PATIENCE = 3.0
"""seconds after the timeout at which a rank that is still in the same step prints its stack"""


_SIGNS = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Connection refused")
"""what gloo says when another rank does not come, or has gone"""


class Watch:
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
        self._ended = threading.Event()

    def __enter__(self) -> Watch:
        if self._size > 1:
            threading.Thread(target=self._post, name="watch", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End; where a collective failed, say who kept the others waiting.

        Raises:
            RankError: in place of the RuntimeError of a failed collective.
        """
        faulthandler.cancel_dump_traceback_later()
        lost = isinstance(error, dist.DistBackendError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
        )
        if lost and self._size > 1:
            behind = self._behind()
            self._ended.set()
            raise RankError(
                f"rank {self._rank} gave up behind step {self._step}, waiting for others"
                f" (collective_timeout: {self._timeout:g} s): {behind}"
            ) from error
        self._ended.set()

    def _post(self) -> None:
        store = cast(Any, self._store).clone()  # a store's connection serves one thread
        beats = 0
        with suppress(RuntimeError):  # rank 0 has gone, and the store with it
            while not self._ended.wait(PERIOD):
                beats += 1
                store.set(f"progress/{self._rank}", json.dumps([self._step, beats]))

    def reached(self, step: int) -> None:
        """Take note that this rank begins the step behind `step` completed ones."""
        self._step = step
        if self._size > 1:
            faulthandler.dump_traceback_later(self._timeout + PATIENCE)

    def _behind(self) -> str:
        """A text that names the ranks that are behind, from what all have posted. Takes a few seconds."""
        self._store.set_timeout(timedelta(seconds=2 * PERIOD))
        try:
            before = self._read()
            time.sleep(2.5 * PERIOD)  # by its own clock alone: machines' clocks differ
            now = self._read()
        except RuntimeError:
            return "rank 0, or the network between, does not answer"
        last = max(step for step, _ in now.values())
        silent = [rank for rank in now if now[rank] == before[rank]]
        late = [rank for rank, (step, _) in now.items() if step < last]
        if silent:
            return f"{_name(silent)} does not answer: stopped, killed or cut off, at step {now[silent[0]][0]}"
        if late:
            return f"{_name(late)} stays behind at step {now[late[0]][0]}, others are at {last}; its stack is printed"
        return f"all ranks are at step {last}; the one that hangs prints its stack"

    def _read(self) -> dict[int, tuple[int, int]]:
        return {rank: tuple(json.loads(self._store.get(f"progress/{rank}"))) for rank in range(self._size)}


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks}"
