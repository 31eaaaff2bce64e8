"""A search: its trials, what is known of them, and `search.json`, which makes it the same search.

search.json     the searcher, the hyperparameters with their ranges, and the points
lock            names the process that runs the search
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lm import strict_yaml
from lm.checkpoint.manifest import CheckpointError
from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.data.config import derive_global_batch_size
from lm.data.run_data import open_data
from lm.data.windows import check_token_files
from lm.determined.search import Searcher, differences
from lm.errors import ConfigError, limit_problems
from lm.fileio import REPOSITORY, parse_json, read_bytes, replace_durably
from lm.inputs import check_searcher, fingerprint_inputs, fingerprint_tasks, resolve_seed
from lm.launch.console import announce
from lm.model_config import ModelConfig
from lm.runtime.lease import in_use_error
from lm.runtime.run_dir import SEARCH_FILE, RunDir, lock_file, make_directory
from lm.search.experiment import Experiment, Point
from lm.search.halving import Replay, Standing, asha_brackets, single_bracket
from lm.search.report import Row
from lm.search.trials import Settings, Trial
from lm.tasks.questions import read_tasks

FORMAT = 1
_MAX_BYTES = 64 << 20


class _Format(BaseModel, frozen=True, extra="allow"):
    """What search.json has in every format."""

    format: int


class _Saved(_Format, frozen=True, extra="allow"):
    """The content of search.json."""

    experiment: dict[str, Any]
    points: list[dict[str, Any]]


class Search:
    """A search and its trials.

    The constructor changes nothing on disk.

    Args:
        path: of the experiment file.
        overrides: `key=value`.

    Raises:
        ConfigError: the experiment file is wrong, or every point is refused.
    """

    def __init__(self, path: Path, overrides: list[str]) -> None:
        self.experiment = Experiment(path, overrides)
        self._refuse_replaced_ranges()
        self._inputs: dict[str, Mapping[str, Any] | ConfigError] = {}
        """by the hyperparameters that decide what is read; or what is wrong with it"""
        self._date: datetime.date | None = None
        """of chat templates"""
        searcher = self.experiment.searcher
        if searcher.name == "adaptive_asha":
            self._brackets = asha_brackets(searcher)
            points = self.experiment.points(sum(b.max_trials for b in self._brackets))
        else:
            points = self._points_without_rungs()
            self._brackets = [single_bracket(searcher, len(points))]
        for note in self.experiment.notes():
            announce(note)
        announce("reading the data")
        settings = [self._settings(point) for point in points]
        accepted = [each for each in settings if isinstance(each, Settings)]
        if not accepted:
            assert isinstance(settings[0], ConfigError)
            raise settings[0]
        self.name = accepted[0].hp.run.run_name or path.stem
        if "/" in self.name:
            raise ConfigError(f"run_name: {self.name!r} has a '/'; trials are in runs/NAME/trial-N")
        self.path = RunDir(self.name).path
        self.trials: list[Trial] = []
        for number, point in enumerate(points):
            trial = Trial(
                self.name, number, point, settings[number], searcher.metric, searcher.sign
            )
            self.trials.append(trial)

    def _refuse_replaced_ranges(self) -> None:
        """Raise ConfigError if `model` on the command line would replace keys that vary."""
        if "model" not in self.experiment.overridden:
            return
        replaced = [key for key in self.experiment.searched if key in ModelConfig.model_fields]
        if replaced:
            problem = f"would replace the ranges of {', '.join(replaced)}"
            raise ConfigError(f"model: {problem}; set model in {self.experiment.path} instead")

    def _points_without_rungs(self) -> list[Point]:
        searcher = self.experiment.searcher
        if searcher.name == "grid":
            return self.experiment.grid()
        if searcher.name == "single":
            return self.experiment.points(1)
        assert searcher.max_trials is not None
        return self.experiment.points(searcher.max_trials)

    def _settings(self, point: Point) -> Settings | ConfigError:
        """Return what the trial of `point` is to do, or why the point is refused."""
        experiment = self.experiment
        contents = dict(experiment.contents)
        contents |= {"hyperparameters": point, "searcher": experiment.searcher.model_dump()}
        try:
            hp = read_hyperparameters(
                contents,
                experiment.overrides,
                str(experiment.path),
                experiment.lines,
                _model_defaults,
            )
            if hp.run.max_epochs is not None:
                raise ConfigError("max_epochs: a search counts steps; set max_steps instead")
            if hp.checkpoint.resume != "auto":
                raise ConfigError(
                    f"resume: {hp.checkpoint.resume} would discard a trial at every rung"
                )
            if hp.data.dataset == "jsonl" and hp.data.chat_template_date is None:
                if self._date is None:
                    self._date = _start_date(RunDir(hp.run.run_name or experiment.path.stem).path)
                hp = hp.replace(chat_template_date=self._date)
            max_steps = hp.run.run_length(None)
            hp = hp.replace(seed=resolve_seed(hp.run.seed, None), max_steps=max_steps)
            searcher = Searcher.from_config(
                contents, max_steps, hp.metrics.validation_rate or hp.metrics.report_rate
            )
            batch_size = derive_global_batch_size(hp.data, experiment.slots)
            return Settings(hp, searcher, batch_size, self._read_inputs(hp, searcher, batch_size))
        except ConfigError as error:
            return error

    def _read_inputs(
        self, hp: Hyperparameters, searcher: Searcher, batch_size: int
    ) -> Mapping[str, Any]:
        """Return the inputs of a trial; points that differ in other hyperparameters share them.

        Raises:
            ConfigError: the data are wrong, or lack the searcher's metric.
        """
        model = hp.model.vocab_size, hp.model.max_seq_len
        others = hp.run.seed, hp.checkpoint.init_from, batch_size, searcher
        key = f"{hp.data} {hp.tasks} {model} {others}"
        if key not in self._inputs:
            self._inputs[key] = _find_inputs(hp, searcher, batch_size)
        inputs = self._inputs[key]
        if isinstance(inputs, ConfigError):
            raise inputs
        return inputs

    def save(self) -> None:
        """Lock the search, compare its files with it, and write search.json if it is missing.

        Raises:
            ConfigError: the directory has another search, or a run; a trial has been trained with
                other inputs or hyperparameters.
            RunError: another process has locked it.
        """
        make_directory(self.path)
        holder = lock_file(self.path / "lock")
        if holder is not None:
            raise in_use_error(self.path, holder)
        if (self.path / "metrics.jsonl").exists():
            raise ConfigError(f"{self.path}: is a run; choose another name: run_name=NAME")
        file = self.path / SEARCH_FILE
        points = [trial.point for trial in self.trials]
        content = {"format": FORMAT, "experiment": self.experiment.identity(), "points": points}
        text = json.dumps(content, indent=1, default=str).encode()  # YAML has dates, JSON has not
        saved = _read_saved(file)
        if saved is not None:
            self._compare(saved, json.loads(text))
        self.require_unchanged(*self.trials)
        if saved is None:
            self._require_no_others(file)
            replace_durably(file, text)

    def _compare(self, saved: _Saved, content: Mapping[str, Any]) -> None:
        """Raise ConfigError if `saved` is of another search than `content`."""
        changes = differences(saved.experiment, content["experiment"])
        if not changes and saved.points != content["points"]:
            changes = ["points: are not those that this version draws; use that of the first start"]
        self._refuse(changes)

    def require_unchanged(self, *trials: Trial) -> None:
        """Raise ConfigError if a trial was, or would be, trained with other than now is known."""
        for trial in trials:
            self._refuse([f"{trial.name}: {change}" for change in trial.changes()])

    def require_same_inputs(self, *trials: Trial) -> None:
        """Read the inputs of trials again; raise ConfigError if they are others, or wrong, now."""
        checked: list[Mapping[str, Any]] = []
        for trial in trials:
            settings = trial.settings
            if any(settings.inputs is each for each in checked):
                continue
            checked.append(settings.inputs)
            found = _find_inputs(settings.hp, settings.searcher, settings.global_batch_size)
            if isinstance(found, ConfigError):
                changes = list(found.problems)
            else:
                changes = differences(settings.inputs, found)
            self._refuse([f"{trial.name}: {change}" for change in changes])

    def _refuse(self, changes: Sequence[str]) -> None:
        if changes:
            remedy = f"undo the change, or start another search: run_name={self.name}-2"
            problems = limit_problems([f"{self.path}: {change}" for change in changes])
            raise ConfigError(*problems[:-1], f"{problems[-1]}; {remedy}")

    def _require_no_others(self, file: Path) -> None:
        """Raise ConfigError if trials of another search are in the directory of a lost `file`."""
        found = {path.name for path in self.path.glob("trial-*")}
        others = sorted(found - {trial.name for trial in self.trials})
        if others:
            problem = f"is missing or damaged, and {others[0]} is not a trial of this search"
            self._refuse([f"{file.name}: {problem}"])
        if found:
            announce(f"{file} was missing or damaged, and is written again: all trials match")

    def replay(self) -> Replay:
        """Return where all trials are, computed from their files."""
        replay = Replay(
            copy.deepcopy(self._brackets),  # a replay counts in them
            result=lambda number, rung: self.trials[number].objective(rung),
            arrival=lambda number, rung: self.trials[number].flops_until(rung),
        )
        replay.run()
        return replay

    def rows(self, standings: Sequence[Standing]) -> list[Row]:
        """Return what the table and the report say of each trial."""
        rows: list[Row] = []
        for standing in standings:
            trial = self.trials[standing.number]
            point = {key: trial.point[key] for key in self.experiment.searched}
            if trial.refusal is not None:
                row = Row(trial.name, point, "dropped", 0, {}, "; ".join(trial.refusal.problems))
            else:
                note = ""
                if standing.state == "dropped":
                    note = trial.why_dropped() or ""
                step = trial.settings.step_of(standing.rung)
                row = Row(trial.name, point, standing.state, step, dict(trial.values()), note)
            rows.append(row)
        return rows

    def ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Return the trials from the best: complete ones, then the others by how far they got."""

        def key(row: Row) -> tuple[int, int, float]:
            if not row.values:
                return 2, 0, 0.0
            value = self.experiment.searcher.sign * row.last_value
            if row.state == "completed":
                return 0, 0, value
            return 1, -row.last_step, value

        return sorted(rows, key=key)

    def overtaken(self, ranked: Sequence[Row]) -> list[Row]:
        """Return the trials that were stopped, though their last value is better than the best."""
        sign = self.experiment.searcher.sign
        best = sign * ranked[0].last_value
        stopped = [row for row in ranked if row.state == "stopped"]
        return [row for row in stopped if sign * row.last_value < best]

    def command_of(self, row: Row) -> list[str]:
        """Return the arguments that train from step 0 with all the hyperparameters of a trial."""
        trial = next(trial for trial in self.trials if trial.name == row.name)
        script = os.path.relpath(REPOSITORY / "fsdp.py")
        python = sys.orig_argv[0]  # as it was typed
        command = [python, "-m", "lm.launch", "--nproc", str(self.experiment.slots), script]
        return [*command, "--config", str(trial.config), f"run_name={self.name}-best"]


