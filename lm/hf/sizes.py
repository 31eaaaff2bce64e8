"""The sizes of a network of transformers, as `TransformersConfig` holds them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from lm.model_config import LinearLayers
from lm.training.roles import ExpertMatrix, find_expert_matrices, find_linear_layers
from lm.transformers_config import ExpertMatrices
from lm.transformers_model import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sizes(NamedTuple):
    """The sizes of a model that `TransformersConfig` holds."""

    n_parameters: int
    linear_layers: list[LinearLayers]
    experts: list[ExpertMatrices]


def measure_sizes(network: PreTrainedModel) -> Sizes:
    """Return the sizes of a network."""
    counts = Counter(
        (layer.kind, layer.module.out_features, layer.module.in_features)
        for layer in find_linear_layers(network, find_blocks(network))
        if layer.is_called
    )
    layers = [
        LinearLayers(kind=kind, out=out, inner=inner, count=count)
        for (kind, out, inner), count in counts.items()
    ]
    return Sizes(sum(p.numel() for p in network.parameters()), layers, _count_experts(network))


def _count_experts(network: PreTrainedModel) -> list[ExpertMatrices]:
    counts: Counter[tuple[str, ExpertMatrix]] = Counter()
    for block in find_blocks(network):
        for path, module in block.named_modules():
            for matrix in find_expert_matrices(module):
                counts[f"{path.rpartition('.')[2]}.{matrix.name}", matrix] += 1
    return [
        ExpertMatrices(
            kind=kind, out=matrix.out, inner=matrix.inner, n_experts=matrix.n_experts, count=count
        )
        for (kind, matrix), count in counts.items()
    ]
