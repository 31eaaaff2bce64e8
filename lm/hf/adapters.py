"""LoRA adapters of PEFT as a start: their base and configuration, checked and read into shards.

A directory of PEFT has `adapter_config.json`, which names the base, and
`adapter_model.safetensors`. What would compute or train anything else here is refused, with the key
that says so.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from lm.checkpoint.headers import TensorSlice, full_shape, read_headers
from lm.checkpoint.tensor_files import Source, read_into
from lm.data.tokenizer.files import ADAPTER_CONFIG, TOKENIZER_JSON
from lm.errors import ConfigError, limit_problems, oserror_as_config_error
from lm.hf import families, weights
from lm.hf.files import READ_DTYPES, follow_links, read_object
from lm.hf.weights import Structure
from lm.runtime.world import World
from lm.training import lora
from lm.training.config import UNSUPPORTED, LoraConfig, linear_layers
from lm.transformers_config import TransformersConfig
from lm.transformers_model import NETWORK, AnyModel, name_linear_layers, new_model

ADAPTER_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_ADAPTER_NAME = re.compile(re.escape(_PREFIX) + r"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.weight")
_NAMED_ADAPTER = re.compile(r".+\.lora_[AB]\.[^.]+\.weight")
_KEYS = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "lora_dropout": "lora_dropout",
}
"""PEFT's key -> ours"""
_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "lora_dropout": 0.0}
"""PEFT's, for files of older versions"""
_IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
}
"""Keys that say where adapters are, as the tensors do, or nothing about them."""
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""PEFT's key -> the values with which the weights mean the same here"""
_MERGE = "merge the adapters with PEFT's merge_and_unload(), and set init_from to the result"


@oserror_as_config_error
def is_adapter(source: str) -> bool:
    """Return whether `source` is a directory of PEFT; as in transformers, even one with a model."""
    return Path(source, ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class PeftAdapters:
    """The adapters in a directory of PEFT."""

    model: Structure
    """the base"""
    config: LoraConfig
    sources: Mapping[str, Source]
    """where each of our parameters is"""


@oserror_as_config_error
def base_of(init_from: str) -> str:
    """Return the model that the adapters `init_from` are for; `init_from` itself if it has none.

    Raises:
        ConfigError: their config does not name a Hugging Face model.
    """
    if not is_adapter(init_from):
        return init_from
    path = Path(init_from, ADAPTER_CONFIG)
    raw = read_object(path)
    source = raw.get("base_model_name_or_path")
    if not isinstance(source, str) or not weights.is_model(source):
        shown = f"{source!r:.4096}"  # as long as a path can be
        problem = f"{shown} is neither a Hugging Face directory nor a name on the Hub"
        remedy = "set it to the model that the adapters were trained for"
        raise ConfigError(f"{path}: base_model_name_or_path: {problem}; {remedy}")
    revision = raw.get("revision")
    if revision and not Path(source).is_dir():
        return f"{source}@{revision}"
    return source


def open_adapters(directory: Path, base_dir: Path | None = None) -> PeftAdapters:
    """Read the configuration of adapters, and check the names, shapes and dtypes of their tensors.

    Args:
        base_dir: a copy of their base; None = the model that their config names.

    Raises:
        ConfigError: they would compute or train anything else here; lists every reason.
        RunError: a file is damaged.
    """
    path = directory / ADAPTER_CONFIG
    raw = read_object(path)
    problems = _find_unsupported(raw)
    values = dict(_DEFAULTS)
    for key in values:
        if raw.get(key) is not None:
            values[key] = raw[key]
    config: LoraConfig | None = None
    try:
        config = LoraConfig.model_validate({_KEYS[key]: value for key, value in values.items()})
    except ValidationError as error:
        problems += [f"{found['loc'][0]}: {found['msg']}" for found in error.errors()]
    if config is None or problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems), f"init_from: {_MERGE}")
    source = str(base_dir or base_of(str(directory)))
    base = weights.read_structure(source)
    return _find_tensors(directory, base, config)


