"""The hyperparameters: read from one flat mapping, validated, explained and documented.

    python -m lm.config [KEY ...] [--presets]

Lists all hyperparameters, describes each KEY, or lists the presets.

Reading order: `Hyperparameters`, then `read_hyperparameters`, whose steps follow in its order; then
how errors of pydantic become sentences, the tables, and the command.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lm.checkpoint.config import CheckpointConfig
from lm.data.config import DataConfig
from lm.data.hub import find_directory
from lm.errors import ConfigError, command, error_prefix
from lm.fields import Config, Fixed, Unlogged, Varied, aliases_of, need_of
from lm.launch.console import warn
from lm.metrics.config import MetricsConfig
from lm.model_config import FORMER_KEYS, USE_INIT_FROM, ModelConfig
from lm.objectives.config import ObjectiveConfig
from lm.presets import PRESETS
from lm.tasks.questions import TasksConfig
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
from lm.transformers_config import AnyModelConfig, TransformersConfig, model_config
from lm.units import format_parameters

REPOSITORY = Path(__file__).parent.parent
DEFAULT_STEPS = 100
DEFAULT_SEED = 42


class RunConfig(Config, frozen=True):
    """Length, seed and name of the run, and its samples."""

    max_steps: Varied[Unlogged[int | None]] = Field(
        None,
        gt=0,
        description="optimizer steps; null = searcher.max_length, else 100",
        json_schema_extra={"aliases": ["max_iters"]},
    )
    max_epochs: Unlogged[float | None] = Field(
        None,
        le=1e6,
        description="passes over the data, instead of max_steps; below 0 = only validate and"
        " generate",
        json_schema_extra={"aliases": ["num_train_epochs", "epochs"]},
    )
    stop_at_step: Unlogged[int | None] = Field(
        None,
        gt=0,
        description="stop after this step with a checkpoint, in the schedule of all steps; null ="
        " train them all",
    )
    seed: Varied[Fixed[int | None]] = Field(
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
            parts[name] = part.model_validate(_of_part(values, part))
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
        """Return a copy with other `values` of some keys, which are not validated."""
        _require_known(values, PARTS)
        parts: dict[str, Any] = {}
        for name, part in PARTS.items():
            parts[name] = getattr(self, name).model_copy(update=_of_part(values, part))
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
        if isinstance(self.model, ModelConfig) and self.model.n_experts is not None:
            size += f", {format_parameters(self.model.n_active_parameters)} of them active"
        return size


PARTS: Mapping[str, type[Config]] = get_type_hints(Hyperparameters) | {"model": ModelConfig}
"""The config of each part, by its name in `Hyperparameters`."""


def parts_of(values: Mapping[str, Any]) -> Mapping[str, type[Config]]:
    """Return the config of each part, where the model can be one of transformers."""
    if "transformers_config" in values:
        return {**PARTS, "model": TransformersConfig}
    return PARTS


FIELDS: dict[str, FieldInfo] = {}
"""All keys."""
for _part in PARTS.values():
    FIELDS |= _part.model_fields


_KEYS_OF_ALIASES = {alias: key for key, info in FIELDS.items() for alias in aliases_of(info)}


def _require_known(values: Mapping[str, Any], parts: Mapping[str, type[Config]]) -> None:
    unknown = set(values)
    for part in parts.values():
        unknown -= part.model_fields.keys()
    if unknown:
        raise ValueError(f"no such hyperparameter: {', '.join(sorted(unknown))}")


def _of_part(values: Mapping[str, Any], part: type[Config]) -> dict[str, Any]:
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
        key.pop("aliases", None)  # not a word of JSON Schema
    return {"properties": properties, "$defs": definitions}


SCHEMA = _json_schema()
"""Of all keys."""


# ---- reading

ModelDefaults = Callable[[str], Mapping[str, Any]]
"""Maps `init_from` to the hyperparameters of its model and its `tokenizer` (None = it has none).

A plan, which needs no tokenizer, leaves it out. Of adapters, also those of `LoraConfig`. Empty if
it is a checkpoint, which has no defaults.
"""


def load_hyperparameters(
    path: Path,
    overrides: Sequence[str],
    defaults: ModelDefaults | None = None,
) -> Hyperparameters:
    """Read the experiment file at `path`; see `read_hyperparameters`."""
    from lm import strict_yaml  # benchmarks.gpu runs without PyYAML

    contents, lines = strict_yaml.load_experiment(path)
    return read_hyperparameters(contents, overrides, str(path), lines, defaults)


@dataclass
class _Draft:
    """Hyperparameters that are being read: what is set, where, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """where each key is set, as errors name it: `exp.yaml:12: lr`, or `argument lr`"""
    arguments: set[str] = field(default_factory=set)
    """keys that are set on the command line"""
    errors: dict[tuple[str, ...], ConfigError] = field(default_factory=dict)
    """by key, e.g. ("lr",) or ("rope_scaling", "factor")"""
    warnings: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, label: str) -> None:
        self.values[key] = value
        self.labels[key] = label

    def label(self, key: str) -> str:
        return self.labels.get(key, key)

    def refuse(self, key: str, problem: str, label: str | None = None) -> None:
        """Add an error of `key`; `label` names what is wrong if it is not where the key is set."""
        path = (key,)
        self.errors[path] = ConfigError(f"{label or self.label(key)}: {problem}")

    def raise_errors(self) -> None:
        """Raise the errors, if any, in the order of the keys."""
        if not self.errors:
            return
        position = {key: index for index, key in enumerate(self.values)}
        paths = sorted(self.errors, key=lambda path: position.get(path[0], -1))
        raise ConfigError.merge(self.errors[path] for path in paths)

    @property
    def preset(self) -> Mapping[str, Any]:
        """The keys that `model` sets."""
        return PRESETS.get(str(self.values.get("model")), {})


