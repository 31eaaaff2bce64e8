"""The values of a checkpoint: verified, compared with live tensors, and loaded into them.

Loading and `python -m lm.checkpoint` share `verify`: it returns the slices that loading reads, so
that nothing is loaded that it has not accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lm.checkpoint.headers import full_shape
from lm.checkpoint.layout import (
    FoundTensors,
    describe,
    find_differences,
    find_tensors,
    require_sizes_of_model,
)
from lm.checkpoint.manifest import (
    PARTS,
    WEIGHTS,
    CheckpointError,
    Manifest,
    check_files,
    read_manifest,
)
from lm.checkpoint.tensor_files import Source, State, read_into
from lm.errors import ConfigError, limit_problems
from lm.fileio import crc32c


def describe_state(state: State) -> dict[str, str]:
    """Return what a manifest says of each tensor of `state`, by object and name."""
    described: dict[str, str] = {}
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            described[f"{part}.{name}"] = describe(tensor.shape, str(tensor.dtype))
    return described


def verify(
    directory: Path,
    manifest: Manifest,
    rank: int = 0,
    n_ranks: int = 1,
    parts: Collection[str] = PARTS,
) -> FoundTensors:
    """Check that `parts` of the checkpoint in `directory` are intact; return where they are.

    Each of `n_ranks` reads its share of the files.

    Raises:
        CheckpointError: see `verify_files` and `find_tensors`.
    """
    verify_files(directory, manifest, rank, n_ranks, parts)
    return find_tensors(directory, manifest, parts)


def verify_files(
    directory: Path, manifest: Manifest, rank: int, n_ranks: int, parts: Collection[str]
) -> None:
    """Compare the sizes of files with the model, and checksums: on each of `n_ranks` of its share.

    Raises:
        CheckpointError: a file is missing, damaged, or cannot be read; names it.
    """
    require_sizes_of_model(directory, manifest)
    check_files(directory, manifest, parts)
    for name, entry in sorted(manifest.files_of(parts).items())[rank::n_ranks]:
        _compare_checksum(directory / name, entry.crc32c)


def _compare_checksum(path: Path, expected: int) -> None:
    try:
        found = crc32c(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if found != expected:
        raise CheckpointError(f"{path}: damaged: its checksum does not match the manifest")


def require_tensors_of(state: State, directory: Path, found: FoundTensors) -> None:
    """Raise ConfigError if the tensors that were found in `directory` are not those of `state`.

    It lists up to 20 that are missing, unexpected, or of another shape or dtype.
    """
    described: dict[str, str] = {}
    for part, tensors in state.items():
        if tensors:  # else this run does not have them
            for name, slices in found[part].items():
                shape = full_shape(slices)
                assert shape is not None
                described[f"{part}.{name}"] = describe(shape, str(slices[0].dtype))
    problems = find_differences(described, describe_state(state), "the model")
    if problems:
        raise ConfigError(
            f"{directory}: the tensors differ from the model's:", *limit_problems(problems)
        )


def read_tensors(found: FoundTensors, state: State) -> None:
    """Fill this rank's slices of the tensors of `state` with what was found; see `read_into`."""
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            read_into(tensor, Source(found[part][name]))


def load_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Load the trained weights of the checkpoint in `directory` into `weights` in a single process.

    They are saved in float32, and converted to the dtype of `weights` while they are read.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: the tensors differ from the model's.
    """
    found = verify(directory, read_manifest(directory), parts=WEIGHTS)
    saved: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        saved[name] = torch.empty_like(tensor, dtype=torch.float32, device="meta")
    require_tensors_of({"model": saved}, directory, found)
    read_tensors(found, {"model": weights})
