"""Copies of the state in host memory, from which checkpoints are written while training continues."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future

import torch
from torch import Tensor

Slices = dict[str, dict[str, tuple[Tensor, int]]]
"""The slices that this rank writes and their first rows: by object, e.g. "model", and tensor name."""

ALIGNMENT = 64
"""Slices start at multiples of this many bytes of the buffer."""


def buffer_size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of host memory for copies of `tensors`."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


class Stager:
    """Copies slices of the state to host memory, which a thread allocates once.

    On GPUs the memory is pinned and the copies run on a separate stream: the host does not wait for
    them, and only the next optimizer step does, on the device. On CPUs the slices are copied before
    `copy` returns.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._sources: Slices = {}
        self._buffer: Future[Tensor] = Future()
        threading.Thread(
            target=self._allocate, args=(n_bytes,), name="allocate", daemon=True
        ).start()

    def _allocate(self, n_bytes: int) -> None:
        try:
            buffer = torch.empty(
                n_bytes, dtype=torch.uint8
            ).zero_()  # written to, so that all pages exist
            if self._stream is not None and n_bytes:
                torch.cuda.set_device(self._device)  # a thread starts on the first GPU
                # `pin_memory=True` would round the size up to a power of two.
                status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0))  # type: ignore
                if status:
                    raise RuntimeError(
                        f"cudaHostRegister of {n_bytes:,} bytes failed with error {status}"
                    )
                weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr())  # type: ignore
            self._buffer.set_result(buffer)
        except BaseException as error:
            self._buffer.set_exception(error)

    def copy(self, slices: Slices) -> Slices:
        """Start to copy `slices` and return the copies, which are complete after `synchronize`."""
        buffer, end, copies = self._buffer.result(), 0, {part: {} for part in slices}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, owned in slices.items():
                for name, (tensor, start) in owned.items():
                    view = buffer[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    copies[part][name] = view.copy_(tensor, non_blocking=True), start
                    end += buffer_size([tensor])
        if self._stream is not None:
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)
        self._sources = slices  # not to be freed before they are copied
        return copies

    def synchronize(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def protect_copies(self) -> None:
        """Make kernels that the current stream runs from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