def read_hyperparameters(
    contents: Mapping[str, Any],
    overrides: Sequence[str],
    name: str,
    lines: Mapping[str, int] | None = None,
    defaults: ModelDefaults | None = None,
) -> Hyperparameters:
    """Return the hyperparameters of an experiment's config, e.g. of the one that a trial is passed.

    The value of a key is the first of these that exists:

        1. `key=value` on the command line
        2. the preset of `model=NAME` on the command line
        3. the config
        4. the preset of `model` in the config
        5. the model or the adapters of `init_from`, with which 1 to 4 must agree
        6. the default

    A preset of a size in 2 also drops what else shapes the model in 3, and any argument the keys in
    3 that are not read with it, e.g. lora_rank=null those of adapters.

    Args:
        overrides: `key=value`; the value is YAML, or for a key that accepts a string, the literal
            text, without quotes around it.
        name: of the config in errors, with `lines` of its keys, e.g. `{"hyperparameters.lr": 12}`.
        defaults: None = `init_from` has none.

    Raises:
        ConfigError: lists every problem.
    """
    draft = _read_draft(contents, overrides, name, lines or {})
    for warning in draft.warnings:
        warn(warning)
    its_keys: Mapping[str, Any] = {}
    if defaults is not None and isinstance(draft.values.get("init_from"), str):
        its_keys = defaults(draft.values["init_from"])
        _apply_model_defaults(draft, its_keys)

    hp = _validate(draft)
    _check_combinations(hp, draft)
    if its_keys:
        _warn_of_long_sequences(hp, _model_of(its_keys))
    has_vocab_size = "vocab_size" in draft.values or "vocab_size" in draft.preset
    if hp.data.dataset == "synthetic" or has_vocab_size:
        return hp
    from lm.data.run_data import default_vocab_size

    return hp.replace(vocab_size=default_vocab_size(hp.data))


def check_values(path: Path, overrides: Sequence[str]) -> None:
    """Check what `load_hyperparameters` reads of a file, as far as that needs no other file.

    So it is fast, and needs no PyTorch. What the model of `init_from` sets is unknown here: with
    it, every value is checked by itself.

    Raises:
        ConfigError: lists every problem.
    """
    from lm import strict_yaml

    contents, lines = strict_yaml.load_experiment(path)
    draft = _read_draft(contents, overrides, str(path), lines)
    if draft.values.get("init_from") is None:
        _check_combinations(_validate(draft), draft)
    else:
        _validate_parts(draft, relations=False)
        draft.raise_errors()


def _read_draft(
    contents: Mapping[str, Any], overrides: Sequence[str], name: str, lines: Mapping[str, int]
) -> _Draft:
    """Return what the config and the command line set."""
    draft = _read_section(contents, name, lines)
    for override in overrides:
        _apply_override(draft, override)
    _drop_replaced(draft, name)
    _drop_former_keys(draft)
    _refuse_keys_of_transformers(draft)
    _resolve_search(draft)
    _apply_max_length(draft, contents, name, lines)
    if draft.values.get("vocab_size") is None:
        draft.values.pop("vocab_size", None)  # null lets the preset, or the tokenizer, set it
    for key in ("init_from", "resume"):
        if isinstance(draft.values.get(key), str):
            with error_prefix(key):
                draft.values[key] = find_directory(draft.values[key])
    return draft


def _location(name: str, lines: Mapping[str, int], key: str) -> str:
    """Return where `key`, e.g. "hyperparameters.lr", is set: "exp.yaml:12"."""
    return f"{name}:{lines[key]}" if key in lines else name


