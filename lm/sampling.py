"""Sampling from a model with a key-value cache: temperature, top-k, top-p, min-p, repetitions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.errors import ConfigError
from lm.transformers_model import AnyModel

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

    repetition_penalty: float = 1.0
    """The logits of the tokens in the sequence, of its prompt too, are divided by this if they are
    positive, else multiplied (Keskar et al., 2019); above 1 makes repetitions less likely."""
    temperature: float = 1.0
    """The logits are divided by this: below 1 favors likely tokens, above 1 unlikely ones; at 0 the
    most likely token is selected."""
    top_k: int | None = None
    """Only the k most likely tokens remain."""
    top_p: float | None = None
    """Only the fewest most likely tokens remain whose probabilities, among those that top_k left,
    sum to at least top_p (nucleus sampling: Holtzman et al., 2020)."""
    min_p: float | None = None
    """Only tokens remain that are at least min_p times as likely as the most likely one (Nguyen et
    al., 2025)."""


SAMPLES = Sampling(temperature=0.8, top_k=50)
"""Settings of a run's samples."""


def penalize_repetitions(logits: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """Return float32 `logits` `(V,)` with `Sampling.repetition_penalty` for `token_ids` `(T,)`."""
    logits = logits.float()
    repeated = logits[token_ids]
    penalized = torch.where(repeated < 0, repeated * penalty, repeated / penalty)
    return logits.index_put((token_ids,), penalized)  # an id that occurs twice has one value


def sample_tokens(
    logits: Tensor, settings: Sampling, generators: Sequence[torch.Generator]
) -> Tensor:
    """Sample one token per sequence from `logits` `(B, V)`, as `(B,)` int64 on the CPU.

    Args:
        logits: after `penalize_repetitions`.
        generators: one per sequence, so that its token does not depend on the others.

    Raises:
        ConfigError: the logits have inf or NaN.
    """
    if settings.temperature == 0:
        return logits.argmax(dim=-1).cpu()
    logits = logits.float().cpu()
    if settings.top_k is None and settings.top_p is None and settings.min_p is None:
        probabilities = _compute_probabilities(logits, settings.temperature)
        return _draw(probabilities, generators)
    candidates = find_candidates(logits, settings)
    drawn = _draw(candidates.weights, generators)
    return candidates.token_ids.gather(-1, drawn[:, None]).squeeze(-1)


def _draw(weights: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return an index per sequence, `(B,)`, in proportion to `weights` `(B, n)`."""
    drawn: list[Tensor] = []
    for own_weights, generator in zip(weights, generators, strict=True):
        drawn.append(torch.multinomial(own_weights, 1, generator=generator))
    return torch.cat(drawn)


class Candidates(NamedTuple):
    """Tokens that can be selected for each of B sequences, from the most to the least likely."""

    token_ids: Tensor
    """(B, n)"""
    weights: Tensor
    """(B, n), in proportion to their probabilities; 0 = removed"""


def find_candidates(logits: Tensor, settings: Sampling) -> Candidates:
    """Return the tokens that top_k, top_p and min_p leave of `logits` `(B, V)`."""
    n_candidates = logits.shape[-1]
    if settings.top_k is not None:
        n_candidates = min(settings.top_k, n_candidates)
    sorted_logits, token_ids = logits.topk(n_candidates)
    weights = _compute_probabilities(sorted_logits, settings.temperature)
    if settings.top_p is not None:
        # A token is needed if those before it do not reach top_p, which float32 can round to 0.
        sum_before = weights.cumsum(dim=-1) - weights
        is_left_out = sum_before >= settings.top_p
        is_left_out[:, 0] = False
        weights = weights.masked_fill(is_left_out, 0.0)
    if settings.min_p is not None:
        least = settings.min_p * weights[:, :1]
        weights = weights.masked_fill(weights < least, 0.0)
    return Candidates(token_ids, weights)


def _compute_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature); raise ConfigError if that is not finite."""
    # Softmax is the same for logits that all differ by a constant. Those that are at most 0 cannot
    # overflow when divided by a small temperature, which must not be rounded to 0.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = (shifted / temperature).softmax(dim=-1)
    if not probabilities.isfinite().all():
        raise ConfigError("generation: the model computes inf or NaN; use another checkpoint")
    return probabilities


@torch.no_grad()
def generate_batch(
    model: AnyModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    device: torch.device,
    seeds: Sequence[int],
    settings: Sampling = Sampling(),
    stop_ids: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield at each step a token per sequence, None for one in its prompt or complete.

    The prompts can differ in length. All sequences start at position 0 and advance together: the
    input of a sequence is its prompt, then the tokens sampled from it. Nothing is padded or masked,
    so each sequence is the same as if generated alone. A sequence is complete after max_new_tokens
    or at its first stop id. Once the context is full, generation continues from its latest half.
    Under FSDP all ranks must call this with the same arguments.

    Args:
        prompts: at least one token id each.
        max_new_tokens: per sequence.
        seeds: one per sequence.
        stop_ids: ids that complete a sequence and are not yielded.

    Raises:
        ValueError: an empty prompt.
    """
    if not all(prompts):
        raise ValueError("generation needs at least one token to start from")
    context = model.config.max_seq_len
    sequences = [prompt[-context:] for prompt in prompts]
    complete_lengths = [len(sequence) + max_new_tokens for sequence in sequences]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    length = min(len(sequence) for sequence in sequences)  # of the input of each, so far
    next_input = [sequence[:length] for sequence in sequences]  # its part that is not in the cache
    cache = model.new_cache(min(context, max(complete_lengths)))
    model.eval()
    while length < max(complete_lengths):
        is_context_full = cache.length + len(next_input[0]) > context
        if is_context_full:  # so all prompts were read, as none is longer
            n_kept = max(1, context // 2)
            cache = model.new_cache(context)
            next_input = [sequence[-n_kept:] for sequence in sequences]
        with varying_lengths():
            logits = model(torch.tensor(next_input, device=device), cache=cache)

        # The others are longer: still in their prompt.
        drawn = [i for i, sequence in enumerate(sequences) if len(sequence) == length]
        drawn_logits = logits[drawn].float()
        if settings.repetition_penalty != 1:
            for row, i in zip(drawn_logits, drawn, strict=True):
                token_ids = torch.tensor(sequences[i], device=row.device)
                row.copy_(penalize_repetitions(row, token_ids, settings.repetition_penalty))
        own_generators = [generators[i] for i in drawn]
        tokens = sample_tokens(drawn_logits, settings, own_generators).tolist()

        sampled: list[int | None] = [None] * len(sequences)
        for i, token in zip(drawn, tokens, strict=True):
            sequences[i].append(token)
            if token in stop_ids:
                complete_lengths[i] = min(complete_lengths[i], length)
            is_complete = length >= complete_lengths[i]
            if not is_complete:
                sampled[i] = token
        next_input = [sequence[length : length + 1] for sequence in sequences]
        length += 1
        yield sampled


def generate(
    model: AnyModel, prompt: list[int], max_new_tokens: int, *, seed: int, **options: Any
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt`, one by one.

    Args:
        options: those of `generate_batch`.
    """
    steps = generate_batch(model, [prompt], max_new_tokens, seeds=[seed], **options)
    for (token,) in steps:
        if token is not None:
            yield token


def before_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Return the tokens before the first stop id."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, tokens))
