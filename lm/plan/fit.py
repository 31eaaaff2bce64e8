"""Whether a run fits into memory, and the nearest settings that do."""

from __future__ import annotations

import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from lm import parallelize, precision
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError
from lm.launch.environment import host_memory
from lm.metrics.device import GIB
from lm.offload import RESIDENT
from lm.plan import memory
from lm.plan.trace import trace
from lm.runtime.world import World
from model import PRESETS, ModelConfig

USABLE = 0.9
"""Fraction of memory that a plan may fill. The rest is for the CUDA context, NCCL and fragmentation."""
KEYS = ("batch_size", "activation_checkpointing", "sharding", "lora_rank", "n_layers", "d_model")


@dataclass(frozen=True)
class Ranks:
    """Ranks that train a model, and the bytes of memory of each and of a node."""

    dtype: torch.dtype | None  # of compute; None = float32
    device_type: str
    size: int
    per_node: int
    memory: float
    host_memory: float = math.inf

    def shards(self, hp: Hyperparameters) -> int:
        """Return the size of a shard group; raise ConfigError if the ranks cannot be divided into such groups."""
        return parallelize.mesh_dims(hp, self.size, self.per_node)["shard"]

    def fit(self, needed: memory.Parts, host: int = 0) -> bool:
        """Return whether a rank has the bytes of `needed`, and `host` bytes of its node's memory."""
        host_fits = self.per_node * host <= USABLE * self.host_memory
        return host_fits and sum(needed.values()) <= USABLE * self.memory


def required_memory(hp: Hyperparameters, ranks: Ranks, activations: memory.Activations = trace) -> memory.Parts:
    """Return the peak bytes of a rank by part.

    Raises:
        ConfigError: the ranks cannot be divided into shard groups, or the global batch into micro-batches.
    """
    n_micro_batches = derive_global_batch_size(hp, ranks.size) // (hp.batch_size * ranks.size)
    pieces, on_gpu = activations(hp, ranks.dtype, ranks.device_type), ranks.device_type == "cuda"
    phases = memory.phases(hp, ranks.dtype, pieces, ranks.shards(hp), n_micro_batches, on_gpu)
    return max(phases, key=lambda parts: sum(parts.values()))


def required_host_memory(hp: Hyperparameters, ranks: Ranks, activations: memory.Activations = trace) -> int:
    """Return the bytes of host memory for a rank's copy in asynchronous checkpoints, and what a GPU moves there."""
    shards, n_bytes = ranks.shards(hp), 0
    if hp.async_checkpoint:
        trained = memory.MASTER * memory.count(hp, ranks.dtype, shards).trained // shards
        n_bytes += trained + memory.state(hp, ranks.dtype, shards)["moments"]
    if hp.cpu_offload and ranks.device_type == "cuda":
        n_bytes += state_bytes(hp, ranks.dtype, shards)
    if hp.activation_offload and ranks.device_type == "cuda":
        held = activations(hp, ranks.dtype, ranks.device_type).block.held
        n_bytes += max(hp.n_layers - RESIDENT, 0) * held
    return n_bytes


def largest_batch_size(hp: Hyperparameters, ranks: Ranks) -> int:
    """Return the largest `batch_size` (at most 4096) without accumulation that fits."""

    def exceeds(size: int) -> bool:
        changed = hp.model_copy(update={"batch_size": size, "total_batch_size": None})
        return not ranks.fit(required_memory(changed, ranks), required_host_memory(changed, ranks))

    bound = next((size for size in (2**power for power in range(12)) if exceeds(size)), 4096)
    return bisect_left(range(1, bound + 1), True, key=exceeds)


