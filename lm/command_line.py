"""The command line of fsdp.py, and what other commands share: types of arguments, tables."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lm.errors import ConfigError, Parser, escape_control
from lm.fileio import expand_home

Number = TypeVar("Number", int, float)


def number(
    kind: type[Number], smallest: Number, largest: float = math.inf
) -> Callable[[str], Number]:
    """Return the type of an argument of argparse: a number in a range."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not smallest <= value <= largest:  # or NaN
            rule = f"{smallest} or more"
            if largest < math.inf:
                rule = f"from {smallest} to {largest}"
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    parse.__name__ = kind.__name__  # as argparse names it in the error of what is no number
    return parse


def location_argument(text: str) -> str:
    """Return an argument that is a path, a URL or a name on the Hub: a type of argparse."""
    try:
        return expand_home(text)
    except ConfigError as error:  # it does not name the argument, as argparse does
        raise argparse.ArgumentTypeError(str(error)) from None


def path_argument(text: str) -> Path:
    """Return an argument that is a path: a type of argparse."""
    return Path(location_argument(text))


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, whose first row are the names of the columns."""
    lines: list[str] = []
    for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        escaped = [escape_control(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return lines


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--lr=1e-3` and `--lr 1e-3` on a command line to `lr=1e-3`.

    Leaves out `--local-rank`, which torch.distributed.launch and DeepSpeed add to LOCAL_RANK.
    """
    rewritten: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        key, equals, value = argument.removeprefix("--").partition("=")
        is_option = key in ("", "config", "dry-run", "help")
        if is_option or not argument.startswith("--"):
            rewritten.append(argument)
            continue
        if not equals:
            value = next(rest, "")
        name = key.replace("-", "_")
        if name != "local_rank":
            rewritten.append(f"{name}={value}")
    return rewritten


HELP = "python -m lm.config lists all hyperparameters, python -m lm.config KEY describes one."


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of fsdp.py: `config`, `overrides`, `dry_run`.

    Args:
        arguments: None = those of this process.
    """
    parser = Parser(description="Train a language model with PyTorch FSDP.", epilog=HELP)
    parser.add_argument(
        "--config", type=path_argument, default=Path("config.yaml"), help="experiment (%(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="hyperparameters to change"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the memory of a step, then exit",
    )
    if arguments is None:
        arguments = sys.argv[1:]
    return parser.parse_intermixed_args(as_overrides(arguments))
