"""A search: an Optuna study in `runs/<search>/search.journal`, and the trials that run for it.

A trial is RUNNING in the study until its result is known, also while no process trains it. Its
point is added to the journal in one record, so that a kill leaves no part of one.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from lm.command_line import format_table
from lm.data.config import DataConfig
from lm.errors import ConfigError, RunError, limit_problems
from lm.fileio import REPOSITORY
from lm.launch.console import announce
from lm.launch.launch import exit_code_of_stop
from lm.launch.signals import handle_stop_signals
from lm.report import JOURNAL
from lm.runtime.run_dir import RunDir, make_directory
from lm.search.experiment import Experiment, Point, Searcher
from lm.search.trials import Devices, TrialRun, dry_run
from lm.seeds import derive_seed
from lm.storage.lock import hold_until_exit, is_held
from lm.tasks.config import TasksConfig
from lm.units import format_count

POLL_SECONDS = 0.5
_STUDY = "search"
PROBLEM = "problem"
"""Attribute of a trial that has failed: why."""
_OF_INPUTS = DataConfig.model_fields.keys() | TasksConfig.model_fields.keys()
_OF_INPUTS |= {"init_from", "model", "max_seq_len", "vocab_size", "seed"}
"""Hyperparameters that decide what a trial reads: trials with other values may read other data."""


def _drop_partial_line(journal: Path) -> None:
    """Drop the end of the journal that a kill or a full disk has left without a line end."""
    if journal.exists():
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)


def _make_pruner(searcher: Searcher) -> BasePruner:
    if searcher.name != "adaptive_asha":
        return NopPruner()
    assert searcher.max_time is not None
    first_rung = max(1, searcher.max_time // searcher.divisor ** (searcher.max_rungs - 1))
    return SuccessiveHalvingPruner(first_rung, searcher.divisor)


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line with both values of each key whose value differs."""
    return [
        f"{key}: was {before.get(key)}, is now {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def check_ends(experiment: Experiment, devices: Devices, check_all: bool) -> None:
    """Check by dry runs that trials accept the first values of all ranges, or the last ones.

    Args:
        check_all: whether to check both, also if the first ones are accepted.

    Raises:
        ConfigError: trials refuse both.
    """
    refusals: list[list[str]] = []
    ends = experiment.ends()
    for point in ends:
        announce(f"dry run of a trial: {format_point(point)}")
        problems = dry_run(experiment.arguments_of(point, "check"), devices)
        if problems:
            refusals.append(problems)
        elif not check_all:
            return
    if len(refusals) == len(ends):
        raise ConfigError(*refusals[0])
    if refusals:
        announce(f"refused: {'; '.join(refusals[0])}")


def format_value(value: Any) -> str:
    """Return a hyperparameter with at most four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def format_point(point: Point) -> str:
    """Return the hyperparameters of a point."""
    return " ".join(f"{key}={format_value(value)}" for key, value in point.items())


def run_search(path: Path, arguments: Sequence[str], parallel: int | None, is_dry_run: bool) -> int:
    """Run the search of an experiment file. Return the exit code."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    experiment = Experiment(path, arguments)
    devices = Devices(experiment.sections.resources.slots_per_trial, parallel)
    if is_dry_run:
        check_ends(experiment, devices, check_all=True)
        return 0
    if not RunDir(experiment.run_name).path.exists():  # it stays so if the start is refused
        check_ends(experiment, devices, check_all=False)
    search = Search(experiment, devices)
    handle_stop_signals(search.on_signal)
    if not search.run():
        print(f"stopped as requested; rerun the same command to continue {search.path}")
        return exit_code_of_stop(os.environ)
    print(search.describe())
    return 0


class Search:
    """A study, and the trials that run for it.

    The constructor locks the directory of the search, and opens or creates the study.

    Raises:
        ConfigError: the study is of another experiment, damaged, or missing next to its trials.
        RunError: another process has locked the directory.
    """

    def __init__(self, experiment: Experiment, devices: Devices) -> None:
        self.experiment = experiment
        self._devices = devices
        self._running: dict[int, TrialRun] = {}
        """by place"""
        self._n_failures: Counter[int] = Counter()
        self._was_asked_to_stop = False
        self._error: ConfigError | None = None
        """what is wrong with the machine or the data, so that no trial can go on"""
        run_dir = RunDir(experiment.run_name)
        self.path = run_dir.path
        if run_dir.config.exists():
            raise ConfigError(f"{self.path}: is a run; choose another name: run_name=NAME")
        make_directory(self.path)
        hold_until_exit(self.path / "lock")
        journal = self.path / JOURNAL
        # Optuna's lock, if a kill has left it: Optuna would wait for 30 s.
        journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        _drop_partial_line(journal)
        try:
            self._storage = JournalStorage(JournalFileBackend(str(journal)))
            self.study = self._open_study()
        except (ValueError, LookupError) as error:
            problem = f"{journal}: damaged ({error})"
            raise ConfigError(f"{problem}; start another search: run_name=NAME") from None
        if not self.study.get_trials(deepcopy=False) and list(self.path.glob("trial-*")):
            problem = f"{self.path}: has trials that are not in {journal.name}"
            raise ConfigError(f"{problem}; start another search: run_name={self.path.name}-2")
        identity = experiment.identity()
        changes = describe_changes(self.study.user_attrs.get("experiment", identity), identity)
        if changes:
            remedy = f"undo this, or start another search: run_name={self.path.name}-2"
            raise ConfigError(f"{self.path}: {'; '.join(limit_problems(changes))}; {remedy}")
        self.study.set_user_attr("experiment", identity)

    def _open_study(self) -> optuna.Study:
        direction = "maximize"
        if self.experiment.searcher.smaller_is_better:
            direction = "minimize"
        return optuna.create_study(
            study_name=_STUDY,
            storage=self._storage,
            direction=direction,
            pruner=_make_pruner(self.experiment.searcher),
            load_if_exists=True,
        )

    def on_signal(self, signum: int, _frame: object) -> None:
        """Stop the search; a second Ctrl-C quits at once."""
        if self._was_asked_to_stop and signum == signal.SIGINT:
            os._exit(128 + signum)  # the kernel then asks the trials to save and stop
        self._was_asked_to_stop = True

    def run(self) -> bool:
        """Run until every trial has a result, or a signal arrives. Return whether all have.

        Raises:
            ConfigError: trials cannot go on, for a reason that is not one of their points.
        """
        self._wait_for_saving_trials()
        while self._is_unfinished() or self._running:
            if self._was_asked_to_stop or self._error is not None:
                break
            self._start_trials()
            time.sleep(POLL_SECONDS)
            for place, run in list(self._running.items()):
                code = run.exit_code()  # before the records, of which none is then missing
                self._report(run)
                if code is not None:
                    del self._running[place]
                    self._note_exit(run, code)
        if self._running:
            announce("stopping: trials save a checkpoint; Ctrl-C again quits at once")
        for run in self._running.values():
            run.stop()
        for run in self._running.values():
            run.wait()
        if self._error is not None:
            raise self._error
        return not self._is_unfinished()

    def _wait_for_saving_trials(self) -> None:
        """Wait for trials that a killed search has left saving, on devices that they still use."""
        for lock in self.path.glob("trial-*/lock"):
            if is_held(lock):
                announce(f"waiting for {lock.parent.name}, which another process still runs")
            while is_held(lock) and not self._was_asked_to_stop:
                time.sleep(POLL_SECONDS)

    def _is_unfinished(self) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        is_running = any(trial.state == TrialState.RUNNING for trial in trials)
        return is_running or len(trials) < self.experiment.n_points

    def _start_trials(self) -> None:
        n_places = self._devices.n_places
        if self.experiment.searcher.max_concurrent_trials > 0:
            n_places = min(n_places, self.experiment.searcher.max_concurrent_trials)
        for place in range(n_places):
            if place in self._running:
                continue
            run = self._next_run()
            if run is None:
                return
            point = self._trial(run.number).params
            announce(f"{run.name} starts: {format_point(point)}")
            run.start(self.experiment.arguments_of(point, run.name), self._devices, place)
            self._running[place] = run

    def _next_run(self) -> TrialRun | None:
        """Return a run to start: of a trial that has no result yet, or of a new one, or None."""
        running = [run.number for run in self._running.values()]
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.number not in running and trial.state == TrialState.RUNNING:
                run = TrialRun(self.path.name, trial.number)
                self._report(run)
                if self._error is None and self._trial(trial.number).state == TrialState.RUNNING:
                    return run
        if self._error is not None or len(trials) >= self.experiment.n_points:
            return None
        distributions: Any = self.experiment.distributions
        point = self._draw(len(trials))
        new = create_trial(state=TrialState.RUNNING, params=point, distributions=distributions)
        self.study.add_trial(new)
        return TrialRun(self.path.name, len(trials))

    def _draw(self, number: int) -> Point:
        """Return the point of a trial: of a grid or a random search a function of its number."""
        seed = derive_seed("point", self.experiment.seed, number) % 2**32
        sampler: BaseSampler = RandomSampler(seed)
        if self.experiment.searcher.name == "grid":
            sampler = GridSampler(self.experiment.choices(), self.experiment.seed)
        elif self.experiment.searcher.sampler == "tpe":
            sampler = TPESampler(seed=seed)
        in_memory = optuna.create_study(direction=self.study.direction, sampler=sampler)
        in_memory.add_trials(self.study.get_trials())
        distributions: Any = self.experiment.distributions
        return in_memory.ask(distributions).params

    def _trial(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _check_inputs(self, run: TrialRun) -> None:
        """End the search if a start of a trial has read other inputs than the first trial."""
        point = self._trial(run.number).params
        decisive = {key: value for key, value in point.items() if key in _OF_INPUTS}
        name = f"inputs {format_point(decisive)}"
        for session in run.sessions():
            expected = self.study.user_attrs.get(name)
            if session.inputs is None:
                continue
            if expected is None:
                self.study.set_user_attr(name, session.inputs)
            elif expected != session.inputs:
                changes = "; ".join(describe_changes(expected, session.inputs))
                self._end(f"{run.name}: {changes}", f"delete {run.run_dir.path}, ")

    def _report(self, run: TrialRun) -> None:
        """Report the validations of a run, and stop it if they decide on its trial."""
        validations = run.validations()  # before the sessions, which precede them on disk
        self._check_inputs(run)
        frozen = self._trial(run.number)
        if self._error is not None or not validations or frozen.state != TrialState.RUNNING:
            return
        trial = self._open_trial(run.number)
        max_steps = run.max_steps()
        last_step = min(max_steps, self.experiment.searcher.max_time or max_steps)
        metric = self.experiment.searcher.metric
        reported = frozen.last_step or 0
        for report in validations:
            if report.step < reported:
                continue
            value = report.__pydantic_extra__[metric]
            if report.step > reported:
                trial.report(value, report.step)
            if report.step >= last_step:
                self.study.tell(run.number, value)
            elif trial.should_prune():
                self.study.tell(run.number, state=TrialState.PRUNED)
            else:
                continue
            result = self._trial(run.number).state.name.lower()
            announce(f"{run.name} {result}: {metric} {value:.4f} at step {report.step}")
            if report.step < max_steps:
                run.stop()
            return

    def _note_exit(self, run: TrialRun, code: int) -> None:
        """Decide what follows from the end of a run: another start, or none."""
        if self._trial(run.number).state != TrialState.RUNNING or self._error is not None:
            return
        reason = run.last_errors()
        if code != ConfigError.exit_code:
            self._n_failures[run.number] += 1
            problem = f"ended with code {code} before its last step: {reason}"
            announce(f"{run.name} {problem}")
            if self._n_failures[run.number] > self.experiment.sections.max_restarts:
                self._fail(run, problem)
            return
        if run.had_trained and not run.has_trained():
            self._end(f"{run.name} does not resume: {reason}")
            return
        if not run.has_trained():
            try:
                check_ends(self.experiment, self._devices, check_all=False)
            except ConfigError as error:
                self._error = error
                return
        self._fail(run, reason)

    def _open_trial(self, number: int) -> Trial:
        """Return a trial that is RUNNING.

        Optuna advises against this constructor, but a study has no method that continues a trial.
        """
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return Trial(
            self.study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        )

    def _fail(self, run: TrialRun, reason: str) -> None:
        """Give a trial up; the next point takes its place."""
        announce(f"{run.name} failed: {reason}")
        self._open_trial(run.number).set_user_attr(PROBLEM, reason)
        self.study.tell(run.number, state=TrialState.FAIL)

    def _end(self, problem: str, remedy: str = "") -> None:
        """End the search with an error that is not of one point."""
        self._error = ConfigError(
            f"{self.path}: {problem}; undo the change, {remedy}and run the same command again, or"
            f" start another search: run_name={self.path.name}-2"
        )

    def describe(self) -> str:
        """Return a table of all trials, and the command that trains with the best point.

        Raises:
            RunError: no trial is complete.
        """
        metric = self.experiment.searcher.metric
        keys = list(self.experiment.distributions)
        rows = [["trial", *keys, metric, "step", "state"]]
        trials = sorted(self.study.get_trials(), key=self._rank)
        for trial in trials:
            value = ""
            if trial.value is not None:
                value = f"{trial.value:.4f}"
            point = [format_value(trial.params[key]) for key in keys]
            state = f"{trial.state.name.lower()} {trial.user_attrs.get(PROBLEM, '')}"
            step = str(trial.last_step or "")
            rows.append([f"trial-{trial.number}", *point, value, step, state])
        lines = format_table(rows)
        best = trials[0]
        if best.state != TrialState.COMPLETE:
            raise RunError(f"{self.path}: no trial is complete", *limit_problems(lines))
        counts = Counter(trial.state.name.lower() for trial in trials)
        shown = ", ".join(f"{n} {state}" for state, n in counts.items())
        lines.append(f"{format_count(len(trials), 'trial')}: {shown}")
        run = TrialRun(self.path.name, best.number)
        result = f"{metric} {best.value:.4f} at step {best.last_step or 0}"
        command = [sys.orig_argv[0], "-m", "lm.launch", "--nproc", str(self._devices.slots)]
        command += [os.path.relpath(REPOSITORY / "fsdp.py"), "--config", str(run.run_dir.config)]
        command.append(f"run_name={self.path.name}-best")
        lines.append(f"best: {run.name}, {result}: {format_point(best.params)}")
        lines.append("to train at this point, at full length or longer (max_steps=N):")
        lines.append(f"    {shlex.join(command)}")
        return "\n".join(lines)

    def _rank(self, trial: FrozenTrial) -> tuple[int, float]:
        """Return the place of a trial: complete ones by value, then pruned and failed ones."""
        if trial.value is None:
            return trial.state, 0.0
        if self.experiment.searcher.smaller_is_better:
            return trial.state, trial.value
        return trial.state, -trial.value
