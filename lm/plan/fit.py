"""Whether a run fits into the memory of its ranks and of their nodes."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.launch.machine import host_memory
from lm.metrics.device import GIB
from lm.plan.step import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HOST,
    MOMENTS,
    PARAMETERS,
    Memory,
    Ranks,
    device_bytes,
    find_peak,
    measure_step,
)
from lm.runtime.failures import is_out_of_memory, out_of_memory_error
from lm.runtime.world import World
from lm.training import lora, parallelize
from lm.training.optim import Optimizer
from lm.units import format_bytes
from model import Transformer

USABLE = 0.9
"""fraction of memory that a plan may fill: the CUDA context, NCCL, fragmentation need the rest"""
LARGEST_BATCH_SIZE = 4096
"""at which the search for the largest one stops"""
WORTH_A_LINE = GIB // 4
"""bytes of state from which a run on a CPU says what it takes"""


@dataclass(frozen=True)
class State:
    """Bytes of what a run has between steps, of all shards together."""

    trained: int
    frozen: int
    moments: int

    @property
    def copied(self) -> int:
        """Bytes that an asynchronous checkpoint copies to host memory."""
        return self.trained + self.moments

    @property
    def total(self) -> int:
        """Bytes of parameters, of moments and of the gradients of trained parameters."""
        return 2 * self.trained + self.frozen + self.moments


def count_state(hp: Hyperparameters, dtype: torch.dtype | None) -> State:
    """Return the bytes of the run's model and optimizer, from both on the meta device."""
    with torch.device("meta"):
        model = lora.add_adapters(Transformer(hp.model), hp.lora, dtype)
    optimizer = Optimizer(hp.optim, model.named_parameters(), compute_dtype=dtype)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    moments = 0
    for state in optimizer.state_dict().values():
        if state.ndim > 0:  # not the counts of steps, which no rank shards
            moments += state.nbytes
    return State(trained, frozen, moments)


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


@dataclass(frozen=True)
class MemoryCheck:
    """What a run's state takes of the memory that its ranks have."""

    hp: Hyperparameters
    ranks: Ranks
    state: int
    """bytes of a rank"""
    space: float
    """bytes for it: of the rank, or with `cpu_offload` on a GPU of its share of the node"""

    def describe(self) -> str:
        """Return the state and the space as a clause."""
        rank = "rank"
        if self.ranks.on_gpu:
            rank = "GPU"
        where = ""
        if self.hp.parallel.cpu_offload and self.ranks.on_gpu:
            where = " of host memory"
        return (
            f"parameters, moments and gradients take {format_bytes(self.state)} of"
            f" {format_bytes(self.space)}{where} per {rank}"
        )

    @property
    def note(self) -> str | None:
        """What the run may say before its first step; None = not worth a line."""
        if not self.ranks.on_gpu and self.state < WORTH_A_LINE:
            return None
        return f"{self.describe()}; activations come on top"

    def refuse_too_large(self, state: State) -> None:
        """Raise ConfigError if the `state` of all shards exceeds the space of this rank's."""
        if self.state <= self.space:
            return
        n_ranks = math.ceil(state.total / (USABLE * self.space))
        remedies = [f"sharding: full-shard over {n_ranks:,} or more ranks"]
        if self.ranks.on_gpu and not self.hp.parallel.cpu_offload:
            remedies.append("cpu_offload: true")
        if self.hp.checkpoint.init_from is not None and self.hp.lora.lora_rank is None:
            remedies.append("lora_rank")
        remedies.append("a smaller model")
        raise ConfigError(f"out of memory: {self.describe()}; use {', or '.join(remedies)}")

    def print_step(self) -> None:
        """Print what a step needs by part. Takes seconds, in another process.

        Raises:
            ConfigError: it is more than a rank has.
        """
        need = measure_elsewhere(self.hp, self.ranks)
        print("\n".join(need.describe()))
        if need.peak > self.ranks.memory:
            problem = f"out of memory: a step needs {format_bytes(need.peak)} per rank"
            remedy = "`python -m lm.plan` with the same arguments says what needs less"
            raise ConfigError(f"{problem} of {format_bytes(self.ranks.memory)}; {remedy}")

    @contextmanager
    def explaining_failure(self, rank: int) -> Iterator[None]:
        """Say in an out-of-memory error of the block what the state takes."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory_error(error, rank, self.describe()) from error


def check_memory(hp: Hyperparameters, dtype: torch.dtype | None, world: World) -> MemoryCheck:
    """Return what the run's state takes. Rank 0 compares, with the least memory of any rank.

    Raises:
        ConfigError: the state alone exceeds the memory.
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
    return world.on_rank0(_check_state, hp, ranks, node_memory // per_node)


def _check_state(hp: Hyperparameters, ranks: Ranks, host_share: int) -> MemoryCheck:
    shards = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node).shard
    state = count_state(hp, ranks.dtype)
    space = ranks.memory
    if hp.parallel.cpu_offload and ranks.on_gpu:
        space = host_share
    check = MemoryCheck(hp, ranks, state.total // shards, space)
    check.refuse_too_large(state)
    return check


def measure_elsewhere(hp: Hyperparameters, ranks: Ranks) -> Need:
    """Return what a step needs, measured in another process, as this one has a process group."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_need, args=(sender, hp, ranks), daemon=True)
    process.start()
    sender.close()
    need = receiver.recv()
    process.join()
    return need


def _send_need(sender: Connection, hp: Hyperparameters, ranks: Ranks) -> None:
    sender.send(measure(hp, ranks))
