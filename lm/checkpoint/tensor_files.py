"""Sharded safetensors files: written by ranks, read row by row without trusting them.

The layout is that of PyTorch's `HuggingFaceStorageWriter(save_distributed=True)`: a file holds the
slices of tensors that one rank owns, and the header's metadata says at which offsets of the full
tensors they start. As FSDP shards tensors by rows, slices are rows. PyTorch's
`HuggingFaceStorageReader` and every safetensors tool open the files. A directory of Hugging Face
weights is the same without offsets.

The safetensors library serializes a file in memory before it writes. Here slices are written one
after the other, and the checksum is computed meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lm.checkpoint.manifest import CheckpointError
from lm.errors import ConfigError
from lm.fileio import MAX_JSON_BYTES, MAX_SLICES, find_pointer, open_regular, sync
from lm.shards import local_rows

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""by safetensors' code"""
DTYPE_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

MAX_FILE_BYTES = 2 << 30
READ_BYTES = 64 << 20
"""Read at a time, so that memory stays near the size of the tensors."""
WRITE_BYTES = 4 << 20
"""Written, and added to the checksum, at a time."""
SCAN_BYTES = 256 << 10
"""Read at a time to compare checksums: what fits into the cache of a core."""
_POINTER_BYTES = 64
"""Enough of a file to see that it is a pointer to another."""
MAX_DIMENSIONS = 8
"""of a tensor in a file; PyTorch's own have at most four"""
MAX_SIZE = 2**48
"""Exclusive limit of a dimension or an offset in a file, which are far smaller."""


State = Mapping[str, Mapping[str, Tensor]]
"""Live tensors by object, e.g. "model", and name: saving reads them, loading writes into them."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor in memory; a scalar is one row."""

    values: Tensor
    start: int
    """row of the full tensor that is the first one here"""


class TensorSlice(NamedTuple):
    """Consecutive rows of a tensor in a file; a scalar is one row."""

    path: Path
    begin: int
    """first byte in the file"""
    dtype: torch.dtype
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


# ---- writing


def owned_rows(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Rows]:
    """Return the rows that this rank writes, by tensor: each slice once, replicas take turns."""
    owned = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        replica, n_replicas = _replica(tensor, rank, world_size)
        local, start = local_rows(tensor)
        if index % n_replicas == replica and local.numel() > 0:
            owned[name] = Rows(local, start)
    return owned


