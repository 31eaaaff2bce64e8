"""A language model of transformers, as a run and its checkpoints describe it, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, Field

from lm.fields import Config, Fixed, Logged
from lm.model_config import LinearLayers, ModelConfig, VocabSize

PackedBy = Literal["position_ids", "attention_mask", "seq_idx", "cu_seq_lens"]
"""Ways of telling a class which tokens of a row are of one document, by the argument that each adds
to those before: positions, which start again; masks, for classes that make theirs without them;
numbers of documents, for linear attention and convolutions, which lm.delta_rule computes then;
where documents start, for kernels of other packages."""

Attention = Literal["documents", "class"]
"""What computes attention: lm.attention, which skips other documents, or the class, by masks."""


@dataclass(frozen=True)
class Kernels:
    """What a run computes a class with, where it is not the code of this project."""

    attention: str | None = None
    """`attn_implementation`"""
    amp_dtype: str | None = "auto"


OWN_KERNELS = Kernels()


class LongestRow(BaseModel, frozen=True, extra="forbid"):
    """How long rows may be, as a class computes longer ones otherwise than their documents."""

    n_tokens: int
    key: str
    """of the config of the class"""
    value: int
    """of the key"""


class Examined(BaseModel, frozen=True, extra="forbid"):
    """What an examination has found to hold of a class, in its version, on its machine."""

    hidden_states: bool
    """Its logits are the product of its last hidden states and the output matrix."""
    packing: bool
    """Documents in one row, told apart as `packed_by` says, are computed as each alone."""
    packed_by: PackedBy = "position_ids"
    attention: str = "class"
    """one of `Attention`, or the `attn_implementation` of the run"""
    cache: bool
    """Its cache gives the logits of complete sequences."""
    bfloat16: bool = True
    """Computed in bfloat16, it is about as far from float32 as its class itself."""
    full_recomputation: bool
    """Layers that are recomputed in backward give the same gradients."""
    selective_recomputation: bool
    """So do layers of which products and attention are kept."""
    lora: bool
    """Adapters that are merged compute what they did."""
    nf4: bool = False
    """Layers of quantized weights compute what these, dequantized, do."""
    experts: bool = False
    """Experts with adapters, in NF4 too, compute what those of the class with merged ones do."""
    float8: bool = False
    """Its linear layers can be computed in float8."""
    context_parallel: bool = False
    """Sequences whose tokens are divided among ranks are computed as complete ones."""
    compilation: bool = False
    """Layers can be compiled, each as one graph."""
    longest_row: LongestRow | None = None
    """None = what holds, holds of rows of any length"""
    untrained: list[str] = []
    """parameters that get no gradient, with "*" for the numbers of layers"""
    class_name: str = ""
    versions: list[str] = []
    """of PyTorch and transformers"""
    details: dict[str, str] = {}
    """what was found of each property that does not hold"""

    @property
    def numbers_documents(self) -> bool:
        """Whether layers get the numbers of documents, see `PackedBy`."""
        return self.packed_by in ("seq_idx", "cu_seq_lens")


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

    n_experts: ClassVar[None] = None
    """A class routes tokens to its experts itself; this project's mixtures are `ModelConfig`s."""

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
    def reason_against_bfloat16(self) -> str:
        """What an examination in bfloat16 has found."""
        found = self.examined.details.get("bfloat16")
        return f"{self.model_type} in bfloat16 is not as exact as its class itself ({found})"

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


def model_config(values: dict[str, Any]) -> AnyModelConfig:
    """Return the config of a model from the values of its keys."""
    if "transformers_config" in values:
        return TransformersConfig.model_validate(values)
    return ModelConfig.model_validate(values)
