"""Memory of a training step by part: what FSDP keeps in closed form, and the activations that lm.plan.trace measures.

A step is a sequence of moments, and memory is that of the moment with the most bytes. FSDP allocates in the same order
on every device: in forward, the unit that runs and its all-gather buffer; in backward, also the buffer of the unit that
runs next, and the gradients that the unit before is reducing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lm import lora
from lm.config import Hyperparameters
from lm.offload import RESIDENT
from lm.plan.trace import SHAPE_KEYS, Trace, trace
from model import Transformer

Parts = dict[str, int]
"""bytes by part"""

MASTER = 4
"""bytes of a trained parameter, and of its gradient after the reduction"""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together."""

    n: int
    trained: int


def count_units(hp: Hyperparameters, dtype: torch.dtype | None) -> tuple[Unit, Unit, Unit, Unit]:
    """Return the FSDP units of the embedding, of a block, of the head, and of the root."""
    return _count_units(hp.model_dump_json(include=SHAPE_KEYS), dtype)


@functools.lru_cache(maxsize=256)
def _count_units(shape: str, dtype: torch.dtype | None) -> tuple[Unit, Unit, Unit, Unit]:
    hp = Hyperparameters.model_validate_json(shape)
    with torch.device("meta"):
        model = lora.add_adapters(Transformer(hp.model_copy(update={"n_layers": 1})), hp, dtype)
    wrapped = set(model.fsdp_units()) if hp.layer_wrap else set()

    def count(module: nn.Module) -> Unit:
        sizes = [(p.numel(), p.numel() * p.requires_grad) for p in module.parameters()]
        return Unit(*map(sum, zip(*sizes, strict=True)))

    parts = [(module, count(module)) for module in (model.embedding, model.blocks[0], model.head)]
    e, b, h = (unit if module in wrapped else Unit(0, 0) for module, unit in parts)
    rest = [(unit, hp.n_layers if module is model.blocks[0] else 1) for module, unit in parts if module not in wrapped]
    return e, b, h, Unit(sum(unit.n * times for unit, times in rest), sum(unit.trained * times for unit, times in rest))


def count(hp: Hyperparameters, dtype: torch.dtype | None) -> Unit:
    """Return the parameters of the model with its adapters."""
    e, b, h, root = count_units(hp, dtype)
    return Unit(e.n + hp.n_layers * b.n + h.n + root.n, e.trained + hp.n_layers * b.trained + h.trained + root.trained)


def state(hp: Hyperparameters, dtype: torch.dtype | None, shards: int) -> Parts:
    """Return the bytes of what exists between steps on one of `shards` ranks, by part."""
    total = count(hp, dtype)
    parameters = MASTER * total.trained + (dtype or torch.float32).itemsize * (total.n - total.trained)
    moment = getattr(torch, hp.optim_dtype).itemsize
    return {"parameters": parameters // shards, "moments": 2 * moment * total.trained // shards}


def peak(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str, shards: int, n_micro_batches: int) -> Parts:
    """Return the bytes at the moment of a step that has the most, see `moments`."""
    found = moments(hp, dtype, trace(hp, dtype, device_type), shards, n_micro_batches, device_type == "cuda")
    return max(found, key=lambda parts: sum(parts.values()))


def moments(
    hp: Hyperparameters, dtype: torch.dtype | None, pieces: Trace, shards: int, n_micro_batches: int, on_gpu: bool
) -> Iterator[Parts]:
    """Yield the moments of a step that can have the most bytes, each by part, for one of `shards` ranks.

    Args:
        dtype: compute dtype; None = float32.
        pieces: of the same hyperparameters.
        n_micro_batches: accumulation steps.
        on_gpu: what is offloaded to host memory does not count.
    """
    compute, layers, reshard = (dtype or torch.float32).itemsize, hp.n_layers, hp.reshard_after_forward
    e, b, h, root = count_units(hp, dtype)
    trained = count(hp, dtype).trained
    accumulates_shards = n_micro_batches > 1 and hp.sync_each_micro_step
    accumulates_all = n_micro_batches > 1 and not hp.sync_each_micro_step
    stays_all = accumulates_shards and not reshard  # until the backward pass of the last micro-step
    stays = not reshard or shards == 1  # no all-gather buffers in backward
    blocks = 0 if reshard else e.n + layers * b.n  # kept from forward to backward
    reduced_size = getattr(torch, hp.reduce_dtype).itemsize
    kept = {} if on_gpu and hp.cpu_offload else state(hp, dtype, shards)

    def moment(
        activations: int, units: int, buffer: int, done: int = 0, reducing: int = 0, grads: int = 0, first: bool = False
    ) -> Parts:
        """Return the bytes by part.

        Args:
            units: unsharded parameters.
            buffer: parameters in all-gather buffers.
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
        gathered = compute * (units + (0 if shards == 1 else buffer))
        return kept | {"gradients": reduced, "gathered": gathered, "activations": activations}

    def level(layer: int) -> int:  # activations before the forward pass of a block
        resident = RESIDENT - (layer < layers) if on_gpu and hp.activation_offload else layer
        return pieces.embedding.held + min(layer, resident) * pieces.block.held

    for first in {True, n_micro_batches == 1}:
        is_kept = not first and not reshard  # later micro-steps find all parameters gathered
        block, head = (0, 0) if is_kept else (b.n, h.n or b.n)
        units = root.n + (b.n if reshard else blocks)
        yield moment(level(layers - 1), units, 2 * block, first=first)
        yield moment(level(layers - 1) + pieces.block.forward, units, block, first=first)
        units = root.n + h.n + blocks
        yield moment(level(layers), units, (head + block if h.n else 0), first=first)
        yield moment(level(layers) + pieces.head.forward, units, head, first=first)
    units, prefetched = root.n + h.n + blocks, 0 if stays else b.n
    yield moment(level(layers) + pieces.head.backward, units, prefetched)
    units -= 0 if stays_all else h.n
    yield moment(level(layers) + pieces.head.after, units, prefetched, grads=h.trained)
    for layer in {0, 1, layers - 2, layers - 1} & set(range(layers)):
        done, before = h.trained + (layers - 1 - layer) * b.trained, h if layer == layers - 1 else b
        units = root.n + (b.n if reshard else blocks + h.n if stays_all else e.n + (layer + 1) * b.n)
        prefetched = b.n if layer and not stays else 0
        yield moment(level(layer) + pieces.block.backward, units, prefetched, done, before.trained)
        units -= 0 if stays_all else b.n
        yield moment(level(layer) + pieces.block.after, units, prefetched, done, grads=b.trained)
    done = h.trained + layers * b.trained
    yield moment(pieces.embedding.backward, root.n + (0 if reshard else e.n), 0, done, b.trained)
    yield moment(0, root.n, 0, done, grads=e.trained)
    yield moment(0, 0, 0, trained - root.trained, grads=root.trained)
