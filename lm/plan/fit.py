"""Whether a step of a run fits into the memory of its ranks and of their nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lm.config.hyperparameters import Hyperparameters
from lm.config.wording import as_argument
from lm.errors import ConfigError
from lm.memory import (
    USABLE,
    Ranks,
    count_micro_steps,
    count_state,
    describe_copies,
    saves_time,
)
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
    host_bytes,
    measure_step,
)
from lm.training import parallelize
from lm.units import format_bytes

LARGEST_BATCH_SIZE = 4096
"""at which the search for the largest one stops"""
_OFFLOADED = {"cpu_offload": True}
_SAVING: list[dict[str, Any]] = [
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"sharding": "full-shard", "shard_group_size": None},
    {"sync_each_micro_step": True},
    {"optim_dtype": "bfloat16", "beta2": 0.95},
    _OFFLOADED,
]
"""settings that can save memory"""


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
    def used(self) -> float:
        """Share of the usable memory of the device or of the host, whichever is larger."""
        of_host = self.host / self.ranks.host_memory
        return max(self.peak / self.ranks.memory, of_host) / USABLE

    @property
    def fits(self) -> bool:
        return self.used <= 1

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
    host = host_bytes(peaks)
    if hp.checkpoint.async_checkpoint:
        shards = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node).shard
        host += count_state(hp, ranks.dtype).copied // shards
    return Need(ranks, phase, peaks[phase], ranks.per_node * host)


def find_largest_batch_size(hp: Hyperparameters, given: Need) -> int:
    """Return the largest `batch_size` that fits without accumulation, up to a limit; 0 = none.

    Memory grows about linearly, so that a line through the last two sizes is at 1 close to it.

    Args:
        given: what a step of `hp` needs.
    """
    usable = USABLE * given.ranks.memory
    size = hp.data.batch_size
    used = given.used
    if hp.data.total_batch_size is not None:  # micro-steps add up gradients
        used = (given.peak - given.memory.get(GRADIENTS, 0)) / usable
    per_sequence = given.memory.get(ACTIVATIONS, 0) / usable / size
    fits, exceeds = 0, LARGEST_BATCH_SIZE + 1
    while fits + 1 < exceeds:
        n_more = math.floor((1 - used) / max(per_sequence, 1 / LARGEST_BATCH_SIZE))
        next_size = min(max(size + n_more, fits + 1), exceeds - 1)
        changed = hp.replace(batch_size=next_size, total_batch_size=None)
        need = given if changed == hp else measure(changed, given.ranks)
        if next_size != size:
            per_sequence = (need.used - used) / (next_size - size)
        size, used = next_size, need.used
        if need.fits:
            fits = size
        else:
            exceeds = size
    return fits


def advise_batch_size(hp: Hyperparameters, given: Need) -> str | None:
    """Return a line on the largest `batch_size` that fits and saves time; None = the run's does.

    Args:
        given: what a step of `hp` needs.
    """
    ranks = given.ranks
    if not given.fits or not saves_time(hp, ranks, 1):
        return None
    n_micro_steps = count_micro_steps(hp, ranks.size)
    line: str | None = None
    for n_fewer in reversed(range(1, n_micro_steps)):
        larger, rest = divmod(hp.data.batch_size * n_micro_steps, n_fewer)
        if rest:
            continue
        need = measure(hp.replace(batch_size=larger), ranks)
        if not need.fits:
            break
        if saves_time(hp, ranks, n_fewer):
            line = (
                f"batch_size={larger} fits too, with a peak of {format_bytes(need.peak)}, and is"
                f" expected to be faster: {describe_copies(hp, n_fewer)}, instead of"
                f" {describe_copies(hp, n_micro_steps)}"
            )
    return line


@dataclass(frozen=True)
class Proposal:
    """Other settings, and what a step needs with them."""

    settings: dict[str, Any]
    hp: Hyperparameters
    need: Need

    def describe(self) -> str:
        """Return a line, of settings that fit with the largest `batch_size`."""
        typed = " ".join(as_argument(key, value) for key, value in self.settings.items())
        result = "does not fit"
        if self.need.fits:
            result = f"fits; largest batch_size {find_largest_batch_size(self.hp, self.need):,}"
        return f"with {typed}: peak {format_bytes(self.need.peak)}, {result}"


def propose(
    given: Need, load: Callable[[Mapping[str, Any]], Hyperparameters]
) -> Iterator[Proposal]:
    """Yield settings that need less, each alone, and if none fits, together until they do.

    Those that save most come first. Host memory, which is slow, is used last.

    Args:
        given: what a step needs.
        load: returns the hyperparameters with other settings, or raises ConfigError.
    """
    alone: list[Proposal] = []
    for settings in _SAVING:
        with suppress(ConfigError):  # of settings that do not fit together with others
            hp = load(settings)
            proposal = Proposal(settings, hp, measure(hp, given.ranks))
            if proposal.need.used < given.used:
                alone.append(proposal)
    yield from alone
    if any(proposal.need.fits for proposal in alone if proposal.settings != _OFFLOADED):
        return
    alone.sort(key=lambda proposal: (proposal.settings == _OFFLOADED, proposal.need.used))
    together: dict[str, Any] = {}
    for proposal in alone:
        # Of two values of a key, that which saves more stays.
        more = together | proposal.settings | together
        if more == together:
            continue
        with suppress(ConfigError):
            hp = load(more)
            together = more
            need = measure(hp, given.ranks)
            if len(together) > len(proposal.settings):
                yield Proposal(together, hp, need)
            if need.fits:
                return
