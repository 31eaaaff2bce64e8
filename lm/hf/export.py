"""Export of a checkpoint to a directory that transformers' `from_pretrained` loads, or of adapters for PEFT's.

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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint.manifest import Base, Manifest, model_of, read_manifest, verify
from lm.checkpoint.resume import find_checkpoint
from lm.checkpoint.tensor_files import Source, group_by_size, read_into, write_tensors
from lm.data.tokenizer import (
    END_OF_TEXT,
    FILE,
    GENERATION,
    ByteTokenizer,
    Tokenizer,
    saved_tokenizer,
)
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.hf import families
from lm.hf.base import open_base, read_adapters
from lm.hf.families import Family, Place
from lm.hf.weights import CONFIG, WEIGHT_DTYPES, INDEX, WEIGHTS, find_weights
from lm.training.lora import Adapters, LoraConfig
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
        return _write_adapters(out, directory, manifest, config, WEIGHT_DTYPES[dtype])
    family = families.find_family(config)
    places, shapes = families.map_parameters(family, config)
    verify(directory, manifest)
    tokenizer = (
        saved_tokenizer(manifest.tokenizer, directory, manifest.files, {})
        if manifest.tokenizer
        else None
    )
    specials = (tokenizer.eos_id, tokenizer.bos_id) if tokenizer else (None, None)
    raw = families.write_config(config, dtype, *specials)
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if raw[key] is not None}
    files = _tokenizer_files(tokenizer) if tokenizer else {}
    files[CONFIG] = _to_json(raw)
    files[GENERATION] = _to_json(generation | json.loads(files.get(GENERATION, b"{}")))
    opened = open_base(manifest.base, base_dir) if manifest.base else directory
    adapters = read_adapters(directory, manifest) if manifest.base else None
    sources, _ = find_weights(opened, config)
    size = WEIGHT_DTYPES[dtype].itemsize * sum(map(math.prod, shapes.values()))
    with _drafted(out, size) as draft:
        weight_map = _write_weights(draft, config, places, shapes, WEIGHT_DTYPES[dtype], sources, adapters)
        if len(set(weight_map.values())) > 1:
            files[INDEX] = _to_json({"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, content in files.items():
            (draft / name).write_bytes(content)
    return size


def _write_weights(
    draft: Path,
    config: ModelConfig,
    places: Mapping[str, Place],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    sources: Mapping[str, Source],
    adapters: Adapters | None,
) -> dict[str, str]:
    """Write the safetensors files; return the file of each tensor."""
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
        groups = group_by_size(
            {name: (torch.empty(shape, dtype=dtype), None) for name, shape in shapes.items()}
        )
    weight_map: dict[str, str] = {}
    progress = tqdm(total=len(parameters), unit="tensor", disable=None)
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WEIGHTS
        tensors = {name: torch.zeros(shapes[name], dtype=dtype) for name in group}
        for name, place in places.items():
            if place.name not in tensors or name not in parameters:
                continue
            values = torch.empty(parameters[name].shape)
            read_into(values, sources[name])
            if adapters:
                adapters.merge(name, values)
            if dtype == torch.float16 and not values.half().isfinite().all():
                raise RunError(
                    f"{place.name}: has values above 65504, the maximum of float16; use --dtype bfloat16"
                )
            stored = tensors[place.name].T if place.transposed else tensors[place.name]
            stored[place.start : place.start + len(values)] = values
            progress.update()
        write_tensors(draft / file, {name: (tensor, 0) for name, tensor in tensors.items()})
        weight_map |= dict.fromkeys(group, file)
    progress.close()
    return weight_map


def _write_adapters(
    out: Path, directory: Path, manifest: Manifest, config: ModelConfig, dtype: torch.dtype
) -> int:
    """Write the adapters in a checkpoint to `out` in PEFT's format; return their bytes.

    Adapters of matrices that the family stores as one become one adapter of the sum of their ranks:
    A is theirs below one another, and B has theirs as blocks.
    """
    if manifest.base is None:
        raise ConfigError(
            f"{directory}: has no LoRA adapters (lora_rank: null); export it without --adapter"
        )
    family = families.find_family(config)
    places, shapes = families.map_parameters(family, config)
    adapters = read_adapters(directory, manifest)
    parts: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for name in (name for name in adapters if name.endswith(".lora_A.weight")):
        layer = name.removesuffix(".lora_A.weight")
        place = places[f"{layer}.weight"]
        part = place.start, adapters[name], adapters[f"{layer}.lora_B.weight"]
        parts.setdefault(place.name.removesuffix(".weight"), []).append(part)
    tensors, ranks = {}, {}
    for layer, found in parts.items():
        a = torch.cat([a for _, a, _ in found])
        b = torch.zeros(shapes[f"{layer}.weight"][1 if family.transposed else 0], len(a))
        for column, (start, _, values) in zip(
            range(0, len(a), len(a) // len(found)), found, strict=True
        ):
            b[start : start + len(values), column : column + values.shape[1]] = values
        prefix, ranks[re.split(r"\.\d+\.", layer)[1]] = f"base_model.model.{layer}", len(a)
        for name, tensor in (("lora_A", a), ("lora_B", b)):
            tensors[f"{prefix}.{name}.weight"] = tensor.to(dtype), 0
    raw = _adapter_config(manifest.base, adapters.config, ranks, family)
    total = sum(tensor.nbytes for tensor, _ in tensors.values())
    with _drafted(out, total) as draft:
        write_tensors(draft / "adapter_model.safetensors", tensors)
        (draft / "adapter_config.json").write_bytes(_to_json(raw))
    return total


def _adapter_config(
    base: Base, config: LoraConfig, ranks: Mapping[str, int], family: Family
) -> dict[str, Any]:
    """Return PEFT's `adapter_config.json`; `ranks` are those of the adapters, by layer."""
    name, _, revision = (
        (base.source, "", "") if Path(base.source).is_absolute() else base.source.partition("@")
    )
    others = {layer: rank for layer, rank in ranks.items() if rank != config.lora_rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {layer: config.lora_scale * rank for layer, rank in others.items()},
        "fan_in_fan_out": family.transposed,
        "bias": "none",
        "inference_mode": True,
    }


