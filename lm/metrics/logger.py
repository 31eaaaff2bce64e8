"""Log metrics to files, TensorBoard, the Core API and the console."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from determined import core
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lm.determined.master import BackgroundReporter
from lm.errors import RunError


class MetricLogger:
    """Rank 0's voice: writes every report to all places; on other ranks it is silent.

    Args:
        folder: the run's folder off the cluster; None on it.
        train: Core API's train context.
        max_steps: length of the run.
    """

    def __init__(self, rank: int, folder: Path | None, train: core.TrainContext, max_steps: int) -> None:
        self._speaks = rank == 0
        self._folder = folder
        self._train = train
        self._max_steps = max_steps
        self._start = 0
        self._began = 0.0
        self._lines: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._bar: tqdm[Any] | None = None
        self._print_failure = threading.excepthook
        self._background = BackgroundReporter() if self._speaks and folder is None else None

    def begin(self, start: int) -> None:
        """Open the files behind step `start`: what an earlier process wrote beyond it will be written again."""
        self._start, self._began = start, time.monotonic()
        self._tell(self._train.set_status, "training")
        if not self._speaks or self._folder is None:
            return
        threading.excepthook = self._on_failure
        with self._writing():
            self._lines = _open_lines(self._folder / "metrics.jsonl", start)
            self._board = SummaryWriter(self._folder / "tensorboard", purge_step=start + 1, flush_secs=10)
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._max_steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self._folder}: metrics cannot be written ({error.strerror}); the last checkpoint is kept"
            raise RunError(problem) from None

    def _on_failure(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread keeps its error for the next report, which says it in a line; others' are printed."""
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self._print_failure(failure)

    def log(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._speaks:
            print(line, flush=True)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Show in the Web UI that the trial is at `what`, and at training behind it."""
        self._tell(self._train.set_status, what)
        yield
        self._tell(self._train.set_status, "training")

    def _tell(self, deliver: Callable[[Any], None], news: Any) -> None:
        if self._background is not None:
            self._background.tell(deliver, news)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def report(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write one report.

        Args:
            group: "training" or "validation".
            step: steps completed.
        """
        if not self._speaks:
            return
        self._train.report_metrics(group, steps_completed=step, metrics=dict(metrics))
        with self._writing():
            if self._lines is not None:
                record: dict[str, Any] = {"group": group, "step": step, "time": round(time.time(), 3)}
                self._lines.write(json.dumps(record | dict(metrics)) + "\n")
                self._lines.flush()
            if self._board is not None:
                for key, value in metrics.items():
                    self._board.add_scalar(f"{group}/{key}", value, step)
        if group == "training":
            self._tell(self._train.report_progress, min(1.0, step / self._max_steps))
        self._show(group, step, metrics)

    def _show(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        shown = {key: text(metrics[key]) for key, text in _SHOWN.items() if key in metrics}
        if self._bar is not None and group == "training":
            self._bar.set_postfix({_NAMES.get(key, key): value for key, value in shown.items() if key != "lr"})
            return
        left = ""
        if group == "training" and step > self._start:
            seconds = (time.monotonic() - self._began) / (step - self._start) * (self._max_steps - step)
            left = f"  left {tqdm.format_interval(seconds)}"
        values = "  ".join(f"{_NAMES.get(key, key)} {value}" for key, value in shown.items())
        end = f"/{self._max_steps}" if self._max_steps else ""
        self.log(f"{group:<10}  step {step:>{max(len(end) - 1, 1)}}{end}  {values}{left}")

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with suppress(RunError) if error else nullcontext():  # the first thing that went wrong is what is said
            self.close()

    def close(self) -> None:
        """Close the files and the progress bar; `say` still speaks."""
        threading.excepthook = self._print_failure
        position_ids, self._bar = (self._bar, self._background, self._lines, self._board), None
        for place in position_ids:
            if place is not None:
                with self._writing():
                    place.close()


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": "{:.4f}".format,
    "perplexity": "{:.4g}".format,
    "lr": "{:.2e}".format,
    "tokens_per_second": "{:,.0f}".format,
    "mfu": "{:.1%}".format,
}


_NAMES = {"tokens_per_second": "tokens/s"}


def _open_lines(path: Path, start: int) -> TextIO:
    """Open the metrics file to append behind step `start`, without the lines of steps that will be made again."""
    kept = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # cut short by a kill, or no line of ours
                if json.loads(line)["step"] <= start:
                    kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept))
    draft.replace(path)
    return path.open("a")
