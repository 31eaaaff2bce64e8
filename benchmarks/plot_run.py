"""Command: draw a run as a picture, its terminal output on the left, its loss on the right.

    script -qec "make train" terminal.txt
    python -m benchmarks.plot_run runs/quickstart --terminal terminal.txt --out docs/run.png

A terminal's progress bar overwrites its line: of such a line, the picture shows what was last
visible.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from lm.report import RunRecords

COLUMNS = 112
ROWS = 24
COLORS = {"": "#d4d4d4", "2": "#858585", "32": "#6fc276", "35": "#c586c0", "36": "#4ec9e0"}
"""by the parameter of the escape sequence that sets it"""

_ESCAPE_OR_CHARACTER = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[^\x1b]")


class Character(NamedTuple):
    """What a terminal shows in a column of a line."""

    text: str
    color: str
    """a key of `COLORS`"""


def render_terminal(recording: str) -> list[list[Character]]:
    """Return the last lines that a terminal shows after it printed `recording`."""
    lines: list[list[Character]] = [[]]
    color = ""
    for match in _ESCAPE_OR_CHARACTER.finditer(recording.replace("\r\n", "\n")):
        parameter, is_escape = match[1], match[2] is not None
        if is_escape:
            color = parameter if parameter in COLORS else ""
        elif match[0] == "\r":
            lines[-1] = []
        elif match[0] == "\n":
            lines.append([])
        else:
            if len(lines[-1]) == COLUMNS:
                lines.append([])
            lines[-1].append(Character(match[0], color))

    # Without the lines of script(1), and with one empty line for several.
    shown: list[list[Character]] = []
    text_before = ""
    for line in lines:
        text = "".join(character.text for character in line).strip()
        is_repeated_gap = not text and not text_before
        if not is_repeated_gap and not text.startswith("Script "):
            shown.append(line)
        text_before = text
    return shown[-ROWS:]


def plot_run(run: Path, terminal: Path, out: Path) -> None:
    """Write the picture to `out`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    left.set_facecolor("#1e1e1e")
    left.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    lines = render_terminal(terminal.read_bytes().decode(errors="replace"))
    for row, line in enumerate(lines, 1):
        for key, color in COLORS.items():  # a text for each color, with spaces where the others are
            text = ""
            for character in line:
                text += character.text if character.color == key else " "
            left.text(
                0.015,
                1 - row / (ROWS + 1),
                text,
                family="monospace",
                fontsize=8,
                color=color,
                parse_math=False,
                in_layout=False,
            )
    left.set_title("terminal")
    records = RunRecords(run)
    for group in ("training", "validation"):
        steps, losses = records.curve(group, "loss")
        right.plot(steps, losses, marker="o", markersize=3, label=group)
    right.set(xlabel="step", ylabel="loss (nats per token)", title=records.name)
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot_run", description="Draw a run as a picture."
    )
    add = parser.add_argument
    add("run", type=Path, help="the run's directory")
    terminal_help = "what the run printed, as script(1) records it"
    add("--terminal", type=Path, required=True, help=terminal_help)
    add("--out", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args()
    plot_run(args.run, args.terminal, args.out)
