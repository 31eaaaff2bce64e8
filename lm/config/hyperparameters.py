"""The hyperparameters: what they are, their types, defaults and meanings, and their JSON Schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from lm.checkpoint.config import CheckpointConfig
from lm.data.config import DataConfig
from lm.errors import ConfigError
from lm.fields import Config, Fixed, Unlogged, Varied, aliases_of, elsewhere
from lm.metrics.config import MetricsConfig
from lm.model_config import ModelConfig
from lm.objectives.config import ObjectiveConfig
from lm.tasks.config import TasksConfig
from lm.training import config as training
from lm.training.config import (
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfilingConfig,
    SkipConfig,
    TransferConfig,
)
from lm.transformers_config import AnyModelConfig, kind_of_model
from lm.units import format_parameters

DEFAULT_STEPS = 100
DEFAULT_SEED = 42


class RunConfig(Config, frozen=True):
    """Length, seed and name of the run, and its samples."""

    max_steps: Varied[Unlogged[int | None]] = Field(
        None,
        gt=0,
        description="optimizer steps; null = searcher.max_length, else 100",
        json_schema_extra=elsewhere(
            "max_iters num_iterations num_steps searcher.max_length steps total_steps train_steps"
            " training_steps"
        ),
    )
    max_epochs: Unlogged[float | None] = Field(
        None,
        le=1e6,
        description="passes over the data, instead of max_steps; below 0 = only validate and"
        " generate",
        json_schema_extra=elsewhere("num_train_epochs num_epochs n_epochs epochs"),
    )
    stop_at_step: Unlogged[int | None] = Field(
        None,
        gt=0,
        description="stop after this step with a checkpoint, in the schedule of all steps; null ="
        " train them all",
    )
    seed: Varied[Fixed[int | None]] = Field(
        None,
        ge=0,
        description="of weights, data order and dropout; null = the trial's, else 42",
        json_schema_extra=elsewhere("random_seed"),
    )
    run_name: Unlogged[str | None] = Field(
        None,
        description="directory under runs/; null = the config file's name",
        json_schema_extra=elsewhere("experiment_name wandb_name wandb_run_name"),
    )
    prompt: Unlogged[str | None] = Field(
        None, description="text that samples continue; null = the start of the validation data"
    )
    num_tokens: Unlogged[int] = Field(
        100,
        ge=0,
        description="tokens per sample, each a forward pass; 0 = no samples",
        json_schema_extra=elsewhere("max_new_tokens eval_max_new_tokens"),
    )
    collective_timeout: Unlogged[float] = Field(
        600.0,
        ge=1,
        le=604800,
        description="longest wait for another rank (seconds)",
        json_schema_extra=elsewhere("ddp_timeout train_timeout_seconds"),
    )

    @field_validator("max_epochs")
    @classmethod
    def _not_zero(cls, epochs: float | None) -> float | None:
        if epochs == 0:
            raise ValueError("0 epochs train nothing; use -1 to only validate and generate")
        return epochs

    def run_length(self, steps_per_epoch: float | None) -> int:
        """Return the number of steps, 0 to only validate and generate.

        Args:
            steps_per_epoch: None = streamed data.
        """
        if self.max_epochs is None:
            return DEFAULT_STEPS if self.max_steps is None else self.max_steps
        if self.max_epochs < 0:
            return 0
        if steps_per_epoch is None:
            problem = "the length of a streamed dataset is unknown; set max_steps"
            raise ConfigError(f"max_epochs: {problem}")
        steps = math.ceil(self.max_epochs * steps_per_epoch)
        if self.max_steps is not None:
            steps = min(steps, self.max_steps)
        return steps


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a run: the config of each part, whose keys no other part has."""

    model: AnyModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    lora: LoraConfig
    optim: OptimConfig
    transfer: TransferConfig
    skipping: SkipConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    tasks: TasksConfig
    profiling: ProfilingConfig
    run: RunConfig

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters with these values, and the defaults of all other keys."""
        parts_of_values = parts_of(values)
        _require_known(values, parts_of_values)
        parts: dict[str, Any] = {}
        for name, part in parts_of_values.items():
            parts[name] = part.model_validate(of_part(values, part))
        return cls(**parts)

    def to_flat(self) -> dict[str, Any]:
        """Return the values of all keys, as in JSON.

        Of a model of transformers, what `init_from` alone can set is left out.
        """
        flat: dict[str, Any] = {}
        for name in PARTS:
            flat |= getattr(self, name).model_dump(mode="json")
        return {key: value for key, value in flat.items() if key in FIELDS}

    def replace(self, **values: Any) -> Hyperparameters:
        """Return a copy with other `values` of some keys, which are not validated.

        A model of transformers has few of them, and keeps its own values.
        """
        _require_known(values, PARTS)
        parts: dict[str, Any] = {}
        for name in PARTS:
            part = getattr(self, name)
            parts[name] = part.model_copy(update=of_part(values, type(part)))
        return Hyperparameters(**parts)

    @property
    def own_model(self) -> ModelConfig:
        """`model`, where only one of model.py can be."""
        assert isinstance(self.model, ModelConfig)
        return self.model

    @property
    def n_trained_parameters(self) -> int:
        """Number of trained parameters: those of the adapters, or all."""
        return training.n_trained_parameters(self.lora, self.model)

    @property
    def size_of_model(self) -> str:
        """Number of parameters as text; of a mixture, also of those that process a token."""
        size = f"{format_parameters(self.model.n_parameters)} parameters"
        if self.model.n_experts is not None:
            size += f", {format_parameters(self.model.n_active_parameters)} of them active"
        return size


PARTS: Mapping[str, type[Config]] = get_type_hints(Hyperparameters) | {"model": ModelConfig}
"""The config of each part, by its name in `Hyperparameters`."""


def parts_of(values: Mapping[str, Any]) -> Mapping[str, type[Config]]:
    """Return the config of each part, where the model can be one of transformers."""
    return {**PARTS, "model": kind_of_model(values)}


FIELDS: dict[str, FieldInfo] = {}
"""All keys."""
for _part in PARTS.values():
    FIELDS |= _part.model_fields

KEYS_OF_ALIASES = {alias: key for key, info in FIELDS.items() for alias in aliases_of(info)}


def _require_known(values: Mapping[str, Any], parts: Mapping[str, type[Config]]) -> None:
    unknown = set(values)
    for part in parts.values():
        unknown -= part.model_fields.keys()
    if unknown:
        raise ValueError(f"no such hyperparameter: {', '.join(sorted(unknown))}")


def of_part(values: Mapping[str, Any], part: type[Config]) -> dict[str, Any]:
    """Return the values of the keys of `part`."""
    return {key: values[key] for key in part.model_fields if key in values}


def distinguishing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return of the flat `values` of a run those that tell it from others.

    They are those of keys that are often varied, and those that are not defaults, if their change
    is worth a line when a run resumes.
    """
    chosen: dict[str, Any] = {}
    for key, info in FIELDS.items():
        if key not in values:  # of a model of transformers
            continue
        is_set = "unlogged" not in info.metadata and values[key] != info.default
        if is_set or "varied" in info.metadata:
            chosen[key] = values[key]
    return chosen


def _json_schema() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for part in PARTS.values():
        schema = part.model_json_schema()
        properties |= schema["properties"]
        definitions |= schema.get("$defs", {})
    for key in properties.values():
        for name in ("aliases", "meanings"):  # not words of JSON Schema
            key.pop(name, None)
    return {"properties": properties, "$defs": definitions}


SCHEMA = _json_schema()
"""Of all keys."""
