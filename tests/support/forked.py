"""Processes forked from one that has imported PyTorch, as the import takes most of a short run.

`start_python` runs a Python program as `subprocess.Popen` does, with its arguments, environment,
working directory, streams, signals and exit code. The program may be a module: one of `MODULES`,
e.g. `lm.launch`, whose ranks are forked from it. What a file starts is forked from the same process
as the file, e.g. the plan of a dry run. What depends on how Python starts needs a new interpreter:
the environment variables `READ_AT_START`, signals during imports, and other launchers. A forked
process with PYTHONUNBUFFERED writes each line at once.

This depends on CPython (tested with 3.11): `ForkedProcess` overrides the private methods
`_execute_child`, `_internal_poll` and `_wait` of `subprocess.Popen` and reads their arguments by
name, and `Start` shares multiprocessing's fork server with the processes that come from it. With
FORK_RANKS=0 in the environment every process is a new interpreter and nothing here is needed; all
tests then take about twice as long.
"""

from __future__ import annotations

import inspect
import io
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from lm.launch import console, machine
from lm.launch.signals import STOP_SIGNALS

FORK_RANKS = os.environ.get("FORK_RANKS") != "0"
"""Whether processes are forked; otherwise each is a new interpreter."""

START_METHOD = "spawn" if machine.has_gpu() or not FORK_RANKS else "forkserver"
"""How multiprocessing starts a process; CUDA must not be initialized before a fork."""

READ_AT_START = {"LD_PRELOAD", "PYTHONPATH", "HF_ENDPOINT", "HF_HOME"}
"""Environment variables that the dynamic linker, Python or a package reads when it starts."""

MODULES = {
    "determined.cli",
    "determined.exec.launch",
    "determined.exec.pid_client",
    "determined.exec.pid_server",
    "determined.exec.prep_container",
    "determined.launch.torch_distributed",
    "determined.launch.wrap_rank",
    "lm.evaluate",
    "lm.hf.__main__",
    "lm.launch",
    "lm.launch.torchrun",
    "lm.plan.dry_run",
    "lm.search",
    "tests.support.cluster.container",
    "torch.distributed.run",
}
"""Modules that can be programs of forked processes."""

PRELOADED = [
    "determined.exec.prep_container",
    "tests.support.ranks",
    "tests.support.runs",
    "tests.support.transformers_imported",
    "lm.metrics.logger",
    "lm.plan.dry_run",
    "lm.preflight",
    "lm.training.profiling",
    "lm.report",
    "lm.search.search",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboard.plugins.hparams.summary_v2",
    "torch._dynamo",
    "torch._inductor.codegen.triton",
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
    if not fork:
        return subprocess.Popen(command, env=env, text=True, **options)
    return start_program(command, env, **options)


def start_program(
    command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[str]:
    """Start a program with the environment `env`, forked if it can be and FORK_RANKS is not 0."""
    popen = ForkedProcess if FORK_RANKS else subprocess.Popen
    return popen(command, env=env, text=True, **options)


@dataclass(frozen=True)
class Start:
    """What a forked process changes before it runs a program. It is sent to the process."""

    arguments: list[str]
    folder: str
    env: dict[str, str]
    stdin: Connection | None
    stdout: Connection | None
    stderr: Connection | None
    umask: int
    new_session: bool
    preexec_fn: Any

    def run(self) -> None:
        for signum in signal.valid_signals():
            if signum in STOP_SIGNALS or callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        os.umask(self.umask)
        for number, stream in enumerate((self.stdin, self.stdout, self.stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
                stream.close()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has closed it
        if isinstance(sys.stdout, io.TextIOWrapper):
            by_lines = sys.stdout.isatty() or "PYTHONUNBUFFERED" in self.env
            sys.stdout.reconfigure(line_buffering=by_lines)
        if self.new_session:
            os.setsid()
        if self.preexec_fn is not None:
            self.preexec_fn()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.env)
        # Imported PyTorch has read this variable in another environment.
        torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))
        console.START = time.monotonic()
        # The process that this one is forked from serves it, too. Python would start another.
        server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
        server.ensure_running = lambda: None
        subprocess.Popen = subprocess_handler.Popen = ForkedProcess  # type: ignore[misc]
        if "PYTHONPATH" in self.env:
            sys.path.insert(0, self.env["PYTHONPATH"])
        if self.arguments[0] == "-m":
            self._run_module(self.arguments[1])
            return
        ForkedProcess.start_method = START_METHOD  # a rank has threads
        if "MPLBACKEND" not in self.env:  # to draw the report takes a third of a short run
            sys.modules["matplotlib"] = None  # type: ignore[assignment]
        sys.argv = self.arguments
        sys.path.insert(0, str(Path(self.arguments[0]).parent))
        runpy.run_path(self.arguments[0], run_name="__main__")

    def _run_module(self, name: str) -> None:
        """Run one of `MODULES`, and fork the Python programs that it starts from this process."""
        ForkedProcess.start_method = "fork"
        sys.argv = self.arguments[1:]
        sys.modules.pop(name, None)  # runpy warns of one that is imported
        runpy.run_module(name, run_name="__main__", alter_sys=True)


class ForkedProcess(subprocess.Popen[str]):
    """`subprocess.Popen`, whose process is forked if it runs one of `MODULES` or a Python file."""

    start_method = START_METHOD
    _process: Any = None

    def _execute_child(self, *values: Any) -> None:
        execute: Any = super()._execute_child  # type: ignore[misc]
        given = dict(zip(inspect.signature(execute).parameters, values, strict=True))
        arguments = _python_arguments(given["args"])
        if arguments is None:
            execute(*values)
            return
        umask = os.umask(0)
        os.umask(umask)
        start = Start(
            arguments=arguments,
            folder=str(given["cwd"] or "."),
            env=dict(os.environ if given["env"] is None else given["env"]),
            stdin=_duplicate(given["p2cread"]),
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

    def _internal_poll(self, **how: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(**how)  # type: ignore[misc]
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._process is None:
            return super()._wait(timeout)  # type: ignore[misc]
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def _python_arguments(command: Any) -> list[str] | None:
    """Return the arguments of the interpreter if `command` is a program that can be forked."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    command = [os.fspath(argument) for argument in command]
    if command[:2] == ["sh", "-c"] and command[2].startswith("python3 "):
        command = shlex.split(command[2])  # an experiment's entrypoint
    if command[0] not in ("python3", sys.executable):
        return None
    arguments = [argument for argument in command[1:] if argument != "-u"]
    if arguments[0] == "-m":
        return arguments if arguments[1] in MODULES else None
    return arguments if arguments[0].endswith(".py") else None


def _duplicate(descriptor: int) -> Connection | None:
    """Return a stream that multiprocessing sends to a process, or None for an inherited one."""
    if descriptor < 0:
        return None
    return Connection(os.dup(descriptor))