def _read_section(contents: Mapping[str, Any], name: str, lines: Mapping[str, int]) -> _Draft:
    """Return what `hyperparameters:` sets; keys of it outside of it are errors."""
    section = contents.get("hyperparameters")
    if section is None:
        section = {}
    if not isinstance(section, dict):
        where = _location(name, lines, "hyperparameters")
        problem = f"{_show(section)} is not a mapping of keys to values"
        raise ConfigError(f"{where}: hyperparameters: {problem}")
    draft = _Draft()
    for key, value in section.items():
        where = _location(name, lines, f"hyperparameters.{key}")
        draft.set(key, value, f"{where}: {key}")
    misplaced = FIELDS.keys() & lines.keys()
    misplaced -= {"checkpoint_storage"}  # also a section of Determined's
    for key in sorted(misplaced, key=lines.__getitem__):
        problem = "is not part of hyperparameters; indent it below that line"
        draft.refuse(key, problem, label=f"{_location(name, lines, key)}: {key}")
    return draft


def _apply_override(draft: _Draft, override: str) -> None:
    """Set what the argument `key=value` says."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if key and key.isprintable() and equals:
        draft.set(key, _parse_override(key, text), f"argument {key}")
        if re.search("[\ud800-\udfff]", text):  # how Python decodes other bytes
            encoding = sys.getfilesystemencoding()
            problem = f"{_show(text)} is not valid in the encoding of this locale, {encoding}"
            draft.refuse(key, f"{problem}; use UTF-8, and set LC_ALL=C.UTF-8")
        draft.arguments.add(key)
        return
    problem = "is not key=value"
    if override.endswith((".yaml", ".yml")):
        problem += f"; did you mean --config {override}?"
    draft.refuse(override, problem, label=f"argument {_show(override)}")


def _parse_override(key: str, text: str) -> Any:
    """Return the value that `text` spells: YAML, or the text itself if `key` accepts a string."""
    types: list[Any] = []
    if key in FIELDS:
        annotation = FIELDS[key].annotation
        types = [annotation, *get_args(annotation)]
    is_mapping = text.startswith("{") and any(get_origin(kind) is dict for kind in types)
    if str in types and not is_mapping:
        is_null = text == "null" and type(None) in types
        if re.fullmatch(r"\"[^\"\\]*\"|'[^']*'", text):
            return text[1:-1]
        return None if is_null else text
    if not text.strip():
        return ""
    from lm import strict_yaml

    try:
        value, _ = strict_yaml.parse_yaml(text.strip(), "")
        return value
    except ConfigError:
        return text


def _drop_replaced(draft: _Draft, name: str) -> None:
    """Drop what the config sets and a key on the command line replaces, or leaves unread."""
    if "model" in draft.arguments:
        shape = set(draft.preset)
        if "d_model" in draft.preset:  # of one size, so nothing of another shape may remain
            shape |= ModelConfig.model_fields.keys() - {"dropout"}
        _drop(draft, shape, "model", name)
    for cause in sorted(draft.arguments):
        unread: list[str] = []
        for key, info in FIELDS.items():
            need = need_of(info)
            if need is not None and need.key == cause and not need.is_met_by(draft.values[cause]):
                unread.append(key)
        _drop(draft, unread, cause, name)


def _drop(draft: _Draft, keys: Collection[str], cause: str, name: str) -> None:
    replaced = [key for key in draft.values if key in keys and key not in draft.arguments]
    shown = [f"{key}: {_show(draft.values.pop(key))}" for key in replaced]
    if shown:
        value = _show(draft.values[cause]).strip('"')
        draft.warnings.append(f"{cause}={value} overrides {', '.join(shown)} of {name}")


def _drop_former_keys(draft: _Draft) -> None:
    """Drop keys of earlier versions, as in a run's config.yaml, unless they change the model."""
    for key, value in FORMER_KEYS.items():
        if draft.values.pop(key, value) != value:
            problem = "no hyperparameter any more, as transformers computes the models that have it"
            draft.refuse(key, f"{problem}; {USE_INIT_FROM}, and remove {key}")


def _resolve_search(draft: _Draft) -> None:
    """Resolve what Determined writes for keys of a search: a mapping with a `type`."""
    for key, value in draft.values.items():
        match value:
            case {"type": "const", "val": constant}:
                draft.values[key] = constant
            case {"type": "int" | "double" | "log" | "categorical"}:
                advice = f"python -m lm.search FILE, or for one run set one value: {key}=VALUE"
                draft.refuse(key, f"a range is for a search; use {advice}")


def _apply_max_length(
    draft: _Draft, contents: Mapping[str, Any], name: str, lines: Mapping[str, int]
) -> None:
    """Let `searcher.max_length` be `max_steps` if nothing else says how long the run is."""
    if draft.values.get("max_steps") is not None or draft.values.get("max_epochs") is not None:
        return
    match contents.get("searcher"):
        case {"max_length": {"batches": length}} | {"max_length": length} if length is not None:
            where = _location(name, lines, "searcher.max_length")
            draft.set("max_steps", length, f"{where}: searcher.max_length")


