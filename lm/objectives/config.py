"""The hyperparameters of what is learned."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from lm.fields import Config, Fixed, Needs, Varied, elsewhere

T = TypeVar("T")
OfPairs = Annotated[T, Needs("objective", ("dpo",))]


LARGER_IS_BETTER = ("reward_accuracy", "reward_margin")
"""metrics of preferences"""


class ObjectiveConfig(Config, frozen=True):
    """What is learned: the next token, or preferences between replies."""

    objective: Fixed[Literal["next-token", "dpo"]] = Field(
        "next-token",
        description="dpo = from pairs of replies, which one is preferred: JSON Lines with prompt,"
        " chosen and rejected; relative to the weights of init_from",
        json_schema_extra=elsewhere(
            "stage rl",
            {
                "cpo grpo kto orpo ppo simpo": "no other is supported",
                "ipo": "set objective: dpo and dpo_loss: ipo",
                "sft": "did you mean next-token?",
            },
        ),
    )
    dpo_beta: OfPairs[Varied[Fixed[float]]] = Field(
        0.1,
        gt=0,
        description="how strongly the model is held to its initial weights (dpo)",
        json_schema_extra=elsewhere("beta rl_beta"),
    )
    dpo_loss: OfPairs[Fixed[Literal["sigmoid", "ipo"]]] = Field(
        "sigmoid",
        description="DPO's loss; or IPO's, of log-probabilities per token (dpo)",
        json_schema_extra=elsewhere("loss_type"),
    )
    label_smoothing: OfPairs[Fixed[float]] = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="probability that a preference is wrong, as in conservative DPO (dpo)",
    )
    sft_weight: OfPairs[Fixed[float]] = Field(
        0.0,
        ge=0,
        description="adds so many times the negative log-likelihood per token of the chosen reply"
        " (dpo)",
        json_schema_extra=elsewhere("rpo_alpha"),
    )

    @model_validator(mode="after")
    def _check_smoothing(self) -> ObjectiveConfig:
        if self.label_smoothing and self.dpo_loss == "ipo":
            problem = "ipo is a loss of certain preferences"
            raise ValueError(f"label_smoothing: {problem}; remove it, or use dpo_loss: sigmoid")
        return self

    @property
    def of_pairs(self) -> bool:
        """Whether the data are pairs of replies."""
        return self.objective == "dpo"
