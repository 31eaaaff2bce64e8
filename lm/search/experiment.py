"""The searcher and the ranges of an experiment file, as Determined 0.38.1 defines them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from lm import strict_yaml
from lm.errors import ConfigError, limit_problems

MAX_TRIALS = 10_000
"""Also points of a grid, slots of a trial, trials at once."""
Count = Annotated[int, Field(gt=0, le=MAX_TRIALS)]
Bound = Field(ge=-(2**53), le=2**53)
Exponent = Annotated[float, Field(ge=-100, le=100)]

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Point = dict[str, Any]
"""What Optuna has drawn, by hyperparameter: numbers, or a choice as an argument spells it."""


class Searcher(BaseModel, frozen=True, extra="forbid"):
    """The section `searcher`."""

    name: Literal["single", "random", "grid", "adaptive_asha"]
    metric: str
    smaller_is_better: bool = True
    max_trials: Count | None = None
    max_concurrent_trials: int = Field(16, ge=0, le=MAX_TRIALS)
    """0 = any number"""
    time_metric: Literal["batches"] | None = None
    max_time: int | None = Field(None, gt=0)
    """the last rung, in steps"""
    divisor: int = Field(4, ge=2)
    max_rungs: int = Field(5, gt=0, le=64)
    mode: Literal["aggressive"] = "aggressive"
    """one bracket"""
    sampler: Literal["random", "tpe"] = "random"
    """only here: a master does not accept this key"""
    max_length: Any = None
    """deprecated; trials read it"""

    @model_validator(mode="after")
    def _check_required(self) -> Searcher:
        required: list[str] = []
        if self.name == "random":
            required = ["max_trials"]
        elif self.name == "adaptive_asha":
            required = ["max_trials", "max_time", "time_metric"]
        missing = [key for key in required if getattr(self, key) is None]
        if missing:
            raise ValueError(f"{self.name} needs {' and '.join(missing)}")
        return self


class Resources(BaseModel, frozen=True):
    """What is read of the section `resources`."""

    slots_per_trial: Count = 1


class Reproducibility(BaseModel, frozen=True):
    """What is read of the section `reproducibility`."""

    experiment_seed: int = Field(default=0, ge=0, lt=2**32)


class Sections(BaseModel, frozen=True):
    """What a search reads of an experiment file, besides hyperparameters."""

    searcher: Searcher
    resources: Resources = Resources()
    reproducibility: Reproducibility = Reproducibility()
    max_restarts: int = Field(5, ge=0)


class Range(BaseModel, frozen=True, extra="forbid"):
    """A range of numbers."""

    minval: Annotated[float, Bound]
    maxval: Annotated[float, Bound]
    count: Count | None = None
    """values in a grid"""

    def list_values(self) -> list[Any]:
        """Return the values of a grid: `count` from `minval` to `maxval`, or the middle."""
        if self.count is None:
            raise ValueError("a grid needs count, the number of values of this range")
        if self.count == 1:
            return [(self.minval + self.maxval) / 2]
        return np.linspace(self.minval, self.maxval, self.count).tolist()


class Double(Range, frozen=True):
    """Numbers, each as likely as any other."""

    type: Literal["double"]

    def distribution(self) -> Distribution:
        """Return what a random search draws from."""
        return FloatDistribution(self.minval, self.maxval)


class Log(Range, frozen=True):
    """Powers of `base`, whose exponents are in the range."""

    type: Literal["log"]
    base: float = Field(gt=1, le=1000)
    minval: Exponent
    maxval: Exponent

    def distribution(self) -> Distribution:
        """Return what a random search draws from."""
        return FloatDistribution(self.base**self.minval, self.base**self.maxval, log=True)

    def list_values(self) -> list[Any]:
        """Return the values of a grid."""
        return [self.base**exponent for exponent in super().list_values()]


class Int(Range, frozen=True):
    """Integers below `maxval`; in a grid, it is one of them."""

    type: Literal["int"]
    minval: Annotated[int, Bound]
    maxval: Annotated[int, Bound]

    def distribution(self) -> Distribution:
        """Return what a random search draws from."""
        return IntDistribution(self.minval, self.maxval - 1)

    def list_values(self) -> list[Any]:
        """Return the values of a grid."""
        return sorted({math.floor(value + 0.5) for value in super().list_values()})


class Categorical(BaseModel, frozen=True, extra="forbid"):
    """A list of values."""

    type: Literal["categorical"]
    vals: list[Any]

    def distribution(self) -> Distribution:
        """Return what a random search draws from."""
        return _choices(self.vals)

    def list_values(self) -> list[Any]:
        """Return the values of a grid."""
        return self.vals


RANGE: TypeAdapter[Categorical | Double | Log | Int] = TypeAdapter(
    Annotated[Categorical | Double | Log | Int, Field(discriminator="type")]
)


class Experiment:
    """An experiment file, after the arguments of the command line.

    Args:
        path: of the file.
        arguments: `key=value`; each replaces a value or a range, or `searcher.KEY` that key.

    Raises:
        ConfigError: lists every problem of the searcher and the ranges. What else is wrong, trials
            say.
    """

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path = path
        self._arguments: list[str] = []
        """of all trials"""
        self.distributions: dict[str, Distribution] = {}
        """of the hyperparameters that have a range"""
        contents, lines = strict_yaml.load_experiment(path)
        for section in ("searcher", "hyperparameters"):
            if not isinstance(contents.get(section), dict):
                problem = "is missing, or not a mapping of keys to values"
                raise ConfigError(f"{path}: {section}: {problem}; see recipes/search.yaml")
        self._problems: list[str] = []
        self._set_by = {key: f"{path}:{line}:" for key, line in lines.items()}
        """the line or the argument that sets a key, e.g. "searcher.max_time\""""
        for argument in arguments:
            self._apply(argument, contents)
        self.hyperparameters: dict[str, Any] = contents["hyperparameters"]
        self.run_name = str(self.hyperparameters.get("run_name") or path.stem)
        if "/" in self.run_name:
            problem = f"{self.run_name!r} has a '/'; trials are in runs/NAME/trial-N"
            self._refuse("hyperparameters.run_name", problem)
        try:
            self.sections = Sections.model_validate(contents)
        except ValidationError as invalid:
            self._add_problems("", invalid)
        for key, value in self.hyperparameters.items():
            if isinstance(value, dict) and value.get("type", "const") != "const":
                self._add_range(key, value, contents["searcher"].get("name") == "grid")
        if self.hyperparameters.get("stop_at_step") is not None:
            self._refuse("hyperparameters.stop_at_step", "a search stops its trials; remove it")
        if self._problems:
            raise ConfigError(*limit_problems(self._problems))
        self.searcher = self.sections.searcher
        self.seed = self.sections.reproducibility.experiment_seed
        if self.n_points > MAX_TRIALS:
            raise ConfigError(f"{path}: the grid has more than {MAX_TRIALS:,} points")

    @property
    def n_points(self) -> int:
        """Trials, or points of the grid."""
        if self.searcher.name == "grid":
            return math.prod(len(values) for values in self.choices().values())
        return self.searcher.max_trials or 1

    def choices(self) -> dict[str, Sequence[Any]]:
        """Return the values of a grid."""
        choices: dict[str, Sequence[Any]] = {}
        for key, distribution in self.distributions.items():
            assert isinstance(distribution, CategoricalDistribution)
            choices[key] = distribution.choices
        return choices

    def ends(self) -> list[Point]:
        """Return the points of all first and of all last values."""
        first: Point = {}
        last: Point = {}
        for key, distribution in self.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                first[key] = distribution.choices[0]
                last[key] = distribution.choices[-1]
            else:
                first[key] = distribution.low
                last[key] = distribution.high
        if first == last:
            return [first]
        return [first, last]

    def arguments_of(self, point: Point, name: str) -> list[str]:
        """Return the arguments of the run `name` of this search, at a point."""
        drawn = [f"{key}={_as_text(value)}" for key, value in point.items()]
        run_name = f"run_name={self.run_name}/{name}"
        return ["--config", str(self.path), *self._arguments, *drawn, run_name]

    def identity(self) -> dict[str, Any]:
        """Return what all trials have in common, by key; more of them can be asked for later."""
        searcher = self.searcher.model_dump(exclude={"max_trials", "max_concurrent_trials"})
        identity = {f"searcher.{key}": value for key, value in searcher.items()}
        for key, value in self.hyperparameters.items():
            if key != "run_name":
                identity[key] = _as_text(value)
        identity["slots"] = self.sections.resources.slots_per_trial
        identity["seed"] = self.seed
        return identity

    def _apply(self, argument: str, contents: Mapping[str, Any]) -> None:
        """Apply an argument; trials refuse one that is not `key=value`."""
        name, equals, text = argument.partition("=")
        section, _, key = name.strip().rpartition(".")
        if section != "searcher" or not equals:
            section = "hyperparameters"
            self._arguments.append(argument)
        value: Any = text
        with suppress(ConfigError):  # of text that is not YAML, for a key that accepts it
            value, _ = strict_yaml.parse_yaml(text, "")
        contents[section][key] = value
        self._set_by[f"{section}.{key}"] = "argument"
        if section == "searcher" and key in ("metric", "smaller_is_better"):
            self._refuse(f"searcher.{key}", f"trials read it in {self.path}; change it there")

    def _add_range(self, key: str, value: Mapping[str, Any], in_grid: bool) -> None:
        name = f"hyperparameters.{key}"
        try:
            found = RANGE.validate_python(value)
            self.distributions[key] = found.distribution()
            if in_grid:
                self.distributions[key] = _choices(found.list_values())
        except ValidationError as invalid:
            self._add_problems(name, invalid)
        except ValueError as error:  # of Optuna, too
            self._refuse(name, str(error))

    def _add_problems(self, outer: str, invalid: ValidationError) -> None:
        """Add what is wrong in `outer`, a range, or elsewhere in the file."""
        for error in invalid.errors():
            inner = list(map(str, error["loc"]))
            if outer:
                inner[:1] = [outer]  # instead of the type of the range
            problem = error["msg"].removeprefix("Value error, ")
            if error["type"] not in ("missing", "value_error"):
                problem = f"{error['input']!r}: {problem}"
            self._refuse(".".join(inner), problem)

    def _refuse(self, name: str, problem: str) -> None:
        """Add a problem of a key, e.g. of "hyperparameters.lr" in line 12 of the file."""
        key = ".".join(name.split(".")[:2])
        where = self._set_by.get(key, self._set_by["searcher"])
        self._problems.append(f"{where} {name.removeprefix('hyperparameters.')}: {problem}")


def _choices(values: Sequence[Any]) -> CategoricalDistribution:
    return CategoricalDistribution([_as_text(value) for value in values])


def _as_text(value: Any) -> str:
    """Return a value as the argument of a trial spells it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)  # YAML has dates, JSON has not
