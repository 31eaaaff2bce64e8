"""What a parameter is follows from its modules and names, and not from its shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.training.optim import OptimConfig, Optimizer
from lm.training.roles import find_linear_layers, find_matrices, find_roundable
from lm.transformers_config import without_numbers
from lm.transformers_model import TransformersModel
from tests.support.hf import complete_values
from tests.support.hyperparameters import OF_TRANSFORMERS


def make_model(kind: str, sizes: dict[str, int], **changes: Any) -> TransformersModel:
    values = complete_values(kind, sizes, **changes)
    config = OF_TRANSFORMERS.model_copy(update={"transformers_config": values})
    with torch.device("meta"):
        return TransformersModel(config)


def names_of(model: TransformersModel, parameters: set[Any]) -> set[str]:
    """Of what, e.g. "self_attn.q_proj.weight"."""
    named = model.network.named_parameters()
    names = {without_numbers(name) for name, p in named if p in parameters}
    return {name.rpartition("*.")[2] for name in names}


@pytest.mark.parametrize(
    ("kind", "sizes", "matrices", "routers"),
    [
        ("llama4_text", {}, {"self_attn.k_proj"}, {"feed_forward.router"}),
        ("phimoe", {}, {"self_attn.k_proj"}, {"mlp.router"}),
        ("afmoe", {}, {"self_attn.k_proj", "mlp.gate_proj"}, {"mlp.router.gate"}),
        ("longcat_flash", {}, {"q_b_proj"}, {"mlp.router.classifier"}),
        # As many experts as keys and values have dimensions, as in Qwen3-Next-80B.
        (
            "qwen3_next",
            {"num_experts": 32},
            {"self_attn.k_proj", "self_attn.v_proj"},
            {"mlp.shared_expert_gate"},
        ),
    ],
)
def test_muon_leaves_routers_to_adamw(
    kind: str, sizes: dict[str, int], matrices: set[str], routers: set[str]
) -> None:
    model = make_model(kind, sizes)
    layers = {p for p in model.network.parameters() if p.ndim == 2}
    found = find_matrices(model)
    assert names_of(model, found) >= {f"{name}.weight" for name in matrices}
    assert names_of(model, layers - found) >= {f"{name}.weight" for name in routers}
    assert not [name for name in names_of(model, found) if "router" in name]
    assert all(p.ndim == 2 for p in found)  # not the experts, which are one tensor


@pytest.mark.parametrize(
    ("kind", "left", "of_the_class"),
    [
        ("phimoe", {"mlp.router"}, {"mlp.router"}),  # which returns what it chooses
        ("afmoe", {"mlp.router.gate"}, set()),
        ("qwen2_moe", {"mlp.shared_expert_gate"}, set()),
        ("axk2", {"self_attn.indexer.weights_proj"}, set()),  # in float32 in any dtype
        ("bloom", {"self_attention.dense"}, {"self_attention.dense"}),
        ("falcon", {"mlp.dense_h_to_4h"}, set()),  # which computes otherwise
        ("gptj", {"attn.q_proj"}, set()),  # whose dtype the class reads
    ],
)
def test_weights_that_a_class_needs_as_they_are_are_not_rounded(
    kind: str, left: set[str], of_the_class: set[str]
) -> None:
    model = make_model(kind, {})
    layers = find_linear_layers(model, model.blocks)
    weights = {layer.weight for layer in layers}
    rounded = {layer.weight for layer in find_roundable(model)}
    ignored = {layer.weight for layer in layers if not layer.is_called}
    assert names_of(model, weights - rounded) >= {f"{name}.weight" for name in left}
    assert names_of(model, ignored) >= {f"{name}.weight" for name in of_the_class}


def test_weights_that_layers_share_are_not_rounded() -> None:
    model = make_model("llama", {})
    first, second = model.blocks[:2]
    first.mlp.up_proj.weight = second.mlp.up_proj.weight  # type: ignore[union-attr]
    names = {layer.name for layer in find_roundable(model)}
    assert [f"network.model.layers.{i}.mlp.up_proj" in names for i in range(3)] == [False] * 2 + [
        True
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "kept", "decayed"),
    [
        (
            "gpt_oss",
            {},
            {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"},
            {"mlp.experts.gate_up_proj", "mlp.router.weight", "self_attn.q_proj.weight"},
        ),
        (
            "cohere",
            {"use_qk_norm": True},
            {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
            {"self_attn.q_proj.weight"},
        ),
        (
            "recurrent_gemma",
            {},
            {"temporal_block.rg_lru.input_gate_bias"},
            {"temporal_block.rg_lru.input_gate_weight"},
        ),
        ("deepseek_v4", {}, {"self_attn.compressor.position_bias"}, {"mlp.gate.weight"}),
        ("inkling_text", {}, set(), {"model.embed_tokens.weight"}),
    ],
)
def test_norms_and_biases_of_two_dimensions_have_no_weight_decay(
    kind: str, changes: dict[str, Any], kept: set[str], decayed: set[str]
) -> None:
    model = make_model(kind, {}, **changes).to_empty(device="cpu")
    before: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
        before[name] = p.detach().clone()
    optimizer = Optimizer(OptimConfig.model_validate({"weight_decay": 0.1}), model)
    optimizer.step(1.0, None, torch.zeros(()))
    changed = {p for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert not kept & names_of(model, changed)
    assert decayed <= names_of(model, changed)
