"""Matrix products in float8 with torchao, with scales per tensor or per row."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn


def convert_to_float8(blocks: nn.Module, recipe: str, on_gpu: bool, shards: int) -> None:
    """Replace the linear layers of `blocks` with torchao's, which have the same parameters, in place.

    Args:
        recipe: tensorwise or rowwise.
        shards: ranks that shard a parameter on their GPUs; 1 with `cpu_offload`.
    """
    from torch._inductor import config as inductor
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    def is_supported(module: nn.Module, _name: str) -> bool:  # float8 kernels need multiples of 16
        return isinstance(module, nn.Linear) and module.in_features % 16 == 0 == module.out_features % 16

    is_used = is_supported
    if recipe == "rowwise" and on_gpu:
        is_used = _auto_filter_for_recipe(recipe, [])  # small layers would be slower than in bfloat16
        inductor.emulate_precision_casts = True  # otherwise RMSNorm before such a layer can give NaN (pytorch#150859)
    config = Float8LinearConfig.from_recipe_name(recipe)
    is_even = all(layer.out_features % shards == 0 for layer in blocks.modules() if isinstance(layer, nn.Linear))
    if recipe == "tensorwise" and shards > 1 and is_even:
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)  # converts shards, then gathers them
    convert_to_float8_training(blocks, config=config, module_filter_fn=is_used)


def compute_scales(model: nn.Module, _inputs: Any) -> None:
    """Compute the scales of all weights that are all-gathered in float8, with one all-reduce: a hook before forward."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
