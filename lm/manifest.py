"""A checkpoint on disk: what makes a folder one, and how it is read without trusting it.

A checkpoint is a folder of PyTorch's distributed-checkpoint files plus `manifest.json`, written last. The
manifest holds everything but tensors, as JSON, and the size and checksum of every file. PyTorch reads its own
index, `.metadata`, with plain pickle, follows paths out of the folder, and verifies nothing; here a folder is
read only if its manifest is whole, its files are the ones that were written, and its index names nothing
but tensors in those files.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import google_crc32c
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lm.errors import RunError

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = ".metadata"


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0)


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
    validation_loss: float | None = Field(description="at this step, in nats per token")
    hyperparameters: dict[str, Any]
    model: dict[str, Any]
    tokenizer: str | None
    data: dict[str, str]
    trial_id: int | None = Field(description="the Determined trial that wrote it")
    files: dict[str, FileRecord]


class CheckpointError(RunError):
    """A folder that is no whole checkpoint: says which and why."""


def crc32c(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = google_crc32c.extend(value, block)
    return value


def record(path: Path) -> FileRecord:
    return FileRecord(bytes=path.stat().st_size, crc32c=crc32c(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make `folder` a checkpoint, in one atomic move, durably."""
    draft = folder / f"{MANIFEST}.draft"
    with draft.open("w") as file:
        file.write(manifest.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / MANIFEST)
    for place in (folder, folder.parent):
        handle = os.open(place, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after a look at its files' names and sizes.

    Raises:
        CheckpointError: no manifest, a broken one, one of a newer format, links, or files missing or cut short.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a symbolic link; name the folder itself")
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint, {MANIFEST}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise CheckpointError(f"{path}: format {raw['format']} is newer than this program reads ({FORMAT}); update it")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for name, entry in manifest.files.items():
        file = folder / name
        if Path(name).name != name or name in ("", ".", "..") or file.is_symlink():
            raise CheckpointError(f"{path}: {name!r} is no file of this folder")
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if file.stat().st_size != entry.bytes:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes, {entry.bytes} were written")
    return manifest


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare the checksum of every file, or of each `parts`-th from `part` on.

    Raises:
        CheckpointError: naming the file.
    """
    for name, entry in sorted(manifest.files.items())[part::parts]:
        if crc32c(folder / name) != entry.crc32c:
            raise CheckpointError(f"{folder / name}: damaged, its checksum is not that of what was written")


def whole_checkpoints(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """The checkpoints below `folder` that look whole, newest first; none where none was ever begun.

    Args:
        say: is told of each folder that is passed over.

    Raises:
        CheckpointError: there are folders, but none is a whole checkpoint.
    """
    found: list[tuple[int, float, Path]] = []
    problems = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            try:
                manifest = read_manifest(path)
                found.append((manifest.step, manifest.time, path))
            except CheckpointError as error:
                problems.append(str(error))
    if problems and not found:
        raise CheckpointError(*problems, f"{folder}: no whole checkpoint to go on from; resume=fresh starts anew")
    for problem in problems:
        say(f"passing over {problem}")
    return [path for *_, path in sorted(found, reverse=True)]


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index and refuses to make anything else: a pickle can otherwise run code."""

    ALLOWED: ClassVar = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch", dtype) for dtype in ("float32", "float16", "bfloat16", "float64", "int64", "int32")),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
        *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "Path")),  # Python 3.13
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """PyTorch's reader for a folder that need not be trusted.

    Raises:
        CheckpointError: the index holds anything but tensors in the files that the manifest lists.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = manifest.files.keys()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = self._folder / INDEX
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
            for name, entry in index.state_dict_metadata.items():
                if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{name} is no tensor")
            for place in index.storage_data.values():
                if place.relative_path not in self._files or place.transform_descriptors:
                    raise pickle.UnpicklingError(f"it leads to {place.relative_path}")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path}: damaged or hostile: {error}") from None
        return index
