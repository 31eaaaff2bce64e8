"""Hugging Face models as initial weights: found or downloaded, checked, read into shards.

Only safetensors files are read: weights in pickles (`.bin`) are refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.checkpoint.compare import require_same_structure
from lm.checkpoint.contents import match_tensors
from lm.checkpoint.headers import TensorSlice, full_shape, read_headers
from lm.checkpoint.layout import find_tensors, model_of
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import MANIFEST, read_manifest
from lm.checkpoint.tensor_files import READ_BYTES, Source, read_into
from lm.data import tokenizer
from lm.data.files import download_from_hub
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError, RunError, limit_problems, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, parse_json, read_bytes
from lm.hf import config_json, families
from lm.hf.families import Family
from lm.metrics.device import GIB, peak_memory_gib
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import nf4
from lm.units import format_bytes
from model import ModelConfig, Transformer

CONFIG_FILE = tokenizer.MODEL_CONFIG
SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_FILE = "model.safetensors"
_STRUCTURE_FILES = (CONFIG_FILE, *tokenizer.SOURCE_FILES)
_HUB_FILES = (*_STRUCTURE_FILES, "model*.safetensors", SAFETENSORS_INDEX)
WEIGHT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Those in which weights are exported, by name."""
READ_DTYPES = (*WEIGHT_DTYPES, "float64")

_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Constants that older versions of transformers save: causal masks and rotary frequencies."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?")


@oserror_as_config_error
def is_model(source: str) -> bool:
    """Return whether `source` is a Hugging Face directory, or could be a model on the Hub."""
    directory = Path(source)
    if directory.is_dir():
        is_checkpoint = (directory / MANIFEST).exists()
        is_run = (directory / "checkpoints").exists()
        return (directory / CONFIG_FILE).is_file() and not is_checkpoint and not is_run
    could_be_path = directory.exists() or directory.parent.is_dir()
    return _HUB_NAME.fullmatch(source) is not None and not could_be_path


