"""Sizes of models."""

from __future__ import annotations

import torch

from model import ModelConfig, Transformer


def unit_sizes(config: ModelConfig) -> list[int]:
    """Return the number of parameters of each block, of the embedding and of the head."""
    with torch.device("meta"):
        model = Transformer(config)
    units = [*model.blocks, model.embedding, model.head]
    return [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
