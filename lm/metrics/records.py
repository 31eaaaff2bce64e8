"""What a run has logged: lines of metrics.jsonl, samples.jsonl and checkpoints.jsonl."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lm.fileio import Line

Seconds = Annotated[float, Field(ge=0, lt=2**36)]
"""since 1970"""
Metric = Annotated[float, Field(gt=-1e50, lt=1e50)]
"""In a wider range than that of float32; Matplotlib fails near the limits of float64."""


class Logged(Line, frozen=True):
    """What all have, and all that is read of checkpoints.jsonl."""

    group: str
    time: Seconds


class Report(Logged, frozen=True, extra="allow"):
    """A line of metrics.jsonl; the other keys are metrics."""

    # How pydantic is told the type of other keys.
    __pydantic_extra__: dict[str, Metric]  # pyright: ignore[reportIncompatibleVariableOverride]


class Sample(Logged, frozen=True):
    """A line of samples.jsonl."""

    prompt: str
    text: str
