"""Linear attention inside of documents: the gated delta rule and the convolution before it.

A head has a state S of shape (K, V), which every token decays and corrects (Gated Delta Networks,
arXiv 2412.06464): with keys and queries of length 1, the query scaled by K^-1/2,

    S_t = exp(g_t) S_t-1 + k_t n_t^T      n_t = beta_t (v_t - exp(g_t) S_t-1^T k_t)
    o_t = S_t^T q_t                       S = 0 before the first token of each document

`_split` cuts a row into chunks of 64 tokens. Within a chunk, let c_i be the sum of its g up to i,

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
the compiler, which otherwise unrolls the loop over chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class _Chunks(NamedTuple):
    """What the tokens of each chunk are; see the module's docstring. G = batch x value heads."""

    query: Tensor
    """`(N, G, C, K)`, of length K^-1/2, as many heads as values have"""
    key: Tensor
    """`(N, G, C, K)`, of length 1"""
    value: Tensor
    """`(N, G, C, V)`"""
    beta: Tensor
    """`(N, G, C, 1)`"""
    decay: Tensor
    """D, `(N, G, C, C)`"""
    from_before: Tensor
    """a, `(N, G, C, 1)`"""
    to_end: Tensor
    """e, `(N, G, C, 1)`"""
    across: Tensor
    """w, `(N, G, 1, 1)`"""


