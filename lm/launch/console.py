"""Lines that rank 0 prints while a command starts, and the error that torchrun repeats."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch, is_rank0

START = time.monotonic()


def format_elapsed() -> str:
    """Return the seconds since the command started, as the start of a line."""
    return f"{time.monotonic() - START:6.1f} s"


def announce(what: str) -> None:
    """Print on rank 0 what starts now, and when."""
    if is_rank0():
        # In one write, as srun labels each of an unbuffered stream.
        sys.stdout.write(f"{format_elapsed()}  {what}\n")
        sys.stdout.flush()


def warn(what: str) -> None:
    """Print on rank 0 what the user may not expect, on stderr: stdout may be a command's JSON."""
    if is_rank0():
        print(what, file=sys.stderr)


def print_error(error: RunError) -> None:
    """Print the error of a start, one that all ranks of a machine find once, for torchrun too."""
    record_error(str(error))
    local_rank = 0
    with suppress(ConfigError):
        local_rank = Launch.from_env(os.environ).local_rank
    if error.rank_local or local_rank == 0:  # each machine prints its own errors
        print(error, file=sys.stderr)


def record_error(text: str) -> None:
    """Write `text` to where torchrun reads what it prints at the end of its report of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # The format of torchrun's @record.
        message = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # of another torchrun that has ended
            Path(path).write_text(json.dumps({"message": message}))
