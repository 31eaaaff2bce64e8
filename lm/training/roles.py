"""What a parameter is to the layer that has it: by its modules, and by names that classes share.

Muon, weight decay, the lines about adapters and the examination of a class ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from lm.transformers_model import AnyModel
from model import ExpertLinear

_ROUTERS = frozenset({"gate", "router"})
"""modules"""


def is_router(name: str) -> bool:
    """Return whether the parameter `name` belongs to what chooses the experts of a token.

    Its shape does not say it: keys can be as wide as experts are many.
    """
    return not _ROUTERS.isdisjoint(name.split("."))


def is_selector(name: str) -> bool:
    """Return whether a parameter selects experts or tokens, perhaps without a gradient."""
    parts = name.split(".")
    is_bias_of_experts = parts[-1].endswith(("correction_bias", "expert_bias"))
    return is_bias_of_experts or "indexer" in parts or is_router(name)


def find_matrices(model: AnyModel) -> set[nn.Parameter]:
    """Return the weights of the linear layers in blocks, but of routers, which Muon updates."""
    in_blocks = {module for block in model.blocks for module in block.modules()}
    matrices: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        is_layer = module in in_blocks and isinstance(module, nn.Linear | ExpertLinear)
        if is_layer and not is_router(name):
            matrices.add(cast(nn.Parameter, module.weight))
    return matrices


def find_decayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters with weight decay: all but vectors, norms and biases.

    Norms of several heads and biases of several experts are matrices by their shape only.
    """
    decayed: set[nn.Parameter] = set()
    for name, module, parameter in _owners(model):
        if parameter.ndim > 1 and "bias" not in name and not _is_norm(module):
            decayed.add(parameter)
    return decayed


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield each parameter with its module and its name in it."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield name, module, parameter


def _is_norm(module: nn.Module) -> bool:
    is_layer = isinstance(module, nn.Embedding | nn.Linear)  # some normalize what they return
    return "norm" in type(module).__name__.lower() and not is_layer
