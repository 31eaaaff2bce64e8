"""Command: report on runs, as a table and as curves.

    python -m lm.report RUN [RUN ...]

Writes report.md and, if matplotlib is installed, report.png to the directory of the run, which a
run also does when it ends or stops. Several runs are side by side, with the hyperparameters that
differ, in the directory that holds them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import sys
import textwrap
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from lm.command_line import format_table, path_argument
from lm.errors import (
    ConfigError,
    Parser,
    command,
    escape_control,
    nearest_file,
    oserror_as_config_error,
)
from lm.fileio import Line, Seconds, read_records
from lm.launch.requirements import requires
from lm.metrics.records import Logged, Report, Sample
from lm.runtime.run_dir import last_logged

_PANELS = ("lr", "grad_norm", "tokens_per_second")
"""Metrics of training that have a panel in the picture, below those of validation."""
_VALIDATION = re.compile(
    r"(loss|bits_per_byte|reward_accuracy|reward_margin)(_[\w-]+)?|eval_[\w-]+_(acc|bpb)", re.ASCII
)
"""Metrics of validation that are shown, not perplexity, which says what the loss does."""


class _Summary(NamedTuple):
    """A row of the table that combines the values of a metric of the training reports."""

    metric: str
    combine: Callable[[Sequence[float]], float]
    format_spec: str


_SUMMARIES = {
    "tokens/s (median)": _Summary("tokens_per_second", statistics.median, ",.0f"),
    "MFU (median)": _Summary("mfu", statistics.median, ".1%"),
    "peak memory per rank (GiB)": _Summary("peak_memory_gib", max, ".2f"),
    "allocation retries": _Summary("allocation_retries", sum, ".0f"),
    "waiting for data (%, mean)": _Summary("waiting_for_data_percent", statistics.mean, ".1f"),
    "training blocked by saving (s)": _Summary("save_stall_seconds", sum, ".1f"),
    "skipped steps": _Summary("skipped_steps", sum, ".0f"),
}
REPORT = "report.md"
PICTURE = "report.png"
JOURNAL = "search.journal"
"""of a search, whose directory holds the runs of its trials"""
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Session(Line, frozen=True):
    """A line of sessions.jsonl."""

    last_write: Seconds | None
    tokens_per_step: _Count
    ranks: _Count
    gpus: _Count
    device: str
    host: str
    versions: str
    command: str
    validation_data: str | None = None
    """what identifies them and their tokenizer; None = unknown"""


class _Curve(NamedTuple):
    """A metric by step."""

    steps: array[int]
    values: array[float]


class RunRecords:
    """What the files of the run directory at `path` say.

    Raises:
        ConfigError: it is not a run directory.
    """

    def __init__(self, path: Path) -> None:
        from lm import strict_yaml

        if not (path / "metrics.jsonl").is_file():
            problem = "is not a run directory: it has no metrics.jsonl"
            advice = nearest_file(path)
            if next(path.glob("*/metrics.jsonl"), None):
                advice = f"; it has runs: use {shlex.quote(str(path))}/*"
            raise ConfigError(f"{path.absolute()}: {problem}{advice}")
        self.name = path.resolve().name
        self.hyperparameters = {}
        config = path / "config.yaml"
        if config.is_file():
            self.hyperparameters = strict_yaml.load_experiment(config)[0]["hyperparameters"]
            if not isinstance(self.hyperparameters, dict):
                problem = "is not a mapping of keys to values"
                raise ConfigError(f"{config}: hyperparameters: {problem}; delete the file")
        self.step = 0
        self._curves: dict[tuple[str, str], _Curve] = {}
        for report in read_records(path / "metrics.jsonl", Report):
            self.step = max(self.step, report.step)
            for metric, value in report.__pydantic_extra__.items():
                key = report.group, metric
                if key not in self._curves:
                    self._curves[key] = _Curve(array("q"), array("d"))
                steps, values = self._curves[key]
                steps.append(report.step)
                values.append(value)
        self.sample: Sample | None = None
        """the last one"""
        for sample in read_records(path / "samples.jsonl", Sample):
            self.sample = sample
        self.sessions = list(read_records(path / "sessions.jsonl", _Session))
        for checkpoint in read_records(path / "checkpoints.jsonl", Logged):
            self.step = max(self.step, checkpoint.step)  # a stop saves, but does not report
        self._last_write = last_logged(path)

    @property
    def validation_data(self) -> str | None:
        """What identifies the data of the last validations; None = unknown."""
        return self.sessions[-1].validation_data if self.sessions else None

    @property
    def validation_source(self) -> str:
        """Where the validation data are from, as the hyperparameters say."""
        values = self.hyperparameters
        if values.get("val_data") is not None:
            return str(values["val_data"])
        return f"held out of {values.get('train_data') or values.get('dataset', 'train_data')}"

    def curve(self, group: str, metric: str) -> _Curve:
        """Return the steps and values of a metric."""
        return self._curves.get((group, metric), _Curve(array("q"), array("d")))

    def validated(self) -> list[str]:
        """Return the metrics of validations that are shown, as first reported."""
        metrics = [metric for group, metric in self._curves if group == "validation"]
        return [metric for metric in metrics if _VALIDATION.fullmatch(metric)]

    def summarize(self) -> dict[str, str]:
        """Return the rows of the table that are known, by label."""
        rows: dict[str, str] = {}
        for metric in self.validated():
            steps, values = self.curve("validation", metric)
            best = min(values)
            if metric.startswith("reward_") or metric.endswith("_acc"):
                best = max(values)
            step = steps[values.index(best)]
            rows[f"validation {metric}"] = f"{values[-1]:.4f}, best {best:.4f} (step {step})"
        _, losses = self.curve("training", "loss")
        if losses:
            rows["training loss"] = f"{losses[-1]:.4f}"
        for label, summary in _SUMMARIES.items():
            _, values = self.curve("training", summary.metric)
            if values:
                rows[label] = format(summary.combine(values), summary.format_spec)
        if self.sessions:
            rows |= self._summarize_sessions()
        return rows

    def _summarize_sessions(self) -> dict[str, str]:
        last = self.sessions[-1]
        seconds = self._session_seconds()
        gpu_seconds = 0.0
        for session, duration in zip(self.sessions, seconds, strict=True):
            gpu_seconds += session.gpus * duration

        rows: dict[str, str] = {}
        rows["steps"] = f"{self.step} of {self.hyperparameters.get('max_steps') or self.step}"
        rows["tokens"] = f"{self.step * last.tokens_per_step:,}"
        wall_time = timedelta(seconds=int(min(sum(seconds), 2.0**36)))
        rows["wall time"] = f"{wall_time}, {len(seconds)} start(s)"
        if gpu_seconds:
            gpu_hours = gpu_seconds / 3600
            rows["GPU-hours"] = f"{gpu_hours:.2f}"
            if gpu_hours < 0.01:
                rows["GPU-hours"] = "under 0.01"
        rows["hardware"] = f"{last.ranks} x {last.device}, {last.host}"
        rows["versions"] = last.versions
        rows["command"] = f"`{last.command}`"
        return rows

    def _session_seconds(self) -> list[float]:
        """Return how long each session was, as far as its files say."""
        # A session notes when the one before it last wrote: None if it wrote nothing.
        ends = [session.last_write for session in self.sessions[1:]]
        ends.append(self._last_write)
        starts = [session.time for session in self.sessions]
        return [max(0.0, (end or 0) - start) for start, end in zip(starts, ends, strict=True)]


def format_report(runs: Sequence[RunRecords], picture: Path | None = None) -> str:
    """Return the report on `runs` as Markdown."""
    names = [run.name for run in runs]
    lines = [f"# {' and '.join(names)}", ""]
    columns = [run.summarize() for run in runs]
    numbers = _number_validation_data(runs)
    if max(numbers) > 1:
        for i, run in enumerate(runs):
            columns[i] = {"validation data": f"{numbers[i]}: {run.validation_source}"} | columns[i]
        lines += ["Losses on other validation data, or of other tokenizers, do not compare.", ""]
    lines += _compare_columns(names, columns)
    differences = _find_differences(runs)
    if any(differences):
        lines += ["", "Hyperparameters that differ:", ""]
        lines += _compare_columns(names, differences)
    if picture is not None:
        lines += ["", f"![curves by step]({picture.name})"]
    for run in runs:
        sample = run.sample
        if sample is not None:
            text = escape_control(sample.prompt + sample.text)
            lines += ["", f"Sample of {run.name} after step {sample.step}:", ""]
            lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def _number_validation_data(runs: Sequence[RunRecords]) -> list[int]:
    """Return the number of each run's validation data; those of the first run have number 1."""
    known = list(dict.fromkeys(run.validation_data for run in runs))
    return [known.index(run.validation_data) + 1 for run in runs]


