"""AdamW and Muon, with gradient clipping and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lm.any_model import AnyModel
from lm.shards import shard_group, to_local
from lm.training.config import OptimConfig
from lm.training.float8 import compute_scales, has_float8_shards
from lm.training.muon import Muon, orthogonalization_dtype
from lm.training.roles import find_decayed, find_matrices
from lm.training.transfer import UNSCALED, Scale, Transfer


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


class AdamW:
    """PyTorch's fused AdamW over this rank's shards.

    `torch.optim.AdamW` would step over DTensors: PyTorch 2.11 then keeps an object per parameter
    and step forever (pytorch#188174).

    Args:
        scales: of the learning rate, the weight decay and epsilon of each parameter.
    """

    def __init__(self, config: OptimConfig, scales: Mapping[nn.Parameter, Scale]) -> None:
        self._config = config
        self._groups: dict[Scale, list[nn.Parameter]] = {}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        moment_dtype = getattr(torch, config.optim_dtype)
        for p, scale in scales.items():
            self._groups.setdefault(scale, []).append(p)
            self.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p, dtype=moment_dtype),
                "exp_avg_sq": torch.zeros_like(p, dtype=moment_dtype),
            }
        takes_mixed_dtypes = next(iter(scales)).is_cuda and torch.__version__ >= "2.13"
        self._converts = moment_dtype != torch.float32 and not takes_mixed_dtypes
        """whether the kernel takes the moments in float32 only"""

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor | None, skipped: Tensor) -> None:
        """Update the parameters that have gradients; see `Optimizer.step`."""
        for scale, parameters in self._groups.items():
            with_gradients = [p for p in parameters if p.grad is not None]
            if self._converts:
                for p in with_gradients:
                    self._update([p], scale, lr, divisor, skipped)
            else:
                self._update(with_gradients, scale, lr, divisor, skipped)

    def _update(
        self,
        parameters: Sequence[nn.Parameter],
        scale: Scale,
        lr: float,
        divisor: Tensor | None,
        skipped: Tensor,
    ) -> None:
        means = [to_local(self.state[p]["exp_avg"]) for p in parameters]
        mean_squares = [to_local(self.state[p]["exp_avg_sq"]) for p in parameters]
        kept = [*means, *mean_squares]
        if self._converts:
            means = [mean.float() for mean in means]
            mean_squares = [mean_square.float() for mean_square in mean_squares]
        adamw(
            [to_local(p) for p in parameters],
            [to_local(cast(Tensor, p.grad)) for p in parameters],
            means,
            mean_squares,
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True,
            grad_scale=divisor,  # the kernel also writes the gradients that it has divided
            found_inf=skipped,
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=lr * scale.lr,
            weight_decay=self._config.weight_decay * scale.weight_decay,
            eps=self._config.adam_eps * scale.eps,
            maximize=False,
        )
        if self._converts:
            for moment, value in zip(kept, [*means, *mean_squares], strict=True):
                moment.copy_(value)


class GradientMeasures(NamedTuple):
    """Scalars on the device of the gradients."""

    norm: Tensor
    """before clipping, without the loss scale"""
    nonfinite: Tensor
    """1.0 if the norm is inf or NaN, else 0.0"""


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
        self._model = model
        self._grad_clip = config.grad_clip
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shard_group = shard_group(next(iter(self._parameters.values())))
        self._has_float8_shards = has_float8_shards(self._parameters.values())
        muons: set[nn.Parameter] = set()
        if config.optimizer == "muon":
            muons = find_matrices(cast(AnyModel, model))
        self._multipliers: dict[str, float] = {}
        of_adamw: dict[nn.Parameter, Scale] = {}
        of_muon: dict[nn.Parameter, Scale] = {}
        decayed = find_decayed(model)
        for name, p in self._parameters.items():
            scale = transfer.scale(name)
            self._multipliers[name] = scale.multiplier
            if p in muons:
                of_muon[p] = scale
            elif p in decayed:
                of_adamw[p] = scale
            else:
                of_adamw[p] = scale._replace(weight_decay=0.0)
        self._adamw = AdamW(config, of_adamw)
        self._muon: Muon | None = None
        if of_muon:
            dtype = orthogonalization_dtype(compute_dtype)
            state_dtype = getattr(torch, config.optim_dtype)
            self._muon = Muon(
                of_muon, config.muon_momentum, config.weight_decay, state_dtype, dtype
            )

    @torch.no_grad()
    def _grad_norm(self) -> Tensor:
        """Return the norm over all ranks of the gradients that unfolded parameters would have.

        See `Scale.folded`: these are the gradients times the multipliers, whose norm hardly depends
        on the width, so that one `grad_clip` fits all.
        """
        gradients: dict[float, list[Tensor]] = {}
        for name, p in self._parameters.items():
            if p.grad is not None:
                gradients.setdefault(self._multipliers[name], []).append(to_local(p.grad))
        norms = []
        for multiplier, its_gradients in gradients.items():
            # As torch.nn.utils.get_total_norm, which keeps objects of DTensors (see `AdamW`).
            of_each = torch.stack(torch._foreach_norm(its_gradients))
            if self._shard_group is not None:
                squares = of_each**2
                dist.all_reduce(squares, group=self._shard_group)
                of_each = squares**0.5
            norms.append(torch.linalg.vector_norm(of_each) * multiplier)
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack(norms))

    def measure_gradients(self, loss_scale: Tensor | float) -> GradientMeasures:
        """Return the gradient norm over all ranks.

        Args:
            loss_scale: a tensor on the device, or 1.0 if the loss is not scaled.
        """
        norm = self._grad_norm()
        if isinstance(loss_scale, Tensor):
            norm = norm / loss_scale.to(norm.device)
        return GradientMeasures(norm, (~torch.isfinite(norm)).float())

    def clipping_divisor(self, norm: Tensor, loss_scale: Tensor | float) -> Tensor | None:
        """Return what `step` divides the gradients by, so that their norm is at most `grad_clip`.

        That is loss_scale x max(1, norm / grad_clip); None = 1.
        """
        divisor: Tensor | None = None
        if isinstance(loss_scale, Tensor):
            divisor = loss_scale.to(norm.device)
        if self._grad_clip is not None:
            excess = torch.clamp(norm / self._grad_clip, min=1.0)
            divisor = excess if divisor is None else divisor * excess
        return divisor

    def step(self, lr: float, divisor: Tensor | None, skipped: Tensor) -> None:
        """Update the parameters with the gradients divided by `divisor`.

        Args:
            divisor: a scalar on the device of the gradients; None = 1.
            skipped: another; 1.0 = change nothing.
        """
        with torch.profiler.record_function("Optimizer.step"):
            self._adamw.step(lr, divisor, skipped)
            if self._muon is not None:
                self._muon.step(lr, divisor, skipped)
            if self._has_float8_shards:
                compute_scales(self._model)

    @property
    def has_updated(self) -> bool:
        """Whether a step has changed the weights: one was not skipped. Waits for the device."""
        return any(bool(state["step"] > 0) for state in self._adamw.state.values())

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors, the moments and step counts, by parameter name and key."""
        states = dict(self._adamw.state)
        if self._muon is not None:
            states |= self._muon.state
        tensors = {}
        for name, parameter in self._parameters.items():
            for key, value in states[parameter].items():
                tensors[f"{name}.{key}"] = value
        return tensors
