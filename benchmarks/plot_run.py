"""Command: draw a run as a picture, its terminal output on the left and its loss curves on the right.

    script -qec "make train" terminal.txt
    python -m benchmarks.plot_run runs/quickstart --terminal terminal.txt --out docs/run.png

A terminal's progress bar overwrites its line: of such a line, the picture shows what was last
visible.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lm.report import RunRecords

COLUMNS, ROWS = 112, 24
COLORS = {"": "#d4d4d4", "2": "#858585", "32": "#6fc276", "35": "#c586c0", "36": "#4ec9e0"}
"""by the parameter of the escape sequence that sets it"""


def screen(recording: str) -> list[list[tuple[str, str]]]:
    """Return the last lines that a terminal shows after it printed `recording`: characters and keys of `COLORS`."""
    lines, color = [list[tuple[str, str]]()], ""
    for match in re.finditer(
        r"\x1b\[([0-9;?]*)([A-Za-z])|[^\x1b]", recording.replace("\r\n", "\n")
    ):
        if match[2]:
            color = match[1] if match[1] in COLORS else ""
        elif match[0] == "\r":
            lines[-1] = []
        elif match[0] == "\n":
            lines.append([])
        else:
            if len(lines[-1]) == COLUMNS:
                lines.append([])
            lines[-1].append((match[0], color))
    texts = ["".join(character for character, _ in line).strip() for line in lines]
    shown = [
        at
        for at, text in enumerate(texts)
        if not text.startswith("Script ") and (text or (at and texts[at - 1]))
    ]
    return [lines[at] for at in shown][-ROWS:]


def plot(run: Path, terminal: Path, out: Path) -> None:
    """Write the picture to `out`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    left.set_facecolor("#1e1e1e")
    left.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    lines = screen(terminal.read_bytes().decode(errors="replace"))
    for row, line in enumerate(lines, 1):
        for key, color in COLORS.items():  # a text for each color, with spaces where the others are
            text = "".join(character if its_key == key else " " for character, its_key in line)
            options = {
                "family": "monospace",
                "fontsize": 8,
                "color": color,
                "parse_math": False,
                "in_layout": False,
            }
            left.text(0.015, 1 - row / (ROWS + 1), text, **options)
    left.set_title("terminal")
    records = RunRecords(run)
    for group in ("training", "validation"):
        right.plot(*records.curve(group, "loss"), marker="o", markersize=3, label=group)
    right.set(xlabel="step", ylabel="loss (nats per token)", title=records.name)
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot_run", description="Draw a run as a picture."
    )
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument(
        "--terminal", type=Path, required=True, help="what the run printed, as script(1) records it"
    )
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args()
    plot(args.run, args.terminal, args.out)
