"""Activation offloading: what blocks save for backward is in host memory while other blocks run.

A separate stream copies the tensors of block i to the host while block i + 1 runs forward, and back
while block i + 1 runs backward. So the device holds the tensors of two blocks at a time, and those
of the last two are not copied. The streams wait for each other, the host for none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

RESIDENT = 2
"""Blocks whose tensors are on the device at a time."""
SMALL = 4096
"""Tensors of fewer bytes are not copied."""


class Layout(NamedTuple):
    """What a tensor is allocated with; compiled code asserts the strides of what it has saved."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _Activation:
    layout: Layout
    on_device: Tensor | None
    on_host: Tensor | None = None
    n_uses: int = 0
    """how often backward still reads it"""


@dataclass(eq=False)
class _Saved:
    """What a block saves for backward."""

    activations: dict[tuple[int, int, Layout], _Activation] = field(default_factory=dict)
    """each tensor once, by storage, offset and layout"""
    copied: Any = None
    """event after the last copy"""
    in_backward: bool = False


class ActivationOffload:
    """Activation offloading for consecutive `blocks`, whose `forward` it replaces."""

    def __init__(self, blocks: Sequence[nn.Module], device_type: str) -> None:
        self._device_type = device_type
        self._backend = torch.get_device_module(device_type)  # the streams of torch.cpu do nothing
        self._stream = self._backend.Stream()
        self._saved = [_Saved() for _ in blocks]
        self._unused: dict[Layout, list[Tensor]] = defaultdict(list)
        """host memory, for the next tensor of the layout"""
        for index, block in enumerate(blocks):
            block.forward = partial(self._forward, index, block, block.forward)

    def _forward(
        self,
        index: int,
        block: nn.Module,
        forward: Callable[..., Tensor],
        *inputs: Any,
        **options: Any,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        if index >= RESIDENT:
            self._free(self._saved[index - RESIDENT])
        saved = _Saved()
        self._saved[index] = saved
        is_copied = index < len(self._saved) - RESIDENT
        # FSDP frees and refills the storage of parameters, and all blocks share the inputs after x.
        excluded: set[int] = set()
        for value in (*block.parameters(), *tree_leaves((inputs[1:], options))):
            excluded.update(_storages(value))

        pack = partial(self._pack, saved, is_copied, excluded)
        unpack = partial(self._unpack, saved, index)
        with saved_tensors_hooks(pack, unpack):
            y = forward(*inputs, **options)
        saved.copied = self._stream.record_event()
        return y

    def _pack(
        self, saved: _Saved, is_copied: bool, excluded: set[int], tensor: Tensor
    ) -> Tensor | _Activation:
        """Return what autograd saves instead of `tensor`, which a block needs in backward."""
        is_wrapper = is_traceable_wrapper_subclass(tensor)
        is_on_device = tensor.device.type == self._device_type
        if is_wrapper or not is_on_device or tensor.nbytes < SMALL:
            return tensor
        is_expanded = 0 in tensor.stride()  # it has more values than its memory
        if is_expanded or not excluded.isdisjoint(_storages(tensor)):
            return tensor
        layout = Layout(tensor.shape, tensor.stride(), tensor.dtype)
        key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), layout)
        if key not in saved.activations:
            activation = _Activation(layout, tensor.detach())
            saved.activations[key] = activation
            if is_copied:
                self._copy_to_host(activation)
        saved.activations[key].n_uses += 1
        return saved.activations[key]

    def _unpack(self, saved: _Saved, index: int, packed: Tensor | _Activation) -> Tensor:
        """Return the tensor that `_pack` replaced.

        The first one of a block starts the copies of the block that backward reaches next.
        """
        if isinstance(packed, Tensor):
            return packed
        if not saved.in_backward:
            saved.in_backward = True
            self._copy_to_device(saved)  # unless the block after this one has
            self._backend.current_stream().wait_event(saved.copied)
            if index > 0:
                self._copy_to_device(self._saved[index - 1])
        tensor = packed.on_device
        assert tensor is not None, "backward runs once"
        packed.n_uses -= 1
        if packed.n_uses == 0:
            packed.on_device = None
        return tensor

    def _copy_to_host(self, activation: _Activation) -> None:
        tensor = activation.on_device
        assert tensor is not None
        unused = self._unused[activation.layout]
        if unused:
            host = unused.pop()
        else:
            is_pinned = self._device_type != "cpu"
            host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        activation.on_host = host
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            host.copy_(tensor, non_blocking=True)

    def _free(self, saved: _Saved) -> None:
        """Drop the tensors on the device.

        The current stream waits for their copies, as it may overwrite the memory.
        """
        self._backend.current_stream().wait_event(saved.copied)
        for activation in saved.activations.values():
            activation.on_device = None

    def _copy_to_device(self, saved: _Saved) -> None:
        copies: list[tuple[Tensor, Tensor]] = []
        for activation in saved.activations.values():
            host = activation.on_host
            if activation.on_device is not None or host is None:
                continue
            shape, strides, dtype = activation.layout
            device = torch.empty_strided(shape, strides, dtype=dtype, device=self._device_type)
            activation.on_device = device
            activation.on_host = None
            # Later copies into this memory are on the same stream, so they come after this one.
            self._unused[activation.layout].append(host)
            copies.append((device, host))
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        saved.copied = self._stream.record_event()


def _storages(value: Any) -> Iterator[int]:
    """Yield the identity of a tensor's storage, or of those inside of a subclass, e.g. float8."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _storages(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.untyped_storage()._cdata
