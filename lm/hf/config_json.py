"""`config.json` <-> `ModelConfig`, by the table of the model's family.

A model that cannot be represented exactly is refused, with the key that prevents it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from lm.errors import ConfigError, error_prefix
from lm.hf.families import FAMILIES, MIXTURES, Family
from lm.hf.quantized import quantization_of
from lm.model_config import MAX_LAYERS, MAX_SIZE, ROPE_TYPES, AttentionKind, ModelConfig, Rope
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
            raise NotRepresentedError(f"quantization_config: weights in {method}")
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


def _is_size(value: Any) -> bool:
    """Return whether `value` of config.json can be a width."""
    return isinstance(value, int) and 0 < value <= MAX_SIZE


_FULL = "full_attention"
_SLIDING = "sliding_attention"
_PERIOD_KEYS = {
    "layer_types": "sliding_window_pattern",
    "no_rope_layers": "no_rope_layer_interval",
}
"""Lists of layers in config.json -> the key of the period if there is no list."""


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
        if family.scales_embeddings and _is_size(values["d_model"]):
            values["embedding_multiplier"] = values["d_model"] ** 0.5
        if family.query_scalar is not None:
            key, default = family.query_scalar
            scalar = self.raw.get(key, default)
            if _is_size(scalar):
                values["attention_multiplier"] = scalar**-0.5
            else:
                self.problems.append(f"{key}: {scalar!r} is not an integer from 1 to {MAX_SIZE}")
        if family.full_attention_interval is not None:
            values |= self._read_layers_of_two_types(values)
        elif "rope" in family.supported["positions"]:
            values |= self._read_layers(values)
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
        if self.family.full_attention_interval is not None:
            return
        layer_types = self.raw.get("layer_types") or []
        if not isinstance(layer_types, list) or len(set(map(str, layer_types))) > 1:
            problem = "not supported unless all layers have the same type"
            self.problems.append(f"layer_types: {problem}")
        elif layer_types and layer_types[0] != _FULL and "sliding_window" not in self.family.keys:
            problem = f"{layer_types[0]!r} is not supported, only {_FULL!r}"
            self.problems.append(f"layer_types: {problem}")

    def _has_no_window(self) -> bool:
        """Return whether all layers of Qwen2 or Qwen3 have full attention: the first ones do."""
        n_layers = self.raw.get("num_hidden_layers", self.family.defaults["n_layers"])
        n_full = self.raw.get("max_window_layers", 28)
        has_all = isinstance(n_layers, int) and isinstance(n_full, int) and n_layers <= n_full
        is_qwen = self.family.no_rope_interval is None
        return is_qwen and (has_all or self.raw.get("sliding_window", 4096) is None)

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

    def _read_layers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our keys of the attention, of which some layers may have no rope.

        Args:
            values: those of our keys that have a counterpart in config.json.
        """
        found = self._read_rope(values, None)
        interval = self.family.no_rope_interval
        has_rope = self._read_layer_list("no_rope_layers", (1, 0), interval, values["n_layers"])
        if 0 in has_rope:
            kinds: list[dict[str, Any]] = []
            for rotates in has_rope:
                kind = {}
                if not rotates:
                    kind = {"rope": False}
                kinds.append(kind)
            found["layer_pattern"] = _find_period(kinds)
        return found

    def _read_layers_of_two_types(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our keys of the attention, full in some layers, sliding in others.

        Args:
            values: see `_read_layers`.
        """
        interval = self.family.full_attention_interval
        choices = (_SLIDING, _FULL)
        types = self._read_layer_list("layer_types", choices, interval, values["n_layers"])
        full = self._read_rope(values, _FULL)
        sliding = self._read_rope(values, _SLIDING) | {"sliding_window": values["sliding_window"]}
        of_type = {_FULL: full, _SLIDING: sliding}
        if len(set(types)) == 1:
            return {"sliding_window": None} | of_type[types[0]]
        found: dict[str, Any] = {"sliding_window": None}
        if "rope_theta" in full:
            found["rope_theta"] = full["rope_theta"]
        for kind in of_type.values():
            if kind.get("rope_theta") == found.get("rope_theta"):
                kind.pop("rope_theta", None)
        found["layer_pattern"] = _find_period([of_type[layer_type] for layer_type in types])
        return found

    def _read_layer_list(
        self, key: str, choices: tuple[Any, Any], interval: int | None, n_layers: Any
    ) -> list[Any]:
        """Return the value of each layer, one of `choices`; where it is wrong, one for all.

        Args:
            interval: the last of so many layers has the second choice, the others the first one, if
                config.json does not say it; None = all have the first one.
        """
        if not isinstance(n_layers, int) or not 0 < n_layers <= MAX_LAYERS:
            return [choices[0]]  # ModelConfig says it
        if interval is None:
            return [choices[0]] * n_layers
        given = self.raw.get(key)
        if given is None:
            period_key = _PERIOD_KEYS[key]
            period = self.raw.get(period_key, interval)
            if not isinstance(period, int) or period < 1:
                self.problems.append(f"{period_key}: {period!r} is not a number of layers")
                return [choices[0]]
            return [choices[(layer + 1) % period == 0] for layer in range(n_layers)]
        if not isinstance(given, list) or len(given) < n_layers:
            self.problems.append(f"{key}: not a list of {n_layers} layers")
            return [choices[0]]
        for value in given:
            if value not in choices:
                problem = f"{value!r} is not supported, only {choices[0]!r} or {choices[1]!r}"
                self.problems.append(f"{key}: {problem}")
                return [choices[0]]
        return given[:n_layers]

    def _read_rope(self, values: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
        """Return the values of our rotary keys.

        transformers 5 has them in `rope_parameters`, older versions in `rope_scaling` and
        `rope_theta`.

        Args:
            values: see `_read_layers`.
            layer_type: of the layers, in a family that has several.
        """
        source, given, theta = self._find_rope(layer_type)
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            problem = "not supported unless it is one mapping for all layers"
            self.problems.append(f"{source}: {problem}")
            return {}
        rope: dict[str, Any] = {"rope_theta": given.get("rope_theta", theta)}
        partial = given.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        if self.family.partial_rotary_factor is not None:
            rope["partial_rotary_factor"] = self.family.partial_rotary_factor
            if partial is not None:
                rope["partial_rotary_factor"] = partial
        elif partial not in (None, 1):
            problem = f"{partial!r} is not supported, only 1.0"
            self.problems.append(f"partial_rotary_factor: {problem}")

        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type == "default":
            return rope
        if rope_type not in self.family.rope_types:
            types = " or ".join(map(repr, ["default", *self.family.rope_types]))
            problem = f"rope_type {rope_type!r} is not supported, only {types}"
            self.problems.append(f"{source}: {problem}")
            return rope
        scaling = {key: given[key] for key in ROPE_TYPES[rope_type] if key in given}
        key = "original_max_position_embeddings"
        if key in ROPE_TYPES[rope_type]:
            scaling.setdefault(key, values["max_seq_len"])
            outer = self.raw.get(key)
            if rope_type == "dynamic":  # it does not read the key
                scaling[key] = values["max_seq_len"]
            elif layer_type is None and outer is not None:  # which transformers 5 prefers
                scaling[key] = outer
        rope["rope_scaling"] = scaling | {"rope_type": rope_type}
        return rope

    def _find_rope(self, layer_type: str | None) -> _FoundRope:
        """Return where config.json has the rotary parameters of a type of layers."""
        raw = self.raw
        theta = raw.get("rope_theta", self.family.defaults.get("rope_theta", 10000.0))
        of_types = raw.get("rope_parameters") or {}
        if layer_type is not None and isinstance(of_types, dict) and layer_type in of_types:
            return _FoundRope(f"rope_parameters.{layer_type}", of_types[layer_type], theta)
        source = "rope_parameters"
        if raw.get("rope_scaling"):
            source = "rope_scaling"
        if layer_type != _SLIDING:
            return _FoundRope(source, raw.get(source) or {}, theta)
        # Outside of `rope_parameters` there is only a theta for layers with a sliding window.
        if self.family.sliding_theta is not None:
            key, default = self.family.sliding_theta
            theta = raw.get(key, default)
        return _FoundRope(source, {}, theta)


class _FoundRope(NamedTuple):
    """Rotary parameters of config.json."""

    key: str
    """where they are"""
    parameters: Any
    """of any type, unless they are valid"""
    theta: Any
    """if `parameters` has none"""


def _find_period(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the shortest list that is `kinds` if it is repeated."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds)):
            return kinds[:period]
    return kinds


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
    if config.attention_multiplier == config.head_width**-0.5:
        config = config.model_copy(update={"attention_multiplier": None})
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
        prefix = families[name].preset_prefix or name
        if config.model is not None and config.model.startswith(prefix):
            return families[name]
    return families[fitting[0]]


def _find_mismatches(family: Family, config: ModelConfig) -> list[ConfigError]:
    """Return an error for each value of `config` that `family` cannot represent."""
    supported = dict(family.supported)
    if family.zero_biases:
        del supported["bias"]
    if_no_key: dict[str, tuple[Any, ...]] = {
        "n_kv_heads": (None, config.n_heads),
        "head_dim": (None, config.d_model // config.n_heads),
        "sliding_window": (None,),
        "embedding_multiplier": (1.0,),
        "attention_multiplier": (None, config.head_width**-0.5),
        "residual_multiplier": (1.0,),
        "logits_scaling": (1.0,),
    }
    if family.scales_embeddings:
        if_no_key["embedding_multiplier"] = (config.d_model**0.5,)
    if family.query_scalar is not None and config.attention_multiplier is not None:
        nearest = max(1, round(config.attention_multiplier**-2))  # transformers needs an integer
        if_no_key["attention_multiplier"] = (None, nearest**-0.5)
    if family.partial_rotary_factor is None:
        supported["partial_rotary_factor"] = (1.0,)
    supported |= {key: values for key, values in if_no_key.items() if key not in family.keys}
    errors = _find_layer_mismatches(family, config)
    for key, values in supported.items():
        value = getattr(config, key)
        if value not in values:
            advice = " or ".join(map(str, values))
            problem = f"{key}: {value} has no counterpart in {family.class_name}; use {advice}"
            errors.append(ConfigError(problem))
    return errors


def _find_layer_mismatches(family: Family, config: ModelConfig) -> list[ConfigError]:
    """Return an error for each key of the layers' attention that `family` cannot represent."""
    kinds = set(config.attention_kinds)
    errors: list[ConfigError] = []
    for kind in kinds:
        if kind.rope is None or kind.rope.scaling is None:
            continue
        rope_type = kind.rope.scaling.rope_type
        if rope_type not in family.rope_types:
            problem = f"rope_scaling: {rope_type} has no counterpart in {family.class_name}"
            errors.append(ConfigError(f"{problem}; use null"))

    if family.full_attention_interval is not None:
        # At most one kind without a window, and one with one; each is rotated.
        n_sliding = sum(kind.sliding_window is not None for kind in kinds)
        has_rope = all(kind.rope is not None for kind in kinds)
        is_supported = has_rope and n_sliding <= 1 and len(kinds) - n_sliding <= 1
    elif family.no_rope_interval is not None:
        pattern = config.layer_pattern or ()
        is_supported = all(kind.model_dump() in ({}, {"rope": False}) for kind in pattern)
    else:
        is_supported = config.layer_pattern is None
    if not is_supported:
        problem = f"layer_pattern: these layers have no counterpart in {family.class_name}"
        errors.append(ConfigError(f"{problem}; use null"))
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
    if config.attention_multiplier is None:
        values["attention_multiplier"] = config.head_width**-0.5
    query_scalar = round(values["attention_multiplier"] ** -2)

    raw: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
    }
    for key, their_key in family.keys.items():
        raw[their_key] = values[key]
    for their_key, supported in family.required.items():
        raw[their_key] = supported[0]
    if family.query_scalar is not None:
        raw[family.query_scalar[0]] = query_scalar
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
        raw |= _write_layers(family, config)
    if family.partial_rotary_factor is not None:
        raw["partial_rotary_factor"] = config.partial_rotary_factor
        raw["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
    return raw


def _write_layers(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the keys of the layers' attention, in transformers 5 and in older versions."""
    kinds = config.attention_kinds
    if family.full_attention_interval is None:
        raw = _write_rope(Rope(config.rope_theta, config.rope_scaling))
        if family.no_rope_interval is not None:
            raw["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
        return raw

    of_type: dict[str, AttentionKind] = {}
    layer_types: list[str] = []
    for kind in kinds:
        layer_type = _SLIDING
        if kind.sliding_window is None:
            layer_type = _FULL
        of_type[layer_type] = kind
        layer_types.append(layer_type)
    # A type that no layer has is written as the other one.
    full = of_type.get(_FULL, kinds[0])
    sliding = of_type.get(_SLIDING, kinds[0])
    assert full.rope is not None
    assert sliding.rope is not None
    raw = _write_rope(full.rope)
    if family.sliding_theta is not None:
        raw[family.sliding_theta[0]] = sliding.rope.theta
    raw["rope_parameters"] = {
        _FULL: raw["rope_parameters"],
        _SLIDING: _write_rope(sliding.rope)["rope_parameters"],
    }
    raw["sliding_window"] = sliding.sliding_window
    raw["layer_types"] = layer_types
    return raw


def _write_rope(rope: Rope) -> dict[str, Any]:
    """Return the rotary keys of transformers 5, `rope_parameters`, and those of older versions."""
    scaling = None
    parameters: dict[str, Any] = {"rope_type": "default"}
    written: dict[str, Any] = {}
    if rope.scaling is not None:
        scaling = {"rope_type": rope.scaling.rope_type, **rope.scaling.model_dump()}
        if rope.scaling.rope_type == "dynamic":  # transformers has it in this key
            original = scaling.pop("original_max_position_embeddings")
            written["max_position_embeddings"] = original
        parameters = dict(scaling)
    parameters["rope_theta"] = rope.theta
    return written | {
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }
