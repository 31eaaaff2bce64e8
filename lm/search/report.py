"""What a search prints while it runs, and its report."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm.errors import escape_control
from lm.launch.console import format_elapsed
from lm.report import PICTURE, format_row, write_files

_MAX_STATUS = 48
"""Characters of a trial's state in a terminal, which shows all columns."""


@dataclass(frozen=True)
class Row:
    """What is known of a trial."""

    name: str
    point: Mapping[str, Any]
    """the hyperparameters that the search varies"""
    state: str
    """active, stopped, completed or dropped"""
    step: int
    """of the rung that it trains to or has ended at; 0 = its point is refused"""
    values: Mapping[int, float]
    """of the searcher's metric, by step"""
    note: str
    """why it was dropped"""

    @property
    def last_step(self) -> int:
        return max(self.values, default=0)

    @property
    def last_value(self) -> float:
        """Of the metric, if it has one."""
        return self.values[self.last_step]

    def result(self) -> str:
        """Return the last value of the metric, and its step."""
        if not self.values:
            return ""
        return f"{self.last_value:.4f} at step {self.last_step}"


def format_value(value: Any) -> str:
    """Return a hyperparameter's value with at most four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape_control(str(value))


class Table:
    """A table that updates in a terminal; elsewhere a line for each change of a trial."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._is_terminal = sys.stdout.isatty()
        self._n_lines = 0
        self._drawn: list[str] = []
        self._shown: dict[str, str] = {}

    def event(self, line: str) -> None:
        """Print a line above the table."""
        self._clear()
        print(f"{format_elapsed()}  {line}", flush=True)

    def show(self, rows: Sequence[Row], running: set[str]) -> None:
        """Show all trials, of which `running` are running."""
        if self._is_terminal:
            self._draw(rows, running)
            return
        for row in rows:
            status = _status(row, running)
            if row.name in running:
                status = f"trains to step {row.step}"  # without what changes all the time
            if self._shown.get(row.name) == status:
                continue
            self._shown[row.name] = status
            line = f"{row.name} {status}"
            if row.values and row.name not in running:
                line = f"{line}, {self._metric} {row.result()}"
            if row.point:
                values = [f"{key}={format_value(value)}" for key, value in row.point.items()]
                line = f"{line} ({', '.join(values)})"
            print(f"{format_elapsed()}  {line}", flush=True)

    def _draw(self, rows: Sequence[Row], running: set[str]) -> None:
        size = shutil.get_terminal_size()
        keys: list[str] = []
        if rows:
            keys = list(rows[0].point)
        cells = [["trial", "", self._metric, *keys]]
        # What runs is last, and what is cut off above the terminal's first line has ended. At the
        # end of the search, the best is first.
        n_rows = max(3, size.lines - 4)
        shown = sorted(rows, key=lambda row: row.state == "active")[-n_rows:]
        if all(row.state != "active" for row in rows):
            shown = rows[:n_rows]
        for row in shown:
            values = [format_value(value) for value in row.point.values()]
            status = _status(row, running)[:_MAX_STATUS]
            cells.append([row.name, status, row.result(), *values])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines: list[str] = []
        for row_cells in cells:
            padded = [cell.ljust(width) for cell, width in zip(row_cells, widths, strict=True)]
            lines.append("  ".join(padded)[: size.columns - 1])
        if lines == self._drawn and self._n_lines:
            return
        self._clear()
        print("\n".join(lines), flush=True)
        self._n_lines = len(lines)
        self._drawn = lines

    def _clear(self) -> None:
        if self._n_lines:
            print(f"\x1b[{self._n_lines}F\x1b[J", end="")
            self._n_lines = 0

    def end(self, best: Row, metric: str, command: Sequence[str], written: str, note: str) -> None:
        """Print the best trial, how to train on, and where the report is."""
        line = f"best: {best.name}, {metric} {best.result()}"
        if best.point:
            values = [f"{key} {format_value(value)}" for key, value in best.point.items()]
            line = f"{line}: {', '.join(values)}"
        print(line)
        if note:
            print(note)
        print(f"report: {written}")
        print("to train at this point, at full length or longer (max_steps=N):")
        print(f"    {shlex.join(command)}")


def _status(row: Row, running: set[str]) -> str:
    """Return what a trial does or did."""
    if row.name in running:
        return f"trains to step {row.step}, last validated at {row.last_step}"
    if row.state == "active" and not row.values:
        return "waits to start"
    if row.state == "active":
        return f"waits at step {row.last_step}"
    if row.state == "dropped":
        return f"dropped: {escape_control(row.note)}"
    return f"{row.state} at step {row.step}"


