"""A directory of Hugging Face written again, with other weights of its language model.

What is not a weight of the language model is copied byte for byte, so that what loads the source
loads the result. The weights keep the names, layouts and files that they have in the source.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.headers import TensorSlice
from lm.checkpoint.tensor_files import DTYPE_CODES, WRITE_BYTES, stored_dtype, torch_dtype
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, RunError
from lm.fileio import open_regular, sync
from lm.hf.conversion import CONVERTED_BYTES, Conversion, Group, split_rows
from lm.hf.files import (
    SAFETENSORS_INDEX,
    WEIGHT_SUFFIXES,
    follow_links,
    list_weight_files,
    read_object,
    to_json,
)
from lm.hf.quantized import Quantized, Stored
from lm.storage.folder import drafted, writing


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    n_bytes: int
    """of weights, with those of other parts"""
    left_out: Sequence[Path]
    """files that hold the weights of the source in other formats"""


@torch.no_grad()
def export_directory(
    conversion: Conversion,
    get_tensor: Callable[[str], Tensor],
    out: Path,
    dtype: str | None = None,
    files: Mapping[str, bytes | None] | None = None,
    stop_ids: int | list[int] | None = None,
) -> Exported:
    """Write the directory of `conversion` to `out`, with other weights of its language model.

    Args:
        get_tensor: returns a complete parameter or buffer of the network by its name.
        dtype: of these weights, one of `WEIGHT_DTYPES`, except for those that transformers keeps
            in float32; None = of each tensor that of the source.
        files: contents by name, in place of what the directory has; None = it is left out.
        stop_ids: `eos_token_id` of config.json; None = that of the directory.

    Raises:
        ConfigError: `out` exists, or transformers cannot write a layout that it reads.
        RunError: `out` cannot be written, or a weight exceeds the range of its dtype.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")
    conversion.require_reversible()
    if conversion.is_quantized:
        dtype = dtype or "bfloat16"
    dtypes = _choose_dtypes(conversion, dtype)
    paths = list_weight_files(conversion.directory)
    shards = [_plan_shard(path, conversion.stored, dtypes) for path in paths]
    n_bytes = sum(shard.n_bytes for shard in shards)
    others = _list_others(conversion.directory, paths)
    contents: dict[str, bytes | None] = {}
    config = read_object(conversion.directory / MODEL_CONFIG)
    changed = _change_config(config, dtype, stop_ids)
    if changed != config:
        contents[MODEL_CONFIG] = to_json(changed)
    index_path = conversion.directory / SAFETENSORS_INDEX
    if dtype is not None and index_path in others.copied:
        contents[SAFETENSORS_INDEX] = to_json(_rewrite_index(index_path, shards))
    contents |= files or {}
    with writing(out), drafted(out, n_bytes + others.n_bytes) as draft:
        others.copy(conversion.directory, draft, contents)
        for name, content in contents.items():
            if content is not None:
                (draft / name).write_bytes(content)
        _write_weights(conversion, get_tensor, draft, shards)
    return Exported(n_bytes, others.left_out)


# ---- weights


def _choose_dtypes(conversion: Conversion, dtype: str | None) -> dict[str, torch.dtype]:
    """Return the dtypes to write of the tensors that are replaced, by name in the files."""
    dtypes: dict[str, torch.dtype] = {}
    for group in (*conversion.groups, *conversion.copies):
        for name in group.source_names:
            dtypes[name] = conversion.stored[name].dtype
            if dtype is not None and dtypes[name].is_floating_point:
                dtypes[name] = conversion.stored_dtype(group, getattr(torch, dtype))
    return dtypes


@dataclass(frozen=True)
class _Shard:
    """A file of weights to write in place of one."""

    name: str
    header: bytes
    pieces: Mapping[str, TensorSlice]
    """where the tensors are in the source, by name"""
    places: Mapping[str, TensorSlice]
    """where they are in the file to write; their path is the source's"""

    @property
    def n_bytes(self) -> int:
        """The size of the tensors to write."""
        return sum(piece.n_rows * piece.row_bytes for piece in self.places.values())


