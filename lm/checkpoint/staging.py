"""Copies of the state in host memory, to be written as a checkpoint while training continues."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future

import torch
from torch import Tensor

from lm.shards import Rows

Slices = dict[str, dict[str, Rows]]
"""The rows that this rank writes, by object, e.g. "model", and tensor name."""

ALIGNMENT = 64
"""Copies start at multiples of this many bytes of the buffer."""


def buffer_size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of host memory for copies of `tensors`."""
    return sum(_aligned_size(tensor) for tensor in tensors)


def _aligned_size(tensor: Tensor) -> int:
    n_blocks = -(-tensor.nbytes // ALIGNMENT)  # rounded up
    return n_blocks * ALIGNMENT


class Stager:
    """Copies rows of the state to host memory, which a thread allocates once.

    On GPUs the memory is pinned and the copies run on a separate stream: the host does not wait for
    them, and only the next optimizer step does, on the device. On CPUs the rows are copied before
    `copy` returns.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._sources: Slices = {}
        self._buffer: Future[Tensor] = Future()
        thread = threading.Thread(
            target=self._allocate, args=(n_bytes,), name="allocate", daemon=True
        )
        thread.start()

    def _allocate(self, n_bytes: int) -> None:
        try:
            buffer = torch.empty(n_bytes, dtype=torch.uint8)
            buffer.zero_()  # written to, so that all pages exist
            if self._stream is not None and n_bytes > 0:
                torch.cuda.set_device(self._device)  # a thread starts on the first GPU
                _pin(buffer)
            self._buffer.set_result(buffer)
        except BaseException as error:
            self._buffer.set_exception(error)

    def copy(self, slices: Slices) -> Slices:
        """Start to copy `slices` and return the copies, which are complete after `synchronize`."""
        buffer = self._buffer.result()
        copies: Slices = {}
        begin = 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, part_slices in slices.items():
                copies[part] = {}
                for name, (values, start) in part_slices.items():
                    place = buffer[begin : begin + values.nbytes]
                    copy = place.view(values.dtype).view(values.shape)
                    copy.copy_(values, non_blocking=True)
                    copies[part][name] = Rows(copy, start)
                    begin += _aligned_size(values)
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


def _pin(buffer: Tensor) -> None:
    """Pin the memory of `buffer`; `pin_memory=True` would round its size up to a power of two."""
    cuda = torch.cuda.cudart()
    status = int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))  # type: ignore
    if status != 0:
        problem = f"cudaHostRegister of {buffer.nbytes:,} bytes failed"
        raise RuntimeError(f"{problem} with error {status}")
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())  # type: ignore
