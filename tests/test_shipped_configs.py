"""Every shipped YAML is a valid experiment, and the generated pages match the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm import config
from tests.support import ROOT

SHIPPED = sorted([ROOT / "config.yaml", ROOT / "distributed.yaml", *(ROOT / "recipes").glob("*.yaml")])

ORIGINAL = {"batch_size", "lr", "d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len"}
ORIGINAL |= {"report_rate", "checkpoint_rate", "validation_batches", "amp_dtype", "core_api_profiler", "torch_profiler"}
"""The hyperparameters of Determined's FSDP example."""


KEYS = {
    "": """bind_mounts checkpoint_policy checkpoint_storage data debug description entrypoint environment
        hyperparameters integrations labels log_policies max_restarts min_checkpoint_period min_validation_period name
        optimizations pbs perform_initial_validation preemption_timeout profiling project records_per_epoch
        reproducibility resources retention_policy scheduling_unit searcher slurm tensorboard_storage workspace""",
    "resources": """devices is_single_node max_slots native_parallel priority resource_pool shm_size slots_per_trial
        weight""",
    "environment": """add_capabilities drop_capabilities environment_variables force_pull_image image pod_spec ports
        proxy_ports registry_auth""",
    "environment.image": "cpu cuda rocm",
    "checkpoint_storage": """type save_experiment_best save_trial_best save_trial_latest host_path container_path
        storage_path propagation bucket prefix access_key secret_key endpoint_url container connection_string
        account_url credential""",
}
SEARCHER = "name metric smaller_is_better source_trial_id source_checkpoint_uuid"
ASHA = "bracket_rungs divisor max_concurrent_trials max_rungs max_time max_trials mode time_metric"
SEARCHERS = {
    "single": ("max_length", ""),
    "random": ("max_length max_trials max_concurrent_trials", "max_trials"),
    "grid": ("max_length max_concurrent_trials", ""),
    "adaptive_asha": (ASHA, "max_trials max_time time_metric"),
}
"""Each search method's keys besides `SEARCHER`, and the required ones besides `name` and `metric`."""

RANGES = {
    "const": "val",
    "categorical": "vals",
    "int": "minval maxval",
    "double": "minval maxval",
    "log": "minval maxval base",
}


def problems(experiment: dict[str, Any]) -> list[str]:
    """Return what Determined 0.38.1's master refuses in an experiment's config, by its published reference."""
    found = []

    def check(where: str, given: dict[str, Any], known: str, needed: str = "") -> None:
        dot = where and f"{where}."
        found.extend(f"{dot}{key}: unknown" for key in given.keys() - {*known.split()})
        found.extend(f"{dot}{key}: missing" for key in needed.split() if given.get(key) is None)

    check("", experiment, KEYS[""], "name entrypoint searcher hyperparameters")
    if ("workspace" in experiment) != ("project" in experiment):
        found.append("workspace, project: both or neither")
    for section in KEYS.keys() - {""}:
        outer, _, inner = section.partition(".")
        value = experiment.get(outer) or {}
        check(section, (value.get(inner) or {}) if inner else value, KEYS[section])
    searcher = experiment["searcher"]
    if searcher["name"] in SEARCHERS:
        known, needed = SEARCHERS[searcher["name"]]
        check("searcher", searcher, f"{SEARCHER} {known}", f"metric {needed}")
    else:
        found.append("searcher.name: unknown")
    for policy in experiment.get("log_policies", []):
        check("log_policies", policy, "name pattern action", "name")
        if policy.get("action") not in (None, "cancel_retries", "exclude_node"):
            found.append(f"log_policies.action: {policy['action']}")
        else:
            re.compile(policy["pattern"])
    for key, value in experiment["hyperparameters"].items():
        if isinstance(value, dict) and value.get("type") in RANGES:
            check(f"hyperparameters.{key}", value, f"type count {RANGES[value['type']]}", RANGES[value["type"]])
            if value.get("minval", 0) >= value.get("maxval", 1):
                found.append(f"hyperparameters.{key}: empty range")
    resources = experiment["resources"]
    if not isinstance(resources.get("slots_per_trial", 1), int) or not isinstance(experiment["max_restarts"], int):
        found.append("slots_per_trial, max_restarts: not integers")
    return found


