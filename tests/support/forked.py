"""Processes that are forked from one that has imported PyTorch, because importing it takes most of a short run.

`Forked` is `subprocess.Popen` for Python programs: a process with its own arguments, environment,
working directory, streams, signals and exit code. What depends on how Python starts needs a real
command: the variables `READ_AT_START`, signals during imports, and other launchers.
    PYTHONUNBUFFERED has no effect in a forked process.

It overrides the private methods `_execute_child`, `_internal_poll` and `_wait`; tested with Python
3.11.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lm.launch import console, machine, spawn

READ_AT_START = {"LD_PRELOAD", "PYTHONPATH"}
METHOD = "spawn" if machine.has_gpu() else "forkserver"  # CUDA may not be initialized before a fork
PRELOADED = [
    "tests.support.ranks",
    "tests.support.runs",
    "lm.metrics.logger",
    "lm.preflight",
    "lm.training.profiling",
    "lm.report",
]
PRELOADED += ["torch._dynamo", "torch.utils.tensorboard"]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


class Forked(subprocess.Popen[str]):
    """A process of a Python program, which `lm.launch` may be; its ranks are then forked, too."""

    method = METHOD

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        _, preexec_fn, _, _, cwd, env, _, _, _, *pipes, _, _, _, _, _, new_session, _ = rest
        streams = [Connection(os.dup(fd)) if fd >= 0 else None for fd in (pipes[3], pipes[5])]
        os.umask(umask := os.umask(0))
        before = [
            partial(os.umask, umask),
            *[os.setsid] * new_session,
            *[preexec_fn] * bool(preexec_fn),
        ]
        context: Any = multiprocessing.get_context(self.method)
        self._process = context.Process(
            target=_run, args=(args[1:], cwd or ".", env, streams, before)
        )
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, **_: object) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def _run(
    arguments: list[str], cwd: str, env: dict[str, str], streams: list[Any], before: list[Any]
) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    for action in before:
        action()
    for number, stream in enumerate(streams, start=1):
        if stream:
            os.dup2(stream.fileno(), number)
            stream.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(
        int(env["OMP_NUM_THREADS"])
    )  # PyTorch was imported with another environment
    console.START = time.monotonic()
    if arguments[:2] == ["-m", "lm.launch"]:
        Forked.method, spawn.subprocess = "fork", SimpleNamespace(Popen=Forked)  # type: ignore[assignment]
        sys.argv = arguments[1:]
        sys.exit(spawn.main())
    sys.argv = arguments
    sys.path[:0] = [str(Path(arguments[0]).parent), env["PYTHONPATH"]]
    runpy.run_path(arguments[0], run_name="__main__")
