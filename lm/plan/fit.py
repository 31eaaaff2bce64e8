"""Whether a step of a run fits into the memory of its ranks and of their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lm.config import Hyperparameters
from lm.memory import USABLE, Ranks, count_state
from lm.plan.step import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HOST,
    MOMENTS,
    PARAMETERS,
    Memory,
    device_bytes,
    find_peak,
    measure_step,
)
from lm.training import parallelize
from lm.units import format_bytes

LARGEST_BATCH_SIZE = 4096
"""at which the search for the largest one stops"""


@dataclass(frozen=True)
class Need:
    """What a step needs, and what a rank and a node have."""

    ranks: Ranks
    phase: str
    """of the step, in which the peak is"""
    memory: Memory
    """of the device at the peak"""
    host: int
    """bytes of a node: what is offloaded, and the copy of an asynchronous checkpoint"""

    @property
    def peak(self) -> int:
        return device_bytes(self.memory)

    @property
    def fits(self) -> bool:
        host_fits = self.host <= USABLE * self.ranks.host_memory
        return host_fits and self.peak <= USABLE * self.ranks.memory

    def describe(self) -> list[str]:
        """Return a line for each part, and what it is."""
        lines = [f"memory of a rank at the peak of a step, in {self.phase}:"]
        for part, what in _PARTS.items():
            lines.append(_format_part(part, self.memory.get(part, 0), what))
        available = f"of {format_bytes(self.ranks.memory)}"
        lines.append(_format_part("peak", self.peak, available))
        host = "per node: what is offloaded, and asynchronous checkpoints"
        if not math.isinf(self.ranks.host_memory):
            host += f", of {format_bytes(self.ranks.host_memory)}"
        lines.append(_format_part(HOST, self.host, host))
        return lines


_PARTS = {
    PARAMETERS: "of this rank",
    MOMENTS: "of the optimizer",
    GRADIENTS: "reduced ones, those in reduction, and those that micro-steps add up",
    GATHERED: "parameters of the layers in use, all-gathered",
    ACTIVATIONS: "saved for backward, and temporary",
}


def _format_part(name: str, n_bytes: float, what: str) -> str:
    return f"{name:<12}{format_bytes(n_bytes):>14}  {what}"


def measure(hp: Hyperparameters, ranks: Ranks) -> Need:
    """Return what a step needs."""
    peaks = measure_step(hp, ranks)
    phase = find_peak(peaks)
    host = max(memory.get(HOST, 0) for memory in peaks.values())
    if hp.checkpoint.async_checkpoint:
        shards = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node).shard
        host += count_state(hp, ranks.dtype).copied // shards
    return Need(ranks, phase, peaks[phase], ranks.per_node * host)


def find_largest_batch_size(hp: Hyperparameters, ranks: Ranks) -> int:
    """Return the largest `batch_size` that fits without accumulation, up to a limit; 0 = none.

    Memory grows about linearly, so that a line through a size that fits and one that does not is
    close to the border between them.
    """

    def need_of(batch_size: int) -> Need:
        changed = hp.replace(batch_size=batch_size, total_batch_size=None)
        return measure(changed, ranks)

    smallest = need_of(1)
    if not smallest.fits:
        return 0
    limit = USABLE * ranks.memory
    fits, bytes_that_fit = 1, smallest.peak
    size = 2
    exceeds, bytes_that_exceed = LARGEST_BATCH_SIZE + 1, math.inf
    while fits + 1 < exceeds:
        need = need_of(size)
        per_sequence = (need.peak - bytes_that_fit) / (size - fits)
        if need.fits:
            fits, bytes_that_fit = size, need.peak
        else:
            exceeds, bytes_that_exceed = size, need.peak
        if not math.isinf(bytes_that_exceed):
            per_sequence = (bytes_that_exceed - bytes_that_fit) / (exceeds - fits)
        size = fits + math.floor((limit - bytes_that_fit) / max(per_sequence, 1))
        size = min(max(size, fits + 1), exceeds - 1)
    return fits


def list_remedies(hp: Hyperparameters, ranks: Ranks) -> list[str]:
    """Return lines on settings that need less, each alone, and what they need."""
    n_micro_batches = (hp.data.total_batch_size or 0) // (hp.data.batch_size * ranks.size)
    candidates: dict[str, dict[str, Any]] = {
        "activation_checkpointing=full": {"activation_checkpointing": "full"},
        "sharding=full-shard": {"sharding": "full-shard"},
        "cpu_offload=true": {"cpu_offload": True},
    }
    if n_micro_batches > 1:
        candidates["sync_each_micro_step=true"] = {"sync_each_micro_step": True}
    lines: list[str] = []
    for setting, changes in candidates.items():
        changed = hp.replace(**changes)
        if changed == hp:
            continue
        need = measure(changed, ranks)
        fits = "fits" if need.fits else "does not fit"
        lines.append(f"with {setting}: peak {format_bytes(need.peak)}, {fits}")
    return lines
