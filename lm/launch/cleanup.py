"""What a process deletes or releases when it ends, also where Python's own cleanup is skipped."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import ParamSpec, TypeVar

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


def clean_up() -> None:
    """Call what `at_exit` has registered, once: before `os._exit`."""
    _callbacks.close()
