"""Command: report on runs, as a table and as curves.

    python -m lm.report RUN [RUN ...]

Writes report.md and, if matplotlib is installed, report.png to the directory of the run, which a
run also does when it ends or stops. Several runs are side by side, with the hyperparameters that
differ, in the directory that holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from lm.errors import ConfigError, command, escape_control, oserror_as_config_error
from lm.fileio import read_records

_PANELS = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
_SUMMARIES: dict[str, tuple[str, Callable[[list[float]], float], str]] = {
    "tokens/s (median)": ("tokens_per_second", statistics.median, ",.0f"),
    "MFU (median)": ("mfu", statistics.median, ".1%"),
    "peak memory per rank (GiB)": ("peak_memory_gib", max, ".2f"),
    "waiting for data (%, mean)": ("waiting_for_data_percent", statistics.mean, ".1f"),
    "training blocked by saving (s)": ("save_stall_seconds", sum, ".1f"),
    "skipped steps": ("skipped_steps", sum, ".0f"),
}
"""Rows of the table: the metric of the training reports, how it is combined, and its format."""
_KEYS = {
    "metrics": {"group", "step", "time"},
    "samples": {"step", "time", "prompt", "text"},
    "sessions": {"step", "time", "last_write", "tokens_per_step"}
    | {"ranks", "gpus", "device", "host", "versions", "command"},
}
"""What every line of these files has."""


class RunRecords:
    """What the files of the run directory at `path` say.

    Raises:
        ConfigError: it is not a run directory.
    """

    def __init__(self, path: Path) -> None:
        from lm import strict_yaml

        if not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{path.absolute()}: is not a run directory: it has no metrics.jsonl")
        self.name, config = path.resolve().name, path / "config.yaml"
        self.hyperparameters = (
            strict_yaml.load(config)[0]["hyperparameters"] if config.is_file() else {}
        )
        self.metrics, self.samples, self.sessions = (
            read_records(path / f"{name}.jsonl", keys) for name, keys in _KEYS.items()
        )

    def curve(self, group: str, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a metric."""
        found = [each for each in self.metrics if each["group"] == group and key in each]
        return [each["step"] for each in found], [each[key] for each in found]

    def facts(self) -> dict[str, str]:
        """Return the rows of the table that are known."""
        facts: dict[str, str] = {}
        steps, losses = self.curve("validation", "loss")
        if losses:
            best = min(losses)
            facts["validation loss"] = (
                f"{losses[-1]:.4f}, best {best:.4f} (step {steps[losses.index(best)]})"
            )
        for last in self.curve("training", "loss")[1][-1:]:
            facts["training loss"] = f"{last:.4f}"
        for label, (key, combine, spec) in _SUMMARIES.items():
            if values := self.curve("training", key)[1]:
                facts[label] = f"{combine(values):{spec}}"
        for last in self.sessions[-1:]:
            step = max((each["step"] for each in self.metrics), default=0)
            starts, ends = ([each[key] for each in self.sessions] for key in ("time", "last_write"))
            ends = [
                *ends[1:],
                max((each["time"] for each in self.metrics + self.samples), default=0),
            ]
            seconds = [
                max(0.0, (end or 0) - start) for start, end in zip(starts, ends, strict=True)
            ]
            facts["steps"] = f"{step} of {self.hyperparameters.get('max_steps') or step}"
            facts["tokens"] = f"{step * last['tokens_per_step']:,}"
            facts["wall time"] = f"{timedelta(seconds=int(sum(seconds)))}, {len(seconds)} start(s)"
            if used := sum(
                each["gpus"] * time for each, time in zip(self.sessions, seconds, strict=True)
            ):
                facts["GPU-hours"] = f"{used / 3600:.2f}"
            facts["hardware"] = f"{last['ranks']} x {last['device']}, {last['host']}"
            facts["versions"] = last["versions"]
            facts["command"] = f"`{last['command']}`"
        return facts


def page(runs: Sequence[RunRecords], picture: Path | None = None) -> str:
    """Return the report on `runs` as Markdown."""
    lines = [
        f"# {' and '.join(run.name for run in runs)}",
        "",
        *_table(runs, [run.facts() for run in runs]),
    ]
    if len(runs) > 1:
        shown = [
            {
                f"`{key}`": json.dumps(value)
                for key, value in run.hyperparameters.items()
                if key != "run_name"
            }
            for run in runs
        ]
        common = set.intersection(*(set(each.items()) for each in shown))
        differing = [dict(item for item in each.items() if item not in common) for each in shown]
        if any(differing):
            lines += ["", "Hyperparameters that differ:", "", *_table(runs, differing)]
    lines += ["", f"![curves by step]({picture.name})"] if picture else []
    for run in runs:
        for sample in run.samples[-1:]:
            text = escape_control(sample["prompt"] + sample["text"]).splitlines()
            lines += [
                "",
                f"Sample of {run.name} after step {sample['step']}:",
                "",
                *(f"    {line}" for line in text),
            ]
    return "\n".join(lines) + "\n"


def _table(runs: Sequence[RunRecords], columns: Sequence[dict[str, str]]) -> list[str]:
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [["", *(run.name for run in runs)], ["---"] * (len(runs) + 1)]
    rows += [[label, *(column.get(label, "") for column in columns)] for label in labels]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def draw(runs: Sequence[RunRecords], path: Path) -> None:
    """Draw the curves of `runs`; raise ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplot_mosaic([["loss"] * len(_PANELS), list(_PANELS)], height_ratios=(2, 1))
    for number, run in enumerate(runs):
        for group, color, style in (
            ("training", number, "-"),
            ("validation", number + (len(runs) == 1), "o--"),
        ):
            label = f"{run.name} {group}" if len(runs) > 1 else group
            axes["loss"].plot(
                *run.curve(group, "loss"), style, color=f"C{color}", markersize=4, label=label
            )
        for key in _PANELS:
            axes[key].plot(*run.curve("training", key), color=f"C{number}")
    for key, panel in axes.items():
        panel.set(title=_PANELS.get(key, "loss (nats per token)"), xlabel="step")
        panel.grid(alpha=0.3)
    axes["loss"].legend()
    figure.savefig(path, dpi=100)


def write(paths: Sequence[Path], directory: Path) -> str:
    """Write the report on the runs at `paths` to `directory`. Return what was written."""
    runs, text, picture = (
        [RunRecords(path) for path in paths],
        directory / "report.md",
        directory / "report.png",
    )
    has_curves, note = any(len(run.curve("training", "loss")[0]) > 1 for run in runs), ""
    for file in (text, picture):
        file.unlink(missing_ok=True)  # neither follow a link nor leave an old picture
    try:
        if has_curves:
            draw(runs, picture)
    except ImportError:
        has_curves, note = False, " (report.png requires a package: pip install matplotlib)"
    text.write_text(page(runs, picture if has_curves else None))
    return f"{text}{' and report.png' * has_curves}{note}"


def write_report(run: Path) -> str:
    """Write the report on a run to its directory. Return what was written, or why it could not be."""
    try:
        return write([run], run)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: cannot be written ({error.strerror})"


@command
@oserror_as_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lm.report", description="Report on runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    paths = parser.parse_args(arguments).runs
    written = write(
        paths, Path(os.path.relpath(os.path.commonpath([path.absolute() for path in paths])))
    )
    print(page([RunRecords(path) for path in paths]), written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
