"""Export of a checkpoint to a directory that transformers' `from_pretrained` loads.

Tensors are read one at a time, so that memory holds one tensor and one file. The files are written to a temporary
directory that is renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import torch
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint.checkpointer import find_tensors
from lm.checkpoint.manifest import read_manifest, verify
from lm.checkpoint.resume import find_checkpoint
from lm.checkpoint.tensor_files import Source, group_by_size, read_into, write_tensors
from lm.data.tokenizer import END_OF_TEXT, FILE, ByteTokenizer, Tokenizer, tokenizer_of
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.hf import families
from lm.hf.families import Place
from lm.hf.weights import CONFIG, DTYPES, INDEX, WEIGHTS
from model import ModelConfig, Transformer


@oserror_as_config_error
def export_model(where: Path, out: Path, dtype: str = "float32") -> int:
    """Convert the checkpoint or run directory `where` to the directory `out`.

    Args:
        dtype: a key of `DTYPES`.

    Returns:
        Bytes of weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ConfigError: no Hugging Face model has this structure (lists every key that differs), or `out` exists.
        RunError: `out` cannot be written, or a weight exceeds the range of float16.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")
    folder = find_checkpoint(where)
    manifest = read_manifest(folder)
    config = ModelConfig.model_validate(manifest.model)
    family = families.family_of(config)
    verify(folder, manifest)
    tokenizer = None
    if manifest.tokenizer:
        tokenizer = ByteTokenizer() if manifest.tokenizer == ByteTokenizer.identity else tokenizer_of(folder)
    specials = (tokenizer.eos_id, tokenizer.bos_id) if tokenizer else (None, None)
    raw = families.write_config(config, dtype, *specials)
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if raw[key] is not None}
    files = {CONFIG: _to_json(raw), "generation_config.json": _to_json(generation)}
    files |= _tokenizer_files(tokenizer) if tokenizer else {}
    with torch.device("meta"):
        model = Transformer(config)
    saved = find_tensors(folder, manifest, {"model": model})
    places, shapes = families.layout(family, config)
    size = DTYPES[dtype].itemsize * sum(map(math.prod, shapes.values()))
    with _drafted(out, size) as draft:
        weight_map = _write_weights(draft, places, shapes, DTYPES[dtype], saved)
        if len(set(weight_map.values())) > 1:
            files[INDEX] = _to_json({"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, content in files.items():
            (draft / name).write_bytes(content)
    return size


def _write_weights(
    draft: Path,
    places: Mapping[str, Place],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    saved: Mapping[str, tuple[Tensor, Source]],
) -> dict[str, str]:
    """Write the safetensors files; return the file of each tensor."""
    with torch.device("meta"):
        groups = group_by_size({name: (torch.empty(shape, dtype=dtype), None) for name, shape in shapes.items()})
    weight_map: dict[str, str] = {}
    progress = tqdm(total=len(saved), unit="tensor", disable=None)
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WEIGHTS
        tensors = {name: torch.zeros(shapes[name], dtype=dtype) for name in group}
        for name, place in places.items():
            if place.name not in tensors or f"model.{name}" not in saved:
                continue
            on_meta, source = saved[f"model.{name}"]
            values = torch.empty(on_meta.shape)
            read_into(values, source)
            if dtype == torch.float16 and not values.half().isfinite().all():
                raise RunError(f"{place.name}: has values above 65504, the maximum of float16; use --dtype bfloat16")
            stored = tensors[place.name].T if place.transposed else tensors[place.name]
            stored[place.start : place.start + len(values)] = values
            progress.update()
        write_tensors(draft / file, {name: (tensor, 0) for name, tensor in tensors.items()})
        weight_map |= dict.fromkeys(group, file)
    progress.close()
    return weight_map


def _to_json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


@contextmanager
def _drafted(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary directory next to `out` that is renamed to `out` on success and deleted on failure.

    Raises:
        ConfigError: `out` cannot be created.
        RunError: the disk is full or fails.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be created: {error.strerror}") from None
    try:
        free = shutil.disk_usage(draft).free
        if free < needed:
            raise RunError(f"{out}: disk full: {needed:,} bytes are needed, {free:,} are free")
        yield draft
        draft.rename(out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` reads; the byte tokenizer becomes a byte-level BPE without merges."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        # Byte-level BPE represents a non-printing byte by a letter from U+0100 on.
        printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: chr(byte) for byte in printed}
        letters |= {byte: chr(256 + at) for at, byte in enumerate(sorted(set(range(256)) - set(printed)))}
        encoder = tokenizers.Tokenizer(tokenizers.models.BPE({letters[byte]: byte for byte in range(256)}, []))
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.decoder = tokenizers.decoders.ByteLevel()
        encoder.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
        files[FILE] = encoder.to_str(pretty=True).encode()
    end = tokenizers.Tokenizer.from_buffer(files[FILE]).id_to_token(tokenizer.eos_id)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return {"tokenizer_config.json": json.dumps(settings, indent=2).encode()} | files
