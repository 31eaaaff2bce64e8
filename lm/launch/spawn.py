"""Launcher for several ranks of a script on this machine, used by `make train`.

    python -m lm.launch [--nproc N] fsdp.py ARGUMENTS...
    python -m lm.launch [--nproc N] -m lm.evaluate ARGUMENTS...

Compared with torchrun, it starts sooner, forwards the signals that stop a run to all ranks, and
exits with the exit code of the first rank that failed (2 = bad configuration), without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from lm.errors import ConfigError, Parser, command, nearest_file, open_standard_streams
from lm.launch.console import announce
from lm.launch.machine import has_gpu
from lm.launch.process import die_with_parent
from lm.launch.signals import handle_stop_signals

GRACE = 1.0
"""Seconds that the other ranks have to end when one fails."""

MAX_RANKS = 1024
"""of one machine"""
LOOPBACK = "127.0.0.1"


def default_n_ranks() -> int:
    """Return the number of GPUs, or 2 without GPUs."""
    if not has_gpu():
        return 2
    announce("importing PyTorch to count the GPUs")
    import torch

    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        return 2
    return n_gpus


def reserve_port() -> int:
    """Return a free TCP port of the loopback interface.

    Until this process ends, the kernel gives the port to no process that asks for any; one that
    names it can listen there. So it is still free when a rank has imported PyTorch.
    """
    reserved = socket.socket()
    # A socket that allows reuse and does not listen gives way to one that does both.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((LOOPBACK, 0))
    except OSError as error:
        problem = f"{LOOPBACK}: not an address of this machine ({error.strerror})"
        remedy = f"ranks connect there: ip address add {LOOPBACK}/8 dev lo, or use torchrun"
        raise ConfigError(f"{problem}; {remedy}") from None
    port: int = reserved.getsockname()[1]
    if sys.platform == "linux":
        reserved.detach()  # and not closed
    else:  # where two sockets cannot share a port
        reserved.close()
    return port


def run_local(command: list[str], n_ranks: int) -> int:
    """Run `command` on `n_ranks` ranks on this machine and wait for them.

    When a rank fails, the other ranks receive SIGTERM, and after `GRACE` SIGKILL, because they may
    hang in a collective. They do not end before the rank that prints an error of all ranks, see
    `World.wait_for_rank0` and `print_error`.

    Returns:
        0, or the exit code of the first rank that failed (128 + signal number if a signal killed
        it).
    """
    common = os.environ | {
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
    }
    common.setdefault("MASTER_PORT", str(reserve_port()))
    ranks: list[subprocess.Popen[bytes]] = []
    forwarded: list[int] = []

    def forward(signum: int, _frame: object) -> None:
        forwarded.append(signum)
        for process in ranks:
            process.send_signal(signum)

    handle_stop_signals(forward)
    signal.signal(signal.SIGUSR1, forward)  # by which a rank prints its stacks
    end_with_this = partial(die_with_parent, os.getpid())
    for rank in range(n_ranks):
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # In a new session, ranks receive Ctrl-C only from this process and not also from the
        # terminal.
        process = subprocess.Popen(
            command, env=env, start_new_session=True, preexec_fn=end_with_this
        )
        ranks.append(process)
        for signum in forwarded:  # before this rank started
            process.send_signal(signum)
    return _wait_for(ranks, forwarded)


def _wait_for(ranks: list[subprocess.Popen[bytes]], forwarded: list[int]) -> int:
    """Wait until all ranks have ended; stop the others when one fails. Return the exit code.

    Args:
        forwarded: the signals that the ranks have received; the list grows meanwhile.
    """
    running = list(ranks)
    failure = 0
    deadline = math.inf
    while running:
        time.sleep(0.05)
        ended = [process for process in running if process.poll() is not None]
        for process in ended:
            running.remove(process)
            with contextlib.suppress(ProcessLookupError):  # it has left no child processes
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode == 0 or failure != 0:
                continue
            failure = process.returncode
            deadline = time.monotonic() + GRACE
            if -failure in forwarded:
                print("stopped before the first step", file=sys.stderr)
            elif failure < 0:
                killed = (
                    f"rank {ranks.index(process)} was killed by {signal.Signals(-failure).name}"
                )
                print(f"{killed}; stopping the others", file=sys.stderr)
            for other in running:
                other.terminate()
        if time.monotonic() > deadline:
            for other in running:
                os.killpg(other.pid, signal.SIGKILL)  # including its child processes
    if failure < 0:
        return 128 - failure
    return failure


@command
def main() -> int:
    """Run the command. Return its exit code."""
    open_standard_streams(lossy_stdout=True)
    parser = Parser(prog="python -m lm.launch", description="Run a script on several ranks.")
    parser.add_argument(
        "--nproc", type=int, help="number of ranks (default: one per GPU, or 2 without GPUs)"
    )
    parser.add_argument("-m", action="store_true", help="SCRIPT is a module, e.g. lm.evaluate")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    n_ranks = args.nproc
    if n_ranks is not None and not 1 <= n_ranks <= MAX_RANKS:
        raise ConfigError(f"--nproc: {n_ranks} is not from 1 to {MAX_RANKS}")
    if not args.m and not Path(args.script).is_file():
        raise ConfigError(f"{args.script}: no such file{nearest_file(args.script)}")
    if n_ranks is None:
        n_ranks = default_n_ranks()
    program = [sys.executable, args.script, *args.arguments]
    if args.m:
        program.insert(1, "-m")
    return run_local(program, n_ranks)
