"""Processes forked from one that has imported PyTorch, as the import takes most of a short run.

`start_python` runs a Python program as `subprocess.Popen` does, with its arguments, environment,
working directory, streams, signals and exit code. The program may be a module: one of `STARTERS`,
e.g. `lm.launch`, whose ranks are then forked, too. What depends on how Python starts needs a new
interpreter: the environment variables `READ_AT_START`, signals during imports, and other launchers.
PYTHONUNBUFFERED has no effect in a forked process.

This depends on CPython: `ForkedProcess` overrides the private methods `_execute_child`,
`_internal_poll` and `_wait` of `subprocess.Popen` and reads their arguments by name (tested with
3.11). With FORK_RANKS=0 in the environment every process is a new interpreter and nothing here is
needed; all tests then take 1.6 times as long.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lm.launch import console, machine
from lm.launch.signals import STOP_SIGNALS

FORK_RANKS = os.environ.get("FORK_RANKS") != "0"
"""Whether processes are forked; otherwise each is a new interpreter."""

START_METHOD = "spawn" if machine.has_gpu() or not FORK_RANKS else "forkserver"
"""How multiprocessing starts a process; CUDA must not be initialized before a fork."""

SUBPROCESSES_OF_TORCHRUN = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)

READ_AT_START = {"LD_PRELOAD", "PYTHONPATH", "HF_ENDPOINT", "HF_HOME"}
"""Environment variables that the dynamic linker, Python or a package reads when it starts."""

STARTERS = {
    "lm.launch": "lm.launch.spawn",
    "lm.launch.torchrun": SUBPROCESSES_OF_TORCHRUN,
    "lm.search": "lm.search.trials",
    "torch.distributed.run": SUBPROCESSES_OF_TORCHRUN,
}
"""Programs that start Python programs, and the module in which each does."""

PRELOADED = [
    "tests.support.ranks",
    "tests.support.runs",
    "tests.support.transformers_imported",
    "lm.metrics.logger",
    "lm.preflight",
    "lm.training.profiling",
    "lm.report",
    "lm.search.search",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboard.plugins.hparams.summary_v2",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.tensorboard",
]
"""Modules that the process imports from which others are forked."""

if START_METHOD == "forkserver":
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def start_python(
    arguments: Sequence[str], env: Mapping[str, str], *, fork: bool = True, **options: Any
) -> subprocess.Popen[str]:
    """Start a Python program with the environment `env`, forked unless FORK_RANKS is 0.

    Args:
        arguments: of the interpreter: a file or `-m lm.launch`, and the program's arguments.
        fork: whether the process may be forked.
        options: as of `subprocess.Popen`; streams are text.
    """
    command = [sys.executable, *arguments]
    if fork and FORK_RANKS:
        return ForkedProcess(command, env=env, text=True, **options)
    return subprocess.Popen(command, env=env, text=True, **options)


@dataclass(frozen=True)
class Start:
    """What a forked process changes before it runs a program. It is sent to the process."""

    arguments: list[str]
    folder: str
    env: dict[str, str]
    stdout: Connection | None
    stderr: Connection | None
    umask: int
    new_session: bool
    preexec_fn: Any

    def run(self) -> None:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        os.umask(self.umask)
        if self.new_session:
            os.setsid()
        if self.preexec_fn is not None:
            self.preexec_fn()
        for number, stream in ((1, self.stdout), (2, self.stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
                stream.close()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.env)
        # Imported PyTorch has read this variable in another environment.
        torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))
        console.START = time.monotonic()
        if self.arguments[0] == "-m":
            self._run_starter(self.arguments[1])
            return
        sys.argv = self.arguments
        sys.path[:0] = [str(Path(self.arguments[0]).parent), self.env["PYTHONPATH"]]
        runpy.run_path(self.arguments[0], run_name="__main__")

    def _run_starter(self, name: str) -> None:
        """Run a program of `STARTERS`, which forks what it starts from this process."""
        ForkedProcess.start_method = "fork"
        starts = SimpleNamespace(Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL)
        module = importlib.import_module(STARTERS[name])
        vars(module).update(Popen=ForkedProcess, subprocess=starts)
        sys.argv = self.arguments[1:]
        sys.modules.pop(name, None)  # runpy warns of one that is imported
        runpy.run_module(name, run_name="__main__", alter_sys=True)


class ForkedProcess(subprocess.Popen[str]):
    """`subprocess.Popen` for Python programs, whose process is forked."""

    start_method = START_METHOD

    def _execute_child(self, *values: Any) -> None:
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        given = dict(zip(names, values, strict=True))
        umask = os.umask(0)
        os.umask(umask)
        start = Start(
            arguments=[argument for argument in given["args"][1:] if argument != "-u"],
            folder=str(given["cwd"] or "."),
            env=dict(given["env"]),
            stdout=_duplicate(given["c2pwrite"]),
            stderr=_duplicate(given["errwrite"]),
            umask=umask,
            new_session=given["start_new_session"],
            preexec_fn=given["preexec_fn"],
        )
        context: Any = multiprocessing.get_context(self.start_method)
        self._process = context.Process(target=start.run)
        self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*[given[name] for name in pipes])  # type: ignore[attr-defined]

    def _internal_poll(self, **_: object) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def _duplicate(descriptor: int) -> Connection | None:
    """Return a stream that multiprocessing sends to a process, or None for an inherited one."""
    if descriptor < 0:
        return None
    return Connection(os.dup(descriptor))
