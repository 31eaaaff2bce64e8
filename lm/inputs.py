"""What the result of a run depends on, besides its hyperparameters; without PyTorch."""

from __future__ import annotations

import importlib.metadata
import platform
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import determined as det

from lm.config.hyperparameters import DEFAULT_SEED, Hyperparameters
from lm.data.dataset import validation_metric_names
from lm.data.run_data import Data
from lm.data.tokenizer.files import CHAT_TEMPLATE
from lm.determined.search import Searcher
from lm.errors import ConfigError
from lm.fileio import REPOSITORY
from lm.objectives.config import LARGER_IS_BETTER
from lm.tasks.config import TasksConfig, metric_names
from lm.transformers_config import TransformersConfig

RECORD_INPUTS = "RECORD_INPUTS"
"""Environment variable by which a search asks a run to add its inputs to sessions.jsonl."""


def resolve_seed(seed: int | None, trial: det.ClusterInfo | None) -> int:
    """Return the seed of a run: the given one, or that of the trial on a cluster that it is."""
    if seed is not None:
        return seed
    if trial is not None:
        return trial.trial.trial_seed
    return DEFAULT_SEED


def fingerprint_inputs(hp: Hyperparameters, data: Data, tasks: str | None) -> dict[str, Any]:
    """Return what the results of a run depend on, besides its hyperparameters, by content.

    Args:
        tasks: their fingerprint.
    """
    fingerprints = data.fingerprints()
    inputs = {
        "train_data": fingerprints["data"]["train"],
        "val_data": fingerprints["data"]["validation"],
        "tokenizer": fingerprints["tokenizer"],
        "eval_tasks": tasks,
        "versions": find_versions(),
    }
    if data.tokenizer is not None and CHAT_TEMPLATE in data.tokenizer.files:
        inputs["chat_template"] = sha256(data.tokenizer.files[CHAT_TEMPLATE]).hexdigest()
    if isinstance(hp.model, TransformersConfig):
        inputs["config"] = hp.model.transformers_config
        inputs["transformers"] = importlib.metadata.version("transformers")
    if hp.checkpoint.init_from is not None:
        from lm.hf.base import fingerprint_weights  # with PyTorch

        inputs["init_from"] = fingerprint_weights(hp.checkpoint.init_from)
    return inputs


def find_versions() -> str:
    """Return the versions of this package and of what it computes with."""
    package = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return (
        f"{package['name']} {package['version']}, Python {platform.python_version()},"
        f" PyTorch {importlib.metadata.version('torch')}, Determined {det.__version__}"
    )


def check_searcher(
    searcher: Searcher, config: TasksConfig, tasks: Sequence[str], data: Data
) -> None:
    """Raise ConfigError if the searcher cannot work with the metrics of a run's validations.

    Args:
        tasks: the names of the tasks that `config` has.
    """
    has_text = data.tokenizer is not None
    smaller_is_better = validation_metric_names(data.validation, has_text)
    larger_is_better: list[str] = []
    if data.n_replies > 0:
        larger_is_better += validation_metric_names(data.validation, has_text, LARGER_IS_BETTER)
    of_tasks = [metric_names(name) for name in tasks]
    eval_rate = config.eval_rate or searcher.validation_rate
    if (
        any(searcher.metric in names for names in of_tasks)
        and eval_rate != searcher.validation_rate
    ):
        problem = f"{eval_rate} differs from validation_rate {searcher.validation_rate}"
        reason = f"searcher.metric {searcher.metric} would be missing in some validations"
        raise ConfigError(f"eval_rate: {problem}: {reason}; remove eval_rate")
    for names in of_tasks:
        larger_is_better.append(names.acc)
        smaller_is_better.append(names.bpb)
    searcher.check(smaller_is_better, larger_is_better)