def _find_differences(runs: Sequence[RunRecords]) -> list[dict[str, str]]:
    """Return of each run the hyperparameters that are not the same in all runs."""
    columns: list[dict[str, str]] = []
    for run in runs:
        column: dict[str, str] = {}
        for key, value in run.hyperparameters.items():
            if key != "run_name":
                column[f"`{key}`"] = json.dumps(value, default=str)
        columns.append(column)
    common = set(columns[0].items())
    for column in columns:
        common &= set(column.items())
    return [dict(item for item in column.items() if item not in common) for column in columns]


def _compare_columns(names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with a column for each of `names`; a row of all is a label."""
    labels: list[str] = []
    for column in columns:
        place = 0
        for label in column:
            if label in labels:
                place = labels.index(label)
            else:  # where its run has it
                labels.insert(place, label)
            place += 1
    rows = [["", *names]]
    for label in labels:
        cells = [column.get(label, "") for column in columns]
        rows.append([label, *cells])
    return format_table(rows)


class _Panel(NamedTuple):
    """Curves of a metric, one or two of each run."""

    title: str
    metric: str
    groups: Sequence[str]
    runs: Sequence[int]
    """numbers of those that are drawn"""


def _list_panels(runs: Sequence[RunRecords]) -> list[_Panel]:
    """Return the panels of the picture. Losses on other validation data are in separate ones."""
    data = _number_validation_data(runs)
    metrics = dict.fromkeys(metric for run in runs for metric in run.validated())
    panels: list[_Panel] = []
    for metric in dict.fromkeys(["loss", *metrics]):
        groups = ["validation"]
        if metric == "loss":
            groups.append("training")
        for number in sorted(set(data)):
            title = metric
            own = [i for i, run in enumerate(runs) if metric == "loss" or metric in run.validated()]
            if metric.startswith("loss") and max(data) > 1:
                title += f", validation data {number}"
                own = [i for i in own if data[i] == number]
            if own:
                panels.append(_Panel(title, metric, groups, own))
    panels += [_Panel(metric, metric, ["training"], range(len(runs))) for metric in _PANELS]
    return list({panel.title: panel for panel in panels}.values())


def draw_curves(runs: Sequence[RunRecords], path: Path) -> None:
    """Draw the curves of `runs`; raise ImportError without matplotlib.

    A color is a run, a line is training, and a dashed one with points is validation. The panels of
    losses are as wide as the picture, three others are in a row.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    panels = {panel.title: panel for panel in _list_panels(runs)}
    rows: Any = [[title] * 3 for title, panel in panels.items() if panel.metric == "loss"]
    heights = [5.0] * len(rows)  # inches
    others = [title for title, panel in panels.items() if panel.metric != "loss"]
    for start in range(0, len(others), 3):
        rows.append([*others[start : start + 3], ".", "."][:3])
        heights.append(2.5)
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    for title, axes in figure.subplot_mosaic(rows, height_ratios=heights).items():
        panel = panels[title]
        for number in panel.runs:
            for group in panel.groups:
                style = "-" if group == "training" else "o--"
                steps, values = runs[number].curve(group, panel.metric)
                label = group if number == panel.runs[0] else None
                axes.plot(steps, values, style, color=f"C{number}", markersize=4, label=label)
        if len(panel.groups) > 1:
            axes.legend()
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))  # short, whatever the values
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        lines = [Line2D([], [], color=f"C{number}") for number in range(len(runs))]
        names = [textwrap.shorten(run.name, 40).replace("$", r"\$") for run in runs]
        figure.legend(lines, names, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=100)


