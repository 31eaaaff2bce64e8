"""A master that is away for a while or never answers costs a run nothing but reports."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import urllib3
from determined.common import util
from determined.common.api.errors import MasterNotFoundException

from lm.determined.master import BackgroundReporter, retrying
from lm.errors import RunError
from tests.support import PATIENCE
from tests.support.runs import checkpoints_by_step, run_fsdp

SHELL = """
from determined import _info
kind = "SHELL"
ids = ("cluster", "agent", [0], "task", "allocation")
_info._info = _info.ClusterInfo("http://127.0.0.1:9", *ids, "token", kind)
"""


@pytest.mark.slow
def test_run_in_a_shell_of_a_cluster(tmp_path: Path) -> None:
    overrides = ("max_steps=2", "core_api_profiler=true")
    run_fsdp(
        tmp_path, *overrides, script=SHELL, code=0, DET_SESSION_TOKEN="token", DET_USER="tester"
    )
    assert list(checkpoints_by_step(tmp_path)) == [2]


def test_retrying_an_unreachable_master_for_three_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "")  # restored after the test
    monkeypatch.delenv("DET_RETRY_CONFIG")
    with retrying():
        retry = util.get_max_retries_config()
    pauses = []
    for _ in range(901):
        assert not retry.is_exhausted()
        refused = urllib3.exceptions.NewConnectionError(None, "refused")  # type: ignore[arg-type]
        retry = retry.increment("POST", "/", error=refused)
        pauses.append(retry.get_backoff_time())
        if retry.total == 0:
            break
    assert max(pauses) == 15
    assert sum(pauses) == pytest.approx(3 * 3600, rel=0.01)
    assert retry.is_retry("POST", 503)
    assert not retry.is_retry("POST", 500)
    os.environ["DET_RETRY_CONFIG"] = json.dumps({"total": 3})  # set by the user
    with retrying():
        assert util.get_max_retries_config().total == 3


def test_retrying_raises_a_refusal_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "{}")
    with pytest.raises(RunError) as caught, retrying():
        raise MasterNotFoundException("connection\n refused")
    assert "\n" not in str(caught.value)
    assert "connection refused" in str(caught.value)


def test_background_reporter_sends_the_latest_values() -> None:
    reported: list[float] = []
    started, reachable = threading.Event(), threading.Event()

    def report_progress(progress: float) -> None:
        started.set()
        reachable.wait(PATIENCE)
        reported.append(progress)

    def set_status(_status: str) -> None:
        raise MasterNotFoundException("refused")

    reporter = BackgroundReporter()
    reporter.submit(report_progress, 0.0)
    assert started.wait(PATIENCE)
    for step in range(1, 101):
        reporter.submit(report_progress, step / 100)
        reporter.submit(set_status, "training")
    assert not reported, "to submit waits for no report"
    reachable.set()
    reporter.close()
    assert reported == [0.0, 1.0]