@oserror_as_config_error
def find_source(source: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """Return the directory `source`, or that of the Hub's OWNER/MODEL[@REVISION], downloaded.

    Args:
        files: names or patterns of those to download.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    if not _HUB_NAME.fullmatch(source):
        raise ConfigError(
            f"init_from: {source}: not a directory, and not a name on the Hugging Face Hub"
            " (OWNER/MODEL)"
        )
    return download_from_hub(source, files, "init_from")


class HuggingFaceModel(NamedTuple):
    """A directory of Hugging Face that `ModelConfig` can represent."""

    family: Family
    config: ModelConfig
    sources: dict[str, Source]
    """where each of our parameters is in the files"""
    tied_head: Source | None
    """a copy of the embedding, which older files contain"""
    unused: Sequence[str]
    """names of tensors that are not the model's, which transformers does not read either"""


def open_model(directory: Path) -> HuggingFaceModel:
    """Read a model's structure, and check the names, shapes and dtypes of its tensors.

    Raises:
        ConfigError: it cannot be represented exactly, or its tensors are not those of its
            structure; lists them.
        RunError: a file is damaged.
    """
    config_path = directory / CONFIG_FILE
    family, config = config_json.read_config(read_object(config_path), str(config_path))
    places, shapes = families.map_parameters(family, config)
    tensors = _find_tensors(directory, family)
    tied_head: Source | None = None
    if config.tie_embeddings and "lm_head.weight" in tensors:
        tied_head = Source(tensors.pop("lm_head.weight"))
    problems = _compare_tensors(tensors, shapes)
    if problems:
        problem = f"{directory}: the tensors do not match {CONFIG_FILE}:"
        raise ConfigError(problem, *limit_problems(problems))
    sources: dict[str, Source] = {}
    for name, place in places.items():
        sources[name] = Source(tensors[place.name], place.start, place.transposed)
    unused = [name for name in tensors if name not in shapes]
    return HuggingFaceModel(family, config, sources, tied_head, unused)


class Structure(NamedTuple):
    """What a Hugging Face model is, without its weights."""

    directory: Path
    """of its files other than weights, at least"""
    family: Family
    config: ModelConfig


def read_structure(source: str) -> Structure:
    """Read the structure of the Hugging Face model `source`.

    The weights of a model on the Hub are downloaded, and their tensors checked, where they are
    loaded; those of a directory are checked.

    Raises:
        ConfigError: it cannot be downloaded, see `open_model`.
    """
    directory = find_source(source, _STRUCTURE_FILES)
    if Path(source).is_dir():
        model = open_model(directory)
        return Structure(directory, model.family, model.config)
    path = directory / CONFIG_FILE
    return Structure(directory, *config_json.read_config(read_object(path), str(path)))


def model_defaults(source: str) -> dict[str, Any]:
    """Return the hyperparameters that the model `source` sets, {} if it is not on this disk.

    Raises:
        ConfigError: it cannot be downloaded, see `open_model`, or its tokenizer does not fit it.
    """
    if is_model(source):
        directory, _, config = read_structure(source)
        its_tokenizer = None
        if load_model_tokenizer(directory, config) is not None:
            its_tokenizer = str(directory)
    elif Path(source).is_dir():
        try:
            directory = find_checkpoint(Path(source))
            manifest = read_manifest(directory)
            config = model_of(directory, manifest)
        except RunError:
            return {}  # who loads it says why; a run that resumes does not need it
        its_tokenizer = None
        if tokenizer.TOKENIZER_JSON in manifest.files:
            its_tokenizer = str(directory)
        elif manifest.tokenizer == tokenizer.ByteTokenizer.identity:
            its_tokenizer = "bytes"
    else:
        return {}
    values = config.model_dump(mode="json")
    if config.model is None:
        del values["model"]
    return values | {"tokenizer": its_tokenizer}


def load_model_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer in the directory of a Hugging Face model; None = it has none.

    Raises:
        ConfigError: its end of text is a token that the model does not have.
    """
    if not (directory / tokenizer.TOKENIZER_JSON).is_file():
        return None
    found = tokenizer.load_tokenizer(str(directory))
    found.limit_ids(config.vocab_size)
    return found


def load_into(model: Transformer, source: str, world: World, log: Callable[[str], None]) -> None:
    """Fill this rank's shards of `model` with the weights of `source`, on all ranks together.

    Raises:
        ConfigError, RunError: see `find_source` and `read_directory`.
    """
    started = time.monotonic()
    world.run_in_thread(find_source, source)  # which can download for long
    with world.all_or_none():
        unused = read_directory(find_source(source), model)
    peak = GIB * max(world.all_gather_object(peak_memory_gib(world.device)))
    seconds = time.monotonic() - started
    memory = f"peak memory {format_bytes(peak)} per rank"
    log(f"loaded the weights of {source} in {seconds:.1f} s, {memory}")
    if unused:
        log(describe_unused(source, unused))


def describe_unused(source: str, names: Sequence[str]) -> str:
    """Return a line on tensors of `source` that are not the model's."""
    shown = ", ".join(limit_problems(names))
    return f"{source}: not tensors of the model, and not used, as in transformers: {shown}"


@torch.no_grad()
def read_directory(directory: Path, model: Transformer) -> Sequence[str]:
    """Fill this rank's shards of `model`, except for adapters, from `directory`.

    Args:
        directory: of a Hugging Face model or a checkpoint.

    Returns:
        `HuggingFaceModel.unused`.

    Raises:
        ConfigError: see `find_weights`; or the head differs from the embedding that it is tied to.
        RunError: a file is damaged, or holds inf or NaN.
    """
    parameters = dict(model.named_parameters())
    sources, tied_head, unused = find_weights(directory, model.config)
    for name, source in sources.items():
        if parameters[name].dtype == torch.uint8:
            _read_quantized(parameters[name], source)
        else:
            read_into(parameters[name], source)
    if tied_head and not _is_equal(parameters["embedding.tokens.weight"], tied_head):
        raise ConfigError(
            f"{directory}: {CONFIG_FILE} ties lm_head.weight to the embedding, but the files have a"
            f" different one; set tie_word_embeddings: false in {CONFIG_FILE} to use it"
        )
    return unused


def _read_quantized(tensor: Tensor, source: Source) -> None:
    """Fill this rank's rows of an NF4 weight, of which a few at a time exist in float32."""
    local, start = local_rows(tensor)
    inner = nf4.inner_width(tensor.shape[1])
    n_rows = max(1, READ_BYTES // (4 * inner))
    for target in local.split(n_rows):
        rows = torch.empty(len(target), inner, device=local.device)
        read_into(rows, source._replace(start=source.start + start))
        target.copy_(nf4.quantize(rows))
        start += len(target)


class FoundWeights(NamedTuple):
    """Where the weights of a model are; see `HuggingFaceModel`."""

    sources: dict[str, Source]
    tied_head: Source | None = None
    unused: Sequence[str] = ()


def find_weights(directory: Path, config: ModelConfig) -> FoundWeights:
    """Return where each parameter of the model is.

    Args:
        directory: of a Hugging Face model or a checkpoint.

    Raises:
        ConfigError: the directory holds another model; lists every difference.
        RunError: a file is damaged.
    """
    if not (directory / MANIFEST).exists():
        model = open_model(directory)
        return FoundWeights(model.sources, model.tied_head, model.unused)
    manifest = read_manifest(directory)
    require_same_structure(model_of(directory, manifest), config)
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    found = find_tensors(directory, manifest)
    matched = match_tensors(directory, found, {"model": state})
    return FoundWeights({entry.name: entry.source for entry in matched})


def _is_equal(embedding: Tensor, head: Source) -> bool:
    """Return whether this rank's rows of `embedding` are those of `head`."""
    if full_shape(head.slices) != tuple(embedding.shape):
        return False
    stored = torch.empty_like(embedding)
    read_into(stored, head)
    stored_rows, _ = local_rows(stored)
    rows, _ = local_rows(embedding)
    return stored_rows.equal(rows)


@oserror_as_config_error
def _find_tensors(directory: Path, family: Family) -> dict[str, list[TensorSlice]]:
    """Return the tensors in the files of `directory`, without old constants.

    Their names are those in a model with a head. If the bare model was saved, its own prefix is
    missing in the files.
    """
    paths = list_weight_files(directory)
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: missing; download the directory again")
    # The Hub's cache consists of links, of which several can be to the same file.
    found = read_headers({follow_links(path): None for path in paths})
    bare_model, _, _ = family.modules["embedding.tokens"].partition(".")
    is_bare = not any(name.startswith(f"{bare_model}.") for name in found)
    tensors: dict[str, list[TensorSlice]] = {}
    for stored_name, slices in found.items():
        name = stored_name
        if is_bare and not stored_name.startswith("lm_head."):
            name = f"{bare_model}.{stored_name}"
        if not _BUFFERS.fullmatch(name):
            tensors[name] = slices
    return tensors


def _compare_tensors(
    tensors: Mapping[str, list[TensorSlice]], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return how `tensors` differ from those that a model of `shapes` has."""
    problems = [f"{name}: missing" for name in shapes if name not in tensors]
    are_all_there = not problems
    for name, slices in tensors.items():
        if name not in shapes:
            if not are_all_there:
                problems.append(f"{name}: unexpected tensor")
            continue
        shape = full_shape(slices)
        if any(piece.dtype.name not in READ_DTYPES for piece in slices):
            problem = f"{slices[0].dtype} is a quantized dtype; use the model without quantization"
            problems.append(f"{name}: {problem}")
        elif shape is None:
            problems.append(f"{name}: in several files")
        elif shape != shapes[name]:
            problems.append(
                f"{name}: {list(shape)} in the file, {list(shapes[name])} in {CONFIG_FILE}"
            )
    return problems


def list_weight_files(directory: Path) -> list[Path]:
    """Return the paths of the weights of the Hugging Face model in `directory`.

    Raises:
        ConfigError: it has no safetensors files, or two sets of them, or its index is damaged.
    """
    index = directory / SAFETENSORS_INDEX
    single = directory / SAFETENSORS_FILE
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names: list[str] = []
        if isinstance(weight_map, dict):
            names = sorted(set(map(str, weight_map.values())))
        is_outside = any(name != Path(name).name or name in ("", "..") for name in names)
        if not names or is_outside:
            raise ConfigError(f"{index}: weight_map must contain file names in this directory")
        shards = [directory / name for name in names]
        if single in shards or not single.is_file():
            return shards
        if all(path.is_file() for path in shards):
            problem = f"has two sets of weights, {SAFETENSORS_FILE} and those of {index.name}"
            raise ConfigError(f"{directory}: {problem}; move one of them to another directory")
    if single.is_file():
        return [single]
    found = "neither exists"
    pickles = [*directory.glob("*.bin"), *directory.glob("*.pth")]
    if pickles:
        found = f"{pickles[0].name} is a pickle, which can execute code, and is not read"
    raise ConfigError(
        f"{directory}: needs {SAFETENSORS_FILE} or {SAFETENSORS_INDEX}; {found}. To convert, load"
        " it with transformers and save_pretrained(DIRECTORY, safe_serialization=True)"
    )


def follow_links(path: Path) -> Path:
    """Return where the links at `path` lead; to open a link to itself is an OSError."""
    return Path(os.path.realpath(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`."""
    try:
        content = parse_json(read_bytes(follow_links(path), MAX_JSON_BYTES))
    except FileNotFoundError as error:
        problem = f"{error.strerror}; a model directory needs one"
    except OSError as error:
        problem = str(error.strerror)
    except ValueError as error:
        problem = f"invalid JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        problem = "not a JSON object"
    raise ConfigError(f"{path}: {problem}")
