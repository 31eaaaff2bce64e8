"""What a run keeps in memory between its steps, and whether its ranks have it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from lm.any_model import new_model
from lm.config.hyperparameters import Hyperparameters
from lm.data.config import derive_global_batch_size
from lm.errors import ConfigError
from lm.fileio import REPOSITORY
from lm.launch.machine import host_memory
from lm.metrics.device import GIB
from lm.runtime.world import World
from lm.training import lora, parallelize
from lm.training.optim import Optimizer
from lm.transformers_config import TransformersConfig
from lm.units import format_bytes, format_count

USABLE = 0.9
"""fraction of memory that a plan may fill: the CUDA context, NCCL, fragmentation need the rest"""
FLOPS_PER_BYTE = 270
"""FLOPs of products in the time in which a GPU reads or writes a byte: of one H200, on which 700
TFLOP/s and 2.6 TB/s were measured"""
WORTH_A_CHANGE = 0.01
"""least part of a step's time that another `batch_size` has to save"""
WORTH_A_LINE = GIB // 4
"""bytes of state from which a run on a CPU says what it takes"""


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


@dataclass(frozen=True)
class State:
    """What a run has between steps: the bytes of all shards together."""

    trained: int
    frozen: int
    moments: int
    of_adapters: list[str]
    """lines on which weights adapters and `base_dtype` leave as they are"""

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
        model = lora.add_adapters(new_model(hp.model), hp.lora, dtype)
    optimizer = Optimizer(hp.optim, model, compute_dtype=dtype)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    moments = 0
    for state in optimizer.state_dict().values():
        if state.ndim > 0:  # not the counts of steps, which no rank shards
            moments += state.nbytes
    return State(trained, frozen, moments, lora.notes(hp.lora, model))


def count_micro_steps(hp: Hyperparameters, n_ranks: int) -> int:
    """Return how many micro-batches of `batch_size` a rank takes in a step."""
    dp_size = hp.parallel.dp_size(n_ranks)
    return derive_global_batch_size(hp.data, dp_size) // (hp.data.batch_size * dp_size)


def count_copied_bytes(hp: Hyperparameters, n_micro_steps: int) -> int:
    """Return what FSDP reads and writes on a rank besides products, collectives and optimizer.

    Of one rank with a 16-bit compute dtype, in bytes a parameter: a gather converts it (6) and
    copies it (4); the first gradient is converted to float32 (6), each further one is added (10),
    and their sum copied (8); a single one is copied at once (6). Of several ranks, each converts
    its shard only.
    """
    n_gathers = 1
    if hp.parallel.reshard_after_forward:
        n_gathers = 2 * n_micro_steps
    of_gradient = 6
    if n_micro_steps > 1:
        of_gradient = 6 + 10 * (n_micro_steps - 1) + 8
    return 10 * n_gathers * hp.model.n_parameters + of_gradient * hp.n_trained_parameters


def saves_time(hp: Hyperparameters, ranks: Ranks, n_fewer: int) -> bool:
    """Return whether a step of `n_fewer` micro-steps, and larger ones, saves time on a GPU."""
    if not ranks.on_gpu or ranks.dtype is None:
        return False
    n_micro_steps = count_micro_steps(hp, ranks.size)
    saved = count_copied_bytes(hp, n_micro_steps) - count_copied_bytes(hp, n_fewer)
    n_tokens = n_micro_steps * hp.data.batch_size * hp.parallel.own_length(hp.model.max_seq_len)
    flops = 6 * hp.model.n_active_parameters * n_tokens  # without attention
    return saved * FLOPS_PER_BYTE > WORTH_A_CHANGE * flops


def describe_copies(hp: Hyperparameters, n_micro_steps: int) -> str:
    """Return what a step of `n_micro_steps` reads and writes, as a clause."""
    n_bytes = count_copied_bytes(hp, n_micro_steps) / hp.model.n_parameters
    steps = format_count(n_micro_steps, "micro-step")
    return f"{steps} with {n_bytes:.0f} bytes a parameter of copies and sums"


@dataclass(frozen=True)
class MemoryCheck:
    """What a run's state takes of the memory that its ranks have."""

    hp: Hyperparameters
    ranks: Ranks
    state: int
    """bytes of a rank"""
    space: float
    """bytes for it: of the rank, or with `cpu_offload` on a GPU of its share of the node"""
    of_adapters: list[str]
    """those of the state"""

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

    def notes(self) -> list[str]:
        """Return what the run says before its first step."""
        notes: list[str] = []
        if self.ranks.on_gpu or self.state >= WORTH_A_LINE:
            notes.append(f"{self.describe()}; activations come on top")
        if saves_time(self.hp, self.ranks, 1):
            copies = describe_copies(self.hp, count_micro_steps(self.hp, self.ranks.size))
            notes.append(f"{copies}, {describe_copies(self.hp, 1)}: --dry-run says what fits")
        return notes + self.of_adapters

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

    def print_plan(self) -> None:
        """Print what a step needs by part. Takes seconds, in another process.

        Raises:
            ConfigError: it is more than a rank has.
        """
        if isinstance(self.hp.model, TransformersConfig):
            print(self.describe())  # even if the class takes no step on fake tensors
        ranks = asdict(self.ranks)
        ranks["dtype"] = str(self.ranks.dtype).removeprefix("torch.")
        hyperparameters = self.hp.to_flat() | self.hp.model.model_dump(mode="json")
        run = json.dumps({"hyperparameters": hyperparameters, "ranks": ranks})
        command = [sys.executable, "-m", "lm.plan.dry_run"]
        done = subprocess.run(command, input=run, capture_output=True, text=True, cwd=REPOSITORY)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            raise ConfigError(*done.stderr.splitlines())


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
    check = MemoryCheck(hp, ranks, state.total // shards, space, state.of_adapters)
    check.refuse_too_large(state)
    return check
