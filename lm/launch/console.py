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
SECONDS_TO_PRINT = 5.0
"""for rank 0 of a machine, if the others find the same error"""


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
    """Print the error of a start, one that all ranks of a machine find once, for torchrun too.

    A launcher that stops all ranks when one has failed would stop rank 0 before it prints. Under
    it, the others wait; one that is not stopped meanwhile has found the error alone.
    """
    launch = Launch()
    with suppress(ConfigError):
        launch = Launch.from_env(os.environ)
    prints = error.rank_local or launch.local_rank == 0  # each machine prints its own errors
    if not prints and launch.launcher in ("torchrun", "Open MPI"):
        time.sleep(SECONDS_TO_PRINT)
        prints = True
    if prints:
        print(error, file=sys.stderr)
    record_error(error)


def record_error(error: RunError) -> None:
    """Write `error` to where torchrun reads what it prints at the end of its report of a failure.

    Without torchrun, print the line of that report in which Determined's log policies find the exit
    code, so that a trial is not restarted in vain.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # The format of torchrun's @record.
        message = {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # of another torchrun that has ended
            Path(path).write_text(json.dumps({"message": message}))
    elif "DET_TRIAL_ID" in os.environ:
        print(f"exitcode  : {error.exit_code} (pid: {os.getpid()})", file=sys.stderr)
