"""A language model of transformers, as a run and its checkpoints describe it, without PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from lm.examined import Attention, Examined
from lm.fields import Config, Fixed, Logged
from lm.model_config import LinearLayers, ModelConfig, VocabSize


@dataclass(frozen=True)
class Kernels:
    """What a run computes a class with."""

    attention: str | None = None
    """`attn_implementation`; None = attention of this project"""
    amp_dtype: str | None = "auto"


class ExpertMatrices(LinearLayers, frozen=True):
    """Tensors of the blocks with a matrix of each expert, which have one name and one shape."""

    n_experts: int = Field(gt=0)


_RANDOM = ("drop", "jitter")
"""parts of the names of rates of random changes in training"""


def _is_random_rate(key: str, value: Any) -> bool:
    return type(value) in (int, float) and any(word in key for word in _RANDOM)


def find_random_rates(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the rates above 0 of random changes in training, e.g. of dropout, in a config.json."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from find_random_rates(value)
        elif _is_random_rate(key, value) and value > 0:
            yield key, value


def set_random_rates(values: dict[str, Any], rate: float) -> None:
    """Set the rates of random changes in training in a config.json, in place."""
    for key, value in values.items():
        if isinstance(value, dict):
            set_random_rates(value, rate)
        elif _is_random_rate(key, value):
            values[key] = type(value)(rate)  # 0 where the class takes integers only


def without_numbers(name: str) -> str:
    """Return the name of a parameter with the numbers of layers as "*"."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


N_LAYERS = "num_hidden_layers"
"""the key of the number of blocks in most configs of transformers"""


class TransformersConfig(Config, frozen=True):
    """A language model of transformers: the config of its class, and what was found out of it."""

    transformers_config: Fixed[dict[str, Any]] = Field(
        description="the config of the language model, complete"
    )
    examined: Logged[Examined]
    quantized_as: Logged[Literal["mxfp4", "fp8"] | None] = Field(
        None, description="how the files of init_from hold weights"
    )
    vocab_size: Fixed[VocabSize]
    max_seq_len: Fixed[int] = Field(gt=0, le=2**24)
    n_parameters: Fixed[int] = Field(gt=0)
    linear_layers: Fixed[list[LinearLayers]] = Field(description="of the blocks")
    experts: Logged[list[ExpertMatrices]] = Field(
        [], description="of the blocks, of which adapters can be trained"
    )

    computed_by: ClassVar[str] = "a class of transformers"
    n_experts: ClassVar[None] = None
    """A class routes tokens to its experts itself; this project's mixtures are `ModelConfig`s."""
    dropout: ClassVar[float] = 0.0
    """A class has its own rates, see `find_random_rates`."""

    @property
    def model_type(self) -> str:
        """The name of the class in transformers, e.g. "lfm2"."""
        return str(self.transformers_config.get("model_type"))

    @property
    def name(self) -> str:
        """What errors call it: its class, and the kernels with which alone something is wrong."""
        if self.examined.attention in get_args(Attention):
            return self.model_type
        return f"{self.model_type} with attn_implementation: {self.examined.attention}"

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return self.max_seq_len

    @property
    def n_active_parameters(self) -> int:
        """Number of parameters, as its class alone knows which of them process a token."""
        return self.n_parameters

    def flops_per_token(self, _seq_len: int) -> None:
        """Return None: PyTorch counts them (lm/flops.py)."""

    def mean_keys(self, seq_len: int) -> float:
        """Return to how many keys a query attends, on average over `seq_len` tokens."""
        return seq_len / 2

    @property
    def lists_of_layers(self) -> dict[str, list[Any]]:
        """The values of the class's config that have an item for each block, by key."""
        values = self.transformers_config
        lists = {key: value for key, value in values.items() if isinstance(value, list)}
        return {key: value for key, value in lists.items() if len(value) == values[N_LAYERS]}

    def with_layers(self, n_layers: int) -> TransformersConfig:
        """Return the config of the first `n_layers` blocks."""
        values = self.transformers_config | {N_LAYERS: n_layers}
        for key, of_layers in self.lists_of_layers.items():
            values[key] = of_layers[:n_layers]
        return self.model_copy(update={"transformers_config": values})

    def notes(self, *, dropout: bool) -> list[str]:
        """Return a line on each thing that is done otherwise than for other models, or not.

        Args:
            dropout: whether random changes in training are made.
        """
        examined = self.examined
        notes: list[str] = []
        rates = dict(find_random_rates(self.transformers_config))
        if rates:
            shown = ", ".join(f"{key} {rate:g}" for key, rate in rates.items())
            note = f"random in training, as its config.json says: {shown}"
            if not dropout:
                note = f"its reference has to compute the same (objective: dpo), so 0 here: {shown}"
            notes.append(note)
        if not examined.hidden_states:
            notes.append("the loss computes all logits at once, as its class changes them")
        if examined.packing and examined.attention == "class":
            note = (
                "its attention computes, and then ignores, pairs of tokens of different documents"
            )
            notes.append(f"{note}, as its class makes masks otherwise")
        if examined.packed_by == "cu_seq_lens" and examined.attention in get_args(Attention):
            notes.append("on a GPU its linear attention is flash-linear-attention's")
        if not examined.cache:
            notes.append("samples compute all tokens again for each new one, as its cache is wrong")
        if examined.untrained:
            notes.append(f"without a gradient, so not trained: {', '.join(examined.untrained)}")
        if self.transformers_config.get("output_router_logits"):
            notes.append("the loss of output_router_logits, to balance experts, is not computed")
        return [f"{self.model_type}: {note}" for note in notes]

    def structure(self) -> dict[str, Any]:
        """Return what weights depend on: the keys of the class's own config."""
        return self.transformers_config | {"vocab_size": self.vocab_size}


AnyModelConfig = ModelConfig | TransformersConfig
"""Both say the same of a model, e.g. its sizes and FLOPs, and in `examined` what holds of it."""


def reason_against_bfloat16(model: AnyModelConfig) -> str:
    """Return what an examination in bfloat16 has found."""
    found = model.examined.details.get("bfloat16")
    return f"{model.name} in bfloat16 is not as exact as its class itself ({found})"


def kind_of_model(values: Mapping[str, Any]) -> type[AnyModelConfig]:
    """Return the kind of the model that `values` describe, which can also have other keys."""
    if "transformers_config" in values:
        return TransformersConfig
    return ModelConfig


def model_config(values: Mapping[str, Any]) -> AnyModelConfig:
    """Return the config of a model from the values of its keys."""
    return kind_of_model(values).model_validate(values)
