"""`config.json` of a `ModelConfig`, by the table of the family that can represent it.

A model that no family can represent exactly is refused, with the keys that prevent it.
"""

from __future__ import annotations

from typing import Any

from lm.errors import ConfigError
from lm.hf.families import FAMILIES, MIXTURES, Family
from lm.model_config import ModelConfig


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
    if_no_key: dict[str, tuple[Any, ...]] = {
        "n_kv_heads": (None, config.n_heads),
        "head_dim": (None, config.d_model // config.n_heads),
        "sliding_window": (None,),
        "n_shared_experts": (None,),
    }
    has_key = family.keys.values()
    without = {key: values for key, values in if_no_key.items() if key not in has_key}
    errors: list[ConfigError] = []
    for key, values in {**family.supported, **without}.items():
        value = getattr(config, key)
        if value not in values:
            advice = " or ".join(map(str, values))
            problem = f"{key}: {value} has no counterpart in {family.model_type}; use {advice}"
            errors.append(ConfigError(problem))
    return errors


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a model, readable by transformers 4 and 5.

    Args:
        dtype: of the weights, e.g. "bfloat16".

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
    values["attention_bias"] = config.bias in ("attention", "all")
    values["ffn_bias"] = config.bias in ("ffn", "all")

    raw: dict[str, Any] = {"model_type": family.model_type}
    for key, our_key in family.keys.items():
        raw[key] = values[our_key]
    raw["dtype"] = dtype
    raw["torch_dtype"] = dtype  # of transformers 4
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        raw[key] = None  # the family's may be beyond the vocabulary
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
