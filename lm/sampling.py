"""Drawing tokens from a model: with a key-value cache, temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import KVCache, Transformer

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token per row of `logits` `(B, V)`, as `(B,)` int64 on the CPU; temperature 0 takes the likeliest.

    top_k draws from the k likeliest tokens; top_p from the fewest of these, the likeliest first, that
    together have that probability (Holtzman et al., 2020).
    """
    if temperature == 0:
        return logits.argmax(dim=-1).cpu()
    vocab_size = logits.shape[-1]
    likeliest, ids = logits.float().cpu().topk(min(top_k or vocab_size, vocab_size))  # in descending order
    probabilities = ((likeliest - likeliest[:, :1]) / temperature).softmax(dim=-1)  # however small the temperature
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)


@torch.no_grad()
def generate_batch(
    model: Transformer,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    device: torch.device,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[list[int | None]]:
    """Yield the tokens that continue `prompts`, step by step: one per row, None where a row has none to give.

    The rows need not be equally long. All begin at position 0 and go on together: a row is fed its prompt
    until that is used up, then what it draws. So nothing is padded or masked, and each row draws what it
    would alone. Under FSDP every rank must call this in step, with the same arguments. When the context is
    full, the latest half of it is read again and generation goes on.

    Args:
        prompts: at least one token id each.
        max_new_tokens: of every row.
        temperature: divides the logits; 0 = always the likeliest token.
        seed: of the draws, the same for every row.

    Raises:
        ValueError: an empty prompt.
    """
    if not all(prompts):
        raise ValueError("generation needs at least one token to start from")
    context = model.config.max_seq_len
    rows = [prompt[-context:] for prompt in prompts]
    given = list(map(len, rows))
    generators = [torch.Generator().manual_seed(seed) for _ in rows]
    done = min(given)  # positions read, or about to be
    unread = [row[:done] for row in rows]
    cache = KVCache(context)
    model.eval()
    for _ in range(max(given) - done + max_new_tokens):
        if cache.length + len(unread[0]) > context:  # by now every prompt is used up: none is longer
            cache, unread = KVCache(context), [row[-max(1, context // 2) :] for row in rows]
        # Each token makes a new length: code would be compiled for it, and cuDNN's attention planned.
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(_KERNELS):
            logits = model(torch.tensor(unread, device=device), cache=cache)
        drawn: list[int | None] = [None] * len(rows)
        for i, row in enumerate(rows):
            if len(row) == done:
                row.append(int(choose(logits[i : i + 1], temperature, top_k, top_p, generators[i]).item()))
                if done < given[i] + max_new_tokens:
                    drawn[i] = row[-1]
        unread = [row[done : done + 1] for row in rows]
        done += 1
        yield drawn


def generate(model: Transformer, prompt: list[int], max_new_tokens: int, **how: Any) -> Iterator[int]:
    """Yield `max_new_tokens` tokens that continue `prompt`, one by one; `how` as for `generate_batch`."""
    return (token for (token,) in generate_batch(model, [prompt], max_new_tokens, **how) if token is not None)
