"""Destinations of metrics and samples: JSON lines, TensorBoard, Core API and the console.

To add a sink, write a subclass of `Sink` and create it in `MetricLogger`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from determined import core

from lm.determined import private
from lm.determined.master import BackgroundReporter
from lm.errors import escape_control
from lm.fileio import drop_records, open_regular
from lm.launch.console import format_elapsed
from lm.metrics.records import Logged, Report, Sample

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm


@dataclass(frozen=True)
class Record:
    """What a run logs after `step` completed steps, at `time` (seconds since 1970).

    The groups "training" and "validation" have metrics as fields, "sample" has `prompt` and `text`,
    and "checkpoint" has the `uuid` of a complete checkpoint.
    """

    group: str
    step: int
    time: float
    fields: Mapping[str, Any]

    @property
    def sample(self) -> str:
        """The prompt of a sample, and its continuation."""
        return self.fields["prompt"] + self.fields["text"]


class Sink:
    """A destination of what rank 0 logs. Subclasses override what they need."""

    def start(self, step: int) -> None:
        """Expect the first step after `step` completed steps."""

    def write(self, record: Record) -> None:
        """Write `record`."""

    def info(self, line: str) -> None:
        """Show `line` to whoever watches the run."""

    def set_status(self, status: str) -> None:
        """Show what the run does now.

        The last status is "completed", "stopped", or anything else after a failure.
        """

    def on_step_end(self) -> None:
        """Show progress."""

    def end(self) -> None:
        """Start what `close` waits for; no record follows."""

    def close(self) -> None:
        """Write what is buffered, and release files and threads."""


def _first_dropped_step(group: str, start: int, missing: Collection[str]) -> int:
    """Return the first step whose records of `group` a run that starts after `start` logs again."""
    return start if group in missing else start + 1


class JSONL(Sink):
    """metrics.jsonl, samples.jsonl and checkpoints.jsonl, with a line of JSON per record.

    Lines from before a restart are removed if they are of a step after `start`, or of step `start`
    and of a group that is `missing` in the checkpoint of that step.
    """

    def __init__(self, run_dir: Path, start: int, missing: Collection[str]) -> None:
        self._metrics = self._open(run_dir / "metrics.jsonl", Report, start, missing)
        self._samples = self._open(run_dir / "samples.jsonl", Sample, start, missing)
        self._checkpoints = self._open(run_dir / "checkpoints.jsonl", Logged, start, missing)

    @staticmethod
    def _open(path: Path, kind: type[Logged], start: int, missing: Collection[str]) -> TextIO:
        def is_kept(line: Logged) -> bool:
            return line.step < _first_dropped_step(line.group, start, missing)

        drop_records(path, kind, is_kept)
        return open(path, "a", opener=open_regular)

    def write(self, record: Record) -> None:
        files = {"sample": self._samples, "checkpoint": self._checkpoints}
        file = files.get(record.group, self._metrics)
        line = {"group": record.group, "step": record.step, "time": record.time, **record.fields}
        file.write(json.dumps(line) + "\n")
        file.flush()
        if record.group == "validation":  # which a search decides by, and a resume does not repeat
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._checkpoints):
            file.close()


class TensorBoard(Sink):
    """Event files of two runs, `training` and `validation`, which share the chart `loss`.

    All other scalars are named `<group>/<metric>`, which comes after `loss`. The run `validation`
    also has the samples as text. The table of hyperparameters has a row for the directory of both,
    with its name: `compared`, and the last losses. Events after step `start`, and those of
    `missing` groups at it, are hidden.
    """

    def __init__(
        self,
        run_dir: Path,
        start: int,
        missing: Collection[str],
        compared: Mapping[str, Any],
    ) -> None:
        from tensorboard.plugins.hparams import summary_v2  # the public module needs TensorFlow
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import FileWriter

        self._excepthook = threading.excepthook
        threading.excepthook = self._print_exception
        self._writers: dict[str, SummaryWriter] = {}
        for group in ("training", "validation"):
            purge_step = _first_dropped_step(group, start, missing)
            writer = SummaryWriter(run_dir / group, purge_step=purge_step, flush_secs=10)
            self._writers[group] = writer
        shown: dict[str, str | int | float] = {}
        for key, value in compared.items():
            if isinstance(value, str | int | float):
                shown[key] = value
            elif value is not None:
                shown[key] = str(value)
        columns = [summary_v2.HParam(key) for key in compared]
        losses = [
            summary_v2.Metric("loss", group="validation", display_name="validation loss"),
            summary_v2.Metric("loss", group="training", display_name="training loss"),
        ]
        self._trial = FileWriter(str(run_dir), flush_secs=10)
        self._trial.add_summary(summary_v2.hparams_config_pb(columns, losses))
        self._trial.add_summary(summary_v2.hparams_pb(shown, trial_id=run_dir.name))
        _, _, self._trial_end = hparams({}, {})

    def _print_exception(self, exception: threading.ExceptHookArgs) -> None:
        # The exception of the writer's thread is raised by the next `log` or `close`.
        if not type(exception.thread).__module__.startswith("tensorboard."):
            self._excepthook(exception)

    def write(self, record: Record) -> None:
        if record.group == "sample":
            _add_sample(self._writers["validation"], record)
        elif record.group in self._writers:
            writer = self._writers[record.group]
            for key, value in record.fields.items():
                if key == "loss":
                    name = key
                else:
                    name = f"{record.group}/{key}"
                writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._trial.add_summary(self._trial_end)
        for writer in (self._trial, *self._writers.values()):
            writer.close()
        # Only now: after an error in one writer, the thread of another may still fail.
        threading.excepthook = self._excepthook


def _add_sample(writer: SummaryWriter, record: Record) -> None:
    lines = [f"    {line}" for line in record.sample.splitlines()]  # code in Markdown
    writer.add_text("sample", "\n".join(lines), record.step)


class CoreAPI(Sink):
    """Progress, status and samples of the trial in Determined's Web UI."""

    def __init__(self, train_context: core.TrainContext, max_steps: int) -> None:
        self._train_context = train_context
        self._max_steps = max_steps
        self._report_progress = partial(private.report_progress, train_context)
        self._background = BackgroundReporter()
        self._samples: SummaryWriter | None = None

    def write(self, record: Record) -> None:
        if record.group == "sample":
            self._write_sample(record)
        elif record.group == "training":
            progress = min(1.0, record.step / self._max_steps)
            self._background.submit(self._report_progress, progress)

    def _write_sample(self, record: Record) -> None:
        if self._samples is None:
            from torch.utils.tensorboard import SummaryWriter

            self._samples = SummaryWriter(self._train_context.get_tensorboard_path())
        _add_sample(self._samples, record)
        self._samples.flush()

    def set_status(self, status: str) -> None:
        self._background.submit(self._train_context.set_status, status)

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()
        self._background.close()


