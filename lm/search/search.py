"""A search: its trials, what is known of them, and `search.json`, which makes it the same search.

search.json     the searcher, the hyperparameters with their ranges, and the points
lock            names the process that runs the search
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm import config
from lm.config import REPOSITORY, Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.data.run_data import DataConfig, open_data
from lm.determined.search import Searcher
from lm.errors import ConfigError
from lm.fileio import parse_json, read_bytes, replace_durably
from lm.hf import adapters
from lm.launch.console import announce
from lm.preflight import check_searcher
from lm.runtime.lease import in_use_error
from lm.runtime.run_dir import SEARCH_FILE, RunDir, lock_file, make_directory
from lm.search.experiment import Experiment, Point, differences
from lm.search.halving import Bracket, Replay, Standing, asha_brackets, single_bracket
from lm.search.report import Row
from lm.search.trials import Settings, Trial
from model import ModelConfig

_MAX_BYTES = 64 << 20


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
        self._problems_of_data: dict[str, ConfigError | None] = {}
        """by the hyperparameters that decide which data are read"""
        searcher = self.experiment.searcher
        if searcher.name == "adaptive_asha":
            self._brackets = asha_brackets(searcher)
            points = self.experiment.points(sum(b.max_trials for b in self._brackets))
        else:
            points = self._points_without_rungs()
            self._brackets = [single_bracket(searcher, len(points))]
        announce("reading the data")
        settings = [self._settings(point) for point in points]
        accepted = [each for each in settings if isinstance(each, Settings)]
        if not accepted:
            assert isinstance(settings[0], ConfigError)
            raise settings[0]
        self.name = accepted[0].hp.run_name or path.stem
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
            hp = config.read_hyperparameters(
                contents,
                experiment.overrides,
                str(experiment.path),
                experiment.lines,
                adapters.model_defaults,
            )
            if hp.max_epochs is not None:
                raise ConfigError("max_epochs: a search counts steps; set max_steps instead")
            if hp.resume != "auto":
                raise ConfigError(f"resume: {hp.resume} would discard a trial at every rung")
            searcher = Searcher.from_config(
                contents, hp.run_length(None), hp.validation_rate or hp.report_rate
            )
            settings = Settings(hp, searcher, derive_global_batch_size(hp, experiment.slots))
            self._check_data(settings)
        except ConfigError as error:
            return error
        return settings

    def _check_data(self, settings: Settings) -> None:
        """Raise ConfigError if the data are wrong, or lack the searcher's metric.

        Points that differ in other hyperparameters share the answer.
        """
        hp = settings.hp
        others = {"init_from", "eval_tasks", "eval_rate"}
        of_data = hp.model_dump_json(include={*DataConfig.model_fields, *others})
        searcher = settings.searcher
        key = f"{of_data} {hp.vocab_size} {hp.max_seq_len} {settings.global_batch_size} {searcher}"
        if key not in self._problems_of_data:
            self._problems_of_data[key] = _find_problem_of_data(settings)
        problem = self._problems_of_data[key]
        if problem is not None:
            raise problem

    def save(self) -> None:
        """Lock the search, and write search.json, or compare it with this search.

        Raises:
            ConfigError: the directory has another search, or a run.
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
        content = {"format": 1, "experiment": self.experiment.identity(), "points": points}
        text = json.dumps(content, indent=1, default=str).encode()  # YAML has dates, JSON has not
        if file.exists():
            self._compare(file, json.loads(text))
        else:
            replace_durably(file, text)

    def _compare(self, file: Path, content: Mapping[str, Any]) -> None:
        """Raise ConfigError if `file` is of another search than `content`."""
        try:
            saved = parse_json(read_bytes(file, _MAX_BYTES))
            changes = differences(saved["experiment"], content["experiment"])
            is_same = saved["points"] == content["points"]
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = f"delete {self.path}, or choose another name: run_name=NAME"
            raise ConfigError(f"{file}: is damaged; {remedy}") from None
        if not changes and not is_same:
            changes = ["points: are not those that this version draws; use that of the first start"]
        if changes:
            remedy = f"undo the change, or start another search: run_name={self.name}-2"
            raise ConfigError(*[f"{self.path}: {change}; {remedy}" for change in changes])

    def replay(self) -> Replay:
        """Return where all trials are, computed from their files."""
        brackets = [
            Bracket(each.rungs, each.max_trials, each.n_at_start, each.divisor)
            for each in self._brackets
        ]
        replay = Replay(
            brackets,
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

    def best(self, rows: Sequence[Row]) -> Row | None:
        """Return the trial whose last value is the best, of those that are complete.

        Without any, of those that have got as far as any.
        """
        measured = [row for row in rows if row.values]
        if not measured:
            return None
        finalists = [row for row in measured if row.state == "completed"]
        if not finalists:
            furthest = max(row.last_step for row in measured)
            finalists = [row for row in measured if row.last_step == furthest]
        sign = self.experiment.searcher.sign
        return min(finalists, key=lambda row: sign * row.values[row.last_step])

    def command_of(self, row: Row) -> list[str]:
        """Return the arguments that train from step 0 with all the hyperparameters of a trial."""
        trial = next(trial for trial in self.trials if trial.name == row.name)
        script = os.path.relpath(REPOSITORY / "fsdp.py")
        command = ["python", "-m", "lm.launch", "--nproc", str(self.experiment.slots), script]
        return [*command, "--config", str(trial.config), f"run_name={self.name}-best"]


def _find_problem_of_data(settings: Settings) -> ConfigError | None:
    """Return what is wrong with the data of a run, or which metric of the searcher they lack."""
    hp: Hyperparameters = settings.hp
    seed = config.DEFAULT_SEED
    if hp.seed is not None:
        seed = hp.seed
    try:
        data = open_data(hp, hp.vocab_size, hp.max_seq_len, settings.global_batch_size, seed)
        check_searcher(settings.searcher, hp, data)
    except ConfigError as error:
        return error
    return None
