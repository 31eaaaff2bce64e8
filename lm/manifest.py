"""A checkpoint on disk: what makes a folder one, and how it is read without trusting it.

A checkpoint is a folder of PyTorch's distributed-checkpoint files plus `manifest.json`, written last. The
manifest holds everything but tensors, as JSON, the size and checksum of every file, and a checksum of itself.
PyTorch reads its own index, `.metadata`, with plain pickle, follows paths out of the folder, and verifies
nothing; here a folder is read only if its manifest is whole, its files are the ones that were written, and its
index names nothing but tensors in those files.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import EnumType
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import google_crc32c
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lm.disk import crc32c, sync_folder, write_durably
from lm.errors import ConfigError, RunError, readable

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = ".metadata"
DELETED = ".deleted-"
COMMITTED = ".committed"
"""Stands beside a run's checkpoints once one of them was completed."""
FILE_NAME = re.compile(r"__\d+_\d+\.distcp|\.metadata|tokenizer(_config)?\.json|chat_template\.jinja")

Count = Annotated[int, Field(ge=0, lt=2**63)]


class FileRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Count
    crc32c: int = Field(ge=0, lt=2**32)


class Manifest(BaseModel):
    """What `manifest.json` says. Nothing else is needed to rebuild the model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    step: Count = Field(description="steps completed")
    time: float = Field(ge=0, lt=2**36, description="seconds since 1970")
    world_size: Count = Field(gt=0)
    sharding: str
    total_batch_size: Count = Field(gt=0)
    tokens: Count = Field(description="seen so far")
    validation_loss: float | None = Field(description="at this step, in nats per token")
    hyperparameters: dict[str, Any]
    model: dict[str, Any]
    tokenizer: str | None = Field(description="its identity: bytes, or what says which files; null: tokens are no text")
    data: dict[str, str]
    source: list[dict[str, Any]] | None = Field(None, description="state of a streamed dataset behind `step`, by rank")
    loss_scaled: bool = Field(description="float16: there is a loss scale among the tensors")
    trial_id: int | None = Field(description="the Determined trial that wrote it")
    files: dict[str, FileRecord]


class CheckpointError(RunError):
    """A folder that is no whole checkpoint: says which and why."""


def record(path: Path) -> FileRecord:
    return FileRecord(bytes=path.stat().st_size, crc32c=crc32c(path))


def _sealed(fields: dict[str, Any]) -> bytes:
    """The text of a manifest: its fields, and behind them the checksum of what they look like as text."""
    checksum = google_crc32c.value(json.dumps(fields, indent=1).encode())
    return json.dumps(fields | {"checksum": checksum}, indent=1).encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make `folder` a checkpoint, in one atomic move, durably."""
    draft = folder / f"{MANIFEST}.draft"
    write_durably(draft, _sealed(manifest.model_dump(mode="json")))
    draft.rename(folder / MANIFEST)
    for place in (folder, folder.parent):
        sync_folder(place)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after a look at its files' names and sizes.

    Raises:
        CheckpointError: no manifest, a broken one, one of a newer format, links, or files missing or cut short.
    """
    try:
        return _read_manifest(folder, folder / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint, {MANIFEST}: {error.strerror}") from None


def _read_manifest(folder: Path, path: Path) -> Manifest:
    for place in (folder, path):
        if place.is_symlink():
            raise CheckpointError(f"{place}: is a symbolic link; a checkpoint is a folder of plain files")
    manifest = _parse(path, path.read_bytes())
    if INDEX not in manifest.files:
        raise CheckpointError(f"{path}: lists no {INDEX}")
    for name, entry in manifest.files.items():
        file = folder / name
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r} is no file of a checkpoint")
        if file.is_symlink():
            raise CheckpointError(f"{file}: is a symbolic link; a checkpoint is a folder of plain files")
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if file.stat().st_size != entry.bytes:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes, {entry.bytes} were written")
    return manifest


def _parse(path: Path, text: bytes) -> Manifest:
    try:
        raw = json.loads(text)
        if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
            newer = f"format {raw['format']} is newer than this program reads ({FORMAT}); update it"
            raise CheckpointError(f"{path}: {newer}")
        if not isinstance(raw, dict) or _sealed({k: v for k, v in raw.items() if k != "checksum"}) != text:
            raise CheckpointError(f"{path}: damaged: its checksum is not that of what was written")
        return Manifest.model_validate({key: value for key, value in raw.items() if key != "checksum"})
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare the checksum of every file, or of each `parts`-th from `part` on.

    Raises:
        CheckpointError: naming the file.
    """
    for name, entry in sorted(manifest.files.items())[part::parts]:
        try:
            intact = crc32c(folder / name) == entry.crc32c
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}") from None
        if not intact:
            raise CheckpointError(f"{folder / name}: damaged, its checksum is not that of what was written")


def is_intact(folder: Path, part: int, parts: int) -> bool:
    """Whether `verify` finds nothing in each `parts`-th file of a checkpoint from `part` on."""
    try:
        verify(folder, read_manifest(folder), part, parts)
    except CheckpointError:
        return False
    return True


