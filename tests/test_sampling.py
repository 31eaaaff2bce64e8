"""Tokens follow the requested distribution and length, and the same seed gives the same tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lm.sampling import (
    Sampling,
    find_candidates,
    generate,
    generate_batch,
    penalize_repetitions,
    sample_tokens,
)
from model import ModelConfig, Transformer

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def draw(times: int = 20_000, logits: Tensor = LOGITS, **settings: Any) -> Tensor:
    """Return the frequency of each token in `times` samples."""
    generator = torch.Generator().manual_seed(0)
    drawn = sample_tokens(logits.expand(times, -1), Sampling(**settings), [generator] * times)
    return drawn.bincount(minlength=len(logits)) / times


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
    torch.testing.assert_close(draw(temperature=temperature), expected, atol=0.01, rtol=0)


def test_temperature_0_selects_the_most_likely_token() -> None:
    assert draw(temperature=0, times=10)[1] == 1


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (99, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_the_k_most_likely_tokens_in_proportion(top_k: int, kept: list[int]) -> None:
    expected = torch.zeros(5)
    expected[kept] = LOGITS[kept].softmax(dim=0)
    torch.testing.assert_close(draw(top_k=top_k), expected, atol=0.01, rtol=0)


def test_top_k_keeps_only_k_of_equally_likely_tokens() -> None:
    assert (draw(logits=torch.zeros(10), top_k=3) > 0).sum() == 3


# The probabilities are 0.636, 0.234, 0.086, 0.032, 0.012, of tokens 1, 2, 0, 3, 4.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [1]),
        (0.63, [1]),
        (0.64, [1, 2]),
        (0.88, [0, 1, 2]),
        (0.99, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_the_probability(top_p: float, kept: list[int]) -> None:
    expected = torch.zeros(5)
    expected[kept] = LOGITS[kept].softmax(dim=0)
    torch.testing.assert_close(draw(top_p=top_p), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["top_p", "temperature"])
def test_values_that_float32_rounds_to_zero_leave_the_most_likely(name: str) -> None:
    for value in (1e-46, 5e-324):
        settings: dict[str, Any] = {name: value}
        assert draw(**settings).nonzero().flatten().tolist() == [1]


def test_top_p_applies_after_top_k() -> None:
    assert draw(top_k=2, top_p=0.7)[1] == 1  # of the two, the first has 0.73
    assert (draw(top_k=2, top_p=0.74) > 0).sum() == 2


def test_sample_uses_the_logits_of_each_sequence() -> None:
    logits = torch.full((3, 4), -torch.inf)
    logits[[0, 1, 2], [3, 0, 2]] = 0.0
    settings = Sampling(top_p=0.9)
    assert sample_tokens(logits, settings, [torch.Generator()] * 3).tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 50}, {"top_p": 0.9, "min_p": 0.01}],
    ids=str,
)
def test_tokens_of_a_batch_equal_those_of_each_sequence_alone(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 5000)
    seeds = [3, 1, 3, 0, 2]
    together = [torch.Generator().manual_seed(seed) for seed in seeds]
    alone = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(10):
        tokens = sample_tokens(logits, Sampling(**settings), together)
        for i, generator in enumerate(alone):
            assert sample_tokens(logits[i : i + 1], Sampling(**settings), [generator]) == tokens[i]


def transformers_probabilities(logits: Tensor, **settings: Any) -> Tensor:
    """Return what transformers' `generate` samples from after the tokens of `REPEATED`."""
    processors = {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    for name, processor in processors.items():
        if name in settings:
            input_ids: Any = REPEATED.expand(len(logits), -1)
            logits = processor(settings[name])(input_ids, logits)
    return logits.softmax(dim=-1)


REPEATED = torch.tensor([3, 7, 3, 150, 9])


@pytest.mark.parametrize("penalty", [0.7, 1.1, 2.0])
def test_repetition_penalty_equals_transformers_to_the_bit(penalty: float) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(200)
    input_ids: Any = REPEATED[None]
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(input_ids, logits[None])
    assert penalize_repetitions(logits, REPEATED, penalty).equal(expected[0])
    assert not expected[0].equal(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.0},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 0.5, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.3, "temperature": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_probabilities_equal_transformers(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(100, 200)
    expected = transformers_probabilities(logits, **settings)
    ours = Sampling(**settings)
    penalized = [penalize_repetitions(row, REPEATED, ours.repetition_penalty) for row in logits]
    candidates = find_candidates(torch.stack(penalized), ours)
    weights = torch.zeros_like(logits).scatter(-1, candidates.token_ids, candidates.weights)
    assert (weights > 0).equal(expected > 0)
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(probabilities, expected, atol=0, rtol=2e-6)


def test_min_p_applies_after_the_temperature() -> None:
    # The second most likely token is exp(-1 / temperature) as likely as the first.
    assert draw(min_p=0.4)[1] == 1
    assert (draw(min_p=0.4, temperature=2.0) > 0).sum() == 2


def test_generate_penalizes_tokens_of_the_prompt() -> None:
    model = tiny()
    repeated = continued(model, [3, 1, 4], 1, temperature=0)
    settings = {"temperature": 0, "repetition_penalty": 100.0}
    assert continued(model, [3, 1, 4, *repeated], 8, **settings) != continued(
        model, [3, 1, 4, *repeated], 8, temperature=0
    )
    tokens = [*repeated, *continued(model, repeated, 10, **settings)]
    assert len(set(tokens)) == len(tokens)


# ---- one sequence


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
        logits = model(torch.tensor([tokens[start:]]))[:, -1]
        tokens.append(int(sample_tokens(logits, Sampling(), [generator])))
    assert continued(model, [9], 30, seed=7) == tokens[1:]


def test_generate_truncates_a_long_prompt_to_its_end() -> None:
    model = tiny(max_seq_len=8)
    prompt = list(range(20))
    assert continued(model, prompt, 5, temperature=0) == continued(
        model, prompt[-8:], 5, temperature=0
    )


def test_generate_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        continued(tiny(), [], 5)


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


# ---- several sequences

SHAPES: list[dict[str, Any]] = [
    {},
    {"positions": "rope", "n_kv_heads": 1},
    {"positions": "rope", "sliding_window": 4},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"top_k": 20, "top_p": 0.95}, {"repetition_penalty": 1.5, "min_p": 0.1}],
    ids=str,
)
def test_generate_batch_continues_prompts_as_each_alone(
    changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = tiny(**changes)
    prompts = [[1], [3, 1, 4, 1, 5], list(range(16)), list(range(30)), [3, 1]]
    seeds = [3, 3, 4, 5, 3]
    for count, stop_ids in ((0, ()), (1, ()), (40, ()), (40, {5, 6, 7})):
        how: dict[str, Any] = {"settings": Sampling(**settings), "stop_ids": stop_ids}
        steps = list(generate_batch(model, prompts, count, device=CPU, seeds=seeds, **how))
        sequences = [
            [step[i] for step in steps if step[i] is not None] for i in range(len(prompts))
        ]
        assert sequences == [
            continued(model, prompts[i], count, seeds[i], stop_ids, **settings)
            for i in range(len(prompts))
        ]


def test_generate_batch_does_not_change_the_prompts() -> None:
    prompts = [[1], [2, 3]]
    list(generate_batch(tiny(), prompts, 5, device=CPU, seeds=[0, 0]))
    assert prompts == [[1], [2, 3]]
