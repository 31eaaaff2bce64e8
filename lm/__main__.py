"""Print the commands, each with the first line of its docstring."""

from __future__ import annotations

import sys
from pathlib import Path

from lm.errors import command

_START = '"""Command: '


@command
def main() -> int:
    """Run the command. Return its exit code."""
    print("usage: python -m COMMAND --help")
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        with path.open() as file:
            line = file.readline()
        if line.startswith(_START):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__main__")
            what = line.removeprefix(_START).rstrip('."\n')
            print(f"  {name:<15}{what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
