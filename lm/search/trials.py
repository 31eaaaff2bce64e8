"""The trials of a search: runs of `fsdp.py` in `runs/<search>/trial-N/`, each in a process group.

config.yaml     hyperparameters of the trial; a run writes the rest of the files
stdout.txt      what all starts of the trial printed
stderr.txt      errors of the last start
dropped         why the trial was dropped; delete it to try the trial again
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lm import strict_yaml
from lm.config.hyperparameters import Hyperparameters
from lm.determined.search import INPUTS_VARIABLE, Searcher, differences
from lm.errors import ConfigError, make_printable
from lm.fileio import REPOSITORY, Line, open_regular, read_bytes, read_records, replace_durably
from lm.flops import count_flops_per_token
from lm.launch.spawn import die_with_parent
from lm.metrics.records import Report
from lm.runtime.run_dir import RunDir, is_locked, make_directory
from lm.runtime.run_state import read_state
from lm.search.experiment import Point
from lm.search.halving import DROPPED
from lm.training.config import LoraConfig

_MAX_REASON_BYTES = 1 << 20
_NO_ADAPTERS = LoraConfig.model_validate({})
_MAX_ERROR_BYTES = 64 << 10
"""Of the end of a trial's stderr.txt, in which its error is."""
_OF_OTHER_LAUNCHERS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RESTART_WHEN_STOPPED",
    "MAKE_TARGET",
    INPUTS_VARIABLE,
)
"""Environment variables that trials do not get from the search: each is a separate job."""


@dataclass(frozen=True)
class Settings:
    """What the run of a trial is to do."""

    hp: Hyperparameters
    searcher: Searcher
    """that knows when the run is validated"""
    global_batch_size: int
    """sequences per step"""
    inputs: Mapping[str, Any]
    """what its result depends on, besides hyperparameters"""

    def step_of(self, rung: int) -> int:
        """Return the step of the validation that decides at a rung."""
        if not self.searcher.rungs:
            return self.searcher.max_steps
        return self.searcher.validation_after(self.searcher.rungs[rung])

    def flops_until(self, rung: int) -> float:
        """Return the FLOPs of all training steps until a rung."""
        n_tokens = self.step_of(rung) * self.global_batch_size * self.hp.model.max_seq_len
        return n_tokens * self._flops_per_token

    @cached_property
    def _flops_per_token(self) -> float:
        """Those of the model without adapters, by which trials of one model differ little."""
        model = self.hp.model
        counted = count_flops_per_token(_NO_ADAPTERS, model)
        if counted is None:
            return 6.0 * model.n_parameters
        return counted


class _Session(Line, frozen=True):
    """A line of sessions.jsonl."""

    inputs: dict[str, Any] | None = None
    """of a start by `lm.search`"""


