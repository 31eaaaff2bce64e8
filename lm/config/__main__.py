"""Command: list and describe hyperparameters.

    python -m lm.config [KEY ...] [--presets]

Describes each KEY, without any all hyperparameters, or lists the presets.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from lm.config.hyperparameters import FIELDS, PARTS
from lm.config.table import key_rows, preset_rows, summary
from lm.config.wording import nearest_key
from lm.errors import ConfigError, Parser, command


def _in_columns(first: str, second: str, rest: str) -> str:
    """Return a line with three columns, the last of which is wrapped."""
    line = f"{first:<28}  {second:<14}  {rest}"
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent=" " * 8)


def describe_keys(keys: Collection[str]) -> str:
    """Return the default, meaning and accepted values of `keys`, of none = all, by part."""
    unknown = [key for key in keys if key not in FIELDS]
    if unknown:
        problem = "no such hyperparameter"
        raise ConfigError(*(f"{key}: {problem}{nearest_key(key, FIELDS)}" for key in unknown))
    lines: list[str] = []
    for part in PARTS.values():
        rows = [row for row in key_rows(part) if not keys or row.key.partition(".")[0] in keys]
        if rows:
            lines += ["", summary(part), ""]
        for row in rows:
            lines.append(_in_columns(row.key, row.default, f"{row.meaning} ({row.accepted})"))
    return "\n".join(lines[1:])


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(prog="python -m lm.config", description="List and describe hyperparameters.")
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="hyperparameters to describe (default: all)"
    )
    parser.add_argument("--presets", action="store_true", help="list the presets of `model`")
    args = parser.parse_args(arguments)
    if args.presets:
        print("\n".join(_in_columns(*row) for row in preset_rows()))
    else:
        print(describe_keys(args.keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
