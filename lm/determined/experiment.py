"""What an experiment asks of the platform, and this package does in another way or refuses."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import determined as det
from determined import core
from determined.common.api import Session, bindings

from lm.determined import private
from lm.determined.master import MALFORMED, REFUSALS, experiment_config
from lm.errors import ConfigError


@dataclass(frozen=True)
class LoopKey:
    """A key of the training loop of the platform's trial classes, which a Core API script is not.

    Args:
        name: e.g. "optimizations.mixed_precision".
        default: of the master, which writes it into every trial's config.
        instead: what does it here.
    """

    name: str
    default: Any
    instead: str


LOOP_KEYS = (
    LoopKey("min_validation_period", {"batches": 0}, "validation_rate"),
    LoopKey("min_checkpoint_period", {"batches": 0}, "checkpoint_rate"),
    LoopKey("checkpoint_policy", "best", "checkpoint_rate"),
    LoopKey("perform_initial_validation", False, "max_epochs: -1, a run that only validates"),
    LoopKey("scheduling_unit", 100, "report_rate"),
    LoopKey("records_per_epoch", 0, "max_epochs"),
    LoopKey("optimizations.aggregation_frequency", 1, "total_batch_size"),
    LoopKey("optimizations.mixed_precision", "O0", "amp_dtype"),
    LoopKey("optimizations.gradient_compression", False, "reduce_dtype"),
    LoopKey("profiling.enabled", False, "core_api_profiler: true"),
    LoopKey("profiling.begin_on_batch", 0, "torch_profiler_steps"),
    LoopKey("profiling.end_after_batch", None, "torch_profiler_steps"),
)


def unread_keys(experiment: Mapping[str, Any]) -> list[str]:
    """Return a line for each key of the platform's own loop that is set, which nothing reads."""
    lines: list[str] = []
    for key in LOOP_KEYS:
        value = _find(experiment, key.name)
        if value is not None and value != key.default:
            shown = json.dumps(value, default=str)
            lines.append(f"{key.name}: {shown} has no effect here; use {key.instead}")
    return lines


def _find(experiment: Any, name: str) -> Any:
    """Return the value of a key, e.g. "profiling.enabled"; None = it is not set."""
    value = experiment
    for key in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def check_processes(trial: det.ClusterInfo, n_processes: int) -> None:
    """Raise ConfigError unless the trial has a process for each slot of all its nodes, or one."""
    n_slots = sum(trial.container_slot_counts)
    if n_processes == max(n_slots, 1):
        return
    command = f"python3 {shlex.join(sys.argv)}"
    if n_slots > 0:
        command = f"python3 -m determined.launch.torch_distributed -- {command}"
    problem = f"number of processes {n_processes} is not that of slots on all nodes, {n_slots}"
    raise ConfigError(f"entrypoint: {problem}; use {command}")


def check_fork(
    train: core.TrainContext, trial: det.ClusterInfo, hyperparameters: Mapping[str, Any]
) -> None:
    """Refuse a search that lacks values of the experiment from which it was made.

    The Web UI's form *Hyperparameter Search* drops hyperparameters that are 0, false or "".

    Args:
        hyperparameters: of this trial, with the defaults.
    """
    if experiment_config(trial)["searcher"]["name"] == "single":
        return
    source = _read_source(private.session_of(train), trial.trial.experiment_id)
    if source is None:
        return
    problems: list[str] = []
    for key, setting in source.config["hyperparameters"].items():
        before = setting
        if isinstance(setting, dict) and setting.get("type") == "const":
            before = setting["val"]
        if before or before is None or key in trial.trial.hparams:
            continue
        now = hyperparameters.get(key, before)
        if now != before:
            values = f"{json.dumps(before)} in experiment {source.id}, {json.dumps(now)} here"
            problems.append(f"{key}: not set, and its default is another value: {values}")
    if problems:
        cause = "the form Hyperparameter Search drops values that are 0 or false"
        remedy = "set them in the YAML of Fork, with the searcher and the ranges"
        raise ConfigError(*problems, f"{cause}; {remedy}")


def _read_source(session: Session, experiment_id: int) -> bindings.v1Experiment | None:
    """Return the experiment from which this one was made; None = none, or it cannot be read."""
    with suppress(*REFUSALS, *MALFORMED):
        experiment = bindings.get_GetExperiment(session, experimentId=experiment_id).experiment
        if experiment.forkedFrom is not None:
            source = bindings.get_GetExperiment(session, experimentId=experiment.forkedFrom)
            return source.experiment
    return None
