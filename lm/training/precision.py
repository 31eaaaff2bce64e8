"""Mixed precision: the compute dtype on this device, and loss scaling for float16.

Parameters are always float32, as the optimizer updates them; FSDP all-gathers a copy in the compute
dtype and reduces gradients in `reduce_dtype`.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from lm.errors import ConfigError
from lm.fields import Logged


class PrecisionConfig(BaseModel, frozen=True, extra="forbid"):
    """Compute dtype."""

    amp_dtype: Logged[Literal["auto", "bfloat16", "float16"] | None] = Field(
        "auto",
        description="compute dtype; auto = bfloat16 if supported, float16 on older GPUs, else null = float32",
        json_schema_extra={"aliases": ["dtype", "bf16"]},
    )
    float8: Logged[Literal["tensorwise", "rowwise"] | None] = Field(
        None,
        description="float8 recipe for the blocks' matrix products, with scales per tensor or per row (needs torchao)",
    )


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype | None:
    """Return the dtype of forward and backward on `device`, or None for float32; raise ConfigError if unsupported."""
    dtype = _compute_dtype(config, device)
    if config.float8:
        if dtype != torch.bfloat16:
            problem = f"float8: needs amp_dtype: bfloat16, here it is {dtype or torch.float32}; or use float8: null"
            raise ConfigError(problem)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            gpu = torch.cuda.get_device_name(device)
            raise ConfigError(f"float8: {gpu} does not support float8; use float8: null")
        if importlib.util.find_spec("torchao") is None:
            problem = "float8: needs torchao, which is not installed: pip install torchao -c constraints.txt"
            raise ConfigError(problem)
    return dtype


def _compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype | None:
    if config.amp_dtype is None:
        return None
    if config.amp_dtype == "float16":
        return torch.float16
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        if not native and config.amp_dtype == "bfloat16":
            gpu = torch.cuda.get_device_name(device)
            problem = f"amp_dtype: {gpu} does not support bfloat16; use amp_dtype: float16 or auto"
            raise ConfigError(problem)
        return torch.bfloat16 if native else torch.float16
    if config.amp_dtype == "bfloat16" or _cpu_has_bfloat16():
        return torch.bfloat16
    return None


def _cpu_has_bfloat16() -> bool:
    # macOS has no mkldnn: its CPUs have the instructions, but no fast kernel uses them. "bf16" is
    # Arm's.
    capabilities = torch.cpu.get_capabilities() if torch.backends.mkldnn.is_available() else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al., 2018), without synchronizing with the device.

    The scale halves after a skipped step and doubles after `GROWTH_INTERVAL` consecutive optimizer
    steps. It follows from the gradient norm over all ranks, so it is the same on every rank. For
    other dtypes it is the number 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self.scale: Tensor | float = (
            torch.full((), 2.0**16, device=device) if dtype == torch.float16 else 1.0
        )
        self._steps_since_change = torch.zeros((), device=device)

    def update(self, skipped: Tensor) -> None:
        """Update the scale after a step; `skipped` is 1.0 if the optimizer skipped it, else 0.0 (a scalar)."""
        if not isinstance(self.scale, Tensor):
            return
        self._steps_since_change = (self._steps_since_change + 1) * (1 - skipped)
        grow = (self._steps_since_change >= self.GROWTH_INTERVAL).float()
        self.scale = self.scale * (1 + grow) * (1 - 0.5 * skipped)
        self._steps_since_change = self._steps_since_change * (1 - grow)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors; none for dtypes that are not scaled."""
        if not isinstance(self.scale, Tensor):
            return {}
        return {"scale": self.scale, "good_steps": self._steps_since_change}
