"""Log metrics to every sink of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import determined as det
from determined import core

from lm.determined import master
from lm.errors import RunError
from lm.metrics.sinks import JSONL, Console, CoreAPI, Sink, TensorBoard
from lm.metrics.trackers import Tracker, open_trackers


class MetricLogger:
    """Metrics, messages and progress on rank 0; on other ranks nothing is logged.

    Methods raise RunError if a file of `run_dir`, which is None on a cluster, cannot be written.
    """

    def __init__(
        self,
        rank: int,
        run_dir: Path | None,
        train_context: core.TrainContext,
        max_steps: int,
        info: det.ClusterInfo | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._log_sender = master.LogSender(train_context._session, info) if rank == 0 and info else None
        write = self._log_sender.print if self._log_sender else partial(print, flush=True)
        self._console = Console(max_steps, write) if rank == 0 else None
        self._cluster_info, self._status = info, ""
        in_search = info is not None and master.in_search(info)
        self._core_api = CoreAPI(train_context, max_steps, in_search) if rank == 0 and run_dir is None else None
        self._trackers: list[Tracker] = []
        self._sinks: list[Sink] = [self._core_api] if self._core_api else []

    @contextmanager
    def _oserror_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._run_dir is None:
                raise
            where = error.filename or self._run_dir
            problem = f"{where}: cannot write metrics ({error.strerror}); the last checkpoint is kept"
            raise RunError(problem) from None

    def start(
        self, step: int, missing: Collection[str] = (), hyperparameters: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Open the sinks after `step` completed steps; drop records after `step`, and `missing` groups' at `step`."""
        self.set_status("training")
        if self._console:
            with self._oserror_as_run_error():
                if self._run_dir:
                    self._sinks += [JSONL(self._run_dir, step, missing)]
                    self._sinks += [TensorBoard(self._run_dir, step, missing, hyperparameters)]
                self._trackers = open_trackers(hyperparameters, self._run_dir, self._cluster_info, self.info)
                self._sinks = [*self._trackers, *self._sinks, self._console]
            self._console.start(step)

    def log(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `group`, "training" or "validation", after `step` completed steps."""
        with self._oserror_as_run_error():
            for sink in self._sinks:
                sink.log(group, step, metrics)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log `text`, the continuation of `prompt` after `step` completed steps."""
        with self._oserror_as_run_error():
            for sink in self._sinks:
                sink.log_sample(step, prompt, text)

    def log_checkpoint(self, step: int, uuid: str) -> None:
        """Log that the checkpoint `uuid` of `step` is complete."""
        self.info(f"checkpoint  step {step}  {uuid}")
        for tracker in self._trackers:
            tracker.log("checkpoint", step, {"uuid": uuid})

    def info(self, line: str) -> None:
        """Print `line`, above the progress bar if there is one."""
        if self._console:
            self._console.info(line)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Show the status `what` in the Web UI, and "training" afterwards."""
        self.set_status(what)
        yield
        self.set_status("training")

    def set_status(self, what: str) -> None:
        """Show the status `what` in the Web UI."""
        self._status = what
        if self._core_api:
            self._core_api.set_status(what)

    @property
    def stopped_by_search(self) -> bool:
        """Whether the search has stopped this trial, as far as is known."""
        return self._core_api is not None and self._core_api.stopped_by_search

    def on_step_end(self) -> None:
        """Advance the progress bar."""
        if self._console:
            self._console.on_step_end()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error:
            self.set_status("failed")
        with suppress(RunError) if error else nullcontext():  # the first error is the cause
            self.close()

    def close(self) -> None:
        """Close all sinks; `info` still prints. Trackers receive the last status as the final one."""
        for tracker in self._trackers:
            tracker.end(self._status)
        with self._oserror_as_run_error(), ExitStack() as stack:
            if self._log_sender:
                stack.callback(self._log_sender.close)
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks, self._trackers = [], []
