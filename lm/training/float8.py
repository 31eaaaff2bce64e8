"""Matrix products in float8 with torchao, with scales per tensor or per row.

A linear layer `(out, in)` computes three products: of its output, whose inner dimension is `in`; of
the gradient of its input, whose inner dimension is `out`; and of the gradient of its weight, whose
inner dimension is the number of tokens in a micro-batch. float8 kernels need a multiple of 16 in
each: `is_supported` checks the first two, and lm/config/combinations.py the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lm.any_model import AnyModel
from lm.training.config import FLOAT8_MULTIPLE
from lm.training.roles import LinearLayer, describe_rest, find_roundable


def is_supported(out: int, inner: int) -> bool:
    """Return whether there are kernels for a linear layer `(out, inner)`."""
    return out % FLOAT8_MULTIPLE == 0 and inner % FLOAT8_MULTIPLE == 0


def is_faster_by_rows(out: int, inner: int) -> bool:
    """Return whether float8 with a scale per row is faster than bfloat16 for `(out, inner)`.

    By torchao's measurements on H100 (its `float8/README.md`).
    """
    if out <= 2048 or inner <= 1024:
        return False
    return out > 4096 or inner > 2048


def gathers_in_float8(recipe: str, n_rows: Iterable[int], shards: int | None) -> bool:
    """Return whether ranks convert their shards of matrices of `n_rows` before the all-gather.

    Also a single rank, which then converts a weight once and not in every micro-step. Only with a
    scale per tensor: the output and the gradient of the input need scales along different
    dimensions of the weight. And only if all matrices can be divided evenly, as torchao does not
    pad shards to the size that FSDP gathers.
    """
    if recipe != "tensorwise" or shards is None:
        return False
    return all(n % shards == 0 for n in n_rows)


def find_layers(model: AnyModel, recipe: str, on_gpu: bool) -> list[LinearLayer]:
    """Return the linear layers in blocks that are computed in float8."""
    found: list[LinearLayer] = []
    for layer in find_roundable(model):
        shape = (layer.module.out_features, layer.module.in_features)
        is_slow = recipe == "rowwise" and on_gpu and not is_faster_by_rows(*shape)
        if is_supported(*shape) and not is_slow:
            found.append(layer)
    return found


def convert_to_float8(model: AnyModel, recipe: str, on_gpu: bool, shards: int | None) -> str | None:
    """Replace linear layers in blocks with torchao's, which have the same parameters.

    Args:
        model: is changed in place.
        recipe: tensorwise or rowwise.
        shards: of a parameter; None = in host memory, with `cpu_offload`.

    Returns:
        A line on what of the blocks is computed as before; None = next to nothing.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = find_layers(model, recipe, on_gpu)
    modules = {layer.module for layer in layers}
    weights = {layer.weight for layer in layers}
    note = describe_rest(f"float8: {recipe} computes", model, weights)
    config = Float8LinearConfig.from_recipe_name(recipe)
    if gathers_in_float8(recipe, [len(weight) for weight in weights], shards):
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    for block in model.blocks:
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda module, _name: module in modules
        )
    return note


def has_float8_shards(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of `parameters` is converted before the all-gather."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and hasattr(parameter.to_local(), "fsdp_pre_all_gather"):
            return True
    return False


def compute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are all-gathered in float8, with one all-reduce.

    Before the first call, each all-gather computes those of its weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
