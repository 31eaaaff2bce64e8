"""Command: list and describe hyperparameters.

    python -m lm.config [KEY ...] [--presets]

Lists all hyperparameters, describes each KEY, or lists the presets.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from lm.config.hyperparameters import FIELDS, PARTS
from lm.config.table import key_rows, preset_rows, summary
from lm.config.wording import nearest_key
from lm.errors import ConfigError, command


def _align(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Align `rows` in columns, the last of which is wrapped at the width of the terminal."""
    first = max(len(row[0]) for row in rows)
    second = max(len(row[1]) for row in rows)
    indent = first + second + 4
    width = max(indent + 20, shutil.get_terminal_size().columns)
    aligned: list[str] = []
    for left, middle, right in rows:
        line = f"{left:<{first}}  {middle:<{second}}  {right}"
        aligned.append(textwrap.fill(line, width, subsequent_indent=" " * indent))
    return aligned


def list_keys() -> str:
    """Return all keys with defaults and meanings, under a heading for each part."""
    headings: dict[int, str] = {}
    """by the number of the row that follows"""
    rows: list[tuple[str, str, str]] = []
    for part in PARTS.values():
        headings[len(rows)] = summary(part)
        keys = [row for row in key_rows(part) if "." not in row.key]  # not in a mapping
        rows += [(row.key, row.default, row.meaning) for row in keys]
    lines: list[str] = []
    for number, line in enumerate(_align(rows)):
        if number in headings:
            lines += ["", headings[number], ""]
        lines.append(line)
    return "\n".join(lines[1:])


def describe_keys(keys: Collection[str]) -> str:
    """Return the defaults, meanings and accepted values of `keys`; refuse unknown ones."""
    unknown = [key for key in keys if key not in FIELDS]
    if unknown:
        problem = "no such hyperparameter"
        raise ConfigError(*(f"{key}: {problem}{nearest_key(key, FIELDS)}" for key in unknown))
    rows: list[tuple[str, str, str]] = []
    for part in PARTS.values():
        chosen = [row for row in key_rows(part) if row.key.partition(".")[0] in keys]
        rows += [(row.key, row.default, f"{row.meaning} ({row.accepted})") for row in chosen]
    return "\n".join(_align(rows))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.config", description="List and describe hyperparameters."
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="hyperparameters to describe (default: list all)"
    )
    parser.add_argument("--presets", action="store_true", help="list the presets of `model`")
    args = parser.parse_args(arguments)
    if args.presets:
        print("\n".join(_align(list(preset_rows()))))
    elif args.keys:
        print(describe_keys(args.keys))
    else:
        print(list_keys())
    return 0


if __name__ == "__main__":
    sys.exit(main())
