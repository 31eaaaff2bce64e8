"""Command: search hyperparameters on this machine, with the experiment file of a cluster.

    python -m lm.search FILE [key=value ...] [--parallel N]

FILE is what `det experiment create FILE .` accepts: `searcher` single, random, grid or
adaptive_asha, and ranges under `hyperparameters`. Each trial is a run in `runs/<name>/trial-N/`. At
a rung it saves a checkpoint and ends; if it survives, it resumes. What is known of a search is
`runs/<name>/search.json`, which has the points, and the files of its trials, from which every
decision is computed again. Killed, it continues when the same command is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm import config
from lm.data.loader import derive_global_batch_size
from lm.data.run_data import open_data
from lm.determined.search import Searcher
from lm.errors import ConfigError, RunError, command, oserror_as_config_error
from lm.fileio import parse_json, read_bytes, replace_durably
from lm.hf import adapters
from lm.launch.console import announce
from lm.launch.launch import exit_code_of_stop
from lm.launch.machine import has_gpu, usable_cores
from lm.preflight import check_searcher
from lm.runtime.run_dir import RunDir, in_use_error, lock_file, make_directory
from lm.search.experiment import Experiment, Point, differences, step_cost
from lm.search.halving import DROPPED, Bracket, Replay, Standing, asha_brackets, single_bracket
from lm.search.report import Row, Table, write_report
from lm.search.trials import Trial, TrialProcess

POLL_SECONDS = 0.2
_MAX_SEARCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Plan:
    """What a trial is to do."""

    hp: config.Hyperparameters
    searcher: Searcher
    """that knows when the trial is validated"""

    def step_of(self, rung: int) -> int:
        """Return the step of the validation that decides at a rung."""
        if not self.searcher.rungs:
            return self.searcher.max_steps
        return self.searcher.validation_after(self.searcher.rungs[rung])


class Search:
    """A search, its points and its trials.

    The constructor changes nothing on disk.

    Raises:
        ConfigError: the experiment file is wrong, or every point is refused.
    """

    def __init__(self, path: Path, overrides: list[str], parallel: int | None) -> None:
        self.experiment = Experiment(path, overrides)
        searcher = self.experiment.searcher
        if searcher.name == "adaptive_asha":
            self.brackets = asha_brackets(searcher)
            self.points = self.experiment.points(sum(b.max_trials for b in self.brackets))
        else:
            self.points = self._points_without_rungs()
            self.brackets = [single_bracket(searcher, len(self.points))]
        self.plans: list[Plan | ConfigError] = [self._plan(point) for point in self.points]
        accepted = [plan for plan in self.plans if isinstance(plan, Plan)]
        if not accepted:
            assert isinstance(self.plans[0], ConfigError)
            raise self.plans[0]
        name = accepted[0].hp.run_name or path.stem
        if "/" in name:
            raise ConfigError(f"run_name: {name!r} has a '/'; trials are in runs/NAME/trial-N")
        self.path = RunDir(name).path
        self.name = name
        self.devices = Devices(self.experiment.slots, parallel)
        check_data(accepted[0], self.experiment.slots)
        self.trials = [
            Trial(name, number + 1, searcher.metric, searcher.sign)
            for number in range(len(self.points))
        ]

    def _points_without_rungs(self) -> list[Point]:
        searcher = self.experiment.searcher
        if searcher.name == "grid":
            return self.experiment.grid()
        if searcher.name == "single":
            return self.experiment.points(1)
        assert searcher.max_trials is not None
        return self.experiment.points(searcher.max_trials)

    def _plan(self, point: Point) -> Plan | ConfigError:
        """Return what the trial of `point` is to do, or why the point is refused."""
        experiment = self.experiment
        searcher_config = experiment.searcher.model_dump()
        contents = dict(experiment.contents)
        contents |= {"hyperparameters": point, "searcher": searcher_config}
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
            max_steps = hp.run_length(None)
            searcher = Searcher.from_config(
                contents, max_steps, hp.validation_rate or hp.report_rate
            )
            return Plan(hp, searcher)
        except ConfigError as error:
            return error

    def save(self) -> None:
        """Lock the search, and write search.json, or compare it with this search.

        Raises:
            ConfigError: the directory has another search.
            RunError: another process has locked it.
        """
        make_directory(self.path)
        file = self.path / "search.json"
        content = {"format": 1, "experiment": self.experiment.identity(), "points": self.points}
        text = json.dumps(content, indent=1, default=str).encode()  # YAML has dates, JSON has not
        if file.exists():
            self._compare(file, json.loads(text))
        holder = lock_file(self.path / "lock")
        if holder is not None:
            raise in_use_error(self.path, holder)
        if (self.path / "metrics.jsonl").exists():
            raise ConfigError(f"{self.path}: is a run; choose another name: run_name=NAME")
        if not file.exists():
            replace_durably(file, text)

    def _compare(self, file: Path, content: Mapping[str, Any]) -> None:
        """Raise ConfigError if `file` is of another search than `content`."""
        try:
            saved = parse_json(read_bytes(file, _MAX_SEARCH_BYTES))
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
            for each in self.brackets
        ]
        replay = Replay(brackets, self.result, self._arrival)
        replay.run()
        return replay

    def result(self, number: int, rung: int) -> float | None:
        """Return what a trial has at a rung, as `Replay` asks for it."""
        plan = self.plans[number]
        trial = self.trials[number]
        if isinstance(plan, ConfigError):
            return DROPPED
        loss = trial.loss(plan.step_of(rung))
        if loss is None and trial.why_dropped() is not None:
            return DROPPED
        return loss

    def _arrival(self, number: int, rung: int) -> float:
        plan = self.plans[number]
        if isinstance(plan, ConfigError):
            return 0.0
        return plan.step_of(rung) * step_cost(plan.hp)

    def rows(self, standings: Sequence[Standing]) -> list[Row]:
        """Return what the table and the report say of each trial."""
        searched = self.experiment.searched
        rows: list[Row] = []
        for standing in standings:
            number = standing.number
            plan = self.plans[number]
            trial = self.trials[number]
            point = {key: self.points[number][key] for key in searched}
            if isinstance(plan, ConfigError):
                row = Row(trial.name, point, "dropped", 0, {}, "; ".join(plan.problems))
            else:
                note = ""
                if standing.state == "dropped":
                    note = trial.why_dropped() or ""
                step = plan.step_of(standing.rung)
                row = Row(trial.name, point, standing.state, step, dict(trial.values()), note)
            rows.append(row)
        return rows

    def best(self, rows: Sequence[Row]) -> Row | None:
        """Return the best of the trials that have got as far as any."""
        measured = [row for row in rows if row.values]
        if not measured:
            return None
        furthest = max(max(row.values) for row in measured)
        finalists = [row for row in measured if furthest in row.values]
        sign = self.experiment.searcher.sign
        return min(finalists, key=lambda row: sign * row.values[furthest])

    def command_of(self, row: Row) -> list[str]:
        """Return the arguments that train at the point of `row` from step 0."""
        experiment = self.experiment
        command = ["python", "-m", "lm.launch", "--nproc", str(experiment.slots), "fsdp.py"]
        command += ["--config", str(experiment.path)]
        for key, value in row.point.items():
            text = value
            if not isinstance(value, str):
                text = json.dumps(value)
            command.append(f"{key}={text}")
        kept = [each for each in experiment.overrides if not each.startswith("run_name=")]
        return [*command, *kept, f"run_name={self.name}-best"]


class Devices:
    """The GPUs, or the cores, that trials which run at the same time share.

    Args:
        slots: ranks of a trial.
        parallel: trials at the same time; None = as many as there are GPUs for, or 1.

    Raises:
        ConfigError: there are too few GPUs.
    """

    def __init__(self, slots: int, parallel: int | None) -> None:
        self._slots = slots
        self._gpus = _list_gpus()
        if parallel is None:
            parallel = 1
            if self._gpus:
                parallel = max(1, len(self._gpus) // slots)
        if self._gpus and parallel * slots > len(self._gpus):
            problem = f"{parallel} x {slots} (resources.slots_per_trial) is more than"
            raise ConfigError(f"--parallel: {problem} the {len(self._gpus)} GPUs of this machine")
        self.n_places = parallel

    def env(self, place: int) -> dict[str, str]:
        """Return the environment variables of the trial at `place`, from 0."""
        if self._gpus:
            first = place * self._slots
            own = self._gpus[first : first + self._slots]
            return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
        if "OMP_NUM_THREADS" in os.environ:
            return {}
        n_threads = usable_cores() // (self.n_places * self._slots)
        return {"OMP_NUM_THREADS": str(max(1, n_threads))}


def _list_gpus() -> list[str]:
    """Return the GPUs of this process as CUDA_VISIBLE_DEVICES names them."""
    if not has_gpu():
        return []
    import torch

    names = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = visible.split(",")[: len(names)]
    return names


def check_data(plan: Plan, slots: int) -> None:
    """Raise ConfigError if the data are wrong, or lack the searcher's metric."""
    hp = plan.hp
    announce("reading the data")
    batch_size = derive_global_batch_size(hp, slots)
    seed = config.DEFAULT_SEED
    if hp.seed is not None:
        seed = hp.seed
    data = open_data(hp, hp.vocab_size, hp.max_seq_len, batch_size, seed)
    check_searcher(plan.searcher, hp, data)


