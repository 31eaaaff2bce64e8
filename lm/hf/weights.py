"""Hugging Face models as initial weights: found or downloaded, checked, and read by every rank into its shards.

Only safetensors files are read: weights in pickles (`.bin`) are refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.checkpoint.manifest import MANIFEST, model_of, read_manifest
from lm.checkpoint.resume import compare_structures
from lm.checkpoint.tensor_files import (
    Source,
    TensorSlice,
    find_tensors,
    full_shape,
    read_headers,
    read_into,
)
from lm.data import tokenizer
from lm.data.files import download
from lm.errors import ConfigError, first_20, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, parse_json, read_bytes
from lm.hf import families
from lm.hf.families import Family
from lm.metrics.device import peak_memory_gib
from lm.runtime.world import World
from lm.shards import local_rows
from model import ModelConfig, Transformer

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DOWNLOADED = (CONFIG, "model*.safetensors", INDEX, *tokenizer.FILES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Constants that older versions of transformers save with the weights: causal masks and rotary frequencies."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?")


@oserror_as_config_error
def is_model(source: str) -> bool:
    """Return whether `source` is a Hugging Face directory, or could be the name of a model on the Hub."""
    directory = Path(source)
    if directory.is_dir():
        return (directory / CONFIG).is_file() and not any(
            (directory / name).exists() for name in (MANIFEST, "checkpoints")
        )
    return (
        bool(_HUB_NAME.fullmatch(source))
        and not directory.exists()
        and not directory.parent.is_dir()
    )


@oserror_as_config_error
def find_source(source: str) -> Path:
    """Return the directory `source`, or download the model OWNER/MODEL or OWNER/MODEL@REVISION of the Hub.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    if not _HUB_NAME.fullmatch(source):
        problem = f"init_from: {source}: not a directory, and not a name on the Hugging Face Hub (OWNER/MODEL)"
        raise ConfigError(problem)
    return download(source, DOWNLOADED, "init_from")


class HuggingFaceModel(NamedTuple):
    """A directory of Hugging Face that `ModelConfig` can represent, and where each parameter is in its files."""

    family: Family
    config: ModelConfig
    sources: dict[str, Source]
    tied_head: Source | None
    """a copy of the embedding, which older files contain"""


def open_model(directory: Path) -> HuggingFaceModel:
    """Read the structure of the model in `directory`, and check the names, shapes and dtypes of its tensors.

    Raises:
        ConfigError: it cannot be represented exactly, or its tensors are not those of its
            structure; lists them.
        RunError: a file is damaged.
    """
    family, config = families.read_config(_read_json(directory / CONFIG), str(directory / CONFIG))
    places, shapes = families.map_parameters(family, config)
    tensors = _open_tensors(directory, family)
    tied_head = tensors.pop("lm_head.weight", None) if config.tie_embeddings else None
    if problems := _differences(tensors, shapes):
        problem = f"{directory}: the tensors do not match {CONFIG}:"
        raise ConfigError(problem, *first_20(problems))
    sources = {
        name: Source(tensors[place.name], place.start, place.transposed)
        for name, place in places.items()
    }
    return HuggingFaceModel(family, config, sources, Source(tied_head) if tied_head else None)


def model_defaults(source: str) -> dict[str, Any]:
    """Return the hyperparameters that the model `source` sets, with its tokenizer; {} if it is not Hugging Face's.

    Raises:
        ConfigError: it cannot be downloaded, see `open_model`, or its tokenizer does not fit it.
    """
    if not is_model(source):
        return {}
    directory = find_source(source)
    config = open_model(directory).config
    values = config.model_dump(mode="json", exclude=None if config.model else {"model"})
    if not (directory / tokenizer.FILE).is_file():
        return values | {"tokenizer": None}
    size = tokenizer.load_tokenizer(str(directory)).vocab_size
    if size > config.vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {size} tokens, the model {config.vocab_size}: remove the added tokens from"
            " the tokenizer, or load the model with transformers, resize_token_embeddings() and save_pretrained() it"
        )
    return values | {"tokenizer": str(directory)}


def load_into(model: Transformer, source: str, world: World, log: Callable[[str], None]) -> None:
    """Fill this rank's shards of `model` with the weights of `source`, on all ranks together; see `read_directory`."""
    started = time.monotonic()
    world.all_or_none(lambda: read_directory(find_source(source), model))
    peak = max(world.all_gather_object(peak_memory_gib(world.device)))
    log(
        f"loaded the weights of {source} in {time.monotonic() - started:.1f} s, peak memory {peak:.2f} GiB per rank"
    )


