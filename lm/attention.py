"""Causal attention, with kernels that skip what masks hide: of other documents, of other windows.

A query attends to consecutive keys that end with its own. So a mask is, for each query, the first
and the last of them: `bounds`. The queries may be some of a sequence whose keys are all there. A
mask of all pairs, with which kernels compute and then ignore what is hidden, is made only for what
the kernels that skip do not compute.

On a GPU FlexAttention skips blocks of pairs. On a CPU the operator `attend_to_spans` calls
PyTorch's kernel for each document, as if it were alone. What is hidden by a window is skipped by
blocks of queries. How many documents there are is a value, which the compiler does not know: so
it is an operator.

Shapes: B batch, T queries, S keys (those cached, and those of other ranks, included), H query
heads, G key-value heads, K width of heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

WIDEST_HEAD = 256
"""Largest K of FlashAttention, and of FlexAttention, as its tiles have to fit into the shared
memory of a GPU"""

Mask = Tensor | BlockMask
"""`(B, 1, 2, T)` int64, the bounds of each query's keys, on a CPU; FlexAttention's on a GPU; or of
all pairs, `(T, S)` or `(B, 1, T, S)`: true = attend, or terms of the scores"""


class SequencePart(NamedTuple):
    """Some tokens of sequences whose other tokens are computed elsewhere, e.g. by other ranks."""

    indices: Tensor
    """`(B, T)`, where the tokens are in the complete sequences"""
    gather: Callable[[Tensor], Tensor]
    """returns the `(B, G, S, K)` of the complete sequences, from the `(B, G, T, K)` of this part"""
    exchange: Callable[[Tensor], Tensor]
    """returns the `(N, ...)` that all parts have for this one, from what it has for each"""
    is_first: bool
    """whether this part counts what all parts compute together"""

    def take(self, x: Tensor) -> Tensor:
        """Return what `x` of all tokens, `(B, S)` or `(B, n, S)`, has of those of this part."""
        indices = self.indices
        if x.ndim == 3:
            indices = indices[:, None].expand(-1, x.shape[1], -1)
        return x.gather(-1, indices)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x`, `(n,)`, over all parts."""
        tokens = torch.stack([x, torch.zeros_like(x)])  # `gather` takes an even number
        return self.gather(tokens[None, None]).sum(dim=(0, 1, 2))

    def mask_of(self, mask: Mask) -> Mask:
        """Return the mask of this part's queries, from one of complete sequences, `is_compact`."""
        if not isinstance(mask, BlockMask):
            return self.take(mask[:, 0])[:, None]
        batch, length = self.indices.shape

        def mask_mod(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask.mask_mod(b, head, self.indices[b, query], key)

        return _create_block_mask(mask_mod, batch, length, mask.shape[-1], self.indices.device)


# ---- masks


def find_document_starts(document_ids: Tensor, indices: Tensor) -> Tensor:
    """Return the index in the sequence of the first token of each token's document, `(B, T)`."""
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(is_first, indices, 0).cummax(dim=1).values


def find_key_bounds(document_start: Tensor, window: int | None) -> Tensor:
    """Return the first and the last key that each query of complete sequences attends to.

    Args:
        document_start: see `find_document_starts`.
        window: keys that a query attends to, with its own; None = all of its document.

    Returns:
        `(B, 2, T)` int64, indices in the sequence.
    """
    newest = torch.arange(document_start.shape[1], device=document_start.device)
    oldest = document_start
    if window is not None:
        oldest = torch.maximum(document_start, newest - window + 1)
    return torch.stack([oldest, newest.expand_as(oldest)], dim=1)


def skips_hidden_keys(device: torch.device, width: int, dropout: float) -> bool:
    """Return whether a kernel for `device` skips the keys that a mask hides.

    Args:
        width: K.
        dropout: see `attend`.
    """
    if dropout > 0:
        return False
    if device.type == "cuda":
        return 16 <= width <= WIDEST_HEAD
    return device.type == "cpu"


def make_mask(bounds: Tensor, n_keys: int) -> Mask:
    """Return the mask for the kernel that skips what it hides.

    Args:
        bounds: of the queries, see `find_key_bounds`.
        n_keys: S.
    """
    mask = bounds[:, None]
    if not bounds.is_cuda:
        return mask
    if can_compile(bounds.device):
        return make_block_mask(bounds, n_keys)
    return make_dense(mask, n_keys)


def make_block_mask(bounds: Tensor, n_keys: int) -> BlockMask:
    """Return FlexAttention's mask."""

    def mask_mod(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= bounds[b, 0, query]) & (key <= bounds[b, 1, query])

    batch, _, length = bounds.shape
    return _create_block_mask(mask_mod, batch, length, n_keys, bounds.device)


def _create_block_mask(
    mask_mod: Callable[..., Tensor], batch: int, length: int, n_keys: int, device: torch.device
) -> BlockMask:
    create = create_block_mask
    if device.type == "cuda":
        create = compile_once(create_block_mask)
    return create(mask_mod, batch, None, length, n_keys, device=device)


def is_compact(mask: Mask | None) -> bool:
    """Return whether a mask is one for a kernel that skips what it hides."""
    return isinstance(mask, BlockMask) or (mask is not None and mask.dtype == torch.int64)


def make_dense(mask: Mask, n_keys: int) -> Tensor:
    """Return the mask of all pairs, `(B, 1, T, S)`, of one that `is_compact`."""
    if not isinstance(mask, BlockMask):
        indices = torch.arange(n_keys, device=mask.device)
        oldest, newest = mask.mT.split(1, dim=-1)  # B 1 T 1
        return (indices >= oldest) & (indices <= newest)
    batch, _, length, _ = mask.shape
    device = mask.kv_num_blocks.device
    b = torch.arange(batch, device=device)[:, None, None, None]
    queries = torch.arange(length, device=device)[:, None]
    return mask.mask_mod(b, b, queries, torch.arange(n_keys, device=device))


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled; else FlexAttention would materialize the scores of all pairs."""
    return torch.compile(function, options=compiler_options())


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether the compiler works for `device`; it needs e.g. a C compiler."""
    from torch._dynamo.exc import BackendCompilerFailed  # imports the compiler

    try:
        compile_once(torch.neg)(torch.zeros(1, device=device))
    except BackendCompilerFailed:
        return False
    return True


def compiler_options() -> dict[str, Any]:
    """Return the options of `torch.compile` for the algorithms that PyTorch is set to use."""
    if torch.are_deterministic_algorithms_enabled():
        # The compiler does not choose among kernels by their speed, which varies.
        return {"deterministic": True}
    return {}


# ---- attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the mean of the values, weighted by each query's attention, `(B, H, T, K)`.

    Args:
        query: `(B, H, T, K)`.
        key, value: `(B, G, S, K)`; the width of values may be another one.
        mask: None = as `is_causal` says.
        is_causal: without a mask: attend to the keys up to the query's position, else to all.
        scale: of the products of queries and keys; None = 1 / sqrt(K).
        softcap: c in c tanh(score / c); None = scores as they are.
        sinks: `(H,)`, the score of one more key, whose value is 0.
        dropout: probability with which a weight is 0.
        gather: see `SequencePart`, of which all other arguments are; needs a mask.
    """
    if gather is not None:  # one exchange for both
        joined = gather(torch.cat([key, value], dim=-1))
        key, value = joined.split([key.shape[-1], value.shape[-1]], dim=-1)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    is_complete = query.shape[2] == key.shape[2]
    if mask is None and is_causal and is_complete and sinks is not None and query.is_cpu:
        starts = torch.zeros(len(query), query.shape[2], dtype=torch.int64)
        mask = make_mask(find_key_bounds(starts, None), key.shape[2])
    if mask is not None and is_compact(mask):
        skips = skips_hidden_keys(query.device, query.shape[-1], dropout)
        if skips and isinstance(mask, BlockMask):
            return _attend_to_blocks(query, key, value, mask, scale, softcap, sinks)
        if skips and isinstance(mask, Tensor) and softcap is None:
            return _attend_to_documents(query, key, value, mask, scale, sinks)
        mask = make_dense(mask, key.shape[2])
    assert not isinstance(mask, BlockMask)
    if mask is not None or query.shape[2] == 1:
        is_causal = False
    if softcap is None and sinks is None:
        return _attend_by_pytorch(query, key, value, mask, is_causal, scale, dropout)
    return _attend_to_pairs(query, key, value, mask, is_causal, scale, softcap, sinks, dropout)


def _attend_by_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return what `attend` does, by the fastest kernel that PyTorch has for the arguments."""
    is_grouped = False
    if query.shape[1] != key.shape[1]:  # the compiler may have symbols for both
        is_grouped = True
    if is_grouped and needs_kv_repeat(query.device, query.dtype, query.shape[-1], mask is not None):
        key, value = _repeat_heads(key, value, query.shape[1])
        is_grouped = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=is_grouped,
    )


