"""Model families of Hugging Face: `config.json` <-> `ModelConfig`, and which of their tensors make up one of ours.

Theirs keep query, key and value apart, and the gate from the up projection; ours are one matrix each, in that
order, row below row. GPT-2's matrices are stored the other way round, (in, out). Rotary embedding pairs (i, i + K/2)
on both sides, so nothing is permuted.

What a family has and `ModelConfig` has not, or the reverse, is refused by name: a model that is almost the same
is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from lm.errors import ConfigError
from model import ModelConfig, Transformer

_LLAMA_KEYS = {
    "d_model": ("hidden_size", 4096),
    "n_heads": ("num_attention_heads", 32),
    "n_layers": ("num_hidden_layers", 32),
    "vocab_size": ("vocab_size", 32000),
    "max_seq_len": ("max_position_embeddings", 2048),
    "n_kv_heads": ("num_key_value_heads", None),
    "d_ff": ("intermediate_size", 11008),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
}
_MISTRAL_CHANGES = {
    "max_seq_len": ("max_position_embeddings", 131072),
    "n_kv_heads": ("num_key_value_heads", 8),
    "d_ff": ("intermediate_size", 14336),
    "sliding_window": ("sliding_window", 4096),
}
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "llama": _LLAMA_KEYS,
    "mistral": _LLAMA_KEYS | _MISTRAL_CHANGES,
    "gpt2": {
        "d_model": ("n_embd", 768),
        "n_heads": ("n_head", 12),
        "n_layers": ("n_layer", 12),
        "vocab_size": ("vocab_size", 50257),
        "max_seq_len": ("n_positions", 1024),
        "d_ff": ("n_inner", None),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_embeddings": ("tie_word_embeddings", True),
    },
}
"""Our key: theirs, and what theirs means where it is left out."""

_LLAMA_STYLE = {"norm": ("rmsnorm",), "positions": ("rope",), "ffn": ("swiglu",)}
_STYLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _LLAMA_STYLE | {"bias": ("none", "ffn", "all")},
    "mistral": _LLAMA_STYLE | {"bias": ("none",)},
    "gpt2": {"norm": ("layernorm",), "positions": ("learned",), "ffn": ("gelu",), "bias": ("all",)},
}
"""Values of our keys that a family can have."""

_LLAMA_FIXED = {"hidden_act": ("silu", "swish")}
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _LLAMA_FIXED,
    "mistral": _LLAMA_FIXED | {"attention_bias": (False,), "mlp_bias": (False,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
}
_FIXED_EVERYWHERE = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (None, 0, 1))
"""Their keys of which only some values can be represented; the first one is what a key left out means."""

_BIASES = {"none": (False, False), "ffn": (False, True), "all": (True, True)}
"""Llama's attention_bias and mlp_bias for our `bias`; its norm never has one, nor has our rmsnorm."""

_ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "gpt2": "GPT2LMHeadModel"}
PREFIXES = {"llama": "model.", "mistral": "model.", "gpt2": "transformer."}
"""What stands before the names of all tensors but the head's, unless the bare model was saved."""

_LLAMA_NAMES = {
    "embedding.tokens": ("model.embed_tokens",),
    "blocks.attention_norm": ("model.layers.{}.input_layernorm",),
    "blocks.attention.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    "blocks.attention.output": ("model.layers.{}.self_attn.o_proj",),
    "blocks.ffn_norm": ("model.layers.{}.post_attention_layernorm",),
    "blocks.ffn.up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "blocks.ffn.down": ("model.layers.{}.mlp.down_proj",),
    "head.norm": ("model.norm",),
    "head.output": ("lm_head",),
}
_NAMES = {
    "llama": _LLAMA_NAMES,
    "mistral": _LLAMA_NAMES,
    "gpt2": {
        "embedding.tokens": ("transformer.wte",),
        "embedding.positions": ("transformer.wpe",),
        "blocks.attention_norm": ("transformer.h.{}.ln_1",),
        "blocks.attention.qkv": ("transformer.h.{}.attn.c_attn",),
        "blocks.attention.output": ("transformer.h.{}.attn.c_proj",),
        "blocks.ffn_norm": ("transformer.h.{}.ln_2",),
        "blocks.ffn.up": ("transformer.h.{}.mlp.c_fc",),
        "blocks.ffn.down": ("transformer.h.{}.mlp.c_proj",),
        "head.norm": ("transformer.ln_f",),
        "head.output": ("lm_head",),
    },
}


