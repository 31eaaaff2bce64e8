"""Mixed precision: the compute dtype on this device, and loss scaling for float16.

Parameters are always float32, as the optimizer updates them; FSDP all-gathers a copy in the compute
dtype and reduces gradients in `reduce_dtype`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.launch.requirements import requires
from lm.training.config import PrecisionConfig


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype | None:
    """Return the dtype of forward and backward on `device`; None = float32.

    Raises:
        ConfigError: `device` does not support `amp_dtype` or `float8`.
    """
    native_dtype = best_dtype(device)
    dtype = choose_dtype(config.amp_dtype, native_dtype)
    if device.type == "cuda" and dtype == torch.bfloat16 and native_dtype != dtype:
        gpu = torch.cuda.get_device_name(device)
        problem = f"{gpu} does not support bfloat16; use amp_dtype: float16 or auto"
        raise ConfigError(f"amp_dtype: {problem}")
    if config.float8:
        _check_float8(dtype, device)
    return dtype


def choose_dtype(amp_dtype: str | None, best_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that `amp_dtype` names: for auto, the best one of the device."""
    if amp_dtype is None:
        return None
    if amp_dtype == "auto":
        return best_dtype
    return getattr(torch, amp_dtype)


def best_dtype(device: torch.device) -> torch.dtype | None:
    """Return the fastest dtype of `device` for training; None = float32."""
    if device.type == "cuda":
        # Tensor cores have bfloat16 since Ampere.
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float16
    if _cpu_multiplies_faster_in_bfloat16():
        return torch.bfloat16
    return None


def _cpu_multiplies_faster_in_bfloat16() -> bool:
    # macOS has no mkldnn: its CPUs have the instructions, but no fast kernel uses them.
    if not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    # Products by AVX-512 alone (avx512_bf16) take 1.8 to 6 times as long as in float32.
    names = ("amx_bf16", "bf16")  # the second one is Arm's
    return any(capabilities.get(name, False) for name in names)


def _check_float8(dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise ConfigError unless float8 products can be computed on `device`."""
    # Some versions of CUDA have rowwise kernels with bfloat16 results only.
    if dtype != torch.bfloat16:
        found = dtype or torch.float32
        problem = f"needs amp_dtype: bfloat16, here it is {found}; or use float8: null"
        raise ConfigError(f"float8: {problem}")
    # Tensor cores have float8 since Ada (8.9) and Hopper (9.0).
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(f"float8: {gpu} does not support float8; use float8: null")
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"float8: {requires('torchao -c constraints.txt')}")


class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al., 2018), without host-device syncs.

    The loss is multiplied by the scale before backward, so that small gradients do not become zero
    in float16. A step whose gradients overflow is skipped and halves the scale; the scale doubles
    after `GROWTH_INTERVAL` consecutive optimizer steps. It follows from the gradient norm over all
    ranks, so it is the same on every rank. For other dtypes it is the number 1.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self.scale: Tensor | float = 1.0
        if dtype == torch.float16:
            self.scale = torch.full((), 2.0**16, device=device)
        self._steps_since_change = torch.zeros((), device=device)

    def update(self, nonfinite: Tensor) -> None:
        """Update the scale after a step.

        Args:
            nonfinite: a scalar, 1.0 if a gradient was inf or NaN, else 0.0.

        The conditions are factors, as an `if` would wait for the device.
        """
        if not isinstance(self.scale, Tensor):
            return
        steps = (self._steps_since_change + 1) * (1 - nonfinite)
        grows = (steps >= self.GROWTH_INTERVAL).float()
        doubled = self.scale * (1 + grows)
        self.scale = doubled * (1 - 0.5 * nonfinite)
        self._steps_since_change = steps * (1 - grows)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors; none for dtypes that are not scaled."""
        if not isinstance(self.scale, Tensor):
            return {}
        return {"scale": self.scale, "good_steps": self._steps_since_change}
