"""Families of Hugging Face as which models of model.py are exported: tables of names.

The modules have the same structure on both sides, so a family is a table of names. Some store
several of our matrices as one, below one another, and GPT-2 its matrices as (in, out). Rotary
embeddings pair the same dimensions on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lm.model_config import MAX_SHARED_EXPERTS, ModelConfig
from model import Transformer


@dataclass(frozen=True)
class Family:
    """A family of models in transformers. To support another, add a record to `FAMILIES`."""

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    """our key -> the key in config.json"""
    supported: Mapping[str, tuple[Any, ...]]
    """our key without a key in config.json -> the values that the family supports"""
    constants: Mapping[str, Any]
    """key in config.json without a key of ours -> the value that `ModelConfig` can represent"""
    modules: Mapping[str, str]
    """our module -> the module in transformers; {} is the layer, a second one the expert. Modules
    that are one there have its rows, in this order."""
    biases: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """our `bias` -> the keys in config.json that enable biases; {} = the family has no such keys"""
    dropout_keys: tuple[str, ...] = ()
    transposed: bool = False
    """whether the matrices in the layers are stored as (in, out)"""
    zero_biases: bool = False
    """whether the family has all biases, so that a model without some of them has zeros there"""
    bos_is_eos: bool = False
    """whether the end-of-text token also starts a text"""
    router_bias: str | None = None
    """the tensor of a layer's router bias, zeros without one; None = the family has none"""


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
    supported={
        "norm": ("rmsnorm",),
        "norm_placement": ("pre",),
        "qk_norm": ("none",),
        "positions": ("rope",),
        "ffn": ("swiglu",),
        "bias": ("none", "ffn", "attention", "all"),
    },
    constants={"hidden_act": "silu"},
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
    biases={
        "none": {"attention_bias": False, "mlp_bias": False},
        "ffn": {"attention_bias": False, "mlp_bias": True},
        "attention": {"attention_bias": True, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    keys={
        **LLAMA.keys,
        "sliding_window": "sliding_window",
    },
    supported={
        **LLAMA.supported,
        "bias": ("none",),
    },
    constants={
        **LLAMA.constants,
        "attention_bias": False,
        "mlp_bias": False,
    },
    biases={},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    supported={
        **LLAMA.supported,
        "bias": ("qkv",),
    },
    constants={
        **LLAMA.constants,
        "use_sliding_window": False,
    },
    biases={},
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    supported={
        **LLAMA.supported,
        "qk_norm": ("head",),
        "bias": ("none",),
    },
    constants={
        **QWEN2.constants,
        "attention_bias": False,
    },
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    supported={
        **LLAMA.supported,
        "norm_placement": ("post",),
        "qk_norm": ("projection",),
        "bias": ("none",),
    },
    constants={
        **LLAMA.constants,
        "attention_bias": False,
    },
    modules={
        **LLAMA.modules,
        "blocks.attention_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.ffn_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    biases={},
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
    supported={
        "norm": ("layernorm",),
        "norm_placement": ("pre",),
        "qk_norm": ("none",),
        "positions": ("learned",),
        "ffn": ("gelu",),
        "bias": ("all",),
    },
    constants={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
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
    dropout_keys=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    transposed=True,
    zero_biases=True,
    bos_is_eos=True,
)
_MIXTURE_KEYS = {
    "n_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "norm_topk_prob": "norm_topk_prob",
}
_MIXTURE_MODULES = {
    "blocks.ffn.router": "model.layers.{}.mlp.gate",
    "blocks.ffn.gate_proj": "model.layers.{}.mlp.experts.{}.gate_proj",
    "blocks.ffn.up_proj": "model.layers.{}.mlp.experts.{}.up_proj",
    "blocks.ffn.down_proj": "model.layers.{}.mlp.experts.{}.down_proj",
}
_WITHOUT_ROUTER_BIAS = {"router": ("softmax",), "router_balance": ("none", "sequence")}
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    keys={key: LLAMA.keys[key] for key in LLAMA.keys if key != "head_dim"} | _MIXTURE_KEYS,
    supported={
        **LLAMA.supported,
        **_WITHOUT_ROUTER_BIAS,
        "qk_norm": ("projection",),
        "bias": ("none",),
    },
    constants={**LLAMA.constants, "attention_bias": False, "clip_qkv": None},
    modules={**LLAMA.modules, **_MIXTURE_MODULES},
    biases={},
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys={**QWEN3.keys, **_MIXTURE_KEYS, "d_ff": "moe_intermediate_size"},
    supported={**QWEN3.supported, **_WITHOUT_ROUTER_BIAS},
    constants={**QWEN3.constants, "decoder_sparse_step": 1, "mlp_only_layers": []},
    modules={**QWEN3.modules, **_MIXTURE_MODULES},
)
MINIMAX_M2 = replace(
    OLMOE,
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    keys={
        **LLAMA.keys,
        "n_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    supported={
        **OLMOE.supported,
        "router": ("sigmoid",),
        "router_balance": ("bias", "none", "sequence"),
        "norm_topk_prob": (True,),
    },
    constants=LLAMA.constants,
    modules={
        **LLAMA.modules,
        "blocks.ffn.router": "model.layers.{}.block_sparse_moe.gate",
        "blocks.ffn.gate_proj": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "blocks.ffn.up_proj": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "blocks.ffn.down_proj": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    },
    router_bias="model.layers.{}.block_sparse_moe.e_score_correction_bias",
)
DOTS1 = replace(
    QWEN3_MOE,
    model_type="dots1",
    class_name="Dots1ForCausalLM",
    keys={
        **QWEN3_MOE.keys,
        "n_experts": "n_routed_experts",
        "n_shared_experts": "n_shared_experts",
    },
    supported={
        **QWEN3_MOE.supported,
        "n_shared_experts": tuple(range(1, MAX_SHARED_EXPERTS + 1)),
        "router": ("sigmoid",),
        "router_balance": ("bias", "none", "sequence"),
    },
    constants={
        **LLAMA.constants,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "sliding_window": None,
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
"""Families that are only written: transformers computes what is read."""
FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2)}


class Place(NamedTuple):
    """Where a Hugging Face model stores a parameter: rows of a tensor, or of its transpose."""

    name: str
    start: int
    """the first row"""
    transposed: bool


def map_parameters(
    family: Family, config: ModelConfig
) -> tuple[dict[str, Place], dict[str, tuple[int, ...]]]:
    """Return the place of each of our parameters, and the shape of each tensor as stored.

    The latter include zero biases. Experts are stored as a matrix each, and the biases of routers
    in each layer: these rows of our tensors are named by their numbers, after the name.
    """
    bias = config.bias
    if family.zero_biases:
        bias = "all"
    one_layer = config.model_copy(update={"n_layers": 1, "bias": bias})
    with torch.device("meta"):
        model = Transformer(one_layer)  # all layers have the same parameters

    places: dict[str, Place] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        in_layer = name.startswith("blocks.")
        n_layers = config.n_layers if in_layer else 1
        is_transposed = family.transposed and in_layer and parameter.dim() == 2
        module, _, kind = name.replace("blocks.0.", "blocks.").rpartition(".")
        n_rows, *row_shape = parameter.shape
        for layer in range(n_layers):
            our_name = name.replace("blocks.0.", f"blocks.{layer}.")
            if parameter.dim() == 3:
                for expert in range(n_rows):
                    their_name = f"{family.modules[module].format(layer, expert)}.{kind}"
                    places[f"{our_name}.{expert}"] = Place(their_name, 0, is_transposed)
                    shapes[their_name] = tuple(row_shape)
                continue
            their_name = f"{family.modules[module].format(layer)}.{kind}"
            start = 0
            if their_name in shapes:  # rows of another parameter are above
                start = shapes[their_name][0]
            places[our_name] = Place(their_name, start, is_transposed)
            shapes[their_name] = (start + n_rows, *row_shape)

    for name in {place.name for place in places.values() if place.transposed}:
        shapes[name] = shapes[name][::-1]
    if family.router_bias is not None:
        assert config.n_experts is not None
        for layer in range(config.n_layers):
            their_name = family.router_bias.format(layer)
            shapes[their_name] = (config.n_experts,)
            if model.router_bias is not None:
                places[f"router_bias.{layer}"] = Place(their_name, 0, transposed=False)
    return places, shapes
