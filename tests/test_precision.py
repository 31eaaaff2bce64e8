"""The compute dtype fits the device, parameters and reductions stay float32, and float16's loss scale adapts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from lm.errors import ConfigError
from lm.precision import LossScaler, PrecisionConfig, compute_dtype, mixed_precision_policy

CPU = torch.device("cpu")
MADE, SKIPPED = torch.zeros(()), torch.ones(())


def chosen(amp_dtype: str | None) -> torch.dtype | None:
    return compute_dtype(PrecisionConfig.model_validate({"amp_dtype": amp_dtype}), CPU)


def scaler(dtype: torch.dtype | None = torch.float16) -> LossScaler:
    return LossScaler(dtype, CPU)


def updated(holder: LossScaler, *steps: Tensor) -> float:
    for skipped in steps:
        holder.update(skipped)
    return holder.scale.item()


def test_a_dtype_that_is_named_is_taken() -> None:
    assert [chosen(name) for name in ("bfloat16", "float16", None)] == [torch.bfloat16, torch.float16, None]


def test_auto_is_bfloat16_on_a_cpu_with_instructions_for_it_and_else_float32() -> None:
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    fast = native and torch.backends.mkldnn.is_available()
    assert chosen("auto") == (torch.bfloat16 if fast else None)


def test_auto_is_the_default_and_other_names_are_refused() -> None:
    assert PrecisionConfig.model_validate({}).amp_dtype == "auto"
    with pytest.raises(ValidationError, match="amp_dtype"):
        chosen("float64")


def test_float8_needs_bfloat16_and_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"amp_dtype": "bfloat16", "float8": "tensorwise"}
    assert compute_dtype(PrecisionConfig.model_validate(settings), CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"^float8: needs amp_dtype: bfloat16, here it is torch.float32$"):
        compute_dtype(PrecisionConfig.model_validate(settings | {"amp_dtype": None}), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^float8: needs torchao: pip install torchao -c constraints.txt$"):
        compute_dtype(PrecisionConfig.model_validate(settings), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_gradients_are_reduced_in_float32(dtype: torch.dtype | None) -> None:
    policy = mixed_precision_policy(dtype)
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (dtype, torch.float32, False)


def test_the_scale_halves_behind_every_skipped_step() -> None:
    assert updated(scaler(), SKIPPED) == 2**15
    assert updated(scaler(), SKIPPED, SKIPPED, MADE, SKIPPED) == 2**13


def test_the_scale_doubles_behind_a_row_of_good_steps() -> None:
    row = [MADE] * LossScaler.GROWTH_INTERVAL
    holder = scaler()
    assert updated(holder, *row[1:]) == 2**16
    assert updated(holder, MADE) == 2**17
    assert updated(holder, *row[1:]) == 2**17
    assert updated(holder, MADE) == 2**18


def test_a_skipped_step_ends_the_row() -> None:
    row = [MADE] * (LossScaler.GROWTH_INTERVAL - 1)
    assert updated(scaler(), *row, SKIPPED, *row) == 2**15


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_other_dtypes_are_not_scaled(dtype: torch.dtype | None) -> None:
    holder = scaler(dtype)
    assert updated(holder, SKIPPED, *[MADE] * LossScaler.GROWTH_INTERVAL) == 1
    assert not holder.state_dict()


def test_a_scaler_that_is_handed_the_state_goes_on_as_the_first_would() -> None:
    row = [MADE] * (LossScaler.GROWTH_INTERVAL - 1)
    first, second = scaler(), scaler()
    updated(first, SKIPPED, *row)
    for name, tensor in second.state_dict().items():
        tensor.copy_(first.state_dict()[name])
    assert updated(second, MADE) == updated(first, MADE) == 2**16
