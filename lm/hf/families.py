"""Model families of Hugging Face: `config.json` <-> `ModelConfig`, and the names of their tensors.

The modules have the same structure on both sides, so a family is a table of names. Only GPT-2
differs: it stores query, key and value as one tensor, and its matrices as (in, out). Rotary
    embedding pairs (i, i + K/2) on both sides.

A model that cannot be represented exactly is refused, with the key that prevents it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from lm.errors import ConfigError
from model import PRESETS, ModelConfig, Transformer


@dataclass(frozen=True)
class Family:
    """A family of models in transformers. To support another, add a record to `FAMILIES`."""

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    """our key -> the key in config.json"""
    defaults: Mapping[str, Any]
    """our key -> its value if config.json does not have it; else None"""
    style: Mapping[str, tuple[Any, ...]]
    """our key -> the values that the family supports; the first is the default"""
    fixed: Mapping[str, tuple[Any, ...]]
    """key in config.json -> the values that `ModelConfig` can represent; the first is the default"""
    tensors: Mapping[str, str]
    """our module -> the module in transformers; {} is the layer. Modules with the same name are its rows, in order."""
    bias_keys: tuple[str, str] | None = None
    """keys in config.json that enable biases in attention and in the feed-forward network"""
    dropout_keys: tuple[str, ...] = ()
    transposed: bool = False
    """whether the matrices in the layers are stored as (in, out)"""
    zero_biases: bool = False
    """whether the family has all biases, so that a model without some of them has zeros there"""
    bos_is_eos: bool = False
    """whether the end-of-text token also starts a text"""


_STYLE = {
    "norm": ("rmsnorm",),
    "norm_placement": ("pre",),
    "qk_norm": ("none",),
    "positions": ("rope",),
    "ffn": ("swiglu",),
    "bias": ("none",),
}
_LLAMA_DEFAULTS = {
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "vocab_size": 32000,
    "max_seq_len": 2048,
}
_LLAMA_DEFAULTS |= {"d_ff": 11008, "norm_eps": 1e-6, "tie_embeddings": False}
_NO_BIAS, _NO_WINDOW = {"attention_bias": (False,)}, {"use_sliding_window": (False,)}

LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    keys={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "d_ff": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults=_LLAMA_DEFAULTS,
    style={**_STYLE, "bias": ("none", "ffn", "all")},
    fixed={"hidden_act": ("silu", "swish")},
    tensors={
        "embedding.tokens": "model.embed_tokens",
        "blocks.attention_norm": "model.layers.{}.input_layernorm",
        "blocks.ffn_norm": "model.layers.{}.post_attention_layernorm",
        **{
            f"blocks.attention.{part}": f"model.layers.{{}}.self_attn.{part}"
            for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        },
        **{
            f"blocks.ffn.{part}": f"model.layers.{{}}.mlp.{part}"
            for part in ("gate_proj", "up_proj", "down_proj")
        },
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
    bias_keys=("attention_bias", "mlp_bias"),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    keys={**LLAMA.keys, "sliding_window": "sliding_window"},
    defaults={
        **_LLAMA_DEFAULTS,
        "max_seq_len": 131072,
        "n_kv_heads": 8,
        "d_ff": 14336,
        "sliding_window": 4096,
    },
    style=_STYLE,
    fixed={**LLAMA.fixed, **_NO_BIAS, "mlp_bias": (False,)},
    bias_keys=None,
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    defaults={
        **_LLAMA_DEFAULTS,
        "vocab_size": 151936,
        "max_seq_len": 32768,
        "n_kv_heads": 32,
        "d_ff": 22016,
    },
    style={**_STYLE, "bias": ("qkv",)},
    fixed={**LLAMA.fixed, **_NO_WINDOW},
    bias_keys=None,
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": 128},
    style={**_STYLE, "qk_norm": ("head",)},
    fixed={**QWEN2.fixed, **_NO_BIAS},
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    defaults={**_LLAMA_DEFAULTS, "vocab_size": 50304, "norm_eps": 1e-5},
    style={**_STYLE, "norm_placement": ("post",), "qk_norm": ("projection",)},
    fixed={**LLAMA.fixed, **_NO_BIAS},
    tensors={
        **LLAMA.tensors,
        "blocks.attention_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.ffn_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    bias_keys=None,
)
GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    keys={
        "d_model": "n_embd",
        "n_heads": "n_head",
        "n_layers": "n_layer",
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
        "d_ff": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={**PRESETS["gpt2"], "norm_eps": 1e-5},
    style={
        **_STYLE,
        "norm": ("layernorm",),
        "positions": ("learned",),
        "ffn": ("gelu",),
        "bias": ("all",),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    tensors={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "blocks.attention_norm": "transformer.h.{}.ln_1",
        **{f"blocks.attention.{part}_proj": "transformer.h.{}.attn.c_attn" for part in "qkv"},
        "blocks.attention.o_proj": "transformer.h.{}.attn.c_proj",
        "blocks.ffn_norm": "transformer.h.{}.ln_2",
        "blocks.ffn.up_proj": "transformer.h.{}.mlp.c_fc",
        "blocks.ffn.down_proj": "transformer.h.{}.mlp.c_proj",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    dropout_keys=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    transposed=True,
    zero_biases=True,
    bos_is_eos=True,
)
FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2)}

_FIXED_EVERYWHERE = dict.fromkeys(
    ("num_local_experts", "num_experts", "n_routed_experts"), (None, 0, 1)
)
_BIASES = {"none": (False, False), "ffn": (False, True), "all": (True, True)}
"""our `bias` -> `Family.bias_keys`"""
_ROPE_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_config(raw: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """Return the family and the `ModelConfig` of the model that `raw`, the content of the file `where`, describes.

    Dropout is not part of what the model computes: if a family's values for it differ, it is 0.

    Raises:
        ConfigError: the model cannot be represented exactly; lists every key that prevents it.
    """
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config: quantized models are not supported; use the original model, or load this"
            " one with transformers, dequantize() and save_pretrained() it"
        )
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: model_type: {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    problems = []
    for key, allowed in {**family.fixed, **_FIXED_EVERYWHERE}.items():
        if raw.get(key, allowed[0]) not in allowed:
            problems.append(
                f"{key}: {raw[key]!r} is not supported, only {' or '.join(map(repr, allowed))}"
            )
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or len(set(map(str, layer_types))) > 1:
        problems.append("layer_types: not supported unless all layers have the same type")
    elif layer_types and layer_types[0] != "full_attention" and "sliding_window" not in family.keys:
        problems.append(f"layer_types: {layer_types[0]!r} is not supported, only 'full_attention'")
    values = {
        ours: raw.get(theirs, family.defaults.get(ours)) for ours, theirs in family.keys.items()
    }
    values |= {ours: allowed[0] for ours, allowed in family.style.items()}
    if family.dropout_keys:
        first, *others = (raw.get(key, 0.1) for key in family.dropout_keys)
        values["dropout"] = first if all(other == first for other in others) else 0.0
    if "rope" in family.style["positions"]:
        rope, rope_problems = _read_rope(raw)
        values |= rope
        problems += rope_problems
    if family.bias_keys:
        pair = tuple(raw.get(key, False) for key in family.bias_keys)
        bias = next((bias for bias, enabled in _BIASES.items() if enabled == pair), None)
        if bias is None:
            attention, ffn = family.bias_keys
            problems.append(
                f"{attention}: {pair[0]!r} with {ffn}: {pair[1]!r} is not supported: biases can be in the feed-forward"
                " network only, in both, or in neither"
            )
        values["bias"] = bias or "none"
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            path = [family.keys.get(str(part), str(part)) for part in problem["loc"]]
            message = problem["msg"].removeprefix("Value error, ")
            problems += [f"{'.'.join(path)}: {message}"] if path else message.splitlines()
    else:
        if not problems:
            if config.head_dim and config.head_dim * config.n_heads == config.d_model:
                config = config.model_copy(update={"head_dim": None})
            if (
                family_of(config) is not family
            ):  # only its name differs from the other's, e.g. Mistral without a window
                config = config.model_copy(update={"model": family.model_type})
            return family, config
    raise ConfigError(*(f"{where}: {problem}" for problem in problems))


def _read_rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our rotary keys, from transformers 5's `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        return {}, [f"{key}: not supported unless it is one mapping for all layers"]
    problems = []
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        problems.append(f"partial_rotary_factor: {partial!r} is not supported, only 1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    rope: dict[str, Any] = {"rope_theta": given.get("rope_theta", raw.get("rope_theta", 10000.0))}
    if kind == "llama3":
        rope["rope_scaling"] = {name: given[name] for name in _ROPE_SCALING if name in given}
    elif kind != "default":
        problems.append(f"{key}: rope_type {kind!r} is not supported, only 'default' or 'llama3'")
    return rope, problems


def family_of(config: ModelConfig) -> Family:
    """Return the family that can represent the model; of several, the one that the preset `model` is named after.

    Raises:
        ConfigError: no family can; lists the keys in which the model differs from the closest one.
    """
    mismatches = {family: _mismatches(FAMILIES[family], config) for family in FAMILIES}
    fitting = [family for family, found in mismatches.items() if not found]
    if not fitting:
        raise ConfigError.merge(min(reversed(mismatches.values()), key=len))
    named = [family for family in fitting if (config.model or "").startswith(family)]
    return FAMILIES[(named or fitting)[0]]


def _mismatches(family: Family, config: ModelConfig) -> list[ConfigError]:
    values = config.model_dump()
    without_key = {
        "n_kv_heads": (None, config.n_heads),
        "sliding_window": (None,),
        "head_dim": (None, config.d_model // config.n_heads),
    }
    supported = {
        **family.style,
        **{key: only for key, only in without_key.items() if key not in family.keys},
    }
    if family.zero_biases:
        del supported["bias"]
    return [
        ConfigError(
            f"{key}: {values[key]} has no counterpart in {family.class_name}; use {' or '.join(map(str, allowed))}"
        )
        for key, allowed in supported.items()
        if values[key] not in allowed
    ]


def write_config(
    config: ModelConfig, dtype: str, end_of_text: int | None, beginning: int | None = None
) -> dict[str, Any]:
    """Return the `config.json` of a model, readable by transformers 4 and 5.

    Args:
        dtype: of the weights, e.g. "bfloat16".
        end_of_text: id of the token that ends generation.
        beginning: id of the token that starts a text, if the tokenizer has one.

    Raises:
        ConfigError: see `family_of`.
    """
    family = family_of(config)
    values = config.model_dump() | {"n_kv_heads": config.kv_heads, "d_ff": config.ffn_width}
    values["head_dim"] = config.head_width
    raw = {"architectures": [family.class_name], "model_type": family.model_type}
    raw |= {theirs: values[ours] for ours, theirs in family.keys.items()}
    raw |= {theirs: allowed[0] for theirs, allowed in family.fixed.items()}
    raw |= dict.fromkeys(family.dropout_keys, config.dropout)
    bos = end_of_text if family.bos_is_eos and beginning is None else beginning
    raw |= {"dtype": dtype, "torch_dtype": dtype, "bos_token_id": bos, "eos_token_id": end_of_text}
    if family.bias_keys:
        raw |= zip(family.bias_keys, _BIASES[config.bias], strict=True)
    if config.positions == "rope":
        scaling = (
            {"rope_type": "llama3", **config.rope_scaling.model_dump()}
            if config.rope_scaling
            else None
        )
        raw |= {
            "rope_parameters": {
                "rope_type": "default",
                **(scaling or {}),
                "rope_theta": config.rope_theta,
            },
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
        }
    return raw


class Place(NamedTuple):
    """The tensor of a Hugging Face model that holds a parameter: rows from `start` of it, or of its transpose."""

    name: str
    start: int
    transposed: bool


def layout(
    family: Family, config: ModelConfig
) -> tuple[dict[str, Place], dict[str, tuple[int, ...]]]:
    """Return the place of each of our parameters, and the shape of each tensor as stored, zero biases included."""
    one_layer = config.model_copy(
        update={"n_layers": 1, "bias": "all" if family.zero_biases else config.bias}
    )
    with torch.device("meta"):
        model = Transformer(one_layer)
    places, shapes = {}, {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.replace("blocks.0.", "blocks.").rpartition(".")
        in_layer = name.startswith("blocks.")
        for layer in range(config.n_layers if in_layer else 1):
            theirs = f"{family.tensors[module].format(layer)}.{kind}"
            start = shapes[theirs][0] if theirs in shapes else 0
            ours = name.replace("blocks.0.", f"blocks.{layer}.")
            places[ours] = Place(
                theirs, start, family.transposed and in_layer and parameter.dim() == 2
            )
            shapes[theirs] = (start + parameter.shape[0], *parameter.shape[1:])
    flipped = {place.name for place in places.values() if place.transposed}
    return places, {
        name: shape[::-1] if name in flipped else shape for name, shape in shapes.items()
    }
