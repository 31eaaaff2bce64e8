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

import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lm.checkpoint.manifest import CheckpointError, Manifest, read_manifest, verify
from lm.errors import ConfigError, first_20
from lm.fileio import MAX_JSON_BYTES, MAX_SLICES, open_regular, sync
from lm.shards import local_rows

DTYPES = {
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
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_FILE_BYTES = 2 << 30
READ_BYTES = 64 << 20
"""Read at a time, so that memory stays near the size of the tensors."""


State = Mapping[str, Mapping[str, Tensor]]
"""Live tensors by object, e.g. "model", and name: saving reads them, loading writes into them."""


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
        return self.shape[0] if self.shape else 1


# ---- writing
# ---------------------------------------------------------------------------------------------------------


def owned_rows(
    tensors: Mapping[str, Tensor], rank: int, world_size: int
) -> dict[str, tuple[Tensor, int]]:
    """Return the slices that this rank writes and their first rows: each slice once, replicas take turns."""
    owned = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        replica, replicas = rank, world_size
        if isinstance(tensor, DTensor):
            replica, replicas = 0, 1
            coordinate = tensor.device_mesh.get_coordinate()
            assert coordinate is not None
            for dim, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    size = tensor.device_mesh.size(dim)
                    replica, replicas = replica * size + coordinate[dim], replicas * size
        local, start = local_rows(tensor)
        if index % replicas == replica and local.numel():
            owned[name] = local, start
    return owned


def group_by_size(slices: Mapping[str, tuple[Tensor, Any]]) -> list[list[str]]:
    """Return the names in groups of at most `MAX_FILE_BYTES`, or of one larger slice."""
    groups: list[list[str]] = []
    filled = MAX_FILE_BYTES
    for name, (tensor, _) in sorted(
        slices.items(), key=lambda item: -item[1][0].itemsize
    ):  # values stay aligned
        if filled + tensor.nbytes > MAX_FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.nbytes
    return groups


def write_tensors(path: Path, slices: Mapping[str, tuple[Tensor, int]]) -> int:
    """Write slices (tensor, its first row in the full tensor) to the new file `path`, durably.

    Returns:
        The file's CRC-32C.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, (tensor, _) in slices.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    sharding = {
        name: {"saved_offsets": [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []}
        for name, (tensor, start) in slices.items()
    }
    header["__metadata__"] = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(sharding),
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        prefix = struct.pack("<Q", len(text)) + text
        file.write(prefix)
        checksum = google_crc32c.value(prefix)
        for tensor, _ in slices.values():
            for block in tensor.cpu().contiguous().reshape(-1).view(torch.uint8).split(1 << 22):
                content = block.numpy().data
                file.write(content)
                checksum = google_crc32c.extend(checksum, bytes(content))
        sync(file)
    return checksum


# ---- reading
# ---------------------------------------------------------------------------------------------------------


def read_headers(paths: Iterable[Path]) -> dict[str, list[TensorSlice]]:
    """Return the slices in the files `paths`, by tensor name, after checking that each lies inside its file.

    Raises:
        CheckpointError: a file cannot be opened, or its header is damaged or hostile.
    """
    found: dict[str, list[TensorSlice]] = {}
    room = MAX_SLICES
    for path in paths:
        try:
            for name, piece in _read_header(path):
                found.setdefault(name, []).append(piece)
                room -= 1
            if (room := room + (path.stat().st_size >> 10)) < 0:
                raise ValueError(
                    f"more than {MAX_SLICES:,} entries, and one per KiB of data, in all files"
                )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = (
                f"{type(error).__name__}: {error}"
                if not isinstance(error, ValueError)
                else str(error)
            )
            raise CheckpointError(f"{path}: damaged header: {problem[:200]}") from None
    return found


def _read_header(path: Path) -> Iterator[tuple[str, TensorSlice]]:
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, MAX_JSON_BYTES):
            raise ValueError(
                f"{length} bytes of header in {size} bytes; at most {MAX_JSON_BYTES} are read"
            )
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    metadata = header.pop("__metadata__", {})
    sharding = (
        json.loads(metadata["DCP_SHARDING_INFO"], object_pairs_hook=_unique)
        if "DCP_SHARDING_INFO" in metadata
        else {}
    )
    start, extents = 8 + length, []
    for name, entry in header.items():
        shape = _sizes(entry["shape"], name)
        begin, end = _sizes(entry["data_offsets"], name)
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"{name[:80]}: dtype {str(entry['dtype'])[:20]} is not one of {', '.join(DTYPES)}"
            )
        offsets = _sizes(sharding[name]["saved_offsets"], name) if sharding else (0,) * len(shape)
        fits = end - begin == math.prod(shape) * dtype.itemsize and start + end <= size
        if not fits or not end > begin or len(offsets) != len(shape) or any(offsets[1:]):
            raise ValueError(f"{name[:80]}: shape and offsets do not fit the file")
        extents.append((begin, end))
        yield name, TensorSlice(path, start + begin, dtype, shape, offsets[0] if shape else 0)
    extents.sort()
    if any(end > following for (_, end), (following, _) in itertools.pairwise(extents)):
        raise ValueError("tensors overlap")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("duplicate names")
    return entries


def _sizes(values: Any, name: str) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > 8
        or not all(type(v) is int and 0 <= v < 2**48 for v in values)
    ):
        raise ValueError(f"{name[:80]}: {str(values)[:60]} are not sizes")
    return tuple(values)


def full_shape(slices: Sequence[TensorSlice]) -> tuple[int, ...] | None:
    """Return the shape of the tensor that `slices` cover exactly once; None if they overlap, leave a gap or differ."""
    first, n_rows = slices[0], 0
    if not first.shape:
        return () if len(slices) == 1 else None
    for piece in sorted(slices, key=lambda piece: (piece.start, piece.n_rows)):
        if (piece.start, *piece.shape[1:], piece.dtype) != (n_rows, *first.shape[1:], first.dtype):
            return None
        n_rows += piece.n_rows
    return n_rows, *first.shape[1:]


class Source(NamedTuple):
    """Where the values of a tensor come from: rows `start` to `start + len` of a stored tensor, or of its transpose."""

    slices: Sequence[TensorSlice]
    start: int = 0
    transposed: bool = False


@torch.no_grad()
def read_into(tensor: Tensor, source: Source) -> None:
    """Fill this rank's slice of `tensor` in place, converting the dtype; only the rows needed are read.

    Raises:
        CheckpointError: a file was cut short since its header was read, or holds inf or NaN.
    """
    local, start = local_rows(tensor)
    if not local.numel():
        return
    start += source.start
    columns = slice(None)
    if source.transposed:
        local, columns, start = local.T, slice(start, start + len(local)), 0
    local = local if local.dim() else local.view(1)
    for piece in source.slices:
        first, last = max(start, piece.start), min(start + len(local), piece.start + piece.n_rows)
        for row, values in _read_rows(piece, first - piece.start, last - piece.start):
            if (
                values.dtype.itemsize > 1
                and not torch.isfinite(torch.stack(torch.aminmax(values))).all()
            ):
                raise CheckpointError(
                    f"{piece.path}: contains inf or NaN; use other weights, or download them again"
                )
            at = piece.start + row - start
            local[at : at + len(values)].copy_(values[:, columns] if source.transposed else values)


def _read_rows(piece: TensorSlice, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    if first >= last:
        return
    row_bytes = math.prod(piece.shape[1:]) * piece.dtype.itemsize
    step = max(1, READ_BYTES // max(1, row_bytes))
    try:
        with open(piece.path, "rb", opener=open_regular) as file:
            for start in range(first, last, step):
                count = min(step, last - start)
                buffer = bytearray(count * row_bytes)
                if os.preadv(file.fileno(), [buffer], piece.begin + start * row_bytes) < len(
                    buffer
                ):
                    raise CheckpointError(
                        f"{piece.path}: ends before byte {piece.begin + (start + count) * row_bytes}"
                    )
                yield (
                    start,
                    torch.frombuffer(buffer, dtype=piece.dtype).view(count, *piece.shape[1:]),
                )
    except OSError as error:
        raise CheckpointError(f"{piece.path}: cannot be read: {error.strerror}") from None


def find_tensors(
    directory: Path, manifest: Manifest, state: State
) -> dict[str, tuple[Tensor, Source]]:
    """Return each tensor of `state` and its slices in the checkpoint, by "object.tensor"; no values are read.

    Raises:
        CheckpointError: a file's header is damaged, or slices do not cover their tensor exactly
            once.
        ConfigError: lists up to 20 of the tensors that are missing, unexpected, or of another shape
            or dtype.
    """
    found: dict[str, tuple[Tensor, Source]] = {}
    problems: list[str] = []
    for part, wanted in ((part, tensors) for part, tensors in state.items() if tensors):
        files = [directory / name for name in sorted(manifest.files) if name.startswith(f"{part}-")]
        saved = read_headers(files)
        problems += [
            f"{part}.{name}: only in the checkpoint" for name in saved if name not in wanted
        ]
        for name, tensor in wanted.items():
            if not (slices := saved.get(name)):
                problems.append(f"{part}.{name}: not in the checkpoint")
                continue
            shape, dtype = full_shape(slices), slices[0].dtype
            if shape is None:
                raise CheckpointError(
                    f"{directory}: damaged: {part}.{name} is not covered exactly once by its slices"
                )
            if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
                now = f"now {list(tensor.shape)} {tensor.dtype}"
                problems.append(f"{part}.{name}: {list(shape)} {dtype} in the checkpoint, {now}")
            found[f"{part}.{name}"] = tensor, Source(slices)
    if problems:
        raise ConfigError(f"{directory}: the tensors differ from the model's:", *first_20(problems))
    return found


def read_tensors(sources: Mapping[str, tuple[Tensor, Source]]) -> None:
    """Fill this rank's slices of the tensors that `find_tensors` returned; see `read_into`."""
    for tensor, source in sources.values():
        read_into(tensor, source)


def load_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Load the trained weights of the checkpoint in `directory` into `weights` in a single process.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: the tensors differ from the model's.
    """
    manifest = read_manifest(directory)
    verify(directory, manifest)
    read_tensors(find_tensors(directory, manifest, {"model": weights}))
