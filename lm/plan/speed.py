"""Time of a training step: FLOPs, memory traffic and collectives over what GPUs and links achieve.

The fractions of a GPU's peaks are assumptions: nothing was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lm.config import Hyperparameters
from lm.metrics.device import peak_flops_by_name
from lm.plan.memory import count_units, float8_layers, itemsize
from lm.plan.trace import trace
from lm.training.offload import RESIDENT

GB = 1e9
MATMUL, ATTENTION, COPY, LINK = 0.65, 0.45, 0.85, 0.8
"""fractions of the peak that matrix products, attention, other operators and collectives achieve"""
TRAFFIC = 3
"""bytes moved per byte that a block saves: written once, read twice"""
NETWORK_LATENCY = 6e-6
"""seconds of a hop of a ring to another node"""
NODE_LATENCY = 2e-6
"""seconds of a hop of a ring in the node"""
FLOAT8 = 0.5
"""fraction of the peak of float8, twice that of 16 bits, that products achieve with conversions"""
HOST_LINK, HOST_MEMORY = 25.0, 20.0
"""GB/s between a GPU and its host, and of host memory per GPU"""


@dataclass(frozen=True)
class Card:
    """A GPU: memory (GiB), and bandwidths (GB/s, one direction)."""

    name: str
    gib: float
    bandwidth: float
    link: float  # to another GPU of the node
    has_float8: bool = True

    @property
    def flops(self) -> float:
        """Dense 16-bit peak (FLOP/s)."""
        peak = peak_flops_by_name(self.name)
        assert peak is not None
        return peak


CARDS = {
    "h100": Card("H100", 79.2, 3350, 450),
    "h200": Card("H200", 139.8, 4800, 450),
    "b200": Card("B200", 178.4, 7700, 900),
    "a100-80": Card("A100", 79.2, 2039, 300, has_float8=False),
    "a100-40": Card("A100", 39.4, 1555, 300, has_float8=False),
    "l40s": Card("L40S", 44.4, 864, 25),
    "l4": Card("L4", 22.0, 300, 25),
    "4090": Card("RTX 4090", 23.5, 1008, 25),
    "5090": Card("RTX 5090", 31.3, 1792, 50),
}
"""By the name on the command line, from the vendors' data sheets; memory as PyTorch reports it."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by part."""

    compute: float
    """matrix products and attention"""
    memory: float
    """other operators, which memory bandwidth bounds"""
    optimizer: float
    """AdamW, and the copies of FSDP"""
    exposed_communication: float
    offload: float

    @property
    def total(self) -> float:
        return (
            self.compute + self.memory + self.optimizer + self.exposed_communication + self.offload
        )


@dataclass(frozen=True)
class Links:
    """Bytes that a GPU sends in a step, in its node and to other nodes."""

    node: float
    network: float


@dataclass(frozen=True)
class Layout:
    """Ranks of a mesh; the ranks of a shard group are neighbors."""

    shards: int
    replicas: int
    per_node: int
    """GPUs per node"""
    network: float
    """GB/s per GPU to other nodes"""


@dataclass(frozen=True)
class StepTime:
    """Time of a step on one GPU."""

    seconds: Seconds
    flops: float
    """of a GPU, without recomputation"""
    links: Links


def step_time(
    hp: Hyperparameters, dtype: torch.dtype | None, card: Card, layout: Layout, n_micro_batches: int
) -> StepTime:
    """Predict a step of `n_micro_batches` micro-steps."""
    model_flops = hp.training_flops_per_token * hp.batch_size * hp.max_seq_len
    compute = n_micro_batches * _compute_seconds(hp, dtype, card, model_flops)
    memory = n_micro_batches * _memory_seconds(hp, dtype, card)

    # How often all units are gathered and reduced in a step.
    n_gathers = 1
    if hp.reshard_after_forward:
        n_gathers = 2 * n_micro_batches
    n_reductions = 1
    if hp.sync_each_micro_step:
        n_reductions = n_micro_batches

    communication, links = _communication(hp, dtype, card, layout, n_gathers, n_reductions)
    # FSDP overlaps a unit's collectives with the compute of the unit before: the first and the last
    # are exposed.
    n_collectives = _n_units(hp) * (n_gathers + n_reductions)
    exposed = max(communication - compute - memory, 0.0) + 2 * communication / n_collectives

    seconds = Seconds(
        compute=compute,
        memory=memory,
        optimizer=_optimizer_seconds(hp, dtype, card, layout.shards, n_gathers, n_reductions),
        exposed_communication=exposed,
        offload=_offload_seconds(
            hp, dtype, layout.shards, n_gathers, n_reductions, n_micro_batches, compute + memory
        ),
    )
    return StepTime(seconds, model_flops * n_micro_batches, links)


def _n_units(hp: Hyperparameters) -> int:
    return hp.n_layers + 2  # the embedding and the head


def _compute_seconds(
    hp: Hyperparameters, dtype: torch.dtype | None, card: Card, model_flops: float
) -> float:
    """Return the seconds of a micro-step's matrix products and attention."""
    tokens = hp.batch_size * hp.max_seq_len
    # 4 FLOPs per attended position and channel in forward (scores, weighted values), 8 in backward.
    window = min(hp.sliding_window or hp.max_seq_len, hp.max_seq_len)
    attended = window - window**2 / (2 * hp.max_seq_len)  # positions per token, on average
    attention = 12 * hp.n_layers * hp.n_heads * hp.head_width * attended * tokens
    # 2 FLOPs per weight and token in forward, 4 in backward.
    head = 6 * hp.vocab_size * hp.d_model * tokens
    in_float8 = 6 * hp.n_layers * tokens * sum(out * inner for out, inner in float8_layers(hp))
    block_products = model_flops - head - attention - in_float8
    # Full recomputation adds a second forward pass to one forward pass and a backward pass of twice
    # its FLOPs.
    repeated = 4 / 3 if hp.activation_checkpointing == "full" else 1.0
    at_peak = (head + repeated * block_products) / MATMUL
    at_peak += repeated * attention / ATTENTION
    at_peak += repeated * in_float8 / (2 * FLOAT8)
    peak = card.flops
    if dtype is None:
        peak /= 2  # TF32
    return at_peak / peak


