"""What is private in transformers, and is used nevertheless, with the public way it waits for.

Names were read in transformers 5.23. Of its functions that call other packages, see
`lm.transformers_model`, which looks for these in the code of a class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def as_saved(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `save_pretrained` would write of `state`, which can be on the meta device.

    Until it says what it would write.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(state))


def decode_special_floats(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json, in which inf and NaN are objects, with floats instead.

    Until `from_dict` of a config reads what its `to_json_string` writes.
    """
    from transformers import PreTrainedConfig

    return PreTrainedConfig._decode_special_floats(values)


def find_kept_in_float32(
    network: PreTrainedModel, dtype: torch.dtype, also: tuple[str, ...] = ()
) -> set[nn.Parameter]:
    """Return the parameters that `from_pretrained` keeps in float32 if it loads others in `dtype`.

    Until a class says so, for layers that are not loaded by it.

    Args:
        also: patterns of names of others to return.
    """
    patterns = [*network._get_dtype_plan(dtype), *also]
    if not patterns:
        return set()
    from transformers.core_model_loading import build_glob_alternation

    expression, _, _ = build_glob_alternation(patterns)
    named = network.named_parameters()
    return {parameter for name, parameter in named if expression.search(name)}


def names_of_blocks(network: PreTrainedModel) -> set[str]:
    """Return the names of the classes of layers that are never split between devices.

    Until a class names its layers, or `device_map` does.
    """
    return set(network._no_split_modules or ())


def attention_of(network: PreTrainedModel) -> str | None:
    """Return the name of what computes attention, which can be another one than was asked for.

    Until a class refuses what it replaces by something else.
    """
    return network.config._attn_implementation


def mark_as_initialized(parameter: nn.Parameter) -> None:
    """Let no values be drawn for a parameter: on the meta device, that takes most of the time.

    Until `from_config` builds a model on the meta device, with buffers that have values.
    """
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def apply_gate(experts: Any, x: Tensor) -> Tensor:
    """Return what experts pass on of the product of tokens with their first matrix.

    Until it has a public name for the implementations that `ExpertsInterface` registers.
    """
    return experts._apply_gate(x)


def layouts_of_experts() -> Mapping[str, str]:
    """Return the model types whose adapters PEFT converts, by what they are converted like.

    Until PEFT says which layers it takes for experts.
    """
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    return _MODEL_TO_CONVERSION_PATTERN


def find_renamed(saved: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return those of the `names` of tensors in `saved` that are another one's in older files.

    transformers would rename them when it loads `saved`, and PEFT does, in files of adapters. Until
    PEFT refuses to load adapters that it leaves out.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming

    if get_checkpoint_conversion_mapping(saved.config.model_type) is None:
        return []  # PEFT converts adapters of classes with conversions alone
    renamings = [
        entry for entry in get_model_conversion_mapping(saved) if isinstance(entry, WeightRenaming)
    ]
    renamed: list[str] = []
    for name in names:
        new_name = name
        for renaming in renamings:
            new_name, _ = renaming.rename_source_key(new_name)
        if not name.endswith(new_name):  # PEFT adds prefixes that are missing
            renamed.append(name)
    return renamed
