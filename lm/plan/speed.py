"""Time of a training step: FLOPs, memory traffic and collectives over what GPUs and links achieve.

The fractions of a GPU's peaks are assumptions: nothing was measured on a GPU.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from dataclasses import dataclass

import torch

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.metrics.device import peak_flops_by_name
from lm.plan.memory import (
    FLOAT32_BYTES,
    Unit,
    count_units,
    itemsize,
    list_float8_layers,
    list_muon_matrices,
)
from lm.plan.trace import measure_activations
from lm.training.muon import (
    assign_owners,
    orthogonalization_dtype,
    orthogonalization_flops,
)
from lm.training.offload import RESIDENT

GB = 1e9
MATMUL_FRACTION = 0.65
"""of the 16-bit peak that matrix products achieve"""
ATTENTION_FRACTION = 0.45
"""of the 16-bit peak that attention achieves"""
FLOAT8_FRACTION = 0.5
"""of the float8 peak, twice that of 16 bits, that products achieve with conversions"""
COPY_FRACTION = 0.85
"""of the memory bandwidth that other operators achieve"""
LINK_FRACTION = 0.8
"""of the bandwidth of links that collectives achieve"""
TRAFFIC = 3
"""bytes moved per byte that a block saves: written once, read twice"""
NETWORK_LATENCY = 6e-6
"""seconds of a hop of a ring to another node"""
NODE_LATENCY = 2e-6
"""seconds of a hop of a ring in the node"""
HOST_LINK = 25.0
"""GB/s between a GPU and its host"""
HOST_MEMORY = 20.0
"""GB/s of host memory per GPU"""


@dataclass(frozen=True)
class Card:
    """A GPU."""

    name: str
    gb: int
    """of memory, as its name has it"""
    gib: float
    """of memory, as PyTorch reports it"""
    bandwidth: float
    """GB/s of memory"""
    link: float
    """GB/s to another GPU of the node, in one direction"""
    has_float8: bool = True

    @property
    def flops(self) -> float:
        """Dense 16-bit peak (FLOP/s)."""
        peak = peak_flops_by_name(self.name)
        assert peak is not None
        return peak


CARDS = {
    "h100": Card("H100", 80, 79.2, 3350, 450),
    "h200": Card("H200", 141, 139.8, 4800, 450),
    "b200": Card("B200", 180, 178.4, 7700, 900),
    "a100-80": Card("A100", 80, 79.2, 2039, 300, has_float8=False),
    "a100-40": Card("A100", 40, 39.4, 1555, 300, has_float8=False),
    "l40s": Card("L40S", 48, 44.4, 864, 25),
    "l4": Card("L4", 24, 22.0, 300, 25),
    "4090": Card("RTX 4090", 24, 23.5, 1008, 25),
    "5090": Card("RTX 5090", 32, 31.3, 1792, 50),
}
"""By a short name, from the vendors' data sheets."""
_WORDS_OF_NO_MEANING = r"nvidia|geforce|rtx|gpu|sxm\d?|hbm\de?"
"""in the names that nvidia-smi prints; PCIe and NVL are other cards"""


