"""Every YAML that is shipped can be started, and what is written about settings is what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm import config
from tests.support import ROOT

SHIPPED = sorted([ROOT / "config.yaml", ROOT / "distributed.yaml", *(ROOT / "recipes").glob("*.yaml")])

ORIGINAL = {
    "batch_size",
    "lr",
    "d_model",
    "n_heads",
    "n_layers",
    "vocab_size",
    "max_seq_len",
    "report_rate",
    "checkpoint_rate",
    "validation_batches",
    "amp_dtype",
    "core_api_profiler",
    "torch_profiler",
}
"""The hyperparameters of Determined's FSDP example."""


def one_trial(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """What a trial of a search is handed: the first or lowest value of every range."""

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
def test_it_is_a_whole_experiment(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    assert experiment["name"]
    assert "fsdp.py" in experiment["entrypoint"]
    assert experiment["searcher"]["metric"] == "loss"
    assert experiment["searcher"]["smaller_is_better"] is True
    if experiment["searcher"]["name"] == "single":
        assert experiment["searcher"]["max_length"] > 0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_its_hyperparameters_are_good(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    hyperparameters = one_trial(experiment["hyperparameters"])
    hp = config.read(experiment | {"hyperparameters": hyperparameters}, [], path.name)
    if hyperparameters == experiment["hyperparameters"]:
        assert config.load(path, []) == hp


def test_config_yaml_is_the_original_example_with_its_defaults() -> None:
    hyperparameters = yaml.safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
    assert hyperparameters.keys() == ORIGINAL
    assert config.load(ROOT / "config.yaml", ["max_steps=1"]) == config.read({}, ["max_steps=1"], "defaults")


def test_the_readmes_table_is_the_codes() -> None:
    between = re.search(
        r"<!-- hyperparameters -->(.*)<!-- /hyperparameters -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert between is not None
    assert between[1].strip() == config.table(), "`make docs` brings it up to date"


def test_the_schema_for_editors_is_the_codes() -> None:
    shipped = (ROOT / "docs" / "hyperparameters.schema.json").read_text()
    assert json.loads(shipped) == config.schema(), "`make docs` brings it up to date"
