"""The compute dtype suits the device, and float16's loss scale adapts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.training.precision import LossScaler, PrecisionConfig, compute_dtype

CPU = torch.device("cpu")
INTERVAL = LossScaler.GROWTH_INTERVAL


def dtype_of(**settings: Any) -> torch.dtype | None:
    return compute_dtype(PrecisionConfig.model_validate(settings), CPU)


def scale_after(scaler: LossScaler, *skipped: int) -> float:
    for value in skipped:
        scaler.update(torch.tensor(float(value)))
    return float(scaler.scale)


def test_amp_dtype_that_is_named_is_used() -> None:
    assert [dtype_of(amp_dtype=name) for name in ("bfloat16", "float16", None)] == [
        torch.bfloat16,
        torch.float16,
        None,
    ]


def test_amp_dtype_default_on_cpus() -> None:
    capabilities = torch.cpu.get_capabilities()
    is_faster = any(capabilities.get(name) for name in ("amx_bf16", "bf16"))
    expected = torch.bfloat16 if is_faster and torch.backends.mkldnn.is_available() else None
    assert dtype_of() == dtype_of(amp_dtype="auto") == expected


def test_cpus_with_bfloat16_by_avx512_alone_compute_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert dtype_of() is None
    with_amx = {"avx512_bf16": True, "amx_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: with_amx)
    assert dtype_of() == torch.bfloat16


def test_float8_needs_bfloat16_and_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dtype_of(amp_dtype="bfloat16", float8="tensorwise") == torch.bfloat16
    with pytest.raises(
        ConfigError, match=r"^float8: .*amp_dtype: bfloat16, here it is torch\.float32"
    ):
        dtype_of(amp_dtype=None, float8="tensorwise")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^float8: .*pip install torchao"):
        dtype_of(amp_dtype="bfloat16", float8="tensorwise")


def test_scaler_halves_and_doubles() -> None:
    almost = [0] * (INTERVAL - 1)
    for skipped, exponent in (([1], 15), ([1, 1, 0, 1], 13), ([*almost, 1, *almost], 15)):
        assert scale_after(LossScaler(torch.float16, CPU), *skipped) == 2.0**exponent
    scaler = LossScaler(torch.float16, CPU)
    scales = [
        scale_after(scaler, *almost),
        scale_after(scaler, 0),
        scale_after(scaler, *almost),
        scale_after(scaler, 0),
    ]
    assert scales == [2.0**16, 2.0**17, 2.0**17, 2.0**18]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_scaler_of_other_dtypes_is_1(dtype: torch.dtype | None) -> None:
    scaler = LossScaler(dtype, CPU)
    assert scale_after(scaler, 1, *[0] * INTERVAL) == 1
    assert not scaler.state_dict()


def test_scaler_state_dict_resumes() -> None:
    first, second = LossScaler(torch.float16, CPU), LossScaler(torch.float16, CPU)
    scale_after(first, 1, *[0] * (INTERVAL - 1))
    for name, tensor in second.state_dict().items():
        tensor.copy_(first.state_dict()[name])
    assert scale_after(second, 0) == scale_after(first, 0) == 2**16