def _to_json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


@contextmanager
def _drafted(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary directory next to `out` that is renamed to `out` on success and deleted on failure.

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
        with locked(draft), ExitStack() as on_exit:
            on_exit.callback(shutil.rmtree, draft, ignore_errors=True)
            for left in draft.iterdir():  # by a command that was killed
                left.unlink()
            if (free := shutil.disk_usage(draft).free) < needed:
                raise RunError(f"{out}: disk full: {needed:,} bytes are needed, {free:,} are free")
            yield draft
            draft.rename(out)
    except BlockingIOError:
        raise RunError(
            f"{out}: another process exports to it; wait for it, or use another directory"
        ) from None
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock `directory` until this process ends or leaves; raise OSError if another one has."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` reads; the byte tokenizer becomes a byte-level BPE without merges."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        # Byte-level BPE represents a byte by its character if that prints, else, in order, by
        # letters from U+0100 on.
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        printed = [ord(letter) for letter in letters if ord(letter) < 256]
        ids = [*printed, *sorted(set(range(256)) - set(printed))]
        encoder = tokenizers.Tokenizer(
            tokenizers.models.BPE(dict(zip(letters, ids, strict=True)), [])
        )
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        encoder.decoder = tokenizers.decoders.ByteLevel()
        encoder.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
        files[FILE] = encoder.to_str(pretty=True).encode()
    end = tokenizers.Tokenizer.from_buffer(files[FILE]).id_to_token(tokenizer.eos_id)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return {"tokenizer_config.json": json.dumps(settings, indent=2).encode()} | files