def write_report_files(runs: Sequence[RunRecords], directory: Path) -> str:
    """Write the report on `runs` to `directory`. Return what was written."""
    text = directory / REPORT
    picture = directory / PICTURE
    for file in (text, picture):
        file.unlink(missing_ok=True)  # neither follow a link nor leave an old picture
    drawn: Path | None = None
    note = ""
    if any(len(run.curve("training", "loss").steps) > 1 for run in runs):
        try:
            draw_curves(runs, picture)
            drawn = picture
            note = f" and {PICTURE}"
        except ImportError:
            note = f" ({PICTURE} {requires('matplotlib')})"
    text.write_text(format_report(runs, drawn), encoding="utf-8")
    return f"{text}{note}"


def write_report(run: Path) -> str:
    """Write the report on a run to its directory. Return what was written, or why it was not."""
    try:
        return write_report_files([RunRecords(run)], run)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: cannot be written ({error.strerror})"
    except Exception as error:  # the run is complete and saved, whatever its description is worth
        return f"{run / REPORT}: cannot be written ({type(error).__name__}: {error})"


def select_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories of `paths`, which may be all that a shell finds for `runs/*`.

    Leaves out files, searches, and runs that ended before they reported anything.
    """
    runs: list[Path] = []
    for path in paths:
        if path.is_file():
            continue
        if (path / JOURNAL).is_file():
            print(f"{path}: left out: it is a search; pass its trials, {path}/*", file=sys.stderr)
            continue
        if (path / "lock").is_file() and not (path / "metrics.jsonl").exists():
            print(f"{path}: left out: it has reported nothing", file=sys.stderr)
            continue
        runs.append(path)
    if not runs:
        given = " ".join(str(path) for path in paths)
        raise ConfigError(f"{given}: no run that has reported anything; pass the directory of one")
    return runs


@oserror_as_config_error
def make_report(paths: Sequence[Path]) -> str:
    """Write the report on the runs at `paths`, and return what the command prints."""
    selected = select_runs(paths)
    runs = [RunRecords(path) for path in selected]
    common_parent = os.path.commonpath([path.absolute() for path in selected])
    written = write_report_files(runs, Path(os.path.relpath(common_parent)))
    return f"{format_report(runs)}\n{written}"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(prog="python -m lm.report", description="Report on runs.")
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="run directory")
    print(make_report(parser.parse_args(arguments).runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
