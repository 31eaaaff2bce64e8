"""Memory of a training step: what FSDP keeps, in closed form, and the activations.

A step is a sequence of instants, and its memory is that of the instant with the most bytes. FSDP
allocates in the same order on every device:

- forward: a unit is all-gathered into a buffer, and copied from it into its unsharded parameters.
  The buffer of the unit before is freed only after that.
- backward: while a unit runs, the buffer of the one that runs next is filled, and the gradients of
  the one before are reduced from a buffer.
- reduction: the gradients of a unit are copied into that buffer, and freed before the buffer for
  their shard is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from lm.config import Hyperparameters
from lm.plan.trace import Activations, PartActivations
from lm.training import lora
from lm.training.float8 import gathers_in_float8, is_supported
from lm.training.muon import orthogonalization_dtype
from lm.training.offload import RESIDENT
from model import Block, ModelConfig, find_logits_limit, make_norm

FindActivations = Callable[[Hyperparameters, torch.dtype | None, str], Activations]
"""`measure_activations` or `bound_activations`: of hyperparameters, compute dtype, device type"""

FLOAT32_BYTES = torch.float32.itemsize
"""of a trained parameter, and of its gradient after the reduction"""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at one instant, by part."""

    parameters: int = 0
    moments: int = 0
    """of the optimizer"""
    gradients: int = 0
    gathered: int = 0
    """unsharded parameters and all-gather buffers"""
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP all-gathers together."""

    n: int = 0
    trained: int = 0
    gathered: int = 0
    """bytes when all-gathered"""

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.n + other.n, self.trained + other.trained, self.gathered + other.gathered)

    def __mul__(self, times: int) -> Unit:
        return Unit(self.n * times, self.trained * times, self.gathered * times)


@dataclass(frozen=True)
class Units:
    """The FSDP units of a model; `root` holds the parameters that no other unit has."""

    embedding: Unit
    block: Unit
    head: Unit
    root: Unit
    n_blocks: int

    @property
    def total(self) -> Unit:
        return self.embedding + self.block * self.n_blocks + self.head + self.root


def itemsize(dtype: torch.dtype | None) -> int:
    """Return the bytes of a number in the compute dtype; None = float32."""
    return (dtype or torch.float32).itemsize


@functools.lru_cache(maxsize=256)
def _count_block(config: str) -> tuple[int, int]:
    """Return the parameters of a block and of a norm; `config` is JSON of a `ModelConfig`."""
    model = ModelConfig.model_validate_json(config)
    with torch.device("meta"):
        block = Block(model, 0)
        norm = make_norm(model)
    n_block = sum(parameter.numel() for parameter in block.parameters())
    n_norm = sum(parameter.numel() for parameter in norm.parameters())
    return n_block, n_norm


def list_float8_layers(hp: Hyperparameters) -> list[tuple[int, int]]:
    """Return `(out, in)` of the layers of a block that are multiplied in float8."""
    if hp.float8 is None:
        return []
    return [shape for shape in lora.layer_shapes(hp).values() if is_supported(*shape)]


def count_units(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> Units:
    """Return the FSDP units of the model with its adapters on `shards` ranks."""
    # Embeddings are counted without a module: their initial values on the meta device import
    # PyTorch's compiler.
    n_block, n_norm = _count_block(hp.model_dump_json(include=lora.BLOCK_KEYS))
    n_matrix = hp.vocab_size * hp.d_model
    n_embedding = n_matrix
    if hp.positions == "learned":
        n_embedding += hp.context_length * hp.d_model
    n_head = n_norm
    if not hp.tie_embeddings:
        n_head += n_matrix
    n_adapters = 0  # parameters of those of a block
    if hp.lora_rank is not None:
        n_adapters = hp.n_trained_parameters // hp.n_layers
    width = itemsize(dtype)

    def make_unit(n_base: int, n_adapters: int = 0) -> Unit:
        n = n_base + n_adapters
        n_trained = n
        if hp.lora_rank is not None:
            n_trained = n_adapters
        return Unit(n, n_trained, width * n)

    embedding = make_unit(n_embedding)
    block = make_unit(n_block, n_adapters)
    head = make_unit(n_head)
    gathering_shards = shards
    if hp.cpu_offload:
        gathering_shards = 1
    if gathers_in_float8(hp.float8, lora.layer_shapes(hp).values(), gathering_shards):
        n_in_float8 = sum(out * inner for out, inner in list_float8_layers(hp))
        saved_bytes = (width - 1) * n_in_float8
        block += Unit(gathered=-saved_bytes)
    none = Unit()
    if not hp.layer_wrap:
        return Units(none, none, none, embedding + block * hp.n_layers + head, 0)
    if hp.tie_embeddings:
        return Units(none, block, none, embedding + head, hp.n_layers)
    return Units(embedding, block, head, none, hp.n_layers)


def list_muon_matrices(hp: Hyperparameters) -> list[tuple[int, int]]:
    """Return `(rows, columns)` of the matrices that Muon updates."""
    if hp.optimizer != "muon":
        return []
    return hp.n_layers * list(lora.layer_shapes(hp).values())


def compute_state(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> Memory:
    """Return what exists between steps on one of `shards` ranks: parameters and moments.

    Trained parameters are float32, frozen ones have the compute dtype. AdamW has two moments of
    each trained parameter, Muon one of each that it updates, in `optim_dtype`.
    """
    total = count_units(hp, dtype, shards).total
    frozen_bytes = itemsize(dtype) * (total.n - total.trained)
    trained_bytes = FLOAT32_BYTES * total.trained
    n_of_muon = sum(rows * columns for rows, columns in list_muon_matrices(hp))
    n_moments = 2 * total.trained - n_of_muon
    return Memory(
        parameters=(trained_bytes + frozen_bytes) // shards,
        moments=getattr(torch, hp.optim_dtype).itemsize * n_moments // shards,
    )


def bound_activations(
    hp: Hyperparameters, dtype: torch.dtype | None, device_type: str
) -> Activations:
    """Return at least the bytes that `measure_activations` finds, which takes seconds.

    The factors count the tensors that can exist at once. All models whose activations were measured
    stay below.
    """
    bound = _ActivationBound(hp, dtype, device_type == "cuda")
    return Activations(embedding=bound.embedding(), block=bound.block(), head=bound.head())


@dataclass(frozen=True)
class _ActivationBound:
    """Bytes that the activations of a micro-step cannot exceed, by part of the model."""

    hp: Hyperparameters
    dtype: torch.dtype | None
    """of compute; None = float32"""
    on_gpu: bool

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return itemsize(self.dtype)

    @property
    def tokens(self) -> int:
        return self.hp.batch_size * self.hp.max_seq_len

    @property
    def hidden(self) -> int:
        """Bytes of the input or the output of a block."""
        return self.tokens * self.hp.d_model * self.width

    @property
    def pairs(self) -> int:
        """Bytes of what exists for all pairs of positions on a CPU.

        These are the masks of sliding windows, and the scores that dropout needs without a fused
        kernel: a float32 score, its softmax, its mask and its gradient take 16 bytes.
        """
        if self.on_gpu:
            return 0
        windows = {kind.sliding_window for kind in self.hp.attention_kinds} - {None}
        n_masks = len(windows)
        if self.hp.dropout:
            n_masks += self.hp.batch_size * self.hp.n_heads
        return 4 * FLOAT32_BYTES * self.hp.max_seq_len**2 * n_masks

    @property
    def n_matrix(self) -> int:
        """Weights of the embedding matrix, or of the output matrix."""
        return self.hp.vocab_size * self.hp.d_model

    @property
    def matrix_gradients(self) -> int:
        """Bytes of the gradients of the embedding matrix.

        It can exist three times: of the lookup, of the head if they are tied, and their sum.
        """
        return 3 * self.n_matrix * self.width

    def embedding(self) -> PartActivations:
        held = 2 * self.hidden + self.pairs
        # Tokens and positions are looked up, added and dropped out, each with a gradient.
        position_gradients = 0
        if self.hp.positions == "learned":
            position_gradients = 3 * self.hp.context_length * self.hp.d_model * self.width
        most = 6 * self.hidden + self.pairs + self.matrix_gradients + position_gradients
        return PartActivations(held, most, most, most)

    def block(self) -> PartActivations:
        hp = self.hp
        # A block saves the inputs and the outputs of its linear layers. Each of these may save the
        # inputs or the outputs again: norms and rotary embeddings, which compute in float32; the
        # norms of queries and keys; adapters; dropout.
        n_features = sum(out + inner for out, inner in lora.layer_shapes(hp).values())
        inputs_and_outputs = self.tokens * n_features * self.width
        uses_float32 = hp.norm != "layernorm" or hp.positions == "rope"
        n_more = sum([uses_float32, hp.qk_norm != "none", hp.lora_rank is not None, hp.dropout > 0])
        saved = inputs_and_outputs + n_more * inputs_and_outputs // 2 + self.pairs
        held = saved
        if hp.activation_checkpointing == "full":
            held = self.hidden  # its input
        # In backward, what is saved and as many gradients, and those of the parameters.
        most = 2 * saved + self.matrix_gradients
        wrapped = hp.model_copy(update={"layer_wrap": True})  # otherwise no unit is a block
        gradients = self.width * count_units(wrapped, self.dtype, 1).block.n
        return PartActivations(held, most, most + gradients, most)

    def head(self) -> PartActivations:
        device = torch.device("cuda" if self.on_gpu else "cpu")
        limit = find_logits_limit(device, 80 * 2**30)
        n_logits = min(self.tokens * self.hp.vocab_size, limit)
        if self.hp.compiles(self.on_gpu, self.hp.float8):
            # The logits and their gradients in the compute dtype, and a mask of one byte.
            bytes_of_logit = 2 * self.width + 1
        else:
            # In float32 the logits and the logarithms of the probabilities.
            bytes_of_logit = 2 * FLOAT32_BYTES
        # The norm computes in float32, with gradients.
        norm = 8 * self.hidden
        # The gradient of the matrix is, in float32, a sum over chunks, to which one is being added.
        gradients = 2 * FLOAT32_BYTES * self.n_matrix
        most = bytes_of_logit * n_logits + norm + gradients
        return PartActivations(most, most, most, most)


@dataclass(frozen=True)
class StepMemory:
    """The instants of a training step in which one of `shards` ranks can have the most bytes."""

    hp: Hyperparameters
    dtype: torch.dtype | None
    """of compute; None = float32"""
    activations: Activations
    """of the same hyperparameters"""
    shards: int
    replicas: int
    n_micro_batches: int
    """accumulation steps"""
    on_gpu: bool
    """what is offloaded to host memory does not count"""

    @functools.cached_property
    def units(self) -> Units:
        return count_units(self.hp, self.dtype, self.shards)

    @functools.cached_property
    def between_steps(self) -> Memory:
        if self.on_gpu and self.hp.cpu_offload:
            return Memory()
        return compute_state(self.hp, self.dtype, self.shards)

    @property
    def reshards(self) -> bool:
        """Whether a unit's parameters are freed after its forward pass."""
        return self.hp.reshard_after_forward

    @property
    def accumulates_shards(self) -> bool:
        """Whether each micro-step reduces its gradients and adds them to a shard."""
        return self.n_micro_batches > 1 and self.hp.sync_each_micro_step

    @property
    def accumulates_unsharded(self) -> bool:
        """Whether only the last micro-step reduces gradients, of all micro-steps."""
        return self.n_micro_batches > 1 and not self.hp.sync_each_micro_step

    def find_peak(self) -> Memory:
        """Return the instant with the most bytes."""
        return max(self._instants(), key=lambda memory: memory.total)

    def _instants(self) -> Iterator[Memory]:
        """Yield all instants that can be the peak."""
        yield from self._forward(is_first=True)
        if self.n_micro_batches > 1:
            yield from self._forward(is_first=False)
        yield from self._backward_of_head()
        # Bytes change evenly from block to block, so that the peak is at an end; a block next to an
        # end has other units before or after it than the one at the end.
        n_layers = self.hp.n_layers
        for layer in sorted({0, 1, n_layers - 2, n_layers - 1}):
            if 0 <= layer < n_layers:
                yield from self._backward_of_block(layer)
        yield from self._backward_of_embedding_and_root()
        if self.hp.optimizer == "muon":
            yield self._step_of_muon()

    def _forward(self, is_first: bool) -> Iterator[Memory]:
        """Yield the instants around the last block and the head, before which activations add up.

        Args:
            is_first: in the first micro-step, before any gradients are accumulated.
        """
        units = self.units
        block = units.block.gathered
        head = units.head.gathered
        last_layer = self._before_block(self.hp.n_layers - 1)
        all_layers = self._before_block(self.hp.n_layers)
        gradients = 0
        if not is_first:
            gradients = self._gradients(0)

        # Buffers while a unit is gathered: its own, and that of the unit before, which exists until
        # the parameters are copied out; from PyTorch 2.15 on, until they are allocated. While it
        # runs: its own.
        gathering_block = 2 * block
        running_block = block
        gathering_head = block + head
        running_head = head
        if torch.__version__ >= "2.15":
            gathering_block = block
            gathering_head = max(block, head)
        if head == 0:  # it is in the root, already gathered, and the last block's buffer stays
            gathering_head = 0
            running_head = block
        if not is_first and not self.reshards:  # all parameters are still gathered
            gathering_block = running_block = gathering_head = running_head = 0

        unsharded = units.root.gathered
        if self.reshards:
            unsharded += block
        else:
            unsharded += self._gathered_in_forward()
        running = last_layer + self.activations.block.forward
        yield self._memory_at(last_layer, unsharded, gathering_block, gradients)
        yield self._memory_at(running, unsharded, running_block, gradients)

        unsharded = units.root.gathered + head + self._gathered_in_forward()
        running = all_layers + self.activations.head.forward
        yield self._memory_at(all_layers, unsharded, gathering_head, gradients)
        yield self._memory_at(running, unsharded, running_head, gradients)

    def _backward_of_head(self) -> Iterator[Memory]:
        head = self.units.head
        saved = self._before_block(self.hp.n_layers)
        next_buffer = self._backward_buffer()

        unsharded = self.units.root.gathered + head.gathered + self._gathered_in_forward()
        running = saved + self.activations.head.backward
        yield self._memory_at(running, unsharded, next_buffer, self._gradients(0))

        unsharded -= self._resharded_after_backward(head)
        after = saved + self.activations.head.after
        gradients = self._gradients(0, reducing=head.trained, is_starting=True)
        yield self._memory_at(after, unsharded, next_buffer, gradients)

    def _backward_of_block(self, layer: int) -> Iterator[Memory]:
        units = self.units
        block = units.block
        n_after = self.hp.n_layers - 1 - layer
        n_reduced = units.head.trained + n_after * block.trained
        reduced_meanwhile = block
        if n_after == 0:
            reduced_meanwhile = units.head
        saved = self._before_block(layer)
        next_buffer = 0
        if layer > 0:
            next_buffer = self._backward_buffer()

        unsharded = units.root.gathered
        if self.reshards:
            unsharded += block.gathered
        elif self.accumulates_shards:  # until the backward pass of the last micro-step
            unsharded += self._gathered_in_forward() + units.head.gathered
        else:
            unsharded += units.embedding.gathered + (layer + 1) * block.gathered
        running = saved + self.activations.block.backward
        gradients = self._gradients(n_reduced, reducing=reduced_meanwhile.trained)
        yield self._memory_at(running, unsharded, next_buffer, gradients)

        unsharded -= self._resharded_after_backward(block)
        after = saved + self.activations.block.after
        gradients = self._gradients(n_reduced, reducing=block.trained, is_starting=True)
        yield self._memory_at(after, unsharded, next_buffer, gradients)

    def _backward_of_embedding_and_root(self) -> Iterator[Memory]:
        units = self.units
        n_reduced = units.head.trained + self.hp.n_layers * units.block.trained
        root = units.root.gathered
        embedding = 0  # its backward pass reads no parameters
        if not self.reshards:
            embedding = units.embedding.gathered
        running = self.activations.embedding.backward
        gradients = self._gradients(n_reduced, reducing=units.block.trained)
        yield self._memory_at(running, root + embedding, 0, gradients)

        gradients = self._gradients(n_reduced, reducing=units.embedding.trained, is_starting=True)
        yield self._memory_at(0, root, 0, gradients)

        n_reduced = units.total.trained - units.root.trained
        gradients = self._gradients(n_reduced, reducing=units.root.trained, is_starting=True)
        yield self._memory_at(0, 0, 0, gradients)

    def _step_of_muon(self) -> Memory:
        """Return the instant in which this rank sends the largest matrix that it orthogonalized."""
        # The matrix; its rows for all ranks, a buffer to send them and one to receive as many, all
        # of them once per replica; two products of its short side.
        copies = 1 + 3 * self.replicas
        n_values = 0
        for rows, columns in list_muon_matrices(self.hp):
            n_values = max(n_values, copies * rows * columns + 2 * min(rows, columns) ** 2)
        width = orthogonalization_dtype(self.dtype).itemsize
        return self._memory_at(width * n_values, 0, 0, self._gradients(self.units.total.trained))

    def _memory_at(self, activations: int, unsharded: int, buffers: int, gradients: int) -> Memory:
        """Return the memory at an instant with these bytes.

        Args:
            unsharded: of gathered parameters.
            buffers: of all-gathers.
        """
        gathered = unsharded
        if self.shards > 1:  # otherwise parameters are cast, and no buffer is needed
            gathered += buffers
        return replace(
            self.between_steps, gradients=gradients, gathered=gathered, activations=activations
        )

    def _before_block(self, layer: int) -> int:
        """Return the activations of all before block `layer`, which exist in both its passes."""
        n_held = layer
        if self.on_gpu and self.hp.activation_offload:
            n_resident = RESIDENT
            if layer < self.hp.n_layers:
                n_resident -= 1  # the block `layer` itself is one of them
            n_held = min(layer, n_resident)
        return self.activations.embedding.held + n_held * self.activations.block.held

    def _gathered_in_forward(self) -> int:
        """Return the bytes of the unsharded embedding and blocks that are kept until backward."""
        if self.reshards:
            return 0
        return self.units.embedding.gathered + self.hp.n_layers * self.units.block.gathered

    def _backward_buffer(self) -> int:
        """Return the bytes of the all-gather buffer of the block whose backward pass is next."""
        if self.reshards:
            return self.units.block.gathered
        return 0

    def _resharded_after_backward(self, unit: Unit) -> int:
        """Return the bytes of unsharded parameters that are freed after the backward of `unit`."""
        if self.accumulates_shards and not self.reshards:
            return 0
        return unit.gathered

    def _gradients(self, n_reduced: int, reducing: int = 0, is_starting: bool = False) -> int:
        """Return the bytes of gradients from the second micro-step on, or in the only one.

        Args:
            n_reduced: trained parameters of the units whose gradients are reduced, or are being
                reduced.
            reducing: of the unit whose gradients are in the buffer of the reduction.
            is_starting: its gradients were just copied there.
        """
        n_trained = self.units.total.trained
        reduce_itemsize = getattr(torch, self.hp.reduce_dtype).itemsize

        n_sharded = n_reduced
        if self.accumulates_shards:  # those of the micro-steps before exist from the start
            n_sharded = n_trained
        shards = FLOAT32_BYTES * (n_sharded // self.shards)
        if self.on_gpu and self.hp.cpu_offload:
            shards = 0

        buffer = reduce_itemsize * reducing
        if self.accumulates_unsharded:
            n_unsharded = n_trained - n_reduced
            return shards + buffer + reduce_itemsize * n_unsharded
        if is_starting:
            gradients = itemsize(self.dtype) * reducing  # freed before the next is allocated
            reduced_shard = reduce_itemsize * reducing // self.shards
            buffer += max(gradients, reduced_shard)
        return shards + buffer
