"""The hyperparameters of reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lm.fields import Config, Unlogged, elsewhere

TrackerName = Literal["wandb", "mlflow", "determined"]


class MetricsConfig(Config, frozen=True):
    """How often metrics are reported."""

    report_rate: Unlogged[int] = Field(
        10,
        gt=0,
        description="steps between training reports",
        json_schema_extra=elsewhere(
            "log_every log_every_n_steps log_freq log_interval logging.freq logging_steps"
            " steps_per_print"
        ),
    )
    validation_rate: Unlogged[int | None] = Field(
        None,
        gt=0,
        description="steps between validations; null = report_rate",
        json_schema_extra=elsewhere(
            "eval.interval eval_every eval_interval eval_steps eval_strategy evaluation_strategy"
            " validation.freq validator.freq"
        ),
    )
    sample_rate: Unlogged[int | None] = Field(
        None,
        gt=0,
        description="steps between samples; null = validation_rate if the data are text, else no"
        " samples",
        json_schema_extra=elsewhere("sample_every"),
    )
    tracker: Unlogged[TrackerName | list[TrackerName] | None] = Field(
        None,
        description="services that are sent metrics, samples and status; a failure of theirs never"
        " ends the run",
        json_schema_extra=elsewhere(
            "report_to logger_name",
            {
                "tensorboard": "its files are always written, `make board` shows them",
                "all": "name them",
            },
        ),
    )
