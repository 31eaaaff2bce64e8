"""Signals that ask a run to stop after the step, and save."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from lm.launch.signals import handle_stop_signals

REPEAT_SECONDS = 0.5
"""Launchers repeat a Ctrl-C of the terminal within this time; a later one is a second Ctrl-C."""


class StopSignals:
    """Whether this process has received a signal that asks it to stop, Ctrl-C included.

    Its own rank alone knows: the ranks agree in every step on whether any of them was asked.
    """

    def __init__(self, rank: int) -> None:
        self.received = False
        self._rank = rank
        self._received_at = 0.0

    def install(self) -> None:
        """Treat the signals as requests to stop; a second Ctrl-C in a terminal quits at once."""
        handle_stop_signals(self._on_signal)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and sys.stderr.isatty():
            if self.received and now - self._received_at > REPEAT_SECONDS:
                os._exit(128 + signum)
            if not self.received and self._rank == 0:
                line = b"\nstopping after this step and saving; Ctrl-C again quits without saving\n"
                with suppress(OSError):  # the terminal is gone
                    os.write(2, line)
        if not self.received:
            self.received = True
            self._received_at = now
