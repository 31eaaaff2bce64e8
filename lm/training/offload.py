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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

RESIDENT = 2
"""Blocks whose tensors are on the device at a time."""
SMALL = 4096
"""Tensors of fewer bytes are not copied."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


@dataclass(eq=False)
class _Activation:
    layout: Layout
    tensor: Tensor | None  # on the device
    host: Tensor | None = None
    n_uses: int = 0  # how often backward still reads it


@dataclass(eq=False)
class _Saved:
    """What a block saves for backward, each tensor once, by address and layout."""

    activations: dict[tuple[int, Layout], _Activation] = field(default_factory=dict)
    copied: Any = None  # event after the last copy
    in_backward: bool = False


class ActivationOffload:
    """Activation offloading for consecutive `blocks`, whose `forward` it replaces."""

    def __init__(self, blocks: Sequence[nn.Module], device_type: str) -> None:
        self._device_type = device_type
        self._backend = torch.get_device_module(device_type)  # the streams of torch.cpu do nothing
        self._stream = self._backend.Stream()
        self._saved = [_Saved() for _ in blocks]
        self._pool = defaultdict[Layout, list[Tensor]](list)  # host memory that is not in use
        for index, block in enumerate(blocks):
            block.forward = partial(self._forward, index, block, block.forward)

    def _forward(
        self, index: int, block: nn.Module, forward: Callable[..., Tensor], x: Tensor, *inputs: Any
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *inputs)
        if index >= RESIDENT:
            self._free(self._saved[index - RESIDENT])
        saved = self._saved[index] = _Saved()
        is_copied = index < len(self._saved) - RESIDENT
        # FSDP frees and refills the storage of parameters, and all blocks share the other inputs.
        others = {
            storage
            for value in (*block.parameters(), *tree_leaves(inputs))
            for storage in _storages(value)
        }

        def pack(tensor: Tensor) -> Tensor | _Activation:
            is_activation = type(tensor) is Tensor and tensor.device.type == self._device_type
            if (
                not is_activation
                or tensor.nbytes < SMALL
                or 0 in tensor.stride()
                or {*_storages(tensor)} & others
            ):
                return tensor
            layout = tensor.shape, tensor.stride(), tensor.dtype
            key = tensor.data_ptr(), layout
            if key not in saved.activations:
                activation = saved.activations[key] = _Activation(layout, tensor.detach())
                if is_copied:
                    self._copy_to_host(activation)
            saved.activations[key].n_uses += 1
            return saved.activations[key]

        def unpack(packed: Tensor | _Activation) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if not saved.in_backward:
                saved.in_backward = True
                self._copy_to_device(saved)  # unless the block after this one has
                self._backend.current_stream().wait_event(saved.copied)
                if index:
                    self._copy_to_device(self._saved[index - 1])
            tensor = packed.tensor
            packed.n_uses -= 1
            if not packed.n_uses:
                packed.tensor = None
            assert tensor is not None, "backward runs once"
            return tensor

        with saved_tensors_hooks(pack, unpack):
            y = forward(x, *inputs)
        saved.copied = self._stream.record_event()
        return y

    def _copy_to_host(self, activation: _Activation) -> None:
        tensor, free = activation.tensor, self._pool[activation.layout]
        assert tensor is not None
        pin = self._device_type != "cpu"
        activation.host = (
            free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=pin)
        )
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            activation.host.copy_(tensor, non_blocking=True)

    def _free(self, saved: _Saved) -> None:
        """Drop the tensors on the device, whose memory the current stream may overwrite once they are copied."""
        self._backend.current_stream().wait_event(saved.copied)
        for activation in saved.activations.values():
            activation.tensor = None

    def _copy_to_device(self, saved: _Saved) -> None:
        copies = list[tuple[Tensor, Tensor]]()
        for activation in saved.activations.values():
            if activation.tensor is None and activation.host is not None:
                shape, strides, dtype = (
                    activation.layout
                )  # compiled code asserts the strides of what it saved
                activation.tensor = torch.empty_strided(
                    shape, strides, dtype=dtype, device=self._device_type
                )
                copies.append((activation.tensor, activation.host))
                self._pool[activation.layout].append(
                    activation.host
                )  # later copies to it are on the same stream
                activation.host = None
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        saved.copied = self._stream.record_event()


def _storages(value: Any) -> Iterator[int]:
    """Yield the addresses of a tensor's storage, or of those inside a subclass, e.g. of a float8 tensor."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _storages(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
