"""What a training process sets up before it imports PyTorch, with the standard library only."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import re
import resource
import signal
import sys
from contextlib import suppress

from lm.errors import ConfigError, open_standard_streams
from lm.launch.console import announce
from lm.launch.launch import is_rank0
from lm.launch.machine import keep_freed_memory, share_cores

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def require_torch() -> None:
    """Exit with code 2 if Python is too old, or PyTorch missing or too old.

    Call it before torch is imported, which may fail.
    """
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = sys.version.split()[0]
        oldest = "{}.{}".format(*OLDEST_PYTHON)
        sys.exit(f"Python: {sys.executable} is {found}; use {oldest} or newer")
    problem = _torch_problem()
    if problem is None:
        return
    if is_rank0():
        install = "install {}.{} or newer".format(*OLDEST_TORCH)
        print(
            f"torch: {problem}; {install}: pip install -r requirements.txt -c constraints.txt",
            file=sys.stderr,
        )
    sys.exit(ConfigError.exit_code)


def _torch_problem() -> str | None:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"not installed for {sys.executable}"
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if tuple(numbers[:2]) < OLDEST_TORCH:
        return f"version {version} is too old"
    return None


def setup_environment() -> None:
    """Check the version of torch, and set up what must precede its import.

    These are the allocators, logging, limits of the process and signals.
    """
    open_standard_streams(lossy_stdout=True)
    gc.disable()  # training collects garbage at its reports, on all ranks at once
    require_torch()
    announce("importing PyTorch")
    keep_freed_memory()
    share_cores()
    # The newer name of this variable would override the older one, if the user has set that.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Less memory is lost to fragmentation.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # quiet profiler
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack traces for lost connections
    # These warn in every trial, for no reason.
    for name in ("determined.tensorboard", "determined.common.storage"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with suppress(ValueError, OSError):  # five files per rank of the job
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports exits without a traceback
