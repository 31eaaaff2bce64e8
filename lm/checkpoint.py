"""Checkpoints: named tensors to sharded files and back, inside Determined's checkpoint context.

A checkpoint is a folder of PyTorch's distributed-checkpoint files plus `manifest.json`, which is written
last, by rank 0, after every rank has said that its files are on disk. A folder without it is not a
checkpoint. Every rank writes and reads its own shards, whatever the world size was on the other side.
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from determined import core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lm.errors import ConfigError, RunError

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_rate: int = Field(50, gt=0, description="steps between checkpoints; one more behind the last step")
    resume: str = Field(
        "auto", description="auto = go on from the newest whole checkpoint; fresh = start anew; or a checkpoint's path"
    )


class Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Tensor]:
        """The live tensors by name: saving reads them, restoring writes into them."""
        ...


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0)


class Manifest(BaseModel):
    """What `manifest.json` says. Nothing else is needed to rebuild the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1]
    step: int = Field(ge=0, description="steps completed")
    time: float = Field(description="seconds since 1970")
    world_size: int = Field(gt=0)
    sharding: str
    total_batch_size: int = Field(gt=0)
    tokens: int = Field(ge=0, description="seen so far")
    hyperparameters: dict[str, Any]
    model: dict[str, Any]
    tokenizer: str | None
    data: dict[str, str]
    trial_id: int | None = Field(description="the Determined trial that wrote it")
    files: dict[str, FileRecord]


class CheckpointError(RunError):
    """A folder that is no whole checkpoint: says which and why."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after a look at the sizes of its files.

    Raises:
        CheckpointError: no manifest, a broken one, one of a newer format, or files missing or cut short.
    """
    try:
        raw = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint, {MANIFEST}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged: {error}") from None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise CheckpointError(
            f"{folder}: format {raw['format']} is newer than this program reads ({FORMAT}); update it"
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged: {where}: {first['msg']}") from None
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != record.bytes:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, {record.bytes} were written")
    return manifest


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare the checksum of every file, or of each `parts`-th from `part` on.

    Raises:
        CheckpointError: naming the file.
    """
    for name, record in sorted(manifest.files.items())[part::parts]:
        if _crc32(folder / name) != record.crc32:
            raise CheckpointError(f"{folder / name}: damaged, its checksum is not the one that was written")


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The whole checkpoint of the highest step below `folder`; None where there is no checkpoint at all.

    Args:
        say: is told of each folder that is passed over.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    whole: list[tuple[int, float, Path]] = []
    problems = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            whole.append((manifest.step, manifest.time, path))
    if problems and not whole:
        raise CheckpointError(*problems, f"{folder}: no whole checkpoint to go on from; resume=fresh starts anew")
    for problem in problems:
        say(f"passing over {problem}")
    return max(whole)[2] if whole else None


def _named(state: Mapping[str, Stateful]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, holder in state.items() for name, tensor in holder.state_dict().items()}


class Checkpointer:
    """Saves and restores the tensors of named stateful objects, all ranks together.

    Args:
        group: gloo group of all ranks.
        together: runs an action on every rank and fails on all where it failed on one.
    """

    def __init__(
        self,
        context: core.CheckpointContext,
        group: dist.ProcessGroup,
        together: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._context = context
        self._group = group
        self._together = together

    def save(self, state: Mapping[str, Stateful], about: Mapping[str, Any]) -> str:
        """Write a new checkpoint and report it.

        Args:
            about: the manifest's fields, `format`, `time`, `world_size` and `files` excepted.

        Returns:
            Its uuid.
        """
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        with self._context.store_path({"steps_completed": about["step"]}, shard=True) as (path, uuid):
            writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
            dcp.save(_named(state), storage_writer=writer, process_group=self._group)
            records: list[Any] = [None] * ranks
            mine = self._together(lambda: _records(path, [f"__{rank}_*", *([] if rank else [".metadata"])]))
            dist.all_gather_object(records, mine, group=self._group)
            files = {name: record for part in records for name, record in part.items()}
            manifest = {"format": FORMAT, "time": time.time(), "world_size": ranks, "files": files} | dict(about)
            self._together(lambda: _write_manifest(path, Manifest.model_validate(manifest)) if not rank else None)
        return uuid

    def restore(self, uuid: str, choose: Callable[[Manifest], Mapping[str, Stateful]]) -> Manifest:
        """Check the checkpoint `uuid`, and read it into what `choose` picks.

        Args:
            uuid: as `save` returned it, or a folder's path.
            choose: looks at the manifest and returns the objects to restore, or raises to refuse.

        Raises:
            CheckpointError: it is damaged; nothing was read.
            ConfigError: its tensors are not those of the objects; every difference is listed, nothing was read.
        """
        with self._context.restore_path(uuid) as where:
            path = Path(where)
            manifest = self._together(lambda: self._check(path))
            wanted = _named(choose(manifest))
            reader = dcp.FileSystemReader(path)
            self._together(lambda: _compare(path, reader, wanted))
            dcp.load(wanted, storage_reader=reader, process_group=self._group)
        return manifest

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        verify(path, manifest, dist.get_rank(self._group), dist.get_world_size(self._group))
        return manifest


def _compare(path: Path, reader: dcp.FileSystemReader, wanted: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or one of another shape or dtype."""
    parts = {name.partition(".")[0] for name in wanted}
    there = {
        name: (entry.size, entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] in parts
    }
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in there]
    problems += [f"{name}: only in the checkpoint" for name in there if name not in wanted]
    problems += [
        f"{name}: {list(there[name][0])} {there[name][1]} in the checkpoint, here {list(t.shape)} {t.dtype}"
        for name, t in wanted.items()
        if name in there and there[name] != (t.shape, t.dtype)
    ]
    if problems:
        raise ConfigError(f"{path}: its tensors are not this run's:", *problems)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Read the weights of the checkpoint in `folder` into `model`, in a single process, whatever wrote them.

    Raises:
        CheckpointError: a file is damaged.
    """
    verify(folder, read_manifest(folder))
    weights = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        dcp.load(weights, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def _records(folder: Path, patterns: list[str]) -> dict[str, dict[str, int]]:
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in paths}


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    draft = folder / f"{MANIFEST}.draft"
    with draft.open("w") as file:
        file.write(manifest.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / MANIFEST)
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
