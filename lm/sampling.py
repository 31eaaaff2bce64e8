"""Sampling from a model with a key-value cache: temperature, top-k, top-p."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.any_model import AnyModel
from lm.errors import ConfigError

_ATTENTION_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""All but cuDNN's, which makes a plan for each length."""


@contextmanager
def varying_lengths() -> Iterator[None]:
    """Use kernels that prepare nothing for a new length of the sequences, and compile nothing."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(_ATTENTION_BACKENDS):
        yield


@dataclass(frozen=True)
class Sampling:
    """How a token is selected from logits; by default from softmax(logits), the model's own.

    Each setting changes the logits, or what may be selected, in this order, as in transformers:
    """

    temperature: float = 1.0
    """The logits are divided by this: below 1 favors likely tokens, above 1 unlikely ones; at 0 the
    most likely token is selected."""
    top_k: int | None = None
    """Only the k most likely tokens remain."""
    top_p: float | None = None
    """Only the fewest most likely tokens remain whose probabilities, among those that top_k left,
    sum to at least top_p (nucleus sampling: Holtzman et al., 2020)."""


SAMPLES = Sampling(temperature=0.8, top_k=50)
"""Settings of a run's samples."""


def sample_token(logits: Tensor, settings: Sampling, generator: torch.Generator) -> int:
    """Sample a token from `logits` `(V,)`.

    Raises:
        ConfigError: the logits have inf or NaN.
    """
    if settings.temperature == 0:
        token = int(logits.argmax())  # of NaN, if there is one
        _require_finite(logits[token])
        return token
    logits = logits.float().cpu()
    if settings.top_k is None and settings.top_p is None:
        probabilities = _compute_probabilities(logits, settings.temperature)
        return int(torch.multinomial(probabilities, 1, generator=generator))
    candidates = find_candidates(logits, settings)
    drawn = torch.multinomial(candidates.weights, 1, generator=generator)
    return int(candidates.token_ids[drawn])


class Candidates(NamedTuple):
    """Tokens that can be selected, from the most to the least likely."""

    token_ids: Tensor
    """(n,)"""
    weights: Tensor
    """(n,), in proportion to their probabilities; 0 = removed"""


def find_candidates(logits: Tensor, settings: Sampling) -> Candidates:
    """Return the tokens that top_k and top_p leave of `logits` `(V,)`."""
    n_candidates = len(logits)
    if settings.top_k is not None:
        n_candidates = min(settings.top_k, n_candidates)
    sorted_logits, token_ids = logits.topk(n_candidates)
    weights = _compute_probabilities(sorted_logits, settings.temperature)
    if settings.top_p is not None:
        # A token is needed if those before it do not reach top_p, which float32 can round to 0.
        sum_before = weights.cumsum(dim=0) - weights
        is_left_out = sum_before >= settings.top_p
        is_left_out[0] = False
        weights = weights.masked_fill(is_left_out, 0.0)
    return Candidates(token_ids, weights)


def _compute_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature); raise ConfigError if that is not finite."""
    # Softmax is the same for logits that all differ by a constant. Those that are at most 0 cannot
    # overflow when divided by a small temperature, which must not be rounded to 0.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    shifted = logits - logits.max()
    probabilities = (shifted / temperature).softmax(dim=0)
    _require_finite(probabilities)
    return probabilities


def _require_finite(values: Tensor) -> None:
    if not values.isfinite().all():
        raise ConfigError("generation: the model computes inf or NaN; use another checkpoint")


@torch.no_grad()
def generate(
    model: AnyModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    seed: int,
    settings: Sampling = Sampling(),
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt`, one by one.

    Once the context is full, generation continues from its latest half. Under FSDP all ranks must
    call this with the same arguments.

    Args:
        prompt: from 1 to max_seq_len token ids.
        stop_ids: ids that end the text and are not yielded.

    Raises:
        ValueError: an empty prompt, or one that is longer than the context.
    """
    context = model.config.max_seq_len
    if not 0 < len(prompt) <= context:
        raise ValueError(f"the prompt has {len(prompt)} tokens, not 1 to {context}")
    generator = torch.Generator().manual_seed(seed)
    sequence = list(prompt)
    next_input = list(prompt)  # what is not in the cache yet
    cache = model.new_cache(min(context, len(prompt) + max_new_tokens))
    model.eval()
    for _ in range(max_new_tokens):
        is_context_full = cache.length + len(next_input) > context
        if is_context_full:
            n_kept = max(1, context // 2)
            cache = model.new_cache(context)
            next_input = sequence[-n_kept:]
        with varying_lengths():
            (logits,) = model(torch.tensor([next_input], device=device), cache=cache)
        token = sample_token(logits, settings, generator)
        if token in stop_ids:
            return
        yield token
        sequence.append(token)
        next_input = [token]


def before_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Return the tokens before the first stop id."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, tokens))