def _find_unsupported(raw: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for key, value in raw.items():
        if key in _SUPPORTED:
            if value not in _SUPPORTED[key]:
                choices = " or ".join(map(repr, _SUPPORTED[key]))
                problems.append(f"{key}: {_show(value)} is not supported, only {choices}")
        elif key in UNSUPPORTED and value:
            problems.append(f"{key}: {UNSUPPORTED[key]}")
        elif key not in _KEYS and key not in _IGNORED and value:
            problems.append(f"{key}: {_show(value)} is not supported")
    return problems


def _show(value: Any) -> str:
    return textwrap.shorten(repr(value), 60)


@oserror_as_config_error
def _find_tensors(directory: Path, model: Structure, config: LoraConfig) -> PeftAdapters:
    path = directory / ADAPTER_FILE
    if not path.is_file():
        problem = "missing; pickles (.bin) are not read, as they can execute code"
        remedy = "load the adapters with PEFT and save_pretrained() them"
        raise ConfigError(f"{path}: {problem}. To convert, {remedy}")
    our_layers = _map_layers(model)
    shapes = _shape_layers(model)
    sources: dict[str, Source] = {}
    problems: list[str] = []
    targets: list[str] = []
    for name, slices in read_headers([follow_links(path)]).items():
        match = _ADAPTER_NAME.fullmatch(name)
        if _NAMED_ADAPTER.fullmatch(name):
            problem = "contains a name of the adapter, as in PEFT's state_dict()"
            problems.append(f"{name}: {problem}; save the adapters with its save_pretrained()")
            continue
        if match is None or match["layer"] not in our_layers:
            problems.append(f"{name}: unexpected tensor; adapters are for layers of blocks")
            continue
        layers = our_layers[match["layer"]]
        kinds = [layer.rpartition(".")[2] for layer in layers]
        if len(layers) > 1:
            problems.append(f"{name}: is shared by {', '.join(kinds)}, which have one each here")
            continue
        out, inner = shapes[layers[0]]
        expected = (config.lora_rank, inner)
        if match["matrix"] == "lora_B":
            expected = (out, config.lora_rank)
        problem = _compare(slices, expected)
        if problem is not None:
            problems.append(f"{name}: {problem}")
        sources[f"{layers[0]}.{match['matrix']}.weight"] = Source(slices)
        targets.append(kinds[0])

    kinds = dict.fromkeys(layers.kind for layers in linear_layers(model.config))
    in_order = [kind for kind in kinds if kind in targets]
    config = config.model_copy(update={"lora_targets": in_order})
    if not problems:
        problems = _find_missing(sources, config, model)
    if problems:
        problem = f"{directory}: the tensors are not adapters of every block as they are trained"
        raise ConfigError(f"{problem} here:", *limit_problems(problems), f"init_from: {_MERGE}")
    return PeftAdapters(model, config, sources)


def _map_layers(model: Structure) -> dict[str, list[str]]:
    """Return our linear layers of blocks by PEFT's; several of ours can be one of PEFT's."""
    if isinstance(model.config, TransformersConfig):
        return {name: [f"{NETWORK}.{name}"] for name in name_linear_layers(model.config)}
    assert model.family is not None
    kinds = model.config.layer_shapes
    places, _ = families.map_parameters(model.family, model.config)
    our_layers: dict[str, list[str]] = {}
    for name, place in places.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in kinds:
            our_layers.setdefault(place.name.removesuffix(".weight"), []).append(layer)
    return our_layers


def _shape_layers(model: Structure) -> dict[str, tuple[int, int]]:
    """Return `(out, in)` of our linear layers of blocks."""
    if isinstance(model.config, TransformersConfig):
        shapes = name_linear_layers(model.config)
        return {f"{NETWORK}.{name}": shape for name, shape in shapes.items()}
    shapes = model.config.layer_shapes
    layers = itertools.chain.from_iterable(_map_layers(model).values())
    return {layer: shapes[layer.rpartition(".")[2]] for layer in layers}


def _compare(slices: list[TensorSlice], expected: tuple[int | None, ...]) -> str | None:
    """Return what is wrong with the shape or dtype of a tensor."""
    shape = full_shape(slices)
    if shape != expected:
        found = list(shape or ())
        return f"{found} in the file, {list(expected)} of the base and r in {ADAPTER_CONFIG}"
    if slices[0].dtype.name not in READ_DTYPES:
        return f"{slices[0].dtype} is a quantized dtype"
    return None


def _find_missing(sources: Mapping[str, Source], config: LoraConfig, model: Structure) -> list[str]:
    """Return the adapters of a run with `config` that `sources` lacks."""
    if not config.lora_targets:
        return ["the file has no adapters"]
    with torch.device("meta"):
        adapted = lora.add_adapters(new_model(model.config), config, None)
    return [f"{name}: missing" for name in lora.trained_parameters(adapted) if name not in sources]


def model_defaults(init_from: str, *, needs_weights: bool = True) -> dict[str, Any]:
    """Return the hyperparameters that a model sets, or adapters and their base.

    See `weights.model_defaults`. The tokenizer is that of the adapters, if they have one.
    """
    if not is_adapter(init_from):
        return weights.model_defaults(init_from, needs_weights=needs_weights)
    values = weights.model_defaults(base_of(init_from))
    values |= open_adapters(Path(init_from)).config.model_dump(mode="json")
    if Path(init_from, TOKENIZER_JSON).is_file():
        values["tokenizer"] = init_from
    return values


def load_into(model: AnyModel, source: str, world: World, log: Callable[[str], None]) -> None:
    """Fill this rank's shards of the adapters with those in `source`, on all ranks together.

    Raises:
        ConfigError, RunError: see `open_adapters`.
    """
    with world.all_or_none():
        read_directory(Path(source), model)
    log(f"loaded the adapters of {source}")


def read_directory(directory: Path, model: AnyModel) -> None:
    """Fill this rank's shards of the adapters of `model` with those in `directory`."""
    parameters = dict(model.named_parameters())
    for name, source in open_adapters(directory).sources.items():
        read_into(parameters[name], source)


@torch.no_grad()
def merge_into_base(
    directory: Path, device: torch.device, base_dir: Path | None = None
) -> AnyModel:
    """Return the base of the adapters in `directory`, with these merged into it.

    Args:
        base_dir: see `open_adapters`.

    Raises:
        ConfigError, RunError: see `open_adapters`.
    """
    opened = open_adapters(directory, base_dir)
    adapters = lora.Adapters(opened.config, opened.model.config)
    for name, source in opened.sources.items():
        read_into(adapters[name], source)
    model = weights.load_model(base_directory(directory, base_dir), device)
    for name, parameter in model.named_parameters():
        adapters.merge(name, parameter)
    return model


def base_directory(directory: Path, base_dir: Path | None = None) -> Path:
    """Return the directory of the base of the adapters in `directory`, maybe downloaded."""
    return weights.find_source(str(base_dir or base_of(str(directory))))
