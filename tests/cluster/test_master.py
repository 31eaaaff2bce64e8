"""Retries, background reports, and the exit code of errors that a search's hyperparameters caused."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
import yaml
from determined import core
from determined.common import util
from determined.common.api.errors import MasterNotFoundException

from lm import config
from lm.determined import master
from lm.determined.master import BackgroundReporter, retrying, searched_keys
from lm.errors import ConfigError, RankError, RunError
from tests.conftest import Message
from tests.support import ROOT, TINY, checkpoints, run

SEARCH = yaml.safe_load((ROOT / "recipes" / "search.yaml").read_text())


def trial_info(*keys: str) -> Any:
    """Return the cluster info of a trial whose search varies `keys`."""
    ranges = {key: {"type": "double", "minval": 0, "maxval": 1} for key in keys}
    return SimpleNamespace(trial=SimpleNamespace(_config={"hyperparameters": TINY | ranges}))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[core.EarlyExitReason]:
    """The early exits that are reported to the master."""
    reported: list[core.EarlyExitReason] = []
    context = SimpleNamespace(train=SimpleNamespace(report_early_exit=reported.append))
    monkeypatch.setattr(core, "init", lambda **_: contextlib.nullcontext(context))
    return reported


def config_error(**hyperparameters: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.read({"hyperparameters": TINY | hyperparameters}, [], "trial")
    return caught.value


def test_the_searched_keys_are_those_with_a_range() -> None:
    assert searched_keys(SEARCH) == {"lr", "n_layers", "weight_decay"}
    constant = {"rope_scaling": {"factor": 8.0}, "lr": {"type": "const", "val": 1}}
    assert searched_keys({"hyperparameters": constant}) == set()


@pytest.mark.parametrize(
    ("error", "searched", "code"),
    [
        (config_error(lr=-1), ["lr"], 0),
        (config_error(n_heads=5), ["n_heads"], 0),
        (config_error(n_heads=5), ["d_model"], 0),
        (config_error(lr=-1, n_layers=0), ["lr", "n_layers"], 0),
        (RunError("validation loss is nan at step 3", keys=("lr", "grad_clip")), ["lr"], 0),
        (config_error(lr=-1), ["beta1"], 2),
        (config_error(lr=-1), [], 2),
        (config_error(lr=-1, ffn="relux"), ["lr"], 2),
        (config_error(n_layer=3), ["n_layers"], 2),
        (config_error(lrr=3), ["lr"], 2),
        (RunError("/x/lr/checkpoints: the disk is full; 0 bytes are free, lr.ckpt needs 10"), ["lr"], 1),
    ],
)
def test_only_an_error_caused_by_searched_hyperparameters_is_reported_and_exits_with_0(
    error: RunError, searched: list[str], code: int, reports: list[core.EarlyExitReason]
) -> None:
    assert master.exit_code(error, trial_info(*searched), is_reporter=False) == code
    assert master.exit_code(error, None, is_reporter=True) == error.exit_code
    assert reports == []
    assert master.exit_code(error, trial_info(*searched), is_reporter=True) == code
    assert reports == ([] if code else [core.EarlyExitReason.INVALID_HP])


SHELL = """
from determined import _info
kind = "SHELL"
_info._info = _info.ClusterInfo("http://127.0.0.1:9", "cluster", "agent", [0], "task", "allocation", "token", kind)
"""


@pytest.mark.slow
def test_in_a_shell_of_a_cluster_a_run_is_one_outside_of_it(tmp_path: Path) -> None:
    overrides = ("max_steps=2", "core_api_profiler=true")
    run(tmp_path, *overrides, script=SHELL, code=0, DET_SESSION_TOKEN="token", DET_USER="tester")
    assert list(checkpoints(tmp_path)) == [2]


def test_calls_to_an_unreachable_master_are_retried_for_three_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "")  # restored after the test
    monkeypatch.delenv("DET_RETRY_CONFIG")
    with retrying():
        retry = util.get_max_retries_config()
    pauses = []
    for _ in range(901):
        assert not retry.is_exhausted()
        retry = retry.increment("POST", "/", error=urllib3.exceptions.NewConnectionError(None, "refused"))  # type: ignore[arg-type]
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


def test_a_refusal_by_the_master_is_one_line(monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "{}")
    with pytest.raises(RankError) as caught, retrying():
        raise MasterNotFoundException("connection\n refused")
    assert "\n" not in str(caught.value)
    message(caught.value)


def test_background_reports_are_the_latest_values_and_ignore_refusals() -> None:
    reported: list[float] = []
    started, reachable = threading.Event(), threading.Event()

    def report_progress(progress: float) -> None:
        started.set()
        reachable.wait(10)
        reported.append(progress)

    def set_status(_status: str) -> None:
        raise MasterNotFoundException("refused")

    reporter = BackgroundReporter()
    reporter.submit(report_progress, 0.0)
    assert started.wait(10)
    submitting = time.monotonic()
    for step in range(1, 101):
        reporter.submit(report_progress, step / 100)
        reporter.submit(set_status, "training")
    assert time.monotonic() - submitting < 1
    reachable.set()
    reporter.close()
    assert reported == [0.0, 1.0]
