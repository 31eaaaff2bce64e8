"""Checkpoint format, and integrity checks that trust nothing in the directory.

A checkpoint is a directory with these files:

    model-RRRRR-NNNNN.safetensors    trained weights: what rank R wrote, in files N of at most 2 GiB
    optim-RRRRR-NNNNN.safetensors    optimizer state, e.g. moments
    scaler-RRRRR-NNNNN.safetensors   loss scale, with float16
    spikes-RRRRR-NNNNN.safetensors   losses and gradient norms of the last steps, with skip_spikes
    reference-RRRRR-NNNNN.safetensors  log-probabilities under the initial weights, with DPO
    tokenizer.json etc.              the tokenizer, if it has files
    manifest.json                    everything else, and the size and CRC-32C of every file;
                                     written last

Tensors have the names of the `state_dict()` of their object: `PARAMETER`, `PARAMETER.KEY` of the
optimizer, `scale`, `window`, `log_probs`. No two objects share a name, so PyTorch's
`HuggingFaceStorageReader` reads the directory, or the files of one object.

A directory is loaded only if its manifest, which has a checksum of itself, is intact, its files
match the manifest, and the slices of every tensor cover it exactly once. Only files that the
manifest lists are opened; nothing is unpickled.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import google_crc32c
from pydantic import BaseModel, Field, ValidationError

from lm.data.dataset import StreamState
from lm.data.tokenizer.files import TOKENIZER_FILES
from lm.errors import ConfigError, RunError
from lm.fileio import (
    MAX_JSON_BYTES,
    describe_invalid,
    open_regular,
    parse_json,
    sync,
    sync_directory,
)
from lm.metrics.records import MetricSums
from lm.storage.folder import DRAFT, MANIFEST, FileRecord
from lm.storage.place import Directory, Place
from lm.transformers_config import model_config

FORMAT = 3
PARTS = ("model", "optim", "scaler", "spikes", "reference")
"""Objects of a checkpoint, as its files name them: what a run resumes from."""
WEIGHTS = ("model",)
"""Those that other uses of a checkpoint need."""
TENSOR_FILE = re.compile(rf"({'|'.join(PARTS)})-\d{{5}}-\d{{5}}\.safetensors")

Count = Annotated[int, Field(ge=0, lt=2**63)]


class CheckpointError(RunError):
    """A directory is not a complete, intact checkpoint. Names the file and the reason."""


class Base(BaseModel, frozen=True, extra="forbid"):
    """The frozen weights that LoRA adapters were trained for."""

    source: str = Field(description="a directory, or OWNER/MODEL@REVISION on the Hugging Face Hub")
    files: dict[str, FileRecord] = Field(description="its weights")


class RunInfo(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What identifies a run and stays the same from its first step to its last."""

    sharding: str = Field(pattern="^[a-z-]{1,40}$")
    total_batch_size: Count = Field(gt=0, description="sequences per step")
    hyperparameters: dict[str, Any]
    model: dict[str, Any] = Field(
        description="the fields of ModelConfig or TransformersConfig: enough to rebuild the model"
    )
    tokenizer: str | None = Field(
        pattern="^[ -~]{1,200}$",
        description="bytes, or a fingerprint; null = the tokens do not represent text",
    )
    data: dict[Literal["train", "validation"], str] = Field(
        min_length=2, description="fingerprints of the data"
    )
    tasks: str = Field(default="", description="fingerprint of the tasks' questions")
    loss_scaled: bool = Field(description="float16: the tensors include a loss scale")
    trial_id: int | None = Field(description="Determined trial that wrote the checkpoint")
    experiment_id: int | None = Field(default=None, description="that trial's experiment")
    base: Base | None = Field(
        default=None, description="the weights are LoRA adapters of these; null = of none"
    )