def find_card(name: str) -> Card:
    """Return the card that people, nvidia-smi or `CARDS` call `name`.

    Raises:
        ConfigError: it is none of `CARDS`, or could be several.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(_WORDS_OF_NO_MEANING, " ", name.lower()))
    found: list[str] = []
    for key, card in CARDS.items():
        chip = card.name.rpartition(" ")[2].lower()
        known_words = {chip, f"{card.gb}", f"{card.gb}g", f"{card.gb}gb"}
        if chip in words and known_words.issuperset(words):
            found.append(key)
    if len(found) == 1:
        return CARDS[found[0]]
    if found:
        raise ConfigError(f"--gpu: {name} can be {' or '.join(found)}; use one of these")
    near = difflib.get_close_matches(" ".join(words), CARDS, n=3, cutoff=0.3)
    names = ", ".join(near or CARDS)
    raise ConfigError(f"--gpu: {name} is unknown; did you mean {names}? Or use --memory GIB")


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by part."""

    compute: float
    """matrix products and attention"""
    memory: float
    """other operators, which memory bandwidth bounds"""
    optimizer: float
    """AdamW and Muon, and the copies of FSDP"""
    exposed_communication: float
    offload: float

    @property
    def total(self) -> float:
        return (
            self.compute + self.memory + self.optimizer + self.exposed_communication + self.offload
        )


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a GPU sends in a step, in its node and to other nodes."""

    node: float
    network: float


@dataclass(frozen=True)
class Topology:
    """Ranks of a mesh; the ranks of a shard group are neighbors."""

    shards: int
    """ranks of a shard group"""
    replicas: int
    """shard groups"""
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
    links: LinkBytes


@dataclass(frozen=True)
class Transfers:
    """Collectives of a step between some ranks."""

    seconds: float
    sent: float
    """bytes that a GPU sends"""
    to_other_nodes: float
    """of these"""


def predict_step_time(
    hp: Hyperparameters,
    dtype: torch.dtype | None,
    card: Card,
    topology: Topology,
    n_micro_batches: int,
) -> StepTime:
    """Predict a step of `n_micro_batches` micro-steps."""
    step = _Step(hp, dtype, card, topology, n_micro_batches)
    compute = n_micro_batches * step.compute_seconds()
    memory = n_micro_batches * step.memory_seconds()

    over_shards = step.transfer_over_shards()
    over_replicas = step.transfer_over_replicas()
    communication = over_shards.seconds + over_replicas.seconds
    # FSDP overlaps a unit's collectives with the compute of the unit before: the first and the last
    # are exposed.
    n_collectives = step.n_units * (step.n_gathers + step.n_reductions)
    exposed = max(communication - compute - memory, 0.0) + 2 * communication / n_collectives

    network = over_shards.to_other_nodes + over_replicas.to_other_nodes
    node = over_shards.sent + over_replicas.sent - network
    return StepTime(
        seconds=Seconds(
            compute=compute,
            memory=memory,
            optimizer=step.optimizer_seconds(),
            exposed_communication=exposed,
            offload=step.offload_seconds(compute + memory),
        ),
        flops=step.model_flops * n_micro_batches,
        links=LinkBytes(node, network),
    )


@dataclass(frozen=True)
class _Step:
    """A step of one GPU, and how long its parts take."""

    hp: Hyperparameters
    dtype: torch.dtype | None
    """of compute; None = float32"""
    card: Card
    topology: Topology
    n_micro_batches: int

    @property
    def n_gathers(self) -> int:
        """How often each unit is all-gathered in a step."""
        if self.hp.reshard_after_forward:  # for forward, and again for backward
            return 2 * self.n_micro_batches
        return 1

    @property
    def n_reductions(self) -> int:
        """How often the gradients of each unit are reduced in a step."""
        if self.hp.sync_each_micro_step:
            return self.n_micro_batches
        return 1

    @property
    def n_units(self) -> int:
        return self.hp.n_layers + 2  # the embedding and the head

    @functools.cached_property
    def total(self) -> Unit:
        """All units of the model as one."""
        return count_units(self.hp, self.dtype, self.topology.shards).total

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step."""
        return self.hp.batch_size * self.hp.max_seq_len

    @property
    def model_flops(self) -> float:
        """FLOPs of a micro-step, without recomputation."""
        return self.hp.training_flops_per_token * self.hp.batch_size * self.hp.max_seq_len

    @property
    def memory_rate(self) -> float:
        """Bytes per second that operators read and write."""
        return self.card.bandwidth * GB * COPY_FRACTION

    def compute_seconds(self) -> float:
        """Return the seconds of a micro-step's matrix products and attention.

        Each kind of product takes its FLOPs over the fraction of the peak that it achieves.
        """
        hp = self.hp
        attention = hp.attention_flops_per_token(hp.max_seq_len) * self.tokens
        # 2 FLOPs per weight and token in forward, 4 in backward.
        head = 6 * hp.vocab_size * hp.d_model * self.tokens
        n_in_float8 = sum(out * inner for out, inner in list_float8_layers(hp))
        in_float8 = 6 * hp.n_layers * self.tokens * n_in_float8
        block_products = self.model_flops - head - attention - in_float8
        repeated = 1.0
        if hp.activation_checkpointing == "full":
            # Forward twice and backward, which has twice the FLOPs of forward; over once and
            # backward.
            repeated = (1 + 1 + 2) / (1 + 2)
        at_peak = (head + repeated * block_products) / MATMUL_FRACTION
        at_peak += repeated * attention / ATTENTION_FRACTION
        at_peak += repeated * in_float8 / (2 * FLOAT8_FRACTION)
        peak = self.card.flops
        if self.dtype is None:
            peak /= 2  # TF32
        return at_peak / peak

    def memory_seconds(self) -> float:
        """Return the seconds of a micro-step's memory-bound operators.

        Their inputs and outputs are about what blocks save without recomputation, and the logits.
        """
        # Full recomputation repeats the forward pass, a third; selective all but products and
        # attention of it.
        repeated = {"none": 1.0, "selective": 1.2, "full": 1.33}
        factor = repeated[self.hp.activation_checkpointing]
        without_recomputation = self.hp.model_copy(update={"activation_checkpointing": "none"})
        saved = measure_activations(without_recomputation, self.dtype, "cuda").block.held
        logits = self.tokens * self.hp.vocab_size * itemsize(self.dtype)
        n_bytes = TRAFFIC * (self.hp.n_layers * factor * saved + logits)
        return n_bytes / self.memory_rate

    def optimizer_seconds(self) -> float:
        """Return the seconds of the optimizer and of FSDP's copies, from the bytes they move."""
        total = self.total
        shards = self.topology.shards
        float32_shard = FLOAT32_BYTES * total.trained / shards
        # To gather: reads the float32 shard, writes it in the compute dtype; writes the buffer,
        # reads it, writes the unsharded parameters.
        gather = (FLOAT32_BYTES * total.n + total.gathered) / shards + 3 * total.gathered
        # To reduce: reads 16-bit gradients, writes them in float32 to a buffer, reads it, writes
        # the shard.
        reduction = (2 + 2 * FLOAT32_BYTES) * total.trained + float32_shard
        copies = self.n_gathers * gather + self.n_reductions * reduction
        # AdamW reads parameters, gradients and two moments, and writes all but the gradients;
        # clipping reads the gradients for their norm and writes them scaled. Each in float32.
        adamw = (4 + 3 + 2) * float32_shard
        if self.hp.cpu_offload:
            return copies / self.memory_rate + adamw / (HOST_MEMORY * GB)
        return (copies + adamw) / self.memory_rate + self.orthogonalization_seconds()

    def orthogonalization_seconds(self) -> float:
        """Return the seconds that Muon takes more than AdamW; both move about as many bytes."""
        shapes = list_muon_matrices(self.hp)
        n_ranks = self.topology.shards * self.topology.replicas
        flops = 0
        for owned in assign_owners(shapes, n_ranks):
            matrices = [shapes[index] for index in owned if index is not None]
            flops += max(map(orthogonalization_flops, matrices))  # all wait for the slowest
        # A GPU sends its rows of all matrices, and receives as many, in each direction.
        rate = self.card.link
        if n_ranks > self.topology.per_node:
            rate = self.topology.network
        n_values = sum(rows * columns for rows, columns in shapes)
        width = orthogonalization_dtype(self.dtype).itemsize
        sent = 2 * width * n_values / self.topology.shards
        return flops / (MATMUL_FRACTION * self.card.flops) + sent / (rate * GB * LINK_FRACTION)

    def offload_seconds(self, busy: float) -> float:
        """Return the seconds of copies to and from the host, less those that others hide.

        Args:
            busy: seconds of the step in which blocks run while activations are copied.
        """
        rate = HOST_LINK * GB * LINK_FRACTION
        seconds = 0.0
        if self.hp.cpu_offload:  # float32 parameters to the GPU, and gradients back
            n_copied = self.n_gathers * self.total.n + self.n_reductions * self.total.trained
            seconds += n_copied * FLOAT32_BYTES / self.topology.shards / rate
        if self.hp.activation_offload:  # to the host and back, while other blocks run
            n_offloaded = max(self.hp.n_layers - RESIDENT, 0)
            block = measure_activations(self.hp, self.dtype, "cuda").block
            moved = 2 * n_offloaded * block.held
            seconds += max(self.n_micro_batches * moved / rate - busy, 0.0)
        return seconds

    def transfer_over_shards(self) -> Transfers:
        """Return the all-gathers of parameters and the reduce-scatters of gradients.

        In a ring of S ranks, each sends its part of the bytes to the next and passes those of
        others on, in S - 1 hops: (S - 1) / S of all bytes. A ring crosses each node once in and
        once out, so that all GPUs of a node share its network, and one of them sends to it.
        """
        shards = self.topology.shards
        gathered = self.n_gathers * self.total.gathered
        reduced = self.n_reductions * FLOAT32_BYTES * self.total.trained
        sent = (gathered + reduced) * (shards - 1) / shards

        n_nodes = math.ceil(shards / self.topology.per_node)  # of a shard group
        n_in_node = min(shards, self.topology.per_node)
        rate = self.card.link * GB * LINK_FRACTION
        to_other_nodes = 0.0
        if n_nodes > 1:
            rate = min(self.card.link, self.topology.network * n_in_node) * GB * LINK_FRACTION
            to_other_nodes = sent / n_in_node
        latency = (n_nodes - 1) * NETWORK_LATENCY + (shards - n_nodes) * NODE_LATENCY
        n_collectives = (self.n_gathers + self.n_reductions) * self.n_units
        return Transfers(sent / rate + n_collectives * latency, sent, to_other_nodes)

    def transfer_over_replicas(self) -> Transfers:
        """Return the all-reduces of gradient shards, once in a step.

        An all-reduce is a reduce-scatter and an all-gather: each byte is sent twice.
        """
        shards, replicas = self.topology.shards, self.topology.replicas
        gradient_shard = FLOAT32_BYTES * self.total.trained / shards
        sent = 2 * gradient_shard * (replicas - 1) / replicas

        n_peers = max(1, self.topology.per_node // shards)  # replicas in a node
        rate = self.card.link * GB * LINK_FRACTION
        latency = NODE_LATENCY
        to_other_nodes = 0.0
        if replicas > n_peers:
            rate = min(self.card.link, self.topology.network * n_peers) * GB * LINK_FRACTION
            latency = 2 * NETWORK_LATENCY
            to_other_nodes = sent / n_peers
        # NCCL reduces few bytes over many replicas in a tree: latency grows slower than their
        # number.
        waiting = self.n_units * (replicas - 1) ** 0.5 * latency
        return Transfers(sent / rate + waiting, sent, to_other_nodes)
