"""Linear attention of classes of transformers: its operators are lm.delta_rule's for documents.

Of sequences that are divided among ranks (lm/context.py), the gated delta rule, whose heads are
independent, computes complete sequences of 1/N of the heads, and a convolution gathers the last
tokens of each piece.

Shapes: B batch, H heads, T tokens of a rank, S = N T tokens of a sequence, K width.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import SequencePart
from lm.context import join_parts, split_parts
from lm.delta_rule import causal_convolution, gated_delta_rule

HAS_FLA = find_spec("fla") is not None
"""Whether flash-linear-attention is installed, whose kernels are for GPUs."""


def apply_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor,
    part: SequencePart | None,
) -> Tensor:
    """Return what `gated_delta_rule` does, `(B, T, H, V)`.

    Ranks exchange tokens of all heads for complete sequences of 1/N of the heads, and back.

    Args:
        document_ids: `(B, S)`.
        part: that all other arguments are of; None = complete sequences.
    """
    if part is None:
        return gated_delta_rule(query, key, value, g, beta, document_ids)
    heads = value.shape[2]
    size = document_ids.shape[1] // value.shape[1]
    if key.shape[2] % size > 0:  # a rank gets the heads of keys that its heads of values need
        repeats = heads // key.shape[2]
        query = query.repeat_interleave(repeats, dim=2)
        key = key.repeat_interleave(repeats, dim=2)

    def exchange_tokens(x: Tensor) -> Tensor:  # B T H K -> B S H/N K
        n_missing = -x.shape[2] % size
        x = F.pad(x, (0, 0, 0, n_missing)).transpose(1, 2)  # with heads of zeros
        for_ranks = torch.stack(x.chunk(size, dim=1))  # N B H/N T K
        of_ranks = part.exchange(for_ranks)  # N B H/N T K, of the same heads
        return join_parts(of_ranks).transpose(1, 2)

    output = gated_delta_rule(
        exchange_tokens(query),
        exchange_tokens(key),
        exchange_tokens(value),
        exchange_tokens(g[..., None])[..., 0],
        exchange_tokens(beta[..., None])[..., 0],
        document_ids,
    )  # B S H/N V
    for_ranks = split_parts(output.transpose(1, 2), size)  # N B H/N T V
    of_ranks = part.exchange(for_ranks)  # N B H/N T V, of the same tokens
    all_heads = of_ranks.movedim(0, 1).flatten(1, 2)  # B H T V
    return all_heads.transpose(1, 2)[:, :, :heads]  # without those of zeros


def convolve(x: Tensor, weight: Tensor, document_ids: Tensor, part: SequencePart | None) -> Tensor:
    """Return what `causal_convolution` does, `(B, D, T)`.

    The two pieces of a part are convolved after the last tokens of the pieces before them.

    Args:
        weight: `(D, K)`.
        document_ids: `(B, S)`.
        part: that `x` is of; None = complete sequences.
    """
    if part is None:
        return causal_convolution(x, weight, document_ids)
    reach = weight.shape[1] - 1  # K-1 tokens, on which an output depends besides its own
    pieces = x.unflatten(2, (2, -1))  # B D 2 T/2
    length = pieces.shape[3]
    numbers = part.indices[:, ::length] // length  # B 2, of the pieces in the sequence

    # The tokens before each piece are the end of the one before it, and of several if pieces are
    # shorter than K-1. Before the sequence are zeros, of no document.
    ends = pieces[..., -reach:]  # B D 2 E
    n_ends = ends.shape[3]
    all_ends = part.gather(ends.flatten(2)[..., None])[..., 0]  # B D 2NE
    before_pieces = F.pad(all_ends, (reach, 0)).unfold(2, reach, n_ends)  # B D 2N+1 K-1
    before = torch.take_along_dim(before_pieces, numbers[:, None, :, None], dim=2)  # B D 2 K-1
    extended = torch.cat([before, pieces], dim=3).transpose(1, 2)  # B 2 D K-1+T/2

    padded_ids = F.pad(document_ids, (reach, 0), value=-1)
    ids_of_pieces = padded_ids.unfold(1, reach + length, length)  # B 2N K-1+T/2
    ids = torch.take_along_dim(ids_of_pieces, numbers[..., None], dim=1)  # B 2 K-1+T/2

    outputs = causal_convolution(extended.flatten(0, 1), weight, ids.flatten(0, 1))
    of_pieces = outputs[..., reach:].unflatten(0, (-1, 2))  # B 2 D T/2
    return of_pieces.transpose(1, 2).flatten(2)


def rule_by_fla(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return what `gated_delta_rule` does, by flash-linear-attention, which takes a single row.

    Args:
        cu_seqlens: where documents start in all rows, one after the other, and where the last ends.
    """
    fla: Any = import_module("fla.ops.gated_delta_rule")
    rows = [x.flatten(0, 1)[None] for x in (query, key, value, g, beta)]
    output, _ = fla.chunk_gated_delta_rule(
        *rows, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
    )
    return output.view_as(value)


def _in_chunks(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gated delta rule of a class, which is ours where it gets documents.

    A GPU that is told where they start computes it by flash-linear-attention, if that is installed.
    """

    @functools.wraps(theirs)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        seq_idx: Tensor | None = None,
        part: SequencePart | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if cu_seqlens is not None and HAS_FLA and query.is_cuda:
            return rule_by_fla(query, key, value, g, beta, cu_seqlens), None
        if seq_idx is None:
            return theirs(query, key, value, g=g, beta=beta, **options)
        return apply_rule(query, key, value, g, beta, seq_idx, part), None

    return rule


def _convolve(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the causal convolution of a class, which is ours where it gets documents."""

    @functools.wraps(theirs)
    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        part: SequencePart | None = None,
        **options: Any,
    ) -> Tensor:
        if seq_idx is None:
            return theirs(hidden_states, weight, bias, activation=activation, **options)
        from transformers.activations import ACT2FN

        output = convolve(hidden_states.to(weight.dtype), weight, seq_idx, part)
        if bias is not None:
            output = output + bias[:, None]
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.to(hidden_states.dtype)

    return convolution


_OPERATORS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": _in_chunks,
    "causal_conv1d_fn": _convolve,
}
"""Functions of modeling files that let packed documents see each other."""
DECAYS = ("A_log", "dt_bias")
"""Parameters of the gated delta rule, which some classes keep in float32: rounded, they change
logits by a percent."""


@functools.cache
def use_our_operators(modeling_file: str) -> None:
    """Let a module of transformers call our operators where its layers get `seq_idx`.

    Layers look these functions up when they are called, and pass them what the model is called
    with. So documents are an argument of each block, which recomputation and the compiler see, and
    a call without documents, e.g. of a generation, is computed as before.
    """
    module = sys.modules[modeling_file]
    for name, replace in _OPERATORS.items():
        if hasattr(module, name):
            setattr(module, name, replace(getattr(module, name)))
