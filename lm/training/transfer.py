"""Hyperparameters tuned on a narrow and shallow model, carried over to a wide and deep one.

A model that is m times as wide and l times as deep as the one on which `lr` and the rest were tuned
learns at the same pace if its parts are scaled as follows (Yang et al., Tensor Programs V, 2022,
table 8 for the width; Dey et al., CompleteP, 2025, table 1 with alpha = 1 for the depth):

    role, before folding      multiplier   deviation    lr         decay      epsilon
    embedding                              1            1          1          1 / m
    matrix in a block                      1 / sqrt m   1 / m      m          1 / (m l)
    the same, with Muon                    1 / sqrt m   1 / sqrt m  sqrt m
    norm or bias in a block                1            1                     1 / (m l)
    a branch's output         1 / l
    final norm                             1            1                     1 / m
    head                      1 / m        1            1          1          1 / m

No multiplier is in `forward`: each is folded into the parameters that it would multiply, see
`Scale.folded`. So the model is an ordinary one, and is exported as such. docs/transfer.md derives
the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lm.any_model import AnyModel
from lm.training.config import TransferConfig
from lm.transformers_config import AnyModelConfig, TransformersConfig
from model import InitRule


class Scale(NamedTuple):
    """What the values of a parameter at the base size are multiplied by."""

    init: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0
    multiplier: float = 1.0
    """what is folded into the parameter"""

    def folded(self, multiplier: float) -> Scale:
        """Return the scale of w' = a w that trains as w does whose result is multiplied by a.

        AdamW changes w by -lr (g / (|g| + eps) + decay w), g being its gradient. That of w' is
        g / a, so w' changes by a times as much with a lr, decay / a and eps / a:

            -a lr ((g / a) / (|g / a| + eps / a) + decay / a w') = a (the change of w)

        Muon's update does not depend on the scale of g, so the same holds without eps.
        """
        return Scale(
            self.init * multiplier,
            self.lr * multiplier,
            self.weight_decay / multiplier,
            self.eps / multiplier,
            self.multiplier * multiplier,
        )


_BRANCH_OUTPUTS = {
    "pre": ("o_proj", "down_proj"),
    "post": ("attention_norm", "ffn_norm"),
}
"""`norm_placement` -> the modules whose results are added to the residual stream"""


@dataclass(frozen=True)
class Transfer:
    """The scales of a model's parameters. The default is a model of the base size."""

    width_ratio: float = 1.0
    """m, of d_model to base_width; d_ff and the number of heads grow in proportion"""
    depth_ratio: float = 1.0
    """l, of n_layers to base_depth"""
    norm_placement: Literal["pre", "post"] = "pre"
    tie_embeddings: bool = False
    uses_muon: bool = False

    @classmethod
    def of(cls, config: TransferConfig, model: AnyModelConfig, optimizer: str) -> Transfer:
        """Return the transfer to `model`, trained by `optimizer`."""
        if isinstance(model, TransformersConfig):
            return cls()
        width_ratio = 1.0
        if config.base_width is not None:
            width_ratio = model.d_model / config.base_width
        depth_ratio = 1.0
        if config.base_depth is not None:
            depth_ratio = model.n_layers / config.base_depth
        return cls(
            width_ratio,
            depth_ratio,
            model.norm_placement,
            model.tie_embeddings,
            uses_muon=optimizer == "muon",
        )

    def scale(self, name: str) -> Scale:
        """Return that of the parameter `name`, with the multipliers folded into it."""
        m = self.width_ratio
        if name.startswith("blocks."):
            return self._scale_in_block(name)
        scale = Scale(eps=1 / m)
        if name == "head.output.weight":
            return scale.folded(1 / m)
        if name.startswith("head.norm.") and self.tie_embeddings:
            return scale.folded(1 / m)  # the head's, whose matrix is also the embedding
        return scale

    def _scale_in_block(self, name: str) -> Scale:
        m = self.width_ratio
        eps = 1 / (m * self.depth_ratio)
        *_, module, parameter = name.split(".")
        is_matrix = parameter == "weight" and not module.endswith("norm")
        if not is_matrix:
            scale = Scale(eps=eps)
        elif self.uses_muon:
            scale = Scale(init=m**-0.5, lr=m**-0.5, weight_decay=m**0.5)
        else:
            scale = Scale(init=m**-0.5, lr=1 / m, weight_decay=m, eps=eps)
        if module in _BRANCH_OUTPUTS[self.norm_placement]:
            scale = scale.folded(1 / self.depth_ratio)
        return scale

    def init_rule(self, model: AnyModel, name: str) -> InitRule | None:
        """Return how to initialize the parameter `name`: as at the base size, and scaled."""
        rule = model.init_rule(name, self.width_ratio, self.depth_ratio)
        if rule is None:
            return None
        return rule._replace(value=self.scale(name).init * rule.value)


UNSCALED = Transfer()
