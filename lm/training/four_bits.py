"""Frozen weights of four bits each, of layers and experts: in NF4 or MXFP4.

Consecutive weights of a row are a block: a scale, and for each weight the index of one of 16
levels, by which the scale is multiplied.

- NF4 (Dettmers et al., QLoRA, 2023): blocks of 64, whose float32 scale is their largest magnitude.
  The levels are quantiles of a normal distribution. So a weight takes 4.5 bits. bitsandbytes
  computes the same bits; its double quantization of the scales, which would save 0.37 bits, is left
  out.
- MXFP4 (OCP Microscaling Formats, 2023), in which gpt-oss is published: blocks of 32, whose scale
  is a power of 2. The levels are the floating-point numbers of four bits. So a weight takes 4.25
  bits. Nothing is quantized to it here.

The weight `(out, in)` is one parameter of bytes, `(out, 9 in / 16)` or `(out, 17 in / 32)`: in each
row first the indices, two in a byte, then the scales. FSDP shards it by rows, as any other,
all-gathers the bytes and casts none, as it casts only floating-point parameters. One tensor of all
experts is sharded by experts. Its rows are in NF4 those of the tensor, whichever of its dimensions
are inputs; in MXFP4 those of the matrices `(out, in)`, as in files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.training.config import NF4_BLOCK, LoraConfig

SHARDS_BYTES = torch.__version__ >= "2.12"
"""Whether FSDP takes parameters that are not floating-point (PyTorch 2.12 and newer)."""
CHUNK_BYTES = 16 << 20
"""Of float32 values that are dequantized at a time, unless compiled: little next to a weight."""


def check_base_dtype(config: LoraConfig) -> None:
    """Raise ConfigError if FSDP cannot shard the bytes of the base."""
    if config.base_dtype is not None and not SHARDS_BYTES:
        problem = f"FSDP of PyTorch {torch.__version__} shards no bytes"
        raise ConfigError(f"base_dtype: {config.base_dtype}: {problem}; use PyTorch 2.12 or newer")


@dataclass(frozen=True)
class Format:
    """How rows of weights are held as bytes."""

    name: str
    """as `base_dtype` calls it"""
    levels: tuple[float, ...]
    """by index"""
    block: int
    """weights per scale"""
    scale_dtype: torch.dtype
    shifts: tuple[int, int]
    """of the first and the second index in a byte, in bits"""
    is_by_output: bool
    """whether the rows of an expert's matrix are those of `(out, in)` in any class"""

    @property
    def _scale_bytes(self) -> int:
        return self.scale_dtype.itemsize

    @cached_property
    def _levels_of_byte(self) -> Any:
        """Return the two levels of each byte, of its first and its second index, as one int64."""
        levels = np.array(self.levels, dtype=np.float32)
        indices = (np.arange(256)[:, None] >> np.array(self.shifts)) & 15
        return levels[indices].view(np.int64).flatten()

    def packed_width(self, inner: int) -> int:
        """Return the bytes of a row of `inner` weights, a multiple of `block`."""
        return inner // 2 + inner // self.block * self._scale_bytes

    def inner_width(self, packed_width: int) -> int:
        """Return the weights in a row of `packed_width` bytes."""
        return packed_width * 2 * self.block // (self.block + 2 * self._scale_bytes)

    def count_weights(self, packed: Tensor) -> int:
        """Return how many weights are in bytes of rows."""
        return packed[..., 0].numel() * self.inner_width(packed.shape[-1])

    def has_complete_blocks(self, weight: Tensor) -> bool:
        """Return whether the rows of a weight are blocks."""
        return weight.shape[-1] % self.block == 0

    def empty_packed(self, weight: Tensor) -> nn.Parameter:
        """Return a frozen parameter for the bytes of `weight`, without values yet."""
        shape = (*weight.shape[:-1], self.packed_width(weight.shape[-1]))
        return nn.Parameter(weight.new_empty(shape, dtype=torch.uint8), requires_grad=False)

    def dequantize(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights `(rows, in)` of bytes `(rows, packed_width)`."""
        n_rows, width = packed.shape
        inner = self.inner_width(width)
        step = max(1, CHUNK_BYTES // (4 * inner))
        if torch.compiler.is_compiling() or n_rows <= step:
            return self._dequantize_rows(packed).to(dtype)
        weight = torch.empty(n_rows, inner, dtype=dtype, device=packed.device)
        for rows, target in zip(packed.split(step), weight.split(step), strict=True):
            target.copy_(self._dequantize_rows(rows))
        return weight

    def _dequantize_rows(self, packed: Tensor) -> Tensor:
        n_pairs = self.inner_width(packed.shape[1]) // 2
        levels = self._look_up(packed[:, :n_pairs])
        scales = packed[:, n_pairs:].contiguous().view(self.scale_dtype).float()
        return levels.unflatten(1, (-1, self.block)).mul_(scales[..., None]).flatten(1)

    def _look_up(self, pairs: Tensor) -> Tensor:
        """Return the levels of bytes `(rows, in / 2)`, `(rows, in)`."""
        if not torch.compiler.is_compiling():
            levels_of_byte = torch.tensor(self._levels_of_byte, device=pairs.device)
            # Of one number for each, PyTorch has a fast loop on CPUs.
            found = levels_of_byte.index_select(0, pairs.flatten().int())
            return found.view(torch.float32).view(len(pairs), -1)
        # One kernel, without a table in memory.
        first, second = self.shifts
        is_second = torch.arange(2, dtype=torch.uint8, device=pairs.device)
        shifts = first * (1 - is_second) + second * is_second
        indices = (pairs[..., None] >> shifts) & 15
        levels = torch.full_like(indices, self.levels[0], dtype=torch.float32)
        for index, level in enumerate(self.levels[1:], start=1):
            levels = torch.where(indices == index, level, levels)
        return levels.flatten(1)


NF4 = Format(
    "nf4",
    (
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
    ),
    block=NF4_BLOCK,
    scale_dtype=torch.float32,
    shifts=(4, 0),
    is_by_output=False,
)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = Format(
    "mxfp4",
    (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)),
    block=32,
    scale_dtype=torch.float8_e8m0fnu,
    shifts=(0, 4),
    is_by_output=True,
)
FORMATS = {form.name: form for form in (NF4, MXFP4)}


def quantize_nf4(weight: Tensor) -> Tensor:
    """Return the bytes in NF4 of rows of weights `(..., in)`, `(..., 9 in / 16)`."""
    levels = torch.tensor(NF4.levels, device=weight.device)
    midpoints = (levels[:-1] + levels[1:]) / 2
    blocks = weight.float().unflatten(-1, (-1, NF4.block))
    scales = blocks.abs().amax(dim=-1)
    # As bitsandbytes does: times the reciprocal, and blocks of zeros are not divided by zero.
    normalized = blocks * (1 / scales.clamp(min=1e-38))[..., None]
    indices = torch.bucketize(normalized, midpoints, out_int32=True).flatten(-2).byte()
    pairs = (indices[..., ::2] << 4) | indices[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=-1)


def round_to_nf4(weight: Tensor) -> None:
    """Give weights `(..., rows, in)` the values that they have in NF4, in place."""
    for rows in weight.split(64, dim=-2):  # little next to a weight
        packed = quantize_nf4(rows).flatten(0, -2)
        rows.copy_(NF4.dequantize(packed, rows.dtype).view_as(rows))


# ---- linear layers, in NF4


class _Product(torch.autograd.Function):
    """`F.linear` that saves for backward the bytes of a weight, and not its values."""

    @staticmethod
    def forward(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, NF4.dequantize(packed, x.dtype), bias)

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
        return grad @ NF4.dequantize(packed, grad.dtype), None, None


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` of `x` and the dequantized weight, in the dtype of `x`."""
    return cast(Tensor, _Product.apply(x, packed, bias))


class NF4Linear(nn.Module):
    """A frozen linear layer of the shape of `layer`, whose weight is bytes of no values yet."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = NF4.empty_packed(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return linear(x, self.weight, self.bias)


# ---- experts


@torch.library.custom_op("lm::four_bit_grouped_mm", mutates_args=())
def grouped_mm(
    x: Tensor, packed: Tensor, ends: Tensor, format_name: str, is_transposed: bool
) -> Tensor:
    """Return the products of groups of rows and the dequantized matrix of each group.

    One matrix after the other is dequantized, of groups with rows only. That waits for the device.

    Args:
        x: `(rows, in)`, ordered by group.
        packed: the bytes of `(E, out, in)`, or if `is_transposed`, of `(E, in, out)`.
        ends: `(E,)` int32, where the groups end. The last one ends with the rows.
        format_name: one of `FORMATS`.

    Returns:
        `(rows, out)`.
    """
    products = _empty_products(x, packed, ends, format_name, is_transposed)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            matrix = _dequantize_matrix(x, packed[group], format_name, is_transposed)
            torch.mm(x[start:end], matrix, out=products[start:end])
        start = end
    return products


def _dequantize_matrix(x: Tensor, packed: Tensor, format_name: str, is_transposed: bool) -> Tensor:
    """Return the matrix `(in, out)` of a group in the dtype of `x`."""
    matrix = FORMATS[format_name].dequantize(packed, x.dtype)
    if is_transposed:
        return matrix
    return matrix.T


@grouped_mm.register_fake
def _empty_products(
    x: Tensor, packed: Tensor, ends: Tensor, format_name: str, is_transposed: bool
) -> Tensor:
    del ends
    n_out = packed.shape[1]
    if is_transposed:
        n_out = FORMATS[format_name].inner_width(packed.shape[2])
    return x.new_empty(len(x), n_out)


def _save_bytes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, packed, ends, ctx.format_name, ctx.is_transposed = inputs
    ctx.save_for_backward(packed, ends)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    packed, ends = ctx.saved_tensors
    is_transposed = not ctx.is_transposed
    of_x = grouped_mm(grad.contiguous(), packed, ends, ctx.format_name, is_transposed)
    return of_x, None, None, None, None


grouped_mm.register_autograd(_differentiate, setup_context=_save_bytes)


def _compute_largest(
    x: Tensor, packed: Tensor, ends: Tensor, format_name: str, is_transposed: bool
) -> Tensor:
    """Compute what takes the most memory: all rows in one group."""
    del ends
    return x @ _dequantize_matrix(x, packed[0], format_name, is_transposed)


COMPUTED_BY: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.lm.four_bit_grouped_mm.default: _compute_largest
}
"""What the operator runs, for plans: which count what exists meanwhile, too."""
