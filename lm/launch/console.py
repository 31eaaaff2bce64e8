"""Lines that rank 0 prints while a command starts, and the error that torchrun repeats at its end."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from lm.launch.launch import is_rank0

START = time.monotonic()


def elapsed() -> str:
    """Return the seconds since the command started, as the start of a line."""
    return f"{time.monotonic() - START:6.1f} s"


def announce(what: str) -> None:
    """Print on rank 0 what starts now, and when."""
    if is_rank0():
        with suppress(OSError):  # a full disk, or head has closed the pipe
            sys.stdout.write(
                f"{elapsed()}  {what}\n"
            )  # one write: srun labels every write of an unbuffered stream
            sys.stdout.flush()


def record_error(text: str) -> None:
    """Write `text` to where torchrun reads what it prints at the end of its report of a failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # of another torchrun that has ended
            message = {
                "message": text,
                "extraInfo": {"timestamp": int(time.time())},
            }  # the format of its @record
            Path(path).write_text(json.dumps({"message": message}))
