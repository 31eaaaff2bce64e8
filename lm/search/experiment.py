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
MAX_STEPS = 2**53
"""float64 counts them exactly."""
Count = Annotated[int, Field(gt=0, le=MAX_TRIALS)]
Bound = Annotated[float, Field(ge=-MAX_STEPS, le=MAX_STEPS)]

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Point = dict[str, Any]
"""What Optuna has drawn, by hyperparameter: numbers, or a choice as an argument spells it."""

REMEDIES = {
    "searcher.divisor": "; use an integer",
    "searcher.mode": "; a search here has one bracket: searcher.mode=aggressive",
    "searcher.bracket_rungs": "; use searcher.bracket_rungs=null searcher.max_rungs=N",
    "searcher.source_trial_id": "; use hyperparameters.init_from",
    "searcher.source_checkpoint_uuid": "; use hyperparameters.init_from",
}
"""What to type instead of what a master accepts."""


class Searcher(BaseModel, frozen=True, extra="forbid"):
    """The section `searcher`."""

    name: Literal["single", "random", "grid", "adaptive_asha"]
    metric: str
    smaller_is_better: bool = True
    max_trials: Count | None = None
    max_concurrent_trials: int = Field(16, ge=0, le=MAX_TRIALS)
    """0 = any number"""
    time_metric: Literal["batches"] | None = None
    max_time: int | None = Field(None, gt=0, le=MAX_STEPS)
    """the last rung, in steps"""
    divisor: int = Field(4, ge=2, le=MAX_TRIALS)
    max_rungs: int = Field(5, gt=0, le=64)
    mode: Literal["aggressive"] = "aggressive"
    sampler: Literal["random", "tpe"] = "random"
    """only here: a master does not accept this key"""
    max_length: Any = None
    """deprecated; trials read it"""

    @model_validator(mode="after")
    def _check_required(self) -> Searcher:
        required: dict[str, Any] = {}
        if self.name in ("random", "adaptive_asha"):
            required["max_trials"] = self.max_trials
        if self.name == "adaptive_asha":
            required["max_time"] = self.max_time
            required["time_metric"] = self.time_metric
        missing = [key for key, value in required.items() if value is None]
        if missing:
            raise ValueError(f"{self.name} needs {' and '.join(missing)}")
        return self


class Resources(BaseModel, frozen=True):
    """What is read of the section `resources`."""

    slots_per_trial: Count = 1


class Reproducibility(BaseModel, frozen=True):
    """What is read of the section `reproducibility`."""

    experiment_seed: int = Field(default=0, ge=0)


class Sections(BaseModel, frozen=True):
    """What a search reads of an experiment file, besides hyperparameters."""

    searcher: Searcher
    resources: Resources = Resources()
    reproducibility: Reproducibility = Reproducibility()
    max_restarts: int = Field(5, ge=0)


class Categorical(BaseModel, frozen=True, extra="forbid"):
    """A range that lists its values."""

    type: Literal["categorical"]
    vals: list[Any] = Field(min_length=1)

    def distribution(self, in_grid: bool) -> Distribution:  # noqa: ARG002
        return _choices(self.vals)


class Numbers(BaseModel, frozen=True, extra="forbid"):
    """A range of numbers."""

    type: Literal["int", "double", "log"]
    minval: Bound
    maxval: Bound
    base: float | None = Field(None, gt=1, le=1000)
    """of log, where minval and maxval are exponents"""
    count: Count | None = None
    """values in a grid"""

    @model_validator(mode="after")
    def _check_bounds(self) -> Numbers:
        if self.minval >= self.maxval:
            raise ValueError(f"minval {self.minval:g} is not below maxval {self.maxval:g}")
        if self.type == "int" and (self.minval % 1 or self.maxval % 1):
            raise ValueError("minval and maxval of type int are integers")
        if (self.type == "log") != (self.base is not None):
            raise ValueError("base belongs to type log, which needs it, e.g. base: 10")
        if self.base is not None and max(-self.minval, self.maxval) > 100:
            raise ValueError("minval and maxval of type log are exponents, from -100 to 100")
        return self

    def distribution(self, in_grid: bool) -> Distribution:
        """Return what a random search draws from, or the values of a grid."""
        if in_grid:
            return _choices(self._list_values())
        if self.base is not None:
            return FloatDistribution(self.base**self.minval, self.base**self.maxval, log=True)
        if self.type == "int":
            return IntDistribution(int(self.minval), int(self.maxval) - 1)  # as in Determined
        return FloatDistribution(self.minval, self.maxval)

    def _list_values(self) -> list[Any]:
        """Return `count` values from `minval` to `maxval`, or the one in the middle."""
        if self.count is None:
            raise ValueError("a grid needs count, the number of values of this range")
        values = np.linspace(self.minval, self.maxval, self.count)
        if self.count == 1:
            values = np.array([(self.minval + self.maxval) / 2])
        if self.base is not None:
            return (self.base**values).tolist()
        if self.type == "int":
            return np.unique(np.floor(values + 0.5).astype(int)).tolist()
        return values.tolist()


