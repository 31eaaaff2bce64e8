"""Sampling from a model with a key-value cache, temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.errors import RunError
from model import KVCache, Transformer

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample one token per sequence from `logits` `(B, V)`, as `(B,)` int64 on the CPU.

    Temperature 0 selects the most likely token. top_k samples from the k most likely tokens, top_p
    from the fewest of these whose probabilities sum to at least top_p (Holtzman et al., 2020).
    """
    if temperature == 0:
        return logits.argmax(dim=-1).cpu()
    logits, ids, vocab_size = logits.float().cpu(), None, logits.shape[-1]
    if top_k or top_p:
        logits, ids = logits.topk(min(top_k or vocab_size, vocab_size))  # descending
    probabilities = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(
        dim=-1
    )  # no overflow
    if not probabilities.isfinite().all():
        raise RunError("generation: the model computes inf or NaN; use another checkpoint")
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)


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
    """Yield at each step one token per sequence, None for a sequence that is still in its prompt or complete.

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
    prompt_lengths = list(map(len, sequences))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    ends = [n + max_new_tokens for n in prompt_lengths]  # lengths of the complete sequences
    length = min(prompt_lengths)  # of the input so far, `next_input` included
    next_input = [sequence[:length] for sequence in sequences]
    cache = KVCache(min(context, max(ends)))
    model.eval()
    while length < max(ends):
        if (
            cache.length + len(next_input[0]) > context
        ):  # all prompts have been read, as none is longer
            cache, next_input = (
                KVCache(context),
                [sequence[-max(1, context // 2) :] for sequence in sequences],
            )
        # Lengths change at each step: compiling, or planning cuDNN's attention, for each would be
        # slow.
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(_KERNELS):
            logits = model(torch.tensor(next_input, device=device), cache=cache)
        sampled: list[int | None] = [None] * len(sequences)
        for i, sequence in enumerate(sequences):
            if len(sequence) == length:
                sequence.append(
                    int(choose(logits[i : i + 1], temperature, top_k, top_p, generators[i]).item())
                )
                if sequence[-1] in stop_ids:
                    ends[i] = min(ends[i], length)
                if length < ends[i]:
                    sampled[i] = sequence[-1]
        next_input = [sequence[length : length + 1] for sequence in sequences]
        length += 1
        yield sampled


def generate(
    model: Transformer, prompt: list[int], max_new_tokens: int, *, seed: int, **options: Any
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens that continue `prompt`, one by one; for `options` see `generate_batch`."""
    steps = generate_batch(model, [prompt], max_new_tokens, seeds=[seed], **options)
    return (token for (token,) in steps if token is not None)
