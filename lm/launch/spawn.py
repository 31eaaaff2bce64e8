"""Start several ranks of a script on this machine."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from lm.launch.environment import has_gpu, require_torch


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns, or with 1 and a traceback, at once: a thread may be writing a
    checkpoint that nobody will commit, and what Python has to clear away takes seconds."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def default_processes() -> int:
    """As many as there are GPUs; two where there are none."""
    if not has_gpu():
        return 2
    import torch

    return torch.cuda.device_count() or 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """In a new process: be sent `signum` when its parent dies, even by SIGKILL (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signum)


def run_local(command: list[str], processes: int, grace: float = 1.0) -> int:
    """Run `command` as `processes` ranks on this machine and wait for them.

    When a rank fails, the others are told to stop, and killed `grace` seconds later: they may hang in a
    collective that it will never join. One that refuses its input (exit code 2) gives them five times as long
    to come to that by themselves.

    Returns:
        0, or the exit code of the first rank that failed (128 + signal number for one killed by a signal).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = os.environ | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    common.setdefault("MASTER_PORT", str(free_port()))
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    ranks: list[subprocess.Popen[bytes]] = []
    passed_on: list[int] = []

    def pass_on(signum: int, _frame: object) -> None:
        passed_on.append(signum)
        for rank in ranks:
            rank.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, pass_on)
    for number in range(processes):
        env = common | {"RANK": str(number), "LOCAL_RANK": str(number)}
        # A session of its own: Ctrl-C then reaches the ranks once, from here, and not from the terminal too.
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=die_with_parent))
        for signum in passed_on:  # to ranks that were not there yet
            ranks[-1].send_signal(signum)

    waiting = list(ranks)
    failure = 0
    deadline = float("inf")
    while waiting:
        time.sleep(0.05)
        for rank in [r for r in waiting if r.poll() is not None]:
            waiting.remove(rank)
            if rank.returncode and not failure:
                failure = rank.returncode
                refused = failure == 2  # bad input: the others find it, too, and it is rank 0 that says so
                deadline = time.monotonic() + (5 * grace if refused else grace)
                if -failure in passed_on:
                    print("stopped before the first step", file=sys.stderr)
                elif failure < 0:
                    name = signal.Signals(-failure).name
                    print(f"rank {ranks.index(rank)} was killed by {name}; stopping the others", file=sys.stderr)
                for other in [] if refused else waiting:
                    other.terminate()
        if time.monotonic() > deadline:
            for other in waiting:
                os.killpg(other.pid, signal.SIGKILL)  # and what it started
    return failure if failure >= 0 else 128 - failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.launch", description="Run a script as several ranks here.")
    parser.add_argument("--nproc", type=int, help="ranks (default: one per GPU, two where there is none)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    require_torch()
    if args.nproc is not None and args.nproc < 1:
        parser.error(f"--nproc: {args.nproc} processes; at least 1 is needed")
    return run_local([sys.executable, args.script, *args.arguments], args.nproc or default_processes())