def _cut(x: Tensor, heads: int) -> Tensor:
    """Return `(N, B * heads, C, D)` of `(B, T, H, D)`, with zeros after T and heads repeated."""
    x = _widen(x)
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    x = x.repeat_interleave(heads // x.shape[2], dim=2)
    x = x.unflatten(1, (-1, CHUNK))  # B N C H D
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _join(x: Tensor, like: Tensor) -> Tensor:
    """Return `(B, T, H, D)`, the shape and dtype of `like`, of `x` as `_cut` returns it.

    Heads that were repeated are summed.
    """
    batch, length, heads, _ = like.shape
    x = x.unflatten(1, (batch, -1))  # N B H C D
    x = x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    x = x.unflatten(2, (heads, -1)).sum(dim=3)
    return x.to(like.dtype).contiguous()


def _inverse_length(x: Tensor) -> Tensor:
    return (_widen(x).square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()


def _split(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor
) -> _Chunks:
    heads = value.shape[2]
    unit_query = query * (_inverse_length(query) * query.shape[-1] ** -0.5)
    unit_key = key * _inverse_length(key)

    # Differences of sums are exact to rounding of the differences.
    sums = _cut(g[..., None], heads).double().cumsum(dim=2)  # N G C 1
    ends = sums[:, :, -1:]

    rows = F.pad(document_ids, (0, -document_ids.shape[1] % CHUNK), value=-1)
    ids = rows.unflatten(1, (-1, CHUNK)).transpose(0, 1)  # N B C
    ids = ids.repeat_interleave(heads, dim=1)[..., None]  # N G C 1
    last = ids[:, :, -1:]
    before = torch.cat([last[:1], last[:-1]])  # of the first chunk, whose S is 0, any

    is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=ids.device).tril()
    is_seen = is_past & (ids == ids.transpose(2, 3))
    differences = sums - sums.transpose(2, 3)
    decay = differences.masked_fill_(~is_seen, float("-inf")).exp_()
    values = _cut(value, heads)
    return _Chunks(
        query=_cut(unit_query, heads),
        key=_cut(unit_key, heads),
        value=values,
        beta=_cut(beta[..., None], heads),
        decay=decay.to(values.dtype),
        from_before=(sums.exp() * (ids == before)).to(values.dtype),
        to_end=((ends - sums).exp() * (ids == last)).to(values.dtype),
        across=(ends.exp() * (last == before)).to(values.dtype),
    )


class _Solved(NamedTuple):
    """What the loop over chunks computes, and what backward needs of it."""

    gram: Tensor
    """K K^T, `(N, G, C, C)`"""
    inverse: Tensor
    """T, `(N, G, C, C)`"""
    reads: Tensor
    """W, `(N, G, C, K)`"""
    states: Tensor
    """S before each chunk, `(N, G, K, V)`"""
    news: Tensor
    """N, `(N, G, C, V)`"""


def _solve(chunks: _Chunks) -> _Solved:
    key = chunks.key
    gram = key @ key.mT
    system = chunks.beta * gram * chunks.decay  # whose diagonal is not read
    identity = torch.eye(CHUNK, dtype=key.dtype, device=key.device)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    news = inverse @ (chunks.beta * chunks.value)
    reads = inverse @ (chunks.beta * chunks.from_before * key)
    keys_to_end = (chunks.to_end * key).mT
    states = key.new_zeros(*key.shape[:2], key.shape[-1], chunks.value.shape[-1])
    for i in range(len(key)):
        news[i] -= reads[i] @ states[i]
        if i + 1 < len(key):
            states[i + 1] = chunks.across[i] * states[i] + keys_to_end[i] @ news[i]
    return _Solved(gram, inverse, reads, states, news)


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
    chunks = _split(query, key, value, g, beta, document_ids)
    solved = _solve(chunks)
    output = chunks.from_before * (chunks.query @ solved.states)
    output += (chunks.query @ chunks.key.mT * chunks.decay) @ solved.news
    return _join(output, value)


gated_delta_rule = torch.library.custom_op("lm::gated_delta_rule", _apply_rule, mutates_args=())


def _differentiate_rule(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `_apply_rule`: d below, as of the names in the docstring."""
    chunks = _split(query, key, value, g, beta, document_ids)
    gram, inverse, reads, states, news = _solve(chunks)
    q, k, decay = chunks.query, chunks.key, chunks.decay
    d_output = _cut(grad, value.shape[2])

    # From the last chunk to the first: gradients of N, and of S after each chunk.
    scores = q @ k.mT * decay
    d_news = scores.mT @ d_output
    d_states = (chunks.from_before * q).mT @ d_output  # of S before it, so far by O alone
    d_after = torch.zeros_like(states)
    for i in reversed(range(len(k))):
        d_news[i] += chunks.to_end[i] * (k[i] @ d_after[i])
        if i > 0:
            carried = chunks.across[i] * d_after[i] - reads[i].mT @ d_news[i]
            d_after[i - 1] = d_states[i] + carried
    del reads, scores, d_states  # what follows takes their memory

    # O = a Q S + (Q K^T D) N
    d_scores = d_output @ news.mT * decay
    d_read = d_output @ states.mT
    del d_output
    d_query = chunks.from_before * d_read + d_scores @ k
    d_key = d_scores.mT @ q
    d_from_before = (d_read * q).sum(dim=-1, keepdim=True)
    d_decay = d_scores * (q @ k.mT)  # times D, as all of it
    del d_read, d_scores

    # (I + tril(beta K K^T D, -1)) N = beta (V - a K S)
    d_right = inverse.mT @ d_news
    del inverse, d_news
    d_system = -(d_right @ news.mT).tril(-1) * decay
    d_gram = chunks.beta * d_system
    d_key += (d_gram + d_gram.mT) @ k
    d_decay += d_gram * gram
    d_beta = (d_system * gram).sum(dim=-1, keepdim=True)
    del d_gram, d_system, gram
    known = k @ states
    d_value = chunks.beta * d_right
    d_known = chunks.from_before * d_value
    d_key -= d_known @ states.mT
    del d_known
    d_from_before -= (d_value * known).sum(dim=-1, keepdim=True)
    known *= chunks.from_before
    d_beta += (d_right * (chunks.value - known)).sum(dim=-1, keepdim=True)
    del d_right, known

    # S' = w S + K^T e N
    d_end_key = news @ d_after.mT
    d_key += chunks.to_end * d_end_key
    d_to_end = (d_end_key * k).sum(dim=-1, keepdim=True) * chunks.to_end
    d_across = (states * d_after).sum(dim=(-2, -1), keepdim=True) * chunks.across
    del d_after, d_end_key, news, states

    # The sums of g, by all that is an exponential of them; then g.
    d_sums = d_decay.sum(dim=-1, keepdim=True) - d_decay.sum(dim=-2)[..., None]
    d_sums += d_from_before * chunks.from_before - d_to_end
    d_sums[:, :, -1:] += d_to_end.sum(dim=2, keepdim=True) + d_across
    d_g = d_sums.flip(2).cumsum(dim=2).flip(2)

    return (
        _through_length(_join(d_query, _widen(query)), query, query.shape[-1] ** -0.5),
        _through_length(_join(d_key, _widen(key)), key, 1.0),
        _join(d_value, value),
        _join(d_g, g[..., None])[..., 0],
        _join(d_beta, beta[..., None])[..., 0],
    )


def _through_length(grad: Tensor, x: Tensor, scale: float) -> Tensor:
    """Return the gradient of `x` from that of `x` divided by its length, times `scale`."""
    inverse_length = _inverse_length(x)
    unit = x * inverse_length
    along = (grad * unit).sum(dim=-1, keepdim=True)
    return (scale * inverse_length * (grad - along * unit)).to(x.dtype)


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
def _count_flops_of_backward(_grad: Any, *inputs: Any, **_out: Any) -> int:
    """Return twice those of forward, which is computed again, too, and not counted."""
    return 2 * _count_flops(*inputs)


@gated_delta_rule.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor
) -> Tensor:
    del query, key, g, beta, document_ids
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_gated_delta_rule_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    del grad
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:-1]]
    return tuple(made)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward_of_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_gated_delta_rule_backward(grad, *ctx.saved_tensors), None)


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
