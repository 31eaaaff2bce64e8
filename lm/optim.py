"""AdamW with gradient clipping, skipped steps and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lm.errors import RunError


class OptimConfig(BaseModel, frozen=True, extra="forbid"):
    """AdamW, its learning rate schedule, and clipping."""

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
    optim_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of AdamW's two moments; bfloat16 saves 4 bytes per parameter, for beta2 <= 0.99"
    )
    skip_nonfinite: int = Field(
        10, gt=0, description="abort after this many consecutive steps with inf or NaN gradients (checked at reports)"
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> OptimConfig:
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: {self.warmup_steps} is neither an integer nor a fraction below 1")
        if self.optim_dtype == "bfloat16" and self.beta2 > 0.99:
            problem = f"bfloat16 cannot hold changes as small as those of beta2 {self.beta2:g}"
            raise ValueError(f"optim_dtype: {problem}; use beta2 up to 0.99, e.g. 0.95, or float32")
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
    """Return PyTorch's fused AdamW, or `MixedAdamW`, with its state, so that no step has to create it."""
    dtype = getattr(torch, config.optim_dtype)
    is_supported = dtype == torch.float32 or (groups[0]["params"][0].is_cuda and torch.__version__ >= "2.13")
    make = torch.optim.AdamW if is_supported else MixedAdamW
    optimizer = make(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    for p in (p for group in groups for p in group["params"]):
        moments = {key: torch.zeros_like(p, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return optimizer


class MixedAdamW(torch.optim.AdamW):
    """Fused AdamW with moments in bfloat16, of which it converts those of one parameter at a time to float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have gradients."""
        assert closure is None
        scales = {"grad_scale": self.grad_scale, "found_inf": self.found_inf}  # type: ignore[attr-defined]
        for group in self.param_groups:
            factors = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")} | scales
            factors |= zip(("beta1", "beta2"), group["betas"], strict=True)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                mean, mean_sq = state["exp_avg"].float(), state["exp_avg_sq"].float()
                adamw([p], [p.grad], [mean], [mean_sq], [], [state["step"]], fused=True, has_complex=False, **factors)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(mean_sq)


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

    def clip_grad_norm(self, loss_scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """Compute the gradient norm over all ranks, and from it how the next `step` scales the gradients.

        Args:
            loss_scale: a tensor on the device, or 1.0 if the loss is not scaled.

        Returns:
            The norm before clipping, without the loss scale; and 1.0 if it is inf or NaN, which skips the next `step`,
            else 0.0. Both are scalars on the device.
        """
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._divisor = loss_scale.to(norm.device) if isinstance(loss_scale, Tensor) else None
        norm = norm if self._divisor is None else norm / self._divisor
        self._skipped = (~torch.isfinite(norm)).float()
        if self._grad_clip is not None:
            clip = torch.clamp(norm / self._grad_clip, min=1.0)
            self._divisor = clip if self._divisor is None else self._divisor * clip
        return norm, self._skipped

    def step(self, lr: float) -> None:
        """Update the parameters with unscaled and clipped gradients, or skip the step; see `clip_grad_norm`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # The attributes that torch.amp.GradScaler sets. With `grad_scale`, the kernel also writes the gradients.
            self._optimizer.grad_scale = self._divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = self._skipped  # type: ignore[attr-defined]
        elif self._skipped.item():
            return
        elif self._divisor is not None:
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
