"""Graceful preemption: a signal to any rank, or Determined's request, stops all ranks after the same step."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import cast

import torch
import torch.distributed as dist

from lm.runtime.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class PreemptionHandler:
    """Agreement of all ranks, in every step, on whether to stop after it.

    The all-reduce starts before the optimizer step and is waited for after it, so it overlaps with
    the computation: a GPU still runs the step that the host has launched. Between steps, e.g. after
    a batch of validation, `is_requested` asks. `should_preempt` returns whether Determined wants
    the run to stop, without blocking.
    """

    def __init__(self, world: World, should_preempt: Callable[[], bool]) -> None:
        self._world = world
        self._should_preempt = should_preempt
        self._signaled = False
        self._signal_time = 0.0
        self._flags = torch.zeros(2, dtype=torch.int32)

    def install(self) -> None:
        """Treat SIGTERM, SIGINT and SIGUSR2 as requests to stop; a second Ctrl-C in a terminal quits at once."""
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and sys.stderr.isatty():
            if (
                self._signaled and now - self._signal_time > 0.5
            ):  # launchers repeat a signal of the terminal
                os._exit(128 + signum)
            if not self._signaled and self._world.rank == 0:
                os.write(
                    2, b"\nstopping after this step and saving; Ctrl-C again quits without saving\n"
                )
        if not self._signaled:
            self._signaled, self._signal_time = True, now

    def start_agreement(self, busy: bool) -> dist.Work:
        """Start the all-reduce of this step on all ranks; `busy`: this rank is still writing a checkpoint."""
        self._flags[0] = self._signaled or self._should_preempt()
        self._flags[1] = busy
        work = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._world.control, async_op=True
        )
        return cast(dist.Work, work)

    def decision(self, work: dist.Work) -> tuple[bool, bool]:
        """Wait for `work` and return (stop, busy): whether they hold for any rank."""
        work.wait()
        stop, busy = self._flags.tolist()
        return bool(stop), bool(busy)

    def is_requested(self) -> bool:
        """Return whether to stop, after an agreement of all ranks."""
        return self.decision(self.start_agreement(busy=False))[0]
