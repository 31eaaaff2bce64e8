"""What a checkpoint has to hold, by its manifest, and whether its files do.

Loading and `python -m lm.checkpoint` share `verify`: it returns the slices that loading reads, so
that nothing is loaded that it has not accepted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from lm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    describe_invalid,
    read_manifest,
)
from lm.checkpoint.tensor_files import (
    Source,
    State,
    TensorSlice,
    full_shape,
    read_headers,
    read_into,
    scan_file,
)
from lm.errors import ConfigError, limit_problems
from lm.fileio import MAX_SLICES, MAX_TOKENIZER_BYTES
from lm.training import lora
from lm.training.lora import LoraConfig
from lm.training.optim import OptimConfig, Optimizer
from lm.training.precision import LossScaler
from lm.training.skipping import SkipConfig, SpikeFilter
from model import ModelConfig, Transformer

T = TypeVar("T", bound=BaseModel)

FoundTensors = dict[str, dict[str, list[TensorSlice]]]
"""The slices that cover each tensor exactly once, by object and tensor name."""

MAX_ENTRY_BYTES = 512
"""Of a slice in a header, with its share of what a file has besides slices. Ours have up to 300."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


def expected_tensors(where: Path | str, manifest: Manifest) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors of a run with this manifest, by object and tensor name.

    They are those of `fsdp.Trainer.state`, of a model with one block, which is like all others.

    Raises:
        CheckpointError: no run has this manifest, which is that of the checkpoint at `where`.
    """
    config = ModelConfig.model_validate(manifest.model)
    return _expected_tensors(
        config,
        lora_config(where, manifest, config).model_dump_json(),
        _select(where, manifest, OptimConfig),
        _select(where, manifest, SkipConfig).model_dump_json(),
        manifest.loss_scaled,
    )


@functools.lru_cache(maxsize=1)
def _expected_tensors(
    config: ModelConfig,
    lora_json: str,
    optim_config: OptimConfig,
    skip_json: str,
    loss_scaled: bool,
) -> dict[str, dict[str, TensorSpec]]:
    adapters = LoraConfig.model_validate_json(lora_json)
    one_block = config.model_copy(update={"n_layers": 1})
    meta = torch.device("meta")
    with meta:
        model = lora.add_adapters(Transformer(one_block), adapters, None)
    scaled_dtype = None
    if loss_scaled:
        scaled_dtype = torch.float16
    state: State = {
        "model": lora.trained_parameters(model),
        "optim": Optimizer(optim_config, model.named_parameters()).state_dict(),
        "scaler": LossScaler(scaled_dtype, meta).state_dict(),
        "spikes": SpikeFilter(SkipConfig.model_validate_json(skip_json), meta).state_dict(),
    }
    expected: dict[str, dict[str, TensorSpec]] = {}
    for part, tensors in state.items():
        specs: dict[str, TensorSpec] = {}
        for name, tensor in tensors.items():
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
            for name_in_layer in _names_in_layers(name, config.n_layers):
                specs[name_in_layer] = spec
        expected[part] = specs
    return expected


def _names_in_layers(name: str, n_layers: int) -> Iterator[str]:
    prefix = "blocks.0."
    if not name.startswith(prefix):
        yield name
        return
    for layer in range(n_layers):
        yield f"blocks.{layer}.{name.removeprefix(prefix)}"


def lora_config(where: Path | str, manifest: Manifest, model: ModelConfig) -> LoraConfig:
    """Return the configuration of the adapters in the checkpoint at `where`.

    Raises:
        CheckpointError: its hyperparameters are not those of adapters of `model`.
    """
    if manifest.base is None:
        return LoraConfig.model_validate({})
    config = _select(where, manifest, LoraConfig)
    problems = list(lora.adapter_problems(config, model))
    if config.lora_rank is None:
        problems.append(("lora_rank", "null, but the manifest names a base of adapters"))
    for key, problem in problems:
        raise CheckpointError(f"{where}/{MANIFEST}: damaged: hyperparameters.{key}: {problem}")
    return config


def _select(where: Path | str, manifest: Manifest, config: type[T]) -> T:
    """Return the hyperparameters of a part; one that an earlier version lacked has its default."""
    values: dict[str, Any] = {}
    for key in config.model_fields:
        if key in manifest.hyperparameters:
            values[key] = manifest.hyperparameters[key]
    try:
        return config.model_validate(values)
    except ValidationError as error:
        problem = describe_invalid(error, "hyperparameters")
        raise CheckpointError(f"{where}/{MANIFEST}: damaged: {problem}") from None


def model_of(where: Path | str, manifest: Manifest) -> ModelConfig:
    """Return the model of the checkpoint at `where`, before it is built.

    Raises:
        CheckpointError: see `require_sizes_of_model`.
    """
    require_sizes_of_model(where, manifest)
    return ModelConfig.model_validate(manifest.model)


def require_sizes_of_model(where: Path | str, manifest: Manifest) -> None:
    """Raise CheckpointError if files are too small or too large for what they have to hold.

    It is called before they are read or downloaded: a sparse file of any size is cheap to send.
    """
    expected = expected_tensors(where, manifest)
    n_parameters = ModelConfig.model_validate(manifest.model).n_parameters
    problem = f"{where}/{MANIFEST}: damaged: a model of {n_parameters:,} parameters"
    if manifest.base is not None:
        found = sum(entry.bytes for entry in manifest.base.files.values())
        needed = 2 * n_parameters  # bfloat16 or more
        if found < needed:
            needs = f"of which adapters need {needed:,} bytes"
            raise CheckpointError(f"{problem}, {needs}; the files of their base have {found:,}")
    for part, specs in expected.items():
        needed = sum(spec.n_bytes for spec in specs.values())
        found = sum(entry.bytes for entry in _files_of(part, manifest).values())
        if not needed <= found <= most_bytes(needed):
            needs = f"whose {part} files need {needed:,} bytes"
            raise CheckpointError(f"{problem}, {needs}; they have {found:,}")
    for name, entry in manifest.files.items():
        if not name.endswith(".safetensors") and entry.bytes > MAX_TOKENIZER_BYTES:
            limit = f"at most {MAX_TOKENIZER_BYTES:,} are read"
            raise CheckpointError(f"{where}/{name}: {entry.bytes:,} bytes, but {limit}")


def most_bytes(needed: int) -> int:
    """Return the size of files with values of `needed` bytes and the longest headers.

    `read_headers` accepts MAX_SLICES entries, and one more per KiB of the files. With at most 512
    bytes each, n bytes of files have headers of up to n / 2 + 512 MAX_SLICES bytes:
    n <= needed + n / 2 + 512 MAX_SLICES.
    """
    return 2 * (needed + MAX_ENTRY_BYTES * MAX_SLICES)


def _files_of(part: str, manifest: Manifest) -> dict[str, FileRecord]:
    return {name: entry for name, entry in manifest.files.items() if name.startswith(f"{part}-")}


def find_tensors(directory: Path, manifest: Manifest) -> FoundTensors:
    """Return where each tensor is that the checkpoint has to hold; no values are read.

    Raises:
        CheckpointError: a header is damaged; a tensor is missing, is not the model's, has another
            shape or dtype, or is not covered exactly once by its slices.
    """
    expected = expected_tensors(directory, manifest)
    found: FoundTensors = {}
    problems: list[str] = []
    for part, specs in expected.items():
        found[part] = read_headers(directory / name for name in sorted(_files_of(part, manifest)))
        for name in found[part].keys() | specs.keys():
            problem = _compare(found[part].get(name), specs.get(name))
            if problem is not None:
                problems.append(f"{part}.{name[:200]} {problem}")
    if problems:
        first = min(problems)
        more = ""
        if len(problems) > 1:
            more = f", and {len(problems) - 1} more tensors differ"
        raise CheckpointError(f"{directory}: damaged: {first}{more}")
    return found


def _compare(slices: Sequence[TensorSlice] | None, expected: TensorSpec | None) -> str | None:
    """Return how a tensor in the files differs from the expected one; None for one = none."""
    if slices is None:
        return "is missing"
    if expected is None:
        return "is not a tensor of its model"
    shape = full_shape(slices)
    if shape is None:
        return "is not covered exactly once by its slices"
    found = TensorSpec(shape, slices[0].dtype)
    if found != expected:
        return f"is {found} in the files, {expected} in its model"
    return None


def verify(directory: Path, manifest: Manifest, rank: int = 0, n_ranks: int = 1) -> FoundTensors:
    """Check that the checkpoint in `directory` is intact, and return where its tensors are.

    Each of `n_ranks` reads its share of the files.

    Raises:
        CheckpointError: see `verify_files` and `find_tensors`.
    """
    verify_files(directory, manifest, rank, n_ranks)
    return find_tensors(directory, manifest)


def verify_files(directory: Path, manifest: Manifest, rank: int = 0, n_ranks: int = 1) -> None:
    """Compare the sizes of files with the model, and checksums: on each of `n_ranks` of its share.

    Raises:
        CheckpointError: a file is damaged, cannot be read, or holds inf or NaN; names the file.
    """
    require_sizes_of_model(directory, manifest)
    for name, entry in sorted(manifest.files.items())[rank::n_ranks]:
        path = directory / name
        content = scan_file(path, _slices_in(path))
        if content.crc32c != entry.crc32c:
            raise CheckpointError(f"{path}: damaged: its checksum does not match the manifest")
        if not content.is_finite:
            raise CheckpointError(f"{path}: contains inf or NaN; use another checkpoint")


def _slices_in(path: Path) -> list[TensorSlice]:
    """Return the slices in a file; none if it has no header or a damaged one."""
    if path.suffix != ".safetensors":
        return []
    try:
        tensors = read_headers([path])
    except CheckpointError:  # which `find_tensors` raises, too, if the checksum matches
        return []
    return [piece for slices in tensors.values() for piece in slices]


class MatchedTensor(NamedTuple):
    """A live tensor, and where its values are."""

    name: str
    tensor: Tensor
    source: Source


def match_tensors(directory: Path, found: FoundTensors, state: State) -> list[MatchedTensor]:
    """Return where the values of all tensors of `state` were found in `directory`.

    Raises:
        ConfigError: lists up to 20 of the tensors that are missing, unexpected, or of another shape
            or dtype.
    """
    matched: list[MatchedTensor] = []
    problems: list[str] = []
    for part, wanted in state.items():
        if not wanted:
            continue
        unexpected = [name for name in found[part] if name not in wanted]
        problems += [f"{part}.{name}: only in the checkpoint" for name in unexpected]
        for name, tensor in wanted.items():
            slices = found[part].get(name)
            if slices is None:
                problems.append(f"{part}.{name}: not in the checkpoint")
                continue
            problem = _compare(slices, TensorSpec(tuple(tensor.shape), tensor.dtype))
            if problem is not None:
                problems.append(f"{part}.{name} {problem}")
            matched.append(MatchedTensor(name, tensor, Source(slices)))
    if problems:
        raise ConfigError(
            f"{directory}: the tensors differ from the model's:", *limit_problems(problems)
        )
    return matched


def read_tensors(matched: Sequence[MatchedTensor]) -> None:
    """Fill this rank's slices of the tensors that `match_tensors` returned; see `read_into`."""
    for _, tensor, source in matched:
        read_into(tensor, source)


def load_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Load the trained weights of the checkpoint in `directory` into `weights` in a single process.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: the tensors differ from the model's.
    """
    found = verify(directory, read_manifest(directory))
    read_tensors(match_tensors(directory, found, {"model": weights}))
