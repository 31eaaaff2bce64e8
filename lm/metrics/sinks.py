"""Destinations of metrics and samples: JSON lines, TensorBoard, Core API and the console.

To add a sink, write a class with the methods of `Sink` and create it in `MetricLogger.start`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from determined import core

from lm.determined import master
from lm.determined.master import BackgroundReporter
from lm.errors import escape_control
from lm.fileio import open_regular, read_records, replace_durably
from lm.launch.environment import elapsed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm


class Sink(Protocol):
    """A destination of metrics and samples, on rank 0."""

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `group`, "training" or "validation", after `step` completed steps."""

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Write `text`, the continuation of `prompt` after `step` completed steps."""

    def close(self) -> None:
        """Write what is buffered, and release files and threads."""


class JSONL:
    """metrics.jsonl and samples.jsonl, with a line of JSON per report and per sample.

    Lines from before a restart are removed if they are of a step after `start`, or of step `start` and of a group that
    is `missing` in the checkpoint of that step.
    """

    def __init__(self, run_dir: Path, start: int, missing: Collection[str]) -> None:
        self._metrics, self._samples = (
            self._open(run_dir / name, start, missing) for name in ("metrics.jsonl", "samples.jsonl")
        )

    @staticmethod
    def _open(path: Path, start: int, missing: Collection[str]) -> TextIO:
        records = read_records(path, {"group", "step"})
        kept = [each for each in records if each["step"] < start + (each["group"] not in missing)]
        replace_durably(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return open(path, "a", opener=open_regular)

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        self._write(self._metrics, group, step, metrics)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        self._write(self._samples, "sample", step, {"prompt": prompt, "text": text})

    def _write(self, file: TextIO, group: str, step: int, fields: Mapping[str, Any]) -> None:
        file.write(json.dumps({"group": group, "step": step, "time": round(time.time(), 3), **fields}) + "\n")
        file.flush()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


class TensorBoard:
    """Event files of two runs, `training` and `validation`, which share the chart `loss`.

    All other scalars are named `<group>/<metric>`, which comes after `loss`. The run `validation` also has the samples
    as text, and the hyperparameters with its last loss. Events after step `start`, and those of `missing` groups at it,
    are hidden.
    """

    def __init__(self, run_dir: Path, start: int, missing: Collection[str], hyperparameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._excepthook, threading.excepthook = threading.excepthook, self._print_exception
        self._writers = {
            group: SummaryWriter(run_dir / group, purge_step=start + (group not in missing), flush_secs=10)
            for group in ("training", "validation")
        }
        shown = {key: value for key, value in hyperparameters.items() if value is not None}
        shown = {key: value if isinstance(value, str | int | float) else str(value) for key, value in shown.items()}
        *session_start, self._session_end = hparams(shown, {"loss": 0.0})
        for summary in session_start:
            self._writers["validation"]._get_file_writer().add_summary(summary)

    def _print_exception(self, exception: threading.ExceptHookArgs) -> None:
        # The exception of the writer's thread is raised by the next `log` or `close`.
        if not type(exception.thread).__module__.startswith("tensorboard."):
            self._excepthook(exception)

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writers[group].add_scalar(key if key == "loss" else f"{group}/{key}", value, step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        _add_text(self._writers["validation"], step, prompt + text)

    def close(self) -> None:
        self._writers["validation"]._get_file_writer().add_summary(self._session_end)
        for writer in self._writers.values():
            writer.close()
        threading.excepthook = self._excepthook  # after an error, the thread of another writer may still fail


def _add_text(writer: SummaryWriter, step: int, text: str) -> None:
    writer.add_text("sample", "\n".join(f"    {line}" for line in text.splitlines()), step)  # code in Markdown


class CoreAPI:
    """Metrics, progress and status of the trial in Determined's Web UI.

    In a search, it asks the master after every report whether the search has stopped the trial.
    """

    def __init__(self, train_context: core.TrainContext, max_steps: int, in_search: bool) -> None:
        self._train_context = train_context
        self._max_steps = max_steps
        self._in_search = in_search
        self._background = BackgroundReporter()
        self._samples: SummaryWriter | None = None
        self.stopped_by_search = False

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        self._train_context.report_metrics(group, steps_completed=step, metrics=dict(metrics))
        if group == "training":
            self._background.submit(self._train_context.report_progress, min(1.0, step / self._max_steps))
        if self._in_search:
            self._background.submit(self._check_search, self._train_context)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        if self._samples is None:
            from torch.utils.tensorboard import SummaryWriter

            self._samples = SummaryWriter(self._train_context.get_tensorboard_path())
        _add_text(self._samples, step, prompt + text)
        self._samples.flush()

    def _check_search(self, train_context: core.TrainContext) -> None:
        self.stopped_by_search |= master.is_stopped(train_context)

    def set_status(self, status: str) -> None:
        self._background.submit(self._train_context.set_status, status)

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()
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
_COLORS = {"training": "cyan", "validation": "green", "sample": "magenta"}


class Console:
    """A line per report, on a terminal in color and above a progress bar."""

    def __init__(self, max_steps: int, write: Callable[[str], None]) -> None:
        self._max_steps = max_steps
        self._write = write
        self._bar: tqdm[Any] | None = None
        self._has_stepped = False

    def start(self, step: int) -> None:
        self._start_step, self._start_time = step, time.monotonic()
        if step < self._max_steps:
            self.info(f"{elapsed()}  running the first step")
        if sys.stderr.isatty():
            from termcolor import can_colorize
            from tqdm import tqdm

            color = "cyan" if can_colorize() else None
            options: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "smoothing": 0.1, "colour": color}
            self._bar = tqdm(total=self._max_steps, initial=step, **options)

    def info(self, line: str) -> None:
        # A full disk, or a closed pipe such as that of head, does not end training.
        with suppress(OSError), nullcontext() if self._bar is None else self._bar.external_write_mode():
            self._write(line)

    def on_step_end(self) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self.info(f"{elapsed()}  first step completed")
        if self._bar is not None:
            self._bar.update()

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        shown = [(label, f"{metrics[key]:{spec}}") for key, (label, spec) in _FORMATS.items() if key in metrics]
        if group == "training" and self._bar is None and step > self._start_step:
            from tqdm import tqdm

            step_seconds = (time.monotonic() - self._start_time) / (step - self._start_step)
            shown.append(("left", tqdm.format_interval(step_seconds * (self._max_steps - step))))
        fields = [f"{self._colored(label, attrs=['dark'])} {value}" for label, value in shown]
        self.info(f"{self._label(group, step)}  {'  '.join(fields)}".rstrip())

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        self.info(f"{self._label('sample', step)}\n{escape_control(prompt + text)}\n")

    def _label(self, group: str, step: int) -> str:
        end = f"/{self._max_steps}" if self._max_steps else ""
        return f"{self._colored(f'{group:<10}', _COLORS[group])}  step {step:>{max(len(end) - 1, 1)}}{end}"

    def _colored(self, text: str, color: str | None = None, attrs: Collection[str] = ()) -> str:
        if self._bar is None:  # srun can make stdout a terminal although it writes a file
            return text
        from termcolor import colored

        return colored(text, color, attrs=attrs)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
