"""Checkpoints in a single process, with their tokenizer, and the base of LoRA adapters.

The base is identified when training starts, and found again and checked when the adapters are used.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch

from lm.any_model import AnyModel, convert_weights, new_model
from lm.checkpoint.compare import refuse_adapters
from lm.checkpoint.contents import load_weights, verify
from lm.checkpoint.headers import read_headers
from lm.checkpoint.layout import lora_config, model_of
from lm.checkpoint.locate import find_checkpoint, locate_checkpoint
from lm.checkpoint.manifest import (
    MANIFEST,
    WEIGHTS,
    Base,
    Manifest,
    check_files,
    read_manifest,
)
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import Tokenizer, load_saved_tokenizer
from lm.errors import ConfigError, error_prefix, oserror_as_config_error, without_prefix
from lm.fileio import expand_home
from lm.hf import weights
from lm.hf.files import WEIGHT_DTYPES, follow_links, list_weight_files
from lm.runtime.world import World
from lm.storage.bucket import is_url
from lm.storage.folder import FileRecord, record
from lm.training import lora
from lm.training.lora import Adapters


def find_base(source: str, world: World) -> Base:
    """Return what identifies the weights of `source`, a value of `init_from`.

    All ranks call this together: each computes the checksums of a share of the files.

    Raises:
        ConfigError: it is no Hugging Face model or checkpoint, or a checkpoint of adapters.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    directory = world.run_in_thread(_find_base_directory, source)  # which can download for long
    with world.all_or_none():
        own_share = compute_checksums(directory, world.rank, world.size)
    files: dict[str, FileRecord] = {}
    for share in world.all_gather_object(own_share):
        files |= share
    name = str(directory.absolute())
    if not Path(source).is_dir():  # on a hub, whose directories are named after the commit
        repository = source.partition("@")[0]
        name = f"{repository}@{directory.name}"
    return Base(source=name, files=files)


def _find_base_directory(source: str) -> Path:
    if is_url(source):
        problem = f"init_from: {source}: the base of adapters must be on a disk"
        raise ConfigError(f"{problem}; run: python -m lm.hf export {shlex.quote(source)} DIRECTORY")
    if weights.is_model(source):
        return weights.find_source(source)
    with error_prefix("init_from"):
        directory = find_checkpoint(Path(source)).absolute()
    refuse_adapters(read_manifest(directory), source)
    return directory


@oserror_as_config_error
def compute_checksums(directory: Path, rank: int = 0, n_ranks: int = 1) -> dict[str, FileRecord]:
    """Return size and checksum of the files of weights in `directory`.

    They are those of a share of the files for `rank` of `n_ranks`; or if `directory` is a
    checkpoint, of all: there the share is only verified.
    """
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory)
        verify(directory, manifest, rank, n_ranks, WEIGHTS)
        return _weight_records(manifest)
    return _record_all(list_weight_files(directory)[rank::n_ranks])


def _record_all(paths: Sequence[Path]) -> dict[str, FileRecord]:
    """Return size and checksum of safetensors files, none of which is longer than its tensors."""
    targets = {path.name: follow_links(path) for path in paths}
    read_headers(targets.values())
    return {name: record(target) for name, target in targets.items()}


@oserror_as_config_error
def fingerprint_weights(source: str) -> str:
    """Return what identifies the weights of `source`, a value of `init_from`, by content.

    One checkpoint in object storage is never written twice, so its URL does.
    """
    if weights.is_model(source):
        files = compute_checksums(weights.find_source(source))
    else:
        with error_prefix("init_from"):
            location = locate_checkpoint(source)
        if location.path is None:
            return str(location)
        files = _weight_records(read_manifest(location.path))
    records = {name: entry.model_dump() for name, entry in files.items()}
    text = json.dumps(records, sort_keys=True)
    return f"{len(files)} files, sha256 of their checksums {sha256(text.encode()).hexdigest()}"


def _weight_records(manifest: Manifest) -> dict[str, FileRecord]:
    return {name: entry for name, entry in manifest.files.items() if name.startswith("model-")}


def open_base(base: Base, base_dir: Path | None = None) -> Path:
    """Return the directory of the weights that adapters were trained for.

    Args:
        base_dir: a directory that holds a copy of them; None = where they were in training.

    Raises:
        ConfigError: they are not there, or differ.
    """
    try:
        with without_prefix("init_from"):
            directory = weights.find_source(expand_home(str(base_dir or base.source)))
    except ConfigError as error:
        problem = f"base of the adapters: {error}"
        raise ConfigError(f"{problem}; pass its directory with --base") from None
    if compute_checksums(directory) != base.files:
        raise ConfigError(
            f"{directory}: its weights differ from the base that the adapters were trained for"
            f" ({base.source}); pass a copy of these with --base"
        )
    return directory


