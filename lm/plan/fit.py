"""Whether a run fits into the memory of its ranks and of their nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch

from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.plan.memory import (
    FLOAT32_BYTES,
    FindActivations,
    Memory,
    StepMemory,
    compute_state,
    count_units,
)
from lm.plan.trace import measure_activations
from lm.training import parallelize
from lm.training.offload import RESIDENT
from lm.units import format_bytes

USABLE = 0.9
"""fraction of memory that a plan may fill: the CUDA context, NCCL, fragmentation need the rest"""
LARGEST_BATCH_SIZE = 4096
"""at which the search for the largest one stops"""


@dataclass(frozen=True)
class Ranks:
    """Ranks that train a model, and the bytes of memory of each and of a node."""

    dtype: torch.dtype | None
    """of compute; None = float32"""
    device_type: str
    size: int
    per_node: int
    memory: float
    """bytes of a rank"""
    host_memory: float = math.inf
    """bytes of a node"""

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    def count_shards(self, hp: Hyperparameters) -> int:
        """Return the size of a shard group; raise ConfigError if the ranks have no such groups."""
        return parallelize.mesh_shape(hp, self.size, self.per_node).shard

    def can_hold(self, needed: Memory, host: int = 0) -> bool:
        """Return whether each rank has `needed`, and `host` bytes of its node's memory."""
        host_fits = self.per_node * host <= USABLE * self.host_memory
        return host_fits and needed.total <= USABLE * self.memory


def count_micro_batches(hp: Hyperparameters, n_ranks: int) -> int:
    """Return the micro-batches of a rank in a step; raise ConfigError for an uneven division."""
    return derive_global_batch_size(hp, n_ranks) // (hp.batch_size * n_ranks)


def predict_memory(
    hp: Hyperparameters, ranks: Ranks, find_activations: FindActivations = measure_activations
) -> Memory:
    """Return the bytes of a rank at the peak of a step.

    Raises:
        ConfigError: the ranks cannot be divided into shard groups, or the global batch into
            micro-batches.
    """
    shards = ranks.count_shards(hp)
    step = StepMemory(
        hp=hp,
        dtype=ranks.dtype,
        activations=find_activations(hp, ranks.dtype, ranks.device_type),
        shards=shards,
        replicas=ranks.size // shards,
        n_micro_batches=count_micro_batches(hp, ranks.size),
        on_gpu=ranks.on_gpu,
    )
    return step.find_peak()


def predict_host_memory(
    hp: Hyperparameters, ranks: Ranks, find_activations: FindActivations = measure_activations
) -> int:
    """Return a rank's bytes of host memory: for asynchronous checkpoints, and what is offloaded."""
    shards = ranks.count_shards(hp)
    n_bytes = 0
    if hp.async_checkpoint:  # a copy of the trained parameters and of the moments
        n_trained = count_units(hp, ranks.dtype, shards).total.trained
        n_bytes += FLOAT32_BYTES * n_trained // shards
        n_bytes += compute_state(hp, ranks.dtype, shards).moments
    if hp.cpu_offload and ranks.on_gpu:
        n_bytes += count_state_bytes(hp, ranks.dtype, shards)
    if hp.activation_offload and ranks.on_gpu:
        n_offloaded = max(hp.n_layers - RESIDENT, 0)
        block = find_activations(hp, ranks.dtype, ranks.device_type).block
        n_bytes += n_offloaded * block.held
    return n_bytes


def count_state_bytes(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> int:
    """Return the bytes of parameters, moments and reduced gradients on one of `shards` ranks."""
    n_trained = count_units(hp, dtype, shards).total.trained
    gradients = FLOAT32_BYTES * n_trained // shards
    return compute_state(hp, dtype, shards).total + gradients


def find_largest_batch_size(hp: Hyperparameters, ranks: Ranks) -> int:
    """Return the largest `batch_size` that fits without accumulation, up to a limit."""

    def exceeds(batch_size: int) -> bool:
        changed = hp.model_copy(update={"batch_size": batch_size, "total_batch_size": None})
        needed = predict_memory(changed, ranks)
        return not ranks.can_hold(needed, predict_host_memory(changed, ranks))

    too_large = 1
    while too_large < LARGEST_BATCH_SIZE and not exceeds(too_large):
        too_large *= 2
    sizes = range(1, too_large + 1)
    return bisect_left(sizes, True, key=exceeds)  # how many precede the first that exceeds


def format_memory(memory: Memory, hp: Hyperparameters, ranks: Ranks) -> list[str]:
    """Return a line for each part of `memory`, and what it is."""
    gathered = "parameters of the layers in use, all-gathered"
    if hp.cpu_offload and ranks.on_gpu:
        state = moments = gradients = "in host memory"
        if memory.gradients:
            gradients = _describe_gradients(memory, hp, ranks)
    else:
        state = "of this rank"
        moments = f"of AdamW, two per trained parameter, {hp.optim_dtype}"
        if hp.optimizer == "muon":
            moments = f"two of AdamW's parameters, one of Muon's, {hp.optim_dtype}"
        gradients = _describe_gradients(memory, hp, ranks)
    return [
        format_part("parameters", memory.parameters, state),
        format_part("moments", memory.moments, moments),
        format_part("gradients", memory.gradients, gradients),
        format_part("gathered", memory.gathered, gathered),
        format_part("activations", memory.activations, "saved for backward, and temporary"),
    ]


def _describe_gradients(memory: Memory, hp: Hyperparameters, ranks: Ranks) -> str:
    if memory.gradients == 0:
        return "none yet: the peak is before backward makes them"
    n_micro_batches = count_micro_batches(hp, ranks.size)
    if n_micro_batches == 1 or hp.sync_each_micro_step:
        return "that exist at the peak"
    added_up = f"of all layers, added up over {n_micro_batches} micro-steps"
    if ranks.count_shards(hp) > 1:
        return f"{added_up}, not sharded until the last"
    return added_up


def format_part(name: str, n_bytes: float, what: str) -> str:
    """Return a line with a part of memory."""
    return f"{name:<12}{format_bytes(n_bytes):>14}  {what}"