def _plan_shard(
    path: Path, stored: Mapping[str, Stored], dtypes: Mapping[str, torch.dtype]
) -> _Shard:
    """Return the file to write in place of the one at `path`.

    Args:
        dtypes: of the tensors that are replaced, by name.
    """
    source = follow_links(path)
    found: list[tuple[str, TensorSlice]] = []
    for name, tensor in stored.items():
        found += [(name, piece) for piece in tensor.slices if piece.path == source]
    pieces = dict(sorted(found, key=lambda item: item[1].begin))
    with open(source, "rb", opener=open_regular) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
    changed: dict[str, TensorSlice] = {}
    for name, piece in pieces.items():
        tensor = stored[name]
        dtype = dtypes.get(name, tensor.dtype)
        shape = piece.shape
        if isinstance(tensor, Quantized):
            shape = tensor.shape or ()
        changed[name] = piece._replace(dtype=stored_dtype(dtype), shape=shape)
    if changed != pieces:
        header = _write_header(json.loads(header), changed)
    places: dict[str, TensorSlice] = {}
    end = 8 + len(header)
    for name, piece in changed.items():
        places[name] = piece._replace(begin=end)
        end += piece.n_rows * piece.row_bytes
    return _Shard(path.name, struct.pack("<Q", len(header)) + header, pieces, places)


