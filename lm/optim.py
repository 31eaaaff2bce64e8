"""AdamW with gradient clipping, skipped steps and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lm.errors import RunError


class OptimConfig(BaseModel):
    """AdamW, its learning rate schedule, and clipping."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(1.0e-4, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="decay after warm-up; wsd = constant, then linear over the last fifth of the run"
    )
    warmup_steps: float = Field(0, ge=0, description="linear warm-up (steps; below 1 a fraction of the run)")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="final learning rate as a fraction of lr")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay of matrices; norms and biases have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of AdamW's mean of squared gradients")
    grad_clip: float | None = Field(None, gt=0, description="maximum gradient norm; larger gradients are scaled down")
    skip_nonfinite: int = Field(
        10, gt=0, description="abort after this many consecutive steps with inf or NaN gradients (checked at reports)"
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> OptimConfig:
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: {self.warmup_steps} is neither an integer nor a fraction below 1")
        return self


WSD_DECAY = 0.2
"""Fraction of the run over which wsd decays."""


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate at `step`, 0 <= step < max_steps.

    It rises linearly to `lr`, reached in the last warm-up step, and decays towards `lr * min_lr_ratio`, which the step
    after the last one would reach. wsd is the warmup-stable-decay schedule of Hu et al., MiniCPM (2024).
    """
    warmup = config.warmup_steps if config.warmup_steps >= 1 else round(config.warmup_steps * max_steps)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    decay_start = max(warmup, (1 - WSD_DECAY) * max_steps) if config.lr_schedule == "wsd" else warmup
    progress = max(0.0, (step - decay_start) / (max_steps - decay_start))  # 0 .. 1
    match config.lr_schedule:
        case "constant":
            decay = 0.0
        case "linear" | "wsd":
            decay = progress
        case "cosine":
            decay = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * decay)


def check_skipped(config: OptimConfig, step: int, n_consecutive: int) -> None:
    """Raise RunError if the optimizer skipped too many consecutive steps until `step`."""
    if n_consecutive >= config.skip_nonfinite:
        raise RunError(
            f"inf or NaN gradients in {n_consecutive} consecutive steps up to step {step} (skip_nonfinite:"
            f" {config.skip_nonfinite}): lower lr, set grad_clip, or use amp_dtype: bfloat16 or null",
            keys=("lr", "grad_clip", "amp_dtype", "skip_nonfinite"),
        )


ParamGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[OptimConfig, ParamGroups], torch.optim.Optimizer]


def fused_adamw(config: OptimConfig, groups: ParamGroups) -> torch.optim.Optimizer:
    """Return PyTorch's fused AdamW with its state, so that no step has to create it."""
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    for p in (p for group in groups for p in group["params"]):
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        adamw.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return adamw


class Optimizer:
    """An optimizer over sharded parameters that clips gradients and skips steps with inf or NaN gradients.

    The fused AdamW unscales, clips and skips in its kernel, without synchronizing with the device. Other optimizers
    read back whether the step is skipped, as under `torch.amp.GradScaler`. Parameters with `requires_grad=False` are
    left out.
    """

    def __init__(
        self,
        config: OptimConfig,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        make: MakeOptimizer = fused_adamw,
    ) -> None:
        self._grad_clip = config.grad_clip
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]
        decays = ((matrices, config.weight_decay), (vectors, 0.0))
        groups = [{"params": group, "weight_decay": decay} for group, decay in decays if group]
        self._optimizer = make(config, groups)
        if not self._optimizer.state:
            self._create_state()

    def _create_state(self) -> None:  # a checkpoint is loaded before the first step, which usually creates it
        for p in self._parameters.values():
            p.grad = torch.zeros_like(p)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self.zero_grad()
        for value in self.state_dict().values():
            value.zero_()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def clip_grad_norm(self, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient norm over all ranks, and from it how the next `step` scales the gradients.

        Returns:
            The norm before clipping, without the loss scale; and 1.0 if it is inf or NaN, which skips the next `step`,
            else 0.0. Both are scalars on the device.
        """
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._divisor = loss_scale.to(norm.device)
        norm = norm / self._divisor
        self._skipped = (~torch.isfinite(norm)).float()
        if self._grad_clip is not None:
            self._divisor = self._divisor * torch.clamp(norm / self._grad_clip, min=1.0)
        return norm, self._skipped

    def step(self, lr: float) -> None:
        """Update the parameters with unscaled and clipped gradients, or skip the step; see `clip_grad_norm`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # The attributes that torch.amp.GradScaler sets on fused optimizers.
            self._optimizer.grad_scale = self._divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = self._skipped  # type: ignore[attr-defined]
        elif self._skipped.item():
            return
        else:
            for gradient in self._gradients():
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).div_(self._divisor)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors, e.g. moments and step counts, by parameter name and key."""
        states = {name: self._optimizer.state[p] for name, p in self._parameters.items()}
        tensors = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
        return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
