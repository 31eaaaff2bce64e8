"""Command: draw a run as a picture, its terminal output on the left and its loss curves on the right.

    script -qec "make train" terminal.txt
    python -m benchmarks.plot_run runs/quickstart --terminal terminal.txt --out docs/run.png

A terminal's progress bar overwrites its line: of such a line, the picture shows what was last visible.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

COLUMNS, ROWS = 112, 24


def screen(recording: str) -> list[str]:
    """Return the lines that a terminal shows after it printed `recording`."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", recording).replace("\r\n", "\n")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    shown = [line for line in lines if not line.startswith("Script ")]
    wrapped = [part for line in shown for part in textwrap.wrap(line, COLUMNS, replace_whitespace=False) or [""]]
    return [line for at, line in enumerate(wrapped) if line or (at and wrapped[at - 1])][-ROWS:]


def plot(run: Path, terminal: Path, out: Path) -> None:
    """Write the picture to `out`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.8), width_ratios=(1.75, 1), layout="constrained")
    left.set_facecolor("#1e1e1e")
    left.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    font = {"family": "monospace", "fontsize": 8, "linespacing": 1.5, "color": "#d4d4d4", "va": "top"}
    lines = screen(terminal.read_bytes().decode(errors="replace"))
    left.text(0.015, 0.97, "\n".join(lines), parse_math=False, in_layout=False, **font)
    left.set_title("terminal")
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for group in ("training", "validation"):
        points = [(report["step"], report["loss"]) for report in reports if report["group"] == group]
        right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=group)
    right.set(xlabel="step", ylabel="loss (nats per token)", title=run.name)
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_run", description="Draw a run as a picture.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--terminal", type=Path, required=True, help="what the run printed, as script(1) records it")
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args()
    plot(args.run, args.terminal, args.out)
