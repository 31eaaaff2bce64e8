"""Experts of classes of transformers on a frozen base: their matrices in NF4.

transformers calls the experts of most classes through one interface, `use_experts_implementation`:
a class has one tensor with the matrices of all its experts, `(E, out, in)` or `(E, in, out)`, for
each of two products, and says in attributes what is between them. What is computed here is what
such an implementation computes, with other products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from lm.grouped_mm import Routes, grouped_mm, sort_by_expert
from lm.training import nf4
from lm.transformers_model import names_of_matrices
from lm.transformers_private import apply_gate


def quantize_experts(module: nn.Module, kept: set[nn.Parameter]) -> None:
    """Hold the matrices of experts in NF4 if `module` has any, in place.

    Args:
        kept: parameters that stay as they are, as do those whose rows are no complete blocks.
    """
    for name in names_of_matrices(module):
        weight = getattr(module, name)
        if weight not in kept and nf4.has_complete_blocks(weight):
            setattr(module, name, nf4.empty_packed(weight))
            module.forward = partial(compute_experts, module)


def compute_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the sum of the outputs of each token's experts times their weights, `(N, D)`.

    Args:
        experts: a module of which `names_of_matrices` returns names.
        hidden_states: `(N, D)`, of tokens.
        top_k_index: `(N, k)`, their experts.
        top_k_weights: `(N, k)`.
    """
    first, second = names_of_matrices(experts)
    routes = sort_by_expert(top_k_index, len(getattr(experts, first)))
    x = routes.copy_to_experts(hidden_states)  # N k, D
    x = _project(experts, first, x, routes)
    x = apply_gate(experts, x) if experts.has_gate else experts.act_fn(x)
    y = _project(experts, second, x, routes)  # N k, D
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    y = y * routes.sort(top_k_weights)
    return routes.sum_over_experts(y).to(hidden_states.dtype)


def _project(experts: Any, name: str, x: Tensor, routes: Routes) -> Tensor:
    """Return the product of each row of `x`, `(N k, in)`, and its expert's matrix."""
    weight = getattr(experts, name)
    if weight.is_floating_point():
        matrices = weight if experts.is_transposed else weight.mT  # E in out
        y = grouped_mm(x.to(weight.dtype), matrices, routes.ends)
    else:
        y = nf4.grouped_mm(x, weight, routes.ends, experts.is_transposed)
    if experts.has_bias:
        y = y + getattr(experts, f"{name}_bias")[routes.experts]
    return y
