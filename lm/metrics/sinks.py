"""Destinations of metrics: metrics.jsonl, TensorBoard, Core API and the console.

To add a sink, write a class with the methods of `Sink` and add it to the list in `make_sinks`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from determined import core

from lm.determined import master
from lm.determined.master import BackgroundReporter
from lm.fileio import open_regular, write_durably

if TYPE_CHECKING:
    from tqdm import tqdm


class Sink(Protocol):
    """A destination of metrics, on rank 0."""

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `group`, "training" or "validation", after `step` completed steps."""

    def close(self) -> None:
        """Write what is buffered, and release files and threads."""


def make_sinks(
    run_dir: Path | None, core_api: CoreAPI | None, console: Console, start: int, missing: Collection[str]
) -> list[Sink]:
    """Return the sinks of a run that starts after `start` completed steps, without records of the groups `missing`."""
    sinks: list[Sink] = [core_api] if core_api else []
    if run_dir:
        sinks += [JSONL(run_dir / "metrics.jsonl", start, missing)]
        sinks += [
            TensorBoard(run_dir / "tensorboard", start if {"training", "validation"} <= set(missing) else start + 1)
        ]
    return [*sinks, console]


class JSONL:
    """A file with a line of JSON per report.

    Lines from before a restart are removed if they are of a step after `start`, or of step `start` and of a group that
    is `missing` in the checkpoint of that step.
    """

    def __init__(self, path: Path, start: int, missing: Collection[str]) -> None:
        kept = []
        with suppress(FileNotFoundError), open(path, errors="replace", opener=open_regular) as file:
            for line in file.read().splitlines():
                with suppress(ValueError, TypeError, KeyError, RecursionError):  # cut by a kill, or not a record
                    record = json.loads(line)
                    if record["step"] < start or (record["step"] == start and record["group"] not in missing):
                        kept.append(line + "\n")
        draft = path.with_suffix(".draft")
        write_durably(draft, "".join(kept).encode())
        draft.replace(path)
        self._file = open(path, "a", opener=open_regular)  # noqa: SIM115 - `close` closes it

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        record = {"group": group, "step": step, "time": round(time.time(), 3), **metrics}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars `<group>/<metric>` for TensorBoard. Those of step `purge_step` and later are removed."""

    def __init__(self, directory: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._excepthook, threading.excepthook = threading.excepthook, self._print_exception
        self._writer = SummaryWriter(directory, purge_step=purge_step, flush_secs=10)

    def _print_exception(self, exception: threading.ExceptHookArgs) -> None:
        # The exception of the writer's thread is raised by the next `log` or `close`.
        if not type(exception.thread).__module__.startswith("tensorboard."):
            self._excepthook(exception)

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(f"{group}/{key}", value, step)

    def close(self) -> None:
        threading.excepthook = self._excepthook
        self._writer.close()


class CoreAPI:
    """Metrics, progress and status of the trial in Determined's Web UI.

    In a search, every report is followed by the question whether the search has stopped the trial.
    """

    def __init__(self, train_context: core.TrainContext, max_steps: int, in_search: bool) -> None:
        self._train_context = train_context
        self._max_steps = max_steps
        self._in_search = in_search
        self._background = BackgroundReporter()
        self.stopped_by_search = False

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        self._train_context.report_metrics(group, steps_completed=step, metrics=dict(metrics))
        if group == "training":
            self._background.submit(self._train_context.report_progress, min(1.0, step / self._max_steps))
        if self._in_search:
            self._background.submit(self._ask, self._train_context)

    def _ask(self, train_context: core.TrainContext) -> None:
        self.stopped_by_search |= master.is_stopped(train_context)

    def set_status(self, status: str) -> None:
        self._background.submit(self._train_context.set_status, status)

    def close(self) -> None:
        self._background.close()


_FORMATS = {
    "loss": ("loss", "7.4f"),
    "perplexity": ("perplexity", "<7.4g"),
    "bits_per_byte": ("bits per byte", ".3f"),
    "lr": ("lr", ".2e"),
    "grad_norm": ("grad norm", "<6.3g"),
    "tokens_per_second": ("tokens/s", "7,.0f"),
    "mfu": ("MFU", "5.1%"),
    "peak_memory_gib": ("GiB", ".1f"),
}
"""Labels and formats of the metrics that the console shows."""


class Console:
    """A line per report, on a terminal above a progress bar."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._bar: tqdm[Any] | None = None

    def start(self, step: int) -> None:
        self._start_step, self._start_time = step, time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._max_steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)

    def info(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            with suppress(OSError):  # a full disk, or head has closed the pipe: training continues
                print(line, flush=True)

    def on_step_end(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        shown = [f"{label} {metrics[key]:{spec}}" for key, (label, spec) in _FORMATS.items() if key in metrics]
        if group == "training" and self._bar is None and step > self._start_step:
            from tqdm import tqdm

            step_seconds = (time.monotonic() - self._start_time) / (step - self._start_step)
            shown.append(f"left {tqdm.format_interval(step_seconds * (self._max_steps - step))}")
        end = f"/{self._max_steps}" if self._max_steps else ""
        self.info(f"{group:<10}  step {step:>{max(len(end) - 1, 1)}}{end}  {'  '.join(shown)}".rstrip())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
