"""Time of a forward and a backward pass on this CPU, measured with the modules of a model."""

from __future__ import annotations

import functools
import time

import torch
from torch.utils.benchmark import Timer

from lm import lora
from lm.config import Hyperparameters
from lm.plan.trace import build_model, model_key

FLOPS, SECONDS = 1e10, 0.5
"""of a timed pass, except of a single sequence, and of all timed passes of a model"""


def time_micro_step(hp: Hyperparameters, dtype: torch.dtype | None) -> float:
    """Return the seconds of the forward and backward passes of a micro-step on one thread, without compilation.

    Measured with one block and with three, and with fewer sequences if `batch_size` is large.
    """
    flops = 3 / hp.n_layers * lora.flops_per_token(hp, hp) * hp.max_seq_len
    size = max(1, min(hp.batch_size, int(FLOPS / flops)))
    one, three = (time_pass(model_key(hp), size, n_layers, dtype) for n_layers in (1, 3))
    return hp.batch_size / size * (one + (hp.n_layers - 1) * (three - one) / 2)


@functools.lru_cache(maxsize=256)
def time_pass(key: str, batch_size: int, n_layers: int, dtype: torch.dtype | None) -> float:
    """Return the seconds of a forward and a backward pass; `key` is JSON of the hyperparameters."""
    hp = Hyperparameters.model_validate_json(key)
    model = build_model(hp, n_layers, dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)  # larger values give denormal gradients, which are slow
    tokens = torch.randint(hp.vocab_size, (batch_size, hp.max_seq_len))
    names, statement = {"model": model, "tokens": tokens}, "model(tokens, tokens).backward(); model.zero_grad()"
    timer = Timer(statement, globals=names, timer=time.process_time)
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)  # other processes only make passes slower