RANGE: TypeAdapter[Categorical | Numbers] = TypeAdapter(
    Annotated[Categorical | Numbers, Field(discriminator="type")]
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
        contents, self._lines = strict_yaml.load_experiment(path)
        for section in ("searcher", "hyperparameters"):
            if not isinstance(contents.get(section), dict):
                problem = "is missing, or not a mapping of keys to values"
                raise ConfigError(f"{path}: {section}: {problem}; see recipes/search.yaml")
        self._problems: list[str] = []
        self._replaced: set[str] = set()
        """what arguments have set, e.g. "searcher.max_time\""""
        for argument in arguments:
            self._apply(argument, contents)
        self.hyperparameters: dict[str, Any] = contents["hyperparameters"]
        self.run_name = str(self.hyperparameters.get("run_name") or path.stem)
        if "/" in self.run_name:
            problem = f"{self.run_name!r} has a '/'; trials are in runs/NAME/trial-N"
            self._refuse("hyperparameters.run_name", problem)
        try:
            self.sections = Sections.model_validate(_without_nulls(contents))
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
                first[key], *_ = distribution.choices
                *_, last[key] = distribution.choices
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
        identity["seed"] = self.sections.reproducibility.experiment_seed
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
        self._replaced.add(f"{section}.{key}")
        if section == "searcher" and key in ("metric", "smaller_is_better"):
            self._refuse(f"searcher.{key}", f"trials read it in {self.path}; change it there")

    def _add_range(self, key: str, value: Mapping[str, Any], in_grid: bool) -> None:
        name = f"hyperparameters.{key}"
        try:
            self.distributions[key] = RANGE.validate_python(value).distribution(in_grid)
        except ValidationError as invalid:
            self._add_problems(name, invalid)
        except ValueError as error:
            self._refuse(name, str(error))

    def _add_problems(self, outer: str, invalid: ValidationError) -> None:
        """Add what is wrong in `outer`, a range, or elsewhere in the file."""
        for error in invalid.errors():
            inner = list(map(str, error["loc"]))
            if outer:
                inner[:1] = [outer]  # instead of the type of the range
            name = ".".join(inner)
            problem = error["msg"].removeprefix("Value error, ")
            if error["type"] not in ("missing", "value_error"):
                problem = f"{error['input']!r}: {problem}"
            self._refuse(name, f"{problem}{REMEDIES.get(name, '')}")

    def _refuse(self, name: str, problem: str) -> None:
        """Add a problem of a key, e.g. of "hyperparameters.lr" in line 12 of the file."""
        key = ".".join(name.split(".")[:2])
        where = f"{self.path}:{self._lines.get(key, self._lines['searcher'])}:"
        if key in self._replaced:
            where = "argument"
        self._problems.append(f"{where} {name.removeprefix('hyperparameters.')}: {problem}")


def _choices(values: Sequence[Any]) -> CategoricalDistribution:
    return CategoricalDistribution([_as_text(value) for value in values])


def _as_text(value: Any) -> str:
    """Return a value as the argument of a trial spells it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)  # YAML has dates, JSON has not


def _without_nulls(section: Any) -> Any:
    """Return a section of an experiment file, in which null means the default."""
    if not isinstance(section, dict):
        return section
    return {key: _without_nulls(value) for key, value in section.items() if value is not None}
