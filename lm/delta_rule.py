"""Linear attention inside of documents: the gated delta rule and the convolution before it.

A head has a state S of shape (K, V), which every token decays and corrects (Gated Delta Networks,
arXiv 2412.06464): with keys and queries of length 1, the query scaled by K^-1/2,

    S_t = exp(g_t) S_t-1 + k_t n_t^T      n_t = beta_t (v_t - exp(g_t) S_t-1^T k_t)
    o_t = S_t^T q_t                       S = 0 before the first token of each document

A row is cut into chunks of 64 tokens. Within a chunk, let c_i be the sum of its g up to i,

    D_ij = exp(c_i - c_j)   if j <= i and both are of one document, else 0
    a_i  = exp(c_i)         if i is of the document of the last token of the chunk before, else 0
    e_j  = exp(c_64 - c_j)  if j is of the document of the last token of this chunk, else 0
    w    = exp(c_64)        if those last tokens are of one document, else 0

and S the state before it. Then all n of a chunk, as rows of N, solve a triangular system:

    (I + tril(beta K K^T D, -1)) N = beta (V - a K S)
    O = a Q S + (Q K^T D) N               S' = w S + K^T e N

(beta, a and e multiply rows.) Its inverse T is applied to what is known before S is, so only two
small products per chunk wait for the chunk before: N = U - W S with U = T beta V, W = T beta a K.

Both operators compute in float32 at least, save their inputs alone for backward, and are opaque to
the compiler, which otherwise unrolls the loop over chunks. Backward of the rule computes it again,
and autograd differentiates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 64
_EPSILON = 1e-6
"""that transformers adds to squared lengths"""


def _widen(x: Tensor) -> Tensor:
    """Return `x` in float32, or float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _cut(x: Tensor, heads: int) -> Tensor:
    """Return `(N, B, heads, C, D)` of `(B, T, H, D)`, with zeros after T and heads repeated."""
    x = F.pad(_widen(x), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    x = x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)  # N B H C D
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _normalize(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x * (x.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()


def _apply_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor
) -> Tensor:
    """Return what queries read of the states of their documents, `(B, T, H, V)`.

    Args:
        query: `(B, T, heads of keys, K)`; normalized here, as `key` is.
        key: `(B, T, heads of keys, K)`; each head serves consecutive ones of the values.
        value: `(B, T, H, V)`.
        g: `(B, T, H)`, logarithms of decays, at most 0.
        beta: `(B, T, H)`.
        document_ids: `(B, T)`, equal for the tokens of one document, and for no others of a row.
    """
    _, length, heads, _ = value.shape
    scale = query.shape[-1] ** -0.5
    q = _normalize(_cut(query, heads)) * scale  # N B H C K
    k = _normalize(_cut(key, heads))
    v = _cut(value, heads)  # N B H C V
    b = _cut(beta[..., None], heads)  # N B H C 1

    rows = F.pad(document_ids, (0, -length % CHUNK), value=-1)
    of_chunks = rows.unflatten(1, (-1, CHUNK)).transpose(0, 1)  # N B C
    ids = of_chunks[:, :, None, :, None]  # N B 1 C 1
    last = ids[..., -1:, :]
    before = torch.cat([last[:1], last[:-1]])  # of the first chunk, whose S is 0, any
    is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=ids.device).tril()
    is_seen = is_past & (ids == ids.mT)

    # Differences of sums are exact to rounding of the differences.
    sums = _cut(g[..., None], heads).double().cumsum(dim=-2)  # N B H C 1
    end = sums[..., -1:, :]
    differences = (sums - sums.mT).to(v.dtype)
    decay = differences.masked_fill(~is_seen, float("-inf")).exp()  # D
    from_before = sums.exp().to(v.dtype) * (ids == before)  # a
    to_end = (end - sums).exp().to(v.dtype) * (ids == last)  # e
    across = end.exp().to(v.dtype) * (last == before)  # w

    steps = b * k
    system = (steps @ k.mT) * decay  # whose diagonal is not read
    identity = torch.eye(CHUNK, dtype=k.dtype, device=k.device)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)  # T
    known = inverse @ (b * v)  # U
    reads = inverse @ (from_before * steps)  # W
    keys_to_end = (to_end * k).mT
    scores = (q @ k.mT) * decay
    queries = from_before * q

    state = k.new_zeros(*k.shape[1:3], k.shape[-1], v.shape[-1])  # S, B H K V
    outputs: list[Tensor] = []
    # Not by index, of which the gradient is a tensor of all chunks.
    chunks = zip(known, reads, queries, scores, across, keys_to_end, strict=True)
    for its_known, its_reads, its_queries, its_scores, its_decay, its_keys in chunks:
        news = its_known - its_reads @ state  # N
        outputs.append(its_queries @ state + its_scores @ news)
        state = its_decay * state + its_keys @ news
    output = torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)  # B T H V
    return output[:, :length].to(value.dtype).contiguous()


