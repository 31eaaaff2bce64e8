"""What an experiment asks of the platform and a trial does not do is refused or said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from determined.common.api import Session

from lm.config.reading import read_hyperparameters
from lm.determined.experiment import LOOP_KEYS, check_fork, unread_keys
from lm.errors import ConfigError
from tests.support.cluster import trial
from tests.support.cluster.master import PROFILER_GROUPS, USER_TOKEN, Experiment, Master
from tests.support.hyperparameters import TINY
from tests.support.runs import run_fsdp

UNAVAILABLE = trial.unavailable_reason()
in_containers = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
WITHOUT_LAUNCHER = "python3 fsdp.py"


def run(
    master: Master, config: dict[str, Any], folder: Path, forked_from: int | None = None
) -> str:
    """Run an experiment of one trial to its end, and return the log of the last start."""
    trial.submit(master, config, folder / "cli")
    experiment = master.experiments[-1]
    experiment.forked_from = forked_from
    trial.run_experiment(master, experiment, folder)
    (record,) = master.trials.values()
    return record.logs[-1].read_text()


def refused(master: Master, log: str, key: str) -> list[str]:
    """Return the lines of the log on `key`; the trial has been started once, and no step made."""
    (record,) = master.trials.values()
    assert (record.state, record.restarts) == ("STATE_ERROR", 0), log
    assert master.metrics == []
    lines = [line.removeprefix("[rank=0] ") for line in log.splitlines()]
    return [line for line in lines if line.startswith(key)]


# ---- slots and processes


@in_containers
def test_trial_with_fewer_processes_than_slots_is_refused(master: Master, tmp_path: Path) -> None:
    config = trial.experiment(slots=2) | {"entrypoint": f"{WITHOUT_LAUNCHER} lr=0.1"}
    (line,) = refused(master, run(master, config, tmp_path), "entrypoint")
    assert "processes 1 " in line
    assert "slots on all nodes, 2" in line
    assert line.endswith(
        "use python3 -m determined.launch.torch_distributed -- python3 fsdp.py lr=0.1"
    )


@pytest.mark.slow
@in_containers
def test_trial_with_more_processes_than_slots_is_refused(master: Master, tmp_path: Path) -> None:
    launcher = "python3 -m torch.distributed.run --nproc_per_node 2 fsdp.py"
    config = trial.experiment() | {"entrypoint": launcher}
    (line,) = refused(master, run(master, config, tmp_path), "entrypoint")
    assert "processes 2 " in line
    assert "slots on all nodes, 1" in line


@pytest.mark.slow
@in_containers
def test_trial_without_slots_is_one_process(master: Master, tmp_path: Path) -> None:
    config = trial.experiment(slots=0, core_api_profiler=True) | {"entrypoint": WITHOUT_LAUNCHER}
    config |= {"min_validation_period": {"batches": 100}}
    log = run(master, config, tmp_path)
    assert master.trials[1].state == "STATE_COMPLETED", log
    assert {m["step"] for m in master.metrics if m["group"] == "training"} == {3, 6, 9, 12}
    assert {m["group"] for m in master.metrics} & PROFILER_GROUPS
    (line,) = [line for line in log.splitlines() if line.startswith("min_validation_period")]
    assert '{"batches": 100}' in line
    assert "validation_rate" in line


@pytest.mark.slow
@in_containers
def test_trial_without_slots_and_with_a_wrong_key_starts_once(
    master: Master, tmp_path: Path
) -> None:
    config = trial.experiment(slots=0, lr=-1) | {"entrypoint": WITHOUT_LAUNCHER}
    assert refused(master, run(master, config, tmp_path), "trial: lr")


# ---- keys of the platform's own loop


@pytest.mark.parametrize("key", LOOP_KEYS, ids=lambda key: key.name)
def test_unread_keys_are_those_that_differ_from_the_default(key: Any) -> None:
    section, _, inner = key.name.rpartition(".")

    def experiment(value: Any) -> dict[str, Any]:
        return {section: {inner: value}} if section else {inner: value}

    assert unread_keys(experiment(key.default)) == []
    (line,) = unread_keys(experiment(7))
    assert line.startswith(f"{key.name}: 7 ")
    assert key.instead in line


def test_sections_that_are_not_mappings_set_nothing() -> None:
    experiment = {"profiling": True, "optimizations": None, "hyperparameters": {}}
    assert unread_keys(experiment) == []


@pytest.mark.slow
def test_dry_run_names_unread_keys(tmp_path: Path) -> None:
    keys = {"scheduling_unit": 10, "optimizations": {"mixed_precision": "O2"}}
    (tmp_path / "own.yaml").write_text(json.dumps(keys | {"hyperparameters": TINY}))
    done = run_fsdp(tmp_path, "--config", "own.yaml", "--dry-run", code=0)
    lines = [line.partition(" ")[0] for line in done.stderr.splitlines()]
    assert lines == ["scheduling_unit:", "optimizations.mixed_precision:"]


# ---- searches made of another experiment

BEFORE = {
    "weight_decay": 0.0,
    "compile": False,
    "num_tokens": 0,
    "dropout": 0.0,  # as its default
    "warmup_steps": 0,  # as its default
    "lr": 1.0e-3,
    "amp_dtype": None,
}


def fork(
    master: Master,
    monkeypatch: pytest.MonkeyPatch,
    hyperparameters: dict[str, Any],
    searcher: str = "random",
) -> list[str]:
    """Return the problems of a search made of an experiment with the hyperparameters `BEFORE`."""
    before: dict[str, Any] = {key: {"type": "const", "val": value} for key, value in BEFORE.items()}
    before["d_model"] = {"type": "int", "minval": 0, "maxval": 9}
    config = {"name": "test", "hyperparameters": before}
    master.experiments += [Experiment(1, config), Experiment(2, config, forked_from=1)]
    monkeypatch.setenv("DET_EXPERIMENT_CONFIG", json.dumps({"searcher": {"name": searcher}}))
    session = Session(master.url, "tester", USER_TOKEN, None)
    info: Any = SimpleNamespace(
        trial=SimpleNamespace(experiment_id=2, hparams=hyperparameters),
    )
    train: Any = SimpleNamespace(_session=session)
    hp = read_hyperparameters({"hyperparameters": hyperparameters}, [], "test")
    try:
        check_fork(train, info, hp.to_flat())
    except ConfigError as error:
        return list(error.problems)
    return []


def test_fork_lists_dropped_values_with_other_defaults(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    *problems, remedy = fork(master, monkeypatch, {"lr": 0.1})
    assert [problem.partition(":")[0] for problem in problems] == [
        "weight_decay",
        "compile",
        "num_tokens",
    ]
    assert "0.0 in experiment 1, 0.01 here" in problems[0]
    assert "Fork" in remedy


def test_fork_accepts_what_is_set(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork(master, monkeypatch, BEFORE) == []
    changed = BEFORE | {"weight_decay": 0.1, "compile": "auto", "num_tokens": 5}
    assert fork(master, monkeypatch, changed) == []


def test_fork_into_a_single_trial_may_drop_values(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fork(master, monkeypatch, {}, searcher="single") == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_fork_of_what_the_master_does_not_show_is_not_compared(
    status: int, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.refuse = {"/api/v1/experiments/{experiment}": status}
    assert fork(master, monkeypatch, {}) == []


@pytest.mark.slow
@in_containers
def test_search_from_the_form_is_refused_in_the_trial(master: Master, tmp_path: Path) -> None:
    config = trial.experiment(slots=2, weight_decay=0.0)
    master.experiments.append(Experiment(1, config, "STATE_COMPLETED"))
    search = trial.experiment(slots=2)
    search["searcher"] = {"name": "random", "metric": "loss", "max_trials": 1}
    log = run(master, search, tmp_path, forked_from=1)
    (line,) = refused(master, log, "weight_decay")
    assert "0.0 in experiment 1, 0.01 here" in line
