"""All parts' settings as one flat mapping: read, checked, compared, explained.

python -m lm.config            the table of hyperparameters
python -m lm.config --schema   JSON Schema of an experiment file, for editors
python -m lm.config --write    both into their places: README.md and docs/hyperparameters.schema.json
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
)
from pydantic_core import ErrorDetails

from lm import strict_yaml
from lm.checkpoint.checkpointer import CheckpointConfig
from lm.data.loader import DataConfig
from lm.errors import ConfigError
from lm.metrics.accumulator import MetricsConfig
from lm.optim import OptimConfig
from lm.parallelize import ParallelConfig
from lm.precision import PrecisionConfig
from lm.profiling import ProfilingConfig
from model import ModelConfig

DEFAULT_STEPS = 100
DEFAULT_SEED = 42


class RunConfig(BaseModel):
    """The settings of `fsdp.py` itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_steps: int | None = Field(
        None, gt=0, description="optimizer steps of the whole run; null = searcher.max_length, else 100"
    )
    max_epochs: float | None = Field(
        None, le=1e6, description="end after so many passes over the data; below 0 = only validate and generate"
    )
    seed: int | None = Field(None, ge=0, description="of weights, order and dropout; null = the trial's, else 42")
    run_name: str | None = Field(None, description="folder below runs/; null = the config file's name")
    prompt: str | None = Field(None, description="text to continue at the end of the run")
    num_tokens: int = Field(100, ge=0, description="tokens generated from prompt")
    collective_timeout: float = Field(
        600.0, ge=1, le=604800, description="longest wait of a rank for another (seconds)"
    )

    @field_validator("max_epochs")
    @classmethod
    def _not_zero(cls, epochs: float | None) -> float | None:
        if epochs == 0:
            raise ValueError("0 epochs are nothing to do; use -1 to validate and generate only")
        return epochs

    def run_length(self, epoch: float | None) -> int:
        """Steps of the whole run, where an epoch has `epoch` of them; 0 = validate and generate only.

        Raises:
            ConfigError: epochs are asked for, and nobody knows how long one is.
        """
        if self.max_epochs is None:
            return self.max_steps or DEFAULT_STEPS
        if epoch is None and self.max_epochs > 0:
            raise ConfigError("max_epochs: nobody knows the length of a streamed dataset; set max_steps")
        epoch = epoch or 0.0
        by_epochs = max(0, math.ceil(self.max_epochs * epoch))
        return min(by_epochs, self.max_steps) if self.max_steps else by_epochs


PARTS: dict[str, type[BaseModel]] = {
    "model.py": ModelConfig,
    "lm/data/loader.py": DataConfig,
    "lm/optim.py": OptimConfig,
    "lm/precision.py": PrecisionConfig,
    "lm/parallelize.py": ParallelConfig,
    "lm/checkpoint.py": CheckpointConfig,
    "lm/metrics.py": MetricsConfig,
    "lm/profiling.py": ProfilingConfig,
    "fsdp.py": RunConfig,
}
"""Each file with settings, and what they are."""


