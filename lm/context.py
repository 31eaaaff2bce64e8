"""Context parallelism: the tokens of a sequence divided among the ranks of a group.

A sequence of T tokens is cut into 2 N pieces for N ranks. Rank r has the pieces r and 2 N - 1 - r,
so that all compute as many pairs of causal attention. What reads other tokens gets them:

- Attention computes a rank's queries with the keys and values of all ranks, which it gathers: so
  any mask and any number of heads is exact. Backward sums their gradients over the group, and a
  rank keeps those of its tokens (Llama 3, 2024, section 3.3.2).
- A convolution gathers the last tokens of each piece.
- The gated delta rule, whose heads are independent, computes complete sequences of 1/N of them.

Shapes: B batch, G key-value heads, T tokens of a rank, S = N T tokens of a sequence, K width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers their gradients
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lm.attention import SequencePart
from lm.delta_rule import causal_convolution, gated_delta_rule

_collectives = torch.ops._c10d_functional
"""Collectives that autograd and the compiler know, which find a group by its name. They have no
public names: `torch.distributed.all_gather_into_tensor` has no gradient."""


@dataclass(frozen=True)
class ContextGroup:
    """A rank of a group whose ranks compute the same sequences together."""

    rank: int
    """in the group"""
    size: int
    name: str
    """of the process group"""

    def own_indices(self, length: int) -> NDArray[np.int64]:
        """Return where this rank's tokens are in sequences of `length`, a multiple of 2 N."""
        pieces = np.arange(length).reshape(2 * self.size, -1)
        return pieces[[self.rank, -1 - self.rank]].flatten()

    def part(self, indices: Tensor) -> SequencePart:
        """Return the part of sequences that this rank has, at `indices` `(B, T)`."""
        return SequencePart(indices, self._gather, self._exchange, is_first=self.rank == 0)

    # One object each, as compiled blocks are compiled again for another one.

    @cached_property
    def _gather(self) -> Callable[[Tensor], Tensor]:
        return partial(gather_tokens, group=self.name, size=self.size)

    @cached_property
    def _exchange(self) -> Callable[[Tensor], Tensor]:
        return partial(exchange, group=self.name)


ALONE = ContextGroup(0, 1, "")
"""a rank that computes complete sequences"""


def new_context_group(
    size: int, rank: int, world_size: int, timeout: timedelta | None = None
) -> ContextGroup:
    """Return the group of `size` consecutive ranks that `rank` belongs to.

    Args:
        timeout: of its collectives; None = PyTorch's default.
    """
    if size == 1:
        return ALONE
    groups = torch.arange(world_size).view(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout)
    assert isinstance(group, dist.ProcessGroup)
    return ContextGroup(rank % size, size, group.group_name)


def gather_tokens(x: Tensor, group: str, size: int) -> Tensor:
    """Return the `(B, G, S, K)` of complete sequences from the `(B, G, T, K)` of each rank."""
    everyone = _collectives.all_gather_into_tensor(x.contiguous(), size, group)
    return join_parts(_collectives.wait_tensor(everyone).unflatten(0, (size, -1)))


def exchange(x: Tensor, group: str) -> Tensor:
    """Return the `(N, ...)` that the ranks have for this one, from what this one has for each."""
    sizes = [1] * len(x)
    received = _collectives.all_to_all_single(x.contiguous(), sizes, sizes, group)
    return _collectives.wait_tensor(received)


def gather_rows(x: Tensor, size: int) -> Tensor:
    """Return what `gather_tokens` does, of rows that stand for ranks: `(N B, G, T, K)`.

    With it one process computes what a group does.
    """
    return join_parts(x.unflatten(0, (size, -1))).repeat(size, 1, 1, 1)


def exchange_rows(x: Tensor) -> Tensor:
    """Return what `exchange` does, of rows that stand for ranks: `(N, N B, ...)`."""
    return x.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1, 2)


def join_parts(parts: Tensor) -> Tensor:
    """Return the `(B, G, S, K)` of complete sequences from the `(N, B, G, T, K)` of all ranks."""
    first, second = parts.chunk(2, dim=3)
    return torch.cat([*first, *second.flip(0)], dim=2)


def split_parts(x: Tensor, size: int) -> Tensor:
    """Return the `(N, B, G, T, K)` of all ranks from the `(B, G, S, K)` of complete sequences."""
    first, second = x.unflatten(2, (2, size, -1)).unbind(2)  # B G N T/2 K
    return torch.cat([first, second.flip(2)], dim=3).movedim(2, 0)


# ---- linear attention


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

    def exchange_tokens(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, -x.shape[2] % size))  # heads of zeros
        shares = torch.stack(x.transpose(1, 2).chunk(size, dim=1))  # N B H/N T K
        return join_parts(part.exchange(shares)).transpose(1, 2)

    complete = gated_delta_rule(
        exchange_tokens(query),
        exchange_tokens(key),
        exchange_tokens(value),
        exchange_tokens(g[..., None])[..., 0],
        exchange_tokens(beta[..., None])[..., 0],
        document_ids,
    )
    shares = part.exchange(split_parts(complete.transpose(1, 2), size))  # N B H/N T V
    return shares.movedim(0, 1).flatten(1, 2).transpose(1, 2)[:, :, :heads]


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
    reach = weight.shape[1] - 1
    pieces = x.unflatten(2, (2, -1))  # B D 2 T/2
    length = pieces.shape[3]
    extended = reach + length
    ends = pieces[..., -reach:]  # B D 2 K-1, or the complete pieces, if these are shorter
    columns = ends.flatten(2)[..., None]
    all_ends = part.gather(columns)[..., 0]
    # What precedes each piece, with zeros before the sequence.
    before = F.pad(all_ends, (reach, 0)).unfold(2, reach, ends.shape[3])  # B D 2N+1 K-1
    ids = F.pad(document_ids, (reach, 0), value=-1).unfold(1, extended, length)  # B 2N K-1+T/2
    numbers = part.indices[:, ::length, None] // length  # B 2 1, of the pieces
    own_ids = ids.gather(1, numbers.expand(-1, -1, extended))
    own_before = before.gather(2, numbers[:, None].expand(-1, x.shape[1], -1, reach))
    inputs = torch.cat([own_before, pieces], dim=3).transpose(1, 2)  # B 2 D K-1+T/2
    outputs = causal_convolution(inputs.flatten(0, 1), weight, own_ids.flatten(0, 1))
    own_outputs = outputs[..., reach:].unflatten(0, (-1, 2))  # B 2 D T/2
    return own_outputs.transpose(1, 2).flatten(2)
