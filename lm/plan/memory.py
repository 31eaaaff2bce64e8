"""Memory of a training step by part: what FSDP keeps in closed form, and the activations that lm.plan.trace measures.

A step is a sequence of phases, and memory is that of the phase with the most bytes. FSDP allocates in the same order
on every device: in forward, the unit that runs and its all-gather buffer; in backward, also the buffer of the unit that
runs next, and the gradients that the unit before is reducing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import torch

from lm import lora
from lm.config import Hyperparameters
from lm.float8 import gathers_in_float8, is_supported
from lm.offload import RESIDENT
from lm.plan.trace import Piece, Trace
from model import Block, ModelConfig, loss_chunk, make_norm

Parts = dict[str, int]
"""bytes by part"""
Activations = Callable[[Hyperparameters, torch.dtype | None, str], Trace]
"""`lm.plan.trace.trace`, or `bound`; of hyperparameters, compute dtype and device type"""

MASTER = 4
"""bytes of a trained parameter, and of its gradient after the reduction"""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together, and their bytes when gathered."""

    n: int = 0
    trained: int = 0
    size: int = 0

    def __add__(self, other: Unit) -> Unit:
        return Unit(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Unit:
        return Unit(*(value * times for value in astuple(self)))


@functools.lru_cache(maxsize=256)
def _count_block(config: str) -> tuple[int, int]:
    """Return the parameters of a block and of a norm; `config` is JSON of a `ModelConfig`."""
    model = ModelConfig.model_validate_json(config)
    with torch.device("meta"):
        n, norm = (sum(p.numel() for p in module.parameters()) for module in (Block(model, 0), make_norm(model)))
    return n, norm


def float8_layers(hp: Hyperparameters) -> list[tuple[int, int]]:
    """Return `(out, in)` of the layers of a block that are multiplied in float8."""
    return [shape for shape in lora.layer_shapes(hp).values() if hp.float8 and is_supported(*shape)]


def count_units(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> tuple[Unit, Unit, Unit, Unit]:
    """Return the FSDP units of the embedding, of a block, of the head, and of the root."""
    n, norm = _count_block(hp.model_dump_json(include=lora.BLOCK_KEYS))
    width, matrix = (dtype or torch.float32).itemsize, hp.vocab_size * hp.d_model
    adapters = lora.n_trained(hp, hp) // hp.n_layers if hp.lora_rank else 0
    positions = hp.max_seq_len * hp.d_model if hp.positions == "learned" else 0
    sizes = (matrix + positions, 0), (n, adapters), (norm + (0 if hp.tie_embeddings else matrix), 0)
    e, b, h = (Unit(n + new, new if hp.lora_rank else n, width * (n + new)) for n, new in sizes)
    if gathers_in_float8(hp.float8, lora.layer_shapes(hp).values(), 1 if hp.cpu_offload else shards):
        b += Unit(size=(1 - width) * sum(out * inner for out, inner in float8_layers(hp)))
    if not hp.layer_wrap:
        return Unit(), Unit(), Unit(), e + b * hp.n_layers + h
    return (Unit(), b, Unit(), e + h) if hp.tie_embeddings else (e, b, h, Unit())


def count(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> Unit:
    """Return the parameters of the model with its adapters."""
    e, b, h, root = count_units(hp, dtype, shards)
    return e + b * hp.n_layers + h + root


def state(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> Parts:
    """Return the bytes of what exists between steps on one of `shards` ranks, by part."""
    total = count(hp, dtype, shards)
    parameters = MASTER * total.trained + (dtype or torch.float32).itemsize * (total.n - total.trained)
    moment = getattr(torch, hp.optim_dtype).itemsize
    return {"parameters": parameters // shards, "moments": 2 * moment * total.trained // shards}


def bound(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str) -> Trace:
    """Return at least the bytes that `lm.plan.trace.trace` measures, in closed form, as a trace takes seconds.

    The factors are above those of all models that were compared with their traces.
    """
    width, length, tokens = (dtype or torch.float32).itemsize, hp.max_seq_len, hp.batch_size * hp.max_seq_len
    x, matrix, logits = tokens * hp.d_model * width, hp.vocab_size * hp.d_model, tokens * hp.vocab_size
    n, shapes = count_units(hp, dtype, 1)[1].n, lora.layer_shapes(hp)
    pairs = 16 * length**2 * (bool(hp.sliding_window) + hp.batch_size * hp.n_heads * bool(hp.dropout))
    if device_type == "cuda":
        pairs, logits = 0, min(logits, loss_chunk(torch.device("cuda"), 80 * 2**30))
    in_float32 = hp.norm == "rmsnorm" or hp.positions == "rope"
    n_more = sum(map(bool, (in_float32, hp.qk_norm != "none", hp.lora_rank, hp.dropout)))
    saved = (2 + n_more) * tokens * width * sum(map(sum, shapes.values())) // 2 + pairs  # of the linear layers' ends
    held = x if hp.activation_checkpointing == "full" else saved
    embedding = 6 * x + pairs + 3 * width * (matrix + length * hp.d_model)
    block = 2 * saved + 3 * width * matrix
    head = (5 if hp.compiles(device_type == "cuda", hp.float8) else 17) * logits + 8 * x + 8 * matrix
    return Trace(
        Piece(2 * x + pairs, embedding, embedding, embedding),
        Piece(held, block, block + width * n, block),
        Piece(head, head, head, head),
    )


def phases(
    hp: Hyperparameters, dtype: torch.dtype | None, pieces: Trace, shards: int, n_micro_batches: int, on_gpu: bool
) -> Iterator[Parts]:
    """Yield the bytes by part of the phases of a step that can have the most, for one of `shards` ranks.

    Args:
        dtype: compute dtype; None = float32.
        pieces: of the same hyperparameters.
        n_micro_batches: accumulation steps.
        on_gpu: what is offloaded to host memory does not count.
    """
    compute, layers, reshard = (dtype or torch.float32).itemsize, hp.n_layers, hp.reshard_after_forward
    e, b, h, root = count_units(hp, dtype, shards)
    trained = count(hp, dtype, shards).trained
    accumulates_shards = n_micro_batches > 1 and hp.sync_each_micro_step
    accumulates_all = n_micro_batches > 1 and not hp.sync_each_micro_step
    stays_all = accumulates_shards and not reshard  # until the backward pass of the last micro-step
    stays = not reshard or shards == 1  # no all-gather buffers in backward
    blocks = 0 if reshard else e.size + layers * b.size  # kept from forward to backward
    reduced_size = getattr(torch, hp.reduce_dtype).itemsize
    kept = {} if on_gpu and hp.cpu_offload else state(hp, dtype, shards)

    def phase(
        activations: int, units: int, buffer: int, done: int = 0, reducing: int = 0, grads: int = 0, first: bool = False
    ) -> Parts:
        """Return the bytes by part.

        Args:
            units: bytes of unsharded parameters.
            buffer: bytes of all-gather buffers.
            done: reduced gradients.
            reducing: gradients in buffers of the reduction.
            grads: gradients of the unit whose reduction starts.
            first: in the first micro-step, before any gradients are accumulated.
        """
        sharded = (trained if accumulates_shards and not first else done) // shards if kept else 0
        reduced = MASTER * sharded + reduced_size * (reducing + grads)
        if accumulates_all and not first:
            reduced += reduced_size * (trained - done)
        else:  # the buffer for the result is allocated once the gradients are freed
            reduced += max(compute * grads, reduced_size * grads // shards)
        gathered = units + (0 if shards == 1 else buffer)
        return kept | {"gradients": reduced, "gathered": gathered, "activations": activations}

    def level(layer: int) -> int:  # activations before the forward pass of a block
        resident = RESIDENT - (layer < layers) if on_gpu and hp.activation_offload else layer
        return pieces.embedding.held + min(layer, resident) * pieces.block.held

    for first in {True, n_micro_batches == 1}:
        is_kept = not first and not reshard  # later micro-steps find all parameters gathered
        block, head = (0, 0) if is_kept else (b.size, h.size or b.size)
        units = root.size + (b.size if reshard else blocks)
        yield phase(level(layers - 1), units, 2 * block, first=first)
        yield phase(level(layers - 1) + pieces.block.forward, units, block, first=first)
        units = root.size + h.size + blocks
        yield phase(level(layers), units, (head + block if h.size else 0), first=first)
        yield phase(level(layers) + pieces.head.forward, units, head, first=first)
    units, prefetched = root.size + h.size + blocks, 0 if stays else b.size
    yield phase(level(layers) + pieces.head.backward, units, prefetched)
    units -= 0 if stays_all else h.size
    yield phase(level(layers) + pieces.head.after, units, prefetched, grads=h.trained)
    for layer in {0, 1, layers - 2, layers - 1} & set(range(layers)):
        done, before = h.trained + (layers - 1 - layer) * b.trained, h if layer == layers - 1 else b
        units = root.size + (b.size if reshard else blocks + h.size if stays_all else e.size + (layer + 1) * b.size)
        prefetched = b.size if layer and not stays else 0
        yield phase(level(layer) + pieces.block.backward, units, prefetched, done, before.trained)
        units -= 0 if stays_all else b.size
        yield phase(level(layer) + pieces.block.after, units, prefetched, done, grads=b.trained)
    done = h.trained + layers * b.trained
    yield phase(pieces.embedding.backward, root.size + (0 if reshard else e.size), 0, done, b.trained)
    yield phase(0, root.size, 0, done, grads=e.trained)
    yield phase(0, 0, 0, trained - root.trained, grads=root.trained)