def needs_kv_repeat(device: torch.device, dtype: torch.dtype, width: int, masked: bool) -> bool:
    """Return whether the fused kernel needs key-value heads repeated for each query head.

    On CUDA only FlashAttention supports grouped queries, and it supports neither masks nor
    float32 nor wider heads than `WIDEST_HEAD` nor GPUs older than Ampere.
    """
    if device.type != "cuda":
        return False
    if masked or dtype == torch.float32 or width > WIDEST_HEAD:
        return True
    return _is_older_than_ampere(device)


@torch.compiler.assume_constant_result
def _is_older_than_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


def _repeat_heads(key: Tensor, value: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    n_repeats = n_heads // key.shape[1]
    return key.repeat_interleave(n_repeats, dim=1), value.repeat_interleave(n_repeats, dim=1)


def _attend_to_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return what `attend` does, from the scores of all pairs."""
    key, value = _repeat_heads(key, value, query.shape[1])
    scores = query @ key.mT * scale  # B H T S
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = F.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    weights = F.dropout(weights, dropout)
    return weights[..., : value.shape[2]] @ value


def _attend_to_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return what `attend` does, by FlexAttention."""

    def cap(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    # A compiled block compiles it, too; on a CPU only tests use it, on few tokens.
    in_graph = torch.compiler.is_compiling() or not query.is_cuda
    function = flex_attention if in_graph else compile_once(flex_attention)
    options: dict[str, Any] = {
        "score_mod": None if softcap is None else cap,
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if sinks is None:
        return function(query, key, value, **options)
    output, aux = function(query, key, value, return_aux=AuxRequest(lse=True), **options)
    assert aux.lse is not None
    kept = torch.sigmoid(aux.lse - sinks.float()[:, None])  # B H T, of the weights
    return (output * kept[..., None]).to(output.dtype)


# ---- documents one by one, on a CPU


def _attend_to_documents(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Return what `attend` does, by `attend_to_spans`, whose kernel needs heads of one width."""
    width = max(query.shape[-1], value.shape[-1])
    query, key = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key))
    padded = F.pad(value, (0, width - value.shape[-1]))
    output, _ = attend_to_spans(query, key, padded, mask[:, 0], scale, sinks)
    return output[..., : value.shape[-1]]


_QUERIES = 256
"""most of a span that is no complete document"""


class _Span(NamedTuple):
    """Consecutive queries of a row, and the consecutive keys that some of them attend to."""

    row: int
    keys: slice
    queries: slice
    mask: Tensor | None
    """`(1, 1, queries, keys)`, 0 = attend, else -inf; None = the keys up to the query's own"""

    def at_queries(self, x: Tensor) -> Tensor:
        """Return what `x`, `(B, H, T, ...)`, has of these queries: a view."""
        return x[self.row : self.row + 1, :, self.queries]

    def at_keys(self, x: Tensor) -> Tensor:
        """Return what `x`, `(B, G, S, ...)`, has of these keys: a view."""
        return x[self.row : self.row + 1, :, self.keys]


def _find_spans(bounds: Tensor, dtype: torch.dtype) -> Iterator[_Span]:
    """Yield the spans of all rows: documents, or parts of them.

    Where a window hides keys, or the first queries of a document are not there, they are parts.
    """
    for row, (oldest, newest) in enumerate(bounds):
        is_start = oldest == newest
        is_start[0] = True
        is_start[1:] |= newest[1:] != newest[:-1] + 1
        starts = is_start.nonzero().flatten().tolist()
        oldest_keys = oldest.tolist()
        newest_keys = newest.tolist()
        for start, end in pairwise([*starts, len(oldest)]):
            first_key = newest_keys[start]
            if oldest_keys[start] == oldest_keys[end - 1] == first_key:
                keys = slice(first_key, newest_keys[end - 1] + 1)
                yield _Span(row, keys, slice(start, end), None)
                continue
            for first in range(start, end, _QUERIES):
                stop = min(first + _QUERIES, end)
                keys = slice(oldest_keys[first], newest_keys[stop - 1] + 1)
                queries = slice(first, stop)
                indices = torch.arange(keys.start, keys.stop)
                is_seen = (indices <= newest[queries, None]) & (indices >= oldest[queries, None])
                mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, float("-inf"))
                yield _Span(row, keys, queries, mask[None, None])


@torch.library.custom_op("lm::attend_to_spans", mutates_args=(), device_types="cpu")
def attend_to_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `attend` does, and the logarithm of the sum of each query's exponents.

    The sink's is one of them. With these sums, and with these outputs, the kernel's backward
    computes the gradients of weights that sum up to less than 1, too.

    Args:
        query, key, value: see `attend`, of one width.
        bounds: of the queries, see `find_key_bounds`.
        scale, sinks: see `attend`.

    Returns:
        `(B, H, T, K)`, and `(B, H, T)` float32.
    """
    output = torch.empty_like(query)
    sums = _new_sums(query)
    for span in _find_spans(bounds, query.dtype):
        its_output, its_sums = _FORWARD(
            span.at_queries(query),
            span.at_keys(key),
            span.at_keys(value),
            0.0,
            span.mask is None,
            attn_mask=span.mask,
            scale=scale,
        )
        span.at_queries(output).copy_(its_output)
        span.at_queries(sums).copy_(its_sums)
    if sinks is None:
        return output, sums
    with_sinks = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    output *= (sums - with_sinks).exp()[..., None].to(output.dtype)
    return output, with_sinks


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What `scaled_dot_product_attention` calls on a CPU. They have no public names."""


def _new_sums(query: Tensor) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, dtype=dtype).transpose(1, 2)


@attend_to_spans.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _new_sums(query)


@torch.library.custom_op("lm::attend_to_spans_backward", mutates_args=(), device_types="cpu")
def _differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the output."""
    query_grad = torch.empty_like(query)
    key_grad = torch.zeros_like(key)
    value_grad = torch.zeros_like(value)
    for span in _find_spans(bounds, query.dtype):
        of_query, of_key, of_value = _BACKWARD(
            span.at_queries(grad),
            span.at_queries(query),
            span.at_keys(key),
            span.at_keys(value),
            span.at_queries(output),
            span.at_queries(sums),
            0.0,
            span.mask is None,
            attn_mask=span.mask,
            scale=scale,
        )
        span.at_queries(query_grad).copy_(of_query)
        span.at_keys(key_grad).add_(of_key)
        span.at_keys(value_grad).add_(of_value)
    return query_grad, key_grad, value_grad


@_differentiate.register_fake
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, ctx.scale, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, sinks)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, output, sums, bounds, sinks = ctx.saved_tensors
    grads = _differentiate(grad, query, key, value, output, sums, bounds, ctx.scale)
    sinks_grad = None
    if sinks is not None:
        weights = (sinks.to(sums.dtype)[:, None] - sums).exp()  # B H T
        products = (grad * output).sum(dim=-1, dtype=sums.dtype)
        sinks_grad = -(weights * products).sum(dim=(0, 2)).to(sinks.dtype)
    return *grads, None, None, sinks_grad


attend_to_spans.register_autograd(_backward, setup_context=_save)
