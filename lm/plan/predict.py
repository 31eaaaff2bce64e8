"""Prediction of a run on GPUs: memory, time, and the fastest settings that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.plan import fit
from lm.plan.memory import Memory, count_units
from lm.plan.speed import Card, LinkBytes, Seconds, Topology, predict_step_time
from lm.runtime.world import MeshShape
from lm.training import parallelize

SHARDINGS = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Times:
    """How fast a run is."""

    seconds: Seconds
    """of a step, by part"""
    step: float
    """seconds of a step"""
    flops: float
    """of a GPU and step, without recomputation"""
    links: LinkBytes
    mfu: float
    tokens_per_second: float
    gpu_hours_per_billion_tokens: float
    hours: float | None
    """of the run; None if it ends after `max_epochs`"""


@dataclass(frozen=True)
class Plan:
    """What a run needs and how fast it is; bytes are those of a GPU, unless stated."""

    gpu: str | None
    """name of the card; None = unknown"""
    parameters: int
    trained: int
    gpus: int
    nodes: int
    mesh: MeshShape
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
    times: Times | None
    """None without a card"""
    largest_batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """hyperparameters that differ from the file's"""

    def flatten(self) -> dict[str, Any]:
        """Return the fields by name, those of `times` among them."""
        values = asdict(self) | {"mesh": self.mesh._asdict()}
        times = values.pop("times")
        if times is None:
            times = dict.fromkeys(each.name for each in fields(Times))
        return values | times


def round_up_batch(hp: Hyperparameters, n_ranks: int) -> Hyperparameters:
    """Return `hp` with `total_batch_size` rounded up to what the ranks can share."""
    if hp.total_batch_size is None:
        return hp
    per_micro_step = hp.batch_size * n_ranks
    total = math.ceil(hp.total_batch_size / per_micro_step) * per_micro_step
    return hp.model_copy(update={"total_batch_size": total})


def make_plan(
    hp: Hyperparameters, ranks: fit.Ranks, card: Card | None = None, network: float = 50.0
) -> Plan:
    """Predict a run, and its times if a `card` is given.

    Args:
        network: GB/s per GPU to other nodes.

    Raises:
        ConfigError: the GPUs cannot be divided into shard groups, or the global batch into
            micro-batches, or the card does not support float8.
    """
    if card is not None and hp.float8 and not card.has_float8:
        raise ConfigError(f"float8: {card.name} does not support float8; use float8: null")
    mesh = parallelize.mesh_shape(hp, ranks.size, ranks.per_node)
    n_micro_batches = fit.count_micro_batches(hp, ranks.size)
    tokens_per_step = n_micro_batches * hp.batch_size * ranks.size * hp.max_seq_len
    memory = fit.predict_memory(hp, ranks)
    host = fit.predict_host_memory(hp, ranks)
    host_available: float | None = None
    if not math.isinf(ranks.host_memory):
        host_available = ranks.host_memory
    times: Times | None = None
    if card is not None:
        topology = Topology(mesh.shard, mesh.replicate, ranks.per_node, network)
        times = _predict_times(hp, ranks, card, topology, n_micro_batches, tokens_per_step)
    total = count_units(hp, ranks.dtype, mesh.shard).total
    name: str | None = None
    if card is not None:
        name = card.name
    return Plan(
        gpu=name,
        parameters=total.n,
        trained=total.trained,
        gpus=ranks.size,
        nodes=ranks.size // ranks.per_node,
        mesh=mesh,
        sharding=hp.sharding,
        activation_checkpointing=hp.activation_checkpointing,
        batch_size=hp.batch_size,
        micro_batches=n_micro_batches,
        tokens_per_step=tokens_per_step,
        memory=memory,
        peak=memory.total,
        available=ranks.memory,
        host=ranks.per_node * host,
        host_available=host_available,
        fits=ranks.can_hold(memory, host),
        times=times,
    )


def _predict_times(
    hp: Hyperparameters,
    ranks: fit.Ranks,
    card: Card,
    topology: Topology,
    n_micro_batches: int,
    tokens_per_step: int,
) -> Times:
    time = predict_step_time(hp, ranks.dtype, card, topology, n_micro_batches)
    step = time.seconds.total
    tokens_per_second = tokens_per_step / step
    seconds_per_billion_tokens = 1e9 / tokens_per_second
    hours: float | None = None
    if hp.max_epochs is None:
        hours = step * hp.run_length(None) / 3600
    return Times(
        seconds=time.seconds,
        step=step,
        flops=time.flops,
        links=time.links,
        mfu=time.flops / step / card.flops,
        tokens_per_second=tokens_per_second,
        gpu_hours_per_billion_tokens=seconds_per_billion_tokens * ranks.size / 3600,
        hours=hours,
    )


def list_counts(ranks: fit.Ranks) -> list[int]:
    """Return 1, 2, 4, ... and all GPUs, as far as they fill their nodes."""
    powers_of_2 = {2**power for power in range(ranks.size.bit_length())}
    counts = sorted(powers_of_2 | {ranks.size})
    return [count for count in counts if count <= ranks.per_node or count % ranks.per_node == 0]


def search_settings(
    hp: Hyperparameters, ranks: fit.Ranks, card: Card, network: float
) -> list[Plan]:
    """Return the fastest plan that fits, or none.

    For a run that trains all of given weights, a plan with adapters follows.
    """
    adapter_ranks = [hp.lora_rank]
    if hp.init_from is not None and hp.lora_rank is None and hp.float8 is None:
        adapter_ranks.append(16)
    smallest = round_up_batch(hp.model_copy(update={"batch_size": 1}), ranks.size)
    found: list[Plan] = []
    for lora_rank in adapter_ranks:
        changes = {"lora_rank": lora_rank, "total_batch_size": smallest.total_batch_size}
        plans = list(_list_plans_that_fit(hp.model_copy(update=changes), ranks, card, network))
        if not plans:
            continue
        fastest = max(plans, key=_speed_of)
        settings = {key: value for key, value in changes.items() if value != getattr(hp, key)}
        found.append(replace(fastest, settings=settings | fastest.settings))
    return found


def _speed_of(plan: Plan) -> float:
    assert plan.times is not None
    return plan.times.tokens_per_second


def _list_plans_that_fit(
    hp: Hyperparameters, ranks: fit.Ranks, card: Card, network: float
) -> Iterator[Plan]:
    """Yield the plans that fit, of all settings that a search combines."""
    for changes in _list_combinations(hp, ranks):
        if hp.model_copy(update=changes).offloads_too_little:
            continue
        for batch_size in BATCH_SIZES:
            if hp.total_batch_size and hp.total_batch_size % (batch_size * ranks.size):
                continue
            changed = changes | {"batch_size": batch_size}
            plan = make_plan(hp.model_copy(update=changed), ranks, card, network)
            if not plan.fits:
                break  # larger batches need more
            settings = {key: value for key, value in changed.items() if value != getattr(hp, key)}
            yield replace(plan, settings=settings)


def _list_combinations(hp: Hyperparameters, ranks: fit.Ranks) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the settings other than `batch_size`."""
    shardings: Sequence[str] = SHARDINGS
    group_size = hp.shard_group_size or ranks.per_node
    if ranks.size <= ranks.per_node or ranks.size % group_size:  # no groups for hybrid ones
        shardings = ("full-shard", "grad-shard", "no-shard")
    if ranks.size == 1:
        shardings = ("full-shard", "grad-shard")  # no-shard is the same as the latter
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