@torch.no_grad()
def read_directory(directory: Path, model: Transformer) -> None:
    """Fill this rank's shards of `model`, except for adapters, with the model or checkpoint in `directory`.

    Raises:
        ConfigError: see `find_weights`; or the head differs from the embedding that it is tied to.
        RunError: a file is damaged, or holds inf or NaN.
    """
    parameters = dict(model.named_parameters())
    sources, tied_head = find_weights(directory, model.config)
    for name, source in sources.items():
        read_into(parameters[name], source)
    if tied_head and not _equals(parameters["embedding.tokens.weight"], tied_head):
        raise ConfigError(
            f"{directory}: {CONFIG} ties lm_head.weight to the embedding, but the files have a different one; set"
            f" tie_word_embeddings: false in {CONFIG} to use it"
        )


def find_weights(directory: Path, config: ModelConfig) -> tuple[dict[str, Source], Source | None]:
    """Return where each parameter of the model `config` is in `directory`, and `HuggingFaceModel.tied_head`.

    Args:
        directory: of a Hugging Face model or a checkpoint.

    Raises:
        ConfigError: the directory holds another model; lists every difference.
        RunError: a file is damaged.
    """
    if not (directory / MANIFEST).exists():
        model = open_model(directory)
        return model.sources, model.tied_head
    manifest = read_manifest(directory)
    compare_structures(model_of(directory, manifest), config)
    with torch.device("meta"):
        found = find_tensors(directory, manifest, {"model": Transformer(config).state_dict()})
    return {name.removeprefix("model."): source for name, (_, source) in found.items()}, None


def _equals(embedding: Tensor, head: Source) -> bool:
    if full_shape(head.slices) != tuple(embedding.shape):
        return False
    other = torch.empty_like(embedding)
    read_into(other, head)
    return local_rows(other)[0].equal(local_rows(embedding)[0])


@oserror_as_config_error
def _open_tensors(directory: Path, family: Family) -> dict[str, list[TensorSlice]]:
    """Return the tensors in the files of `directory`, by their names in the full model, without old constants."""
    paths = weight_files(directory)
    if missing := next((path for path in paths if not path.is_file()), None):
        raise ConfigError(f"{missing}: missing; download the directory again")
    found = read_headers(
        {path.resolve(): None for path in paths}
    )  # the Hub's cache consists of links
    prefix = (
        family.modules["embedding.tokens"].partition(".")[0] + "."
    )  # missing if the bare model was saved
    full = {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: name for name in found
    }
    return {name: found[stored] for name, stored in full.items() if not _BUFFERS.fullmatch(name)}


def _differences(
    tensors: Mapping[str, list[TensorSlice]], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    problems = [f"{name}: missing" for name in shapes if name not in tensors]
    for name, slices in tensors.items():
        if name not in shapes:
            problems.append(f"{name}: unexpected tensor")
        elif any(piece.dtype not in DTYPES.values() for piece in slices):
            problems.append(
                f"{name}: {slices[0].dtype} is a quantized dtype; use the model without quantization"
            )
        elif (shape := full_shape(slices)) is None:
            problems.append(f"{name}: in several files")
        elif shape != shapes[name]:
            problems.append(f"{name}: {list(shape)} in the file, {list(shapes[name])} in {CONFIG}")
    return problems


def weight_files(directory: Path) -> list[Path]:
    """Return the paths of the weights of the Hugging Face model in `directory`."""
    index = directory / INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names or any(name != Path(name).name or name in ("", "..") for name in names):
            raise ConfigError(f"{index}: weight_map must contain file names in this directory")
        return [directory / name for name in names]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    pickled = next(directory.glob("*.bin"), None) or next(directory.glob("*.pth"), None)
    found = (
        f"{pickled.name} is a pickle, which can execute code, and is not read"
        if pickled
        else "neither exists"
    )
    raise ConfigError(
        f"{directory}: needs {WEIGHTS} or {INDEX}; {found}. To convert, load it with transformers and"
        " save_pretrained(DIRECTORY, safe_serialization=True)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(path.resolve(), MAX_JSON_BYTES))
        if isinstance(content, dict):
            return content
        problem = "not a JSON object"
    except OSError as error:
        problem = f"{error.strerror}; a model directory needs one"
    except ValueError as error:
        problem = f"invalid JSON: {error}"
    raise ConfigError(f"{path}: {problem}")