def read_config(raw: Mapping[str, Any], where: str) -> tuple[str, ModelConfig]:
    """The family and our config of the model that the `config.json` called `where` describes.

    `dropout` is GPT-2's where its three are one number, else 0: it is no part of what the model computes.

    Raises:
        ConfigError: it cannot be represented exactly; every key that stands in the way is listed.
    """
    family = raw.get("model_type")
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config: the model is quantised; give the one it was made from, or load it with"
            " transformers, dequantize() and save_pretrained() it"
        )
    if not isinstance(family, str) or family not in _KEYS:
        raise ConfigError(f"{where}: model_type: {family!r} is none of the families read here: {', '.join(_KEYS)}")
    problems = []
    for key, allowed in (_FIXED[family] | _FIXED_EVERYWHERE).items():
        if raw.get(key, allowed[0]) not in allowed:
            problems.append(f"{key}: {raw[key]!r} cannot be represented, only {' or '.join(map(repr, allowed))}")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or len(set(map(str, kinds))) > 1:
        problems.append("layer_types: cannot be represented, only layers that are all alike")
    values = {ours: raw.get(theirs, default) for ours, (theirs, default) in _KEYS[family].items()}
    values |= {ours: allowed[0] for ours, allowed in _STYLES[family].items()}
    if family == "gpt2":
        first, *others = (raw.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"))
        values["dropout"] = first if all(drop == first for drop in others) else 0.0
    else:
        rope, refused = _read_rope(raw)
        values |= rope
        problems += refused
    if family == "llama":
        biases = (raw.get("attention_bias", False), raw.get("mlp_bias", False))
        fitting = [bias for bias, pair in _BIASES.items() if pair == biases]
        values["bias"] = fitting[0] if fitting else "none"
        if not fitting:
            problems.append(
                f"attention_bias: {biases[0]!r} with mlp_bias: {biases[1]!r} cannot be represented: biases in"
                " the feed-forward network only, in both, or in none"
            )
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        theirs = {ours: name for ours, (name, _) in _KEYS[family].items()}
        for problem in error.errors():
            path = [theirs.get(str(part), str(part)) for part in problem["loc"]]
            message = problem["msg"].removeprefix("Value error, ")
            problems += [f"{'.'.join(path)}: {message}"] if path else message.splitlines()
    else:
        head_dim = raw.get("head_dim")
        if head_dim is not None and head_dim != config.head_dim:
            problems.append(f"head_dim: {head_dim} cannot be represented, only d_model / n_heads, {config.head_dim}")
        if not problems:
            return family, config
    raise ConfigError(*(f"{where}: {problem}" for problem in problems))


def _read_rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our rotary keys, from transformers 5's `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        return {}, [f"{key}: cannot be represented, only one mapping for all layers"]
    problems = []
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        problems.append(f"partial_rotary_factor: {partial!r} cannot be represented, only 1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    rope: dict[str, Any] = {"rope_theta": given.get("rope_theta", raw.get("rope_theta", 10000.0))}
    if kind == "llama3":
        rope["rope_scaling"] = {name: given[name] for name in _ROPE_SCALING if name in given}
    elif kind != "default":
        problems.append(f"{key}: rope_type {kind!r} cannot be represented, only 'default' or 'llama3'")
    return rope, problems


def family_of(config: ModelConfig) -> str:
    """The family that has this structure.

    Raises:
        ConfigError: none has; lists the keys that stand in the way.
    """
    family = "gpt2" if config.positions == "learned" else "mistral" if config.sliding_window else "llama"
    wanted = dict(_STYLES[family])
    if family == "gpt2":
        wanted |= {"n_kv_heads": (None, config.n_heads), "sliding_window": (None,)}
    values = config.model_dump()
    problems = [
        f"{key}: {values[key]} has no counterpart in {_CLASSES[family]}, which has {' or '.join(map(str, allowed))}"
        for key, allowed in wanted.items()
        if values[key] not in allowed
    ]
    if problems:
        raise ConfigError(*problems)
    return family


def write_config(
    config: ModelConfig, dtype: str, end_of_text: int | None, beginning: int | None = None
) -> dict[str, Any]:
    """The `config.json` of a model of ours, in both spellings of transformers 4 and 5.

    Args:
        dtype: of the weights, e.g. "bfloat16".
        end_of_text: id on which generation stops.
        beginning: id that opens a text, if one does; GPT-2's is its end-of-text id.

    Raises:
        ConfigError: as `family_of`.
    """
    family = family_of(config)
    values = config.model_dump() | {"n_kv_heads": config.kv_heads, "d_ff": config.ffn_width}
    raw = {"architectures": [_CLASSES[family]], "model_type": family}
    raw |= {theirs: values[ours] for ours, (theirs, _) in _KEYS[family].items()}
    opening = end_of_text if family == "gpt2" and beginning is None else beginning
    raw |= {"dtype": dtype, "torch_dtype": dtype, "bos_token_id": opening, "eos_token_id": end_of_text}
    if family == "gpt2":
        return raw | {
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        }
    scaling = {"rope_type": "llama3", **config.rope_scaling.model_dump()} if config.rope_scaling else None
    raw |= {
        "hidden_act": "silu",
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }
    if family == "llama":
        raw["attention_bias"], raw["mlp_bias"] = _BIASES[config.bias]
    return raw


class TensorSlice(NamedTuple):
    """A tensor of theirs, and which rows of ours it is."""

    name: str
    start: int
    stop: int
    transposed: bool
    shape: tuple[int, ...]
    """as it is stored in their files"""


def layout(family: str, config: ModelConfig) -> dict[str, tuple[TensorSlice, ...]]:
    """For each parameter of ours, by name, the tensors of theirs that fill its rows from the first to the last."""
    with torch.device("meta"):
        model = Transformer(config)
    return {
        name: tuple(_parts(family, config, name, tuple(parameter.shape)))
        for name, parameter in model.named_parameters()
    }


def _parts(family: str, config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    *path, kind = name.split(".")
    layer = next((part for part in path if part.isdigit()), "")
    names = _NAMES[family][".".join(part for part in path if not part.isdigit())]
    kv = config.kv_heads * config.head_dim
    rows = (config.d_model, kv, kv) if len(names) == 3 else (shape[0] // len(names),) * len(names)
    transposed = family == "gpt2" and bool(layer) and len(shape) == 2
    start = 0
    for theirs, height in zip(names, rows, strict=True):
        stored = (*shape[1:], height) if transposed else (height, *shape[1:])
        yield TensorSlice(f"{theirs.format(layer)}.{kind}", start, start + height, transposed, stored)
        start += height
