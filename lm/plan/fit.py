"""Whether a run fits into memory, and the nearest settings that do."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from typing import Any

import torch

from lm import parallelize, precision
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError
from lm.launch.environment import host_memory
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


def largest_batch_size(
    hp: Hyperparameters, dtype: torch.dtype | None, device_type: str, ranks: int, node: int, limit: float
) -> int:
    """Return the largest `batch_size` (at most 4096) without accumulation that needs at most `limit` bytes."""

    def exceeds(size: int) -> bool:
        changed = hp.model_copy(update={"batch_size": size, "total_batch_size": None})
        return sum(need(changed, dtype, device_type, ranks, node).values()) > limit

    bound = next((size for size in (2**power for power in range(12)) if exceeds(size)), 4096)
    return bisect_left(range(1, bound + 1), True, key=exceeds)


def nearest(
    hp: Hyperparameters, dtype: torch.dtype | None, device_type: str, ranks: int, node: int, limit: float
) -> str:
    """Return the three changes of `hp`, the smallest first, that each make a rank need at most `limit` bytes."""

    def fits(changes: dict[str, Any], ranks: int) -> bool:
        changed, per_node = hp.model_copy(update=changes), min(node, ranks)
        with suppress(ConfigError):  # the ranks or the global batch cannot be divided
            run = dtype, device_type, ranks, per_node
            return state_on_device(changed, *run) <= limit and sum(need(changed, *run).values()) <= limit
        return False

    full, offload = {"sharding": "full-shard"}, {"cpu_offload": True}
    least = full | {"activation_checkpointing": "full", "batch_size": 1}
    kinds: list[list[tuple[dict[str, Any], int]]] = [  # of each, the first that fits counts
        [({"activation_checkpointing": mode}, ranks) for mode in ("selective", "full")],
        [({"batch_size": hp.batch_size >> power}, ranks) for power in range(1, hp.batch_size.bit_length())],
        [(full, ranks), (least, ranks)],
        [(c, ranks) for c in ({"activation_offload": True}, offload, least | offload)] if device_type == "cuda" else [],
        [(changes, ranks << power) for changes in (full, least) for power in range(1, 15)],
        [({"max_seq_len": hp.max_seq_len >> power}, ranks) for power in (1, 2, 3)],
    ]
    is_large = state_on_device(hp, dtype, device_type, ranks, node) > limit / 2  # else activations are
    if hp.init_from is not None:
        kinds.append([] if hp.float8 else [(changes | {"lora_rank": 16}, ranks) for changes in ({}, least)])
    elif hp.model is not None and is_large:
        presets = [ModelConfig.model_validate({"model": name}) for name in PRESETS]
        presets.sort(key=lambda preset: -preset.n_parameters)
        keys = ModelConfig.model_fields.keys() - {"max_seq_len"}
        kinds.append([({key: getattr(preset, key) for key in keys}, ranks) for preset in presets])
    elif is_large:
        step = 2 * hp.n_heads
        widths = [int(hp.d_model * 0.85**power) // step * step for power in range(1, 40)]
        kinds.append([({"n_layers": n}, ranks) for n in range(hp.n_layers - 1, 0, -1)])
        for others, n in (({}, ranks), ({"n_layers": -(-hp.n_layers // 4)}, ranks), (full, 8 * ranks)):
            kinds.append([(others | {"d_model": width}, n) for width in widths if width and not hp.head_dim])
    found: list[list[str]] = []
    for kind in kinds:
        for changes, n in kind:
            shown = {"model": changes["model"]} if "model" in changes else changes
            words = [*[f"{n} ranks"] * (n > ranks), *(f"{k}={v}" for k, v in shown.items() if getattr(hp, k) != v)]
            is_new = words and not any(set(others) <= set(words) for others in found)
            if is_new and len(found) < 3 and fits(changes, n):
                found.append(words)
                break
    return "; ".join(map(" ".join, found)) or "a smaller model"


def state_bytes(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> int:
    """Return the bytes of parameters, moments and reduced gradients on one of `shards` ranks."""
    gradients = memory.MASTER * memory.count(hp, dtype).trained // shards
    return sum(memory.state(hp, dtype, shards).values()) + gradients


def state_on_device(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str, ranks: int, node: int) -> int:
    """Return the bytes of `state_bytes` that are not offloaded to host memory; raise ConfigError as `need`."""
    shards = parallelize.mesh_dims(hp, ranks, node)["shard"]
    return 0 if hp.cpu_offload and device_type == "cuda" else state_bytes(hp, dtype, shards)


def caveats(hp: Hyperparameters) -> list[str]:
    """Return a line about what of `hp` is not modelled, if anything."""
    return [f"float8: {hp.float8} is not modelled: memory and time are those of bfloat16"] if hp.float8 else []


def table(parts: memory.Parts) -> list[str]:
    """Return a line for each part."""
    return [f"{part:<14}{n_bytes / GIB:8.2f} GiB" for part, n_bytes in parts.items()]


def check(hp: Hyperparameters, world: World, dry_run: bool) -> str | None:
    """Return what the run needs, in a dry run by part; else None on a CPU if its state is below 0.25 GiB.

    Raises:
        ConfigError: its state alone exceeds the memory.
    """
    node, on_gpu = world.launch.local_size, world.device.type == "cuda"
    own = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else host_memory()[0] // node
    available, what = min(world.all_gather_object(own)), "GPU" if on_gpu else "rank"
    dtype = world.all_or_none(lambda: precision.compute_dtype(hp, world.device))
    run = dtype, world.device.type, world.size, node

    def line(ran_out: bool) -> str:
        needed = sum(need(hp, *run).values())
        limit = USABLE * (min(available, needed) if ran_out else available)
        text = f"needs about {needed / GIB:.1f} of {available / GIB:.1f} GiB per {what}"
        if needed <= limit:
            return text
        return f"{text}; what needs at most {limit / GIB:.1f} GiB: {nearest(hp, *run, limit)}"

    def find() -> str | None:
        state = state_on_device(hp, *run)
        if state > available:
            near = nearest(hp.model_copy(update={"compile": False}), *run, USABLE * available)  # fast to trace
            raise ConfigError(
                f"out of memory: parameters, moments and gradients take {state / GIB:.1f} of {available / GIB:.1f} GiB"
                f" per {what}; what fits: {near}",
                keys=KEYS,
            )
        if not (on_gpu or dry_run) and state < GIB // 4:
            return None
        return "\n".join([line(False), *caveats(hp), *(table(need(hp, *run)) if dry_run else [])])

    world.memory_notes.append(lambda: line(True))
    return world.on_rank0(find)