def nearest(hp: Hyperparameters, ranks: Ranks, activations: memory.Activations) -> str:
    """Return up to three changes of `hp` that each make it fit, the smallest first."""

    def fits(changes: dict[str, Any], size: int) -> bool:
        changed, others = hp.model_copy(update=changes), replace(ranks, size=size, per_node=min(ranks.per_node, size))
        with suppress(ConfigError):  # the ranks or the global batch cannot be divided
            state = 0 if changed.cpu_offload else state_bytes(changed, others.dtype, others.shards(changed))
            if state > USABLE * others.memory:
                return False  # without a trace
            return others.fit(
                required_memory(changed, others, activations), required_host_memory(changed, others, activations)
            )
        return False

    n, on_gpu = ranks.size, ranks.device_type == "cuda"
    full, offload = {"sharding": "full-shard"}, {"cpu_offload": True}
    least = full | {"activation_checkpointing": "full", "batch_size": 1}
    candidates: list[list[tuple[dict[str, Any], int]]] = [  # of each list, the first that fits counts
        [({"activation_checkpointing": mode}, n) for mode in ("selective", "full")],
        [({"batch_size": hp.batch_size >> power}, n) for power in range(1, hp.batch_size.bit_length())],
        [(full, n), (least, n)],
        [(c, n) for c in ({"activation_offload": True}, offload, least | offload)] if on_gpu else [],
        *([(changes, n << power) for power in range(1, 15)] for changes in (full, least)),
        [({"max_seq_len": hp.max_seq_len >> power}, n) for power in (1, 2, 3)],
    ]
    is_large = state_bytes(hp, ranks.dtype, ranks.shards(hp)) > ranks.memory / 2  # else activations are
    sizes: list[dict[str, Any]] = []
    if hp.init_from is not None:
        candidates.append([] if hp.float8 else [(changes | {"lora_rank": 16}, n) for changes in ({}, least)])
    elif hp.model is not None and is_large:
        keys = ModelConfig.model_fields.keys() - {"max_seq_len"}
        models = [ModelConfig.model_validate({"model": name}) for name in PRESETS]
        sizes = [{key: getattr(model, key) for key in keys} for model in models]
        sizes.sort(key=lambda size: -state_bytes(hp.model_copy(update=size), ranks.dtype, 1))
    elif is_large:
        depths = [int(hp.n_layers * 0.95**power) for power in range(1, 160)]
        candidates.append([({"n_layers": depth}, n) for depth in depths if depth])
        step = 2 * hp.n_heads
        widths = [int(hp.d_model * 0.85**power) // step * step for power in range(1, 40)]
        sizes = [{"d_model": width} for width in widths if width and not hp.head_dim]
    fewer = {"n_layers": -(-hp.n_layers // 4)}
    candidates += [
        [(others | size, m) for size in sizes] for others, m in (({}, n), (fewer, n), (full, 8 * n), (full, 64 * n))
    ]
    found: list[list[str]] = []
    for alternatives in candidates:
        for changes, size in alternatives:
            shown = {"model": changes["model"]} if "model" in changes else changes
            settings = [*[f"{size} ranks"] * (size > n), *(f"{k}={v}" for k, v in shown.items() if getattr(hp, k) != v)]
            if settings and len(found) < 3 and fits(changes, size):
                if not any(set(others) <= set(settings) for others in found):
                    found.append(settings)
                break
    return "; ".join(map(" ".join, found)) or "a smaller model"


def state_bytes(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> int:
    """Return the bytes of parameters, moments and reduced gradients on one of `shards` ranks."""
    gradients = memory.MASTER * memory.count(hp, dtype, shards).trained // shards
    return sum(memory.state(hp, dtype, shards).values()) + gradients


def table(parts: memory.Parts) -> list[str]:
    """Return a line for each part."""
    return [f"{part:<14}{n_bytes / GIB:8.2f} GiB" for part, n_bytes in parts.items()]


def check(hp: Hyperparameters, world: World, dry_run: bool) -> str | None:
    """Return what the run needs, in a dry run by part; else None on a CPU if its state is below 0.25 GiB.

    Raises:
        ConfigError: its state alone exceeds the memory.
    """
    on_gpu, per_node = world.device.type == "cuda", world.launch.local_size
    node = host_memory()[0]
    own = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else node // per_node
    available, node = map(min, zip(*world.all_gather_object((own, node)), strict=True))
    dtype, what = world.all_or_none(lambda: precision.compute_dtype(hp, world.device)), "GPU" if on_gpu else "rank"
    ranks = Ranks(dtype, world.device.type, world.size, per_node, available, node if on_gpu else math.inf)

    def line(ran_out: bool) -> str:
        needed = required_memory(hp, ranks)
        n_bytes = sum(needed.values())
        limit = replace(ranks, memory=min(available, n_bytes) if ran_out else available)
        text = f"needs about {n_bytes / GIB:.1f} of {available / GIB:.1f} GiB per {what}"
        if limit.fit(needed):
            return text
        return f"{text}; what needs at most {USABLE * limit.memory / GIB:.1f} GiB: {nearest(hp, limit, trace)}"

    def summarize() -> str | None:
        state, offloads = state_bytes(hp, dtype, ranks.shards(hp)), hp.cpu_offload and on_gpu
        if state > (node // per_node if offloads else available):
            space = f"{node / per_node / GIB:.1f} GiB of host memory" if offloads else f"{available / GIB:.1f} GiB"
            raise ConfigError(
                f"out of memory: parameters, moments and gradients take {state / GIB:.1f} of {space} per {what};"
                f" what fits: {nearest(hp, ranks, memory.bound)}",
                keys=KEYS,
            )
        if not (on_gpu or dry_run) and state < GIB // 4:
            return None
        return "\n".join([line(False), *(table(required_memory(hp, ranks)) if dry_run else [])])

    world.memory_notes.append(lambda: line(True))
    return world.on_rank0(summarize)