class _Sound(BaseModel):
    """Refuses what pydantic lets pass and no setting means: true as a number, inf, NaN, empty or broken text."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_sound(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        parsed = validate(value)
        if isinstance(parsed, str):
            sound = re.fullmatch(r"[^\0\ud800-\udfff]+", parsed)
        elif isinstance(parsed, int | float) and not isinstance(parsed, bool):
            sound = not isinstance(value, bool) and abs(parsed) < 2**63
        else:
            sound = True
        if not sound:
            too_large = isinstance(parsed, int | float) and 2**63 <= abs(parsed) < math.inf
            raise ValueError(f"{_show(value)} is too large, 2^63 or more" if too_large else "")
        return parsed


_SOUND_PARTS = [create_model(part.__name__, __base__=(_Sound, part)) for part in PARTS.values()]


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


# ---- reading ----------------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    value: Any
    label: str
    """what errors call it: file, line and key"""


def load(path: Path, overrides: Sequence[str]) -> Hyperparameters:
    """Read an experiment file and `key=value` overrides of its hyperparameters.

    Raises:
        ConfigError: listing every problem with its file and line.
    """
    contents, lines = strict_yaml.load(path)
    return read(contents, overrides, str(path), lines)


def read(
    contents: Mapping[str, Any], overrides: Sequence[str], name: str, lines: Mapping[str, int] | None = None
) -> Hyperparameters:
    """The hyperparameters of an experiment's config, e.g. the one that a Determined trial is handed.

    Args:
        contents: `hyperparameters` and `searcher` are looked at.
        overrides: `key=value`; the value is YAML, or for a key that holds text the text as it stands.
        name: of the config, for errors.
        lines: where things stand in it, e.g. `{"hyperparameters.lr": 12}`.

    Raises:
        ConfigError: listing every problem.
    """
    raw = contents.get("hyperparameters")
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: hyperparameters: {_show(raw)} is not a mapping of names to values")

    def label(key: str) -> str:
        section, _, inner = key.partition(".")
        at = f":{lines[key]}" if lines and key in lines else ""
        return f"{name}{at}: {inner if section == 'hyperparameters' else key}"

    settings = {key: _Setting(value, label(f"hyperparameters.{key}")) for key, value in raw.items()}
    problems = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if key and key.isprintable() and equals:
            settings[key] = _Setting(_override(key, text), f"argument {key}")
        else:
            problems[override] = f"argument {_show(override)}: is not key=value"
    for key, setting in settings.items():
        match setting.value:  # Determined's way to write what a search varies
            case {"type": "const", "val": value}:
                settings[key] = setting._replace(value=value)
            case {"type": "int" | "double" | "log" | "categorical"}:
                advice = f"a range to search needs a cluster; off it, give one value: {key}=VALUE"
                problems[key] = f"{setting.label}: {advice}"
    searcher = contents.get("searcher")
    length = searcher.get("max_length") if isinstance(searcher, dict) else None
    if isinstance(length, dict):
        length = length.get("batches", length)  # the older form, {batches: 100}
    given = {key for key, setting in settings.items() if setting.value is not None}
    if length is not None and not given & {"max_steps", "max_epochs"}:
        settings["max_steps"] = _Setting(length, label("searcher.max_length"))
    return _check(settings, problems)


def _override(key: str, text: str) -> Any:
    field = Hyperparameters.model_fields.get(key)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    is_mapping = text.startswith("{") and any(get_origin(kind) is dict for kind in kinds)
    if str in kinds and not is_mapping:
        return None if text == "null" and type(None) in kinds else text
    try:
        return strict_yaml.parse(text.strip(), "")[0] if text.strip() else ""
    except ConfigError:
        return text


# ---- checking ---------------------------------------------------------------------------------------------


def _check(settings: Mapping[str, _Setting], problems: dict[str, str]) -> Hyperparameters:
    """Validate part by part, so that one part's mistakes do not hide another's.

    Args:
        problems: lines known already, by key; a key gets no second one.
    """
    values = {key: setting.value for key, setting in settings.items()}
    known = Hyperparameters.model_fields
    for key in values.keys() - known.keys():
        problems[key] = f"{settings[key].label}: no such hyperparameter{_nearest(key, known)}"
    for part in _SOUND_PARTS:
        mine = {key: values[key] for key in part.model_fields if key in values}
        try:
            part.model_validate(mine)
        except ValidationError as error:
            for key, line in (found for problem in error.errors() for found in _explain(part, problem, settings)):
                problems.setdefault(key, line)
    if problems:
        place = {key: at for at, key in enumerate(settings)}
        in_order = sorted(problems, key=lambda key: place.get(key, place.get(key.partition(".")[0], -1)))
        raise ConfigError(*(problems[key] for key in in_order))
    hp = Hyperparameters.model_validate(values)
    if hp.float8 and (tokens := hp.batch_size * hp.max_seq_len) % 16:  # a product over tokens makes weights' gradients
        raise ConfigError(f"{settings['float8'].label}: batch_size x max_seq_len is {tokens}, no multiple of 16")
    return hp


def _explain(
    part: type[BaseModel], problem: ErrorDetails, settings: Mapping[str, _Setting]
) -> Iterator[tuple[str, str]]:
    """Keys and lines that say what is wrong, in the words of the file rather than of the validator."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # a relation between keys; says by itself which
        for line in message.splitlines():
            key = line.partition(":")[0]
            yield key, settings[key].label + line.removeprefix(key) if key in settings else line
        return
    shape = part.model_json_schema()
    nested = {key: inner for model in shape.get("$defs", {}).values() for key, inner in model["properties"].items()}
    key, *rest = map(str, problem["loc"])
    value, name, wanted = settings[key].value, settings[key].label, shape["properties"][key]
    if rest and (rest[0] in nested or problem["type"] == "extra_forbidden"):
        key, name = f"{key}.{rest[0]}", f"{name}.{rest[0]}"
        value, wanted = problem["input"], nested.get(rest[0], {})
    mappings = [option for option in wanted.get("anyOf", ()) if option.get("type") == "object"]
    if mappings and isinstance(value, dict):
        if problem["type"] == "string_type":  # what is wrong with it as a mapping comes, too
            return
        if rest[1:]:
            value, name, wanted = problem["input"], f"{name}: {rest[1]}", mappings[0]["additionalProperties"]
    text = f"{_show(value)} is not {_kind(wanted)}"
    if problem["type"] == "missing":
        text = f"is missing; {_kind(wanted)} is needed"
    elif problem["type"] == "extra_forbidden":
        text = f"no such key{_nearest(rest[0], nested)}"
    elif problem["type"] == "string_type":
        text += "; put it in quotes"
    elif problem["type"] == "value_error" and message:
        text = message
    yield key, f"{name}: {text}"


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; python -m lm.config lists all"


