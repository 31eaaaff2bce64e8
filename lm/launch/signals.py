"""Signals that ask a process to save and stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""By a scheduler or a user; SIGHUP as a terminal closes."""


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` for each stop signal, but leave SIGHUP ignored in what nohup has started."""
    for signum in STOP_SIGNALS:
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue
        signal.signal(signum, handler)
