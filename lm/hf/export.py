"""Export of a checkpoint for transformers' `from_pretrained`, or of its adapters for PEFT's.

Tensors are read one at a time, so that memory holds one tensor and one file. The files are written
to a temporary directory that is renamed when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint.contents import verify
from lm.checkpoint.layout import model_of
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import Base, Manifest, read_manifest
from lm.checkpoint.tensor_files import Rows, Source, group_by_size, read_into, write_tensors
from lm.data.tokenizer import (
    END_OF_TEXT,
    GENERATION_CONFIG,
    TOKENIZER_JSON,
    ByteTokenizer,
    Tokenizer,
    load_saved_tokenizer,
)
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.hf import config_json, families
from lm.hf.base import open_base, read_adapters
from lm.hf.families import Family, Place
from lm.hf.weights import (
    CONFIG_FILE,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX,
    WEIGHT_DTYPES,
    find_weights,
)
from lm.launch.console import warn
from lm.runtime.lease import InUseError
from lm.runtime.run_dir import lease_directory, lease_instead
from lm.training.config import LoraConfig
from lm.training.lora import Adapters
from model import ModelConfig, Transformer


@oserror_as_config_error
def export_model(
    where: Path | str,
    out: Path,
    dtype: str = "float32",
    base_dir: Path | None = None,
    adapters_only: bool = False,
) -> int:
    """Convert the checkpoint or run `where`, a path or URL, to the directory `out`.

    Args:
        dtype: a key of `WEIGHT_DTYPES`.
        base_dir: see `open_base`.
        adapters_only: write LoRA adapters in PEFT's format, instead of the model with adapters
            merged.

    Returns:
        Bytes of weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ConfigError: no Hugging Face model has this structure (lists every key that differs), `out`
            exists, there are no adapters, or their base is not found.
        RunError: `out` cannot be written, or a weight exceeds the range of float16.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")
    directory = find_checkpoint(where)
    manifest = read_manifest(directory)
    config = model_of(directory, manifest)
    if adapters_only:
        return _export_adapters(out, directory, manifest, config, WEIGHT_DTYPES[dtype])
    family = config_json.find_family(config)
    places, shapes = families.map_parameters(family, config)
    verify(directory, manifest)

    tokenizer = _load_tokenizer(directory, manifest)
    files: dict[str, bytes] = {}
    if tokenizer is None:
        model_settings = config_json.write_config(config, dtype, None)
        files[GENERATION_CONFIG] = _to_json({})
    else:
        model_settings = config_json.write_config(config, dtype, tokenizer.eos_id, tokenizer.bos_id)
        files = _convert_tokenizer(tokenizer, model_settings["bos_token_id"])
        model_settings["eos_token_id"] = _stop_ids(tokenizer)
    files[CONFIG_FILE] = _to_json(model_settings)

    weights_dir = directory
    adapters: Adapters | None = None
    if manifest.base is not None:
        weights_dir = open_base(manifest.base, base_dir)
        adapters = read_adapters(directory, manifest)
        if adapters.config.base_dtype is not None:
            remedy = "--adapter writes them alone, for PEFT on a base in NF4"
            warn(f"adapters trained on an NF4 base are merged into the original one; {remedy}")
    sources = find_weights(weights_dir, config).sources
    weights = _Weights(config, sources, adapters, places, shapes, WEIGHT_DTYPES[dtype])
    with _make_draft(out, weights.n_bytes) as draft:
        weight_map = weights.write(draft)
        is_one_file = len(set(weight_map.values())) == 1
        if not is_one_file:
            index = {"metadata": {"total_size": weights.n_bytes}, "weight_map": weight_map}
            files[SAFETENSORS_INDEX] = _to_json(index)
        for name, content in files.items():
            (draft / name).write_bytes(content)
    return weights.n_bytes


def _load_tokenizer(directory: Path, manifest: Manifest) -> Tokenizer | None:
    if manifest.tokenizer is None:
        return None
    return load_saved_tokenizer(
        manifest.tokenizer, directory, manifest.files, manifest.hyperparameters
    )


