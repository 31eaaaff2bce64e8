"""How a process ends: what it deletes or releases, with which exit code, and with its parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NoReturn, ParamSpec, TypeVar

from lm.launch.launch import has_lost_torchrun
from lm.launch.requirements import print_exception

PR_SET_PDEATHSIG = 1
"""of prctl, as in linux/prctl.h"""

P = ParamSpec("P")
T = TypeVar("T")

_callbacks = ExitStack()
atexit.register(_callbacks.close)


def at_exit(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `function` when this process ends, unless a signal kills it."""
    _callbacks.callback(function, *args, **kwargs)


def open_until_exit(resource: AbstractContextManager[T]) -> T:
    """Enter `resource` and return what it yields; it is closed when this process ends."""
    return _callbacks.enter_context(resource)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that `main` returns, or that of an exception, which is printed.

    Skips Python's cleanup, which takes seconds and would wait for a thread that writes a
    checkpoint. If torchrun started this process and is killed, the kernel sends SIGTERM.
    """
    die_with_torchrun()
    try:
        code = main()
    except Exception as error:
        code = print_exception(error)
    with suppress(OSError):  # a full disk, or a closed pipe
        sys.stdout.flush()
    _callbacks.close()
    os._exit(code)


def die_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Make the kernel send `signum` to this process when `parent` ends, even by SIGKILL.

    If it has ended, this process exits. On systems other than Linux, that is all.
    """
    _ask_for_signal(signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def die_with_torchrun() -> None:
    """If torchrun started this process, make the kernel send SIGTERM when it ends."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _ask_for_signal(signal.SIGTERM)
        if has_lost_torchrun():
            os._exit(128 + signal.SIGTERM)


def _ask_for_signal(signum: int) -> None:
    """Ask the kernel for `signum` when the parent ends from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
