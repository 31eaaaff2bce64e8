"""The searcher of an experiment file, its ranges of hyperparameters, and the points in them.

As in Determined 0.38.1: master/pkg/searcher/hyperparameters.go, random.go and grid.go.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError, model_validator

from lm import strict_yaml
from lm.config.hyperparameters import FIELDS
from lm.errors import ConfigError

_TYPES = ("const", "categorical", "int", "double", "log")

Point = dict[str, Any]
"""Hyperparameters of a trial."""

MAX_TRIALS = 10_000
"""Also points of a grid, slots of a trial, trials at once."""
MAX_RUNGS = 64
"""MAX_TRIALS ** MAX_RUNGS is the largest power of a divisor, and less than the largest float64."""
MAX_STEPS = 2**53
"""float64 counts them exactly."""

Count = Annotated[int, Field(gt=0, le=MAX_TRIALS)]
Rungs = Annotated[int, Field(gt=0, le=MAX_RUNGS)]


class SearcherConfig(BaseModel, frozen=True, extra="forbid"):
    """The section `searcher` of an experiment file, with the defaults of Determined.

    null means the default, as the master writes it in `det experiment config`.
    """

    name: Literal["single", "random", "grid", "adaptive_asha"]
    metric: str
    smaller_is_better: bool = True
    max_trials: Count | None = None
    max_concurrent_trials: int = Field(16, ge=0, le=MAX_TRIALS)
    time_metric: Literal["batches"] | None = None
    max_time: int | None = Field(None, gt=0, le=MAX_STEPS)
    divisor: float = Field(4.0, gt=1, le=MAX_TRIALS)
    max_rungs: Rungs = 5
    mode: Literal["aggressive", "standard", "conservative"] = "standard"
    bracket_rungs: list[Rungs] | None = Field(None, max_length=MAX_RUNGS)
    max_length: Any = None
    """deprecated; `lm.config` reads it"""
    source_trial_id: Any = None
    source_checkpoint_uuid: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, section: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if value is not None}

    @property
    def sign(self) -> float:
        """By which the metric is multiplied, so that less is better."""
        if self.smaller_is_better:
            return 1.0
        return -1.0

    @model_validator(mode="after")
    def _check_required(self) -> SearcherConfig:
        required: dict[str, Any] = {}
        if self.name in ("random", "adaptive_asha"):
            required["max_trials"] = self.max_trials
        if self.name == "adaptive_asha":
            required["max_time"] = self.max_time
            required["time_metric"] = self.time_metric
        if self.source_trial_id is not None or self.source_checkpoint_uuid is not None:
            problem = "a search here cannot start from a trial of a master"
            raise ValueError(f"{problem}; use hyperparameters.init_from")
        missing = [key for key, value in required.items() if value is None]
        if missing:
            raise ValueError(f"{self.name} needs {' and '.join(missing)}")
        return self


class _Range(BaseModel, frozen=True, extra="forbid"):
    """A range of a hyperparameter: values to draw, and those of a grid."""

    def draw(self, source: random.Random) -> Any:
        raise NotImplementedError

    def grid(self) -> list[Any]:
        raise NotImplementedError


def _refuse_range(value: Any) -> Any:
    if _is_range(value):
        raise ValueError("a value cannot be a range itself")
    return value


def _is_range(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in _TYPES


Value = Annotated[Any, AfterValidator(_refuse_range)]


class _Const(_Range, frozen=True):
    type: Literal["const"]
    val: Value

    def draw(self, source: random.Random) -> Any:  # noqa: ARG002
        return self.val

    def grid(self) -> list[Any]:
        return [self.val]


class _Categorical(_Range, frozen=True):
    type: Literal["categorical"]
    vals: list[Value] = Field(min_length=1)

    def draw(self, source: random.Random) -> Any:
        return source.choice(self.vals)

    def grid(self) -> list[Any]:
        return self.vals


class _Number(_Range, frozen=True):
    minval: float = Field(allow_inf_nan=False)
    maxval: float = Field(allow_inf_nan=False)
    count: Count | None = None
    """values in a grid"""

    @model_validator(mode="after")
    def _check_bounds(self) -> _Number:
        if self.minval >= self.maxval:
            raise ValueError(f"minval {self.minval:g} is not below maxval {self.maxval:g}")
        if math.isinf(self.maxval - self.minval):
            raise ValueError(f"minval {self.minval:g} to maxval {self.maxval:g} exceeds float64")
        return self

    def _spread(self, count: int | None) -> list[float]:
        """Return `count` numbers from `minval` to `maxval`, or the one in the middle."""
        if count is None:
            raise ValueError("a grid needs count, the number of values of this range")
        if count == 1:
            return [(self.minval + self.maxval) / 2]
        step = (self.maxval - self.minval) / (count - 1)
        return [self.minval + i * step for i in range(count)]


class _Int(_Number, frozen=True):
    type: Literal["int"]
    minval: int = Field(ge=-MAX_STEPS, le=MAX_STEPS)
    maxval: int = Field(ge=-MAX_STEPS, le=MAX_STEPS)

    def draw(self, source: random.Random) -> int:
        return source.randrange(self.minval, self.maxval)  # without maxval, as in Determined

    def grid(self) -> list[int]:
        count = self.count
        if count is not None:
            count = min(count, self.maxval - self.minval + 1)
        return [math.floor(value + 0.5) for value in self._spread(count)]


class _Double(_Number, frozen=True):
    type: Literal["double"]

    def draw(self, source: random.Random) -> float:
        return source.uniform(self.minval, self.maxval)

    def grid(self) -> list[float]:
        return self._spread(self.count)


class _Log(_Number, frozen=True):
    """`minval` and `maxval` are exponents."""

    type: Literal["log"]
    base: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_powers(self) -> _Log:
        if abs(math.log2(self.base)) * max(abs(self.minval), abs(self.maxval)) > 1000:
            bounds = f"{self.minval:g} to {self.maxval:g}"
            raise ValueError(f"powers {bounds} of {self.base:g} exceed float64")
        return self

    def note(self) -> str | None:
        """Return a line if the exponents look like values, as all draws lie close together."""
        if not 0 < self.minval < self.maxval < 1:
            return None
        drawn = f"{self.base**self.minval:.5g} to {self.base**self.maxval:.5g}"
        low, high = (math.log(bound, self.base) for bound in (self.minval, self.maxval))
        meant = f"for {self.minval:g} to {self.maxval:g} use minval {low:.4g} and maxval {high:.4g}"
        return f"minval and maxval are exponents of {self.base:g}, so {drawn} is drawn; {meant}"

    def draw(self, source: random.Random) -> float:
        return self.base ** source.uniform(self.minval, self.maxval)

    def grid(self) -> list[float]:
        return [self.base**exponent for exponent in self._spread(self.count)]


_RANGE: TypeAdapter[_Range] = TypeAdapter(
    Annotated[_Const | _Categorical | _Int | _Double | _Log, Field(discriminator="type")]
)
Space = dict[str, Any]
"""Hyperparameters, of which each is a value, a `_Range`, or a mapping with ranges in it."""


class Experiment:
    """An experiment file, after the overrides of the command line.

    Args:
        path: of the file.
        overrides: `key=value`; each replaces a value or a range, or `searcher.KEY` that key.

    Raises:
        ConfigError: lists every problem of the searcher and the ranges.
    """

    def __init__(self, path: Path, overrides: list[str]) -> None:
        self.path = path
        of_searcher = [each for each in overrides if re.match(r"\s*searcher\..*=", each)]
        self.overrides = [each for each in overrides if each not in of_searcher]
        self.contents, self.lines = strict_yaml.load_experiment(path)
        self._problems: list[str] = []
        self._arguments: set[str] = set()
        searcher = self._read_searcher(of_searcher)
        section = self.contents["hyperparameters"] or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: hyperparameters: is not a mapping of keys to values")
        self.overridden: dict[str, str] = {}
        for override in self.overrides:
            key, _, value = override.partition("=")
            key = key.strip()
            if key in SearcherConfig.model_fields.keys() - FIELDS.keys():
                problem = f"no hyperparameter; did you mean searcher.{key}?"
                self._problems.append(f"argument {key}: {problem}")
            self.overridden[key] = value
            if _is_range(_parse(value)):
                problem = f"a range is set in {path}, not on the command line"
                self._problems.append(f"argument {key}: {problem}; use one value")
        self.space: Space = {}
        for key, value in section.items():
            if key not in self.overridden:
                self.space[key] = self._read_value(f"hyperparameters.{key}", value)
        self._refuse_stop_at_step()
        resources = self._read_section("resources")
        self.slots = self._read_int("resources.slots_per_trial", resources, 1, 1, MAX_TRIALS)
        reproducibility = self._read_section("reproducibility")
        self.seed = self._read_int("reproducibility.experiment_seed", reproducibility, 0, 0, 2**64)
        self.max_restarts = self._read_int("max_restarts", self.contents, 5, 0, MAX_TRIALS)
        if self._problems or searcher is None:
            raise ConfigError(*self._problems)
        self.searcher = searcher

    @property
    def searched(self) -> list[str]:
        """The hyperparameters that differ between trials."""
        return [key for key, value in self.space.items() if _has_range(value)]

    def notes(self) -> list[str]:
        """Return lines on ranges that may not be what was meant."""
        notes: list[str] = []
        for key, value in self.space.items():
            if isinstance(value, _Log) and (note := value.note()) is not None:
                notes.append(f"{self._label(f'hyperparameters.{key}')}: {note}")
        return notes

    def identity(self) -> dict[str, Any]:
        """Return what decides which trials there are, and which survive."""
        return {
            "searcher": self.contents["searcher"],
            "hyperparameters": self.contents["hyperparameters"],
            "arguments": self.overridden,
            "resources.slots_per_trial": self.slots,
            "reproducibility.experiment_seed": self.seed,
        }

    def points(self, n_trials: int) -> list[Point]:
        """Return the points of random trials.

        A value depends on the seed, the number of the trial, and the names of its key only, so that
        other ranges can be added, removed and reordered.
        """
        points: list[Point] = []
        for number in range(n_trials):
            point: Point = {}
            for key, value in self.space.items():
                point[key] = _draw(value, f"{self.seed}/{number}/{key}")
            points.append(point)
        return points

    def grid(self) -> list[Point]:
        """Return all points of the grid.

        Raises:
            ConfigError: a range has no count, or the grid is too large.
        """
        axes: dict[str, list[Any]] = {}
        problems: list[str] = []
        for key in sorted(self.space):
            try:
                axes[key] = _grid(self.space[key])
            except ValueError as error:
                problems.append(f"{self._label(f'hyperparameters.{key}')}: {error}")
        if problems:
            raise ConfigError(*problems)
        points = _product(axes)
        if len(points) > MAX_TRIALS:
            raise ConfigError(f"{self.path}: the grid has more than {MAX_TRIALS:,} points")
        return points

    def _read_searcher(self, overrides: Sequence[str]) -> SearcherConfig | None:
        section = self.contents.get("searcher")
        if not isinstance(section, dict):
            self._problems.append(f"{self.path}: searcher: is missing; see recipes/search.yaml")
            return None
        section = dict(section)
        self.contents["searcher"] = section
        for override in overrides:
            key, _, value = override.partition("=")
            section[key.strip().removeprefix("searcher.")] = _parse(value)
            self._arguments.add(key.strip())
        try:
            return SearcherConfig.model_validate(section)
        except ValidationError as invalid:
            for error in invalid.errors():
                key = ".".join(["searcher", *map(str, error["loc"])])
                self._add(key, error)
            return None

    def _read_value(self, key: str, value: Any) -> Any:
        """Return `value` with a `_Range` in place of each mapping that describes one."""
        if not isinstance(value, dict):
            return value
        if not _is_range(value):
            if "type" in value:
                problem = f"type {value['type']!r} is not one of {', '.join(_TYPES)}"
                self._problems.append(f"{self._label(key)}: {problem}")
            return {name: self._read_value(f"{key}.{name}", each) for name, each in value.items()}
        try:
            return _RANGE.validate_python(value)
        except ValidationError as invalid:
            for error in invalid.errors():
                inner = [str(part) for part in error["loc"][1:]]  # without the type
                self._add(".".join([key, *inner]), error)
            return value

    def _refuse_stop_at_step(self) -> None:
        key = "stop_at_step"
        where = f"argument {key}"
        value = _parse(self.overridden.get(key, "null"))
        if key in self.space:
            where = self._label(f"hyperparameters.{key}")
            value = self.space[key]
        if value is not None:
            problem = "would end trials before their rung; remove it, as a search stops trials"
            self._problems.append(f"{where}: {problem}")

    def _read_section(self, name: str) -> Mapping[str, Any]:
        """Return another section of the file; if it is none, that is for the master to judge."""
        section = self.contents.get(name)
        if not isinstance(section, dict):
            return {}
        return section

    def _read_int(
        self, name: str, section: Mapping[str, Any], default: int, least: int, most: int
    ) -> int:
        """Return the integer `name` of a section of the file."""
        value = section.get(name.rpartition(".")[2])
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            problem = f"{value!r} is not an integer from {least} to {most}"
            self._problems.append(f"{self._label(name)}: {problem}")
            return default
        return value

    def _add(self, key: str, error: Any) -> None:
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if error["type"] == "missing":
            message = "is missing"
        elif error["type"] == "extra_forbidden":
            message = "no such key here"
            known = SearcherConfig.model_fields
            nearest = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
            if key.startswith("searcher.") and nearest:
                message = f"{message}; did you mean {nearest[0]}?"
        value = ""
        if error["type"] not in ("missing", "value_error", "extra_forbidden"):
            value = f"{error['input']!r} is not "
        self._problems.append(f"{self._label(key)}: {value}{message[0].lower()}{message[1:]}")

    def _label(self, key: str) -> str:
        """Return where `key` is set, e.g. "search.yaml:12: searcher.max_time"."""
        outer = ".".join(key.split(".")[:2])
        if outer in self._arguments:
            return f"argument {key}"
        section = outer.partition(".")[0]
        line = self.lines.get(outer, self.lines.get(section))
        where = str(self.path)
        if line is not None:
            where = f"{where}:{line}"
        return f"{where}: {key.removeprefix('hyperparameters.')}"


def _parse(argument: str) -> Any:
    try:
        return strict_yaml.parse_yaml(argument.strip(), "")[0]
    except ConfigError:
        return argument


def _has_range(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_range(each) for each in value.values())
    return isinstance(value, _Range) and not isinstance(value, _Const)


def _draw(value: Any, seed: str) -> Any:
    if isinstance(value, _Range):
        return value.draw(random.Random(seed))
    if isinstance(value, dict):
        return {key: _draw(each, f"{seed}/{key}") for key, each in value.items()}
    return value


def _grid(value: Any) -> list[Any]:
    """Return the values of a hyperparameter in a grid."""
    if isinstance(value, _Range):
        return value.grid()
    if isinstance(value, dict):
        return _product({key: _grid(each) for key, each in value.items()})
    return [value]


def _product(axes: Mapping[str, list[Any]]) -> list[Point]:
    """Return a mapping for each combination of values; of too many, some."""
    combinations = itertools.islice(itertools.product(*axes.values()), MAX_TRIALS + 1)
    return [dict(zip(axes, values, strict=True)) for values in combinations]
