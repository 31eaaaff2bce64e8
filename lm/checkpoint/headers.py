"""The headers of sharded safetensors files, read without trusting them, and without PyTorch."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.checkpoint.manifest import CheckpointError
from lm.errors import ConfigError
from lm.fileio import MAX_JSON_BYTES, MAX_SLICES, find_pointer, open_regular


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
"""Exclusive limit of a dimension or an offset in a file, which are far smaller."""


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
        except RecursionError:
            raise CheckpointError(f"{path}: damaged header: nested too deeply") from None
    return found


def _read_header(path: Path) -> Iterator[tuple[str, TensorSlice]]:
    """Yield the tensors of a file by name.

    Raises:
        ValueError, RecursionError: the header is damaged.
    """
    with open(path, "rb", opener=open_regular) as file:
        file_size = os.fstat(file.fileno()).st_size
        start = file.read(_POINTER_BYTES)
        pointer = find_pointer(start)
        if pointer is not None:
            name, remedy = pointer
            raise ConfigError(f"{path}: a {name}; {remedy}")
        if file_size < 8:
            raise ValueError(f"the file has {file_size} bytes, a header at least 8")
        (length,) = struct.unpack_from("<Q", start)
        if length > min(file_size - 8, MAX_JSON_BYTES):
            sizes = f"{length} bytes of header in {file_size} bytes"
            raise ValueError(f"{sizes}; at most {MAX_JSON_BYTES} are read")
        file.seek(8)
        header = json.loads(file.read(length), object_pairs_hook=_unique_names)
    if not isinstance(header, dict):
        raise ValueError("not a JSON object")
    sharding = _read_sharding(header.pop("__metadata__", {}))
    values_start = 8 + length
    extents = []
    for name, entry in header.items():
        shape = _sizes(_member(entry, "shape", name), name)
        extent = _sizes(_member(entry, "data_offsets", name), name)
        if len(extent) != 2:
            raise ValueError(f"{name[:80]}: {len(extent)} data_offsets, not 2")
        begin, end = extent
        code = str(_member(entry, "dtype", name))
        dtype = DTYPES.get(code)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise ValueError(f"{name[:80]}: dtype {code[:20]} is not one of {known}")
        offsets = (0,) * len(shape)
        if sharding:
            piece = _member(sharding, name, _SHARDING)
            offsets = _sizes(_member(piece, "saved_offsets", f"{_SHARDING}: {name}"), name)
        is_in_file = begin < end and values_start + end <= file_size
        has_size = end - begin == math.prod(shape) * dtype.itemsize
        is_rows = len(offsets) == len(shape) and not any(offsets[1:])
        if not (is_in_file and has_size and is_rows):
            raise ValueError(f"{name[:80]}: shape and offsets do not fit the file")
        extents.append((begin, end))
        start = offsets[0] if shape else 0
        yield name, TensorSlice(path, values_start + begin, dtype, shape, start)
    n_bytes = 0
    for begin, end in sorted(extents):
        if begin != n_bytes:
            raise ValueError("tensors overlap, or have bytes between them")
        n_bytes = end
    if values_start + n_bytes != file_size:
        n_more = file_size - values_start - n_bytes
        raise ValueError(f"the file is {n_more:,} bytes longer than its tensors")


def _read_sharding(metadata: Any) -> Any:
    """Return what the metadata of a file say of its slices; {} = its tensors are complete."""
    if not isinstance(metadata, dict):
        raise ValueError("__metadata__ is not a JSON object")
    return json.loads(str(metadata.get(_SHARDING, "{}")), object_pairs_hook=_unique_names)


def _member(value: Any, key: str, place: str) -> Any:
    """Return a member of a JSON object; raise ValueError if `value` has none of that name."""
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"{place[:80]}: has no {key[:80]}")
    return value[key]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("duplicate names")
    return entries


def _sizes(values: Any, name: str) -> tuple[int, ...]:
    """Return `values` as a shape or as offsets; raise ValueError if they are none."""
    is_short_list = isinstance(values, list) and len(values) <= MAX_DIMENSIONS
    if not is_short_list or not all(type(v) is int and 0 <= v < MAX_SIZE for v in values):
        raise ValueError(f"{name[:80]}: {str(values)[:60]} are not sizes")
    return tuple(values)


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
