"""The trials of a search: runs of `fsdp.py` in `runs/<search>/trial-N/`, each in a process group.

config.yaml     hyperparameters of the trial; a run writes the rest of the files
stdout.txt      what all starts of the trial printed
stderr.txt      errors of the last start
dropped         why the trial was dropped; delete it to try the trial again
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lm.config import REPOSITORY, Hyperparameters
from lm.determined.search import STOP_VARIABLE
from lm.errors import ConfigError, make_printable
from lm.fileio import open_regular, read_bytes, read_records, replace_durably
from lm.launch.spawn import die_with_parent
from lm.runtime.run_dir import RUNS, make_directory

_MAX_ERROR_BYTES = 1 << 20


class Trial:
    """A trial, whose state is in its directory."""

    def __init__(self, search: str, number: int, metric: str, sign: float) -> None:
        self.name = f"trial-{number}"
        self.run_name = f"{search}/{self.name}"
        self.path = RUNS / search / self.name
        self._metric = metric
        self._sign = sign
        self._size = -1
        self._values: dict[int, float] = {}

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def prepare(self, hp: Hyperparameters) -> None:
        """Write the trial's config.yaml, from which it starts; once started, it has its own."""
        import yaml

        make_directory(self.path)
        if not self.config.exists():
            values = hp.model_dump(mode="json") | {"run_name": self.run_name}
            text = yaml.safe_dump({"hyperparameters": values}, sort_keys=False)
            replace_durably(self.config, text.encode())

    def values(self) -> Mapping[int, float]:
        """Return the searcher's metric by step, so far."""
        metrics = self.path / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        if size != self._size:
            self._size = size
            self._values = {}
            for record in read_records(metrics, {"group"}):
                value = record.get(self._metric)
                if record["group"] == "validation" and isinstance(value, float):
                    self._values[record["step"]] = value
        return self._values

    def loss(self, step: int) -> float | None:
        """Return the searcher's metric at `step`, of which less is better; None = not yet."""
        value = self.values().get(step)
        if value is None:
            return None
        return self._sign * value

    def last_step(self) -> int:
        """Return the step of the last report, 0 before the first."""
        return max((r["step"] for r in read_records(self.path / "metrics.jsonl", set())), default=0)

    def why_dropped(self) -> str | None:
        """Return why the trial was dropped, or None if it was not."""
        try:
            return read_bytes(self.path / "dropped", _MAX_ERROR_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None

    def drop(self, reason: str) -> None:
        """Record that the trial was dropped."""
        replace_durably(self.path / "dropped", reason.encode())

    def last_errors(self) -> str:
        """Return the last lines that its last start printed to stderr, as one line."""
        errors = read_bytes(self.path / "stderr.txt", _MAX_ERROR_BYTES).decode(errors="replace")
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return make_printable("; ".join(lines[-3:]))


class TrialProcess:
    """A start of a trial, whose ranks `lm.launch` starts.

    When this process ends, even by SIGKILL, the kernel sends SIGTERM to the launcher, so that the
    trial saves and stops.

    Args:
        stop_step: after whose validation the run stops; None = after its last step.
        env: environment variables of the trial's devices and threads.
    """

    def __init__(
        self, trial: Trial, stop_step: int | None, n_ranks: int, env: Mapping[str, str]
    ) -> None:
        self.trial = trial
        self.stop_step = stop_step
        variables = dict(os.environ) | dict(env)
        for name in ("RESTART_WHEN_STOPPED", "MAKE_TARGET", STOP_VARIABLE):
            variables.pop(name, None)
        if stop_step is not None:
            variables[STOP_VARIABLE] = str(stop_step)
        command = [sys.executable, "-m", "lm.launch", "--nproc", str(n_ranks)]
        command += [str(REPOSITORY / "fsdp.py"), "--config", str(trial.config)]
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
                preexec_fn=die_with_parent,
            )

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask the trial to save and stop."""
        self._process.send_signal(signal.SIGTERM)

    def is_refused(self) -> bool:
        """Return whether it ended because the point is refused, or has diverged."""
        return self.exit_code() == ConfigError.exit_code
