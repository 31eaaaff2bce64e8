"""Steps that are skipped: of inf or NaN gradients, spikes, and those that are known to be bad."""

from __future__ import annotations

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.runtime.world import World
from lm.training.config import WINDOW, SkipConfig


def check_skipped(config: SkipConfig, step: int, n_consecutive: int) -> None:
    """Raise ConfigError if the optimizer skipped too many consecutive steps until `step`."""
    if n_consecutive < config.skip_nonfinite:
        return
    cause = "inf or NaN gradients"
    remedy = "lower lr, set grad_clip, or use amp_dtype: bfloat16 or null"
    if config.skip_spikes is not None:
        cause += f" or spikes (skip_spikes: {config.skip_spikes:g})"
        remedy += "; if the loss or the gradient norm rose for good, raise or remove skip_spikes"
    steps = f"{n_consecutive} consecutive steps up to step {step}"
    limit = f"skip_nonfinite: {config.skip_nonfinite}"
    raise ConfigError(f"{cause} in {steps} ({limit}): {remedy}")


class SpikeFilter:
    """Finds spikes of the loss and the gradient norm, without synchronizing with the device.

    Its window is in every checkpoint. Steps that are skipped do not enter it, whatever the reason:
    one spike would widen it for those that follow. Until it is full, no step is a spike.
    """

    def __init__(self, config: SkipConfig, device: torch.device) -> None:
        self._n_deviations = config.skip_spikes
        self._window = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
        """losses and gradient norms, the newest last"""
        self._n_entered = torch.zeros((), dtype=torch.float64, device=device)

    def find_skipped(
        self,
        world: World,
        loss_sum: Tensor,
        n_terms: int,
        grad_norm: Tensor,
        nonfinite: Tensor,
    ) -> Tensor:
        """Return 1.0 if the optimizer has to skip this step, else 0.0, the same on every rank.

        Args:
            loss_sum: over the terms of this rank; all other values are over all ranks.
            nonfinite: 1.0 if a gradient is inf or NaN, so that the step is skipped anyway.
        """
        if self._n_deviations is None:
            return nonfinite
        own = torch.stack([loss_sum, grad_norm.to(loss_sum.device)]).double()
        ranks = world.all_gather(own)
        loss = ranks[:, 0].sum() / n_terms
        # Rank 0's norm: replicas compute it separately, and could differ in the last bit.
        values = torch.stack([loss, ranks[0, 1]])

        deviation, mean = torch.std_mean(self._window, dim=1)
        # Not a spike if all are `<=`, which is false for a loss that is NaN.
        is_usual = (values <= mean + self._n_deviations * deviation).all()
        is_spike = ~is_usual & (self._n_entered >= WINDOW)
        skipped = torch.maximum(nonfinite, is_spike.to(nonfinite))

        enters = (skipped == 0).to(values.device) & torch.isfinite(values).all()
        moved_on = torch.cat([self._window[:, 1:], values.unsqueeze(1)], dim=1)
        self._window = torch.where(enters, moved_on, self._window)
        self._n_entered = self._n_entered + enters
        return skipped

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors; none if spikes are not skipped."""
        if self._n_deviations is None:
            return {}
        return {"window": self._window, "n_entered": self._n_entered}
