"""When to stop early: a signal to any rank, or the cluster's wish, becomes one decision that all ranks share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class PreemptionHandler:
    """Asks all ranks in every step whether any of them was told to stop.

    The question is asked before the optimizer's step and answered behind it, so that it travels while
    the step computes, and every rank stops behind the same step.

    Args:
        group: gloo process group of all ranks.
        preempted: true once the cluster wants the run to stop; must not block.
    """

    def __init__(self, group: dist.ProcessGroup, preempted: Callable[[], bool]) -> None:
        self._group = group
        self._preempted = preempted
        self._told = False
        self._flags = torch.zeros(2, dtype=torch.int32)

    def listen(self) -> None:
        """Take SIGTERM, SIGINT and SIGUSR2 as requests to stop; further ones change nothing."""
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._told = True

    def start_agreement(self, busy: bool) -> dist.Work:
        """Start asking. To be called by all ranks, in step.

        Args:
            busy: whether this rank still writes a checkpoint, which is agreed on by the way.
        """
        self._flags[0] = self._told or self._preempted()
        self._flags[1] = busy
        question = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert question is not None  # async_op
        return question

    def decision(self, question: dist.Work) -> tuple[bool, bool]:
        """Wait for the answer to `ask`: is any rank to stop, and is any busy. The same on all ranks."""
        question.wait()
        stop, busy = self._flags.tolist()
        return bool(stop), bool(busy)
