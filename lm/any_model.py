"""A model of this package or of transformers, by its config."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from lm.transformers_config import AnyModelConfig, TransformersConfig
from model import Transformer

if TYPE_CHECKING:
    from lm.transformers_model import TransformersModel

AnyModel: TypeAlias = "Transformer | TransformersModel"
"""Both answer what a run asks of a model: its `blocks`, `embedding`, `head` and `loss`, what FSDP
shards apart, what stays in float32, initial weights, and in `config.examined` what holds of it."""


def new_model(config: AnyModelConfig, *, dropout: bool = True) -> AnyModel:
    """Return a model on the current default device; of transformers, on the meta device.

    Args:
        dropout: False = without what a config.json lets be random in training.
    """
    if not isinstance(config, TransformersConfig):
        return Transformer(config)
    from lm.transformers_model import TransformersModel  # which other runs do not import

    return TransformersModel(config, dropout=dropout)


def new_structure(config: AnyModelConfig) -> AnyModel:
    """Return a model on the meta device, of which names and shapes alone are used.

    Kernels that compute it in a run need not be installed here.
    """
    if isinstance(config, TransformersConfig):
        examined = config.examined.model_copy(update={"attention": "class"})
        config = config.model_copy(update={"examined": examined})
    with torch.device("meta"):
        return new_model(config)


def convert_weights(model: AnyModel, dtype: torch.dtype) -> None:
    """Give the weights `dtype`, except those that transformers keeps in float32.

    Buffers keep theirs, e.g. rotary frequencies, and so do bytes of quantized weights.
    """
    kept = model.kept_in_float32(dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            parameter.data = parameter.data.to(dtype)
