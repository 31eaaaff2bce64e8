"""Steps that are skipped: of inf or NaN gradients, spikes, and those that are known to be bad."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, field_validator
from torch import Tensor

from lm.errors import ConfigError
from lm.fields import Config, Logged
from lm.runtime.world import World

WINDOW = 128
"""Steps whose losses and gradient norms a step is compared with."""

StepNumber = Annotated[int, Field(strict=True, ge=1)]
StepRange = tuple[StepNumber, StepNumber]
"""The first and the last step, as reports number them: a run's first step is 1."""


class SkipConfig(Config, frozen=True):
    """Which steps are skipped, so that they change neither weights nor moments."""

    skip_nonfinite: Logged[int] = Field(
        10,
        gt=0,
        description="steps with inf or NaN gradients are skipped; abort after this many consecutive"
        " steps that were skipped for these or as spikes (checked at reports)",
    )
    skip_spikes: Logged[float | None] = Field(
        None,
        gt=0,
        description="skip steps whose loss or gradient norm is more than this many standard"
        f" deviations above its mean over the last {WINDOW} steps that were not skipped, e.g. 6;"
        " null = none",
        json_schema_extra={"aliases": ["sigma_factor"]},
    )
    skip_steps: Logged[list[StepRange] | None] = Field(
        None,
        description="[first, last] steps whose batches are read but not trained on, e.g."
        " [[150, 160]]; a run's first step is 1",
        json_schema_extra={"aliases": ["steps_to_skip"]},
    )

    @field_validator("skip_steps")
    @classmethod
    def _check_order(cls, ranges: list[StepRange] | None) -> list[StepRange] | None:
        end = 0
        for first, last in ranges or ():
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it starts")
            if first <= end:
                problem = f"[{first}, {last}] starts before the end of the range before it, {end}"
                raise ValueError(f"{problem}; sort the ranges, and merge those that overlap")
            end = last
        return ranges

    def check_last_step(self, max_steps: int) -> None:
        """Raise ConfigError if `skip_steps` goes beyond the last step."""
        if not self.skip_steps:
            return
        first, last = self.skip_steps[-1]
        if last > max_steps:
            problem = f"[{first}, {last}] goes beyond the last step, {max_steps}"
            raise ConfigError(f"skip_steps: {problem}; end it earlier, or raise max_steps")

    def lists_step(self, step: int) -> bool:
        """Return whether `skip_steps` contains `step`, of which a run's first is 1."""
        return any(first <= step <= last for first, last in self.skip_steps or ())


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
        n_target_tokens: int,
        grad_norm: Tensor,
        nonfinite: Tensor,
    ) -> Tensor:
        """Return 1.0 if the optimizer has to skip this step, else 0.0, the same on every rank.

        Args:
            loss_sum: over the target tokens of this rank; all other values are over all ranks.
            nonfinite: 1.0 if a gradient is inf or NaN, so that the step is skipped anyway.
        """
        if self._n_deviations is None:
            return nonfinite
        own = torch.stack([loss_sum, grad_norm.to(loss_sum.device)]).double()
        ranks = world.all_gather(own)
        loss = ranks[:, 0].sum() / n_target_tokens
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
