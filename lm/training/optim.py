"""AdamW and Muon, with gradient clipping and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lm.training.config import OptimConfig
from lm.training.muon import Muon, orthogonalization_dtype
from lm.training.roles import find_decayed, find_matrices
from lm.training.transfer import UNSCALED, Scale, Transfer
from lm.transformers_model import AnyModel


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate at `step`, 0 <= step < max_steps.

    It rises linearly to `lr`, reached in the last warm-up step, and decays towards `lr *
    min_lr_ratio`, which the step after the last one would reach. wsd is the warmup-stable-decay
    schedule of Hu et al., MiniCPM (2024).
    """
    warmup = config.warmup_steps
    if warmup < 1:
        warmup = round(warmup * max_steps)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)

    decay_start = warmup
    if config.lr_schedule == "wsd":
        decay_steps = config.decay_steps
        if decay_steps < 1:
            decay_steps *= max_steps
        decay_start = max(warmup, max_steps - decay_steps)
    progress = max(0.0, (step - decay_start) / (max_steps - decay_start))  # 0 .. 1
    match config.lr_schedule:
        case "constant":
            decay = 0.0
        case "linear" | "wsd":
            decay = progress
        case "cosine":
            decay = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * decay)


def group_by_scale(
    parameters: Mapping[nn.Parameter, Scale], weight_decay: float, eps: float
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups, one for each scale."""
    groups: dict[Scale, dict[str, Any]] = {}
    for p, scale in parameters.items():
        if scale not in groups:
            groups[scale] = {
                "params": [],
                "lr_scale": scale.lr,
                "weight_decay": weight_decay * scale.weight_decay,
                "eps": eps * scale.eps,
            }
        groups[scale]["params"].append(p)
    return list(groups.values())


def create_adamw(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """Return PyTorch's fused AdamW, or `MixedAdamW`, for parameter groups.

    Its state exists, so that no step has to create it.
    """
    moment_dtype = getattr(torch, config.optim_dtype)
    parameters = [p for group in groups for p in group["params"]]
    kernel_takes_mixed_dtypes = parameters[0].is_cuda and torch.__version__ >= "2.13"
    adamw_type = torch.optim.AdamW
    if moment_dtype != torch.float32 and not kernel_takes_mixed_dtypes:
        adamw_type = MixedAdamW
    betas = (config.beta1, config.beta2)
    optimizer = adamw_type(groups, lr=config.lr, betas=betas, fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=moment_dtype),
            "exp_avg_sq": torch.zeros_like(p, dtype=moment_dtype),
        }
    return optimizer


def create_muon(
    config: OptimConfig, scales: Mapping[nn.Parameter, Scale], compute_dtype: torch.dtype | None
) -> Muon:
    """Return Muon for matrices and their scales."""
    dtype = orthogonalization_dtype(compute_dtype)
    state_dtype = getattr(torch, config.optim_dtype)
    return Muon(scales, config.muon_momentum, config.weight_decay, state_dtype, dtype)


class MixedAdamW(torch.optim.AdamW):
    """Fused AdamW with moments in bfloat16, where the kernel wants them in float32.

    It converts those of one parameter at a time.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        mean = state["exp_avg"].float()
        mean_sq = state["exp_avg_sq"].float()
        beta1, beta2 = group["betas"]
        adamw(
            [p],
            [p.grad],  # pyright: ignore[reportArgumentType]
            [mean],
            [mean_sq],
            [],
            [state["step"]],
            fused=True,
            grad_scale=self.grad_scale,  # type: ignore[attr-defined]
            found_inf=self.found_inf,  # type: ignore[attr-defined]
            has_complex=False,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(mean_sq)


class GradientMeasures(NamedTuple):
    """Scalars on the device of the gradients."""

    norm: Tensor
    """before clipping, without the loss scale"""
    nonfinite: Tensor
    """1.0 if the norm is inf or NaN, else 0.0"""
    divisor: Tensor | None
    """what gives the gradients of the loss, clipped: the loss scale, times norm / `grad_clip` if
    that is above 1; None = 1"""


class Optimizer:
    """AdamW, or Muon and AdamW, that clips gradients, and can skip a step.

    Unscales, clips and skips without synchronizing with the device. Parameters with
    `requires_grad=False` are left out.

    Args:
        model: with `blocks`, of which Muon updates the matrices.
        transfer: of the learning rate, the weight decay and epsilon.
        compute_dtype: of forward and backward; None = float32.
    """

    def __init__(
        self,
        config: OptimConfig,
        model: nn.Module,
        transfer: Transfer = UNSCALED,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._grad_clip = config.grad_clip
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        of_muon: set[nn.Parameter] = set()
        if config.optimizer == "muon":
            of_muon = find_matrices(cast(AnyModel, model))
        decayed = find_decayed(model)
        self._multipliers: dict[str, float] = {}
        matrices: dict[nn.Parameter, Scale] = {}
        hidden_matrices: dict[nn.Parameter, Scale] = {}
        vectors: dict[nn.Parameter, Scale] = {}
        for name, p in self._parameters.items():
            scale = transfer.scale(name)
            self._multipliers[name] = scale.multiplier
            if p in of_muon:
                hidden_matrices[p] = scale
            elif p in decayed:
                matrices[p] = scale
            else:
                vectors[p] = scale
        groups = [
            *group_by_scale(matrices, config.weight_decay, config.adam_eps),
            *group_by_scale(vectors, 0.0, config.adam_eps),
        ]
        self._adamw = create_adamw(config, groups)
        self._muon: Muon | None = None
        if hidden_matrices:
            self._muon = create_muon(config, hidden_matrices, compute_dtype)

    def _grad_norm(self) -> Tensor:
        """Return the norm over all ranks of the gradients that unfolded parameters would have.

        See `Scale.folded`: these are the gradients times the multipliers, whose norm hardly depends
        on the width, so that one `grad_clip` fits all.
        """
        gradients: dict[float, list[Tensor]] = {}
        for name, p in self._parameters.items():
            if p.grad is not None:
                gradients.setdefault(self._multipliers[name], []).append(p.grad)
        norms = []
        for multiplier, its_gradients in gradients.items():
            norm = torch.nn.utils.get_total_norm(its_gradients)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            norms.append(norm * multiplier)
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack(norms))

    def measure_gradients(self, loss_scale: Tensor | float) -> GradientMeasures:
        """Return the gradient norm over all ranks, and what `step` divides the gradients by.

        Args:
            loss_scale: a tensor on the device, or 1.0 if the loss is not scaled.
        """
        norm = self._grad_norm()
        divisor: Tensor | None = None
        if isinstance(loss_scale, Tensor):
            divisor = loss_scale.to(norm.device)
            norm = norm / divisor
        nonfinite = (~torch.isfinite(norm)).float()
        if self._grad_clip is not None:
            clip = torch.clamp(norm / self._grad_clip, min=1.0)
            divisor = clip if divisor is None else divisor * clip
        return GradientMeasures(norm, nonfinite, divisor)

    def step(self, lr: float, divisor: Tensor | None, skipped: Tensor) -> None:
        """Update the parameters with the gradients divided by `divisor`.

        Args:
            divisor: a scalar on the device of the gradients; None = 1.
            skipped: another; 1.0 = change nothing.
        """
        # The attributes that torch.amp.GradScaler sets, and the kernel reads. With `grad_scale`, it
        # also writes the gradients that it has divided.
        self._adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self._adamw.step()
        if self._muon is not None:
            self._muon.step(lr, divisor, skipped)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors, the moments and step counts, by parameter name and key."""
        states: dict[Tensor, dict[str, Tensor]] = dict(self._adamw.state)
        if self._muon is not None:
            states |= self._muon.state
        tensors = {}
        for name, parameter in self._parameters.items():
            for key, value in states[parameter].items():
                tensors[f"{name}.{key}"] = value
        return tensors
