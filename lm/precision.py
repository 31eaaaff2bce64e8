"""Compute dtype: what `amp_dtype` means on this device, FSDP's policy for it, and float16's loss scale.

Parameters stay float32 whatever the choice (the master copy the optimizer works on); FSDP gathers a copy
in the compute dtype, and gradients are reduced in float32.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lm.errors import ConfigError


class PrecisionConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    amp_dtype: Literal["auto", "bfloat16", "float16"] | None = Field(
        "auto", description="compute dtype; auto = bfloat16 where native, float16 on older GPUs, else null = float32"
    )
    float8: Literal["tensorwise", "rowwise"] | None = Field(
        None, description="the blocks' matrix products in 8 bits, scaled tensor by tensor or row by row (needs torchao)"
    )


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of forward and backward on `device`; None = float32 throughout.

    Raises:
        ConfigError: bfloat16 on a GPU without it (compute capability below 8), or float8 without what it needs.
    """
    dtype = _compute_dtype(config, device)
    if config.float8:
        if dtype != torch.bfloat16:
            raise ConfigError(f"float8: needs amp_dtype: bfloat16, here it is {dtype or torch.float32}")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError(f"float8: {torch.cuda.get_device_name(device)} has none; use float8: null")
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("float8: needs torchao: pip install torchao -c constraints.txt")
    return dtype


def _compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype | None:
    if config.amp_dtype is None:
        return None
    if config.amp_dtype == "float16":
        return torch.float16
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        if not native and config.amp_dtype == "bfloat16":
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"amp_dtype: {name} has no bfloat16; use amp_dtype: float16 or auto")
        return torch.bfloat16 if native else torch.float16
    if config.amp_dtype == "bfloat16" or _cpu_has_bfloat16():
        return torch.bfloat16
    return None


def _cpu_has_bfloat16() -> bool:
    if not torch.backends.mkldnn.is_available():  # e.g. macOS: the instructions are there, no fast kernel uses them
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # "bf16" is Arm's


def mixed_precision_policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """FSDP's policy for compute in `dtype`.

    Inputs are not cast: embeddings come out in `dtype` and stay in it, and what is float32 on purpose
    (the rotary angles) stays so.
    """
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


class LossScaler:
    """Keeps float16's small gradients above its smallest number: scales the loss, and adapts the scale.

    The scale halves when a step was skipped for inf or NaN and doubles after 2000 good ones
    (Micikevicius et al., 2018). It lives on the device and is decided from the all-ranks gradient norm,
    so it is the same everywhere without a synchronisation. For other dtypes it is 1 and never changes.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self.enabled = dtype == torch.float16
        self.scale = torch.full((), 2.0**16 if self.enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def update(self, skipped: Tensor) -> None:
        """Take note of a step; `skipped` is 1.0 where it was not made, else 0.0 (a scalar on the device)."""
        if not self.enabled:
            return
        self._good_steps = (self._good_steps + 1) * (1 - skipped)
        grow = (self._good_steps >= self.GROWTH_INTERVAL).float()
        self.scale = self.scale * (1 + grow) * (1 - 0.5 * skipped)
        self._good_steps = self._good_steps * (1 - grow)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}
