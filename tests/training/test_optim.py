"""The learning rate is a function of the step; a step is AdamW's with clipping, or nothing."""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lm.model_config import ModelConfig
from lm.runtime.world import MeshShape, World
from lm.training.optim import OptimConfig, Optimizer, learning_rate
from model import Transformer
from tests.support.hyperparameters import TINY
from tests.support.ranks import in_world

SCHEDULES = ["constant", "linear", "cosine", "wsd"]


def config(**settings: Any) -> OptimConfig:
    return OptimConfig.model_validate(settings)


def rates(max_steps: int, **settings: Any) -> list[float]:
    return [learning_rate(config(**settings), step, max_steps) for step in range(max_steps)]


# ---- learning rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
    ],
)
def test_learning_rate_of_a_short_run(schedule: str, expected: list[float]) -> None:
    assert rates(10, lr=1, lr_schedule=schedule, warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(
        expected
    )


def test_learning_rate_cosine_is_half_a_period() -> None:
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(100)]
    assert rates(100, lr=2, lr_schedule="cosine", min_lr_ratio=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "expected"), [(8, [1, 1, 0.5]), (9, [8 / 9, 1, 1])])
def test_learning_rate_wsd_is_continuous(warmup: int, expected: list[float]) -> None:
    assert rates(10, lr=1, lr_schedule="wsd", warmup_steps=warmup)[7:] == pytest.approx(expected)


@pytest.mark.parametrize("decay_steps", [4, 0.4])
def test_learning_rate_wsd_decays_in_decay_steps(decay_steps: float) -> None:
    expected = [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(10, lr=1, lr_schedule="wsd", decay_steps=decay_steps) == pytest.approx(expected)


@pytest.mark.parametrize("key", ["warmup_steps", "decay_steps"])
def test_steps_above_1_are_integers(key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key}: 1.5 is neither"):
        config(**{key: 1.5})


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 300),
    st.one_of(st.integers(0, 400), st.floats(0, 1, exclude_max=True)),
    st.floats(0, 1),
    st.floats(1e-6, 1),
)
def test_learning_rate_rises_to_lr_and_decays_to_the_minimum(
    schedule: str, max_steps: int, warmup: float, floor: float, peak: float
) -> None:
    schedule_rates = rates(
        max_steps, lr=peak, lr_schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor
    )
    top = min(max_steps, round(warmup * max_steps) if warmup < 1 else int(warmup))
    rising, falling = schedule_rates[:top], schedule_rates[top:]
    assert rising == sorted(set(rising))
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= peak for rate in schedule_rates)
    assert all(rate >= floor * peak * (1 - 1e-12) for rate in falling)
    if falling:
        assert falling[0] == peak
        assert not rising or rising[-1] == peak


# ---- optimizer


each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
"""of the moments"""


