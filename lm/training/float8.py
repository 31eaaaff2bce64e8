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

from lm.training.config import FLOAT8_MULTIPLE


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


def gathers_in_float8(recipe: str, shapes: Iterable[tuple[int, int]], shards: int | None) -> bool:
    """Return whether ranks convert their shards of matrices `(out, in)` before the all-gather.

    Also a single rank, which then converts a weight once and not in every micro-step. Only with a
    scale per tensor: the output and the gradient of the input need scales along different
    dimensions of the weight. And only if all matrices can be divided evenly, as torchao does not
    pad shards to the size that FSDP gathers.
    """
    if recipe != "tensorwise" or shards is None:
        return False
    return all(out % shards == 0 for out, _ in shapes)


def convert_to_float8(blocks: nn.Module, recipe: str, on_gpu: bool, shards: int | None) -> None:
    """Replace the linear layers of `blocks` with torchao's, which have the same parameters.

    Args:
        blocks: is changed in place.
        recipe: tensorwise or rowwise.
        shards: of a parameter; None = in host memory, with `cpu_offload`.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_converted(module: nn.Module, _name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        shape = module.out_features, module.in_features
        if recipe == "rowwise" and on_gpu and not is_faster_by_rows(*shape):
            return False
        return is_supported(*shape)

    layers = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    shapes = [(layer.out_features, layer.in_features) for layer in layers]
    config = Float8LinearConfig.from_recipe_name(recipe)
    if gathers_in_float8(recipe, shapes, shards):
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(blocks, config=config, module_filter_fn=is_converted)


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
