"""`config.json` <-> `ModelConfig`, by the table of the model's family.

A model that cannot be represented exactly is refused, with the key that prevents it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from lm.errors import ConfigError, error_prefix
from lm.hf.families import FAMILIES, MIXTURES, Family
from lm.hf.quantization import quantization_of
from lm.model_config import ModelConfig, RopeScaling
from lm.presets import PRESETS

_REQUIRED_EVERYWHERE = {
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0, 1),
}
"""As `Family.required`: a mixture of experts cannot be represented."""


class NotRepresentedError(ConfigError):
    """A model has an option that `ModelConfig` does not have."""


def read_config(raw: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """Return the family and the `ModelConfig` of the model that `raw` describes.

    Dropout is not part of what the model computes: if a family's values for it differ, it is 0.

    Args:
        raw: the content of the file `where`.

    Raises:
        ConfigError: the model cannot be represented exactly, or a value is impossible; lists every
            key that prevents it.
    """
    with error_prefix(where):
        quantization = quantization_of(raw)
    if quantization is not None:
        method = quantization["quant_method"]
        raise NotRepresentedError(f"{where}: quantization_config: weights in {method}")
    family = FAMILIES[raw["model_type"]]
    reader = _ConfigReader(family, raw)
    values = reader.read()
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        problems = [*reader.problems, *_translate_errors(family, error)]
        raise ConfigError(*(f"{where}: {problem}" for problem in problems)) from None
    if reader.problems:
        raise NotRepresentedError(*(f"{where}: {problem}" for problem in reader.problems))
    return family, _normalize(family, config)


def is_of_a_family(raw: Mapping[str, Any]) -> bool:
    """Return whether the model is of a family that model.py computes; else transformers does."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type in FAMILIES