gated_delta_rule = torch.library.custom_op("lm::gated_delta_rule", _apply_rule, mutates_args=())


def _differentiate_rule(grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the `inputs` of `_apply_rule`, which is computed again."""
    # An operator runs below autograd, which then records nothing unless it is told to.
    with torch.inference_mode(mode=False):
        leaves = [x.detach().requires_grad_() for x in inputs[:-1]]
        output = _apply_rule(*leaves, document_ids=inputs[-1])
        gradients = torch.autograd.grad(output, leaves, grad)
    return [gradient.contiguous() for gradient in gradients]


_gated_delta_rule_backward = torch.library.custom_op(
    "lm::gated_delta_rule_backward", _differentiate_rule, mutates_args=()
)

COMPUTED_BY: Mapping[Any, Callable[..., Any]] = {
    torch.ops.lm.gated_delta_rule.default: _apply_rule,
    torch.ops.lm.gated_delta_rule_backward.default: _differentiate_rule,
}
"""What the operators run, for plans: which count what exists meanwhile, too."""


@register_flop_formula(torch.ops.lm.gated_delta_rule)
def _count_flops(_query: Any, key: Any, value: Any, *_: Any, **_out: Any) -> int:
    """Return the FLOPs of the products of a forward pass, from shapes."""
    n_tokens = math.prod(value[:3])  # of all heads
    key_width = key[-1]
    value_width = value[-1]
    # Of a token with the others of its chunk: K K^T, Q K^T and the reads W, as wide as keys; the
    # news N before they are corrected and the output in the chunk, as wide as values.
    in_chunk = CHUNK * (3 * key_width + 2 * value_width)
    # With the state, K by V: its correction of the news, its next value, and the output.
    with_state = 3 * key_width * value_width
    return 2 * n_tokens * (in_chunk + with_state)


@register_flop_formula(torch.ops.lm.gated_delta_rule_backward)
def _count_flops_of_backward(_grad: Any, inputs: Any, **_out: Any) -> int:
    """Return twice those of forward, which is computed again, too, and not counted."""
    return 2 * _count_flops(*inputs)


@gated_delta_rule.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor
) -> Tensor:
    del query, key, g, beta, document_ids
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_gated_delta_rule_backward.register_fake
def _(grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    del grad
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:-1]]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward_of_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_gated_delta_rule_backward(grad, ctx.saved_tensors), None)


gated_delta_rule.register_autograd(_backward_of_rule, setup_context=_save_inputs)


# ---- the convolution


@torch.library.custom_op("lm::causal_convolution", mutates_args=())
def causal_convolution(x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
    """Return the convolution of each channel with its own weights over the tokens up to each one.

    Args:
        x: `(B, D, T)`.
        weight: `(D, K)`, the last of which is that of the token itself.
        document_ids: `(B, T)`, see `gated_delta_rule`.
    """
    width = weight.shape[1]
    output = torch.zeros_like(_widen(x), memory_format=torch.contiguous_format)
    for distance in range(min(width, x.shape[2])):
        of_channels = _widen(weight)[:, width - 1 - distance, None]
        output += of_channels * _look_back(_widen(x), document_ids, distance)
    return output.to(x.dtype)


def _look_back(x: Tensor, document_ids: Tensor, distance: int) -> Tensor:
    """Return what `x` is `distance` tokens before each; 0 where that is another document."""
    length = x.shape[2] - distance
    is_same = document_ids[:, distance:] == document_ids[:, :length]
    return F.pad(x[..., :length] * is_same[:, None], (distance, 0))


@torch.library.custom_op("lm::causal_convolution_backward", mutates_args=())
def _causal_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, document_ids: Tensor
) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    grad = _widen(grad)
    d_x = torch.zeros_like(grad, memory_format=torch.contiguous_format)
    d_weight = torch.zeros_like(_widen(weight))
    for distance in range(min(width, x.shape[2])):
        which = width - 1 - distance
        length = x.shape[2] - distance
        is_same = document_ids[:, distance:] == document_ids[:, :length]
        reaching = grad[..., distance:] * is_same[:, None]
        d_x[..., :length] += _widen(weight)[:, which, None] * reaching
        d_weight[:, which] = (reaching * x[..., :length]).sum(dim=(0, 2))
    return d_x.to(x.dtype), d_weight.to(weight.dtype)


@causal_convolution.register_fake
def _(x: Tensor, weight: Tensor, document_ids: Tensor) -> Tensor:
    del weight, document_ids
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_causal_convolution_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor]:
    del grad, document_ids
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return d_x, torch.empty_like(weight)


def _differentiate_convolution(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_causal_convolution_backward(grad, *ctx.saved_tensors), None)


causal_convolution.register_autograd(_differentiate_convolution, setup_context=_save_inputs)