def whole_checkpoints(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """The checkpoints below `folder` that look whole, the last written first; none where none was ever begun.

    That is not always the one of the highest step: a run may have gone on from an earlier one.

    Args:
        say: is told of each folder that is passed over.

    Raises:
        CheckpointError: there was one, and none is left. What a kill inside the first save leaves is no reason.
    """
    found: list[tuple[float, Path]] = []
    problems = []
    lost = (folder / COMMITTED).exists()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            try:
                found.append((read_manifest(path).time, path))
            except CheckpointError as error:
                problems.append(str(error))
                lost |= (path / MANIFEST).exists()
    if lost and problems and not found:
        raise CheckpointError(*problems, f"{folder}: no whole checkpoint to go on from; resume=fresh starts anew")
    for problem in problems:
        say(f"passing over {problem}")
    if problems and not found:
        say(f"{folder}: none was ever completed, starting at step 0")
    return [path for _, path in sorted(found, reverse=True)]


@readable
def find_checkpoint(where: Path) -> Path:
    """The checkpoint that `where` means: itself, or the newest one of a run's folder.

    Raises:
        ConfigError: there is no such folder, it is none of both, or no checkpoint is in the run yet.
        CheckpointError: the run has checkpoints, but none is whole.
    """
    if not where.is_dir():
        raise ConfigError(f"{where}: no such folder; give a checkpoint's or a run's")
    checkpoints = where / "checkpoints"
    if not checkpoints.is_dir():
        if not any(path.name == MANIFEST or FILE_NAME.fullmatch(path.name) for path in where.iterdir()):
            raise ConfigError(f"{where}: is neither a checkpoint's folder nor a run's")
        return where
    whole = whole_checkpoints(checkpoints, lambda line: print(line, file=sys.stderr))
    if not whole:
        raise ConfigError(f"{where}: no checkpoint yet")
    return whole[0]


def find_initial(init_from: str | None, on_cluster: bool) -> list[str]:
    """What `init_from` names: the absolute path of a checkpoint or of a run's newest, or on a cluster a uuid.

    Raises:
        ConfigError, CheckpointError: as `find_checkpoint`.
    """
    if init_from is None or (on_cluster and "/" not in init_from):
        return [init_from] if init_from else []
    try:
        return [str(find_checkpoint(Path(init_from)).absolute())]
    except ConfigError as error:
        raise ConfigError(f"init_from: {error}") from None


class Kept(NamedTuple):
    """What retention looks at: when a checkpoint was written, how good it is, and its uuid."""

    time: float
    validation_loss: float | None
    name: str


def superfluous(whole: list[Kept], keep: int | None) -> list[Kept]:
    """All of `whole` but the `keep` last written and the one of the lowest validation loss; none for None."""
    if keep is None:
        return []
    judged = [entry for entry in whole if entry.validation_loss is not None]
    best = min(judged, key=lambda entry: (entry.validation_loss, -entry.time), default=None)
    return [entry for entry in sorted(whole, key=lambda entry: entry.time)[:-keep] if entry is not best]


def kept(folder: Path, damaged: Collection[str]) -> list[Kept]:
    """The checkpoints below `folder`, but for those that are not whole.

    Args:
        damaged: names of those that look whole and are known not to be.
    """
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith(DELETED) and path.name not in damaged:
            with suppress(CheckpointError):
                manifest = read_manifest(path)
                found.append(Kept(manifest.time, manifest.validation_loss, path.name))
    return found


def retire(folder: Path, keep: int | None, damaged: Collection[str]) -> None:
    """Delete the superfluous checkpoints of `kept`."""
    (folder / COMMITTED).touch()
    for entry in superfluous(kept(folder, damaged), keep):
        # Renamed first: whatever happens next, it is no checkpoint any more, and not half of one.
        (folder / entry.name).rename(folder / f"{DELETED}{entry.name}")
    for gone in folder.glob(f"{DELETED}*"):  # also what a kill, or a reader on a network's disk, left
        shutil.rmtree(gone, ignore_errors=True)


def _member(kind: Any, name: Any) -> Any:
    """What pickles of Python 3.11.0 to 3.11.3 want `getattr` for: a member of an enumeration, and nothing else."""
    if not (isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")
    return kind.__members__[name]


class _IndexUnpickler(pickle._Unpickler):
    """Reads DCP's index and refuses to make anything else: a pickle can otherwise run code.

    It is the one written in Python, because of `load_build`: the other cannot be kept from setting attributes
    of the classes themselves, e.g. replacing a method of `Path` for the rest of the process.
    """

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
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or not is_dataclass(target):
            raise pickle.UnpicklingError(f"it changes {target!r}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


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
                    raise pickle.UnpicklingError(f"{name!r} is no tensor")
            for place in index.storage_data.values():
                if place.relative_path not in self._files or place.transform_descriptors:
                    raise pickle.UnpicklingError(f"it leads to {place.relative_path!r}")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path}: damaged or hostile: {str(error) or type(error).__name__}") from None
        return index

    def compare(self, wanted: Mapping[str, Tensor]) -> None:
        """Look whether the folder holds the tensors `wanted` and, of the parts they name, no others.

        Raises:
            ConfigError: with every tensor that is missing, one too many, or of another shape or dtype.
        """
        parts = {name.partition(".")[0] for name in wanted}
        there = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.read_metadata().state_dict_metadata.items()
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
            raise ConfigError(f"{self._folder}: its tensors are not this run's:", *problems)

    def load(self, wanted: Mapping[str, Tensor], **how: Any) -> None:
        """Read the tensors `wanted`, in place; `how` are dcp.load's own arguments.

        Raises:
            CheckpointError: something in the files is no tensor, or not the one that the index promises.
        """
        try:
            dcp.load(dict(wanted), storage_reader=self, **how)
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"{self._folder}: cannot be read: {first_failure(error)}") from None


def first_failure(error: dcp.api.CheckpointException) -> str:
    """The lowest rank and what it met, in one line; DCP's own exception, no Exception, is too long for a person."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