def _model_defaults(source: str) -> Mapping[str, Any]:
    """Return the hyperparameters of `init_from`; a search without it needs no PyTorch."""
    from lm.hf import adapters

    return adapters.model_defaults(source)


def _start_date(directory: Path) -> datetime.date:
    """Return the date of the chat templates of the trials in `directory`, else today."""
    for config_file in directory.glob("trial-*/config.yaml"):
        with suppress(ConfigError, TypeError, ValueError, KeyError):  # `Trial.changes` names it
            saved = strict_yaml.load_experiment(config_file)[0]["hyperparameters"]
            return datetime.date.fromisoformat(saved["chat_template_date"])
    return datetime.date.today()


def _find_inputs(
    hp: Hyperparameters, searcher: Searcher, batch_size: int
) -> Mapping[str, Any] | ConfigError:
    """Return the inputs of a run; or what is wrong with them, or which metric they lack."""
    try:
        assert hp.run.seed is not None
        data = open_data(
            hp.data,
            hp.model.vocab_size,
            hp.model.max_seq_len,
            batch_size,
            hp.run.seed,
            pairs=hp.objective.of_pairs,
        )
        check_token_files(data.datasets)
        check_searcher(searcher, hp.tasks, data)
        tasks = read_tasks(hp.tasks.eval_tasks or (), hp.tasks.eval_limit)
        return fingerprint_inputs(hp, data, fingerprint_tasks(tasks))
    except ConfigError as error:
        return error
    except CheckpointError as error:
        return ConfigError(*error.problems)


def _read_saved(file: Path) -> _Saved | None:
    """Return what is in search.json; None = it is missing or damaged.

    Raises:
        ConfigError: it is of another format.
    """
    try:
        content = parse_json(read_bytes(file, _MAX_BYTES))
        found = _Format.model_validate(content).format
        if found != FORMAT:
            problem = f"has format {found}, this program reads format {FORMAT}"
            raise ConfigError(f"{file}: {problem}; use the version of this program that wrote it")
        return _Saved.model_validate(content)
    except (FileNotFoundError, ValueError):
        return None
