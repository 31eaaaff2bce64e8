"""The errors that are a person's to mend; they end a run with one line per problem, no traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class RunError(Exception):
    """The run cannot go on for a reason outside the program: says what, and what would help.

    Args:
        problems: one line each.
    """

    exit_code = 1

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigError(RunError):
    """Configuration or input is wrong: names the key or file, the value, and what would work."""

    exit_code = 2


class RankError(RunError):
    """Something that this rank alone knows, so it has to say it itself; others are said by rank 0."""


class DataError(RankError):
    """Data are wrong, as this rank found when it came to them: names the file and the place."""

    exit_code = 2


def oserror_as_config_error(function: Callable[P, T]) -> Callable[P, T]:
    """Let `function` raise a ConfigError where it may not look at a file, or a name is none."""

    @functools.wraps(function)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None

    return reading