def _write_header(old: Mapping[str, Any], pieces: Mapping[str, TensorSlice]) -> bytes:
    """Return the JSON of a header of `pieces`, in order, with the metadata of `old`."""
    entries: dict[str, Any] = {}
    if "__metadata__" in old:
        entries["__metadata__"] = old["__metadata__"]
    end = 0
    for name, piece in pieces.items():
        begin = end
        end += piece.n_rows * piece.row_bytes
        entries[name] = {
            "dtype": DTYPE_CODES[torch_dtype(piece)],
            "shape": piece.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes


def _write_weights(
    conversion: Conversion,
    get_tensor: Callable[[str], Tensor],
    draft: Path,
    shards: Sequence[_Shard],
) -> None:
    """Write the files of weights, of which those that are not the language model's are copied."""
    groups = [*conversion.groups, *conversion.copies]
    replaced = {name for group in groups for name in group.source_names}
    with ExitStack() as on_exit:
        outputs = [_Output(shard, _open_new(draft / shard.name, on_exit)) for shard in shards]
        having: dict[str, list[_Output]] = {}
        """several where links in the source lead to one file"""
        for output in outputs:
            output.file.write(output.shard.header)
            for name in output.shard.places:
                having.setdefault(name, []).append(output)
                stored = conversion.stored[name]
                if name in replaced:
                    continue
                if isinstance(stored, Quantized):
                    output.write(name, stored.read_all())
                else:
                    output.copy(name)
        for group in groups:
            for name, tensor in _revert(group, get_tensor):
                for output in having[name]:
                    output.write(name, tensor)
        for output in outputs:
            sync(output.file)


def _open_new(path: Path, on_exit: ExitStack) -> BufferedWriter:
    return on_exit.enter_context(path.open("xb"))


@dataclass(frozen=True)
class _Output:
    """A file of weights that is being written."""

    shard: _Shard
    file: BufferedWriter

    def copy(self, name: str) -> None:
        """Copy a tensor of the source."""
        stored = self.shard.pieces[name]
        self.file.seek(self.shard.places[name].begin)
        n_left = stored.n_rows * stored.row_bytes
        with open(stored.path, "rb", opener=open_regular) as source:
            source.seek(stored.begin)
            while n_left > 0:
                block = source.read(min(n_left, WRITE_BYTES))
                if not block:
                    raise RunError(f"{stored.path}: ends before byte {source.tell() + n_left}")
                self.file.write(block)
                n_left -= len(block)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor in the dtype that it has in the file, a few rows at a time."""
        place = self.shard.places[name]
        self.file.seek(place.begin)
        if tensor.dim() == 0:
            tensor = tensor.view(1)
        for rows in split_rows(tensor, CONVERTED_BYTES):
            values = rows.cpu().to(torch_dtype(place))
            if values.is_floating_point() and not values.isfinite().all():
                raise RunError(f"{name}: {_describe_overflow(rows, torch_dtype(place))}")
            self.file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)


def _describe_overflow(values: Tensor, dtype: torch.dtype) -> str:
    if not values.isfinite().all():
        return "contains inf or NaN"
    limit = torch.finfo(dtype).max
    return f"has values above {limit:g}, the maximum of its dtype; use --dtype bfloat16"


def _revert(group: Group, get_tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are stored of a group, by name.

    Raises:
        ConfigError: they would be read as other values.
    """
    targets = {name: get_tensor(name) for name in group.targets.values()}
    if not group.is_stacked:
        yield from _revert_rows(group, targets, 0)
        return
    ((name, tensor),) = targets.items()
    start = 0
    for rows in split_rows(tensor, CONVERTED_BYTES):
        yield from _revert_rows(group, {name: rows}, start)
        start += len(rows)


def _revert_rows(
    group: Group, targets: Mapping[str, Tensor], start: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the sources of `targets`, of each pattern those from number `start` on."""
    sources = group.revert(targets)
    for name, converted in group.convert(sources).items():
        if not converted.equal(targets[name]):
            problem = f"transformers would not read {name} as it writes it"
            raise ConfigError(f"{group.source_names[0]}: {problem}")
    for pattern, tensors in sources.items():
        names = group.sources[pattern][start:]
        yield from zip(names, tensors, strict=False)


# ---- other files


@dataclass(frozen=True)
class _Others:
    """Files of a directory other than its weights."""

    copied: Sequence[Path]
    left_out: Sequence[Path]
    """which have the weights of the source in other formats"""

    @property
    def n_bytes(self) -> int:
        return sum(follow_links(path).stat().st_size for path in self.copied)

    def copy(self, directory: Path, draft: Path, replaced: Collection[str]) -> None:
        """Copy the files that are not `replaced`."""
        for path in self.copied:
            name = path.relative_to(directory)
            if str(name) in replaced:
                continue
            copy = draft / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with (
                open(follow_links(path), "rb", opener=open_regular) as file,
                copy.open("xb") as copied,
            ):
                shutil.copyfileobj(file, copied, WRITE_BYTES)


def _list_others(directory: Path, weights: Collection[Path]) -> _Others:
    """Return the files of `directory`, except for hidden ones and `weights`."""
    index = directory / SAFETENSORS_INDEX
    is_indexed = index.is_file() and _indexed_names(index) == {path.name for path in weights}
    copied: list[Path] = []
    left_out: list[Path] = []
    for path in sorted(directory.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if is_hidden or path in weights or not path.is_file():
            continue
        is_weights = path.name.endswith(WEIGHT_SUFFIXES)
        if path == index:
            is_weights = not is_indexed
        if is_weights:
            left_out.append(path)
        else:
            copied.append(path)
    return _Others(copied, left_out)


def _indexed_names(index: Path) -> set[str]:
    return set(read_object(index).get("weight_map", {}).values())


def _change_config(
    config: Mapping[str, Any], dtype: str | None, stop_ids: int | list[int] | None
) -> dict[str, Any]:
    """Return a config.json with another dtype and `eos_token_id`, if they are not None."""
    changed = dict(config)
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = _change_config(config["text_config"], dtype, stop_ids)
    if dtype is not None:
        changed.pop("quantization_config", None)
        changed |= dict.fromkeys({"dtype", "torch_dtype"} & config.keys(), dtype)
    if stop_ids is not None and config.get("eos_token_id") is not None:
        changed["eos_token_id"] = stop_ids
    return changed


def _rewrite_index(path: Path, shards: Sequence[_Shard]) -> dict[str, Any]:
    index = dict(read_object(path))
    n_bytes = sum(shard.n_bytes for shard in shards)
    index["metadata"] = dict(index.get("metadata") or {}, total_size=n_bytes)
    index["weight_map"] = {name: shard.name for shard in shards for name in shard.places}
    return index
