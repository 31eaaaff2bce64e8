"""Drawing tokens from a model: with a key-value cache, temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model import KVCache, Transformer


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
    probabilities = (likeliest / temperature).softmax(dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[int]:
    """Yield `max_new_tokens` tokens that continue `prompt`, one by one.

    Under FSDP every rank must call this in step, with the same arguments. When the context is full, the
    latest half of it is read again and generation goes on.

    Args:
        prompt: at least one token id.
        temperature: divides the logits; 0 = always the likeliest token.
        seed: of the draws.

    Raises:
        ValueError: an empty prompt.
    """
    if not prompt:
        raise ValueError("generation needs at least one token to start from")
    generator = torch.Generator().manual_seed(seed)
    context = model.config.max_seq_len
    tokens = list(prompt)
    unread = tokens[-context:]
    cache = KVCache(context)
    model.eval()
    for _ in range(max_new_tokens):
        if cache.length + len(unread) > context:
            cache, unread = KVCache(context), tokens[-max(1, context // 2) :]
        with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
            logits = model(torch.tensor([unread], device=device), cache=cache)
        token = int(choose(logits, temperature, top_k, top_p, generator).item())
        tokens.append(token)
        unread = [token]
        yield token