def one_trial(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return a trial's hyperparameters in a search: the first or lowest value of every range."""

    def pick(value: Any) -> Any:
        match value:
            case {"type": "categorical", "vals": [first, *_]}:
                return first
            case {"type": "log", "base": base, "minval": exponent}:
                return base**exponent
            case {"type": "int" | "double", "minval": lowest}:
                return lowest
        return value

    return {key: pick(value) for key, value in hyperparameters.items()}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_is_a_complete_experiment(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    assert problems(experiment) == []
    assert "# workspace:" in path.read_text()
    assert "# project:" in path.read_text()
    assert experiment["entrypoint"].startswith("python3 -m determined.launch.torch_distributed -- python3 fsdp.py")
    assert experiment["resources"]["shm_size"] >= 2**32
    assert re.fullmatch(r"pytorch/pytorch:2\.13\.\d-.*-devel", experiment["environment"]["image"]["cuda"])
    assert "PIP_BREAK_SYSTEM_PACKAGES=1" in experiment["environment"]["environment_variables"]
    actions = {policy["name"]: policy["action"] for policy in experiment["log_policies"]}
    assert actions == {"CUDA OOM": "cancel_retries", "bad configuration": "cancel_retries", "ECC Error": "exclude_node"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_restart": 5}, "max_restart: unknown"),
        ({"name": None}, "name: missing"),
        ({"workspace": "w"}, "workspace, project: both or neither"),
        ({"searcher": {"name": "adaptive_asha", "metric": "loss", "max_trials": 2}}, "searcher.max_time: missing"),
        ({"searcher": {"name": "asha", "metric": "loss"}}, "searcher.name: unknown"),
        ({"resources": {"slots": 2}}, "resources.slots: unknown"),
        ({"log_policies": [{"pattern": "x", "action": "retry"}]}, "log_policies.name: missing"),
        ({"log_policies": [{"name": "x", "pattern": "(", "action": "retry"}]}, "log_policies.action: retry"),
        ({"hyperparameters": {"lr": {"type": "log", "minval": 1, "maxval": 2}}}, "hyperparameters.lr.base: missing"),
        ({"hyperparameters": {"lr": {"type": "int", "minval": 2, "maxval": 1}}}, "hyperparameters.lr: empty range"),
    ],
)
def test_what_the_master_refuses_is_a_problem(change: dict[str, Any], problem: str) -> None:
    experiment = yaml.safe_load((ROOT / "config.yaml").read_text())
    assert problem in problems(experiment | change)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_hyperparameters_of_a_shipped_file_are_valid(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    hyperparameters = one_trial(experiment["hyperparameters"])
    hp = config.read(experiment | {"hyperparameters": hyperparameters}, [], path.name)
    if hyperparameters == experiment["hyperparameters"]:
        assert config.load(path, []) == hp
    else:
        assert experiment["searcher"]["metric"] == "loss"
        assert experiment["searcher"]["time_metric"] == "batches"
        assert experiment["searcher"]["max_time"] == hp.max_steps
        rungs = [hp.max_steps // experiment["searcher"]["divisor"] ** n for n in range(3)]
        assert [step % (hp.validation_rate or hp.report_rate) for step in rungs] == [0, 0, 0]


def test_config_yaml_has_the_hyperparameters_and_defaults_of_the_original_example() -> None:
    hyperparameters = yaml.safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
    assert hyperparameters.keys() == ORIGINAL
    assert config.load(ROOT / "config.yaml", ["max_steps=1"]) == config.read({}, ["max_steps=1"], "defaults")


@pytest.mark.parametrize(
    ("file", "text"), [("hyperparameters.md", config.page), ("hyperparameters.schema.json", config.schema)]
)
def test_the_generated_pages_match_the_code(file: str, text: Callable[[], str]) -> None:
    assert (ROOT / "docs" / file).read_text() == text(), "`make docs` writes it"
