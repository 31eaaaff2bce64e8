"""All hyperparameters as one flat mapping: read, validated and documented.

    python -m lm.config [KEY ...] [--presets]

Lists all hyperparameters, describes each KEY, or lists the presets. `--write` writes
docs/hyperparameters.md and its JSON Schema for editors.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from lm.checkpoint.checkpointer import CheckpointConfig
from lm.data.run_data import DataConfig, default_vocab_size
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError, command
from lm.fields import Fixed, Unlogged, aliases_of
from lm.launch.console import announce
from lm.metrics.accumulator import MetricsConfig
from lm.training import lora
from lm.training.lora import LoraConfig
from lm.training.optim import OptimConfig
from lm.training.parallelize import ParallelConfig
from lm.training.precision import PrecisionConfig
from lm.training.profiling import ProfilingConfig
from model import PRESETS, ModelConfig

ROOT = Path(__file__).parent.parent
DEFAULT_STEPS = 100
DEFAULT_SEED = 42


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    """Length, seed and name of the run, and its samples."""

    max_steps: Unlogged[int | None] = Field(
        None,
        gt=0,
        description="optimizer steps; null = searcher.max_length, else 100",
        json_schema_extra={"aliases": ["max_iters"]},
    )
    max_epochs: Unlogged[float | None] = Field(
        None,
        le=1e6,
        description="passes over the data, instead of max_steps; below 0 = only validate and generate",
        json_schema_extra={"aliases": ["num_train_epochs", "epochs"]},
    )
    seed: Fixed[int | None] = Field(
        None, ge=0, description="of weights, data order and dropout; null = the trial's, else 42"
    )
    run_name: Unlogged[str | None] = Field(
        None,
        description="directory under runs/; null = the config file's name",
        json_schema_extra={"aliases": ["output_dir"]},
    )
    prompt: Unlogged[str | None] = Field(
        None, description="text that samples continue; null = the start of the validation data"
    )
    num_tokens: Unlogged[int] = Field(
        100, ge=0, description="tokens per sample, each a forward pass; 0 = no samples"
    )
    collective_timeout: Unlogged[float] = Field(
        600.0, ge=1, le=604800, description="longest wait for another rank (seconds)"
    )

    @field_validator("max_epochs")
    @classmethod
    def _not_zero(cls, epochs: float | None) -> float | None:
        if epochs == 0:
            raise ValueError("0 epochs train nothing; use -1 to only validate and generate")
        return epochs

    def run_length(self, steps_per_epoch: float | None) -> int:
        """Return the number of steps, 0 to only validate and generate; `steps_per_epoch` is None for streamed data."""
        if self.max_epochs is None:
            return self.max_steps or DEFAULT_STEPS
        if steps_per_epoch is None and self.max_epochs > 0:
            problem = "max_epochs: the length of a streamed dataset is unknown; set max_steps"
            raise ConfigError(problem)
        steps = max(0, math.ceil(self.max_epochs * (steps_per_epoch or 0.0)))
        return min(steps, self.max_steps or steps)


class Hyperparameters(
    RunConfig,
    ProfilingConfig,
    MetricsConfig,
    CheckpointConfig,
    ParallelConfig,
    PrecisionConfig,
    OptimConfig,
    LoraConfig,
    DataConfig,
    ModelConfig,
    frozen=True,
):
    """Every key of `hyperparameters:`. A part is passed all and reads those of its config class."""

    @property
    def n_trained_parameters(self) -> int:
        """Number of trained parameters: those of the adapters, or all."""
        return lora.n_trained_parameters(self, self)

    @property
    def training_flops_per_token(self) -> float:
        """FLOPs per token of forward and backward at `max_seq_len`."""
        return lora.training_flops_per_token(self, self)


PARTS: tuple[type[BaseModel], ...] = Hyperparameters.__bases__[::-1]


def _json_schema() -> dict[str, Any]:
    schema = Hyperparameters.model_json_schema()
    for key in schema["properties"].values():
        key.pop("aliases", None)  # not a word of JSON Schema
    return schema


_SCHEMA = _json_schema()


class _Strict(BaseModel, allow_inf_nan=False, str_min_length=1):
    """Refuses values that pydantic accepts but no hyperparameter means: true as a number, inf, "", NUL, 2^63."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        parsed = validate(value)
        if isinstance(parsed, int | float) and abs(parsed) >= 2**63:
            raise ValueError(f"{_show(value)} is too large, 2^63 or more")
        is_true_as_number = isinstance(value, bool) and not isinstance(parsed, bool)
        if is_true_as_number or (isinstance(parsed, str) and "\0" in parsed):
            raise PydanticCustomError("not_accepted", "")
        return parsed