class Trial:
    """A trial: its point, and the directory of its run, which has all that is known of it.

    Args:
        number: from 0.
        settings: what its run is to do, or why its point is refused.
        metric: the searcher's, multiplied by `sign` so that less is better.
    """

    def __init__(
        self,
        search: str,
        number: int,
        point: Point,
        settings: Settings | ConfigError,
        metric: str,
        sign: float,
    ) -> None:
        self.name = f"trial-{number + 1}"
        self.run_name = f"{search}/{self.name}"
        self.point = point
        self.refusal: ConfigError | None = None
        """why its point is refused, so that it is never started"""
        self._settings: Settings | None = None
        if isinstance(settings, ConfigError):
            self.refusal = settings
        else:
            self._settings = settings
        self._metric = metric
        self._sign = sign
        self._run_dir = RunDir(self.run_name)
        self.path = self._run_dir.path
        self._size = -1
        self._values: dict[int, float] = {}

    @property
    def settings(self) -> Settings:
        """Those of a trial whose point is not refused."""
        assert self._settings is not None
        return self._settings

    def objective(self, rung: int) -> float | None:
        """Return the metric at a rung, of which less is better.

        `DROPPED` if the trial has ended before, None if it is not known yet.
        """
        if self.refusal is not None:
            return DROPPED
        value = self.values().get(self.settings.step_of(rung))
        if value is not None:
            return self._sign * value
        if self.why_dropped() is not None:
            return DROPPED
        return None

    def flops_until(self, rung: int) -> float:
        """Return the FLOPs until a rung; none if its point is refused."""
        if self.refusal is not None:
            return 0.0
        return self.settings.flops_until(rung)

    def values(self) -> Mapping[int, float]:
        """Return the searcher's metric by step, so far; inf and NaN are left out."""
        metrics = self._run_dir.metrics
        size = metrics.stat().st_size if metrics.exists() else 0
        if size != self._size:
            self._size = size
            self._values = {}
            for report in read_records(metrics, Report):
                if report.group == "validation" and self._metric in report.__pydantic_extra__:
                    self._values[report.step] = report.__pydantic_extra__[self._metric]
        return self._values

    def n_sessions(self) -> int:
        """Return how often its run has got as far as its first step."""
        return sum(1 for _ in read_records(self._run_dir.sessions, Line))

    def is_in_use(self) -> bool:
        """Return whether a process has its run, e.g. one that a killed search has left saving."""
        return is_locked(self.path / "lock")

    @property
    def config(self) -> Path:
        """Its hyperparameters, all of them."""
        return self._run_dir.config

    def _hyperparameters(self) -> dict[str, Any]:
        return self.settings.hp.to_flat() | {"run_name": self.run_name}

    def prepare(self) -> None:
        """Write the trial's config.yaml, from which it starts."""
        import yaml

        make_directory(self.path)
        if not self.config.exists():
            text = yaml.safe_dump({"hyperparameters": self._hyperparameters()}, sort_keys=False)
            replace_durably(self.config, text.encode())

    def changes(self) -> list[str]:
        """Return in what its files differ from its point, and its starts from its inputs."""
        sessions = list(read_records(self._run_dir.sessions, _Session))
        has_results = bool(sessions or self.values())
        if not self.config.exists():
            return [f"{self.config.name}: is missing"] if has_results else []
        if self.refusal is not None:
            return list(self.refusal.problems)
        try:
            found = strict_yaml.load_experiment(self.config)[0]
        except ConfigError as error:
            return list(error.problems)
        expected = {"hyperparameters": self._hyperparameters()}
        changes = [f"{self.config.name}: {each}" for each in differences(expected, found)]
        if read_state(self.path).had_checkpoint and not self._run_dir.metrics.exists():
            changes.append(f"{self._run_dir.metrics.name}: is missing")
        if has_results and not sessions:
            changes.append(f"inputs: are unknown: {self._run_dir.sessions.name} names no start")
        for session in sessions:
            if session.inputs is None:
                changes.append("inputs: are unknown: an older version started it, or not lm.search")
            else:
                changes += differences(session.inputs, self.settings.inputs)
        return list(dict.fromkeys(changes))

    def why_dropped(self) -> str | None:
        """Return why the trial was dropped, or None if it was not."""
        try:
            reason = read_bytes(self.path / "dropped", _MAX_REASON_BYTES)
            return make_printable(reason.decode(errors="replace"))
        except FileNotFoundError:
            return None

    def drop(self, reason: str) -> None:
        """Record that the trial was dropped."""
        replace_durably(self.path / "dropped", reason.encode())

    def undo_drop(self) -> None:
        """Forget that the trial was dropped."""
        (self.path / "dropped").unlink(missing_ok=True)

    def last_errors(self) -> str:
        """Return the last lines that its last start printed to stderr, as one line."""
        with open(self.path / "stderr.txt", "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MAX_ERROR_BYTES))
            errors = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return make_printable("; ".join(lines[-3:]))


class TrialProcess:
    """A start of a trial, whose ranks `lm.launch` starts.

    When this process ends, even by SIGKILL, the kernel sends SIGTERM to the launcher, so that the
    trial saves and stops.

    Args:
        rung: at which the run stops.
        env: environment variables of the trial's devices and threads.
    """

    def __init__(self, trial: Trial, rung: int, n_ranks: int, env: Mapping[str, str]) -> None:
        self.trial = trial
        self.rung = rung
        self._n_sessions_before = trial.n_sessions()
        variables = dict(os.environ) | dict(env)
        for name in _OF_OTHER_LAUNCHERS:
            variables.pop(name, None)
        variables[INPUTS_VARIABLE] = json.dumps(trial.settings.inputs)
        command = [sys.executable, "-m", "lm.launch", "--nproc", str(n_ranks)]
        command += [str(REPOSITORY / "fsdp.py"), "--config", str(trial.config)]
        step = trial.settings.step_of(rung)
        if step < trial.settings.searcher.max_steps:
            command.append(f"stop_at_step={step}")
        with (
            open(trial.path / "stdout.txt", "ab", opener=open_regular) as out,
            open(trial.path / "stderr.txt", "wb", opener=open_regular) as errors,
        ):
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process only
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask the trial to save and stop."""
        self._process.send_signal(signal.SIGTERM)

    def is_refused(self) -> bool:
        """Return whether it has ended with the exit code of a wrong configuration or input.

        A run that diverges has it, too.
        """
        return self.exit_code() == ConfigError.exit_code

    def was_resumed(self) -> bool:
        """Return whether an earlier start of its trial has got as far as its first step."""
        return self._n_sessions_before > 0

    def has_trained(self) -> bool:
        """Return whether it has got as far as its first step."""
        return self.trial.n_sessions() > self._n_sessions_before
