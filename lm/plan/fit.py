"""Whether a run fits into the memory of its ranks and of their nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch

from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.metrics.device import GIB
from lm.plan.memory import MASTER, Activations, Memory, Step, count_units, state
from lm.plan.trace import trace
from lm.training import parallelize
from lm.training.offload import RESIDENT

USABLE = 0.9
"""fraction of memory that a plan may fill; the CUDA context, NCCL and fragmentation need the rest"""
LARGEST_BATCH_SIZE = 4096
"""at which the search for the largest one stops"""


@dataclass(frozen=True)
class Ranks:
    """Ranks that train a model, and the bytes of memory of each and of a node."""

    dtype: torch.dtype | None  # of compute; None = float32
    device_type: str
    size: int
    per_node: int
    memory: float
    host_memory: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    def shards(self, hp: Hyperparameters) -> int:
        """Return the size of a shard group; raise ConfigError if ranks cannot be divided into such."""
        return parallelize.mesh_shape(hp, self.size, self.per_node).shard

    def fit(self, needed: Memory, host: int = 0) -> bool:
        """Return whether a rank has `needed`, and `host` bytes of its node's memory."""
        host_fits = self.per_node * host <= USABLE * self.host_memory
        return host_fits and needed.total <= USABLE * self.memory


def required_memory(hp: Hyperparameters, ranks: Ranks, activations: Activations = trace) -> Memory:
    """Return the bytes of a rank at the peak of a step.

    Raises:
        ConfigError: the ranks cannot be divided into shard groups, or the global batch into
        micro-batches.
    """
    n_micro_batches = derive_global_batch_size(hp, ranks.size) // (hp.batch_size * ranks.size)
    measured = activations(hp, ranks.dtype, ranks.device_type)
    return Step(hp, ranks.dtype, measured, ranks.shards(hp), n_micro_batches, ranks.on_gpu).peak


def required_host_memory(
    hp: Hyperparameters, ranks: Ranks, activations: Activations = trace
) -> int:
    """Return a rank's bytes of host memory: its copy for asynchronous checkpoints, and what is offloaded."""
    shards = ranks.shards(hp)
    n_bytes = 0
    if hp.async_checkpoint:
        trained = count_units(hp, ranks.dtype, shards).total.trained
        n_bytes += MASTER * trained // shards + state(hp, ranks.dtype, shards).moments
    if hp.cpu_offload and ranks.on_gpu:
        n_bytes += state_bytes(hp, ranks.dtype, shards)
    if hp.activation_offload and ranks.on_gpu:
        n_offloaded = max(hp.n_layers - RESIDENT, 0)
        n_bytes += n_offloaded * activations(hp, ranks.dtype, ranks.device_type).block.held
    return n_bytes


def state_bytes(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> int:
    """Return the bytes of parameters, moments and reduced gradients on one of `shards` ranks."""
    gradients = MASTER * count_units(hp, dtype, shards).total.trained // shards
    return state(hp, dtype, shards).total + gradients


def largest_batch_size(hp: Hyperparameters, ranks: Ranks) -> int:
    """Return the largest `batch_size` that fits without accumulation, up to a limit."""

    def exceeds(size: int) -> bool:
        changed = hp.model_copy(update={"batch_size": size, "total_batch_size": None})
        return not ranks.fit(required_memory(changed, ranks), required_host_memory(changed, ranks))

    too_large = 1
    while too_large < LARGEST_BATCH_SIZE and not exceeds(too_large):
        too_large *= 2
    return bisect_left(range(1, too_large + 1), True, key=exceeds)


def table(memory: Memory) -> list[str]:
    """Return a line for each part of `memory`."""
    parts = {
        "parameters": memory.parameters,
        "moments": memory.moments,
        "gradients": memory.gradients,
        "gathered": memory.gathered,
        "activations": memory.activations,
    }
    return [table_line(part, n_bytes) for part, n_bytes in parts.items()]


def table_line(name: str, n_bytes: float) -> str:
    """Return a line of a table in GiB."""
    return f"{name:<14}{n_bytes / GIB:8.2f} GiB"
