"""The values in sharded safetensors files: written by ranks, read row by row.

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
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lm.checkpoint.headers import DTYPES, TensorSlice
from lm.checkpoint.manifest import CheckpointError
from lm.fileio import open_regular, sync
from lm.shards import Rows, local_rows

DTYPE_CODES: Mapping[torch.dtype, str] = {
    getattr(torch, dtype.name): code for code, dtype in DTYPES.items()
}
"""safetensors' codes"""

MAX_FILE_BYTES = 2 << 30
MAX_FILE_TENSORS = 1 << 13
"""whose header, with names of 400 characters, is one that is read: `MAX_JSON_BYTES`"""
READ_BYTES = 4 << 20
"""Read at a time: what fits into the cache of a core, where it is checked and converted."""
WRITE_BYTES = 1 << 20
"""Written, and added to the checksum, at a time: more would be new memory each time."""

State = Mapping[str, Mapping[str, Tensor]]
"""Live tensors by object, e.g. "model", and name: saving reads them, loading writes into them."""


# ---- writing


def owned_rows(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Rows]:
    """Return the rows that this rank writes, by tensor: each slice once, replicas take turns."""
    owned = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        replica, n_replicas = _replica(tensor, rank, world_size)
        rows = local_rows(tensor)
        if index % n_replicas == replica and rows.values.numel() > 0:
            owned[name] = rows
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
    """Return the names in groups of at most `MAX_FILE_TENSORS`.

    A group has at most `MAX_FILE_BYTES`, or is one larger slice.

    Wider dtypes come first, so that the values of all are aligned in the file.
    """
    groups: list[list[str]] = []
    filled = MAX_FILE_BYTES
    for name in sorted(slices, key=lambda name: slices[name].values.itemsize, reverse=True):
        n_bytes = slices[name].values.nbytes
        if filled + n_bytes > MAX_FILE_BYTES or len(groups[-1]) == MAX_FILE_TENSORS:
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


def torch_dtype(piece: TensorSlice) -> torch.dtype:
    """Return the dtype of the values of `piece`."""
    return getattr(torch, piece.dtype.name)


class Source(NamedTuple):
    """Where the values of a tensor come from: the rows from `start` on of a stored tensor."""

    slices: Sequence[TensorSlice]
    start: int = 0


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
    if local.dim() == 0:
        local = local.view(1)
    end_row = first_row + len(local)
    for piece in source.slices:
        first = max(first_row, piece.start)
        end = min(end_row, piece.start + piece.n_rows)
        if first >= end:
            continue
        target = local[first - first_row : end - first_row]
        is_direct = _is_stored_alike(target, piece)
        place = target if is_direct else None
        for values in _read_rows(piece, first - piece.start, end - piece.start, place):
            if values.dtype == torch.float64:
                values = values.to(local.dtype)  # can overflow
            require_finite(values, piece.path)
            if is_direct:
                continue
            target[: len(values)].copy_(values)
            target = target[len(values) :]


def _is_stored_alike(target: Tensor, piece: TensorSlice) -> bool:
    """Return whether `target` holds its values in memory as a file holds those of `piece`."""
    is_on_host = target.device.type == "cpu"
    return is_on_host and target.dtype == torch_dtype(piece) and target.is_contiguous()


def require_finite(values: Tensor, path: Path) -> None:
    """Raise CheckpointError if values that the file `path` holds are inf or NaN."""
    if not is_finite(values):
        remedy = "use other weights, or download them again"
        raise CheckpointError(f"{path}: contains inf or NaN; {remedy}")


def is_finite(values: Tensor) -> bool:
    """Return whether no value is inf or NaN."""
    if values.dtype.itemsize == 1:  # integers, or float8, for which PyTorch has no minimum
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def _read_rows(
    piece: TensorSlice, first: int, end: int, target: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield rows `first` to `end` (exclusive) of `piece` in blocks, each until the next one.

    Args:
        target: rows that they are read into, of the same dtype and contiguous; None = a buffer.
    """
    n_per_block = max(1, READ_BYTES // max(1, piece.row_bytes))
    rows = target
    if rows is None:
        shape = (min(n_per_block, end - first), *piece.shape[1:])
        rows = torch.empty(shape, dtype=torch_dtype(piece))
    try:
        with open(piece.path, "rb", opener=open_regular) as file:
            for start in range(first, end, n_per_block):
                n_rows = min(n_per_block, end - start)
                at = 0 if target is None else start - first
                values = rows[at : at + n_rows]
                content = values.reshape(-1).view(torch.uint8).numpy().data
                offset = piece.begin + start * piece.row_bytes
                if os.preadv(file.fileno(), [content], offset) < len(content):
                    raise CheckpointError(f"{piece.path}: ends before byte {offset + len(content)}")
                yield values
    except OSError as error:
        raise CheckpointError(f"{piece.path}: cannot be read: {error.strerror}") from None