@dataclass(frozen=True)
class _Weights:
    """The weights of a model: where they are read from, and how Hugging Face stores them."""

    config: ModelConfig
    sources: Mapping[str, Source]
    """of our parameters"""
    adapters: Adapters | None
    """to merge into them"""
    places: Mapping[str, Place]
    """of our parameters in the tensors to write"""
    shapes: Mapping[str, tuple[int, ...]]
    """of the tensors to write"""
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * sum(math.prod(shape) for shape in self.shapes.values())

    def write(self, directory: Path) -> dict[str, str]:
        """Write the safetensors files; return the file of each tensor."""
        with torch.device("meta"):
            parameters = dict(Transformer(self.config).named_parameters())
            empty: dict[str, Rows] = {}
            for name, shape in self.shapes.items():
                empty[name] = Rows(torch.empty(shape, dtype=self.dtype), 0)
        groups = group_by_size(empty)
        weight_map: dict[str, str] = {}
        progress = tqdm(total=len(parameters), unit="tensor", disable=None)
        for number, group in enumerate(groups, 1):
            file = SAFETENSORS_FILE
            if len(groups) > 1:
                file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            tensors = {name: torch.zeros(self.shapes[name], dtype=self.dtype) for name in group}
            for name, place in self.places.items():
                is_zero_bias = name not in parameters
                if place.name not in tensors or is_zero_bias:
                    continue
                values = self._read_parameter(name, parameters[name].shape)
                tensor = tensors[place.name]
                if place.transposed:
                    tensor = tensor.T
                tensor[place.start : place.start + len(values)] = values
                progress.update()
            write_tensors(directory / file, {name: Rows(tensors[name], 0) for name in group})
            weight_map |= dict.fromkeys(group, file)
        progress.close()
        return weight_map

    def _read_parameter(self, name: str, shape: torch.Size) -> Tensor:
        values = torch.empty(shape)
        read_into(values, self.sources[name])
        if self.adapters is not None:
            self.adapters.merge(name, values)
        if self.dtype == torch.float16 and not values.half().isfinite().all():
            problem = "has values above 65504, the maximum of float16; use --dtype bfloat16"
            raise RunError(f"{self.places[name].name}: {problem}")
        return values


class _Adapter(NamedTuple):
    """An adapter of consecutive rows of a layer."""

    start: int
    """the first of the rows"""
    a: Tensor
    """(rank, in)"""
    b: Tensor
    """(rows, rank)"""


def _export_adapters(
    out: Path, directory: Path, manifest: Manifest, config: ModelConfig, dtype: torch.dtype
) -> int:
    """Write the adapters in a checkpoint to `out` in PEFT's format; return their bytes."""
    if manifest.base is None:
        problem = "has no LoRA adapters (lora_rank: null); export it without --adapter"
        raise ConfigError(f"{directory}: {problem}")
    family = config_json.find_family(config)
    places, shapes = families.map_parameters(family, config)
    adapters = read_adapters(directory, manifest)

    by_their_layer: dict[str, list[_Adapter]] = {}
    for name, a in adapters.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        place = places[f"{layer}.weight"]
        adapter = _Adapter(place.start, a, adapters[f"{layer}.lora_B.weight"])
        by_their_layer.setdefault(place.name.removesuffix(".weight"), []).append(adapter)

    tensors: dict[str, Rows] = {}
    ranks: dict[str, int] = {}
    partial: set[str] = set()
    """layers in which adapters are for a part of the rows"""
    for layer, of_layer in by_their_layer.items():
        n_out = shapes[f"{layer}.weight"][1 if family.transposed else 0]
        a, b = _combine_adapters(of_layer, n_out)
        if len(b) > len(of_layer[0].b):  # the layer is several of ours
            partial.add(re.sub(r"\.\d+\.", ".*.", layer))
        tensors[f"base_model.model.{layer}.lora_A.weight"] = Rows(a.to(dtype), 0)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = Rows(b.to(dtype), 0)
        _, layer_in_block = re.split(r"\.\d+\.", layer)
        ranks[layer_in_block] = len(a)

    files = {
        "adapter_config.json": _write_peft_config(manifest.base, adapters.config, ranks, family)
    }
    tokenizer = _load_tokenizer(directory, manifest)
    if tokenizer is not None:
        files |= _convert_tokenizer(tokenizer, tokenizer.bos_id)
    n_bytes = sum(tensor.nbytes for tensor, _ in tensors.values())
    with _make_draft(out, n_bytes) as draft:
        write_tensors(draft / "adapter_model.safetensors", tensors)
        for name, content in files.items():
            (draft / name).write_bytes(content)
    for layer in sorted(partial):
        cause = "B has blocks of zeros, as each part of the layer has an adapter or none"
        warn(f"{layer}: {cause}: PEFT computes the same, but would train the zeros, too")
    return n_bytes


