"""All parts' settings as one flat mapping: read, checked, compared, explained.

python -m lm.config            the table of hyperparameters, as in README.md
python -m lm.config --schema   JSON Schema of an experiment file, for editors
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lm.checkpoint import CheckpointConfig
from lm.data.loader import DataConfig
from lm.errors import ConfigError
from lm.metrics import MetricsConfig
from lm.optim import OptimConfig
from lm.parallelize import ParallelConfig
from lm.precision import PrecisionConfig
from lm.profiling import ProfilingConfig
from model import ModelConfig


class RunConfig(BaseModel):
    """The settings of `fsdp.py` itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_steps: int | None = Field(
        None, gt=0, description="optimizer steps of the whole run; null = searcher.max_length, else 100"
    )
    max_epochs: float | None = Field(
        None, description="end after so many passes over the data; below 0 = only validate and generate"
    )
    seed: int | None = Field(None, ge=0, description="of weights, order and dropout; null = the trial's, else 42")
    run_name: str | None = Field(None, description="folder below runs/; null = the config file's name")
    prompt: str | None = Field(None, description="text to continue at the end of the run")
    num_tokens: int = Field(100, ge=0, description="tokens generated from prompt")
    collective_timeout: float = Field(600.0, gt=0, description="longest wait of a rank for another (seconds)")

    @field_validator("max_epochs")
    @classmethod
    def _not_zero(cls, epochs: float | None) -> float | None:
        if epochs == 0:
            raise ValueError("0 epochs are nothing to do; use -1 to validate and generate only")
        return epochs


PARTS: tuple[type[BaseModel], ...] = (
    ModelConfig,
    DataConfig,
    OptimConfig,
    PrecisionConfig,
    ParallelConfig,
    CheckpointConfig,
    MetricsConfig,
    ProfilingConfig,
    RunConfig,
)
OWNERS = {
    "ModelConfig": "model.py",
    "DataConfig": "lm/data/loader.py",
    "OptimConfig": "lm/optim.py",
    "PrecisionConfig": "lm/precision.py",
    "ParallelConfig": "lm/parallelize.py",
    "CheckpointConfig": "lm/checkpoint.py",
    "MetricsConfig": "lm/metrics.py",
    "ProfilingConfig": "lm/profiling.py",
    "RunConfig": "fsdp.py",
}


class Hyperparameters(
    RunConfig,
    ProfilingConfig,
    MetricsConfig,
    CheckpointConfig,
    ParallelConfig,
    PrecisionConfig,
    OptimConfig,
    DataConfig,
    ModelConfig,
):
    """Every key of `hyperparameters:`; a part is handed the whole and sees its own keys by type."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _StrictLoader(yaml.SafeLoader):
    """YAML without surprises: no Python tags (SafeLoader), no key twice, and 1e-4 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in first:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value}: given twice, first on line {first[key.value]}", problem_mark=key.start_mark
                )
            first[key.value] = line
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class _Setting(NamedTuple):
    value: Any
    where: str
    """what stands before the key in an error: file and line, or nothing"""


def load(path: Path, overrides: Sequence[str]) -> Hyperparameters:
    """Read an experiment file and `key=value` overrides of its hyperparameters.

    Raises:
        ConfigError: listing every problem with its file and line.
    """
    try:
        source = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --config names an experiment file such as config.yaml") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    experiment, lines = _parse(source, str(path))
    return read(experiment, overrides, str(path), lines)


def read(
    experiment: Mapping[str, Any], overrides: Sequence[str], name: str, lines: Mapping[str, int] | None = None
) -> Hyperparameters:
    """The hyperparameters of an experiment's config, e.g. the one that a Determined trial is handed.

    Args:
        experiment: `hyperparameters` and `searcher` are looked at.
        overrides: `key=value` texts, values in YAML.
        name: of the config, for errors.
        lines: on which line each hyperparameter stands.

    Raises:
        ConfigError: listing every problem.
    """
    raw = experiment.get("hyperparameters") or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: hyperparameters: is no mapping of names to values")
    where = {key: f"{name}:{lines[key]}: " if lines else f"{name}: " for key in raw}
    settings = {key: _Setting(value, where[key]) for key, value in raw.items()}
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            problems.append(f"argument {override!r}: is no key=value")
            continue
        value = _parse(f"value: {text}" if text else "value: ''", f"argument {override!r}")[0]["value"]
        settings[key] = _Setting(value, "")
    for key, setting in settings.items():
        if isinstance(setting.value, dict) and "type" in setting.value:  # Determined's way to write a search
            if setting.value["type"] == "const":
                settings[key] = setting._replace(value=setting.value.get("val"))
            else:
                problems.append(
                    f"{setting.where}{key}: a range to search needs a cluster; off it, give one value: {key}=VALUE"
                )
    length = (experiment.get("searcher") or {}).get("max_length")
    if isinstance(length, dict):
        length = next(iter(length.values()), None)  # the older form, {batches: 100}
    if length is not None and not {"max_steps", "max_epochs"} & settings.keys():
        settings["max_steps"] = _Setting(length, f"{name}: searcher.max_length as ")
    return _check(settings, problems)


