"""What a layer or a parameter of a model is: by its modules, and by names that classes share.

Muon, weight decay, adapters, NF4, float8, lm/hf/sizes.py and the examination of a class ask here.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from lm.any_model import AnyModel
from lm.transformers_config import without_numbers
from lm.units import format_parameters
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
    is_bias = name.endswith(("correction_bias", "expert_bias"))  # added to scores of experts
    return is_bias or "indexer" in name.split(".") or is_router(name)


# ---- linear layers


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer in a block."""

    name: str
    kind: str
    """its name in `parent`"""
    parent: nn.Module
    module: nn.Linear

    @property
    def weight(self) -> nn.Parameter:
        """Of shape `(out, in)`."""
        return cast(nn.Parameter, self.module.weight)

    @property
    def is_gate(self) -> bool:
        """Whether it chooses or weighs experts, as a router does, or a layer of one output."""
        return is_router(self.name) or self.module.out_features == 1

    @property
    def is_called(self) -> bool:
        """Whether its class calls it for a product: only then it can have an adapter.

        Some classes read the weight instead. Some routers, which are linear layers by their type,
        return which experts they choose.
        """
        chooses = self.is_gate and type(self.module) is not nn.Linear
        return not chooses and not reads_weight(type(self.parent), self.kind)


def find_linear_layers(root: nn.Module, blocks: Iterable[nn.Module]) -> list[LinearLayer]:
    """Return the linear layers in the blocks of `root`, with their names in it."""
    names = {module: name for name, module in root.named_modules()}
    seen: set[nn.Module] = set()  # some blocks share modules
    layers: list[LinearLayer] = []
    for block in blocks:
        for _, parent in block.named_modules(seen):
            for kind, module in parent.named_children():
                if isinstance(module, nn.Linear):
                    layers.append(LinearLayer(names[module], kind, parent, module))
    return layers


def find_roundable(model: AnyModel) -> list[LinearLayer]:
    """Return the linear layers in blocks whose weights can be rounded to less than the dtype.

    They choose and weigh no experts, have their weights for themselves, and their class calls them
    as they are: in no dtype it keeps these weights in float32, and it does not look at them.
    """
    kept = model.kept_in_float32(torch.float16)  # as in any other, so that all round the same
    n_owners = Counter(parameter for _, _, parameter in _owners(model))
    roundable: list[LinearLayer] = []
    for layer in find_linear_layers(model, model.blocks):
        is_own = layer.weight not in kept and n_owners[layer.weight] == 1
        is_read = reads_weight(type(layer.parent), layer.kind, or_dtype=True)
        is_plain = type(layer.module) is nn.Linear  # and of no class that computes otherwise
        if is_own and is_plain and not is_read and not layer.is_gate:
            roundable.append(layer)
    return roundable


def describe_rest(
    what: str,
    model: AnyModel,
    changed: Set[nn.Parameter],
    count_weights: Callable[[nn.Parameter], int] = torch.numel,
) -> str | None:
    """Return a line on which weights of the blocks stay as they are; None = hardly any.

    Args:
        what: changes the others, with a verb, e.g. "base_dtype: nf4 holds".
    """
    n_changed = 0
    rest: Counter[str] = Counter()
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            if parameter in changed:
                n_changed += count_weights(parameter)
            elif ".lora_" not in name:  # adapters are no weights of a base
                rest[without_numbers(name)] += count_weights(parameter)
    total = n_changed + rest.total()
    kinds = [
        f"{kind} ({format_parameters(n)})" for kind, n in rest.most_common() if n > total / 100
    ]
    if not kinds:
        return None
    share = f"{n_changed / total:.0%} of the weights of the blocks"
    return f"{what} {share}; as they are stay {', '.join(kinds)}"


@functools.cache
def _source_of(module_name: str) -> str:
    try:
        return inspect.getsource(sys.modules[module_name])
    except OSError:  # not in a file
        return ""


@functools.cache
def reads_weight(kind: type[nn.Module], name: str, *, or_dtype: bool = False) -> bool:
    """Return whether code of the class `kind` reads the weight of its layer `name`.

    Then it may not call the layer, maybe on another device or with another kernel only.

    Args:
        or_dtype: also if it reads nothing but the weight's dtype or device.
    """
    unless = r"(?!\.(?:dtype|device)\b)"
    if or_dtype:
        unless = ""
    pattern = re.compile(rf"\bself\.{re.escape(name)}\.weight\b{unless}")
    for base in kind.__mro__:
        is_foreign = base.__module__.partition(".")[0] not in ("torch", "builtins")
        if is_foreign and pattern.search(_source_of(base.__module__)):
            return True
    return False


# ---- experts


class ExpertMatrix(NamedTuple):
    """A tensor with a matrix of each expert."""

    name: str
    """in its module"""
    n_experts: int
    out: int
    inner: int


def find_expert_matrices(module: nn.Module) -> list[ExpertMatrix]:
    """Return the tensors in `module` with a matrix of each expert, in order.

    Of a module that transformers does not call through its interface of experts, these are none.
    """
    if not all(hasattr(module, name) for name in _OF_INTERFACE):
        return []
    parameters = dict(module.named_parameters(recurse=False))
    found: list[ExpertMatrix] = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        if name not in parameters or parameters[name].dim() != 3:
            return []
        n_experts, out, inner = parameters[name].shape
        if module.is_transposed:
            out, inner = inner, out
        found.append(ExpertMatrix(name, n_experts, out, inner))
    return found


_OF_INTERFACE = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "config")
"""attributes that `use_experts_implementation` of transformers gives a module"""


# ---- what the optimizer does with a parameter


def find_matrices(model: AnyModel) -> set[nn.Parameter]:
    """Return the weights of the linear layers in blocks, but of gates, which Muon updates."""
    matrices: set[nn.Parameter] = set()
    for layer in find_linear_layers(model, model.blocks):
        if not layer.is_gate:
            matrices.add(layer.weight)
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            matrices.add(module.weight)
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
    """Yield each parameter with its module and its name in it, of each module that has it."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield name, module, parameter


def _is_norm(module: nn.Module) -> bool:
    is_layer = isinstance(module, nn.Embedding | nn.Linear)  # some normalize what they return
    return "norm" in type(module).__name__.lower() and not is_layer
