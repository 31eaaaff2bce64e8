"""The learning rate is a function of the step; a step is AdamW's with clipping, or nothing at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from lm.optim import OptimConfig, Optimizer, learning_rate

SCHEDULES = ["constant", "linear", "cosine", "wsd"]
ONE = torch.ones(())


def config(**settings: Any) -> OptimConfig:
    return OptimConfig.model_validate(settings)


def course(max_steps: int, **settings: Any) -> list[float]:
    return [learning_rate(config(**settings), step, max_steps) for step in range(max_steps)]


# ---- the learning rate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
    ],
)
def test_the_course_of_a_short_run(schedule: str, expected: list[float]) -> None:
    assert course(10, lr=1, lr_schedule=schedule, warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(expected)


def test_cosine_is_half_a_wave_from_the_peak_to_the_floor() -> None:
    rates = course(100, lr=2, lr_schedule="cosine", min_lr_ratio=0.1)
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(100)]
    assert rates == pytest.approx(expected)
    assert rates[50] == pytest.approx(1.1)


def test_wsd_is_constant_for_four_fifths_and_then_a_line() -> None:
    rates = course(100, lr=1, lr_schedule="wsd", warmup_steps=10)
    assert rates[9:81] == [1.0] * 72
    assert rates[80:] == pytest.approx([1 - step / 20 for step in range(20)])


def test_wsd_does_not_jump_behind_a_warmup_that_reaches_into_its_last_fifth() -> None:
    assert course(10, lr=1, lr_schedule="wsd", warmup_steps=8)[7:] == pytest.approx([1, 1, 0.5])
    assert course(10, lr=1, lr_schedule="wsd", warmup_steps=9)[8:] == pytest.approx([1, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warmup_below_1_is_a_fraction_of_the_run(schedule: str) -> None:
    whole, fraction = (course(200, lr_schedule=schedule, warmup_steps=warmup) for warmup in (20, 0.1))
    assert fraction == whole


def test_constant_is_the_rate_itself() -> None:
    assert set(course(50, lr=3e-4, min_lr_ratio=0.3)) == {3e-4}


@settings(deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 300),
    st.one_of(st.integers(0, 400), st.floats(0, 1, exclude_max=True)),
    st.floats(0, 1),
    st.floats(1e-6, 1),
)
def test_every_course_rises_to_the_peak_and_falls_no_lower_than_its_floor(
    schedule: str, max_steps: int, warmup: float, floor: float, peak: float
) -> None:
    rates = course(max_steps, lr=peak, lr_schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)
    top = min(max_steps, round(warmup * max_steps) if warmup < 1 else int(warmup))
    rising, falling = rates[:top], rates[top:]
    assert rising == sorted(set(rising))
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= peak for rate in rates)
    assert all(rate >= floor * peak * (1 - 1e-12) for rate in falling)
    if falling:
        assert falling[0] == peak
        assert not rising or rising[-1] == peak


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 1.5}, "warmup_steps: 1.5 is neither a whole number nor a fraction below 1"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"lr": 0}, "lr"),
        ({"min_lr_ratio": 1.1}, "min_lr_ratio"),
        ({"lr_schedule": "exponential"}, "lr_schedule"),
        ({"beta2": 1}, "beta2"),
        ({"grad_clip": 0}, "grad_clip"),
        ({"skip_nonfinite": 0}, "skip_nonfinite"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**settings)


# ---- the step ------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10))


def fill_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_is_adamw_behind_clip_grad_norm(clip: float | None, scale: float) -> None:
    ours, theirs = network(), network()
    optimizer = Optimizer(config(weight_decay=0.1, beta1=0.8, beta2=0.95, grad_clip=clip), ours.named_parameters())
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.8, 0.95)
    )
    for step in range(5):
        lr = 0.01 * (step + 1)
        fill_gradients(ours, step, scale)
        fill_gradients(theirs, step)
        norm, skipped = optimizer.step(lr, torch.tensor(scale))
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(norm, expected)
        assert skipped == 0
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_step_drops_the_gradients() -> None:
    model = network()
    optimizer = Optimizer(config(), model.named_parameters())
    fill_gradients(model, 0)
    optimizer.step(0.1, ONE)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_one_gradient_that_is_not_finite_leaves_everything_as_it_was_to_the_bit(
    poison: float, clip: float | None
) -> None:
    model = network()
    optimizer = Optimizer(config(grad_clip=clip), model.named_parameters())
    fill_gradients(model, 0)
    optimizer.step(0.1, ONE)
    weights, state = copies(model.state_dict()), copies(optimizer.state_dict())
    fill_gradients(model, 1)
    gradient = model.get_parameter("2.bias").grad
    assert gradient is not None
    gradient[3] = poison
    norm, skipped = optimizer.step(0.1, ONE)
    assert skipped == 1
    assert not norm.isfinite()
    assert equal(model.state_dict(), weights)
    assert equal(optimizer.state_dict(), state)


def test_a_skipped_step_leaves_no_trace_in_later_ones() -> None:
    histories = []
    for gradients in ([0, 1, 2], [0, None, 1, None, 2]):
        model = network()
        optimizer = Optimizer(config(), model.named_parameters())
        for seed in gradients:
            fill_gradients(model, seed or 0, math.nan if seed is None else 1.0)
            optimizer.step(0.1, ONE)
        histories.append((model.state_dict(), optimizer.state_dict()))
    assert equal(histories[0][0], histories[1][0])
    assert equal(histories[0][1], histories[1][1])


def test_matrices_decay_and_vectors_do_not() -> None:
    model = network()
    optimizer = Optimizer(config(weight_decay=0.5), model.named_parameters())
    before = copies(model.state_dict())
    fill_gradients(model, 0, scale=0.0)
    optimizer.step(0.1, ONE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.ndim == 2 else 1.0))


def test_the_state_names_every_parameters_moments_and_step() -> None:
    model = network()
    names = Optimizer(config(), model.named_parameters()).state_dict().keys()
    expected = {f"{name}.{key}" for name, _ in model.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")}
    assert names == expected


def test_an_optimizer_that_is_handed_the_state_goes_on_as_the_first_would() -> None:
    first = network()
    optimizer = Optimizer(config(), first.named_parameters())
    for seed in range(3):
        fill_gradients(first, seed)
        optimizer.step(0.1, ONE)
    second = network()
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(config(), second.named_parameters())
    for name, tensor in resumed.state_dict().items():  # read into the live tensors, as a checkpoint is
        tensor.copy_(optimizer.state_dict()[name])
    for model, its in ((first, optimizer), (second, resumed)):
        fill_gradients(model, 9)
        its.step(0.1, ONE)
    assert equal(first.state_dict(), second.state_dict())
    assert equal(optimizer.state_dict(), resumed.state_dict())
