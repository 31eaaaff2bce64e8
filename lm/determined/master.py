"""Retries and error reporting for the Determined master.

Core API sends metrics and checkpoints from its own threads. Progress and status, which Core API
sends from the calling thread, go through `BackgroundReporter`, and the lines of the log through
`LogSender`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import determined as det
from determined import core
from determined.common.api import bindings
from determined.common.api.bindings import APIHttpError
from determined.common.api.errors import BadRequestException

from lm.determined import private
from lm.errors import RunError

MASTER_TIMEOUT = 3 * 3600
"""Longest time that calls to an unreachable master are retried (seconds)."""
LAST_REPORT_TIMEOUT = 30.0
"""Longest wait for the last progress and lines of the log at the end of a run (seconds)."""

_RETRY_INTERVAL = 15
"""Seconds. Each retry of urllib3 is a recursive call, of which Python allows fewer than 1,000."""
_LOG_INTERVAL = 1.0
"""Seconds between calls that send lines of the log."""
_MAX_LINES = 1000
"""Lines of the log in a call, as in Determined's log shipper."""

REFUSALS = (BadRequestException, APIHttpError)
"""Errors of calls that the master refuses."""
MALFORMED = (KeyError, TypeError, ValueError)
"""Errors of the bindings for an answer in another shape."""


@contextmanager
def retrying() -> Iterator[None]:
    """Retry calls to an unreachable master for `MASTER_TIMEOUT`, at most 15 seconds apart.

    Core API's own intervals grow to two minutes, it treats a proxy's 502, 503 or 504 as a refusal,
    and after 1,000 waiting reports it blocks rank 0. A `DET_RETRY_CONFIG` in the environment
    overrides the intervals. Must be entered before `core.init`.

    Raises:
        RunError: the master refused a call, or did not answer for `MASTER_TIMEOUT`.
    """
    private.let_reports_wait()
    retries = {
        "total": MASTER_TIMEOUT // _RETRY_INTERVAL,
        "backoff_factor": 0.5,
        "backoff_max": _RETRY_INTERVAL,
        "allowed_methods": False,  # all methods
        "status_forcelist": [502, 503, 504],
    }
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(retries))
    try:
        yield
    except REFUSALS as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"the Determined master refused a report: {reason}; complete checkpoints are kept",
            rank_local=True,
        ) from error


def storage_is_file_system(info: det.ClusterInfo) -> bool:
    """Return whether ranks write to the trial's checkpoint storage without an upload."""
    return experiment_config(info)["checkpoint_storage"]["type"] in ("shared_fs", "directory")


def trial_info() -> det.ClusterInfo | None:
    """Return the cluster info of this trial, or None outside of trials.

    A shell or a notebook of a cluster has cluster info, but is no trial.
    """
    info = det.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    return info


def experiment_config(info: det.ClusterInfo) -> Mapping[str, Any]:
    """Return the config of a trial's experiment, with the hyperparameters of this trial.

    The platform passes it in the environment.
    """
    config = json.loads(os.environ["DET_EXPERIMENT_CONFIG"])
    return config | {"hyperparameters": info.trial.hparams}


def should_preempt(context: core.Context, info: det.ClusterInfo | None) -> bool:
    """Return on rank 0 of a trial whether the master wants it to stop."""
    if info is None or context.distributed.rank != 0:
        return False  # here, asking would be a broadcast of all ranks
    return context.preempt.should_preempt(auto_ack=False)


class BackgroundReporter:
    """Calls functions in a background thread, each with its latest value only.

    A refusal by the master is ignored.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "master-reporter")
        self._latest: dict[Callable[[Any], None], Any] = {}
        """values that wait, by function; methods of the same object and name are equal"""
        self._last: Future[None] | None = None

    def submit(self, report: Callable[[Any], None], value: Any) -> None:
        """Call `report(value)` soon, unless a later value for `report` is submitted before that."""
        self._latest[report] = value
        self._last = self._pool.submit(self._send, report)

    def _send(self, report: Callable[[Any], None]) -> None:
        if report not in self._latest:
            return  # the call for an earlier value has sent the latest one
        value = self._latest.pop(report)
        with suppress(*REFUSALS):
            report(value)

    def close(self) -> None:
        """Wait until the last call has finished, at most `LAST_REPORT_TIMEOUT`."""
        if self._last is not None:
            wait([self._last], LAST_REPORT_TIMEOUT)
        self._pool.shutdown(wait=False, cancel_futures=True)


class LogSender:
    """Sender of log lines to the master in a background thread, instead of printing them.

    Determined's log shipper ends a container whose output it cannot upload for 11 minutes. These
    lines wait for the master. Lines that it refuses, and all lines after `close`, are printed.
    """

    def __init__(self, info: det.ClusterInfo, train: core.TrainContext) -> None:
        self._session = private.session_of(train)
        self._waiting: list[bindings.v1TaskLog] = []
        self._fields: dict[str, Any] = {
            "taskId": info.task_id,
            "allocationId": info.allocation_id,
            "rankId": 0,
            "agentId": info.agent_id,
            "containerId": os.environ.get("DET_CONTAINER_ID", ""),
            "source": "task",
            "stdtype": "stdout",
        }
        self._background: BackgroundReporter | None = BackgroundReporter()

    def print(self, text: str) -> None:
        """Add `text` to the log."""
        if self._background is None:
            print(text, flush=True)
            return
        now = datetime.now(UTC).isoformat()
        self._waiting += [
            bindings.v1TaskLog(log=f"{line}\n", timestamp=now, **self._fields)
            for line in text.split("\n")
        ]
        self._background.submit(self._send, self._waiting)

    def _send(self, waiting: list[bindings.v1TaskLog]) -> None:
        while waiting:
            logs = waiting[:_MAX_LINES]
            time.sleep(_LOG_INTERVAL)  # the log shipper sends first what was printed before
            try:
                request = bindings.v1PostTaskLogsRequest(logs=logs)
                bindings.post_PostTaskLogs(self._session, body=request)
            except REFUSALS:
                _print_lines(logs)
            del waiting[: len(logs)]

    def close(self) -> None:
        """Send the last lines, or after `LAST_REPORT_TIMEOUT` print them."""
        if self._background is not None:
            self._background.close()
            self._background = None
            _print_lines(self._waiting)


def _print_lines(logs: list[bindings.v1TaskLog]) -> None:
    text = "".join(line.log for line in logs)
    print(text, end="", flush=True)