def _show(value: Any) -> str:
    """`value` as YAML would spell it, on one line."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # it holds itself, or is very deep
        text = "this"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(wanted: Mapping[str, Any]) -> str:
    """What a value must be, from its JSON Schema: "a whole number > 0 or null", "one of relu, gelu, swiglu"."""
    match wanted:
        case {"anyOf": options}:
            return " or ".join(map(_kind, options))
        case {"enum": names}:
            return f"one of {', '.join(names)}"
        case {"const": name}:
            return name
        case {"prefixItems": [first, *_] as items}:
            return f"a list of {len(items)} {_kind(first).removeprefix('a ')}s"
    bounds = [f"{sign} {wanted[bound]:.15g}" for bound, sign in _BOUNDS.items() if bound in wanted]
    return " ".join([_KINDS[wanted.get("type", "object")], " and ".join(bounds)]).strip()


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


# ---- explaining -------------------------------------------------------------------------------------------


def table() -> str:
    """The hyperparameters as a Markdown table."""
    rows = ["| key | default | meaning | values |", "|---|---|---|---|"]
    for file, part in PARTS.items():
        rows.append(f"| **{file}** | | | |")
        shapes = part.model_json_schema()["properties"]
        for key, field in part.model_fields.items():
            default = json.dumps(field.default)
            rows.append(f"| `{key}` | `{default}` | {field.description} | {_kind(shapes[key])} |")
    return "\n".join(rows)


def schema() -> dict[str, Any]:
    """JSON Schema of an experiment file: our hyperparameters are checked, the platform's keys left alone."""
    inner = Hyperparameters.model_json_schema()
    definitions = inner.pop("$defs", {})
    properties = {"hyperparameters": inner}
    return {"type": "object", "$defs": definitions, "properties": properties, "required": ["hyperparameters"]}


def write_docs() -> None:
    """Bring README.md's table and docs/hyperparameters.schema.json up to date."""
    root = Path(__file__).parent.parent
    (root / "docs" / "hyperparameters.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
    between = re.compile(r"(?<=<!-- hyperparameters -->\n).*?(?=<!-- /hyperparameters -->)", re.DOTALL)
    readme = root / "README.md"
    readme.write_text(between.sub(lambda _: table() + "\n", readme.read_text()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(table())
        case ["--schema"]:
            print(json.dumps(schema(), indent=1))
        case ["--write"]:
            write_docs()
        case _:
            sys.exit(__doc__)
