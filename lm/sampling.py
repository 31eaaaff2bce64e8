"""Sampling from a model with a key-value cache, temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.errors import RunError
from model import KVCache, Transformer

_ATTENTION_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""All but cuDNN's, which makes a plan for each length, and the length changes at each step."""


def sample_tokens(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample one token per sequence from `logits` `(B, V)`, as `(B,)` int64 on the CPU.

    The model's distribution is softmax(logits). Three settings change it, in this order:

    - top_k removes all but the k most likely tokens.
    - temperature divides the logits. Below 1 it favors likely tokens; at 0 the most likely one is
      selected; above 1 it favors unlikely ones.
    - top_p removes all but the fewest most likely tokens whose probabilities, among those that
      top_k left, sum to at least top_p (nucleus sampling: Holtzman et al., 2020).

    Raises:
        RunError: the logits have inf or NaN.
    """
    if temperature == 0:
        return logits.argmax(dim=-1).cpu()
    logits = logits.float().cpu()
    if top_k is None and top_p is None:
        probabilities = _compute_probabilities(logits, temperature)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    # Sorted from the most to the least likely, tokens are removed from the end.
    n_candidates = logits.shape[-1]
    if top_k is not None:
        n_candidates = min(top_k, n_candidates)
    sorted_logits, token_ids = logits.topk(n_candidates)  # each (B, n_candidates)
    probabilities = _compute_probabilities(sorted_logits, temperature)
    if top_p is not None:
        # A token is needed if those before it do not reach top_p; so the first always is.
        sum_before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(sum_before >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)  # it divides by their sum
    return token_ids.gather(-1, drawn).squeeze(-1)


def _compute_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature); raise RunError if that is not finite."""
    # Softmax is the same for logits that all differ by a constant. Those that are at most 0 cannot
    # overflow when divided by a small temperature.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = (shifted / temperature).softmax(dim=-1)
    if not probabilities.isfinite().all():
        raise RunError("generation: the model computes inf or NaN; use another checkpoint")
    return probabilities


@torch.no_grad()
def generate_batch(
    model: Transformer,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    device: torch.device,
    seeds: Sequence[int],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
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
        temperature: divisor of the logits; 0 = greedy.
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
    cache = KVCache(min(context, max(complete_lengths)))
    model.eval()
    while length < max(complete_lengths):
        is_context_full = cache.length + len(next_input[0]) > context
        if is_context_full:  # so all prompts were read, as none is longer
            n_kept = max(1, context // 2)
            cache = KVCache(context)
            next_input = [sequence[-n_kept:] for sequence in sequences]
        # Each length would be compiled.
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(_ATTENTION_BACKENDS):
            logits = model(torch.tensor(next_input, device=device), cache=cache)

        sampled: list[int | None] = [None] * len(sequences)
        for i, sequence in enumerate(sequences):
            is_in_prompt = len(sequence) > length
            if is_in_prompt:
                continue
            own_logits = logits[i : i + 1]
            token = sample_tokens(own_logits, temperature, top_k, top_p, generators[i]).item()
            sequence.append(int(token))
            if token in stop_ids:
                complete_lengths[i] = min(complete_lengths[i], length)
            is_complete = length >= complete_lengths[i]
            if not is_complete:
                sampled[i] = sequence[-1]
        next_input = [sequence[length : length + 1] for sequence in sequences]
        length += 1
        yield sampled


def generate(
    model: Transformer, prompt: list[int], max_new_tokens: int, *, seed: int, **options: Any
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt`, one by one.

    Args:
        options: those of `generate_batch`.
    """
    steps = generate_batch(model, [prompt], max_new_tokens, seeds=[seed], **options)
    for (token,) in steps:
        if token is not None:
            yield token