class TrainingProgress(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Progress of a run."""

    step: int = Field(default=0, ge=0, lt=2**38, description="completed steps")
    tokens: Count = Field(default=0, description="tokens seen so far")
    validation_loss: float | None = Field(
        default=None, description="at this step, in nats per token"
    )
    sampled: bool = Field(
        default=False, description="whether the sample that is due at this step was logged"
    )
    data_start: Count = Field(
        default=0, description="steps completed when its data were begun, before on other data"
    )
    dataset_state: list[StreamState] | None = Field(
        default=None, description="streamed dataset: its state, by rank"
    )
    metric_sums: list[MetricSums] | None = Field(
        default=None, description="since the last report, by rank"
    )

    def missing_reports(self) -> list[str]:
        """Return which records of this step were not logged yet when it was saved."""
        missing: list[str] = []
        if self.validation_loss is None:
            missing.append("validation")
        if not self.sampled:
            missing.append("sample")
        return missing


class Manifest(RunInfo, TrainingProgress, frozen=True):
    """The content of `manifest.json`."""

    format: Literal[3]
    time: float = Field(ge=0, lt=2**36, description="seconds since 1970")
    world_size: Count = Field(gt=0)
    files: dict[str, FileRecord]
    tensors: dict[str, str] = Field(
        description="shape and dtype of each tensor, by object and name"
    )

    def files_of(self, parts: Collection[str]) -> dict[str, FileRecord]:
        """Return the files with the tensors of `parts`, and those of the tokenizer."""
        others = tuple(f"{part}-" for part in PARTS if part not in parts)
        return {name: entry for name, entry in self.files.items() if not name.startswith(others)}


def add_checksum(fields: dict[str, Any]) -> bytes:
    """Return `fields` as JSON, with the checksum of that JSON as the last field."""
    text = json.dumps(fields, indent=1).encode()
    checksum = b',\n "checksum": %d\n}' % google_crc32c.value(text)
    return text.removesuffix(b"\n}") + checksum


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Turn `directory` into a complete checkpoint, atomically and crash-safe."""
    content = add_checksum(manifest.model_dump(mode="json"))
    if len(content) > MAX_JSON_BYTES:  # which would be no checkpoint to whoever reads it
        needs = f"{MANIFEST} needs {len(content):,} bytes, and {MAX_JSON_BYTES:,} are read"
        parts = f"{len(manifest.tensors):,} tensors, files of {manifest.world_size:,} ranks"
        raise RunError(f"{directory}: {needs}: {parts}; use fewer ranks or data_workers")
    draft = directory / DRAFT
    with open(draft, "wb", opener=open_regular) as file:  # which exists at every moment
        file.write(content)
        sync(file)
    draft.replace(directory / MANIFEST)
    for path in (directory, directory.parent):
        sync_directory(path)


def _place_and_name(where: Path | Place, folder: str) -> tuple[Place, str]:
    """Return what has the files of a checkpoint, and what messages call the checkpoint."""
    place = Directory(where) if isinstance(where, Path) else where
    if isinstance(place, Directory):
        return place, str(place.path.absolute() / folder)
    return place, f"{place}/{folder}".rstrip("/")


def read_manifest(where: Path | Place, folder: str = "") -> Manifest:
    """Return the manifest of a checkpoint; its files are not looked at.

    Args:
        folder: of the checkpoint in `where`.

    Raises:
        CheckpointError: the manifest is missing, damaged or a symbolic link.
        ConfigError: the manifest is of another format.
    """
    place, name = _place_and_name(where, folder)
    problem = f"{name}: not a complete checkpoint, {MANIFEST}"
    if isinstance(place, Directory) and (place.path / folder).is_symlink():
        raise CheckpointError(f"{name}: is a symbolic link; a checkpoint is a directory")
    try:
        content = place.read(f"{PurePosixPath(folder, MANIFEST)}")
    except FileNotFoundError:
        raise CheckpointError(f"{problem}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{problem}: {error.strerror}") from None
    return parse_manifest(f"{name}/{MANIFEST}", content)


def check_files(
    where: Path | Place,
    manifest: Manifest,
    parts: Collection[str] = PARTS,
    folder: str = "",
) -> None:
    """Compare the sizes of the files of `parts` of a checkpoint with its manifest.

    Args:
        folder: of the checkpoint in `where`.

    Raises:
        CheckpointError: a file is missing, or has another size.
    """
    place, checkpoint = _place_and_name(where, folder)
    try:
        sizes = place.sizes(folder)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: {error.strerror}") from None
    missing: list[str] = []
    for name, entry in manifest.files_of(parts).items():
        if name not in sizes:
            missing.append(name)
        elif sizes[name] != entry.bytes:
            problem = f"has {sizes[name]} bytes, but {entry.bytes} were written"
            raise CheckpointError(f"{checkpoint}/{name}: {problem}")
    if not missing:
        return
    more = ""
    if len(missing) > 1:
        more = f", as are {len(missing) - 1} more files"
    if manifest.files_of(WEIGHTS).keys().isdisjoint(missing):
        start = f"init_from={shlex.quote(checkpoint)} in another run"
        more += f"; its weights are there: {start} starts with them at step 0"
    raise CheckpointError(f"{checkpoint}/{missing[0]}: missing, or not a regular file{more}")


def parse_manifest(path: Path | str, text: bytes) -> Manifest:
    """Return the manifest whose file at `path` has the content `text`.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: it is of another format.
    """
    try:
        fields = parse_json(text)
        content, _, checksum = text.rpartition(b',\n "checksum": ')
        expected = b"%d\n}" % google_crc32c.value(content + b"\n}")
        if not isinstance(fields, dict) or checksum != expected:
            raise CheckpointError(f"{path}: damaged: its checksum does not match its content")
        if fields.get("format") != FORMAT:
            found = str(fields.get("format"))[:20]
            problem = f"has checkpoint format {found}, this program reads format {FORMAT}"
            raise ConfigError(f"{path}: {problem}; use the version of this program that wrote it")
        del fields["checksum"]
        manifest = Manifest.model_validate(fields)
        _require_model(path, manifest.model)
        for name in manifest.files:
            if name not in TOKENIZER_FILES and not TENSOR_FILE.fullmatch(name):
                problem = f"lists {name!r:.80}, which is not a checkpoint file"
                raise CheckpointError(f"{path}: {problem}")
        return manifest
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged: {describe_invalid(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _require_model(path: Path | str, fields: dict[str, Any]) -> None:
    try:
        model_config(fields)
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged: {describe_invalid(error, 'model')}") from None
