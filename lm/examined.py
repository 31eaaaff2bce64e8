"""What holds of a model: which ways of training and generating compute what they should.

Of a class of transformers, an examination (lm/hf/examine.py) finds it out. Of model.py's models all
of it holds, as this project's tests say (`ModelConfig.examined`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

PackedBy = Literal["position_ids", "attention_mask", "seq_idx", "cu_seq_lens"]
"""Ways of telling a class which tokens of a row are of one document, by the argument that each adds
to those before: positions, which start again; masks, for classes that make theirs without them;
numbers of documents, for linear attention and convolutions, which lm.delta_rule computes then;
where documents start, for kernels of other packages."""

Attention = Literal["documents", "class"]
"""What computes attention: lm.attention, which skips other documents, or the class, by masks."""


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
