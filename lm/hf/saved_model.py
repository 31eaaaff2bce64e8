"""The class of transformers whose weights a folder has, and the trained language model in it.

A run trains a causal language model (`build_network`). The folder that it started from can be that
of a larger model, e.g. with vision, whose class has other names for the same layers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from lm.errors import ConfigError
from lm.transformers_model import one_line_errors, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def build_saved_model(config: PreTrainedConfig, network: PreTrainedModel) -> PreTrainedModel:
    """Return the model whose weights the files have: `network`, or one that contains it."""
    import transformers

    names: list[str] = []
    if isinstance(config.architectures, list):
        names = [name for name in config.architectures if isinstance(name, str)]
    if type(config) is network.config_class or type(network).__name__ in names:
        return network
    classes = [getattr(transformers, name, None) for name in names]
    classes += [
        transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None),
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None),
    ]
    for found in classes:
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            continue
        if found.config_class is type(config) and found.can_generate():
            with quiet(), one_line_errors(config.model_type):
                return found(copy.deepcopy(config))
    raise ConfigError(f"{config.model_type}: transformers has no class of it that generates text")


def find_names(saved: PreTrainedModel, network: PreTrainedModel) -> dict[str, str]:
    """Return the names in `network` of the tensors that `saved` has, too, by name there.

    Raises:
        ConfigError: `saved` does not contain one such network.
    """
    own_names = list(network.state_dict())
    path = _find_module(saved, type(network))  # "" of `saved` itself
    if path is not None:
        return {f"{path}.{name}".removeprefix("."): name for name in own_names}
    base_path = _path_of(network, network.base_model)
    path = _find_module(saved, type(network.base_model))
    if path is None or not base_path:
        wanted = type(network.base_model).__name__
        problem = f"{type(saved).__name__} does not contain one {wanted}, its language model"
        raise ConfigError(f"{saved.config.model_type}: {problem}")
    moved = {base_path: path}
    head = network.get_output_embeddings()
    saved_head = saved.get_output_embeddings()
    if head is not None and saved_head is not None:
        moved[_path_of(network, head)] = _path_of(saved, saved_head)
    names: dict[str, str] = {}
    for own_path, path in moved.items():
        for name in own_names:
            if name.startswith(f"{own_path}."):
                names[path + name.removeprefix(own_path)] = name
    return names


def _find_module(model: PreTrainedModel, module_type: type) -> str | None:
    """Return the path of the module of a type; of several, the one that decodes."""
    paths = [path for path, module in model.named_modules() if type(module) is module_type]
    if len(paths) == 1:
        return paths[0]
    decoder = model.get_decoder()
    if type(decoder) is module_type:
        return _path_of(model, decoder)
    return None


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)
