"""Whether a run fits into memory, and the nearest settings that do."""

from __future__ import annotations

import os
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch

from lm import parallelize, precision
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError
from lm.plan import memory
from lm.runtime.world import World
from model import PRESETS, ModelConfig

GIB = 2**30
USABLE = 0.9
"""Fraction of memory that a plan may fill. The rest is for the CUDA context, NCCL and fragmentation."""
KEYS = ("batch_size", "activation_checkpointing", "sharding", "lora_rank", "n_layers", "d_model")


def need(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str, ranks: int, node: int) -> memory.Parts:
    """Return the peak bytes of one of `ranks` ranks by part, with `node` ranks per node.

    Raises:
        ConfigError: the ranks cannot be divided into shard groups, or the global batch into micro-batches.
    """
    shards = parallelize.mesh_dims(hp, ranks, node)["shard"]
    n_micro_batches = derive_global_batch_size(hp, ranks) // (hp.batch_size * ranks)
    return memory.peak(hp, dtype, device_type, shards, n_micro_batches)


def largest_batch_size(hp: Hyperparameters, dtype: torch.dtype | None, ranks: int, node: int, limit: float) -> int:
    """Return the largest `batch_size` (at most 4096) on GPUs without accumulation that needs at most `limit` bytes."""

    def exceeds(size: int) -> bool:
        changed = hp.model_copy(update={"batch_size": size, "total_batch_size": None})
        return sum(need(changed, dtype, "cuda", ranks, node).values()) > limit

    bound = next((size for size in (2**power for power in range(12)) if exceeds(size)), 4096)
    return bisect_left(range(1, bound + 1), True, key=exceeds)


def nearest(hp: Hyperparameters, dtype: torch.dtype | None, ranks: int, node: int, limit: float) -> list[str]:
    """Return at most three settings whose state, i.e. parameters, moments and gradients, fits into `limit` bytes."""

    def fits(n_ranks: int, **changes: Any) -> bool:
        changed = hp.model_copy(update=changes)
        shards = parallelize.mesh_dims(changed, n_ranks, min(node, n_ranks))["shard"]
        return state_bytes(changed, dtype, shards) <= limit

    def largest(key: str, values: range) -> list[str]:
        count = bisect_left(values, True, key=lambda value: not fits(ranks, **{key: value}))
        return [f"{key}={values[count - 1]}"] if count else []

    more = (ranks * 2**power for power in range(1, 15))
    presets = {name: ModelConfig.model_validate({"model": name}) for name in PRESETS}
    smaller = sorted(presets, key=lambda name: -presets[name].n_parameters)
    found = ["sharding=full-shard"] if ranks > 1 and fits(ranks, sharding="full-shard") else []
    found += [f"{n} ranks with sharding=full-shard" for n in more if fits(n, sharding="full-shard")][:1]
    if hp.init_from is None and hp.model is not None:
        found += [f"model={name}" for name in smaller if fits(ranks, **presets[name].model_dump())][:1]
    elif hp.init_from is None:
        found += largest("n_layers", range(1, hp.n_layers))
        step = 2 * hp.n_heads
        found += [] if hp.head_dim else largest("d_model", range(step, hp.d_model, step))
    return found[:3]


def state_bytes(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> int:
    """Return the bytes of parameters, moments and reduced gradients on one of `shards` ranks."""
    gradients = memory.MASTER * memory.count(hp, dtype).trained // shards
    return sum(memory.state(hp, dtype, shards).values()) + gradients


def device_bytes(world: World) -> int:
    """Return the memory of this rank's GPU, or this rank's share of the machine's or its container's."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup = Path("/sys/fs/cgroup/memory.max")
    text = cgroup.read_text().strip() if cgroup.exists() else "max"
    return min(total, int(text) if text.isdigit() else total) // world.launch.local_size


def check(hp: Hyperparameters, world: World) -> str | None:
    """Return a line about the memory that a run needs, None on a CPU if its state is below 0.25 GiB.

    Raises:
        ConfigError: its state alone exceeds the memory.
    """
    dtype, node = precision.compute_dtype(hp, world.device), world.launch.local_size
    available, what = device_bytes(world), "GPU" if world.device.type == "cuda" else "rank"
    shards = parallelize.mesh_dims(hp, world.size, node)["shard"]
    state = 0 if what == "GPU" and hp.cpu_offload else state_bytes(hp, dtype, shards)
    if state > available:
        near = "; ".join(nearest(hp, dtype, world.size, node, USABLE * available))
        raise ConfigError(
            f"out of memory: parameters, moments and gradients take {state / GIB:.1f} of {available / GIB:.1f} GiB per"
            f" {what}; what fits: {near}",
            keys=KEYS,
        )
    if what == "rank" and state < GIB // 4:
        return None
    needed = sum(need(hp, dtype, world.device.type, world.size, node).values())
    line = f"needs about {needed / GIB:.1f} of {available / GIB:.1f} GiB per {what}"
    world.memory_notes.append(line)
    return line
