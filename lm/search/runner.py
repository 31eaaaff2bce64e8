"""What starts the trials of a search and waits for them, on the GPUs or cores of this machine."""

from __future__ import annotations

import os
import signal
import time

from lm.determined.search import OTHER_INPUTS
from lm.errors import ConfigError
from lm.launch.machine import has_gpu, usable_cores
from lm.launch.signals import handle_stop_signals
from lm.search.halving import Replay
from lm.search.report import Table
from lm.search.search import Search
from lm.search.trials import Trial, TrialProcess
from lm.units import format_count

POLL_SECONDS = 0.2
SAME_REFUSALS = 3
"""Trials that are refused for the same reason before any other has trained, until the search stops:
then the reason is not one of their points."""


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
        self.n_places = 1
        if parallel is not None:
            self.n_places = parallel
        elif self._gpus:
            self.n_places = max(1, len(self._gpus) // slots)
        if self._gpus and self.n_places * slots > len(self._gpus):
            needed = f"{self.n_places} x {slots} (trials at once, --parallel, x GPUs of each)"
            gpus = format_count(len(self._gpus), "GPU")
            problem = f"{needed} is more than the {gpus} of this machine"
            raise ConfigError(f"resources.slots_per_trial: {problem}")

    def env(self, place: int) -> dict[str, str]:
        """Return the environment variables of the trial at `place`, from 0."""
        variables: dict[str, str] = {}
        if self._gpus:
            first = place * self._slots
            own = self._gpus[first : first + self._slots]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        if "OMP_NUM_THREADS" not in os.environ:
            n_threads = usable_cores() // (self.n_places * self._slots)
            variables["OMP_NUM_THREADS"] = str(max(1, n_threads))
        return variables


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


class Runner:
    """Starts trials and waits for them, until the search has ended or is asked to stop."""

    def __init__(self, search: Search, devices: Devices, table: Table) -> None:
        self._search = search
        self._devices = devices
        self._table = table
        self._running: dict[int, TrialProcess] = {}
        """by place"""
        self._n_failures: dict[str, int] = {}
        self._error: ConfigError | None = None
        """what is wrong with the machine or the data, so that no trial can go on"""
        self._was_asked_to_stop = False
        self._has_said_so = False

    def install_signals(self) -> None:
        """Let stop signals stop the search; a second Ctrl-C quits at once."""
        handle_stop_signals(self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self._was_asked_to_stop and signum == signal.SIGINT:
            os._exit(128 + signum)  # the trials save and stop: see TrialProcess
        self._was_asked_to_stop = True
        self._stop_trials()

    def _stop_trials(self) -> None:
        for process in self._running.values():
            process.stop()

    @property
    def is_stopping(self) -> bool:
        return self._was_asked_to_stop or self._error is not None

    def run(self) -> Replay:
        """Run until no trial is active, or a signal arrives. Return where the trials are.

        Raises:
            ConfigError: trials cannot go on, for a reason that is not one of their points.
        """
        while True:
            replay = self._search.replay()
            if not self.is_stopping:
                self._start(replay)
            if not self._running and (self.is_stopping or not replay.waiting):
                if self._error is not None:
                    raise self._error
                return replay
            self._wait(replay)

    def _wait(self, replay: Replay) -> None:
        """Show the trials until one ends."""
        while True:
            if self._was_asked_to_stop and not self._has_said_so:
                self._has_said_so = True
                self._table.event("stopping: trials save a checkpoint; Ctrl-C again quits at once")
            self._show(replay)
            time.sleep(POLL_SECONDS)
            if self._collect() or not self._running:
                return

    def _start(self, replay: Replay) -> None:
        """Start active trials whose result is missing, the next one to be decided first."""
        running = {process.trial.name for process in self._running.values()}
        places = range(self._devices.n_places)
        free = [place for place in places if place not in self._running]
        for standing in replay.active():
            if not free or self.is_stopping:
                return
            trial = self._search.trials[standing.number]
            is_known = trial.objective(standing.rung) is not None  # it waits for earlier ones
            if trial.name in running or is_known or trial.is_in_use():
                continue
            try:
                self._search.require_unchanged(trial)
            except ConfigError as error:
                self._error = error
                self._stop_trials()
                return
            trial.prepare()
            place = free.pop(0)
            slots = self._search.experiment.slots
            env = self._devices.env(place)
            process = TrialProcess(trial, standing.rung, slots, env)
            self._running[place] = process
            if self.is_stopping:  # since the signal's handler looked at what runs
                process.stop()

    def _collect(self) -> bool:
        """Note what has ended, and return whether any trial has."""
        ended = [place for place, each in self._running.items() if each.exit_code() is not None]
        for place in ended:
            process = self._running.pop(place)
            if process.is_refused():
                self._note_refusal(process)
            elif not self.is_stopping and process.trial.objective(process.rung) is None:
                self._count_failure(process)
        return bool(ended)

    def _note_refusal(self, process: TrialProcess) -> None:
        """Drop a trial that was refused or has diverged; stop the search if others would be, too.

        What a trial has trained with before is not wrong with its point: the machine or the data
        have changed.
        """
        trial = process.trial
        reason = trial.last_errors()
        if process.was_resumed() and not process.has_trained():
            self._end(f"{trial.name} does not resume", reason)
            return
        if OTHER_INPUTS in reason:
            self._end(f"{trial.name} does not start", reason)
            return
        if not self._drop(trial, reason) or process.has_trained():
            return
        refused = self._refused_alike(reason)
        if len(refused) == SAME_REFUSALS:
            for other in refused:
                other.undo_drop()
            self._end(f"the first {SAME_REFUSALS} trials were refused alike", reason)

    def _drop(self, trial: Trial, reason: str) -> bool:
        """Drop a trial, unless its inputs have changed, which ends the search. Return whether."""
        try:
            self._search.require_same_inputs(trial)
        except ConfigError:
            self._end(f"{trial.name} does not start", reason)
            return False
        trial.drop(reason)
        return True

    def _refused_alike(self, reason: str) -> list[Trial]:
        """Return the trials that were refused for this reason; none if any trial has trained."""
        refused: list[Trial] = []
        for trial in self._search.trials:
            other_reason = trial.why_dropped()
            if trial.n_sessions() > 0 or other_reason not in (None, reason):
                return []
            if other_reason is not None:
                refused.append(trial)
        return refused

    def _end(self, problem: str, reason: str) -> None:
        """Stop the search with an error."""
        self._error = ConfigError(
            f"{self._search.path}: {problem}: {reason}; no trial was dropped for this: mend it, and"
            " run the same command again; if values are wrong, change their ranges and run_name"
        )
        self._stop_trials()

    def _count_failure(self, process: TrialProcess) -> None:
        """Drop a trial that has ended before its rung more than `max_restarts` times."""
        trial = process.trial
        step = trial.settings.step_of(process.rung)
        if process.exit_code() == 0 and not process.has_trained():
            self._end(f"{trial.name} is complete", f"its metrics.jsonl lacks step {step}")
            return
        n_failures = self._n_failures.get(trial.name, 0) + 1
        self._n_failures[trial.name] = n_failures
        problem = f"ended with code {process.exit_code()} before step {step}"
        if n_failures > self._search.experiment.max_restarts:
            self._drop(trial, f"{problem}, {n_failures} times: {trial.last_errors()}")
        self._table.event(f"{trial.name}: {problem}: {trial.last_errors()}")

    def _show(self, replay: Replay) -> None:
        running = {process.trial.name for process in self._running.values()}
        self._table.show(self._search.rows(replay.standings), running)
