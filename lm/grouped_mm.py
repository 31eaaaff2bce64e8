"""Matrix products of groups of rows, as mixtures of experts need them.

The rows that one expert processes are consecutive. How many there are is known on the device only,
so shapes do not depend on it: groups are given by where they end.

Shapes: N tokens, K experts per token, E experts, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula


@torch.library.custom_op("lm::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the matrix products of groups of `a` and `b`.

    It is PyTorch's `grouped_mm`, registered as an operator that has gradients and shapes for every
    dtype, that selective recomputation can save, and that computes one group after the other what
    PyTorch's has no kernel for. That waits for the device.

    Args:
        a: `(rows, inner)`, whose rows are divided; or `(out, rows)`, with columns that are divided.
        b: `(E, inner, out)`, a matrix for each group; or `(rows, inner)`, with rows divided as the
            columns of `a`.
        ends: `(E,)` int32, where the groups end. The last one ends with the rows.

    Returns:
        `(rows, out)`; or `(E, out, inner)`.
    """
    if _has_kernel(a) and _has_kernel(b):
        return F.grouped_mm(a, b, offs=ends).contiguous()
    products: list[Tensor] = []
    start = 0
    for group, end in enumerate(ends.tolist()):
        if b.dim() == 3:
            products.append(a[start:end] @ b[group])
        else:
            products.append(a[:, start:end] @ b[start:end])
        start = end
    if b.dim() == 3:
        return torch.cat(products)
    return torch.stack(products)


def _has_kernel(tensor: Tensor) -> bool:
    """Return whether PyTorch's kernel takes `tensor`: its dtype, and its strides, in 16 bytes."""
    if tensor.is_cuda:
        is_supported = tensor.dtype == torch.bfloat16
    else:
        is_supported = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    strides = sorted(tensor.stride())
    is_dense = strides[0] == 1
    return is_supported and is_dense and all(s * tensor.itemsize % 16 == 0 for s in strides[1:])


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])


def _count_flops(a: Any, b: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of the products of all groups, from the shapes of `a` and `b`.

    Each value of `a` is in one group, and there a factor once for each column of `b`.
    """
    n_rows, n_columns = a[-2:]
    return 2 * n_rows * n_columns * b[-1]


for _operator in (torch.ops.lm.grouped_mm, torch.ops.aten._grouped_mm):
    if _operator not in flop_registry:  # PyTorch may have a formula, too
        register_flop_formula(_operator)(_count_flops)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, ends = ctx.saved_tensors
    needs_grad_a, needs_grad_b, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    grad_a = grouped_mm(grad, b.mT, ends) if needs_grad_a else None
    grad_b = grouped_mm(a.mT, grad, ends) if needs_grad_b else None  # None = it is frozen
    return grad_a, grad_b, None


grouped_mm.register_autograd(_backward, setup_context=_save_inputs)


# ---- rows of tokens, in the order of experts


class CopyToExperts(torch.autograd.Function):
    """K copies of each token's row, in the order of the experts that process them.

    The gradient of a row is the sum of those of its copies. They are looked up: adding each where
    it belongs would be slow, and on GPUs not deterministic.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, order: Tensor, positions: Tensor, k: int
    ) -> Tensor:  # (N, D) -> (N K, D)
        """Return the copies.

        Args:
            order: `(N K,)`, the copies in the order of experts; copy i is one of token i // K.
            positions: `(N K,)`, the inverse: where each copy is in that order.
        """
        ctx.save_for_backward(positions)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (positions,) = ctx.saved_tensors
        return grad[positions].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class SumOverExperts(torch.autograd.Function):
    """The sum of the rows of a token's K copies: what `CopyToExperts` does in backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, y: Tensor, order: Tensor, positions: Tensor, k: int
    ) -> Tensor:  # (N K, D) -> (N, D)
        """Return the sums; the arguments are those of `CopyToExperts`."""
        ctx.save_for_backward(order)
        ctx.k = k
        return y[positions].unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return grad[order // ctx.k], None, None, None


class Routes(NamedTuple):
    """Which rows are processed by which expert, and in what order: that of the experts."""

    experts: Tensor
    """`(N K,)`, of each row"""
    order: Tensor
    """`(N K,)`, see `CopyToExperts`"""
    positions: Tensor
    """`(N K,)`, its inverse"""
    ends: Tensor
    """`(E,)` int32, where the rows of each expert end"""
    k: int

    def copy_to_experts(self, tokens: Tensor) -> Tensor:
        """Return the rows of `tokens`, `(N, D)`, for their experts, `(N K, D)`."""
        return cast(Tensor, CopyToExperts.apply(tokens, self.order, self.positions, self.k))

    def sum_over_experts(self, y: Tensor) -> Tensor:
        """Return the sums of the rows of tokens, `(N, D)`, that experts return, `(N K, D)`."""
        return cast(Tensor, SumOverExperts.apply(y, self.order, self.positions, self.k))

    def sort(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, `(N K, 1)`, of the `weights` of tokens, `(N, K)`."""
        return weights.flatten().gather(0, self.order)[:, None]


def sort_by_expert(chosen: Tensor, n_experts: int) -> Routes:
    """Return the routes of tokens to their experts, `chosen`, `(N, K)`."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(n_experts, device=chosen.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return Routes(experts, order, order.argsort(), ends, chosen.shape[-1])
