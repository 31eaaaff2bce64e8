"""The records of a run: lines of metrics.jsonl and samples.jsonl."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lm.fileio import Line

Seconds = Annotated[float, Field(ge=0, lt=2**36)]
"""since 1970"""
Metric = Annotated[float, Field(gt=-1e50, lt=1e50)]
"""In a wider range than that of float32; Matplotlib fails near the limits of float64."""


class Record(Line, frozen=True):
    """What both have."""

    group: str
    time: Seconds


class Report(Record, frozen=True, extra="allow"):
    """A line of metrics.jsonl; the other keys are metrics."""

    # How pydantic is told the type of other keys.
    __pydantic_extra__: dict[str, Metric]  # pyright: ignore[reportIncompatibleVariableOverride]


class Sample(Record, frozen=True):
    """A line of samples.jsonl."""

    prompt: str
    text: str
