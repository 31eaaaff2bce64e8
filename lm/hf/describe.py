"""What a model of Hugging Face is, and what of its class can be trained here, in words."""

from __future__ import annotations

import math
from pathlib import Path

from lm.checkpoint.headers import TensorSlice
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, error_prefix
from lm.hf import adapters, weights
from lm.hf.conversion import open_conversion
from lm.hf.examine import examine
from lm.hf.files import describe_unused
from lm.hf.quantized import quantization_of
from lm.transformers_config import TransformersConfig
from lm.transformers_model import text_config
from lm.units import format_bytes, format_parameters


def describe_model(source: str) -> str:
    """Return what the model `source` is, in lines; raise ConfigError if it cannot be read."""
    if adapters.is_adapter(source):
        return _describe_adapters(source)
    structure = weights.read_structure(source)
    weights.load_model_tokenizer(structure.directory, structure.config)  # checks it
    if not Path(source).is_dir():
        return _describe_on_hub(source, structure)
    if isinstance(structure.config, TransformersConfig):
        return _describe_of_transformers(source, structure.config)
    model = weights.open_model(Path(source))
    slices: set[TensorSlice] = set()  # each once, though GPT-2's query, key and value share one
    for tensor in model.sources.values():
        slices.update(tensor.slices)
    n_bytes = sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices)
    dtypes = {piece.dtype.name for piece in slices}
    n_parameters = f"{format_parameters(model.config.n_parameters)} parameters"
    size = f"{format_bytes(n_bytes)} in {', '.join(sorted(dtypes))}"
    summary = f"{model.family.class_name}, {n_parameters}, {size}"
    lines = [f"{source}: {summary}", f"can be read: init_from: {source}"]
    if model.unused:
        lines.append(describe_unused(model.unused))
    return "\n".join(lines)


def _describe_of_transformers(source: str, config: TransformersConfig) -> str:
    conversion = open_conversion(Path(source))
    n_parameters = f"{format_parameters(config.n_parameters)} parameters"
    lines = [f"{source}: {config.model_type} of transformers, {n_parameters}"]
    lines.append(f"can be read: init_from: {source}")
    examination = examine(config.transformers_config)
    return "\n".join([*lines, *conversion.notes(), *examination.describe()])


def describe_examination(source: str) -> tuple[str, int]:
    """Return what of a class of transformers can be trained exactly here, and the exit code.

    Args:
        source: a directory, OWNER/MODEL, or a model_type of transformers, with its default sizes.
    """
    if weights.is_model(source):
        raw = weights.read_config(source)
    elif Path(source).exists():
        raise ConfigError(f"{source}: no directory of Hugging Face: it has no {MODEL_CONFIG}")
    else:
        raw = {"model_type": source}
    with error_prefix(source):
        quantization_of(raw)
        examination = examine(text_config(raw))
    lines = examination.describe()
    refusals = examination.refusals()
    code = 0
    if refusals:
        code = ConfigError.exit_code
        lines += [f"refused: {refusal}" for refusal in refusals]
    return "\n".join(lines), code


def _describe_on_hub(source: str, structure: weights.Structure) -> str:
    name = "a model of transformers"
    if structure.family is not None:
        name = structure.family.class_name
    summary = f"{name}, {format_parameters(structure.config.n_parameters)} parameters"
    weights_line = "its weights are downloaded, and their tensors checked, where they are loaded"
    return f"{source}: {summary}\ncan be read: init_from: {source}\n{weights_line}"


def _describe_adapters(source: str) -> str:
    adapters.model_defaults(source)  # checks the tokenizer, too
    config = adapters.open_adapters(Path(source)).config
    layers = ", ".join(config.lora_targets or ())
    summary = f"LoRA adapters of rank {config.lora_rank} of {adapters.base_of(source)}: {layers}"
    return f"{source}: {summary}\ncan be read: init_from: {source}"
