"""How evenly the experts of a mixture are used, and the bias that evens it out."""

from __future__ import annotations

import torch
from torch import Tensor

from lm.any_model import AnyModel
from lm.runtime.world import World
from model import Routed


class ExpertBalance:
    """Counts the tokens of each expert in a step; with `router_balance: bias`, moves the bias.

    The bias of an expert moves up after steps in which it processed fewer tokens than the mean, and
    down after others (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, algorithm 1). Counts
    are integers, so it is the same on any number of ranks. Nothing waits for the device, except for
    `metrics`.
    """

    def __init__(self, model: AnyModel, world: World) -> None:
        self._model = model
        self._world = world
        self._counts: Tensor | None = None
        """of this rank in this step so far, or in the last one, see `Routed`"""

    def start_step(self) -> None:
        """Count from zero."""
        self._counts = None

    def add(self, routed: Routed | None) -> None:
        """Count the tokens of a micro-batch; None = of a model without experts."""
        if routed is None:
            return
        if self._counts is None:
            self._counts = torch.zeros_like(routed.counts)
        self._counts += routed.counts

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Move the bias, if there is one.

        Args:
            skipped: 1.0 if the optimizer skipped the step, so that the bias stays, else 0.0.
        """
        model = self._model
        if self._counts is None or model.router_bias is None:
            return
        counts = self._sum_over_ranks(self._counts)  # n_layers E
        lacking = counts.sum(dim=1, keepdim=True) - counts.shape[1] * counts  # E times as many
        step = model.config.balance_rate * (1 - skipped)
        model.router_bias += (lacking.sign() * step).to(model.router_bias.device)

    def metrics(self) -> dict[str, float]:
        """Return what is reported of the last step, on all ranks together."""
        if self._counts is None:
            return {}
        counts = self._sum_over_ranks(self._counts).cpu()
        config = self._model.config
        assert config.n_experts is not None
        n_tokens = counts.sum(dim=1) / config.experts_per_token
        busiest = counts.amax(dim=1) / n_tokens.clamp(min=1)
        return {
            "busiest_expert_percent": 100 * busiest.max().item(),
            "idle_experts": (counts == 0).sum().item(),
        }

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        return self._world.all_gather(counts).sum(dim=0)
