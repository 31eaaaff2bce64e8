"""Activation offloading: host memory holds what blocks save for backward.

A tensor is copied to pinned memory when autograd saves it, and back when backward reads it, by the
stream that computes; no host waits. This is what `torch.autograd.graph.save_on_cpu` does, which
would copy weights, too, a tensor once for each operator that saves it, and lose the strides that
compiled code asserts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

SMALL = 4096
"""Tensors of fewer bytes are not copied."""


def offload_activations(block: nn.Module, device_type: str) -> None:
    """Let host memory hold what `block` saves for backward: replace its `forward`.

    Args:
        device_type: of the tensors that are copied.
    """
    block.forward = partial(_forward, block, block.forward, device_type)


def _forward(
    block: nn.Module,
    forward: Callable[..., Tensor],
    device_type: str,
    *inputs: Any,
    **options: Any,
) -> Tensor:
    # FSDP frees and refills the storage of parameters, and all blocks share the inputs after x.
    kept: set[int] = set()
    for value in (*block.parameters(), *tree_leaves((inputs[1:], options))):
        kept.update(_storages(value))
    with saved_tensors_hooks(_Copies(device_type, kept).pack, _unpack):
        return forward(*inputs, **options)


@dataclass(eq=False)
class _OnHost:
    """A tensor that was copied to the host."""

    tensor: Tensor
    strides: tuple[int, ...]
    """of the one that was copied"""
    device: torch.device
    on_device: Tensor | None = None
    """copied back, until it is read for the last time"""
    n_uses: int = 0
    """how often backward still reads it"""


class _Copies:
    """Copies what a block saves in one forward pass, each tensor once."""

    def __init__(self, device_type: str, kept: Set[int]) -> None:
        self._device_type = device_type
        self._kept = kept
        """storages that are not copied"""
        self._on_host: dict[tuple[Any, ...], _OnHost] = {}
        """by storage, offset and layout"""
        self._sources: list[Tensor] = []
        """exist until the pass ends, so that no other storage has the identity of theirs"""

    def pack(self, tensor: Tensor) -> Tensor | _OnHost:
        """Return what autograd saves instead of `tensor`."""
        is_wrapper = is_traceable_wrapper_subclass(tensor)
        is_on_device = tensor.device.type == self._device_type
        if is_wrapper or not is_on_device or tensor.nbytes < SMALL:
            return tensor
        strides = tensor.stride()
        is_expanded = 0 in strides  # it has more values than its memory
        storage = tensor.untyped_storage()._cdata
        if is_expanded or storage in self._kept:
            return tensor
        key = (storage, int(tensor.storage_offset()), tensor.shape, strides, tensor.dtype)
        if key not in self._on_host:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
            self._on_host[key] = _OnHost(copy, strides, tensor.device)
            self._sources.append(tensor.detach())
        self._on_host[key].n_uses += 1
        return self._on_host[key]


def _unpack(packed: Tensor | _OnHost) -> Tensor:
    """Return the tensor that was packed."""
    if isinstance(packed, Tensor):
        return packed
    tensor = packed.on_device
    if tensor is None:
        host = packed.tensor
        # With its strides, which compiled code asserts.
        tensor = torch.empty_strided(
            host.shape, packed.strides, dtype=host.dtype, device=packed.device
        )
        tensor.copy_(host, non_blocking=True)
    packed.n_uses -= 1
    packed.on_device = tensor if packed.n_uses > 0 else None
    return tensor


def _storages(value: Any) -> Iterator[int]:
    """Yield the identity of a tensor's storage, or of those inside of a subclass, e.g. float8."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _storages(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.untyped_storage()._cdata