_STRICT_PARTS = [create_model(part.__name__, __base__=(_Strict, part)) for part in PARTS]

_Errors = dict[tuple[str, ...], ConfigError]
"""by key, e.g. ("lr",) or ("rope_scaling", "factor")"""

_PROBLEMS = {
    "missing": "is missing; {accepted} is needed",
    "extra_forbidden": "no such key{nearest}",
    "string_type": "{value} is not {accepted}; put it in quotes",
    "string_too_short": "{value} is empty; {accepted} is needed",
    "value_error": "{message}",
}
"""What is wrong, by pydantic's error type; for all others, "{value} is not {accepted}"."""
_TYPES = {
    "integer": "an integer",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


HELP = "python -m lm.config lists all hyperparameters, python -m lm.config KEY describes one."

Defaults = Callable[[str], Mapping[str, Any]]
"""Maps `init_from` to the hyperparameters that its model sets, and its tokenizer (None = it has none)."""


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--lr=1e-3` and `--lr 1e-3` on a command line to `lr=1e-3`."""
    rewritten, rest = [], iter(arguments)
    for argument in rest:
        key, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and key not in ("", "config", "dry-run", "help"):
            rewritten.append(f"{key.replace('-', '_')}={value if equals else next(rest, '')}")
        else:
            rewritten.append(argument)
    return rewritten


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of fsdp.py (default: that of this process): `config`, `overrides`, `dry_run`."""
    parser = argparse.ArgumentParser(
        description="Train a language model with PyTorch FSDP.", epilog=HELP
    )
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="hyperparameters to change"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the memory of a step, then exit",
    )
    return parser.parse_intermixed_args(
        as_overrides(sys.argv[1:] if arguments is None else arguments)
    )


def load(
    path: Path,
    overrides: Sequence[str],
    defaults: Defaults | None = None,
    trial: Mapping[str, Any] | None = None,
) -> Hyperparameters:
    """Read the config of a Determined trial's experiment, or without one the experiment file at `path`; see `read`."""
    if trial is not None:
        return read(trial, overrides, "trial", defaults=defaults)
    from lm import strict_yaml  # benchmarks.gpu runs without PyYAML

    contents, lines = strict_yaml.load(path)
    return read(contents, overrides, str(path), lines, defaults)


def read(
    contents: Mapping[str, Any],
    overrides: Sequence[str],
    name: str,
    lines: Mapping[str, int] | None = None,
    defaults: Defaults | None = None,
) -> Hyperparameters:
    """Return the hyperparameters of an experiment's config, e.g. of the one that Determined passes to a trial.

    Args:
        overrides: `key=value`; the value is YAML, or for a key that accepts a string, the literal
            text.
        name: of the config in errors, with `lines` of its keys, e.g. `{"hyperparameters.lr": 12}`.
        defaults: values of keys that are not set, by `init_from`; keys that are set must agree with
            them.

    Raises:
        ConfigError: lists every problem.
    """
    raw = contents.get("hyperparameters")
    raw = {} if raw is None else raw

    def label(key: str) -> str:
        line = f":{lines[key]}" if lines and key in lines else ""
        return f"{name}{line}: {key.removeprefix('hyperparameters.')}"

    if not isinstance(raw, dict):
        raise ConfigError(
            f"{label('hyperparameters')}: {_show(raw)} is not a mapping of keys to values"
        )
    values, labels = dict(raw), {key: label(f"hyperparameters.{key}") for key in raw}
    errors: _Errors = {}
    for key in lines or ():
        if (
            key in Hyperparameters.model_fields and key != "checkpoint_storage"
        ):  # a section of Determined's, too
            errors[(key,)] = ConfigError(
                f"{label(key)}: is not part of hyperparameters; indent it below that line"
            )
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if key and key.isprintable() and equals:
            values[key], labels[key] = _parse_override(key, text), f"argument {key}"
        else:
            hint = (
                f"; did you mean --config {override}?"
                if override.endswith((".yaml", ".yml"))
                else ""
            )
            errors[(override,)] = ConfigError(f"argument {_show(override)}: is not key=value{hint}")
    # On the command line, a preset overrides what shapes the model in the file, and lora_rank=null
    # its adapters.
    preset = PRESETS.get(str(values.get("model")), {})
    shape = preset.keys() | (
        ModelConfig.model_fields.keys() - {"dropout"} if "d_model" in preset else set()
    )
    adapters = LoraConfig.model_fields.keys() if values.get("lora_rank") is None else set[str]()
    for cause, keys in (("model", shape), ("lora_rank", adapters)):
        if labels.get(cause) == f"argument {cause}":
            replaced = [key for key in raw if key in keys and labels[key] != f"argument {key}"]
            shown = ", ".join(f"{key}: {_show(values.pop(key))}" for key in replaced)
            if shown:
                announce(f"{cause}={values[cause] or 'null'} overrides {shown} of {name}")
    for key, value in values.items():
        match value:  # how Determined writes what a search varies
            case {"type": "const", "val": constant}:
                values[key] = constant
            case {"type": "int" | "double" | "log" | "categorical"}:
                advice = f"search ranges need a cluster; without one, set one value: {key}=VALUE"
                errors[(key,)] = ConfigError(f"{labels[key]}: {advice}")
    match contents.get("searcher"):
        case {"max_length": {"batches": length}} | {"max_length": length} if length is not None:
            if values.get("max_steps") is None and values.get("max_epochs") is None:
                values["max_steps"], labels["max_steps"] = length, label("searcher.max_length")
    if values.get("vocab_size") is None:
        values.pop("vocab_size", None)
    if defaults and isinstance(values.get("init_from"), str):
        values |= _apply_defaults(defaults(values["init_from"]), values, labels, errors)
    hp = _validate(values, labels, errors)
    if hp.dataset == "synthetic" or "vocab_size" in PRESETS.get(hp.model or "", {}) | values:
        return hp
    return hp.model_copy(update={"vocab_size": default_vocab_size(hp)})


def _apply_defaults(
    defaults: Mapping[str, Any], values: Mapping[str, Any], labels: dict[str, str], errors: _Errors
) -> dict[str, Any]:
    """Return the values of the keys that are not set; report those that are set otherwise."""
    if not defaults:
        return {}
    source = values["init_from"]
    given = {**PRESETS.get(str(values.get("model")), {}), **values}
    theirs = {key: value for key, value in defaults.items() if key in ModelConfig.model_fields}
    structure = ModelConfig.model_validate(theirs).structure()
    for key in structure.keys() & given.keys():
        try:
            same = (
                ModelConfig.model_validate(theirs | {key: given[key]}).structure()[key]
                == structure[key]
            )
        except ValidationError:
            continue  # `_validate` reports it
        if not same:
            label = labels.get(key) or f"{labels['model']}: {key}"
            problem = f"{_show(given[key])} differs from {_show(structure[key])} in {source}"
            errors[(key,)] = ConfigError(f"{label}: {problem}; remove {key}, or use other weights")
    missing = {
        key: value for key, value in defaults.items() if key not in given and key != "tokenizer"
    }
    labels |= {key: f"init_from: {source}: {key}" for key in missing}
    dataset, tokenizer = values.get("dataset", "synthetic"), values.get("tokenizer")
    if tokenizer is None and dataset != "synthetic":
        if defaults["tokenizer"] is None and dataset != "tokens":
            problem = f"init_from: {source} has no tokenizer.json; set tokenizer to the one that it was trained with"
            errors[("tokenizer",)] = ConfigError(problem)
        missing["tokenizer"] = defaults["tokenizer"]
        labels.setdefault("tokenizer", f"init_from: {source}: tokenizer")
    elif isinstance(tokenizer, str) and defaults["tokenizer"] is not None:
        try:
            if load_tokenizer(tokenizer).identity != load_tokenizer(defaults["tokenizer"]).identity:
                problem = f"{labels['tokenizer']}: {tokenizer} differs from the one in {source}; remove tokenizer"
                errors[("tokenizer",)] = ConfigError(f"{problem}, or use other weights")
        except ConfigError as error:
            errors[("tokenizer",)] = error
    return missing


def _parse_override(key: str, text: str) -> Any:
    field = Hyperparameters.model_fields.get(key)
    types = (field.annotation, *get_args(field.annotation)) if field else ()
    is_mapping = text.startswith("{") and any(get_origin(kind) is dict for kind in types)
    if str in types and not is_mapping:
        return None if text == "null" and type(None) in types else text
    from lm import strict_yaml

    try:
        return strict_yaml.parse(text.strip(), "")[0] if text.strip() else ""
    except ConfigError:
        return text


def _validate(
    values: Mapping[str, Any], labels: Mapping[str, str], errors: _Errors
) -> Hyperparameters:
    """Validate each part separately, so that an error in one does not hide the relations between keys of another."""
    for key in values.keys() - Hyperparameters.model_fields.keys():
        nearest = _nearest(key, Hyperparameters.model_fields)
        errors[(key,)] = ConfigError(f"{labels[key]}: no such hyperparameter{nearest}")
    for part in _STRICT_PARTS:
        try:
            part.model_validate({key: values[key] for key in part.model_fields if key in values})
        except ValidationError as invalid:
            # The innermost first: a mapping's wrong key hides that the mapping is not a string
            # either.
            for problem in sorted(invalid.errors(), key=lambda problem: -len(problem["loc"])):
                for path, error in _explain(problem, values, labels).items():
                    if not any(
                        path == known[: len(path)] or known == path[: len(known)]
                        for known in errors
                    ):
                        errors[path] = error
    if errors:
        position = {key: index for index, key in enumerate(values)}
        raise ConfigError.merge(
            errors[path] for path in sorted(errors, key=lambda path: position.get(path[0], -1))
        )
    hp = Hyperparameters.model_validate(values)
    if (
        hp.float8 and (tokens := hp.batch_size * hp.max_seq_len) % 16
    ):  # the inner dimension of weight gradients
        problem = f"{labels['float8']}: batch_size x max_seq_len is {tokens}, not a multiple of 16"
        raise ConfigError(problem)
    if hp.lora_rank:
        found = list(lora.adapter_problems(hp, hp))
        if hp.init_from is None:
            problem = f"adapters of rank {hp.lora_rank} need weights to adapt; set init_from, or remove lora_rank"
            found.append(("lora_rank", problem))
        if hp.float8:
            problem = f"{hp.float8} does not support adapters (lora_rank: {hp.lora_rank}); use float8: null"
            found.append(("float8", problem))
        if found:
            raise ConfigError(*(f"{labels.get(key, key)}: {problem}" for key, problem in found))
    return hp


def _explain(
    problem: ErrorDetails, values: Mapping[str, Any], labels: Mapping[str, str]
) -> _Errors:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem[
        "loc"
    ]:  # relations between keys: one per line, which starts with a key and names the others
        errors = {}
        for line in message.splitlines():
            key = line.partition(":")[0]
            errors[(key,)] = ConfigError(labels.get(key, key) + line.removeprefix(key))
        return errors
    key, *rest = map(str, problem["loc"])
    path, value, siblings, schema = (key,), values[key], {}, _SCHEMA["properties"][key]
    for name in rest:  # also names of union members, e.g. "dict[str,float]"
        if isinstance(value, dict) and (name in value or problem["type"] == "missing"):
            siblings = _nested(schema)
            path, value, schema = (
                (*path, name),
                value.get(name),
                siblings.get(name, siblings.get("*", {})),
            )
    is_item = isinstance(problem["loc"][-1], int)  # of a list, which is shown as one value
    is_not_text = problem["type"] == "string_type" and isinstance(
        value, dict | list
    )  # with or without quotes
    template = _PROBLEMS.get(
        "" if is_item or is_not_text else problem["type"], "{value} is not {accepted}"
    )
    accepted, nearest = _accepted(schema), _nearest(path[-1], siblings)
    text = template.format(value=_show(value), accepted=accepted, message=message, nearest=nearest)
    return {path: ConfigError(f"{'.'.join((labels[key], *path[1:]))}: {text}")}


def _nested(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of each key of a mapping that `schema` accepts, "*" for any key."""
    for option in schema.get("anyOf", ()):
        if "$ref" in option:
            return _SCHEMA["$defs"][option["$ref"].rpartition("/")[2]]["properties"]
        if "additionalProperties" in option:
            return {"*": option["additionalProperties"]}
    return {}


def _nearest(key: str, known: Iterable[str]) -> str:
    fields = Hyperparameters.model_fields
    near = [ours for ours, field in fields.items() if key in aliases_of(field)]
    if not near:
        near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else "; python -m lm.config lists all"


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # contains itself, or is nested deeply
        text = "this"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _accepted(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON Schema accepts: "an integer > 0 or null", "one of relu, gelu, swiglu"."""
    match schema:
        case {"anyOf": options}:
            return " or ".join(map(_accepted, options))
        case {"enum": names}:
            return f"one of {', '.join(names)}"
        case {"const": name}:
            return name
        case {"format": "date"}:
            return "a date"
        case {"items": {"enum": _}}:
            return "a list of these"
        case {"items": {"type": kind}}:
            return f"a list of {kind}s"
        case {"prefixItems": items}:
            return f"a list of {len(items)} {items[0]['type']}s"
    bounds = " and ".join(
        f"{sign} {schema[bound]:.15g}" for bound, sign in _BOUNDS.items() if bound in schema
    )
    kind = schema.get("type", "object")
    return f"{_TYPES.get(kind, f'a {kind}')} {bounds}".rstrip()


def page() -> str:
    """Return docs/hyperparameters.md: the keys of every part, and the presets."""
    lines = [
        "# Hyperparameters\n\nAll keys of `hyperparameters:` in an experiment file and of `key=value` arguments."
    ]
    lines += [
        "`make docs` writes this page, and the [JSON Schema](hyperparameters.schema.json) for editors."
    ]
    for part in PARTS:
        summary = (part.__doc__ or "").partition("\n")[0]
        lines += [f"\n## {Path(inspect.getfile(part)).relative_to(ROOT)}\n\n{summary}\n"]
        lines += ["| key | default | accepted values | meaning |\n|---|---|---|---|"]
        lines += [
            f"| `{name}` | `{default}` | {accepted} | {text} |"
            for name, default, accepted, text in _rows(part)
        ]
    lines += [
        "\n## Presets\n\nValues of `model`. A key that is set in the file overrides the preset's.\n"
    ]
    lines += ["| model | parameters | keys |\n|---|---|---|"]
    lines += [f"| `{name}` | {size} | {keys} |" for name, size, keys in _presets()]
    return "\n".join(lines) + "\n"


def _presets() -> list[tuple[str, str, str]]:
    sizes = {
        name: ModelConfig.model_validate({"model": name}).n_parameters / 1e6 for name in PRESETS
    }
    keys = {
        name: ", ".join(f"{key}: {json.dumps(value)}" for key, value in PRESETS[name].items())
        for name in PRESETS
    }
    return [(name, f"{sizes[name]:,.0f}M", keys[name]) for name in PRESETS]


def _rows(part: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, default, accepted values and meaning of the keys of `part`, including those inside of a mapping."""
    for key, field in part.model_fields.items():
        schema = _SCHEMA["properties"][key]
        nested = {
            f"{key}.{name}": ("required", inner)
            for name, inner in _nested(schema).items()
            if name != "*"
        }
        for name, (default, inner) in ({key: (json.dumps(field.default), schema)} | nested).items():
            yield name, default, _accepted(inner), inner["description"]


def _fit(rows: Sequence[tuple[str, str, str]]) -> str:
    """Align `rows` in columns, the last of which is wrapped at the width of the terminal."""
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent, width = (
        " " * (first + second + 4),
        max(first + second + 24, shutil.get_terminal_size().columns),
    )
    texts = [f"{name:<{first}}  {value:<{second}}  {text}" for name, value, text in rows]
    return "\n".join(textwrap.fill(text, width, subsequent_indent=indent) for text in texts)


def schema() -> str:
    """Return docs/hyperparameters.schema.json: a value or a search range for each key; Determined's own are free."""
    types = ["const", "int", "double", "log", "categorical"]
    search = {"type": "object", "required": ["type"], "properties": {"type": {"enum": types}}}
    keys = {
        key: {"anyOf": [value, {"$ref": "#/$defs/Search"}]}
        for key, value in _SCHEMA["properties"].items()
    }
    inner = {"type": "object", "additionalProperties": False, "properties": keys}
    outer = {
        "type": "object",
        "$defs": _SCHEMA["$defs"] | {"Search": search},
        "required": ["hyperparameters"],
    }
    return json.dumps(outer | {"properties": {"hyperparameters": inner}}, indent=1) + "\n"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.config", description="List and describe hyperparameters."
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="hyperparameters to describe (default: list all)"
    )
    parser.add_argument("--presets", action="store_true", help="list the presets of `model`")
    parser.add_argument(
        "--write", action="store_true", help="write docs/hyperparameters.md and the JSON Schema"
    )
    args = parser.parse_args(arguments)
    if args.write:
        (ROOT / "docs" / "hyperparameters.md").write_text(page())
        (ROOT / "docs" / "hyperparameters.schema.json").write_text(schema())
        return 0
    if unknown := [key for key in args.keys if key not in Hyperparameters.model_fields]:
        known = Hyperparameters.model_fields
        raise ConfigError(
            *(f"{key}: no such hyperparameter{_nearest(key, known)}" for key in unknown)
        )
    rows = [row for part in PARTS for row in _rows(part)]
    shown = [(key, default, text) for key, default, _, text in rows if default != "required"]
    if args.keys:
        rows = [row for row in rows if row[0].partition(".")[0] in args.keys]
        shown = [(key, default, f"{text} ({accepted})") for key, default, accepted, text in rows]
    print(_fit(_presets() if args.presets else shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