def _parse(source: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The YAML mapping in `source`, and on which line each key below `hyperparameters` stands."""
    loader = _StrictLoader(source)
    try:
        node = loader.get_single_node()
        parsed = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(parsed, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: is no mapping; an experiment file has hyperparameters: and more")
    inner = next((value for key, value in node.value if key.value == "hyperparameters"), None)
    pairs = inner.value if isinstance(inner, yaml.MappingNode) else []
    return parsed, {key.value: key.start_mark.line + 1 for key, _ in pairs}


def _check(settings: Mapping[str, _Setting], problems: list[str]) -> Hyperparameters:
    """Validate part by part, so that one part's mistakes do not hide another's."""
    known = Hyperparameters.model_fields
    for key in settings.keys() - known.keys():
        near = difflib.get_close_matches(str(key), known, n=1)
        meant = f"; did you mean {near[0]}?" if near else "; python -m lm.config lists all"
        problems.append(f"{settings[key].where}{key}: no such hyperparameter{meant}")
    for part in PARTS:
        mine = {key: setting for key, setting in settings.items() if key in part.model_fields}
        for key, setting in mine.items():
            if isinstance(setting.value, bool) and "bool" not in str(part.model_fields[key].annotation):
                problems.append(f"{setting.where}{key}: {json.dumps(setting.value)} is no {_kind(part, key)}")
        try:
            part.model_validate({key: setting.value for key, setting in mine.items()})
        except ValidationError as error:
            problems += _explain(part, error, mine)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return Hyperparameters.model_validate({key: setting.value for key, setting in settings.items()})


def _explain(part: type[BaseModel], error: ValidationError, settings: Mapping[str, _Setting]) -> list[str]:
    """A line per problem, in the words of the file rather than of the validator."""
    lines = {}
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # a relation between keys; says by itself which
            for line in message.splitlines():
                key = line.partition(":")[0]
                lines[line] = f"{settings[key].where if key in settings else ''}{line}"
            continue
        key = str(problem["loc"][0])
        inner = ".".join(str(part) for part in problem["loc"] if isinstance(part, str) and "[" not in part)
        value = problem["input"]
        shown = json.dumps(value, default=str)
        if problem["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            text = f"{shown} is out of range: {message[0].lower()}{message[1:].replace('Input s', 's')}"
        elif problem["type"] == "value_error":
            text = message
        else:
            text = f"{shown} is no {_kind(part, key)}"
        if problem["type"] in ("missing", "extra_forbidden"):
            text = "is missing" if problem["type"] == "missing" else "no such key"
        name = inner if problem["type"] in ("missing", "extra_forbidden") else key
        lines.setdefault(key + text, f"{settings[key].where}{name}: {text}")
    return list(lines.values())


def _kind(part: type[BaseModel], key: str) -> str:
    """What a value of `key` must be, e.g. "whole number" or "one of relu, gelu, swiglu"."""
    schema = part.model_json_schema()["properties"][key]
    options = schema.get("anyOf", [schema])
    names = []
    for option in options:
        if "enum" in option or "const" in option:
            names.append("one of " + ", ".join(map(str, option.get("enum", [option.get("const")]))))
        else:
            names.append(_KINDS.get(option.get("type", "object"), option.get("type", "mapping")))
    return " or ".join(names)


_KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "array": "list",
    "object": "mapping",
}


# ---- comparing with an earlier run ------------------------------------------------------------------------

IDENTITY = (ModelConfig.model_fields.keys() - {"model"}) | {"dataset", "tokenizer", "shuffle", "seed"}
"""Keys that make a run another run; the data themselves and the total batch are compared by value."""

FREE = MetricsConfig.model_fields.keys() | ProfilingConfig.model_fields.keys() | RunConfig.model_fields.keys()
"""Keys whose change needs no word."""


def refuse_another_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that would go on from it.

    Args:
        before, now: resolved hyperparameters, with `data` (fingerprint) and `total_batch_size`.

    Returns:
        Other changes worth a line, as texts.

    Raises:
        ConfigError: with a line per change that would silently make it another run.
    """
    changed = [key for key in now if key in before and before[key] != now[key]]
    changes = {
        key: f"{key}: {json.dumps(before[key])} in the checkpoint, now {json.dumps(now[key])}" for key in changed
    }
    strict = [changes[key] for key in changed if key in IDENTITY | {"data", "total_batch_size"}]
    if strict:
        raise ConfigError(*strict, "this would be another run: undo the change, or start anew with resume=fresh")
    return [changes[key] for key in changed if key not in FREE]


# ---- explaining -------------------------------------------------------------------------------------------


def table() -> str:
    """The hyperparameters as a Markdown table."""
    rows = ["| key | default | meaning | values |", "|---|---|---|---|"]
    for part in PARTS:
        rows.append(f"| **{OWNERS[part.__name__]}** | | | |")
        for key, field in part.model_fields.items():
            default = json.dumps(field.default, default=str)
            rows.append(f"| `{key}` | `{default}` | {field.description} | {_kind(part, key)} |")
    return "\n".join(rows)


def schema() -> dict[str, Any]:
    """JSON Schema of an experiment file: our hyperparameters are checked, the platform's keys left alone."""
    inner = Hyperparameters.model_json_schema()
    definitions = inner.pop("$defs", {})
    properties = {"hyperparameters": inner}
    return {"type": "object", "$defs": definitions, "properties": properties, "required": ["hyperparameters"]}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1) if "--schema" in sys.argv[1:] else table())
