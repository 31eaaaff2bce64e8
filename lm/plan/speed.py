"""Time of a training step: FLOPs, memory traffic and collectives over what a GPU and its links achieve.

The fractions of peaks are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lm import lora
from lm.config import Hyperparameters
from lm.metrics.accumulator import peak_flops_by_name
from lm.plan.memory import count

GB = 1e9
MATMUL, COPY, LINK = 0.65, 0.85, 0.8
"""fractions of the peak that matrix products, memory-bound operators and collectives achieve"""
ATTENTION = 0.45
"""fraction of the peak that fused attention achieves, forward and backward"""
TRAFFIC = 3.0
"""bytes read and written by memory-bound operators, by byte that a block saves: once in forward, twice in backward"""
NVLINK_LATENCY, NETWORK_LATENCY = 2e-6, 6e-6
"""seconds of a hop of a ring"""


@dataclass(frozen=True)
class Card:
    """A GPU: its name, memory (GiB), memory bandwidth and bandwidth to a GPU of its node (GB/s, one direction)."""

    name: str
    gib: float
    bandwidth: float
    link: float

    @property
    def flops(self) -> float:
        """Dense 16-bit peak (FLOP/s)."""
        peak = peak_flops_by_name(self.name)
        assert peak
        return peak


CARDS = {
    "h100": Card("H100", 79.2, 3350, 450),
    "h200": Card("H200", 139.8, 4800, 450),
    "b200": Card("B200", 178.4, 7700, 900),
    "a100-80": Card("A100", 79.2, 2039, 300),
    "a100-40": Card("A100", 39.4, 1555, 300),
    "l40s": Card("L40S", 44.4, 864, 25),
    "l4": Card("L4", 22.0, 300, 25),
    "4090": Card("RTX 4090", 23.5, 1008, 25),
    "5090": Card("RTX 5090", 31.3, 1792, 50),
}
"""By the name on the command line, from the vendors' data sheets; memory as PyTorch reports it."""
NETWORKS = {"800g": 100.0, "400g": 50.0, "200g": 25.0, "100g": 12.5, "25g": 3.1}
"""GB/s per GPU to other nodes, by the speed of its network adapter"""


def step_time(
    hp: Hyperparameters,
    dtype: torch.dtype | None,
    card: Card,
    shards: int,
    replicas: int,
    node: int,
    network: float,
    n_micro_batches: int,
    saved: int,
) -> dict[str, Any]:
    """Predict a step.

    Args:
        node: GPUs per node; ranks of a shard group are neighbours.
        network: GB/s per GPU to other nodes.
        saved: bytes that the blocks save for backward in a micro-step, without recomputation.

    Returns:
        seconds by part ("compute", "memory", "optimizer", "exposed communication") and in all ("step"); FLOPs of a GPU
        without recomputation; bytes of a GPU over "nvlink" and "network".
    """
    total, tokens = count(hp, dtype), hp.batch_size * hp.max_seq_len
    model_flops = lora.flops_per_token(hp, hp) * tokens
    window = min(hp.sliding_window or hp.max_seq_len, hp.max_seq_len)
    attended = window - window**2 / (2 * hp.max_seq_len)
    attention = 12 * hp.n_layers * hp.n_heads * hp.head_width * attended * tokens
    blocks = model_flops - 6 * hp.vocab_size * hp.d_model * tokens
    recomputed = blocks / 3 if hp.activation_checkpointing == "full" else 0.0
    compute = (model_flops - attention + recomputed) / MATMUL + attention / ATTENTION
    compute /= card.flops * (1 if dtype else 0.5)
    repeated = {"none": 1.0, "selective": 1.2, "full": 1.33}[hp.activation_checkpointing]
    memory = TRAFFIC * saved * repeated / (card.bandwidth * GB * COPY)

    # Bytes per parameter and GPU: cast, gather and copy out; copy in and reduce; AdamW.
    gathers = (2 if hp.reshard_after_forward else 1 / n_micro_batches) * n_micro_batches
    reductions = n_micro_batches if hp.sync_each_micro_step else 1
    local = gathers * (6 + 6 / shards) * total.n + reductions * (10 + 4 / shards) * total.trained
    local += 36 * total.trained / shards
    optimizer = local / (card.bandwidth * GB * COPY)

    is_local = shards <= node
    rate = (card.link if is_local else network) * GB * LINK
    units, hop = hp.n_layers + 2, NVLINK_LATENCY if is_local else NETWORK_LATENCY
    width = (dtype or torch.float32).itemsize
    sent = (shards - 1) / shards * (gathers * width * total.n + reductions * 4 * total.trained)
    latency = (gathers + reductions) * units * (shards - 1) * hop
    across = replicas * min(shards, node) > node or not is_local
    reduced = 2 * 4 * total.trained / shards * (replicas - 1) / replicas
    replica_rate = (network if across else card.link) * GB * LINK
    communication = sent / rate + latency + reduced / replica_rate
    communication += 2 * units * (replicas - 1) ** 0.5 * NETWORK_LATENCY if replicas > 1 else 0.0  # a tree's hops
    # FSDP overlaps a unit's collectives with the compute of the unit before: the first and the last are exposed.
    busy = n_micro_batches * (compute + memory)
    exposed = max(communication - busy, 0.0) + communication / (units * max(1.0, gathers + reductions)) * 2
    if shards * replicas == 1:
        exposed = sent = reduced = 0.0
    links = {"nvlink": 0.0, "network": 0.0}
    links["nvlink" if is_local else "network"] += sent
    links["network" if across else "nvlink"] += reduced
    seconds = {"compute": n_micro_batches * compute, "memory": n_micro_batches * memory, "optimizer": optimizer}
    seconds |= {"exposed communication": exposed}
    flops = model_flops * n_micro_batches
    return {"seconds": seconds, "step": sum(seconds.values()), "flops": flops, "links": links}
