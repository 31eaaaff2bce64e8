"""A checkpoint on disk: what makes a folder one, and how it is read without trusting it.

A checkpoint is a folder of PyTorch's distributed-checkpoint files plus `manifest.json`, written last. The
manifest holds everything but tensors, as JSON, the size and checksum of every file, and a checksum of itself.
PyTorch reads its own index, `.metadata`, with plain pickle, follows paths out of the folder, and verifies
nothing; here a folder is read only if its manifest is whole, its files are the ones that were written, and its
index names nothing but tensors in those files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lm.errors import RunError
from lm.fileio import crc32c, sync_folder, write_durably

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
