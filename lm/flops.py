"""FLOPs of training."""

from __future__ import annotations

import json
import logging

from lm.program import describe_program
from lm.storage.cache import remembered
from lm.training.config import LoraConfig
from lm.transformers_config import AnyModelConfig


def count_flops_per_token(config: LoraConfig, model: AnyModelConfig) -> float | None:
    """Return the FLOPs per token of forward and backward at `max_seq_len`, adapters included.

    Of adapters, and of a class of transformers, PyTorch counts the products in a step on tensors
    without values. This takes seconds, so the count is kept in the user's cache. What frozen
    weights and embeddings do not need is not computed. The step attends to later keys, too: so it
    is one of as many tokens as a query has keys on average, of a class of transformers half of
    `max_seq_len`.

    Returns:
        None if the class computes nothing without values.
    """
    flops = model.flops_per_token(model.max_seq_len)
    if flops is not None and config.lora_rank is None:
        return flops
    n_tokens = max(1, round(model.mean_keys(model.max_seq_len)))
    adapters = (config.lora_rank, config.lora_targets)
    program = describe_program(__name__, ["torch", "transformers"])
    facts = ("FLOPs", model, adapters, program)
    counted = remembered(facts, lambda: json.dumps(_count(config, model, n_tokens)))
    return json.loads(counted)


def _count(config: LoraConfig, model: AnyModelConfig, n_tokens: int) -> float | None:
    """Return the FLOPs per token that PyTorch counts in a step of `n_tokens`; None = it fails."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from lm.any_model import convert_weights, new_model
    from lm.training.lora import add_adapters
    from lm.transformers_model import quiet

    with torch.device("meta"):
        counted = new_model(model)
    add_adapters(counted, config.model_copy(update={"base_dtype": None}), None)
    counted.to("meta")  # buffers of transformers
    convert_weights(counted, torch.bfloat16)  # for which all operators are known without values
    counter = FlopCounterMode(display=False)
    try:
        with quiet(logging.ERROR), FakeTensorMode(allow_non_fake_inputs=True), counter:
            tokens = torch.zeros(1, n_tokens, dtype=torch.int64, device="meta")
            counted(tokens, tokens).backward()
    except Exception:  # of foreign code
        return None
    return counter.get_total_flops() / n_tokens