def find_base_of(directory: Path, manifest: Manifest, base_dir: Path | None) -> Path | None:
    """Return the directory of the base of the adapters in a checkpoint; None = it has none.

    Args:
        base_dir: see `open_base`.

    Raises:
        ConfigError: see `open_base`; or there is no use for `base_dir`.
    """
    if manifest.base is not None:
        return open_base(manifest.base, base_dir)
    if base_dir is not None:
        raise ConfigError(f"--base: {directory} has no LoRA adapters; leave --base out for it")
    return None


def read_adapters(directory: Path, manifest: Manifest) -> Adapters:
    """Return the adapters in a checkpoint, in a single process.

    Raises:
        CheckpointError: it is damaged.
    """
    model = model_of(directory, manifest)
    adapters = Adapters(lora_config(directory, manifest, model), model)
    load_weights(directory, adapters)
    return adapters


@torch.no_grad()
def load_trained_model(
    directory: Path,
    device: torch.device,
    base_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> AnyModel:
    """Return the model of a checkpoint in a single process, in evaluation mode.

    It computes as in training: adapters are next to their base, which is in `base_dtype`.

    Args:
        base_dir: see `open_base`.
        dtype: of the weights.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: the tensors differ from the model's, or the base of adapters is not found.
    """
    manifest = read_manifest(directory)
    config = weights.with_kernels(model_of(directory, manifest))
    base = find_base_of(directory, manifest, base_dir)
    with torch.device("meta"):
        model = new_model(config)
        if base is not None:
            lora.add_adapters(model, lora_config(directory, manifest, config), None)
        convert_weights(model.eval(), dtype)
    model.to_empty(device=device)
    if base is not None:
        weights.read_directory(base, model)
    load_weights(directory, lora.trained_parameters(model))
    return model


def load_model(
    directory: Path,
    device: torch.device,
    base_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[AnyModel, Tokenizer]:
    """Return the model and the tokenizer of a checkpoint; see `load_trained_model`.

    Raises:
        CheckpointError: it is incomplete or damaged.
        ConfigError: it has no tokenizer, or the base of its adapters is not found.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest, WEIGHTS)
    if manifest.tokenizer is None:
        raise ConfigError(
            f"{directory}: has no tokenizer: trained on random tokens, or on ids of an unknown"
            " tokenizer"
        )
    tokenizer = load_saved_tokenizer(
        manifest.tokenizer, directory, manifest.files, manifest.hyperparameters
    )
    tokenizer.limit_ids(model_of(directory, manifest).vocab_size)
    return load_trained_model(directory, device, base_dir, dtype), tokenizer


@without_prefix("init_from")
def open_model(
    source: str | Path,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    base_dir: Path | None = None,
) -> tuple[AnyModel, Tokenizer]:
    """Return the model and the tokenizer of a run, a checkpoint, or a model of Hugging Face.

    The model is in evaluation mode: without dropout.

    Args:
        source: a directory, a URL, or for Hugging Face also OWNER/MODEL; of a run, its newest
            checkpoint is opened.
        device: cpu, cuda or cuda:INDEX.
        dtype: of the weights: one of `WEIGHT_DTYPES`.
        base_dir: a copy of the base of LoRA adapters; None = where it was in training.

    Raises:
        ConfigError: there is none at `source`, it has no tokenizer, or no use for `base_dir`; or
            PyTorch cannot use `device`.
        RunError: a file is damaged.
    """
    source = expand_home(str(source))
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype: {dtype}: use one of {', '.join(WEIGHT_DTYPES)}")
    try:
        device = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError):  # PyTorch without CUDA, no such GPU or device
        problem = "PyTorch cannot use it here; use cpu, or cuda on a machine with a GPU"
        raise ConfigError(f"device: {device}: {problem}") from None
    weight_dtype = getattr(torch, dtype)
    if not weights.is_model(source):
        checkpoint = find_checkpoint(source)
        return load_model(checkpoint, device, base_dir, weight_dtype)
    if base_dir is not None:
        raise ConfigError(f"--base: {source} has no LoRA adapters; leave --base out for it")
    directory = weights.find_source(source)
    config = weights.read_structure(directory)
    tokenizer = weights.load_model_tokenizer(directory, config)
    if tokenizer is None:
        raise ConfigError(f"{directory}: has no {TOKENIZER_JSON}; add the model's")
    return weights.load_model(directory, config, device, weight_dtype), tokenizer
