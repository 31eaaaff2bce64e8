"""Which tensors a checkpoint holds and where, by its manifest and the headers of its files.

No values are read, and PyTorch is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lm.checkpoint.headers import TensorSlice, full_shape, read_headers
from lm.checkpoint.manifest import (
    MANIFEST,
    PARTS,
    CheckpointError,
    Manifest,
    describe_invalid,
)
from lm.storage.folder import FileRecord
from lm.training.config import LoraConfig, adapter_problems, n_trained_parameters
from lm.transformers_config import AnyModelConfig, model_config

T = TypeVar("T", bound=BaseModel)

FoundTensors = dict[str, dict[str, list[TensorSlice]]]
"""The slices that cover each tensor exactly once, by object and tensor name."""


def describe(shape: Iterable[int], dtype: str) -> str:
    """Return what a manifest says of a tensor, e.g. "[512, 64] torch.float32"."""
    return f"{list(shape)} {dtype}"


def lora_config(where: Path | str, manifest: Manifest, model: AnyModelConfig) -> LoraConfig:
    """Return the configuration of the adapters in the checkpoint at `where`.

    Raises:
        CheckpointError: its hyperparameters are not those of adapters of `model`.
    """
    if manifest.base is None:
        return LoraConfig.model_validate({})
    config = hyperparameters_of(where, manifest, LoraConfig)
    problems = list(adapter_problems(config, model))
    if config.lora_rank is None:
        problems.append(("lora_rank", "null, but the manifest names a base of adapters"))
    for key, problem in problems:
        raise CheckpointError(f"{where}/{MANIFEST}: damaged: hyperparameters.{key}: {problem}")
    return config


def hyperparameters_of(where: Path | str, manifest: Manifest, config: type[T]) -> T:
    """Return the hyperparameters of a part; one that an earlier version lacked has its default.

    Raises:
        CheckpointError: they are not valid.
    """
    values: dict[str, Any] = {}
    for key in config.model_fields:
        if key in manifest.hyperparameters:
            values[key] = manifest.hyperparameters[key]
    try:
        return config.model_validate(values)
    except ValidationError as error:
        problem = describe_invalid(error, "hyperparameters")
        raise CheckpointError(f"{where}/{MANIFEST}: damaged: {problem}") from None


def model_of(where: Path | str, manifest: Manifest) -> AnyModelConfig:
    """Return the model of the checkpoint at `where`, before it is built.

    Raises:
        CheckpointError: see `require_sizes_of_model`.
    """
    require_sizes_of_model(where, manifest)
    return model_config(manifest.model)


def require_sizes_of_model(where: Path | str, manifest: Manifest) -> None:
    """Raise CheckpointError if the files of the weights are too small for the manifest's model.

    It is called before the model is built: a manifest whose model needs any memory is cheap to
    send.
    """
    config = model_config(manifest.model)
    problem = f"{where}/{MANIFEST}: damaged: a model of {config.n_parameters:,} parameters"
    if manifest.base is not None:
        found = sum(entry.bytes for entry in manifest.base.files.values())
        needed = config.n_parameters // 2  # 4 bits or more, as in MXFP4
        if found < needed:
            needs = f"of which adapters need {needed:,} bytes"
            raise CheckpointError(f"{problem}, {needs}; the files of their base have {found:,}")
    adapters = lora_config(where, manifest, config)
    needed = 4 * n_trained_parameters(adapters, config)  # float32
    found = sum(entry.bytes for entry in _files_of("model", manifest).values())
    if found < needed:
        needs = f"whose model files need {needed:,} bytes"
        raise CheckpointError(f"{problem}, {needs}; they have {found:,}")


def _files_of(part: str, manifest: Manifest) -> dict[str, FileRecord]:
    return {name: entry for name, entry in manifest.files.items() if name.startswith(f"{part}-")}


def find_tensors(
    directory: Path, manifest: Manifest, parts: Collection[str] = PARTS
) -> FoundTensors:
    """Return where each tensor of `parts` of the checkpoint is; no values are read.

    Raises:
        CheckpointError: a header is damaged; a tensor is not covered exactly once by its slices, or
            the files have others than the manifest says.
    """
    found: FoundTensors = {}
    described: dict[str, str] = {}
    problems: list[str] = []
    for part in parts:
        found[part] = read_headers(directory / name for name in sorted(_files_of(part, manifest)))
        for name, slices in found[part].items():
            shape = full_shape(slices)
            if shape is None:
                problems.append(f"{part}.{name[:200]} is not covered exactly once by its slices")
            else:
                described[f"{part}.{name}"] = describe(shape, str(slices[0].dtype))
    if not problems:
        expected = {
            name: tensor
            for name, tensor in manifest.tensors.items()
            if name.partition(".")[0] in parts
        }
        problems = find_differences(described, expected, "the manifest")
    if problems:
        first = min(problems)
        more = ""
        if len(problems) > 1:
            more = f", and {len(problems) - 1} more tensors differ"
        raise CheckpointError(f"{directory}: damaged: {first}{more}")
    return found


def find_differences(
    found: Mapping[str, str], expected: Mapping[str, str], where: str
) -> list[str]:
    """Return a line for each tensor of the files that is not the one that is expected."""
    problems: list[str] = []
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            problems.append(f"{name[:200]} is missing in the files")
        elif name not in expected:
            problems.append(f"{name[:200]} is not in {where}")
        elif found[name] != expected[name]:
            problem = f"is {found[name]} in the files, {expected[name]} in {where}"
            problems.append(f"{name[:200]} {problem}")
    return problems