def _replica(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Return which of the ranks with the same rows of `tensor` this is, and how many there are."""
    if not isinstance(tensor, DTensor):
        return rank, world_size
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    replica = 0
    n_replicas = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dim)
            replica = replica * size + coordinate[dim]
            n_replicas *= size
    return replica, n_replicas


def group_by_size(slices: Mapping[str, Rows]) -> list[list[str]]:
    """Return the names in groups of at most `MAX_FILE_BYTES`, or of one larger slice.

    Wider dtypes come first, so that the values of all are aligned in the file.
    """
    groups: list[list[str]] = []
    filled = MAX_FILE_BYTES
    for name in sorted(slices, key=lambda name: slices[name].values.itemsize, reverse=True):
        n_bytes = slices[name].values.nbytes
        if filled + n_bytes > MAX_FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += n_bytes
    return groups


def write_tensors(path: Path, slices: Mapping[str, Rows]) -> int:
    """Write `slices` to the new file `path`, durably.

    Returns:
        The file's CRC-32C.
    """
    header = _header(slices)
    with path.open("xb") as file:
        file.write(header)
        checksum = google_crc32c.value(header)
        for rows in slices.values():
            in_bytes = rows.values.cpu().contiguous().reshape(-1).view(torch.uint8)
            for block in in_bytes.split(WRITE_BYTES):
                content = block.numpy().data
                file.write(content)
                checksum = google_crc32c.extend(checksum, bytes(content))
        sync(file)
    return checksum


def _header(slices: Mapping[str, Rows]) -> bytes:
    """Return what precedes the values in a safetensors file: its length as uint64, and JSON."""
    entries: dict[str, Any] = {}
    sharding = {}
    end = 0
    for name, (values, start) in slices.items():
        begin = end
        end = begin + values.nbytes
        entries[name] = {
            "dtype": DTYPE_CODES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
        offsets = [0] * values.dim()
        if offsets:
            offsets[0] = start
        sharding[name] = {"saved_offsets": offsets}
    entries["__metadata__"] = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(sharding),
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


# ---- reading


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
        except (KeyError, TypeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: damaged header: {problem[:200]}") from None
    return found


def _read_header(path: Path) -> Iterator[tuple[str, TensorSlice]]:
    """Yield the tensors of a file by name.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the header is damaged.
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
    metadata = header.pop("__metadata__", {})
    sharding: dict[str, Any] = {}  # of no tensor: a file without offsets
    if "DCP_SHARDING_INFO" in metadata:
        sharding = json.loads(metadata["DCP_SHARDING_INFO"], object_pairs_hook=_unique_names)
    values_start = 8 + length
    extents = []
    for name, entry in header.items():
        shape = _sizes(entry["shape"], name)
        begin, end = _sizes(entry["data_offsets"], name)
        dtype = TORCH_DTYPES.get(entry["dtype"])
        if dtype is None:
            code = str(entry["dtype"])[:20]
            raise ValueError(f"{name[:80]}: dtype {code} is not one of {', '.join(TORCH_DTYPES)}")
        offsets = (0,) * len(shape)
        if sharding:
            offsets = _sizes(sharding[name]["saved_offsets"], name)
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


class Source(NamedTuple):
    """Where the values of a tensor come from: the rows from `start` on of a stored tensor.

    If `transposed`, they are the columns from `start` on, which become rows.
    """

    slices: Sequence[TensorSlice]
    start: int = 0
    transposed: bool = False


@torch.no_grad()
def read_into(tensor: Tensor, source: Source) -> None:
    """Fill this rank's rows of `tensor` in place, converting the dtype; reads only what is needed.

    Raises:
        CheckpointError: a file was cut short since its header was read, or holds inf or NaN.
    """
    local, start = local_rows(tensor)
    if local.numel() == 0:
        return
    first_row = source.start + start
    columns = slice(None)
    if source.transposed:  # a rank's rows are columns of all stored rows
        columns = slice(first_row, first_row + len(local))
        local = local.T
        first_row = 0
    if local.dim() == 0:
        local = local.view(1)
    end_row = first_row + len(local)
    for piece in source.slices:
        first = max(first_row, piece.start)
        end = min(end_row, piece.start + piece.n_rows)
        for row, values in _read_rows(piece, first - piece.start, end - piece.start):
            if values.dtype == torch.float64:
                values = values.to(local.dtype)  # can overflow
            _require_finite(values, piece.path)
            at = piece.start + row - first_row
            if source.transposed:
                values = values[:, columns]
            local[at : at + len(values)].copy_(values)


def _require_finite(values: Tensor, path: Path) -> None:
    if not _is_finite(values):
        remedy = "use other weights, or download them again"
        raise CheckpointError(f"{path}: contains inf or NaN; {remedy}")


def _is_finite(values: Tensor) -> bool:
    if values.dtype.itemsize == 1:  # integers, or float8, for which PyTorch has no minimum
        return True
    # The sum is fast, and finite only if all values are; that of large values can overflow.
    if torch.isfinite(values.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def _read_rows(piece: TensorSlice, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rows `first` to `end` (exclusive) of `piece` in blocks, each with its first row."""
    if first >= end:
        return
    rows_per_block = max(1, READ_BYTES // max(1, piece.row_bytes))
    try:
        with open(piece.path, "rb", opener=open_regular) as file:
            for start in range(first, end, rows_per_block):
                n_rows = min(rows_per_block, end - start)
                buffer = bytearray(n_rows * piece.row_bytes)
                offset = piece.begin + start * piece.row_bytes
                if os.preadv(file.fileno(), [buffer], offset) < len(buffer):
                    raise CheckpointError(f"{piece.path}: ends before byte {offset + len(buffer)}")
                values = torch.frombuffer(buffer, dtype=piece.dtype)
                yield start, values.view(n_rows, *piece.shape[1:])
    except OSError as error:
        raise CheckpointError(f"{piece.path}: cannot be read: {error.strerror}") from None


class FileContent(NamedTuple):
    """What is in a file."""

    crc32c: int
    is_finite: bool
    """whether no value is inf or NaN"""


def scan_file(path: Path, slices: Iterable[TensorSlice]) -> FileContent:
    """Read a file once, which holds `slices`, in little memory.

    Raises:
        CheckpointError: the file cannot be read.
    """
    checksum = 0
    is_finite = True
    try:
        with open(path, "rb", opener=open_regular) as file:
            for piece in sorted(slices, key=lambda piece: piece.begin):
                for block in _read_blocks(file, piece.begin - file.tell()):
                    checksum = google_crc32c.extend(checksum, bytes(block))
                for block in _read_blocks(file, piece.n_rows * piece.row_bytes):
                    checksum = google_crc32c.extend(checksum, bytes(block))
                    if not _is_finite(torch.frombuffer(block, dtype=piece.dtype)):
                        is_finite = False
            for block in _read_blocks(file, os.fstat(file.fileno()).st_size - file.tell()):
                checksum = google_crc32c.extend(checksum, bytes(block))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return FileContent(checksum, is_finite)


def _read_blocks(file: BufferedReader, n_bytes: int) -> Iterator[bytearray]:
    """Yield the next `n_bytes` of `file` in blocks, of whole values; fewer if the file ends."""
    while n_bytes > 0:
        block = bytearray(min(n_bytes, SCAN_BYTES))
        if file.readinto(block) < len(block):
            return
        yield block
        n_bytes -= len(block)