def explain_overtaken(rows: Sequence[Row]) -> str:
    """Return a line on trials that were stopped with a better value than the best one; or ""."""
    if not rows:
        return ""
    shown = ", ".join(f"{row.name} ({row.result()})" for row in rows[:5])
    if len(rows) > 5:
        shown = f"{shown}, ..."
    reason = "when they were stopped at a rung, others there were better still"
    return f"better, but not complete: {shown}: {reason}"


def write_report(
    directory: Path, ranked: Sequence[Row], metric: str, command: Sequence[str], explanation: str
) -> str:
    """Write the report on a search, whose best trial is first. Return what was written."""
    format_text = partial(format_report, directory.name, ranked, metric, command, explanation)
    return write_files(directory, partial(draw, ranked, metric), format_text)


def format_report(
    name: str,
    ranked: Sequence[Row],
    metric: str,
    command: Sequence[str],
    explanation: str,
    picture: Path | None,
) -> str:
    """Return the report on the search `name` as Markdown."""
    best = ranked[0]
    lines = [f"# Search {name}", ""]
    lines += [f"Best: {best.name}, {metric} {best.result()}. To train at its point:", ""]
    lines += [f"    {shlex.join(command)}", ""]
    if explanation:
        lines += [f"{explanation}.", ""]
    if picture is not None:
        lines += [f"![learning curves and parallel coordinates]({PICTURE})", ""]
    keys = list(best.point)
    lines.append(format_row(["trial", *keys, metric, "step", "state"]))
    lines.append(format_row(["---"] * (len(keys) + 4)))
    for row in ranked:
        value = ""
        if row.values:
            value = f"{row.last_value:.4f}"
        values = [format_value(each) for each in row.point.values()]
        state = row.state
        if row.note:
            state = f"{state}: {row.note}"
        lines.append(format_row([row.name, *values, value, str(row.last_step), state]))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Axis:
    """An axis of the parallel coordinates: a hyperparameter or the metric, by trial."""

    name: str
    values: Sequence[Any]

    def positions(self) -> list[float]:
        """Return where the values are from 0 to 1: numbers by size, others by name."""
        if any(isinstance(each, bool) or not isinstance(each, int | float) for each in self.values):
            names = [str(value) for value in self.values]
            order = sorted(set(names))
            return _spread([float(order.index(name)) for name in names])
        low = min(self.values)
        if low > 0 and max(self.values) / low > 20:  # more than a decade: a logarithmic axis
            return _spread([math.log(value) for value in self.values])
        return _spread(self.values)


def _spread(numbers: Sequence[float]) -> list[float]:
    """Return numbers moved and scaled to 0 to 1."""
    low = min(numbers)
    width = max(max(numbers) - low, 1e-12)
    return [(number - low) / width for number in numbers]


def draw(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Draw learning curves and parallel coordinates of trials, of which the first is the best.

    Raises ImportError without matplotlib.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    best = rows[0]
    measured = [row for row in rows if row.values]
    final_values = [row.last_value for row in measured]
    styles: list[dict[str, Any]] = []
    for row, position in zip(measured, _spread(final_values), strict=True):
        if row is best:
            label = f"{row.name} (best)"
            styles.append({"color": "C3", "linewidth": 2.5, "zorder": 3, "label": label})
        else:
            styles.append({"color": colormaps["viridis"](position), "linewidth": 1})

    figure = Figure(figsize=(12, 8), layout="constrained")
    curves, coordinates = figure.subplots(2, 1)
    for row, style in zip(measured, styles, strict=True):
        curves.plot(list(row.values), list(row.values.values()), "o-", markersize=3, **style)
    curves.set(title=f"{metric} by step", xlabel="step")
    curves.grid(alpha=0.3)
    curves.legend()

    axes = [_Axis(key, [row.point[key] for row in measured]) for key in best.point]
    axes.append(_Axis(metric, final_values))
    heights_of_trials = zip(*[axis.positions() for axis in axes], strict=True)
    for heights, style in zip(heights_of_trials, styles, strict=True):
        coordinates.plot(range(len(axes)), heights, **style)
    for x, axis in enumerate(axes):
        with suppress(TypeError):  # values without an order, e.g. of several types
            coordinates.text(x, -0.06, format_value(min(axis.values)), ha="center", va="top")
            coordinates.text(x, 1.06, format_value(max(axis.values)), ha="center")
        coordinates.axvline(x, color="black", linewidth=0.5)
    coordinates.set(title="hyperparameters of each trial", yticks=[], ylim=(-0.2, 1.2))
    coordinates.set_xticks(range(len(axes)), [axis.name for axis in axes])
    figure.savefig(path, dpi=100)
