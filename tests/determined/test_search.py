"""A searcher that cannot work with a trial is refused before it trains."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lm.determined.search import Searcher
from lm.errors import ConfigError
from tests.support import REPOSITORY

SEARCH = yaml.safe_load((REPOSITORY / "recipes" / "search.yaml").read_text())
METRICS = ["loss", "perplexity", "bits_per_byte", "loss_wiki"]


def problems(max_steps: int, validation_rate: int, **searcher: Any) -> tuple[str, ...]:
    """Return what is wrong with the shipped search after these changes."""
    config = SEARCH | {"searcher": SEARCH["searcher"] | searcher}
    try:
        Searcher.from_config(config, max_steps, validation_rate).check(METRICS, ["eval_sciq_acc"])
    except ConfigError as error:
        return error.problems
    return ()


def test_searcher_check_accepts_the_shipped_search() -> None:
    hyperparameters = SEARCH["hyperparameters"]
    assert problems(hyperparameters["max_steps"], hyperparameters["validation_rate"]) == ()


@pytest.mark.parametrize(
    ("searcher", "parts"),
    [
        (
            {"metric": "validation_loss"},
            ["searcher.metric", "validation_loss", "use loss or perplexity"],
        ),
        ({"metric": "accuracy"}, ["searcher.metric", "accuracy", *METRICS]),
        ({"smaller_is_better": False}, ["searcher.smaller_is_better", "loss", "true"]),
        ({"metric": "eval_sciq_acc"}, ["searcher.smaller_is_better", "eval_sciq_acc", "false"]),
        ({"time_metric": "steps"}, ["searcher.time_metric", "steps", "batches"]),
        ({"max_time": 1000}, ["searcher.max_time", "1000", "max_steps 400"]),
        ({"max_time": None}, ["searcher.name", "adaptive_asha", "max_time", "random or grid"]),
    ],
)
def test_searcher_check_refuses_what_cannot_work(
    searcher: dict[str, Any], parts: list[str]
) -> None:
    (problem,) = problems(400, 25, **searcher)
    assert all(part in problem for part in parts), problem


def test_searcher_check_accepts_the_accuracy_of_a_task() -> None:
    assert problems(400, 25, metric="eval_sciq_acc", smaller_is_better=False) == ()


def test_searcher_check_reports_all_problems() -> None:
    found = problems(400, 25, metric="accuracy", max_time=1000)
    assert [problem.partition(":")[0] for problem in found] == [
        "searcher.metric",
        "searcher.max_time",
    ]


@pytest.mark.parametrize("name", ["single", "random", "grid"])
def test_searcher_check_without_stops_needs_only_the_metric(name: str) -> None:
    assert problems(10, 25, name=name) == ()
    assert problems(10, 25, name=name, metric="loss_wiki") == ()
    (problem,) = problems(10, 25, name=name, metric="val_loss")
    assert "searcher.metric" in problem
