"""Log metrics to every sink of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import determined as det
from determined import core

from lm.determined import master
from lm.errors import RunError
from lm.metrics.sinks import JSONL, Console, CoreAPI, Record, Sink, TensorBoard


class MetricLogger:
    """Metrics, messages and progress on rank 0; other ranks have no sinks and log nothing.

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
        self._cluster_info = info
        self._log_sender: master.LogSender | None = None
        self._sinks: list[Sink] = []
        if rank != 0:
            return
        write = partial(print, flush=True)
        if info:
            self._log_sender = master.LogSender(info, train_context)
            write = self._log_sender.print
        self._sinks.append(Console(max_steps, write))
        if run_dir is None:
            self._sinks.append(CoreAPI(train_context, max_steps))

    @contextmanager
    def _oserror_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._run_dir is None:
                raise
            where = self._run_dir
            if error.filename:
                where = os.fsdecode(error.filename)  # bytes, of TensorBoard's files
            problem = f"cannot write metrics ({error.strerror}); complete checkpoints are kept"
            raise RunError(f"{where}: {problem}", rank_local=True) from None

    def open(
        self,
        step: int,
        missing: Collection[str] = (),
        hyperparameters: Mapping[str, Any] = MappingProxyType({}),
        compared: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Open the other sinks after `step` completed steps.

        Records of later steps, and of the groups `missing` at `step`, are dropped: they are logged
        again. TensorBoard compares runs by the hyperparameters `compared`; trackers get all.
        """
        self.set_status("training")
        if not self._sinks:
            return
        with self._oserror_as_run_error():
            if self._run_dir:
                self._sinks.append(JSONL(self._run_dir, step, missing))
                self._sinks.append(TensorBoard(self._run_dir, step, missing, compared))
            # After JSONL, whose files they read, and closed last, as they may wait.
            if hyperparameters.get("tracker"):
                from lm.metrics.trackers import open_trackers  # which other runs do not import

                info = self._cluster_info
                trackers = open_trackers(hyperparameters, self._run_dir, info, self.info)
                self._sinks = [*trackers, *self._sinks]
        for sink in self._sinks:
            sink.start(step)

    def log(self, group: str, step: int, fields: Mapping[str, Any]) -> None:
        """Log what a group has after `step` completed steps, e.g. metrics; see `Record`."""
        record = Record(group, step, round(time.time(), 3), fields)
        with self._oserror_as_run_error():
            for sink in self._sinks:
                sink.write(record)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log `text`, the continuation of `prompt` after `step` completed steps."""
        self.log("sample", step, {"prompt": prompt, "text": text})

    def log_checkpoint(self, step: int, uuid: str) -> None:
        """Log that the checkpoint `uuid` of `step` is complete, also if that cannot be written."""
        try:
            self.log("checkpoint", step, {"uuid": uuid})
        except RunError as error:
            self.info(str(error))

    def info(self, line: str) -> None:
        """Print `line`, above the progress bar if there is one."""
        for sink in self._sinks:
            sink.info(line)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Show the status `what` in the Web UI, and "training" afterwards."""
        self.set_status(what)
        yield
        self.set_status("training")

    def set_status(self, what: str) -> None:
        """Show the status `what` in the Web UI."""
        for sink in self._sinks:
            sink.set_status(what)

    def on_step_end(self) -> None:
        """Advance the progress bar."""
        for sink in self._sinks:
            sink.on_step_end()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.set_status("failed")
        try:
            self.close()
        except RunError as failure:
            if error is None:  # of a run that is complete, or has stopped, and is saved
                self.info(str(failure))

    def close(self) -> None:
        """Close all sinks; `info` still prints. Trackers get the last status as the final one."""
        for sink in self._sinks:
            sink.end()
        # The stack closes the last sink first, and all of them even if one fails.
        with self._oserror_as_run_error(), ExitStack() as stack:
            if self._log_sender:
                stack.callback(self._log_sender.close)
            for sink in self._sinks:
                stack.callback(sink.close)
