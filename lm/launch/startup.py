"""What a training process sets up before it imports PyTorch, with the standard library only."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
from contextlib import suppress

from lm.errors import open_standard_streams
from lm.launch.machine import keep_freed_memory, share_cores
from lm.launch.process import die_with_torchrun


def setup_environment() -> None:
    """Set up what must precede the import of torch.

    These are the allocators, logging, limits of the process and signals.
    """
    open_standard_streams(lossy_stdout=True)
    die_with_torchrun()  # also while this process imports
    gc.disable()  # training collects garbage at its reports, on all ranks at once
    keep_freed_memory()
    share_cores()
    # The newer name of this variable would override the older one, if the user has set that.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Less memory is lost to fragmentation.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # A rank whose NCCL loses another would ask all ranks for a dump, by a key that torchrun's store
    # keeps: those of its next attempt would obey, and abort 8 minutes later.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # quiet profiler
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack traces for lost connections
    # These warn in every trial, for no reason.
    for name in ("determined.tensorboard", "determined.common.storage"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with suppress(ValueError, OSError):  # five files per rank of the job
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports exits without a traceback
