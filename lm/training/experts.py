"""Experts of classes of transformers on a frozen base: in four bits, and with adapters.

transformers calls the experts of most classes through one interface, `use_experts_implementation`:
a class has one tensor with the matrices of all its experts, `(E, out, in)` or `(E, in, out)`, for
each of two products, and says in attributes what is between them. What is computed here is what
such an implementation computes, with other products.

The adapters of a tensor are two more, A `(E, lora_rank, in)` and B `(E, out, lora_rank)`, a pair
for each expert, as `target_parameters` of PEFT defines them. An expert without tokens gets
gradients of zero, as in PEFT: momentum and weight decay of the optimizer still move its adapter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lm.grouped_mm import Routes, grouped_mm, sort_by_expert
from lm.training import four_bits
from lm.training.config import LoraConfig
from lm.training.four_bits import FORMATS, MXFP4
from lm.training.roles import find_expert_matrices
from lm.transformers_private import apply_gate


def convert_experts(module: Any, name: str, config: LoraConfig, kept: set[nn.Parameter]) -> None:
    """Hold the matrices of experts in `base_dtype`, and add adapters, in place.

    Does nothing if `module` has no such matrices.

    Args:
        name: of the module in its parent.
        kept: parameters that stay as they are, as do those whose rows are no complete blocks.
    """
    rank = config.lora_rank
    assert rank is not None
    form = FORMATS.get(config.base_dtype or "")
    lora_a = nn.ParameterDict()
    lora_b = nn.ParameterDict()
    is_changed = False
    for matrix in find_expert_matrices(module):
        weight = getattr(module, matrix.name)
        if form is not None and weight not in kept:
            rows = weight.mT if module.is_transposed and form.is_by_output else weight
            if form.has_complete_blocks(rows):
                setattr(module, matrix.name, form.empty_packed(rows))
                is_changed = True
        if config.adapts(f"{name}.{matrix.name}", matrix.out, matrix.inner, of_experts=True):
            options: dict[str, Any] = {"device": weight.device, "dtype": torch.float32}
            a = torch.empty(matrix.n_experts, rank, matrix.inner, **options)
            b = torch.empty(matrix.n_experts, matrix.out, rank, **options)
            lora_a[matrix.name] = nn.Parameter(a)
            lora_b[matrix.name] = nn.Parameter(b)
            is_changed = True
    if is_changed:
        module.form = form
        module.lora_A = lora_a
        module.lora_B = lora_b
        module.forward = partial(compute_experts, module, config.lora_scale)


def find_in_mxfp4(model: nn.Module) -> set[str]:
    """Return the names of the parameters of `model` that `convert_experts` holds in MXFP4."""
    names: set[str] = set()
    for path, module in model.named_modules():
        if getattr(module, "form", None) is MXFP4:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype == torch.uint8:
                    names.add(f"{path}.{name}")
    return names


def compute_experts(
    experts: Any, scale: float, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the sum of the outputs of each token's experts times their weights, `(N, D)`.

    Args:
        experts: a module that `convert_experts` has changed.
        scale: by which the adapters' output is multiplied.
        hidden_states: `(N, D)`, of tokens.
        top_k_index: `(N, k)`, their experts.
        top_k_weights: `(N, k)`.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    routes = sort_by_expert(top_k_index, len(getattr(experts, first)))
    x = routes.copy_to_experts(hidden_states)  # N k, D
    x = _project(experts, first, scale, x, routes)
    x = apply_gate(experts, x) if experts.has_gate else experts.act_fn(x)
    y = _project(experts, "down_proj", scale, x, routes)  # N k, D
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    y = y * routes.sort(top_k_weights)
    return routes.sum_over_experts(y).to(hidden_states.dtype)


def _project(experts: Any, name: str, scale: float, x: Tensor, routes: Routes) -> Tensor:
    """Return the product of each row of `x`, `(N k, in)`, and its expert's matrix."""
    weight = getattr(experts, name)
    if weight.is_floating_point():
        matrices = weight if experts.is_transposed else weight.mT  # E in out
        y = grouped_mm(x.to(weight.dtype), matrices, routes.ends)
    else:
        form = experts.form
        is_transposed = experts.is_transposed and not form.is_by_output
        y = four_bits.grouped_mm(x, weight, routes.ends, form.name, is_transposed)
    if name in experts.lora_A:
        a = getattr(experts.lora_A, name)
        b = getattr(experts.lora_B, name)
        low_rank = scale * grouped_mm(x.to(a.dtype), a.mT, routes.ends)  # N k, rank
        y = y + grouped_mm(low_rank, b.mT, routes.ends)
    if experts.has_bias:
        y = y + getattr(experts, f"{name}_bias")[routes.experts]
    return y