def network(frozen: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    return model


def fill_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = gradient if parameter.requires_grad else None


def take_step(
    optimizer: Optimizer, lr: float = 0.1, loss_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    scale = torch.tensor(loss_scale) if loss_scale != 1 else 1.0
    grad_norm, skipped = optimizer.measure_gradients(scale)
    optimizer.step(lr, optimizer.clipping_divisor(grad_norm, scale), skipped)
    optimizer.zero_grad()
    return grad_norm, skipped


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each_dtype
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_optimizer_step_equals_pytorchs(dtype: str, clip: float | None, scale: float) -> None:
    model, reference_model = network("2.weight"), network("2.weight")
    values = {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "adam_eps": 0.1}
    settings = config(**values, grad_clip=clip, optim_dtype=dtype)
    optimizer = Optimizer(settings, model)
    trained = [p for p in reference_model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == n], "weight_decay": decay}
        for n, decay in ((2, 0.1), (1, 0.0))
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=0.1, foreach=True)
    tolerance = 2e-3 if dtype == "bfloat16" else 1e-6  # of updates of up to 0.05 in five steps
    for step in range(5):
        lr = 0.01 * (step + 1)
        fill_gradients(model, step, scale)
        fill_gradients(reference_model, step)
        grad_norm, skipped = take_step(optimizer, lr, scale)
        expected = nn.utils.clip_grad_norm_(trained, clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(grad_norm, expected)
        assert skipped == 0
        assert all(p.grad is None for p in model.parameters())
        for mine, other in zip(model.parameters(), reference_model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=tolerance)
    assert torch.equal(model.get_parameter("2.weight"), network().get_parameter("2.weight"))
    assert not [name for name in optimizer.state_dict() if name.startswith("2.weight")]


@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizer_skips_a_nonfinite_gradient(dtype: str, value: float, clip: float | None) -> None:
    model = network()
    optimizer = Optimizer(config(grad_clip=clip, beta2=0.95, optim_dtype=dtype), model)
    fill_gradients(model, 0)
    take_step(optimizer)
    weights, state = copies(model.state_dict()), copies(optimizer.state_dict())
    fill_gradients(model, 1)
    gradient = model.get_parameter("2.bias").grad
    assert gradient is not None
    gradient[3] = value
    grad_norm, skipped = take_step(optimizer)
    assert skipped == 1
    assert not grad_norm.isfinite()
    assert equal(model.state_dict(), weights)
    assert equal(optimizer.state_dict(), state)


@each_dtype
def test_optimizer_skipped_steps_do_not_change_later_ones(dtype: str) -> None:
    states = []
    for gradients in ([0, 1, 2], [None, 0, None, 1, None, 2]):
        model = network()
        optimizer = Optimizer(config(beta2=0.95, optim_dtype=dtype), model)
        for seed in gradients:
            fill_gradients(model, seed or 0, math.nan if seed is None else 1.0)
            take_step(optimizer)
        states.append((model.state_dict(), optimizer.state_dict()))
    assert equal(states[0][0], states[1][0])
    assert equal(states[0][1], states[1][1])


@each_dtype
def test_optimizer_state_dict_resumes(dtype: str) -> None:
    keys = ("step", "exp_avg", "exp_avg_sq")
    first, second = network(), network()
    optimizer = Optimizer(config(beta2=0.95, optim_dtype=dtype), first)
    assert optimizer.state_dict().keys() == {
        f"{name}.{key}" for name, _ in first.named_parameters() for key in keys
    }
    for seed in range(3):
        fill_gradients(first, seed)
        take_step(optimizer)
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(config(beta2=0.95, optim_dtype=dtype), second)
    assert equal(second.state_dict(), first.state_dict())
    for name, tensor in resumed.state_dict().items():  # as loading a checkpoint does
        tensor.copy_(optimizer.state_dict()[name])
    for model, of_model in ((first, optimizer), (second, resumed)):
        fill_gradients(model, 9)
        take_step(of_model)
    assert equal(first.state_dict(), second.state_dict())
    assert equal(optimizer.state_dict(), resumed.state_dict())


OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"optimizer": "muon"},
    {"optim_dtype": "bfloat16", "beta2": 0.95},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OPTIMIZERS)
def test_optimizer_keeps_no_objects_of_sharded_parameters(settings: dict[str, Any]) -> None:
    def count_kept(world: World) -> Counter[str]:
        model = Transformer(ModelConfig.model_validate(TINY))
        fully_shard(model, mesh=world.device_mesh(MeshShape(replicate=1, shard=1)))
        optimizer = Optimizer(config(**settings), model)
        tokens = torch.zeros(1, 16, dtype=torch.int64)

        def take_steps(n_steps: int) -> None:
            for _ in range(n_steps):
                model(tokens, tokens).backward()
                take_step(optimizer)
            gc.collect()

        take_steps(6)  # what is cached
        gc.freeze()
        try:
            take_steps(20)
            return Counter(type(thing).__name__ for thing in gc.get_objects())
        finally:
            gc.unfreeze()

    kept = {kind: n for kind, n in in_world(count_kept).items() if n >= 20}
    assert not kept
