"""What a run knows of a cluster, in parts: whose fault an error is, and what does not wait for the master."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import urllib3
import yaml
from determined.common import util
from determined.common.api.errors import MasterNotFoundException

from lm import config
from lm.determined import master
from lm.determined.master import BackgroundReporter, blames, retrying, varied
from lm.errors import ConfigError, RankError, RunError
from tests.support import ROOT, TINY

SEARCH = yaml.safe_load((ROOT / "recipes" / "search.yaml").read_text())


def mistakes(**hyperparameters: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.read({"hyperparameters": TINY | hyperparameters}, [], "trial")
    return caught.value


def test_what_a_search_varies_is_what_has_a_range() -> None:
    assert varied(SEARCH) == {"lr", "n_layers", "weight_decay"}
    assert varied({"hyperparameters": {"rope_scaling": {"factor": 8.0}, "lr": {"type": "const", "val": 1}}}) == set()


@pytest.mark.parametrize(
    ("error", "keys"),
    [
        (mistakes(lr=-1), {"lr"}),
        (mistakes(n_heads=5), {"n_heads"}),
        (mistakes(n_heads=5), {"d_model"}),  # 5 heads do not divide it: another width might do
        (mistakes(lr=-1, n_layers=0), {"lr", "n_layers"}),
        (RunError("validation loss is nan at step 3: lower lr, or set grad_clip"), {"lr"}),
    ],
)
def test_a_point_is_to_blame_where_every_line_names_what_is_varied(error: RunError, keys: set[str]) -> None:
    assert blames(error, keys)
    assert not blames(error, {"beta1"})
    assert not blames(error, set())


@pytest.mark.parametrize(
    ("error", "keys"),
    [(mistakes(lr=-1, ffn="relux"), {"lr"}), (mistakes(n_layer=3), {"n_layers"}), (mistakes(lrr=3), {"lr"})],
)
def test_a_plain_mistake_is_not_the_points(error: RunError, keys: set[str]) -> None:
    assert not blames(error, keys)


def test_errors_keep_their_exit_codes_off_a_search() -> None:
    assert master.exit_code(mistakes(lr=-1), None, speaks=True) == 2
    assert master.exit_code(RunError("x"), None, speaks=True) == 1


def test_an_absent_master_is_asked_again_every_two_seconds_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "")  # so that it is as before behind the test
    monkeypatch.delenv("DET_RETRY_CONFIG")
    with retrying():
        retry = util.get_max_retries_config()
    pauses = []
    for _ in range(901):
        assert not retry.is_exhausted()
        retry = retry.increment("POST", "/", error=urllib3.exceptions.NewConnectionError(None, "gone"))  # type: ignore[arg-type]
        pauses.append(retry.get_backoff_time())
        if retry.total == 0:
            break
    assert max(pauses) == 2
    assert sum(pauses) == pytest.approx(1800, rel=0.01)
    assert retry.is_retry("POST", 503)
    assert not retry.is_retry("POST", 500)
    os.environ["DET_RETRY_CONFIG"] = json.dumps({"total": 3})  # a person's own
    with retrying():
        assert util.get_max_retries_config().total == 3


def test_what_a_master_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_RETRY_CONFIG", "{}")
    with pytest.raises(RankError) as caught, retrying():
        raise MasterNotFoundException("connection\n refused")
    assert str(caught.value) == (
        "the master does not take what it is told: connection refused; the last checkpoint is kept"
    )


def test_a_courier_brings_the_newest_word_in_the_background_and_no_failure_back() -> None:
    arrived: list[float] = []
    away = threading.Event()
    first = threading.Event()

    def report_progress(news: float) -> None:
        first.set()
        away.wait(10)
        arrived.append(news)

    def set_status(_news: str) -> None:
        raise MasterNotFoundException("gone")

    courier = BackgroundReporter()
    courier.tell(report_progress, 0.0)
    assert first.wait(10)
    began = time.monotonic()
    for step in range(1, 101):
        courier.tell(report_progress, step / 100)
        courier.tell(set_status, "training")
    assert time.monotonic() - began < 1
    away.set()
    courier.close()
    assert arrived == [0.0, 1.0]
