"""What a run has logged: lines of metrics.jsonl, samples.jsonl and checkpoints.jsonl; sums."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from lm.fileio import Line

Metric = Annotated[float, Field(gt=-1e50, lt=1e50)]
"""In a wider range than that of float32; Matplotlib fails near the limits of float64."""


class Logged(Line, frozen=True):
    """What all have, and all that is read of checkpoints.jsonl."""

    group: str


class Report(Logged, frozen=True, extra="allow"):
    """A line of metrics.jsonl; the other keys are metrics."""

    # How pydantic is told the type of other keys.
    __pydantic_extra__: dict[str, Metric]  # pyright: ignore[reportIncompatibleVariableOverride]


class Sample(Logged, frozen=True):
    """A line of samples.jsonl."""

    prompt: str
    text: str


Sum = Annotated[float, Field(gt=-1e50, lt=1e50)]
"""In a range in which all ranks' have a sum, and which another step does not leave."""
Count = Annotated[Sum, Field(ge=0, multiple_of=1)]


class MetricSums(BaseModel, frozen=True, extra="forbid"):
    """What one rank has accumulated since the last report."""

    loss_sum: Sum = Field(
        default=0.0,
        description="nats, over the terms of this rank; all other sums are global",
    )
    n_terms: Count = Field(default=0.0, description="terms of the loss")
    grad_norm_sum: Sum = 0.0
    n_taken: Count = Field(default=0.0, description="optimizer steps")
    n_skipped: Count = Field(default=0.0, description="steps that were skipped")
    n_steps: Count = 0.0
    n_tokens: Count = 0.0
    seconds: Sum = 0.0
    data_seconds: Sum = 0.0
    consecutive_skipped: Count = Field(
        default=0.0, description="skipped steps since the last one that was taken, as of now"
    )
    most_consecutive_skipped: Count = Field(default=0.0, description="the most of them")
    statistics: dict[str, Sum] = Field(
        default_factory=dict,
        description="of the objective, by name: over the terms of this rank",
    )

    @model_validator(mode="after")
    def _check_terms(self) -> MetricSums:
        if self.n_terms < self.n_taken:
            raise ValueError("the loss of a step that was taken has at least one term")
        return self