def _combine_adapters(adapters: Sequence[_Adapter], n_out: int) -> tuple[Tensor, Tensor]:
    """Return A and B of one adapter that changes a layer of `n_out` rows as `adapters` do.

    Below one another, their A are one matrix of the sum of their ranks. Its product with a B whose
    rows of an adapter are that adapter's B in the columns of its ranks, and 0 elsewhere, has in
    these rows the product of the adapter's B and A.
    """
    a = torch.cat([adapter.a for adapter in adapters])
    b = torch.zeros(n_out, len(a))
    first_rank = 0
    for adapter in adapters:
        n_rows, rank = adapter.b.shape
        rows = slice(adapter.start, adapter.start + n_rows)
        b[rows, first_rank : first_rank + rank] = adapter.b
        first_rank += rank
    return a, b


def _write_peft_config(
    base: Base, config: LoraConfig, ranks: Mapping[str, int], family: Family
) -> bytes:
    """Return PEFT's `adapter_config.json`; `ranks` are those of the adapters, by layer."""
    name = base.source
    revision: str | None = None
    is_on_hub = not Path(base.source).is_absolute()
    if is_on_hub:
        name, _, revision = base.source.partition("@")
    other_ranks = {layer: rank for layer, rank in ranks.items() if rank != config.lora_rank}
    # PEFT divides each alpha by its own rank, or the root of it.
    other_alphas: dict[str, float] = {}
    for layer, rank in other_ranks.items():
        other_alphas[layer] = config.lora_scale * config.rank_divisor(rank)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": other_ranks,
        "alpha_pattern": other_alphas,
        "fan_in_fan_out": family.transposed,
        "bias": "none",
        "inference_mode": True,
    }
    return _to_json(settings)


def _to_json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


@contextmanager
def _make_draft(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out` on success and is deleted on failure.

    Args:
        needed: bytes of the disk.

    Raises:
        ConfigError: `out` cannot be created.
        RunError: the disk is full or fails.
    """
    draft = out.with_name(f".{out.name}.draft")
    try:
        draft.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be created: {error.strerror}") from None
    try:
        with lock_directory(draft), ExitStack() as on_exit:
            on_exit.callback(shutil.rmtree, draft, ignore_errors=True)
            for left in draft.iterdir():  # by a command that was killed
                left.unlink()
            free = shutil.disk_usage(draft).free
            if free < needed:
                raise RunError(f"{out}: disk full: {needed:,} bytes are needed, {free:,} are free")
            yield draft
            draft.rename(out)
    except (BlockingIOError, InUseError):
        problem = "another process exports to it; wait for it, or use another directory"
        raise RunError(f"{out}: {problem}") from None
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` until this process ends or leaves.

    Raises:
        BlockingIOError, InUseError: another process has locked it.
    """
    with ExitStack() as on_exit:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        on_exit.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lease = lease_instead(directory, error)
            on_exit.callback(shutil.rmtree, lease_directory(directory), ignore_errors=True)
            on_exit.callback(lease.release)
        yield


def _convert_tokenizer(tokenizer: Tokenizer, bos_id: int | None) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` and `GenerationConfig` read, by name."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        files[TOKENIZER_JSON] = _write_byte_level_bpe()
    encoder = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_JSON])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": encoder.id_to_token(tokenizer.eos_id),
    }
    files.setdefault("tokenizer_config.json", json.dumps(settings, indent=2).encode())
    generation: dict[str, Any] = {}
    if bos_id is not None:
        generation["bos_token_id"] = bos_id
    if GENERATION_CONFIG in files:
        generation |= json.loads(files[GENERATION_CONFIG])
    generation["eos_token_id"] = _stop_ids(tokenizer)
    files[GENERATION_CONFIG] = _to_json(generation)
    return files


def _stop_ids(tokenizer: Tokenizer) -> int | list[int]:
    """Return the ids that end a text or a reply, as transformers writes them."""
    ids = sorted(tokenizer.chat_stop_ids)
    if len(ids) == 1:
        return ids[0]
    return ids


def _write_byte_level_bpe() -> bytes:
    """Return the file of a byte-level BPE without merges, which has the ids of the byte tokenizer.

    Byte-level BPE represents a byte by its character if that prints, else, in order, by letters
    from U+0100 on.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printed = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(printed))
    vocabulary = dict(zip(letters, [*printed, *others], strict=True))
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
    return encoder.to_str(pretty=True).encode()
