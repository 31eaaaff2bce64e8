"""NF4: frozen weights of four bits each, of layers and experts (Dettmers et al., QLoRA, 2023).

Each 64 consecutive weights of a row are a block: a float32 scale, their largest magnitude, and the
index of the nearest of 16 levels, the quantiles of a normal distribution, for each divided by it.
So a weight takes 4.5 bits. bitsandbytes computes the same bits; its double quantization of the
scales, which would save 0.37 bits, is left out.

The weight `(out, in)` is one parameter of bytes, `(out, 9 in / 16)`: in each row first the indices,
two in a byte, the first in its high bits, then the scales. FSDP shards it by rows, as any other,
all-gathers the bytes and casts none, as it casts only floating-point parameters. Of one tensor of
all experts, whichever of its dimensions are inputs, rows are those of its last dimension, and FSDP
shards it by experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.training.config import NF4_BLOCK, LoraConfig

SHARDS_BYTES = torch.__version__ >= "2.12"
"""Whether FSDP takes parameters that are not floating-point (PyTorch 2.12 and newer)."""

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_LEVELS_OF_BYTE = np.array(list(itertools.product(LEVELS, repeat=2)), dtype=np.float32)
"""of its first four bits, and of its last; (256, 2)"""
BLOCK_BYTES = 16 << 20
"""Of float32 values that are dequantized at a time, unless compiled: little next to a weight."""


def check_nf4(config: LoraConfig) -> None:
    """Raise ConfigError if FSDP cannot shard the bytes of an NF4 base."""
    if config.base_dtype == "nf4" and not SHARDS_BYTES:
        problem = f"FSDP of PyTorch {torch.__version__} shards no bytes"
        raise ConfigError(f"base_dtype: nf4: {problem}; use PyTorch 2.12 or newer")


def packed_width(inner: int) -> int:
    """Return the bytes of a row of `inner` weights, a multiple of `NF4_BLOCK`."""
    return inner // 2 + inner // NF4_BLOCK * 4


def inner_width(packed_width: int) -> int:
    """Return the weights in a row of `packed_width` bytes."""
    return packed_width * 16 // 9


def count_weights(packed: Tensor) -> int:
    """Return how many weights are in bytes of rows."""
    return packed[..., 0].numel() * inner_width(packed.shape[-1])


def has_complete_blocks(weight: Tensor) -> bool:
    """Return whether the rows of a weight can be quantized."""
    return weight.shape[-1] % NF4_BLOCK == 0


def is_supported(layer: nn.Linear) -> bool:
    """Return whether a linear layer, and none of a class of others, can be quantized."""
    return type(layer) is nn.Linear and has_complete_blocks(layer.weight)


def empty_packed(weight: Tensor) -> nn.Parameter:
    """Return a frozen parameter for the bytes of `weight`, without values yet."""
    shape = (*weight.shape[:-1], packed_width(weight.shape[-1]))
    return nn.Parameter(weight.new_empty(shape, dtype=torch.uint8), requires_grad=False)


def quantize(weight: Tensor) -> Tensor:
    """Return the bytes of rows of weights `(..., in)`, `(..., 9 in / 16)`."""
    levels = torch.tensor(LEVELS, device=weight.device)
    midpoints = (levels[:-1] + levels[1:]) / 2
    blocks = weight.float().unflatten(-1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(dim=-1)
    # As bitsandbytes does: times the reciprocal, and blocks of zeros are not divided by zero.
    normalized = blocks * (1 / scales.clamp(min=1e-38))[..., None]
    indices = torch.bucketize(normalized, midpoints, out_int32=True).flatten(-2).byte()
    pairs = (indices[..., ::2] << 4) | indices[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=-1)


def _look_up(pairs: Tensor) -> Tensor:
    """Return the levels of bytes `(rows, in / 2)`, `(rows, in)`."""
    if not torch.compiler.is_compiling():
        levels_of_byte = torch.tensor(_LEVELS_OF_BYTE, device=pairs.device)  # of a plan, a fake one
        return F.embedding(pairs.int(), levels_of_byte).flatten(1)
    # One kernel, without a table in memory.
    shifts = 4 - 4 * torch.arange(2, dtype=torch.uint8, device=pairs.device)
    indices = (pairs[..., None] >> shifts) & 15
    levels = torch.full_like(indices, LEVELS[0], dtype=torch.float32)
    for index, level in enumerate(LEVELS[1:], start=1):
        levels = torch.where(indices == index, level, levels)
    return levels.flatten(1)


def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights `(rows, in)` of the bytes of `quantize`."""
    if torch.compiler.is_compiling():
        return _dequantize_rows(packed).to(dtype)
    n_rows, width = packed.shape
    inner = inner_width(width)
    weight = torch.empty(n_rows, inner, dtype=dtype, device=packed.device)
    step = max(1, BLOCK_BYTES // (4 * inner))
    for rows, target in zip(packed.split(step), weight.split(step), strict=True):
        target.copy_(_dequantize_rows(rows))
    return weight


def _dequantize_rows(packed: Tensor) -> Tensor:
    n_pairs = packed.shape[1] * 8 // 9
    levels = _look_up(packed[:, :n_pairs])
    scales = packed[:, n_pairs:].contiguous().view(torch.float32)
    blocks = levels.unflatten(1, (-1, NF4_BLOCK)) * scales[..., None]
    return blocks.flatten(1)


class _Product(torch.autograd.Function):
    """`F.linear` that saves for backward the bytes of a weight, and not its values."""

    @staticmethod
    def forward(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, dequantize(packed, x.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, packed, _ = inputs
        ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (packed,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # Otherwise the compiler finds that forward has the same values, and saves them.
            packed = packed ^ 0
        return grad @ dequantize(packed, grad.dtype), None, None


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` of `x` and the dequantized weight, in the dtype of `x`."""
    return cast(Tensor, _Product.apply(x, packed, bias))


# ---- experts


@torch.library.custom_op("lm::nf4_grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, packed: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    """Return the products of groups of rows and the dequantized matrix of each group.

    One matrix after the other is dequantized, of groups with rows only. That waits for the device.

    Args:
        x: `(rows, in)`, ordered by group.
        packed: the bytes of `(E, out, in)`, or if `is_transposed`, of `(E, in, out)`.
        ends: `(E,)` int32, where the groups end. The last one ends with the rows.

    Returns:
        `(rows, out)`.
    """
    products = _empty_products(x, packed, ends, is_transposed)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            matrix = _dequantize_matrix(x, packed, group, is_transposed)
            torch.mm(x[start:end], matrix, out=products[start:end])
        start = end
    return products


def _dequantize_matrix(x: Tensor, packed: Tensor, group: int, is_transposed: bool) -> Tensor:
    """Return the matrix `(in, out)` of a group in the dtype of `x`."""
    matrix = dequantize(packed[group], x.dtype)
    if is_transposed:
        return matrix
    return matrix.T


@grouped_mm.register_fake
def _empty_products(x: Tensor, packed: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    del ends
    n_out = packed.shape[1]
    if is_transposed:
        n_out = inner_width(packed.shape[2])
    return x.new_empty(len(x), n_out)


def _save_bytes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, packed, ends, ctx.is_transposed = inputs
    ctx.save_for_backward(packed, ends)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    packed, ends = ctx.saved_tensors
    return grouped_mm(grad.contiguous(), packed, ends, not ctx.is_transposed), None, None, None


grouped_mm.register_autograd(_differentiate, setup_context=_save_bytes)


def _compute_largest(x: Tensor, packed: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    """Compute what takes the most memory: all rows in one group."""
    del ends
    return x @ _dequantize_matrix(x, packed, 0, is_transposed)


COMPUTED_BY: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.lm.nf4_grouped_mm.default: _compute_largest
}
"""What the operator runs, for plans: which count what exists meanwhile, too."""


# ---- linear layers


class NF4Linear(nn.Module):
    """A frozen linear layer of the shape of `layer`, whose weight is bytes of no values yet."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = empty_packed(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return linear(x, self.weight, self.bias)
