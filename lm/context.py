"""Context parallelism: the tokens of a sequence divided among the ranks of a group.

A sequence of T tokens is cut into 2 N pieces for N ranks. Rank r has the pieces r and 2 N - 1 - r,
so that all compute as many pairs of causal attention. What reads other tokens gets them:

- Attention computes a rank's queries with the keys and values of all ranks, which it gathers: so
  any mask and any number of heads is exact. Backward sums their gradients over the group, and a
  rank keeps those of its tokens (Llama 3, 2024, section 3.3.2).
- Linear attention does what lm/transformers_linear.py says.

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
from numpy.typing import NDArray
from torch import Tensor

from lm.attention import SequencePart

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
        pieces = np.split(np.arange(length), 2 * self.size)
        return np.concatenate([pieces[self.rank], pieces[-1 - self.rank]])

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
    gathered = _collectives.all_gather_into_tensor(x.contiguous(), size, group)
    parts = _collectives.wait_tensor(gathered).unflatten(0, (size, -1))  # N B G T K
    return join_parts(parts)


def exchange(x: Tensor, group: str) -> Tensor:
    """Return the `(N, ...)` that the ranks have for this one, from what this one has for each."""
    sizes = [1] * len(x)
    received = _collectives.all_to_all_single(x.contiguous(), sizes, sizes, group)
    return _collectives.wait_tensor(received)


def gather_rows(x: Tensor, size: int) -> Tensor:
    """Return what `gather_tokens` does, of rows that stand for ranks: `(N B, G, T, K)`.

    With it one process computes what a group does.
    """
    complete = join_parts(x.unflatten(0, (size, -1)))
    return complete.repeat(size, 1, 1, 1)


def exchange_rows(x: Tensor) -> Tensor:
    """Return what `exchange` does, of rows that stand for ranks: `(N, N B, ...)`."""
    by_receiver = x.unflatten(1, (len(x), -1))  # N of receivers, N of senders, B ...
    by_sender = by_receiver.transpose(0, 1)
    return by_sender.flatten(1, 2)


def join_parts(parts: Tensor) -> Tensor:
    """Return the `(B, G, S, K)` of complete sequences from the `(N, B, G, T, K)` of all ranks."""
    first, second = parts.chunk(2, dim=3)  # N B G T/2 K, of rank r the pieces r and 2 N - 1 - r
    in_order = [*first, *second.flip(0)]
    return torch.cat(in_order, dim=2)


def split_parts(x: Tensor, size: int) -> Tensor:
    """Return the `(N, B, G, T, K)` of all ranks from the `(B, G, S, K)` of complete sequences."""
    first, second = x.unflatten(2, (2, size, -1)).unbind(2)  # B G N T/2 K, halves of the pieces
    parts = torch.cat([first, second.flip(2)], dim=3)  # B G N T K
    return parts.movedim(2, 0)
