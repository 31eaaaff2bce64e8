"""Tokens follow the requested distribution and length, and the same seed gives the same tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lm.errors import ConfigError
from lm.sampling import (
    Sampling,
    find_candidates,
    generate,
    sample_token,
)
from model import ModelConfig, Transformer

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def draw(times: int = 5_000, logits: Tensor = LOGITS, **settings: Any) -> Tensor:
    """Return the frequency of each token in `times` samples."""
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_token(logits, Sampling(**settings), generator) for _ in range(times)]
    return torch.tensor(drawn).bincount(minlength=len(logits)) / times


def tiny(**changes: Any) -> Transformer:
    settings = {
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 2,
        "vocab_size": 32,
        "max_seq_len": 16,
    } | changes
    torch.manual_seed(0)
    model = Transformer(ModelConfig.model_validate(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    return model


def continued(
    model: Transformer,
    prompt: list[int],
    count: int,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    **settings: Any,
) -> list[int]:
    how: dict[str, Any] = {"settings": Sampling(**settings), "stop_ids": stop_ids}
    return list(generate(model, prompt, count, device=CPU, seed=seed, **how))


# ---- one token


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sample_frequencies_equal_the_probabilities(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(dim=0)
    torch.testing.assert_close(draw(temperature=temperature), expected, atol=0.03, rtol=0)


def test_temperature_0_selects_the_most_likely_token() -> None:
    assert draw(temperature=0, times=10)[1] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 2}], ids=str)
def test_logits_that_are_not_finite_are_refused(settings: dict[str, Any], value: float) -> None:
    logits = LOGITS.clone()
    logits[3] = value
    with pytest.raises(ConfigError, match="inf or NaN"):
        draw(times=1, logits=logits, **settings)


def test_top_k_keeps_only_k_of_equally_likely_tokens() -> None:
    assert (draw(logits=torch.zeros(10), top_k=3) > 0).sum() == 3


@pytest.mark.parametrize("name", ["top_p", "temperature"])
def test_values_that_float32_rounds_to_zero_leave_the_most_likely(name: str) -> None:
    for value in (1e-46, 5e-324):
        settings: dict[str, Any] = {name: value}
        assert draw(**settings).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"top_k": 40, "top_p": 0.5},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_probabilities_equal_transformers(settings: dict[str, Any]) -> None:
    processors: dict[str, Any] = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
    }
    torch.manual_seed(0)
    logits = 3 * torch.randn(100, 200)
    for row in logits:
        expected = row[None]
        for name, value in settings.items():
            expected = processors[name](value)(torch.tensor([[0]]), expected)
        expected = expected[0].softmax(dim=0)
        candidates = find_candidates(row, Sampling(**settings))
        weights = torch.zeros_like(row).scatter(0, candidates.token_ids, candidates.weights)
        assert (weights > 0).equal(expected > 0)
        torch.testing.assert_close(weights / weights.sum(), expected, atol=0, rtol=2e-6)


# ---- a text


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "rope", "n_kv_heads": 1, "sliding_window": 4}], ids=str
)
def test_generate_greedily_equals_an_argmax_loop(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    tokens = [3, 1, 4]
    while len(tokens) < 16:
        tokens.append(int(model.eval()(torch.tensor([tokens]))[0, -1].argmax()))
    assert continued(model, [3, 1, 4], 13, temperature=0) == tokens[3:]


def test_generate_draws_the_same_tokens_from_a_seed() -> None:
    model = tiny()
    first = continued(model, [1], 12, seed=5, top_k=20, top_p=0.95)
    assert continued(model, [1], 12, seed=5, top_k=20, top_p=0.95) == first
    assert continued(model, [1], 12, seed=6, top_k=20, top_p=0.95) != first


@pytest.mark.parametrize("context", [1, 2, 7, 8])
def test_generate_continues_from_half_of_a_full_context(context: int) -> None:
    model = tiny(max_seq_len=context).eval()
    generator = torch.Generator().manual_seed(7)
    tokens, start = [9], 0
    for _ in range(30):
        if len(tokens) - start > context:
            start = len(tokens) - max(1, context // 2)
        logits = model(torch.tensor([tokens[start:]]))[0, -1]
        tokens.append(sample_token(logits, Sampling(), generator))
    assert continued(model, [9], 30, seed=7) == tokens[1:]


@pytest.mark.parametrize("n_tokens", [0, 17])
def test_generate_refuses_a_prompt_that_does_not_fit(n_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"has {n_tokens} tokens, not 1 to 16"):
        continued(tiny(), [1] * n_tokens, 5)


def test_generate_yields_up_to_max_new_tokens() -> None:
    model = tiny()
    assert continued(model, [1], 0) == []
    endless = generate(model, [1], 10**9, device=CPU, seed=0)
    assert len([next(endless) for _ in range(3)]) == 3


def test_generate_ends_before_the_first_stop_id() -> None:
    model = tiny()
    tokens = continued(model, [3, 1], 40)
    for stop_ids in ({tokens[20]}, set(tokens[5:30]), {tokens[0]}):
        first = next(at for at, token in enumerate(tokens) if token in stop_ids)
        assert continued(model, [3, 1], 40, stop_ids=stop_ids) == tokens[:first]
    assert (
        continued(model, [3, 1], 40, stop_ids={3, 99} - set(tokens)) == tokens
    )  # also a stop id in the prompt


def test_generate_uses_neither_dropout_nor_gradients() -> None:
    model = tiny(dropout=0.5).train()
    assert continued(model, [1], 8, temperature=0) == continued(tiny(), [1], 8, temperature=0)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
