"""Errors caused by configuration or environment: one line per problem, and no traceback."""

from __future__ import annotations

import argparse
import difflib
import functools
import io
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_LINE = 1000
"""characters of a problem; longer ones contain what others wrote"""
_END = 295
"""characters of the end of a longer one"""
_MAX_PROBLEMS = 20
"""of one kind"""


def make_printable(text: str) -> str:
    """Return `text` cut to `MAX_LINE` characters, with escapes for those that are not printable.

    These could change the terminal, start another line, or have no encoding there.
    """
    if len(text) > MAX_LINE:
        gap = " ... "
        start = text[: MAX_LINE - len(gap) - _END]
        text = f"{start}{gap}{text[-_END:]}"
    return "".join(map(_escape_unprintable, text))


def _escape_unprintable(character: str) -> str:
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def escape_control(text: str) -> str:
    """Return `text` with its control characters escaped, as they could change the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def limit_problems(problems: Sequence[str]) -> list[str]:
    """Return the first 20 of `problems`, and a line on how many more there are."""
    limited = list(problems[:_MAX_PROBLEMS])
    if len(problems) > _MAX_PROBLEMS:
        limited.append(f"... and {len(problems) - _MAX_PROBLEMS} more")
    return limited


def nearest_file(path: str | Path) -> str:
    """Return the hint at the file whose name is nearest to `path`, or "".

    It is the run of that name in runs/, if there is one. If the directory of `path` is missing,
    too, the hint is at that.
    """
    missing = Path(path)
    try:
        run = Path("runs", missing.absolute().relative_to(Path.cwd()))
        if run.exists():
            return f"; did you mean {run}?"
    except (OSError, ValueError):  # elsewhere, or a name with NUL
        pass
    try:
        while not missing.parent.exists():
            missing = missing.parent
        names = [file.name for file in missing.parent.iterdir()]
    except (OSError, ValueError):  # not there, or a name with NUL
        return ""
    if missing.name in names:
        return ""
    near = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.75)  # not by its suffix
    if not near:
        return ""
    return f"; did you mean {shlex.quote(str(missing.parent / near[0]))}?"


class RunError(Exception):
    """The run cannot continue for a reason outside the program.

    Says what is wrong, why, and what to do.

    Args:
        problems: one line each. The line starts with what is wrong: a hyperparameter, a file or a
            rank.
        rank_local: whether only this rank knows the error, so that it prints it; rank 0 prints all
            others.
    """

    exit_code = 1

    def __init__(self, *problems: str, rank_local: bool = False) -> None:
        self.problems = tuple(make_printable(problem) for problem in problems)
        self.rank_local = rank_local
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigError(RunError):
    """Configuration or input is wrong. Names the key or file, the value, and what would work."""

    exit_code = 2

    @classmethod
    def merge(cls, errors: Iterable[RunError]) -> ConfigError:
        """Return one error that lists the problems of all `errors`."""
        problems: list[str] = []
        for error in errors:
            problems += error.problems
        return cls(*problems)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(message.removeprefix("argument "))


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Let each problem of a ConfigError start with `prefix`, e.g. the key that names the file."""
    try:
        yield
    except ConfigError as error:
        problems = [f"{prefix}: {problem}" for problem in error.problems]
        raise ConfigError(*problems) from None


@contextmanager
def without_prefix(prefix: str) -> Iterator[None]:
    """Let no problem of a ConfigError start with `prefix`, e.g. a key that a command has not."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(each.removeprefix(f"{prefix}: ") for each in error.problems)) from None


def open_standard_streams(*, lossy_stdout: bool = False) -> None:
    """Make the standard streams usable, whatever this process was started with.

    For each that is closed, e.g. by `>&-`, opens the null device: Python has None for it, and the
    next file that is opened gets its number, and what C prints. Characters that an encoding lacks
    become escapes. What cannot be written to stderr, as a disk is full or a reader or a terminal is
    gone, is dropped.

    Args:
        lossy_stdout: the same of stdout: for a process that has more to do than to print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the stream's
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))
        elif mode == "w" and stream is getattr(sys, f"__{name}__"):  # not a notebook's
            file_type = _LossyFile if name == "stderr" or lossy_stdout else io.FileIO
            file = io.BufferedWriter(file_type(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)  # a second call can make it lossy


class _LossyFile(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            n_written = super().write(data)
        except OSError:
            n_written = None
        if n_written is None:  # also of a pipe that is full and does not block
            return len(data)
        return n_written


def _stdout_is_unread() -> bool:
    """Return whether stdout is a pipe that its reader, e.g. head, has closed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors only, which is what such a pipe has
    return bool(poll.poll(0))


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Make the `main` of a command print a RunError or OSError, and return its exit code.

    That is 130 after Ctrl-C, and 141, without a message, once nothing reads stdout.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = main(*args, **kwargs)
        except SystemExit:  # of argparse, which may have printed its help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code

    @functools.wraps(main)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> int:
        open_standard_streams()
        try:
            return run(*args, **kwargs)
        except RunError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except OSError as error:  # most likely of stdout: a full disk, or head has closed the pipe
            is_unread = isinstance(error, BrokenPipeError) and _stdout_is_unread()
            # Python flushes stdout when it exits, which would fail, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if is_unread:
                return 128 + signal.SIGPIPE
            problem = f"{error.filename or 'stdout'}: {error.strerror}"
            print(make_printable(problem), file=sys.stderr)
            return RunError.exit_code
        except KeyboardInterrupt:
            return 130

    return wrapper


def oserror_as_config_error(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` raise ConfigError instead of OSError, e.g. for a file that is missing."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            problem = str(error)
            if error.filename:
                problem = f"{error.filename}: {error.strerror}"
            if isinstance(error, FileNotFoundError) and error.filename:
                problem += nearest_file(error.filename)
            raise ConfigError(problem) from None

    return wrapper


def is_panic(error: BaseException) -> bool:
    """Return whether it is that of a library in Rust that panicked, which is no Exception."""
    return type(error).__name__ == "PanicException"


def error_text(error: BaseException) -> str:
    """Return what a library's error, or its cause, says in one line, or else its type."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