def _apply_model_defaults(draft: _Draft, defaults: Mapping[str, Any]) -> None:
    """Set the keys that are not set to those of the model of `init_from`; refuse all others."""
    if not defaults:
        return
    source = draft.values["init_from"]
    given = {**draft.preset, **draft.values}
    if "transformers_config" in defaults:
        _check_model_of_transformers(draft, given, defaults)
    else:
        _refuse_other_values(draft, given, defaults, "weights")
    if "lora_rank" in defaults:
        _check_adapters(draft, given, defaults)
    for key, value in defaults.items():
        is_set = key in given
        if "transformers_config" in defaults:
            is_set = key in draft.values  # by no preset
        if not is_set and key != "tokenizer":
            draft.set(key, value, f"init_from: {source}: {key}")

    if "tokenizer" not in defaults:
        return
    dataset = given.get("dataset", "synthetic")
    tokenizer = given.get("tokenizer")
    its_tokenizer = defaults["tokenizer"]
    if tokenizer is None and dataset != "synthetic":
        if its_tokenizer is None and dataset != "tokens":
            remedy = "set tokenizer to the one that it was trained with"
            draft.refuse("tokenizer", f"{source} has no tokenizer.json; {remedy}", "init_from")
        label = draft.labels.get("tokenizer", f"init_from: {source}: tokenizer")
        draft.set("tokenizer", its_tokenizer, label)
    elif isinstance(tokenizer, str) and its_tokenizer is not None:
        from lm.data.tokenizer import load_tokenizer

        try:
            differs = load_tokenizer(tokenizer).identity != load_tokenizer(its_tokenizer).identity
        except ConfigError as error:
            path = ("tokenizer",)
            draft.errors[path] = error
            return
        if differs:
            problem = f"{tokenizer} differs from the one in {source}"
            draft.refuse("tokenizer", f"{problem}; remove tokenizer, or use other weights")


_CONFIG_OF_A_COPY = "config.json of a copy of the model"


def _refuse_keys_of_transformers(draft: _Draft) -> None:
    """Refuse what only a model of transformers itself can set."""
    for key in TransformersConfig.model_fields.keys() - FIELDS.keys():
        if key in draft.values:
            draft.refuse(key, f"no hyperparameter: it is read from init_from; remove {key}")
            del draft.values[key]