def _memory_seconds(hp: Hyperparameters, dtype: torch.dtype | None, card: Card) -> float:
    """Return the seconds of a micro-step's memory-bound operators."""
    # Their inputs and outputs are about what blocks save without recomputation, and the logits.
    # Full recomputation repeats the forward pass, a third; selective all but products and attention
    # of it.
    repeated = {"none": 1.0, "selective": 1.2, "full": 1.33}[hp.activation_checkpointing]
    without_recomputation = hp.model_copy(update={"activation_checkpointing": "none"})
    saved = trace(without_recomputation, dtype, "cuda").block.held
    logits = hp.batch_size * hp.max_seq_len * hp.vocab_size * itemsize(dtype)
    n_bytes = TRAFFIC * (hp.n_layers * repeated * saved + logits)
    return n_bytes / (card.bandwidth * GB * COPY)


def _optimizer_seconds(
    hp: Hyperparameters,
    dtype: torch.dtype | None,
    card: Card,
    shards: int,
    n_gathers: int,
    n_reductions: int,
) -> float:
    """Return the seconds of AdamW and of FSDP's copies, from the bytes that they read and write."""
    total = count_units(hp, dtype, shards).total
    # To gather: reads the float32 shard, writes it in the compute dtype; writes the buffer, reads
    # it, writes the unsharded parameters.
    gather = (4 * total.n + total.gathered) / shards + 3 * total.gathered
    # To reduce: reads 16-bit gradients, writes them in float32 to a buffer, reads it, writes the
    # shard.
    reduction = (2 + 4 + 4) * total.trained + 4 * total.trained / shards
    copies = n_gathers * gather + n_reductions * reduction
    # AdamW reads parameters, gradients and two moments, and writes all but the gradients; clipping
    # reads the gradients for their norm and writes them scaled. Each in float32.
    adamw = (4 + 3 + 2) * 4 * total.trained / shards
    gpu_memory = card.bandwidth * GB * COPY
    if hp.cpu_offload:
        return copies / gpu_memory + adamw / (HOST_MEMORY * GB)
    return (copies + adamw) / gpu_memory


def _offload_seconds(
    hp: Hyperparameters,
    dtype: torch.dtype | None,
    shards: int,
    n_gathers: int,
    n_reductions: int,
    n_micro_batches: int,
    busy: float,
) -> float:
    """Return the seconds of copies to and from the host that `busy` seconds of a step do not hide."""
    rate = HOST_LINK * GB * LINK
    seconds = 0.0
    if hp.cpu_offload:  # float32 parameters to the GPU, and gradients back
        total = count_units(hp, dtype, shards).total
        seconds += (n_gathers * total.n + n_reductions * total.trained) * 4 / shards / rate
    if hp.activation_offload:  # to the host and back, while other blocks run
        n_offloaded = max(hp.n_layers - RESIDENT, 0)
        moved = 2 * n_offloaded * trace(hp, dtype, "cuda").block.held
        seconds += max(n_micro_batches * moved / rate - busy, 0.0)
    return seconds


def _communication(
    hp: Hyperparameters,
    dtype: torch.dtype | None,
    card: Card,
    layout: Layout,
    n_gathers: int,
    n_reductions: int,
) -> tuple[float, Links]:
    """Return the seconds of a step's collectives, and the bytes that a GPU sends.

    A ring crosses each node once in and once out, so that all GPUs of a node share its network.
    """
    total = count_units(hp, dtype, layout.shards).total
    node_link = card.link * GB * LINK
    n_units = _n_units(hp)

    # Over shards: all-gathers and reduce-scatters, in which a GPU sends its part to all others.
    shards = layout.shards
    gathered_and_reduced = n_gathers * total.gathered + n_reductions * 4 * total.trained
    sent = gathered_and_reduced * (shards - 1) / shards
    n_nodes = -(-shards // layout.per_node)  # of a shard group
    n_in_node = min(shards, layout.per_node)
    shard_rate = node_link
    if n_nodes > 1:
        shard_rate = min(card.link, layout.network * n_in_node) * GB * LINK
    hops = (n_nodes - 1) * NETWORK_LATENCY + (shards - n_nodes) * NODE_LATENCY
    shard_seconds = sent / shard_rate + (n_gathers + n_reductions) * n_units * hops

    # Over replicas: an all-reduce of the gradient shards, in which each is sent twice.
    replicas = layout.replicas
    reduced = 2 * 4 * total.trained / shards * (replicas - 1) / replicas
    n_peers = max(1, layout.per_node // shards)  # replicas in a node
    replicas_cross = replicas > n_peers
    replica_rate, latency = node_link, NODE_LATENCY
    if replicas_cross:
        replica_rate = min(card.link, layout.network * n_peers) * GB * LINK
        latency = 2 * NETWORK_LATENCY
    # NCCL reduces few bytes over many replicas in a tree: latency grows slower than their number.
    replica_seconds = reduced / replica_rate + n_units * (replicas - 1) ** 0.5 * latency

    network = 0.0
    if n_nodes > 1:
        network += sent / n_in_node
    if replicas_cross:
        network += reduced / n_peers
    return shard_seconds + replica_seconds, Links(sent + reduced - network, network)
