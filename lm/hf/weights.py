"""Hugging Face models as initial weights: found or downloaded, checked, read into shards.

Only safetensors files are read: weights in pickles (`.bin`) are refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from lm import transformers_model
from lm.any_model import AnyModel, convert_weights, new_structure
from lm.checkpoint.compare import require_same_structure
from lm.checkpoint.contents import require_tensors_of
from lm.checkpoint.layout import find_tensors, model_of
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import MANIFEST, WEIGHTS, read_manifest
from lm.checkpoint.tensor_files import Source, read_into
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
    nearest_file,
    oserror_as_config_error,
)
from lm.hf.class_weights import ClassWeights, check_layers, open_weights
from lm.hf.examine import Computation, examine, examine_whole
from lm.hf.files import SAFETENSORS_INDEX, WEIGHT_SUFFIXES, read_object
from lm.hf.quantization import quantization_of
from lm.hf.sizes import measure_sizes
from lm.model_config import MAX_SIZE
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import four_bits, lora
from lm.transformers_config import (
    AnyModelConfig,
    Attention,
    Examined,
    Kernels,
    TransformersConfig,
)
from lm.transformers_model import TransformersModel, build_network, one_line_errors, text_config

_STRUCTURE_FILES = (MODEL_CONFIG, *SOURCE_FILES)
_HUB_FILES = (*_STRUCTURE_FILES, "model*.safetensors", SAFETENSORS_INDEX)
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


def read_structure(directory: Path, kernels: Kernels | None = None) -> TransformersConfig:
    """Return the examined model of transformers that the config.json in `directory` describes.

    Raises:
        ConfigError: see `examined_config`.
    """
    path = directory / MODEL_CONFIG
    raw = read_object(path)
    with error_prefix(str(path)):
        return examined_config(raw, kernels)


def read_config(source: str) -> dict[str, Any]:
    """Return the content of the config.json of the Hugging Face model `source`."""
    return read_object(find_source(source, _STRUCTURE_FILES) / MODEL_CONFIG)


def examined_config(raw: Mapping[str, Any], kernels: Kernels | None = None) -> TransformersConfig:
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
    examined = _examine(values, kernels)
    whole = examine_whole(raw)
    if not whole.holds:
        problem = f"does not compute the logits of its language model, {values['model_type']}"
        raise ConfigError(
            f"model_type: {raw['model_type']} {problem} ({whole.detail}): exported, it would not "
            "compute what was trained; start from a directory of the language model alone"
        )
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


def _examine(values: Mapping[str, Any], kernels: Kernels | None) -> Examined:
    examination = examine(values, Computation.of_run(kernels))
    in_bfloat16 = examination.findings.get("bfloat16")
    is_coarse = in_bfloat16 is not None and not in_bfloat16.holds
    if is_coarse and kernels is not None and kernels.amp_dtype == "auto":
        in_float32 = replace(kernels, amp_dtype=None)  # as it is then computed
        examination = examine(values, Computation.of_run(in_float32))
    refusals = examination.refusals()
    if refusals:
        raise ConfigError(*refusals)
    return examination.examined(values)


def with_kernels(config: AnyModelConfig, kernels: Kernels | None = None) -> AnyModelConfig:
    """Return the model of a checkpoint, to be computed with `kernels`, not those of its run.

    Args:
        kernels: of a run; None = those of this project.

    Raises:
        ConfigError: its class cannot be trained exactly with them.
    """
    if not isinstance(config, TransformersConfig):
        return config
    is_ours = config.examined.attention in get_args(Attention)
    is_exact = is_ours and config.examined.packed_by != "cu_seq_lens"
    if is_exact and Computation.of_run(kernels) is None:
        return config
    examined = _examine(config.transformers_config, kernels)
    return config.model_copy(update={"examined": examined})


def model_defaults(
    source: str, kernels: Kernels | None = None, *, needs_weights: bool = True
) -> dict[str, Any]:
    """Return the hyperparameters that the model `source` sets, {} if it is not on this disk.

    Args:
        kernels: with which a run computes it; None = those of this project, as on a CPU.
        needs_weights: whether a directory must have weights, which are checked; those on the Hub
            are downloaded and checked where they are loaded.

    Raises:
        ConfigError: it cannot be downloaded, see `read_structure` and `open_weights`, or its
            tokenizer does not fit it.
    """
    config: AnyModelConfig
    if is_model(source):
        directory = find_source(source, _STRUCTURE_FILES)
        has_weights = needs_weights and Path(source).is_dir()
        if has_weights:
            check_layers(directory)
        config = read_structure(directory, kernels)
        if has_weights:
            open_weights(directory)
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
        config = with_kernels(config, kernels)
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
    if not is_model(source):
        values.pop("quantized_as", None)  # a checkpoint has dequantized weights
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
    directory: Path, config: TransformersConfig, device: torch.device, dtype: torch.dtype
) -> TransformersModel:
    """Return the model of a Hugging Face directory in a single process, in evaluation mode.

    Args:
        config: see `read_structure`.
        dtype: of the weights.
    """
    with torch.device("meta"):
        model = TransformersModel(config).eval()
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
    with world.all_or_none():
        if (directory / MANIFEST).exists():
            _read_checkpoint(directory, model)
        else:
            opened = open_weights(directory)
            if to_be_exported:
                opened.require_savable()
    notes: Sequence[str] = ()
    if opened is not None:
        network = cast(TransformersModel, model).network
        opened.read(network, world)
        notes = opened.notes(network)
    log(f"loaded the weights of {source} in {time.monotonic() - started:.1f} s")
    for note in notes:
        log(f"{source}: {note}")


def read_directory(directory: Path, model: AnyModel) -> None:
    """Fill `model`, in a single process, except for adapters.

    Args:
        directory: of a Hugging Face model or a checkpoint.

    Raises:
        ConfigError: see `open_weights`, or the directory holds another model.
        RunError: a file is damaged, or holds inf or NaN.
    """
    if isinstance(model, TransformersModel) and not (directory / MANIFEST).exists():
        open_weights(directory).read(model.network)
    else:
        _read_checkpoint(directory, model)


@torch.no_grad()
def _read_checkpoint(directory: Path, model: AnyModel) -> None:
    """Fill this rank's shards of `model`, except for adapters, from a checkpoint."""
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, source in find_weights(directory, model.config).items():
        _read_weight(parameters[name], source)


def _read_weight(tensor: Tensor, source: Source) -> None:
    """Fill this rank's rows of a parameter, which can be bytes of NF4."""
    if tensor.dtype != torch.uint8:
        read_into(tensor, source)
        return
    local, start = local_rows(tensor)
    width = four_bits.NF4.inner_width(tensor.shape[-1])
    rows = torch.empty(*local.shape[:-1], width, device=local.device)
    read_into(rows, source._replace(start=start))
    local.copy_(four_bits.quantize_nf4(rows))


def find_weights(directory: Path, config: AnyModelConfig) -> dict[str, Source]:
    """Return where each parameter of the model is in the checkpoint in `directory`.

    Raises:
        ConfigError: it is one of another model (lists every difference).
        RunError: there is none, or a file is damaged.
    """
    manifest = read_manifest(directory)
    require_same_structure(model_of(directory, manifest), config)
    state = lora.trained_parameters(new_structure(config))
    found = find_tensors(directory, manifest, WEIGHTS)
    require_tensors_of({"model": state}, directory, found)
    return {name: Source(found["model"][name]) for name in state}
