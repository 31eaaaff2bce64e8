"""Hyperparameters of small runs."""

from __future__ import annotations

import re
from typing import Any

from lm.config.hyperparameters import FIELDS
from lm.examined import Examined
from lm.transformers_config import TransformersConfig

TINY: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 64,
    "max_seq_len": 16,
}
"""Hyperparameters of a model so small that a run takes hardly longer than its imports."""

LLAMA_STYLE: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rope",
    "ffn": "swiglu",
    "bias": "none",
    "n_kv_heads": 2,
}
"""Hyperparameters of Llama's architecture, at any size."""

EXACT_RUN: dict[str, Any] = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "report_rate": 1,
    "validation_batches": 1,
    "amp_dtype": None,
}
"""Hyperparameters of a run whose every step is compared bit for bit.

`max_steps` and `checkpoint_rate` are the caller's.
"""

REQUEUED_RUN: dict[str, Any] = EXACT_RUN | {
    "max_steps": 12,
    "validation_rate": 50,
    "checkpoint_rate": 1000,
}
"""Hyperparameters of a run that a scheduler stops and requeues."""

_ANSWERS = [name for name, field in Examined.model_fields.items() if field.is_required()]
OF_TRANSFORMERS = TransformersConfig(
    transformers_config={"norm_eps": 1e-5},
    examined=Examined.model_validate(dict.fromkeys(_ANSWERS, True)),
    vocab_size=64,
    max_seq_len=16,
    n_parameters=1,
    linear_layers=[],
    experts=[],
    quantized_as=None,
)
"""A model of transformers that is described, and of no class."""

_KEYS = frozenset(FIELDS)


def named_keys(error: Exception) -> set[str]:
    """The hyperparameters that the text of `error` names."""
    return set(re.findall(r"\w+", str(error))) & _KEYS
