"""Hugging Face models as initial weights: found or downloaded, checked, read into shards.

Only safetensors files are read: weights in pickles (`.bin`) are refused.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lm import transformers_model
from lm.checkpoint.compare import require_same_structure
from lm.checkpoint.contents import require_tensors_of
from lm.checkpoint.headers import TensorSlice, full_shape
from lm.checkpoint.layout import find_tensors, model_of
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import MANIFEST, WEIGHTS, read_manifest
from lm.checkpoint.tensor_files import READ_BYTES, Source, read_into
from lm.data.hub import download_from_hub
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.files import (
    MODEL_CONFIG,
    SOURCE_FILES,
    TOKENIZER_JSON,
)
from lm.data.tokenizer.loading import Tokenizer, load_tokenizer
from lm.errors import (
    ConfigError,
    RunError,
    error_prefix,
    limit_problems,
    nearest_file,
    oserror_as_config_error,
)
from lm.hf import config_json, families
from lm.hf.class_weights import ClassWeights, open_weights
from lm.hf.examine import examine, examine_whole
from lm.hf.families import Family
from lm.hf.files import (
    READ_DTYPES,
    SAFETENSORS_INDEX,
    WEIGHT_SUFFIXES,
    describe_unused,
    find_slices,
    read_object,
)
from lm.hf.quantization import quantization_of
from lm.launch.console import warn
from lm.metrics.device import GIB, peak_memory_gib
from lm.model_config import MAX_SIZE
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import four_bits, lora
from lm.training.roles import measure_sizes
from lm.transformers_config import AnyModelConfig, TransformersConfig
from lm.transformers_model import (
    AnyModel,
    TransformersModel,
    build_network,
    convert_weights,
    new_model,
    one_line_errors,
    text_config,
)
from lm.units import format_bytes
from model import ModelConfig

_STRUCTURE_FILES = (MODEL_CONFIG, *SOURCE_FILES)
_HUB_FILES = (*_STRUCTURE_FILES, "model*.safetensors", SAFETENSORS_INDEX)
_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Constants that older versions of transformers save: causal masks and rotary frequencies."""
_ADAPTER_CONFIG = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?")


@oserror_as_config_error
def is_model(source: str) -> bool:
    """Return whether `source` is a Hugging Face directory, or could be a model on the Hub.

    Raises:
        ConfigError: it is a directory of PEFT.
    """
    directory = Path(source)
    if (directory / _ADAPTER_CONFIG).is_file():
        problem = f"{source}: has adapters of PEFT ({_ADAPTER_CONFIG})"
        remedy = "merge them with PEFT's merge_and_unload(), save_pretrained() the model, and name"
        raise ConfigError(f"init_from: {problem}; {remedy} its directory (docs/finetuning.md)")
    if directory.is_dir():
        is_checkpoint = (directory / MANIFEST).exists()
        is_run = (directory / "checkpoints").exists()
        return (directory / MODEL_CONFIG).is_file() and not is_checkpoint and not is_run
    could_be_path = directory.exists() or directory.parent.is_dir()
    return _HUB_NAME.fullmatch(source) is not None and not could_be_path


