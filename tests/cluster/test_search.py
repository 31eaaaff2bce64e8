"""Searchers that cannot work with a trial, the rungs of adaptive ASHA, and log policies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from lm.determined.search import Searcher, adaptive_asha_rungs, retry_warning
from lm.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.cluster.searcher import Halving

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
            ["searcher.metric", "validation_loss", "did you mean loss?"],
        ),
        ({"metric": "val_loss_wiki"}, ["searcher.metric", "did you mean loss_wiki?"]),
        ({"metric": "loss_code"}, ["searcher.metric", "loss_code", "did you mean loss"]),
        ({"metric": "perplexty"}, ["searcher.metric", "perplexty", "did you mean perplexity?"]),
        ({"metric": "accuracy"}, ["searcher.metric", "accuracy", *METRICS]),
        ({"smaller_is_better": False}, ["searcher.smaller_is_better", "true"]),
        ({"metric": "eval_sciq_acc"}, ["searcher.smaller_is_better", "smallest", "use false"]),
        ({"time_metric": "steps"}, ["searcher.time_metric", "steps", "batches"]),
        ({"time_metric": "loss"}, ["searcher.time_metric", "loss", "batches"]),
        ({"max_time": 1000}, ["searcher.max_time", "1000", "max_steps 400"]),
        (
            {"max_rungs": 4, "max_trials": 64},
            ["validation_rate", "step 6", "6, 25, 100, 400", "max_rungs 3"],
        ),
        ({"bracket_rungs": [2, 5]}, ["validation_rate", "step 1", "validation_rate 1"]),
    ],
)
def test_searcher_check_refuses_what_cannot_work(
    searcher: dict[str, Any], parts: list[str]
) -> None:
    (problem,) = problems(400, 25, **searcher)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("max_steps", "validation_rate", "searcher"),
    [
        (90, 25, {"max_time": 90}),  # rungs 22 and 90
        (400, 60, {}),  # 25 at step 60, 100 at 120
        (400, 99, {}),
        (450, 300, {"max_rungs": 1}),
    ],
)
def test_searcher_check_accepts_validations_after_rungs(
    max_steps: int, validation_rate: int, searcher: dict[str, Any]
) -> None:
    searcher = {"max_trials": 8} | searcher
    assert problems(max_steps, validation_rate, **searcher) == ()
    config = SEARCH | {"searcher": SEARCH["searcher"] | searcher | {"mode": "aggressive"}}
    platform = Halving(config)
    for _ in range(8):
        platform.create()
    reached = []
    for step in [*range(validation_rate, max_steps, validation_rate), max_steps]:
        before = [len(losses) for losses in platform._losses]
        platform.stops(0, step, 0.0)
        passed = [len(losses) for losses in platform._losses]
        reached.append(sum(passed) - sum(before))
    assert max(reached) == 1  # never at two rungs at once


@pytest.mark.parametrize(
    ("max_steps", "validation_rate"), [(400, 100), (400, 101), (400, 400), (400, 1000), (420, 410)]
)
def test_searcher_check_remedy_compares_at_every_rung(max_steps: int, validation_rate: int) -> None:
    (problem,) = problems(max_steps, validation_rate)
    rate = int(problem.rpartition("validation_rate ")[2])
    assert problems(max_steps, rate) == ()
    for n_rungs in re.findall("max_rungs ([0-9]+)", problem):
        assert problems(max_steps, validation_rate, max_rungs=int(n_rungs)) == ()


def test_searcher_check_suggests_max_rungs_only_where_it_counts() -> None:
    too_many = {"max_rungs": 4, "max_trials": 64}
    assert "max_rungs" in problems(400, 25, **too_many)[0]
    assert "max_rungs" not in problems(400, 25, **too_many, bracket_rungs=[2, 4])[0]


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


@pytest.mark.parametrize(
    ("max_steps", "validation_rate", "searcher", "late"),
    [
        (400, 25, {}, None),
        (400, 20, {}, ["25 at step 40"]),
        (1000, 25, {"max_time": 1000}, ["62 at step 75"]),
        (400, 300, {"max_rungs": 1}, None),
        (450, 300, {"max_rungs": 1}, ["400 at step 450"]),
    ],
)
def test_searcher_note_of_rungs_between_validations(
    max_steps: int, validation_rate: int, searcher: dict[str, Any], late: list[str] | None
) -> None:
    assert problems(max_steps, validation_rate, **searcher) == ()
    config = SEARCH | {"searcher": SEARCH["searcher"] | searcher}
    note = Searcher.from_config(config, max_steps, validation_rate).note()
    if late is None:
        assert note is None
    else:
        assert note is not None
        assert all(part in note for part in late)


@pytest.mark.parametrize(
    ("searcher", "rungs"),
    [
        ({"max_time": 900, "max_trials": 10, "divisor": 3}, [100, 300, 900]),
        (
            {"max_time": 1000, "max_trials": 10, "divisor": 2.0, "mode": "conservative"},
            [125, 250, 500, 1000],
        ),
        ({"max_time": 6400, "max_trials": 1024}, [25, 100, 400, 1600, 6400]),
        ({"max_time": 400, "max_trials": 32, "max_rungs": 3}, [25, 100, 400]),
        ({"max_time": 3, "max_trials": 100}, [3]),
        ({"max_time": 100, "max_trials": 1}, [100]),
    ],
)
def test_adaptive_asha_rungs_are_of_the_longest_bracket(
    searcher: dict[str, Any], rungs: list[int]
) -> None:
    assert adaptive_asha_rungs(searcher) == rungs
    assert (
        Halving({"searcher": searcher | {"name": "adaptive_asha"}, "hyperparameters": {}}).rungs
        == rungs
    )


def test_rungs_beyond_the_range_of_floats_are_of_one_step() -> None:
    rungs = adaptive_asha_rungs({"max_time": 16, "max_trials": 9, "bracket_rungs": [600]})
    assert rungs[-3:] == [1, 4, 16]
    assert set(rungs[:-3]) == {1}


def test_retry_warning_of_a_search_without_a_policy() -> None:
    assert retry_warning(SEARCH) is None
    others = [policy for policy in SEARCH["log_policies"] if policy["name"] != "bad configuration"]
    for policies in (
        [],
        None,
        others,
        [{"pattern": ".*exitcode *: 2 .*"}],
        [{"pattern": "(", "action": "cancel_retries"}],
    ):
        warning = retry_warning(SEARCH | {"log_policies": policies})
        assert warning is not None
        assert "max_restarts" in warning
        assert "\n" not in warning
    assert retry_warning(SEARCH | {"log_policies": [], "max_restarts": 0}) is None
    assert retry_warning(SEARCH | {"log_policies": [], "searcher": {"name": "single"}}) is None
