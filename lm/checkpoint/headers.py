"""The headers of sharded safetensors files, read without trusting them, and without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from lm.checkpoint.manifest import CheckpointError
from lm.errors import ConfigError
from lm.fileio import MAX_JSON_BYTES, MAX_SLICES, find_pointer, open_regular, parse_json


class StoredDtype(NamedTuple):
    """The dtype of the values in a file."""

    name: str
    """PyTorch's"""
    itemsize: int
    """bytes"""

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {
    "F64": StoredDtype("float64", 8),
    "F32": StoredDtype("float32", 4),
    "F16": StoredDtype("float16", 2),
    "BF16": StoredDtype("bfloat16", 2),
    "I64": StoredDtype("int64", 8),
    "I32": StoredDtype("int32", 4),
    "I16": StoredDtype("int16", 2),
    "I8": StoredDtype("int8", 1),
    "U8": StoredDtype("uint8", 1),
    "BOOL": StoredDtype("bool", 1),
    "F8_E4M3": StoredDtype("float8_e4m3fn", 1),
    "F8_E5M2": StoredDtype("float8_e5m2", 1),
    "F8_E8M0": StoredDtype("float8_e8m0fnu", 1),
}
"""by safetensors' code"""

_SHARDING = "DCP_SHARDING_INFO"
"""key of the metadata in which PyTorch says what a file has of each tensor"""
_POINTER_BYTES = 64
"""Enough of a file to see that it is a pointer to another."""
MAX_DIMENSIONS = 8
"""of a tensor in a file; PyTorch's own have at most four"""
MAX_SIZE = 2**48
"""Exclusive limit of an offset in a file, which are far smaller."""


class TensorSlice(NamedTuple):
    """Consecutive rows of a tensor in a file; a scalar is one row."""

    path: Path
    begin: int
    """first byte in the file"""
    dtype: StoredDtype
    shape: tuple[int, ...]
    start: int
    """row of the full tensor that is the first one here"""

    @property
    def n_rows(self) -> int:
        if not self.shape:
            return 1
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def read_headers(paths: Iterable[Path]) -> dict[str, list[TensorSlice]]:
    """Return the slices in the files `paths`, by tensor name; each lies inside of its file.

    Raises:
        CheckpointError: a file cannot be opened, or its header is damaged or hostile.
        ConfigError: a file is a pointer to one that was not downloaded.
    """
    found: dict[str, list[TensorSlice]] = {}
    allowed = MAX_SLICES  # and one more per KiB of data
    for path in paths:
        try:
            for name, piece in _read_header(path):
                found.setdefault(name, []).append(piece)
                allowed -= 1
            allowed += path.stat().st_size >> 10
            if allowed < 0:
                limit = f"{MAX_SLICES:,} entries, and one per KiB of data"
                raise ValueError(f"more than {limit}, in all files")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged header: {str(error)[:200]}") from None
    return found


def _read_header(path: Path) -> Iterator[tuple[str, TensorSlice]]:
    """Yield the tensors of a file by name.

    Raises:
        ValueError: the header is damaged.
    """
    with open(path, "rb", opener=open_regular) as file:
        start = file.read(_POINTER_BYTES)
    pointer = find_pointer(start)
    if pointer is not None:
        name, remedy = pointer
        raise ConfigError(f"{path}: a {name}; {remedy}")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_JSON_BYTES:
        raise ValueError(f"{length} bytes of header; at most {MAX_JSON_BYTES} are read")
    try:
        # The library checks that each tensor has its size and that they fill the file exactly.
        opened = safe_open(path, "numpy")
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        if "not fully covered" in reason:
            reason = "the file is cut short, or longer than its tensors"
        raise ValueError(reason) from None
    with opened as tensors:
        metadata = tensors.metadata() or {}
        # What the file has of each tensor; {} = all of it.
        sharding = parse_json(metadata.get(_SHARDING, "{}").encode())
        begin = 8 + length
        for name in tensors.offset_keys():
            stored = tensors.get_slice(name)
            shape = tuple(stored.get_shape())
            dtype = DTYPES.get(stored.get_dtype())
            if dtype is None:
                known = ", ".join(DTYPES)
                raise ValueError(f"{name[:80]}: dtype {stored.get_dtype()} is not one of {known}")
            if 0 in shape or len(shape) > MAX_DIMENSIONS:
                limit = f"more than {MAX_DIMENSIONS} dimensions"
                raise ValueError(f"{name[:80]}: no values, or {limit}")
            row = 0
            if sharding:
                row = _first_row(sharding, name, len(shape))
            piece = TensorSlice(path, begin, dtype, shape, row)
            begin += piece.n_rows * piece.row_bytes
            yield name, piece


def _first_row(sharding: Any, name: str, n_dimensions: int) -> int:
    """Return the row of the full tensor that comes first in a file.

    Raises:
        ValueError: what the file has of it are no rows.
    """
    offsets: Any = None
    with suppress(TypeError, LookupError):
        offsets = sharding[name]["saved_offsets"]
    is_of_tensor = isinstance(offsets, list) and len(offsets) == n_dimensions
    if not is_of_tensor or not all(type(v) is int and 0 <= v < MAX_SIZE for v in offsets):
        raise ValueError(f"{name[:80]}: {_SHARDING} has no offsets of it")
    if any(offsets[1:]):
        raise ValueError(f"{name[:80]}: not sharded by rows")
    return offsets[0] if offsets else 0


def full_shape(slices: Sequence[TensorSlice]) -> tuple[int, ...] | None:
    """Return the shape of the tensor that `slices` cover exactly once, else None."""
    first = slices[0]
    if not first.shape:
        return () if len(slices) == 1 else None
    n_rows = 0
    for piece in sorted(slices, key=lambda piece: (piece.start, piece.n_rows)):
        if piece.start != n_rows:  # a gap or an overlap
            return None
        if (piece.shape[1:], piece.dtype) != (first.shape[1:], first.dtype):
            return None
        n_rows += piece.n_rows
    return n_rows, *first.shape[1:]