@oserror_as_config_error
def find_source(
    source: str, files: Sequence[str] = _HUB_FILES, *, but_not: Sequence[str] = ()
) -> Path:
    """Return the directory `source`, or that of the Hub's OWNER/MODEL[@REVISION], downloaded.

    Args:
        files: names or patterns of those to download.
        but_not: see `download_from_hub`.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    if not _HUB_NAME.fullmatch(source):
        raise ConfigError(
            f"init_from: {source}: not a directory, and not a name on the Hugging Face Hub"
            f" (OWNER/MODEL){nearest_file(source)}"
        )
    return download_from_hub(source, files, "init_from", but_not=but_not)


def find_complete_source(source: str) -> Path:
    """Return the directory of a model with all files that its export has, see `find_source`."""
    find_source(source)
    return find_source(source, ["*"], but_not=[f"*{suffix}" for suffix in WEIGHT_SUFFIXES])


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
    config_path = directory / MODEL_CONFIG
    family, config = config_json.read_config(read_object(config_path), str(config_path))
    places, shapes = families.map_parameters(family, config)
    tensors = _find_tensors(directory, family)
    tied_head: Source | None = None
    if config.tie_embeddings and "lm_head.weight" in tensors:
        tied_head = Source(tensors.pop("lm_head.weight"))
    problems = _compare_tensors(tensors, shapes)
    if problems:
        problem = f"{directory}: the tensors do not match {MODEL_CONFIG}:"
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
    config: AnyModelConfig
    family: Family | None
    """None = it is computed by its class in transformers"""


def read_structure(source: str, *, needs_weights: bool = True) -> Structure:
    """Read the structure of the Hugging Face model `source`.

    The weights of a model on the Hub are downloaded, and their tensors checked, where they are
    loaded; those of a directory are checked.

    Args:
        needs_weights: whether a directory must have weights; else its config.json alone is read.

    Raises:
        ConfigError: it cannot be downloaded, see `open_model`, `open_weights` and `examine`.
    """
    structure = _read_structure(find_source(source, _STRUCTURE_FILES))
    if needs_weights and Path(source).is_dir():
        if structure.family is None:
            open_weights(structure.directory)
        else:
            open_model(structure.directory)
    return structure


def _read_structure(directory: Path) -> Structure:
    """Return what the config.json in `directory` describes: model.py computes it if it can.

    Raises:
        ConfigError: neither does, or a value is impossible; lists what model.py does not have.
    """
    path = directory / MODEL_CONFIG
    raw = read_object(path)
    if not config_json.is_of_a_family(raw):
        with error_prefix(str(path)):
            return Structure(directory, examined_config(raw), None)
    try:
        family, own_config = config_json.read_config(raw, str(path))
        return Structure(directory, own_config, family)
    except config_json.NotRepresentedError as error:
        missing = error
    try:
        config = examined_config(raw)
    except ConfigError as error:
        problems = list(missing.problems)
        if find_spec("transformers") is None:
            problems += error.problems
        raise ConfigError(*problems) from None
    warn(f"transformers computes this model, model.py cannot: {'; '.join(missing.problems)}")
    return Structure(directory, config, None)


def read_config(source: str) -> dict[str, Any]:
    """Return the content of the config.json of the Hugging Face model `source`."""
    return read_object(find_source(source, _STRUCTURE_FILES) / MODEL_CONFIG)


def examined_config(raw: Mapping[str, Any]) -> TransformersConfig:
    """Return the model of transformers that the content of a config.json describes, examined.

    Raises:
        ConfigError: transformers does not have it, or its class cannot be trained exactly, or
            computes other logits than the language model in it; or its weights are quantized in a
            way that is not read.
    """
    quantization = quantization_of(raw)
    values = text_config(raw)
    length = DEFAULT_LENGTH
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(values.get(key), int):
            length = values[key]
            if not 0 < length <= MAX_SIZE:
                raise ConfigError(f"{key}: {length} is not between 1 and {MAX_SIZE}")
            break
    examination = examine(values)
    refusals = examination.refusals()
    if refusals:
        raise ConfigError(*refusals)
    whole = examine_whole(raw)
    if not whole.holds:
        problem = f"does not compute the logits of its language model, {values['model_type']}"
        raise ConfigError(
            f"model_type: {raw['model_type']} {problem} ({whole.detail}): exported, it would not "
            "compute what was trained; start from a directory of the language model alone"
        )
    examined = examination.examined(values)
    if examined.longest_row is not None:
        length = min(length, examined.longest_row.n_tokens)
    with one_line_errors(str(values["model_type"])):
        return TransformersConfig(
            transformers_config=values,
            examined=examined,
            quantized_as=None if quantization is None else quantization["quant_method"],
            vocab_size=values["vocab_size"],
            max_seq_len=length,
            **measure_sizes(build_network(transformers_model.read_config(values)))._asdict(),
        )


DEFAULT_LENGTH = 2048
"""tokens of models that do not limit them"""


def model_defaults(source: str, *, needs_weights: bool = True) -> dict[str, Any]:
    """Return the hyperparameters that the model `source` sets, {} if it is not on this disk.

    Args:
        needs_weights: see `read_structure`. If not, a tokenizer may be missing, too, and is left
            out.

    Raises:
        ConfigError: it cannot be downloaded, see `open_model`, or its tokenizer does not fit it.
    """
    if is_model(source):
        directory, config, _ = read_structure(source, needs_weights=needs_weights)
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
        if isinstance(config, TransformersConfig):  # a checkpoint has dequantized weights
            config = config.model_copy(update={"quantized_as": None})
        its_tokenizer = None
        if TOKENIZER_JSON in manifest.files:
            its_tokenizer = str(directory)
        elif manifest.tokenizer == ByteTokenizer.identity:
            its_tokenizer = "bytes"
    else:
        return {}
    values = config.model_dump(mode="json")
    if values.get("model") is None:
        values.pop("model", None)
    if needs_weights or its_tokenizer is not None:
        values["tokenizer"] = its_tokenizer
    return values


def load_model_tokenizer(directory: Path, config: AnyModelConfig) -> Tokenizer | None:
    """Return the tokenizer in the directory of a Hugging Face model; None = it has none.

    Raises:
        ConfigError: its end of text is a token that the model does not have.
    """
    if not (directory / TOKENIZER_JSON).is_file():
        return None
    found = load_tokenizer(str(directory))
    found.limit_ids(config.vocab_size)
    return found


def load_model(
    directory: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> AnyModel:
    """Return the model of a Hugging Face directory in a single process, in evaluation mode.

    Args:
        dtype: of the weights.
    """
    with torch.device("meta"):
        model = new_model(read_structure(str(directory)).config).eval()
        convert_weights(model, dtype)
    model.to_empty(device=device)
    read_directory(directory, model)
    return model


def load_into(
    model: AnyModel,
    source: str,
    world: World,
    log: Callable[[str], None],
    *,
    to_be_exported: bool = False,
) -> None:
    """Fill this rank's shards of `model` with the weights of `source`, on all ranks together.

    Args:
        to_be_exported: whether other weights are to be written in its layout, once trained.

    Raises:
        ConfigError: see `find_source`, `open_weights` and `read_directory`; or transformers cannot
            write a layout `to_be_exported`.
        RunError: see `read_directory`.
    """
    started = time.monotonic()
    directory = world.run_in_thread(find_source, source)  # which can download for long
    opened: ClassWeights | None = None
    notes: Sequence[str] = ()
    with world.all_or_none():
        if isinstance(model, TransformersModel) and not (directory / MANIFEST).exists():
            opened = open_weights(directory)
            if to_be_exported:
                opened.require_savable()
        else:
            notes = read_directory(directory, model)
    if opened is not None:
        network = cast(TransformersModel, model).network
        opened.read(network, world)
        notes = opened.notes(network)
    peak = GIB * max(world.all_gather_object(peak_memory_gib(world.device)))
    seconds = time.monotonic() - started
    memory = f"peak memory {format_bytes(peak)} per rank"
    log(f"loaded the weights of {source} in {seconds:.1f} s, {memory}")
    for note in notes:
        log(f"{source}: {note}")


@torch.no_grad()
def read_directory(directory: Path, model: AnyModel) -> Sequence[str]:
    """Fill this rank's shards of `model`, except for adapters, from `directory`.

    Args:
        directory: of a Hugging Face model or a checkpoint.

    Returns:
        Lines on what is not read as it is.

    Raises:
        ConfigError: see `find_weights`; or the head differs from the embedding that it is tied to.
        RunError: a file is damaged, or holds inf or NaN.
    """
    if isinstance(model, TransformersModel) and not (directory / MANIFEST).exists():
        opened = open_weights(directory)
        opened.read(model.network)
        return opened.notes(model.network)
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sources, tied_head, unused = find_weights(directory, model.config)
    for name, source in sources.items():
        _read_weight(parameters[name], source)
    if tied_head and not _is_equal(parameters["embedding.tokens.weight"], tied_head):
        raise ConfigError(
            f"{directory}: {MODEL_CONFIG} ties lm_head.weight to the embedding, but the files have"
            f" a different one; set tie_word_embeddings: false in {MODEL_CONFIG} to use it"
        )
    return [describe_unused(unused)] if unused else []


def _read_weight(tensor: Tensor, source: Source) -> None:
    """Fill this rank's rows of a parameter; of bytes of NF4, a few rows at a time are dense."""
    if tensor.dtype != torch.uint8:
        read_into(tensor, source)
        return
    local, start = local_rows(tensor)
    shape = (*tensor.shape[1:-1], four_bits.NF4.inner_width(tensor.shape[-1]))
    n_rows = max(1, READ_BYTES // (4 * math.prod(shape)))
    for target in local.split(n_rows):
        rows = torch.empty(len(target), *shape, device=local.device)
        read_into(rows, source._replace(start=source.start + start))
        target.copy_(four_bits.quantize_nf4(rows))
        start += len(target)


class FoundWeights(NamedTuple):
    """Where the weights of a model are; see `HuggingFaceModel`."""

    sources: dict[str, Source]
    tied_head: Source | None = None
    unused: Sequence[str] = ()


def find_weights(directory: Path, config: AnyModelConfig) -> FoundWeights:
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
        state = lora.trained_parameters(new_model(config))
    found = find_tensors(directory, manifest, WEIGHTS)
    require_tensors_of({"model": state}, directory, found)
    return FoundWeights({name: Source(found["model"][name]) for name in state})


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
    found = find_slices(directory)
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
                f"{name}: {list(shape)} in the file, {list(shapes[name])} in {MODEL_CONFIG}"
            )
    return problems