@dataclass
class _ConfigReader:
    """The values of our keys for a model of `family`, and what is wrong with its config.json."""

    family: Family
    raw: Mapping[str, Any]
    """the content of config.json"""
    problems: list[str] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        """Return the values of our keys, and note `problems`."""
        family = self.family
        self._note_unsupported()
        values: dict[str, Any] = {}
        for key, their_key in family.keys.items():
            values[key] = self.raw.get(their_key, family.defaults.get(key))
        values["n_positions"] = values["max_seq_len"]
        for key, supported_values in family.supported.items():
            values[key] = supported_values[0]
        if family.dropout_keys:
            values["dropout"] = self._read_dropout()
        if "rope" in family.supported["positions"]:
            values |= self._read_rope(values)
        if family.biases:
            values["bias"] = self._read_bias()
        return values

    def _note_unsupported(self) -> None:
        """Note what is wrong with the values of keys that `ModelConfig` does not have."""
        for key, supported in {**self.family.required, **_REQUIRED_EVERYWHERE}.items():
            value = self.raw.get(key, supported[0])
            if key == "use_sliding_window" and value is True and self._has_no_window():
                continue
            if value not in supported:
                choices = " or ".join(map(repr, supported))
                self.problems.append(f"{key}: {value!r} is not supported, only {choices}")
        layer_types = self.raw.get("layer_types") or []
        if not isinstance(layer_types, list) or len(set(map(str, layer_types))) > 1:
            problem = "not supported unless all layers have the same type"
            self.problems.append(f"layer_types: {problem}")
        elif (
            layer_types
            and layer_types[0] != "full_attention"
            and "sliding_window" not in self.family.keys
        ):
            problem = f"{layer_types[0]!r} is not supported, only 'full_attention'"
            self.problems.append(f"layer_types: {problem}")

    def _has_no_window(self) -> bool:
        """Return whether all layers of Qwen2 or Qwen3 have full attention: the first ones do."""
        n_layers = self.raw.get("num_hidden_layers", self.family.defaults["n_layers"])
        n_full = self.raw.get("max_window_layers", 28)
        has_all = isinstance(n_layers, int) and isinstance(n_full, int) and n_layers <= n_full
        return has_all or self.raw.get("sliding_window", 4096) is None

    def _read_dropout(self) -> Any:
        rates = [self.raw.get(key, 0.1) for key in self.family.dropout_keys]
        if any(rate != rates[0] for rate in rates):
            return 0.0
        return rates[0]

    def _read_bias(self) -> str:
        """Return our `bias`, from the keys that enable biases."""
        default = next(iter(self.family.biases))
        given: dict[str, Any] = {}
        for key, value in self.family.biases[default].items():
            given[key] = self.raw.get(key, value)
        for bias, their_values in self.family.biases.items():
            if their_values == given:
                return bias
        for key, value in given.items():
            if value not in (True, False):
                self.problems.append(f"{key}: {value!r} is not true or false")
        return default

    def _read_rope(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our rotary keys.

        transformers 5 has them in `rope_parameters`, older versions in `rope_scaling` and
        `rope_theta`.

        Args:
            values: those of our keys that have a counterpart in config.json.
        """
        raw = self.raw
        source = "rope_parameters"
        if raw.get("rope_scaling"):
            source = "rope_scaling"
        given = raw.get(source) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            problem = "not supported unless it is one mapping for all layers"
            self.problems.append(f"{source}: {problem}")
            return {}
        rope: dict[str, Any] = {"rope_theta": given.get("rope_theta", raw.get("rope_theta", 1e4))}
        partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1):
            problem = f"{partial!r} is not supported, only 1.0"
            self.problems.append(f"partial_rotary_factor: {problem}")

        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type == "llama3":
            rope["rope_scaling"] = self._read_scaling(given, values["max_seq_len"])
        elif rope_type != "default":
            problem = f"rope_type {rope_type!r} is not supported, only 'default' or 'llama3'"
            self.problems.append(f"{source}: {problem}")
        return rope

    def _read_scaling(self, given: Mapping[str, Any], max_seq_len: Any) -> dict[str, Any]:
        """Return `rope_scaling` of the `given` rotary parameters."""
        scaling = {key: given[key] for key in RopeScaling.model_fields if key in given}
        key = "original_max_position_embeddings"
        scaling.setdefault(key, max_seq_len)
        if self.raw.get(key) is not None:  # which transformers 5 prefers
            scaling[key] = self.raw[key]
        return scaling


def _translate_errors(family: Family, error: ValidationError) -> list[str]:
    """Return what is wrong with the values of a model, with the keys of config.json."""
    problems = []
    for found in error.errors():
        keys = [family.keys.get(str(part), str(part)) for part in found["loc"]]
        message = found["msg"].removeprefix("Value error, ")
        if keys:
            problems.append(f"{'.'.join(keys)}: {message}")
        else:
            problems += message.splitlines()
    return problems


def _normalize(family: Family, config: ModelConfig) -> ModelConfig:
    """Return `config` without keys that follow from others, and found as of `family`."""
    if config.head_dim and config.head_dim * config.n_heads == config.d_model:
        config = config.model_copy(update={"head_dim": None})
    if find_family(config) is not family and family.model_type in PRESETS:
        # Only names differ from the other's, e.g. Mistral without a window.
        config = config.model_copy(update={"model": family.model_type})
    return config


def find_family(config: ModelConfig) -> Family:
    """Return the family that can represent the model.

    Of several, it is the one that the preset `model` is named after.

    Raises:
        ConfigError: no family can; lists the keys in which the model differs from the closest one.
    """
    families = FAMILIES
    if config.n_experts is not None:
        families = MIXTURES
    mismatches = {name: _find_mismatches(family, config) for name, family in families.items()}
    fitting = [name for name, found in mismatches.items() if not found]
    if not fitting:
        fewest = min(reversed(mismatches.values()), key=len)  # of equally many, GPT-2's
        raise ConfigError.merge(fewest)
    for name in fitting:
        if config.model is not None and config.model.startswith(name):
            return families[name]
    return families[fitting[0]]


def describe_no_family(config: ModelConfig) -> list[str]:
    """Return why no family has the structure of `config`, for a model that is to be trained."""
    try:
        find_family(config)
    except ConfigError as error:
        return [f"lm.hf export will refuse this model: {problem}" for problem in error.problems]
    return []


def _find_mismatches(family: Family, config: ModelConfig) -> list[ConfigError]:
    """Return an error for each value of `config` that `family` cannot represent."""
    supported = dict(family.supported)
    if family.zero_biases:
        del supported["bias"]
    if_no_key: dict[str, tuple[Any, ...]] = {
        "n_kv_heads": (None, config.n_heads),
        "head_dim": (None, config.d_model // config.n_heads),
        "sliding_window": (None,),
        "n_shared_experts": (None,),
    }
    supported |= {key: values for key, values in if_no_key.items() if key not in family.keys}
    errors: list[ConfigError] = []
    for key, values in supported.items():
        value = getattr(config, key)
        if value not in values:
            advice = " or ".join(map(str, values))
            problem = f"{key}: {value} has no counterpart in {family.class_name}; use {advice}"
            errors.append(ConfigError(problem))
    return errors


def write_config(
    config: ModelConfig, dtype: str, end_of_text: int | None, beginning: int | None = None
) -> dict[str, Any]:
    """Return the `config.json` of a model, readable by transformers 4 and 5.

    Args:
        dtype: of the weights, e.g. "bfloat16".
        end_of_text: id of the token that ends generation.
        beginning: id of the token that starts a text, if the tokenizer has one.

    Raises:
        ConfigError: see `find_family`.
    """
    family = find_family(config)
    values = config.model_dump()
    # Widths that our config may leave to others are written.
    values["n_kv_heads"] = config.kv_heads
    values["d_ff"] = config.ffn_width
    values["head_dim"] = config.head_width
    values["max_seq_len"] = config.context_length

    raw: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
    }
    for key, their_key in family.keys.items():
        raw[their_key] = values[key]
    for their_key, supported in family.required.items():
        raw[their_key] = supported[0]
    for their_key in family.dropout_keys:
        raw[their_key] = config.dropout
    if beginning is None and family.bos_is_eos:
        beginning = end_of_text
    raw["dtype"] = dtype
    raw["torch_dtype"] = dtype  # of transformers 4
    raw["bos_token_id"] = beginning
    raw["eos_token_id"] = end_of_text
    raw["pad_token_id"] = None  # the family's may be beyond the vocabulary
    raw |= family.biases.get(config.bias, {})
    if config.positions == "rope":
        raw |= _write_rope(config)
    return raw


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary keys of transformers 5, `rope_parameters`, and those of older versions."""
    scaling = None
    parameters: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **config.rope_scaling.model_dump()}
        parameters = dict(scaling)
    parameters["rope_theta"] = config.rope_theta
    return {
        "rope_parameters": parameters,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }
