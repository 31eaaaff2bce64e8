"""Time of a training step: FLOPs, memory traffic and collectives over what a device and its links achieve.

The fractions of a GPU's peaks are assumptions. On a CPU, forward and backward passes are timed, and the other rates are
fitted to measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lm import lora
from lm.config import Hyperparameters
from lm.metrics.device import peak_flops_by_name
from lm.offload import RESIDENT
from lm.plan.memory import count, float8_layers
from lm.plan.timing import time_micro_step
from lm.plan.trace import trace

GB = 1e9
MATMUL, ATTENTION, COPY, LINK = 0.65, 0.45, 0.85, 0.8
"""fractions of the peak that matrix products, fused attention, memory-bound operators and collectives achieve"""
TRAFFIC = 3
"""bytes moved per byte that a block saves: written once, read twice"""
NETWORK_LATENCY = 6e-6
"""seconds of a hop of a ring to another node"""
FLOAT8 = 0.5
"""fraction that products in float8 achieve, with the conversion of their inputs, of twice the peak of 16 bits"""
HOST_LINK, HOST_MEMORY = 25.0, 20.0
"""GB/s between a GPU and its host, and of host memory per GPU"""


@dataclass(frozen=True)
class Card:
    """A GPU, or a CPU with one thread per rank: memory (GiB), bandwidths (GB/s, one direction) and what it achieves."""

    name: str
    gib: float
    bandwidth: float
    link: float  # to another rank of the node
    latency: float = 2e-6  # seconds of a hop of a ring in the node
    slowdown: float = 1.0  # seconds per predicted second, see --calibrate
    has_float8: bool = True

    @property
    def device_type(self) -> str:
        return "cpu" if self.name == "CPU" else "cuda"

    @property
    def flops(self) -> float:
        """Dense 16-bit peak (FLOP/s); 0 for a CPU."""
        return peak_flops_by_name(self.name) or 0.0


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
    "cpu": Card("CPU", 0.0, 16, 1.3, latency=1.8e-3),
}
"""By the name on the command line, from the vendors' data sheets; memory as PyTorch reports it, of a CPU this machine's
per rank."""


def step_time(
    hp: Hyperparameters, dtype: torch.dtype | None, card: Card, mesh: dict[str, int], node: int, network: float, n: int
) -> dict[str, Any]:
    """Predict a step of `n` micro-steps.

    Args:
        node: GPUs per node; ranks of a shard group are neighbors.
        network: GB/s per GPU to other nodes.

    Returns:
        seconds by part and in all ("step"); FLOPs of a GPU without recomputation; bytes of a GPU by link.
    """
    shards, replicas = mesh["shard"], mesh["replicate"]
    on_gpu, bandwidth = card.device_type == "cuda", card.bandwidth * GB * COPY
    total, model_flops = count(hp, dtype, shards), lora.flops_per_token(hp, hp) * hp.batch_size * hp.max_seq_len
    compute, memory = _time_on_gpu(hp, dtype, card, model_flops) if on_gpu else (time_micro_step(hp, dtype), 0.0)

    # Bytes of a GPU: cast, gather and copy out; copy in and reduce; AdamW.
    gathers = (2 if hp.reshard_after_forward else 1 / n) * n
    reductions = n if hp.sync_each_micro_step else 1
    local = (
        gathers * (3 * total.size + (4 * total.n + total.size) / shards)
        + reductions * (10 + 4 / shards) * total.trained
    )
    optimizer, offload = (local + 36 * total.trained / shards) / bandwidth, 0.0
    if on_gpu and hp.cpu_offload:  # parameters to the GPU, gradients back, AdamW in host memory
        moved = (gathers * total.n + reductions * total.trained) * 4 / shards
        optimizer = local / bandwidth + 36 * total.trained / shards / (HOST_MEMORY * GB)
        offload += moved / (HOST_LINK * GB * LINK)
    if on_gpu and hp.activation_offload:  # to the host and back, while other blocks run
        moved = 2 * max(hp.n_layers - RESIDENT, 0) * trace(hp, dtype, card.device_type).block.held
        offload += n * max(moved / (HOST_LINK * GB * LINK) - compute - memory, 0.0)

    # A ring crosses each node once in and once out: all GPUs of a node share their network.
    per_node, peers = min(shards, node), max(1, node // shards)  # ranks in a node of a shard group, and replicas
    nodes, crosses = -(-shards // node), replicas > peers
    rate = (card.link if nodes == 1 else min(card.link, network * per_node)) * GB * LINK
    replica_rate = (min(card.link, network * peers) if crosses else card.link) * GB * LINK
    units = hp.n_layers + 2
    sent = (shards - 1) / shards * (gathers * total.size + reductions * 4 * total.trained)
    reduced = 2 * 4 * total.trained / shards * (replicas - 1) / replicas
    ring = (nodes - 1) * NETWORK_LATENCY + (shards - nodes) * card.latency
    tree = units * (replicas - 1) ** 0.5 * (2 * NETWORK_LATENCY if crosses else card.latency)
    communication = sent / rate + (gathers + reductions) * units * ring + reduced / replica_rate + tree
    # FSDP overlaps a unit's collectives with the compute of the unit before: the first and the last are exposed.
    busy = n * (compute + memory) if on_gpu else 0.0
    exposed = max(communication - busy, 0.0) + 2 * communication / (units * max(1.0, gathers + reductions)) * on_gpu
    remote = sent / per_node * (nodes > 1) + reduced / peers * crosses
    seconds = {"compute": n * compute, "memory": n * memory, "optimizer": optimizer, "exposed communication": exposed}
    seconds = {part: card.slowdown * value for part, value in (seconds | {"offload": offload}).items() if value}
    links = {"node": sent + reduced - remote, "network": remote}
    return {"seconds": seconds, "step": sum(seconds.values()), "flops": model_flops * n, "links": links}


def _time_on_gpu(hp: Hyperparameters, dtype: torch.dtype | None, card: Card, model_flops: float) -> tuple[float, float]:
    """Return the seconds of a micro-step's matrix products and attention, and of its memory-bound operators."""
    tokens, width = hp.batch_size * hp.max_seq_len, (dtype or torch.float32).itemsize
    window = min(hp.sliding_window or hp.max_seq_len, hp.max_seq_len)
    attended = window - window**2 / (2 * hp.max_seq_len)
    attention = 12 * hp.n_layers * hp.n_heads * hp.head_width * attended * tokens
    head = 6 * hp.vocab_size * hp.d_model * tokens
    in_float8 = 6 * hp.n_layers * tokens * sum(out * inner for out, inner in float8_layers(hp))
    products = model_flops - head - attention - in_float8  # of the blocks
    again, repeated = {"none": (1.0, 1.0), "selective": (1.0, 1.2), "full": (4 / 3, 1.33)}[hp.activation_checkpointing]
    compute = (head + again * products) / MATMUL + again * (attention / ATTENTION + in_float8 / (2 * FLOAT8))
    block = trace(hp.model_copy(update={"activation_checkpointing": "none"}), dtype, "cuda").block.held
    n_bytes = TRAFFIC * (hp.n_layers * repeated * block + tokens * hp.vocab_size * width)
    return compute / (card.flops * (1 if dtype else 0.5)), n_bytes / (card.bandwidth * GB * COPY)