class _Shown(NamedTuple):
    """How the console shows a metric."""

    label: str
    format_spec: str
    above: float | None = None
    """only greater values are shown; None = all, NaN too"""


_SHOWN = {
    "loss": _Shown("loss", "7.4f"),
    "perplexity": _Shown("perplexity", "<7.4g"),
    "bits_per_byte": _Shown("bits per byte", ".3f"),
    "reward_accuracy": _Shown("accuracy", ".3f"),
    "reward_margin": _Shown("margin", "<7.4g"),
    "lr": _Shown("lr", ".2e"),
    "grad_norm": _Shown("grad norm", "<6.3g"),
    "tokens_per_second": _Shown("tokens/s", "7,.0f"),
    "mfu": _Shown("MFU", "5.1%"),
    "peak_memory_gib": _Shown("GiB", ".1f"),
    "skipped_steps": _Shown("skipped steps", ".0f", above=0),
    "waiting_for_data_percent": _Shown("% waiting for data", ".0f", above=5),
    "save_stall_seconds": _Shown("s blocked by saving", ".0f", above=1),
    "busiest_expert_percent": _Shown("% to the busiest expert", ".0f"),
    "idle_experts": _Shown("idle experts", ".0f", above=0),
    "allocation_retries": _Shown("allocation retries", ".0f", above=0),
}
"""Metrics of reports, in the order in which the console shows them."""


class Console(Sink):
    """A line per report, on a terminal above a progress bar."""

    def __init__(self, max_steps: int, write: Callable[[str], None]) -> None:
        self._max_steps = max_steps
        self._write = write
        self._bar: tqdm[Any] | None = None
        self._has_stepped = False

    def start(self, step: int) -> None:
        self._start_step = step
        self._start_time = time.monotonic()
        if step < self._max_steps:
            self.info(f"{format_elapsed()}  running the first step")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._max_steps,
                initial=step,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.1,
            )

    def info(self, line: str) -> None:
        if self._bar is None:
            self._write(line)
        else:
            with self._bar.external_write_mode():
                self._write(line)

    def on_step_end(self) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self.info(f"{format_elapsed()}  first step completed")
        if self._bar is not None:
            self._bar.update()

    def write(self, record: Record) -> None:
        if record.group == "checkpoint":
            self.info(f"checkpoint  step {record.step}  {record.fields['uuid']}")
        elif record.group == "sample":
            self.info(f"{self._label(record)}\n{escape_control(record.sample)}\n")
        else:
            metrics = "  ".join(self._shown(record))
            self.info(f"{self._label(record)}  {metrics}".rstrip())

    def _shown(self, record: Record) -> list[str]:
        shown: list[str] = []
        for key, how in _SHOWN.items():
            if key not in record.fields:
                continue
            value = record.fields[key]
            if how.above is None or value > how.above:
                shown.append(f"{how.label} {value:{how.format_spec}}")
        for key, value in record.fields.items():
            if key.startswith("loss_"):  # of a validation set
                shown.append(f"{key} {value:.4f}")
            if key.startswith("eval_"):
                task, _, metric = key.removeprefix("eval_").rpartition("_")
                shown.append(f"{task} {metric} {value:.3f}")
        if record.group == "training" and self._bar is None and record.step > self._start_step:
            from tqdm import tqdm

            seconds = time.monotonic() - self._start_time
            step_seconds = seconds / (record.step - self._start_step)
            left = tqdm.format_interval(step_seconds * (self._max_steps - record.step))
            shown.append(f"left {left}")
        return shown

    def _label(self, record: Record) -> str:
        group = f"{record.group:<10}"
        if not self._max_steps:
            return f"{group}  step {record.step}"
        width = len(str(self._max_steps))
        return f"{group}  step {record.step:>{width}}/{self._max_steps}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
