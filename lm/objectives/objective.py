"""What a run minimizes: the mean of terms over the global batch, of every target or of every pair.

An objective returns the sum of a micro-batch's terms. The step divides by the number of terms in
the global batch, so that the gradient depends neither on ranks, nor on accumulation or packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.any_model import AnyModel
from lm.data.loader import Loader, MicroBatch, PairBatch
from lm.runtime.world import World
from model import Routed, RoutedLoss


class Losses(NamedTuple):
    """What an objective computes of a micro-batch, or their sums over several."""

    loss_sum: Tensor
    """of the terms: a scalar, with gradients"""
    statistics: Tensor
    """sums over the terms of what is reported besides, `(n,)` float64"""
    routed: Routed | None = None
    """of a mixture of experts that trains"""

    @property
    def minimized_sum(self) -> Tensor:
        """The sum of what is minimized: the loss, and that of a mixture's balance."""
        if self.routed is None:
            return self.loss_sum
        return self.loss_sum + self.routed.balance_loss


class Objective:
    """What the terms of the loss are."""

    statistics: Sequence[str] = ()
    """names of what is reported besides the loss, as means over the terms"""

    def losses(self, model: AnyModel, micro_batch: MicroBatch | PairBatch) -> Losses:
        """Return the sums over the terms of a micro-batch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors, equal on every rank: by default none."""
        return {}

    def begin_session(self, step: int, *, has_updated: bool) -> bool:  # noqa: ARG002
        """Begin a session after step `step`. Return whether `prepare` has to be called.

        Args:
            has_updated: whether the weights are not the initial ones.
        """
        return False

    def prepare(
        self, model: AnyModel, loader: Loader, world: World, log: Callable[[str], None]
    ) -> Iterator[int]:
        """Compute what the terms need of the initial weights, with `model` in train mode.

        Yields:
            After every batch, the same on all ranks: the number of batches computed so far.
        """
        raise NotImplementedError

    def exchange(self, world: World) -> None:
        """Let all ranks know what each has computed in `prepare` so far."""
        raise NotImplementedError

    def check_before_update(
        self,
        losses: Losses,
        n_terms: int,
        world: World,
        compute_dtype: torch.dtype | None,
        log: Callable[[str], None],
    ) -> None:
        """Check what a step has computed, before it changes the weights.

        Args:
            losses: of this rank.
            n_terms: of all ranks.

        Raises:
            RunError: the first one to change them does not start from the initial weights.
        """


class NextToken(Objective):
    """Terms are the targets: -log p of the next token."""

    def losses(self, model: AnyModel, micro_batch: MicroBatch | PairBatch) -> Losses:
        assert isinstance(micro_batch, MicroBatch)
        output = model(
            micro_batch.inputs, micro_batch.targets, micro_batch.document_ids, part=micro_batch.part
        )
        if isinstance(output, RoutedLoss):
            return Losses(output.loss_sum, output.loss_sum.new_empty(0), output.routed)
        return Losses(output, output.new_empty(0))
