"""Context parallelism: the tokens of a sequence divided among the ranks of a group.

A sequence of T tokens is cut into 2 N pieces for N ranks. Rank r has the pieces r and 2 N - 1 - r,
so that all compute as many pairs of causal attention. Everything but attention is computed of each
token by itself. Attention computes a rank's queries with the keys and values of all ranks, which
it gathers: so any mask and any number of heads is exact. Backward sums their gradients over the
group, and a rank keeps those of its tokens (Llama 3, 2024, section 3.3.2).

Shapes: B batch, G key-value heads, T tokens of a rank, S = N T tokens of a sequence, K width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lm.attention import SequencePart

_collectives = torch.ops._c10d_functional
"""What compiled collectives are: they find a group by its name, as our operators have to, which
take no group. They have no public names."""


def pieces_of(rank: int, size: int) -> list[int]:
    """Return the numbers of the two pieces that `rank` of a group of `size` has."""
    return [rank, 2 * size - 1 - rank]


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
        return pieces[pieces_of(self.rank, self.size)].flatten()

    def part(self, indices: Tensor) -> SequencePart:
        """Return the part of sequences that this rank has, at `indices` `(B, T)`."""
        return SequencePart(indices, self._gather, is_first=self.rank == 0)

    @cached_property
    def _gather(self) -> Callable[[Tensor], Tensor]:
        # One object, as compiled blocks are compiled again for another one.
        return partial(gather_tokens, group=self.name, size=self.size)


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


def join_pieces(everyone: Tensor, size: int) -> Tensor:
    """Return the `(B, G, S, K)` of complete sequences.

    Args:
        everyone: `(2 N, B, G, T/2, K)`, the two pieces of each rank.
    """
    numbers = [number for rank in range(size) for number in pieces_of(rank, size)]
    pieces = dict(zip(numbers, everyone, strict=True))
    return torch.cat([pieces[number] for number in range(2 * size)], dim=2)


def gather_rows(x: Tensor, size: int) -> Tensor:
    """Return what `gather_tokens` does, of rows that stand for ranks: `(N B, G, T, K)`.

    With it one process computes what a group does.
    """
    everyone = x.unflatten(0, (size, -1)).unflatten(3, (2, -1))  # N B G 2 T/2 K
    complete = join_pieces(everyone.movedim(3, 1).flatten(0, 1), size)
    return complete.repeat(size, 1, 1, 1)


@torch.library.custom_op("lm::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, group: str, size: int) -> Tensor:
    """Return the `(B, G, S, K)` of complete sequences from the `(B, G, T, K)` of each rank."""
    own = torch.stack(x.chunk(2, dim=2))
    everyone = _collectives.all_gather_into_tensor(own, size, group)
    everyone = _collectives.wait_tensor(everyone)
    return join_pieces(everyone, size)


@gather_tokens.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    del group
    batch, heads, length, width = x.shape
    return x.new_empty(batch, heads, size * length, width)


@torch.library.custom_op("lm::sum_to_ranks", mutates_args=())
def sum_to_ranks(x: Tensor, group: str, size: int) -> Tensor:
    """Return the `(B, G, T, K)` of this rank's tokens, summed over the `(B, G, S, K)` of all."""
    pieces = x.chunk(2 * size, dim=2)
    everyone = torch.stack([pieces[i] for rank in range(size) for i in pieces_of(rank, size)])
    own = _collectives.reduce_scatter_tensor(everyone, "sum", size, group)
    return torch.cat(_collectives.wait_tensor(own).unbind(), dim=2)


@sum_to_ranks.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    del group
    batch, heads, length, width = x.shape
    return x.new_empty(batch, heads, length // size, width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, ctx.group, ctx.size = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return sum_to_ranks(grad, ctx.group, ctx.size), None, None


gather_tokens.register_autograd(_backward, setup_context=_save)
