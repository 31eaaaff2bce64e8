"""Options of parallelism and memory with which a run trains as one process without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lm.runtime.world import World
from tests.support.hyperparameters import TINY
from tests.support.runs import read_reports, train_in_world

STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")


def sharding_of(strategy: str, n_ranks: int) -> dict[str, Any]:
    """Hyperparameters of `strategy`; hybrid ones on four ranks have groups of two."""
    if strategy.startswith("hybrid") and n_ranks == 4:
        return {"sharding": strategy, "shard_group_size": 2}
    return {"sharding": strategy}


PARITY_STEPS = 5

PARITY_RUN = TINY | {
    "max_steps": PARITY_STEPS,
    "report_rate": 1,
    "validation_rate": PARITY_STEPS,
    "total_batch_size": 8,
    "batch_size": 2,
    "validation_batches": 1,
    "amp_dtype": None,
    "lr": 1e-2,
    "grad_clip": 0.5,
    "seed": 7,
}
"""Hyperparameters of the run that one process trains without these options."""


def train_each(
    world: World, directory: str, runs: dict[str, dict[str, Any]], base: dict[str, Any] = PARITY_RUN
) -> dict[str, list[float]]:
    """Train with each of `runs`, which are changes of `base`; return the losses by name."""
    os.chdir(directory)
    losses = {}
    for name, changes in runs.items():
        train_in_world(world, base | {"run_name": name} | changes)
        losses[name] = read_losses(Path(), name)
    return losses


def read_losses(folder: Path, name: str) -> list[float]:
    """Return the training losses that a run reported."""
    return [line["loss"] for line in read_reports(folder, name=name).values()]


OFFLOADED: dict[str, Any] = {"n_layers": 4, "max_seq_len": 32, "activation_offload": True}
"""A model whose blocks save enough for the backward pass to be offloaded."""

EQUIVALENT_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"sharding": name} for name in STRATEGIES if not name.startswith("hybrid")},
    "4x1": {"batch_size": 4},
    "1x4": {"batch_size": 1},
    "1x4-no-shard": {"batch_size": 1, "sharding": "no-shard"},
    "1x4-each": {"batch_size": 1, "sync_each_micro_step": True},
    "1x4-no-shard-each": {"batch_size": 1, "sharding": "no-shard", "sync_each_micro_step": True},
    "one-unit": {"layer_wrap": False},
    "recompute": {"activation_checkpointing": "full"},
    "recompute-some": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "offload-activations": OFFLOADED,
}
"""Options of two ranks that train as one process does without them."""

AMP_DTYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"amp_dtype": "bfloat16"},
    "float16": {"amp_dtype": "float16"},
}
