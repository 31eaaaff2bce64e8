"""What a training process sets up before it imports PyTorch. Imports nothing that is not installed with Python."""

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

from lm.errors import ConfigError
from lm.launch.console import announce
from lm.launch.launch import is_rank0
from lm.launch.machine import keep_freed_memory, share_cores

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def require_torch() -> None:
    """Exit with code 2 if Python is too old, or PyTorch missing or too old. Call before importing torch."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        sys.exit(
            f"Python: {sys.executable} is {sys.version.split()[0]}; use {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        )
    try:
        found = importlib.metadata.version("torch")
        problem = f"version {found} is too old"
        if tuple(map(int, re.findall(r"\d+", found)[:2])) >= OLDEST_TORCH:
            return
    except importlib.metadata.PackageNotFoundError:
        problem = f"not installed for {sys.executable}"
    if is_rank0():
        install = f"install {'.'.join(map(str, OLDEST_TORCH))} or newer"
        print(
            f"torch: {problem}; {install}: pip install -r requirements.txt -c constraints.txt",
            file=sys.stderr,
        )
    sys.exit(ConfigError.exit_code)


def setup_environment() -> None:
    """Set up what must precede the import of torch: its version, allocators, logging, limits and signals."""
    gc.disable()  # training collects garbage at its reports, on all ranks at once
    require_torch()
    announce("importing PyTorch")
    keep_freed_memory()
    share_cores()
    if (
        "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    ):  # the older name, which the newer one would override
        os.environ.setdefault(
            "PYTORCH_ALLOC_CONF", "expandable_segments:True"
        )  # less fragmentation
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # quiet profiler
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # no C++ stack traces for lost connections
    for name in (
        "determined.tensorboard",
        "determined.common.storage",
    ):  # warnings of every trial, for no reason
        logging.getLogger(name).setLevel(logging.ERROR)
    with suppress(ValueError, OSError):  # five files per rank of the job
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports exits without a traceback