def _check_model_of_transformers(
    draft: _Draft, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse keys of `given` that the model of `init_from` does not have, or does not stand."""
    source = draft.values["init_from"]
    model = _model_of(defaults)
    assert isinstance(model, TransformersConfig)
    for key in given:
        label = draft.labels.get(key, f"{draft.label('model')}: {key}")  # of the preset
        ours = _KEYS_OF_ALIASES.get(key, key)
        if key == "vocab_size" and given[key] not in (None, model.vocab_size):
            problem = f"{_show(given[key])} differs from {model.vocab_size} in {source}"
            draft.refuse(key, f"{problem}; remove vocab_size", label)
        elif ours in ModelConfig.model_fields and ours not in TransformersConfig.model_fields:
            problem = f"{source} is a model of transformers ({model.model_type})"
            reason = "whose config.json says it"
            if ours.startswith("router_balance"):
                reason = "whose experts are balanced neither by a loss nor by a bias"
            draft.refuse(key, f"{problem}, {reason}; remove {key}", label)
    if not model.examined.bfloat16 and given.get("amp_dtype", "auto") == "auto":
        warn(f"amp_dtype: null, as {_describe_bfloat16(model)}")
        draft.set("amp_dtype", None, f"init_from: {source}: amp_dtype")
    if model.examined.packing or given.get("dataset") != "jsonl":
        return
    if given.get("packing") is True:
        problem = f"true, but {model.model_type} does not keep samples of one sequence apart"
        draft.refuse("packing", f"{problem}; remove packing")
    elif "packing" not in given:
        warn(
            f"packing: false, as {model.model_type} does not keep samples of one sequence apart:"
            " rows are padded instead"
        )
        draft.set("packing", False, f"init_from: {source}: packing")


def _describe_bfloat16(model: TransformersConfig) -> str:
    details = model.examined.details.get("bfloat16")
    return f"{model.model_type} in bfloat16 is not as exact as its class itself ({details})"


def _refuse_other_values(
    draft: _Draft, given: Mapping[str, Any], defaults: Mapping[str, Any], what: str
) -> None:
    """Refuse keys of `given` with which the weights or adapters of `init_from` mean something else.

    Args:
        what: "weights" or "adapters".
    """
    structure = _structure_of(what, defaults)
    for key in [key for key in structure if key in given]:
        try:
            value = _structure_of(what, {**defaults, key: given[key]})[key]
        except ValidationError:
            continue  # `_validate` reports it
        if value != structure[key]:
            label = draft.labels.get(key, f"{draft.label('model')}: {key}")  # of the preset
            source = draft.values["init_from"]
            problem = f"{_show(given[key])} differs from {_show(structure[key])} in {source}"
            remedy = f"use other {what}"
            if key in ("rope_scaling", "rope_theta"):
                remedy = f"set it in {_CONFIG_OF_A_COPY}"
            draft.refuse(key, f"{problem}; remove {key}, or {remedy}", label)


def _structure_of(what: str, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys on which the meaning of weights or adapters depends, and their values."""
    model = _model_of(defaults)
    if what == "weights":
        return model.structure()
    adapters = LoraConfig.model_validate(_of_part(defaults, LoraConfig))
    return training.adapter_structure(adapters, model)


def _model_of(defaults: Mapping[str, Any]) -> AnyModelConfig:
    """Return the model of `init_from`, from the hyperparameters that it sets."""
    return model_config(_of_part(defaults, parts_of(defaults)["model"]))


def _warn_of_long_sequences(hp: Hyperparameters, model: AnyModelConfig) -> None:
    """Warn of rotary positions for which the `model` of `init_from` was not made."""
    if isinstance(model, TransformersConfig):
        limit = model.max_seq_len
    elif model.positions == "rope":
        limit = _context_length(model)
    else:
        return
    length = hp.model.max_seq_len
    if length <= limit:
        return
    source = hp.checkpoint.init_from
    problem = f"{length} exceeds the {limit} positions for which {source} was made"
    remedy = f"use {limit} or less, or extend them by rope_scaling in {_CONFIG_OF_A_COPY}"
    warn(f"max_seq_len: {problem}; {remedy}")


def _context_length(model: ModelConfig) -> int:
    """Return the positions for which a pretrained model was made, or is extended by its scaling."""
    length = model.context_length
    scaling = model.rope_scaling
    # With llama3, max_position_embeddings is that of the extended model.
    if scaling is None or scaling.rope_type == "llama3":
        return length
    original = scaling.original_max_position_embeddings or length
    return max(length, int(original * scaling.factor))


def _check_adapters(draft: _Draft, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse keys of `given` with which the adapters of `init_from` would mean something else."""
    source = draft.values["init_from"]
    if "lora_rank" in given and given["lora_rank"] is None:
        problem = f"null would train all weights, but {source} holds adapters"
        remedy = "remove lora_rank, or merge them with PEFT's merge_and_unload()"
        raise ConfigError(f"{draft.label('lora_rank')}: {problem}; {remedy}")
    _refuse_other_values(draft, given, defaults, "adapters")


_MAX_UNKNOWN = 20
"""Unknown keys for which the nearest one is searched; that takes a millisecond each."""


def _validate(draft: _Draft) -> Hyperparameters:
    """Return the hyperparameters, or raise all errors in the order of the keys."""
    parts = _validate_parts(draft)
    draft.raise_errors()
    return Hyperparameters(**parts)


def _validate_parts(draft: _Draft, relations: bool = True) -> dict[str, Any]:
    """Return the parts that are valid, by name, and add the errors of all others to `draft`.

    An error in one part does not hide the relations between keys of another.

    Args:
        relations: whether to add errors that concern several keys of a part.
    """
    parts_of_draft = parts_of(draft.values)
    known_keys = FIELDS.keys() | parts_of_draft["model"].model_fields.keys()
    unknown = [key for key in draft.values if key not in known_keys and (key,) not in draft.errors]
    if not relations:  # whose model may be one of transformers, which has no such keys
        of_model = ModelConfig.model_fields
        unknown = [key for key in unknown if _KEYS_OF_ALIASES.get(key) not in of_model]
    for key in unknown[:_MAX_UNKNOWN]:
        if key in training.UNSUPPORTED:
            remedy = f"remove {key}, or train all weights with lora_rank: null"
            draft.refuse(key, f"{training.UNSUPPORTED[key]}; {remedy}")
            continue
        known = [name for part in parts_of_draft.values() for name in part.model_fields]
        if key in draft.arguments:
            known += ["--config", "--dry-run"]
        draft.refuse(key, f"no such hyperparameter{_nearest(key, known)}")
    n_more = len(unknown) - _MAX_UNKNOWN
    if n_more > 0:
        draft.refuse(
            unknown[_MAX_UNKNOWN],
            f"no such hyperparameter; {n_more:,} keys are unknown from here on",
        )
    parts: dict[str, Any] = {}
    for name, part in parts_of_draft.items():
        try:
            parts[name] = part.model_validate(_of_part(draft.values, part))
        except ValidationError as invalid:
            _add_errors(draft, invalid, relations)
    return parts


def _check_combinations(hp: Hyperparameters, draft: _Draft) -> None:
    """Raise ConfigError for keys that do not fit together."""
    problems = [
        *_find_unread(hp),
        *_find_problems_of_combinations(hp),
        *_find_problems_of_pairs(hp),
        *_find_problems_of_adapters(hp),
        *_find_problems_of_transformers(hp),
        *_find_problems_of_experts(hp),
    ]
    if problems:
        raise ConfigError(*(f"{draft.label(key)}: {problem}" for key, problem in problems))


def _find_unread(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield the keys that are set though no part reads them, with the reason and the remedy."""
    for name in PARTS:
        config = getattr(hp, name)
        for key, info in type(config).model_fields.items():
            need = need_of(info)
            if need is None or getattr(config, key) == info.default:
                continue
            value = getattr(config, need.key)
            if not need.is_met_by(value):
                found = "" if not need.values else f", not {value}"
                yield key, f"needs {need}{found}; set it, or remove {key}"


def _find_problems_of_combinations(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys of different parts that do not fit together, with the reason and the remedy."""
    n_tokens = hp.data.batch_size * hp.model.max_seq_len
    multiple = training.FLOAT8_MULTIPLE
    if hp.precision.float8 and n_tokens % multiple:
        problem = f"batch_size x max_seq_len is {n_tokens}, not a multiple of {multiple}"
        yield "float8", problem
    if hp.optim.optimizer == "muon" and hp.parallel.cpu_offload:
        problem = "muon does not update parameters in host memory (cpu_offload: true)"
        yield "optimizer", f"{problem}; use adamw, or more ranks"
    if hp.checkpoint.init_from is None:
        return
    for key in TransferConfig.model_fields:
        if getattr(hp.transfer, key) is not None:
            problem = "scales rates together with initial weights, but init_from loads others"
            remedy = "to train from scratch remove init_from, to fine-tune remove"
            yield key, f"{problem}; {remedy} {key}"


def _find_problems_of_experts(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that do not fit to a mixture of experts of model.py, with the reason."""
    if isinstance(hp.model, TransformersConfig) or hp.model.n_experts is None:
        return
    mixture = f"a mixture (n_experts: {hp.model.n_experts})"
    if hp.precision.float8:
        yield "float8", f"{mixture} has no products of groups of rows in float8; remove float8"
    for key in TransferConfig.model_fields:
        if getattr(hp.transfer, key) is not None:
            problem = f"how the rates of {mixture} scale with its size is not derived"
            yield key, f"{problem}; remove {key}"
    exported = "python -m lm.hf export, and set init_from to the directory"
    if hp.lora.lora_rank is not None:
        problem = f"{mixture} is pretrained without adapters; to fine-tune it, export it with"
        yield "lora_rank", f"{problem} {exported}"
    if hp.objective.of_pairs:
        problem = f"{mixture} is pretrained on text; to prefer replies, export it with"
        yield "objective", f"{problem} {exported}"


def _find_problems_of_pairs(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that do not fit to `objective: dpo`, with the reason and the remedy."""
    if not hp.objective.of_pairs:
        return
    if hp.data.dataset != "jsonl":
        problem = f"dpo reads pairs of replies, and dataset is {hp.data.dataset}"
        yield "objective", f"{problem}; set dataset: jsonl, or remove objective"
    if hp.checkpoint.init_from is None:
        problem = "dpo prefers replies relative to the weights that it starts with"
        yield "objective", f"{problem}; set init_from to the fine-tuned model"
    rates = {"lora_dropout": hp.lora.lora_dropout}
    if isinstance(hp.model, ModelConfig):
        rates["dropout"] = hp.model.dropout
    for key, value in rates.items():
        if value > 0:
            problem = f"{value} would make the model differ from its reference (objective: dpo)"
            yield key, f"{problem}; use 0"


def _find_problems_of_adapters(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys of other parts that do not fit to adapters, with the reason and the remedy."""
    rank = hp.lora.lora_rank
    if rank is None:
        return
    yield from training.adapter_problems(hp.lora, hp.model)
    if hp.optim.optimizer == "muon":
        yield "optimizer", f"muon does not train adapters (lora_rank: {rank}); use adamw"
    if hp.checkpoint.init_from is None:
        problem = f"adapters of rank {rank} need weights to adapt"
        yield "lora_rank", f"{problem}; set init_from, or remove lora_rank"
    if hp.precision.float8:
        problem = f"{hp.precision.float8} does not support adapters (lora_rank: {rank})"
        yield "float8", f"{problem}; use float8: null"


def _find_problems_of_transformers(hp: Hyperparameters) -> Iterator[tuple[str, str]]:
    """Yield keys that do not fit to a model of transformers, with the reason and the remedy."""
    if isinstance(hp.model, ModelConfig):
        return
    kind = hp.model.model_type
    examined = hp.model.examined
    if not hp.data.attend_across_documents and not examined.packing:
        problem = f"false, but {kind} does not keep documents of one sequence apart"
        yield "attend_across_documents", f"{problem}; remove attend_across_documents"
    if hp.precision.amp_dtype == "bfloat16" and not examined.bfloat16:
        yield "amp_dtype", f"bfloat16: {_describe_bfloat16(hp.model)}; use amp_dtype: null"
    mode = hp.parallel.activation_checkpointing
    holds = {
        "none": True,
        "full": examined.full_recomputation,
        "selective": examined.selective_recomputation,
    }
    if not holds[mode]:
        problem = f"{mode}: {kind} cannot recompute its layers so"
        others = [other for other in ("full", "none") if other != mode and holds[other]]
        yield "activation_checkpointing", f"{problem}; use {others[0]}"
    if hp.lora.lora_rank is not None and not examined.lora:
        yield "lora_rank", f"{kind} has no linear layers to adapt; remove lora_rank"
    if hp.lora.base_dtype is not None and not examined.nf4:
        problem = f"quantized layers of {kind} do not compute what their weights do"
        yield "base_dtype", f"{hp.lora.base_dtype}: {problem}; remove base_dtype"
    if hp.parallel.compile is True and not examined.compilation:
        yield "compile", f"true, but layers of {kind} are no graphs to compile; remove compile"
    if hp.precision.float8 is not None:
        yield "float8", f"is for models of model.py, and {kind} is none; remove float8"
    if hp.objective.of_pairs and not examined.packing:
        problem = f"needs pairs in one sequence, which {kind} does not keep apart"
        yield "objective", f"dpo: {problem}; remove objective"
    if hp.optim.optimizer == "muon" and not hp.model.linear_layers:
        yield "optimizer", f"muon is for linear layers of blocks, and {kind} has none; use adamw"


# ---- errors of pydantic as sentences

_PROBLEMS = {
    "missing": "is missing; {accepted} is needed",
    "extra_forbidden": "no such key{nearest}",
    "string_type": "{value} is not {accepted}; put it in quotes",
    "string_too_short": "{value} is empty; {accepted} is needed",
    "value_error": "{message}",
}
"""What is wrong, by pydantic's type of the error."""
_OTHER_PROBLEM = "{value} is not {accepted}"
_TYPES = {
    "integer": "an integer",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def _add_errors(draft: _Draft, invalid: ValidationError, relations: bool) -> None:
    """Add the errors of a part to `draft`, one for each key."""
    # The innermost first: a mapping's wrong key hides that the mapping is not a string either.
    for problem in sorted(invalid.errors(), key=lambda problem: -len(problem["loc"])):
        if problem["loc"]:
            _add_error_of_value(draft, problem)
        elif relations:
            _add_errors_of_relations(draft, problem)


def _add_error(draft: _Draft, path: tuple[str, ...], error: ConfigError) -> None:
    """Add `error` unless there is one of `path`, inside of it, or around it."""
    for known in draft.errors:
        n_common = min(len(path), len(known))
        if path[:n_common] == known[:n_common]:
            return
    draft.errors[path] = error


def _add_errors_of_relations(draft: _Draft, problem: ErrorDetails) -> None:
    """Add the errors of a validator of the whole part: one per line, which starts with a key."""
    for line in _message(problem).splitlines():
        key = line.partition(":")[0]
        error = ConfigError(draft.label(key) + line.removeprefix(key))
        _add_error(draft, (key,), error)


def _add_error_of_value(draft: _Draft, problem: ErrorDetails) -> None:
    """Add the error of a key, or of one inside of its mapping."""
    key, *inner = map(str, problem["loc"])
    path = (key,)
    value = draft.values[key]
    schema = SCHEMA["properties"][key]
    siblings: Mapping[str, Any] = {}
    for name in inner:
        # pydantic also lists members of unions, e.g. "dict[str,float]", which are no keys.
        if isinstance(value, dict) and (name in value or problem["type"] == "missing"):
            siblings = _nested(schema)
            path = (*path, name)
            value = value.get(name)
            schema = siblings.get(name, siblings.get("*", {}))

    template = _PROBLEMS.get(problem["type"], _OTHER_PROBLEM)
    is_item = isinstance(problem["loc"][-1], int)  # of a list, which is shown as one value
    quotes_help = not isinstance(value, dict | list)
    if is_item or (problem["type"] == "string_type" and not quotes_help):
        template = _OTHER_PROBLEM
    text = template.format(
        value=_show(value),
        accepted=_accepted(schema),
        message=_message(problem),
        nearest=_nearest(path[-1], siblings),
    )
    if template == _OTHER_PROBLEM and isinstance(value, str):
        text += _nearest_value(value, schema)
    label = ".".join([draft.label(key), *path[1:]])
    _add_error(draft, path, ConfigError(f"{label}: {text}"))


def _message(problem: ErrorDetails) -> str:
    return problem["msg"].removeprefix("Value error, ")


def _nested(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of each key of a mapping that `schema` accepts, "*" for any key."""
    for option in schema.get("anyOf", ()):
        if "$ref" in option:
            name = option["$ref"].rpartition("/")[2]
            return SCHEMA["$defs"][name]["properties"]
        if "additionalProperties" in option:
            return {"*": option["additionalProperties"]}
    return {}


def _nearest(key: str, known: Iterable[str]) -> str:
    ours = {name: name for name in known}
    for name, info in FIELDS.items():
        if name in ours:
            ours |= dict.fromkeys(aliases_of(info), name)
    near = difflib.get_close_matches(key.lower(), ours, n=1)
    return f"; did you mean {ours[near[0]]}?" if near else "; python -m lm.config lists all"


def _nearest_value(value: str, schema: Mapping[str, Any]) -> str:
    """Return the hint at the value that `value` most likely means, or ""."""
    known: list[str] = []
    for option in schema.get("anyOf", [schema]):
        known += option.get("enum", [])
        if option.get("type") == "null":
            known.append("null")
    if value.lower() == "none" and "null" in known:
        return "; did you mean null?"
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)  # fp16, too
    return f"; did you mean {near[0]}?" if near else ""


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # contains itself, or is nested deeply
        text = "this"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _accepted(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON Schema accepts, e.g. "an integer > 0 or null"."""
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
        case {"items": {"prefixItems": items}}:
            return f"a list of lists of {len(items)} values, each {_accepted(items[0])}"
        case {"items": {"type": kind}}:
            return f"a list of {kind}s"
        case {"prefixItems": items}:
            return f"a list of {len(items)} {items[0]['type']}s"
    kind = schema.get("type", "object")
    limits = [f"{sign} {schema[key]:.15g}" for key, sign in _BOUNDS.items() if key in schema]
    described = _TYPES.get(kind, f"a {kind}")
    if limits:
        described += " " + " and ".join(limits)
    return described


# ---- the tables


class KeyRow(NamedTuple):
    """A row of the table of keys."""

    key: str
    default: str
    accepted: str
    meaning: str


class PresetRow(NamedTuple):
    """A row of the table of presets."""

    name: str
    size: str
    keys: str


def key_rows(part: type[Config]) -> Iterator[KeyRow]:
    """Yield a row for each key of `part`, and for each inside of a mapping."""
    for key, info in part.model_fields.items():
        schema = SCHEMA["properties"][key]
        default = json.dumps(info.default)
        yield KeyRow(key, default, _accepted(schema), schema["description"])
        for name, inner in _nested(schema).items():
            if name != "*":
                default = "required"
                if "default" in inner:
                    default = json.dumps(inner["default"])
                yield KeyRow(f"{key}.{name}", default, _accepted(inner), inner["description"])


def preset_rows() -> Iterator[PresetRow]:
    """Yield a row for each preset."""
    for name, preset in PRESETS.items():
        size = "any"
        if "d_model" in preset:
            n_parameters = ModelConfig.model_validate({"model": name}).n_parameters
            size = f"{n_parameters / 1e6:,.0f}M"
        keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in preset.items())
        yield PresetRow(name, size, keys)


def summary(part: type[Config]) -> str:
    """Return what `part` is about."""
    return (part.__doc__ or "").partition("\n")[0]


# ---- the command


def _align(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Align `rows` in columns, the last of which is wrapped at the width of the terminal."""
    first = max(len(row[0]) for row in rows)
    second = max(len(row[1]) for row in rows)
    indent = first + second + 4
    width = max(indent + 20, shutil.get_terminal_size().columns)
    aligned: list[str] = []
    for left, middle, right in rows:
        line = f"{left:<{first}}  {middle:<{second}}  {right}"
        aligned.append(textwrap.fill(line, width, subsequent_indent=" " * indent))
    return aligned


def list_keys() -> str:
    """Return all keys with defaults and meanings, under a heading for each part."""
    headings: dict[int, str] = {}
    """by the number of the row that follows"""
    rows: list[tuple[str, str, str]] = []
    for part in PARTS.values():
        headings[len(rows)] = summary(part)
        keys = [row for row in key_rows(part) if "." not in row.key]  # not in a mapping
        rows += [(row.key, row.default, row.meaning) for row in keys]
    lines: list[str] = []
    for number, line in enumerate(_align(rows)):
        if number in headings:
            lines += ["", headings[number], ""]
        lines.append(line)
    return "\n".join(lines[1:])


def describe_keys(keys: Collection[str]) -> str:
    """Return the defaults, meanings and accepted values of `keys`; refuse unknown ones."""
    known = FIELDS
    unknown = [key for key in keys if key not in known]
    if unknown:
        problem = "no such hyperparameter"
        raise ConfigError(*(f"{key}: {problem}{_nearest(key, known)}" for key in unknown))
    rows: list[tuple[str, str, str]] = []
    for part in PARTS.values():
        chosen = [row for row in key_rows(part) if row.key.partition(".")[0] in keys]
        rows += [(row.key, row.default, f"{row.meaning} ({row.accepted})") for row in chosen]
    return "\n".join(_align(rows))


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
    args = parser.parse_args(arguments)
    if args.presets:
        print("\n".join(_align(list(preset_rows()))))
    elif args.keys:
        print(describe_keys(args.keys))
    else:
        print(list_keys())
    return 0


if __name__ == "__main__":
    sys.exit(main())
