"""Matrix products in float8 with torchao, with scales per tensor or per row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn


def is_supported(out: int, inner: int) -> bool:
    """Return whether there are kernels for a linear layer with these sides."""
    return out % 16 == 0 and inner % 16 == 0


def gathers_in_float8(recipe: str | None, shapes: Iterable[tuple[int, int]], shards: int) -> bool:
    """Return whether `shards` ranks convert their shards of matrices `(out, in)`, and all-gather them in float8."""
    return recipe == "tensorwise" and shards > 1 and all(out % shards == 0 for out, _ in shapes)


def convert_to_float8(blocks: nn.Module, recipe: str, on_gpu: bool, shards: int) -> None:
    """Replace the linear layers of `blocks` with torchao's, which have the same parameters, in place.

    Args:
        recipe: tensorwise or rowwise.
        shards: ranks that shard a parameter on their GPUs; 1 with `cpu_offload`.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import (
        _auto_filter_for_recipe,
    )  # until torchao exports it

    def has_kernel(module: nn.Module, _name: str) -> bool:
        return isinstance(module, nn.Linear) and is_supported(
            module.out_features, module.in_features
        )

    is_used = has_kernel
    if recipe == "rowwise" and on_gpu:
        is_used = _auto_filter_for_recipe(
            recipe, []
        )  # small layers would be slower than in bfloat16
    config = Float8LinearConfig.from_recipe_name(recipe)
    shapes = [
        (layer.out_features, layer.in_features)
        for layer in blocks.modules()
        if isinstance(layer, nn.Linear)
    ]
    if gathers_in_float8(recipe, shapes, shards):
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(blocks, config=config, module_filter_fn=is_used)


def compute_scales(model: nn.Module, _inputs: Any) -> None:
    """Compute the scales of all weights that are all-gathered in float8, with one all-reduce: a hook before forward."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