class Runner:
    """Starts trials and waits for them, until the search has ended or is asked to stop."""

    def __init__(self, search: Search, table: Table) -> None:
        self._search = search
        self._table = table
        self._running: dict[int, TrialProcess] = {}
        """by place"""
        self._n_failures: dict[str, int] = {}
        self.is_stopping = False

    def install_signals(self) -> None:
        """Let SIGTERM and Ctrl-C stop the search; a second Ctrl-C quits at once."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self.is_stopping and signum == signal.SIGINT:
            os._exit(128 + signum)  # the trials save and stop: see TrialProcess
        self.is_stopping = True
        for process in self._running.values():
            process.stop()

    def run(self) -> Replay:
        """Run until no trial is active, or a signal arrives. Return where the trials are."""
        while True:
            replay = self._search.replay()
            if not self.is_stopping:
                self._start(replay)
            if not self._running and (self.is_stopping or not replay.waiting):
                return replay
            self._wait(replay)

    def _wait(self, replay: Replay) -> None:
        """Show the trials until one ends."""
        while True:
            self._show(replay)
            time.sleep(POLL_SECONDS)
            if self._collect() or not self._running:
                return

    def _start(self, replay: Replay) -> None:
        """Start active trials whose result is missing, the next one to be decided first."""
        search = self._search
        names = {process.trial.name for process in self._running.values()}
        free = [place for place in range(search.devices.n_places) if place not in self._running]
        for standing in replay.active():
            if not free or self.is_stopping:
                return
            plan = search.plans[standing.number]
            trial = search.trials[standing.number]
            if trial.name in names or isinstance(plan, ConfigError):
                continue
            if search.result(standing.number, standing.rung) is not None:
                continue  # it waits for earlier ones
            step = plan.step_of(standing.rung)
            stop_step = None
            if step < plan.searcher.max_steps:
                stop_step = step
            trial.prepare(plan.hp)
            place = free.pop(0)
            slots = search.experiment.slots
            env = search.devices.env(place)
            process = TrialProcess(trial, stop_step, slots, env)
            self._running[place] = process
            if self.is_stopping:  # since the signal's handler looked at what runs
                process.stop()

    def _collect(self) -> bool:
        """Note what has ended, and return whether any trial has."""
        ended = [place for place, each in self._running.items() if each.exit_code() is not None]
        for place in ended:
            process = self._running.pop(place)
            if process.is_refused():
                process.trial.drop(process.trial.last_errors())
            elif not self.is_stopping:
                self._count_failure(process)
        return bool(ended)

    def _count_failure(self, process: TrialProcess) -> None:
        """Drop a trial that has ended below its step more than `max_restarts` times."""
        trial = process.trial
        number = self._search.trials.index(trial)
        plan = self._search.plans[number]
        assert isinstance(plan, Plan)
        step = process.stop_step or plan.searcher.max_steps
        if trial.loss(step) is not None:
            return
        n_failures = self._n_failures.get(trial.name, 0) + 1
        self._n_failures[trial.name] = n_failures
        problem = f"ended with code {process.exit_code()} before step {step}"
        if n_failures > self._search.experiment.max_restarts:
            trial.drop(f"{problem}, {n_failures} times: {trial.last_errors()}")
        self._table.event(f"{trial.name}: {problem}: {trial.last_errors()}")

    def _show(self, replay: Replay) -> None:
        running = {process.trial.name for process in self._running.values()}
        self._table.show(self._search.rows(replay.standings), running)


def parse_search_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.search",
        description="Search hyperparameters on this machine.",
        epilog="Run the same command again to continue.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="experiment file with a searcher")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="hyperparameters to change"
    )
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="trials at once (default: one per GPU, or 1)"
    )
    args = parser.parse_intermixed_args(arguments)
    if args.parallel is not None and args.parallel < 1:
        raise ConfigError(f"--parallel: {args.parallel} must be 1 or more")
    return args


def finish(search: Search, replay: Replay, table: Table) -> int:
    """Write the report, and say which trial is the best. Return the exit code."""
    rows = search.rows(replay.standings)
    best = search.best(rows)
    table.show(rows, set())
    if best is None:
        reasons = {row.note for row in rows}
        raise RunError(f"{search.path}: no trial has a result", *sorted(reasons)[:5])
    written = write_report(
        search.path, rows, best, search.experiment.searcher.metric, search.command_of(best)
    )
    table.end(best, search.experiment.searcher.metric, search.command_of(best), written)
    return 0


@command
@oserror_as_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_search_arguments(arguments)
    search = Search(args.file, args.overrides, args.parallel)
    search.save()
    table = Table(search.experiment.searcher.metric)
    runner = Runner(search, table)
    runner.install_signals()
    replay = runner.run()
    if replay.waiting:
        rows = search.rows(replay.standings)
        table.show(rows, set())
        print(f"stopped as requested; rerun the same command to continue {search.path}")
        return exit_code_of_stop(os.environ)
    return finish(search, replay, table)


if __name__ == "__main__":
    sys.exit(main())
