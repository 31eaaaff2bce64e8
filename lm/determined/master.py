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
from determined.common import util
from determined.common.api import authentication, bindings, certs
from determined.common.api.bindings import APIHttpError
from determined.common.api.errors import BadRequestException
from determined.core._metrics import _Shipper

from lm.errors import RunError

MASTER_TIMEOUT = 3 * 3600
"""longest time that calls to an unreachable master are retried (seconds)"""
CLOSE_TIMEOUT = 30.0
"""longest wait for the last progress report and the last lines of the log at the end of a run (seconds)"""

_RETRY_INTERVAL = (
    15  # each retry of urllib3 is a recursive call, of which Python allows fewer than 1,000
)
_LOG_INTERVAL = 1.0
_MAX_LINES = 1000  # per call, as Determined's log shipper

REFUSALS = (BadRequestException, APIHttpError)
"""errors of calls that the master refuses"""


@contextmanager
def retrying() -> Iterator[None]:
    """Retry calls to an unreachable master for `MASTER_TIMEOUT`, at most 15 seconds apart; enter it before `core.init`.

    Core API's own intervals grow to two minutes, it treats a proxy's 502, 503 or 504 as a refusal,
    and after 1,000 waiting reports it blocks rank 0. A `DET_RETRY_CONFIG` in the environment
    overrides the intervals. Raises RunError for a refusal, also after `MASTER_TIMEOUT`.
    """
    # No limit. The name is private, and 0.38.1 is Determined's last release.
    _Shipper.METRICS_QUEUE_MAXSIZE = 0  # pyright: ignore[reportAttributeAccessIssue]
    retries = {
        "total": MASTER_TIMEOUT // _RETRY_INTERVAL,
        "backoff_factor": 0.5,
        "backoff_max": _RETRY_INTERVAL,
    }
    retries |= {"allowed_methods": False, "status_forcelist": [502, 503, 504]}
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(retries))
    try:
        yield
    except REFUSALS as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"the Determined master refused a report: {reason}; the last checkpoint is kept",
            rank_local=True,
        ) from error


def storage_is_file_system(info: det.ClusterInfo) -> bool:
    """Return whether ranks write to the trial's checkpoint storage without an upload."""
    return experiment_config(info)["checkpoint_storage"]["type"] in ("shared_fs", "directory")


def trial_info() -> det.ClusterInfo | None:
    """Return the cluster info of this trial, or None outside of trials, also in a shell or notebook of a cluster."""
    info = det.get_cluster_info()
    return info if info and info.task_type == "TRIAL" else None


def experiment_config(info: det.ClusterInfo) -> Mapping[str, Any]:
    """Return the config of a trial's experiment, with the hyperparameters of this trial.

    Only the hyperparameters are public; Determined's own Trainer reads the config in the same way.
    """
    return {**info.trial._config, "hyperparameters": info.trial.hparams}


def should_preempt(context: core.Context, info: det.ClusterInfo | None) -> bool:
    """Return on rank 0 of a trial whether the master wants it to stop."""
    # Outside of trials and on other ranks, asking is a broadcast of all ranks.
    return (
        info is not None
        and context.distributed.rank == 0
        and context.preempt.should_preempt(auto_ack=False)
    )


class BackgroundReporter:
    """Calls functions in a background thread, each with its latest value only; a refusal by the master is ignored."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "master-reporter")
        self._latest: dict[str, tuple[Callable[[Any], None], Any]] = {}
        self._last: Future[None] | None = None

    def submit(self, report: Callable[[Any], None], value: Any) -> None:
        """Call `report(value)` soon, unless a later value is submitted for the same function first."""
        self._latest[report.__name__] = report, value
        self._last = self._pool.submit(self._send, report.__name__)

    def _send(self, name: str) -> None:
        report, value = self._latest.pop(name, (None, None))
        if report is not None:
            with suppress(*REFUSALS):
                report(value)

    def close(self) -> None:
        """Wait until the last call has finished, at most `CLOSE_TIMEOUT`."""
        if self._last is not None:
            wait([self._last], CLOSE_TIMEOUT)
        self._pool.shutdown(wait=False, cancel_futures=True)


class LogSender:
    """Sender of log lines to the master in a background thread, instead of printing them.

    Determined's log shipper ends a container whose output it cannot upload for 11 minutes. These
    lines wait for the master. Lines that it refuses, and all lines after `close`, are printed.
    """

    def __init__(self, info: det.ClusterInfo) -> None:
        session = authentication.login_from_task(
            info.master_url, certs.default_load(info.master_url)
        )
        self._session = session.with_retry(util.get_max_retries_config())
        self._waiting: list[bindings.v1TaskLog] = []
        container = os.environ.get("DET_CONTAINER_ID", "")
        self._fields: dict[str, Any] = {
            "taskId": info.task_id,
            "allocationId": info.allocation_id,
            "rankId": 0,
        }
        self._fields |= {
            "agentId": info.agent_id,
            "containerId": container,
            "source": "task",
            "stdtype": "stdout",
        }
        self._background: BackgroundReporter | None = BackgroundReporter()

    def print(self, text: str) -> None:
        """Add `text` to the log."""
        if self._background is None:
            print(text, flush=True)
            return
        now, lines = datetime.now(UTC).isoformat(), text.split("\n")
        self._waiting += [
            bindings.v1TaskLog(log=f"{line}\n", timestamp=now, **self._fields) for line in lines
        ]
        self._background.submit(self._send, self._waiting)

    def _send(self, waiting: list[bindings.v1TaskLog]) -> None:
        while logs := waiting[:_MAX_LINES]:
            time.sleep(_LOG_INTERVAL)  # the log shipper sends first what was printed before
            try:
                bindings.post_PostTaskLogs(
                    self._session, body=bindings.v1PostTaskLogsRequest(logs=logs)
                )
            except REFUSALS:
                _print_lines(logs)
            del waiting[: len(logs)]

    def close(self) -> None:
        """Send the last lines, or after `CLOSE_TIMEOUT` print them."""
        if self._background is not None:
            self._background.close()
            self._background = None
            _print_lines(self._waiting)


def _print_lines(logs: list[bindings.v1TaskLog]) -> None:
    print(*(line.log for line in logs), sep="", end="", flush=True)
