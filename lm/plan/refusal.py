"""Says before the first step what a run needs, and refuses what cannot fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.launch.machine import host_memory
from lm.metrics.device import GIB
from lm.plan.fit import USABLE, Ranks, count_state_bytes, format_memory, predict_memory
from lm.plan.memory import bound_activations
from lm.plan.nearest import find_nearest_settings
from lm.plan.trace import measure_activations
from lm.runtime.failures import is_out_of_memory, out_of_memory_error
from lm.runtime.world import World
from lm.units import format_bytes

WORTH_A_LINE = GIB // 4
"""bytes of state from which a run on a CPU says what it needs"""


@dataclass(frozen=True)
class MemoryCheck:
    """What a run needs of the memory that its ranks have."""

    hp: Hyperparameters
    ranks: Ranks
    host_share: float
    """bytes of a node's memory per rank"""
    summary: str | None = None
    """what the run needs, in a dry run by part; None = not worth a line"""

    @property
    def rank_name(self) -> str:
        return "GPU" if self.ranks.on_gpu else "rank"

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, moments and gradients, whatever the activations."""
        shards = self.ranks.count_shards(self.hp)
        return count_state_bytes(self.hp, self.ranks.dtype, shards)

    def refuse_too_large_state(self) -> None:
        """Raise ConfigError if the state alone exceeds the memory in which it is."""
        space = self.ranks.memory
        where = ""
        if self.hp.cpu_offload and self.ranks.on_gpu:
            space = self.host_share
            where = " of host memory"
        if self.state_bytes > space:
            state = format_bytes(self.state_bytes)
            what_fits = find_nearest_settings(self.hp, self.ranks, bound_activations)
            raise ConfigError(
                f"out of memory: parameters, moments and gradients take {state} of"
                f" {format_bytes(space)}{where} per {self.rank_name}; what fits: {what_fits}"
            )

    def summarize(self, *, by_part: bool) -> str | None:
        """Return what the run needs, or None on a CPU if its state is small; refuse too much."""
        self.refuse_too_large_state()
        if by_part:
            parts = format_memory(predict_memory(self.hp, self.ranks), self.hp, self.ranks)
            return "\n".join([f"{self.describe()}, at the peak of a step:", *parts])
        if not self.ranks.on_gpu and self.state_bytes < WORTH_A_LINE:
            return None
        return self.describe()

    def describe(self) -> str:
        """Return what the run needs, and if that is too much, the nearest settings that fit."""
        needed = predict_memory(self.hp, self.ranks)
        if self.ranks.can_hold(needed):
            return self._describe_need(needed.total)
        return self._describe_need(needed.total) + self._describe_what_fits(self.ranks)

    @contextmanager
    def explaining_failure(self, rank: int) -> Iterator[None]:
        """Say in an out-of-memory error of the block what the run needs, and what would fit."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            need = None
            with suppress(RuntimeError, MemoryError):  # where even that is too much
                need = self._describe_failure()
            raise out_of_memory_error(error, rank, need) from error

    def _describe_failure(self) -> str:
        """Return what the run needs: what was predicted to fit did not."""
        needed = predict_memory(self.hp, self.ranks)
        limit = replace(self.ranks, memory=min(self.ranks.memory, needed.total))
        return self._describe_need(needed.total) + self._describe_what_fits(limit)

    def _describe_need(self, n_bytes: int) -> str:
        needed = format_bytes(n_bytes)
        available = self.ranks.memory
        return f"needs about {needed} of {format_bytes(available)} per {self.rank_name}"

    def _describe_what_fits(self, limit: Ranks) -> str:
        usable = format_bytes(USABLE * limit.memory)
        what_fits = find_nearest_settings(self.hp, limit, measure_activations)
        return f"; what needs at most {usable}: {what_fits}"


def check_memory(
    hp: Hyperparameters, dtype: torch.dtype | None, world: World, dry_run: bool
) -> MemoryCheck:
    """Return what the run needs. Rank 0 computes for all, from the least memory of any rank.

    Raises:
        ConfigError: the state of the run alone exceeds the memory.
    """
    on_gpu = world.device.type == "cuda"
    per_node = world.launch.local_size
    node_memory = host_memory().total
    rank_memory = node_memory // per_node
    if on_gpu:
        rank_memory = torch.cuda.get_device_properties(world.device).total_memory
    everyone = world.all_gather_object((rank_memory, node_memory))
    rank_memory = min(of_rank for of_rank, _ in everyone)
    node_memory = min(of_node for _, of_node in everyone)
    # The ranks of a CPU are given shares of its memory, so that no more is asked of the node.
    host_limit = math.inf
    if on_gpu:
        host_limit = node_memory
    ranks = Ranks(dtype, world.device.type, world.size, per_node, rank_memory, host_limit)
    check = MemoryCheck(hp, ranks, node_memory // per_node)
    return replace(check, summary=world.on_rank0(check.summarize, by_part=dry_run))
