"""Families of Hugging Face as which models of model.py are exported: tables of keys and names.

The modules have the same structure on both sides, so a family is a table of names. Some classes of
transformers have several of our matrices as one, below one another, and GPT-2 those of its layers
as (in, out). Rotary embeddings pair the same dimensions on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lm.model_config import MAX_SHARED_EXPERTS, ModelConfig
from model import Transformer


@dataclass(frozen=True)
class Family:
    """A class of transformers. To support another, add a record to `FAMILIES` or `MIXTURES`.

    What config.json does not say is as in the class's defaults.
    """

    model_type: str
    keys: Mapping[str, str]
    """key in config.json -> our key"""
    supported: Mapping[str, tuple[Any, ...]]
    """our key -> the values that the class can represent"""
    modules: Mapping[str, str]
    """our module -> the module of the class, or of experts the tensor; {} is the layer. Those that
    are one there have its rows, in this order."""
    transposed: str | None = None
    """how the names of matrices start that the class has as (in, out)"""
    router_bias: str = ""
    """the tensor of a layer's router bias, if the class has one"""


LLAMA = Family(
    model_type="llama",
    keys={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_seq_len",
        "num_key_value_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "attention_bias": "attention_bias",
        "mlp_bias": "ffn_bias",
    },
    supported={
        "norm": ("rmsnorm",),
        "norm_placement": ("pre",),
        "qk_norm": ("none",),
        "positions": ("rope",),
        "ffn": ("swiglu",),
        "bias": ("none", "ffn", "attention", "all"),
    },
    modules={
        "embedding.tokens": "model.embed_tokens",
        "blocks.attention_norm": "model.layers.{}.input_layernorm",
        "blocks.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.attention.q_proj": "model.layers.{}.self_attn.q_proj",
        "blocks.attention.k_proj": "model.layers.{}.self_attn.k_proj",
        "blocks.attention.v_proj": "model.layers.{}.self_attn.v_proj",
        "blocks.attention.o_proj": "model.layers.{}.self_attn.o_proj",
        "blocks.attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "blocks.attention.k_norm": "model.layers.{}.self_attn.k_norm",
        "blocks.ffn.gate_proj": "model.layers.{}.mlp.gate_proj",
        "blocks.ffn.up_proj": "model.layers.{}.mlp.up_proj",
        "blocks.ffn.down_proj": "model.layers.{}.mlp.down_proj",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    keys={**LLAMA.keys, "sliding_window": "sliding_window"},
    supported={**LLAMA.supported, "bias": ("none",)},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    keys={key: ours for key, ours in LLAMA.keys.items() if not key.endswith("bias")},
    supported={**LLAMA.supported, "bias": ("qkv",)},
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    supported={**LLAMA.supported, "qk_norm": ("head",), "bias": ("none",)},
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    supported={
        **LLAMA.supported,
        "norm_placement": ("post",),
        "qk_norm": ("projection",),
        "bias": ("none",),
    },
    modules={
        **LLAMA.modules,
        "blocks.attention_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.ffn_norm": "model.layers.{}.post_feedforward_layernorm",
    },
)
GPT2 = Family(
    model_type="gpt2",
    keys={
        "n_embd": "d_model",
        "n_head": "n_heads",
        "n_layer": "n_layers",
        "vocab_size": "vocab_size",
        "n_positions": "max_seq_len",
        "n_inner": "d_ff",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "dropout",
    },
    supported={  # biases that the model does not have are zeros
        "norm": ("layernorm",),
        "norm_placement": ("pre",),
        "qk_norm": ("none",),
        "positions": ("learned",),
        "ffn": ("gelu",),
    },
    modules={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "blocks.attention_norm": "transformer.h.{}.ln_1",
        "blocks.attention.q_proj": "transformer.h.{}.attn.c_attn",
        "blocks.attention.k_proj": "transformer.h.{}.attn.c_attn",
        "blocks.attention.v_proj": "transformer.h.{}.attn.c_attn",
        "blocks.attention.o_proj": "transformer.h.{}.attn.c_proj",
        "blocks.ffn_norm": "transformer.h.{}.ln_2",
        "blocks.ffn.up_proj": "transformer.h.{}.mlp.c_fc",
        "blocks.ffn.down_proj": "transformer.h.{}.mlp.c_proj",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    transposed="transformer.h.",
)
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    keys={
        **{key: ours for key, ours in LLAMA.keys.items() if key != "head_dim"},
        "num_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "norm_topk_prob",
    },
    supported={
        **LLAMA.supported,
        "qk_norm": ("projection",),
        "bias": ("none",),
        "router": ("softmax",),
        "router_balance": ("none", "sequence"),
    },
    modules={
        **LLAMA.modules,
        "blocks.ffn.router": "model.layers.{}.mlp.gate",
        "blocks.ffn.gate_proj": "model.layers.{}.mlp.experts.gate_up_proj",
        "blocks.ffn.up_proj": "model.layers.{}.mlp.experts.gate_up_proj",
        "blocks.ffn.down_proj": "model.layers.{}.mlp.experts.down_proj",
    },
)
QWEN3_MOE = replace(
    OLMOE,
    model_type="qwen3_moe",
    keys={
        **{key: ours for key, ours in OLMOE.keys.items() if ours != "d_ff"},
        "head_dim": "head_dim",
        "moe_intermediate_size": "d_ff",
    },
    supported={**OLMOE.supported, "qk_norm": ("head",)},
)
MINIMAX_M2 = replace(
    OLMOE,
    model_type="minimax_m2",
    keys={
        **QWEN2.keys,
        "num_local_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    supported={
        **OLMOE.supported,
        "router": ("sigmoid",),
        "router_balance": ("bias", "none", "sequence"),
        "norm_topk_prob": (True,),
    },
    router_bias="model.layers.{}.mlp.e_score_correction_bias",
)
DOTS1 = replace(
    QWEN3_MOE,
    model_type="dots1",
    keys={
        **{key: ours for key, ours in QWEN3_MOE.keys.items() if ours != "n_experts"},
        "n_routed_experts": "n_experts",
        "n_shared_experts": "n_shared_experts",
        "sliding_window": "sliding_window",
    },
    supported={
        **QWEN3_MOE.supported,
        "n_shared_experts": tuple(range(1, MAX_SHARED_EXPERTS + 1)),
        "router": ("sigmoid",),
        "router_balance": ("bias", "none", "sequence"),
        "sliding_window": (None,),
    },
    modules={
        **QWEN3_MOE.modules,
        "blocks.ffn.shared.gate_proj": "model.layers.{}.mlp.shared_experts.gate_proj",
        "blocks.ffn.shared.up_proj": "model.layers.{}.mlp.shared_experts.up_proj",
        "blocks.ffn.shared.down_proj": "model.layers.{}.mlp.shared_experts.down_proj",
    },
    router_bias="model.layers.{}.mlp.gate.e_score_correction_bias",
)
MIXTURES = {family.model_type: family for family in (OLMOE, QWEN3_MOE, MINIMAX_M2, DOTS1)}
FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2)}


def map_parameters(family: Family, config: ModelConfig) -> dict[str, list[str]]:
    """Return the names of our parameters that make up each tensor of the class, by its name."""
    with torch.device("meta"):
        model = Transformer(config)
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = re.sub(r"\.\d+\.", ".", name).rpartition(".")
        their_name = family.modules[module]
        if parameter.dim() < 3:  # else it is the tensor
            their_name = f"{their_name}.{kind}"
        layer = re.search(r"\d+", name)
        if layer is not None:
            their_name = their_name.format(layer[0])
        names.setdefault(their_name, []).append(name)
    return names


def join(family: Family, name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor `name` of the class, of our parameters that make it up."""
    if parts[0].dim() == 1:
        return torch.cat(list(parts))
    joined = torch.cat(list(parts), dim=-2)  # of experts, of each its rows
    if family.transposed is not None and name.startswith(family.transposed):
        return joined.T
    return joined
