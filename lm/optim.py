"""AdamW, its learning rate as a function of the step, and the one place where gradients become a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class OptimConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(1.0e-4, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="course after warm-up; wsd = constant, then linear over the last fifth of the run"
    )
    warmup_steps: float = Field(0, ge=0, description="linear warm-up (steps; below 1 a fraction of the run)")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of lr")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay of matrices; norms and biases have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of AdamW's mean of squared gradients")
    grad_clip: float | None = Field(None, gt=0, description="largest gradient norm; longer gradients are scaled down")
    skip_nonfinite: int = Field(
        10, gt=0, description="stop after so many steps in a row with inf or NaN gradients (looked at in reports)"
    )

    @model_validator(mode="after")
    def _whole_warmup(self) -> OptimConfig:
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: {self.warmup_steps} is neither a whole number nor a fraction below 1")
        return self


WSD_DECAY = 0.2
"""Part of the run over which wsd decays."""


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """The rate for `step` of a run of `max_steps`, with 0 <= step < max_steps.

    It rises in equal parts to `lr`, which the last step of the warm-up has, and falls from there to
    `lr * min_lr_ratio`, which the step behind the last one would have. wsd is the warm-up-stable-decay
    schedule of Hu et al., MiniCPM (2024).
    """
    warmup = config.warmup_steps if config.warmup_steps >= 1 else round(config.warmup_steps * max_steps)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    decay_start = max(warmup, (1 - WSD_DECAY) * max_steps) if config.lr_schedule == "wsd" else warmup
    decayed = max(0.0, (step - decay_start) / (max_steps - decay_start))  # 0 .. 1
    match config.lr_schedule:
        case "constant":
            fall = 0.0
        case "linear" | "wsd":
            fall = decayed
        case "cosine":
            fall = (1 - math.cos(math.pi * decayed)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * fall)


class Optimizer:
    """AdamW over sharded parameters, with unscaling, clipping and skipping inside the fused step.

    No step synchronises with the device: whether gradients are finite is decided there, from their norm
    over all shards, and the fused kernel leaves parameters and moments untouched where they are not.

    Args:
        parameters: (name, parameter) pairs, materialised.
    """

    def __init__(self, config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._clip = config.grad_clip
        self._named = dict(parameters)
        decay = [p for p in self._named.values() if p.ndim >= 2]
        rest = [p for p in self._named.values() if p.ndim < 2]
        groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        for p in self._named.values():  # made now, so that a checkpoint can be read into it
            self._adamw.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def step(self, lr: float, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Unscale and clip the gradients, update the parameters, drop the gradients.

        Args:
            lr: learning rate of this step.
            loss_scale: what the loss was multiplied with (a scalar tensor).

        Returns:
            The norm of the gradients over all ranks before clipping, and 1.0 where it is inf or NaN and
            nothing was updated, else 0.0; both scalars on the device.
        """
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        divisor = loss_scale.to(norm.device)
        norm = norm / divisor
        skipped = (~torch.isfinite(norm)).float()
        if self._clip is not None:
            divisor = divisor * torch.clamp(norm / self._clip, min=1.0)
        # The attributes by which torch.amp.GradScaler drives a fused optimizer: gradients are divided by
        # grad_scale, and nothing is updated where found_inf is 1.
        self._adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm, skipped

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter name: the live tensors, to be written or read into."""
        states = {name: self._adamw.state[p] for name, p in self._named.items()}
        return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
