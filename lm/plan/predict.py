"""Prediction of a run on GPUs: memory, time, and the fastest settings that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError
from lm.plan import fit
from lm.plan.memory import Memory, count_units
from lm.plan.speed import Card, Layout, Links, Seconds, step_time
from lm.training import parallelize

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, None: None}
"""Compute dtype on a GPU that has bfloat16, by `amp_dtype`; None = float32."""
SHARDINGS = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """What a run needs and how fast it is; bytes of a GPU, unless stated; without a card no times."""

    parameters: int
    trained: int
    gpus: int
    nodes: int
    mesh: dict[str, int]
    sharding: str
    activation_checkpointing: str
    batch_size: int
    micro_batches: int
    tokens_per_step: int
    memory: Memory
    peak: int
    available: float
    host: int
    """bytes of a node's memory, for asynchronous checkpoints and for what is offloaded"""
    host_available: float | None
    """bytes of a node's memory; None = unknown"""
    fits: bool
    seconds: Seconds | None = None
    step: float | None = None
    """seconds of a step"""
    flops: float | None = None
    """of a GPU and step, without recomputation"""
    links: Links | None = None
    mfu: float | None = None
    tokens_per_second: float | None = None
    gpu_hours_per_billion_tokens: float | None = None
    hours: float | None = None
    """of the run; None if it ends after `max_epochs`"""
    largest_batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """hyperparameters that a search changed"""


def make_plan(
    hp: Hyperparameters, ranks: fit.Ranks, card: Card | None = None, network: float = 50.0
) -> Plan:
    """Predict a run, and its times if a `card` is given.

    Args:
        network: GB/s per GPU to other nodes.

    Raises:
        ConfigError: the GPUs cannot be divided into shard groups, or the global batch into
        micro-batches, or the card
            does not support float8.
    """
    if card is not None and hp.float8 and not card.has_float8:
        raise ConfigError(f"float8: {card.name} does not support float8; use float8: null")
    mesh = parallelize.mesh_shape(hp, ranks.size, ranks.per_node)
    global_batch_size = derive_global_batch_size(hp, ranks.size)
    n_micro_batches = global_batch_size // (hp.batch_size * ranks.size)
    memory = fit.required_memory(hp, ranks)
    host = fit.required_host_memory(hp, ranks)
    total = count_units(hp, ranks.dtype, mesh.shard).total
    plan = Plan(
        parameters=total.n,
        trained=total.trained,
        gpus=ranks.size,
        nodes=ranks.size // ranks.per_node,
        mesh=mesh._asdict(),
        sharding=hp.sharding,
        activation_checkpointing=hp.activation_checkpointing,
        batch_size=hp.batch_size,
        micro_batches=n_micro_batches,
        tokens_per_step=global_batch_size * hp.max_seq_len,
        memory=memory,
        peak=memory.total,
        available=ranks.memory,
        host=ranks.per_node * host,
        host_available=None if math.isinf(ranks.host_memory) else ranks.host_memory,
        fits=ranks.fit(memory, host),
    )
    if card is None:
        return plan
    layout = Layout(mesh.shard, mesh.replicate, ranks.per_node, network)
    time = step_time(hp, ranks.dtype, card, layout, n_micro_batches)
    step = time.seconds.total
    tokens_per_second = plan.tokens_per_step / step
    hours = None
    if hp.max_epochs is None:
        hours = step * hp.run_length(None) / 3600
    return replace(
        plan,
        seconds=time.seconds,
        step=step,
        flops=time.flops,
        links=time.links,
        mfu=time.flops / step / card.flops,
        tokens_per_second=tokens_per_second,
        gpu_hours_per_billion_tokens=1e9 / tokens_per_second * ranks.size / 3600,
        hours=hours,
    )


def search(hp: Hyperparameters, ranks: fit.Ranks, card: Card, network: float) -> Iterator[Plan]:
    """Yield for 1, 2, 4, ... and all GPUs the fastest plan that fits; given weights, also with adapters."""
    counts = {2**power for power in range(ranks.size.bit_length())} | {ranks.size}
    has_weights_to_adapt = hp.init_from is not None and hp.lora_rank is None and hp.float8 is None
    adapter_ranks = (None, 16) if has_weights_to_adapt else (hp.lora_rank,)
    for count in sorted(counts):
        if count > ranks.per_node and count % ranks.per_node:
            continue
        some = replace(ranks, size=count, per_node=min(count, ranks.per_node))
        for lora_rank in adapter_ranks:
            fastest: Plan | None = None
            for plan in _plans_that_fit(
                hp.model_copy(update={"lora_rank": lora_rank}), some, card, network
            ):
                if fastest is None or _rate(plan) > _rate(fastest):
                    fastest = plan
            if fastest is None:
                continue
            if lora_rank != hp.lora_rank:
                fastest = replace(fastest, settings={"lora_rank": lora_rank} | fastest.settings)
            yield fastest


def _rate(plan: Plan) -> float:
    assert plan.tokens_per_second is not None
    return plan.tokens_per_second


def _plans_that_fit(
    hp: Hyperparameters, ranks: fit.Ranks, card: Card, network: float
) -> Iterator[Plan]:
    """Yield the plans that fit, of all settings that a search combines."""
    for changes in _grid(hp, ranks):
        for batch_size in BATCH_SIZES:
            if hp.total_batch_size and hp.total_batch_size % (batch_size * ranks.size):
                continue
            changed = changes | {"batch_size": batch_size}
            plan = make_plan(hp.model_copy(update=changed), ranks, card, network)
            if not plan.fits:
                break  # larger batches need more
            settings = {key: value for key, value in changed.items() if value != getattr(hp, key)}
            yield replace(plan, settings=settings)


def _grid(hp: Hyperparameters, ranks: fit.Ranks) -> Iterator[dict[str, Any]]:
    group = hp.shard_group_size or ranks.per_node
    shardings: Sequence[str] = SHARDINGS
    if (
        ranks.size <= ranks.per_node or ranks.size % group
    ):  # no groups: full-shard, grad-shard, no-shard
        shardings = SHARDINGS[
            : min(ranks.size + 1, 3)
        ]  # on one GPU the last is the same as grad-shard
    optim_dtypes: Sequence[str] = (hp.optim_dtype,)
    if hp.beta2 <= 0.99:  # above, bfloat16 moments would not decay
        optim_dtypes = ("float32", "bfloat16")
    values = {
        "sharding": shardings,
        "optim_dtype": optim_dtypes,
        "activation_checkpointing": ("none", "selective", "full"),
        "activation_offload": (False, True),
        "cpu_offload": (False, True),
    }
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))
