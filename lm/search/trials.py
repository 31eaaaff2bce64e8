"""The runs of trials: `fsdp.py` in `runs/<search>/trial-N/`, on GPUs or cores of this machine.

stdout.txt      what all starts of the trial printed
stderr.txt      errors of the last start
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import Any, BinaryIO

from lm import strict_yaml
from lm.errors import ConfigError, make_printable
from lm.fileio import REPOSITORY, Line, open_regular, read_records
from lm.inputs import RECORD_INPUTS
from lm.launch.machine import has_gpu, usable_cores
from lm.launch.process import die_with_parent
from lm.metrics.records import Report
from lm.runtime.run_dir import RunDir, make_directory
from lm.units import format_count

_MAX_ERROR_BYTES = 64 << 10


class Devices:
    """The GPUs, or the cores, that trials which run at the same time share.

    Args:
        slots: ranks of a trial.
        parallel: trials at the same time; None = as many as there are GPUs for, or 1.

    Raises:
        ConfigError: there are too few GPUs.
    """

    def __init__(self, slots: int, parallel: int | None) -> None:
        self.slots = slots
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
        variables = os.environ | {RECORD_INPUTS: "1"}
        variables.pop("MASTER_PORT", None)  # each trial reserves another one
        if self._gpus:
            first = place * self.slots
            own = self._gpus[first : first + self.slots]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        n_threads = usable_cores() // (self.n_places * self.slots)
        variables.setdefault("OMP_NUM_THREADS", str(max(1, n_threads)))
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


class Session(Line, frozen=True):
    """A line of sessions.jsonl."""

    inputs: dict[str, Any] | None = None
    """None = a start that was not by the search"""


def start_trial(
    arguments: Sequence[str],
    devices: Devices,
    place: int,
    stdout: int | BinaryIO,
    stderr: int | BinaryIO,
) -> subprocess.Popen[bytes]:
    """Start `fsdp.py` on the devices of a place. When this process ends, it saves and stops."""
    launcher = [sys.executable, "-m", "lm.launch", "--nproc", str(devices.slots)]
    return subprocess.Popen(
        [*launcher, str(REPOSITORY / "fsdp.py"), *arguments],
        env=devices.env(place),
        stdin=DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # a terminal's Ctrl-C reaches this process only
        preexec_fn=partial(die_with_parent, os.getpid()),  # by SIGKILL, too
    )


def dry_run(arguments: Sequence[str], devices: Devices) -> list[str]:
    """Return the lines by which a trial would be refused; none if it would start."""
    process = start_trial([*arguments, "--dry-run"], devices, 0, DEVNULL, PIPE)
    _, errors = process.communicate()
    if process.returncode == 0:
        return []
    lines = errors.decode(errors="replace").splitlines() or [f"exit code {process.returncode}"]
    return [make_printable(line) for line in lines]


class TrialRun:
    """The run of a trial: its records, and its process.

    Args:
        number: of the trial in the study.
    """

    def __init__(self, search: str, number: int) -> None:
        self.name = f"trial-{number}"
        self.number = number
        self.run_dir = RunDir(f"{search}/{self.name}")
        self._process: subprocess.Popen[bytes] | None = None
        self._n_sessions_before = 0

    def start(self, arguments: Sequence[str], devices: Devices, place: int) -> None:
        """Start the run."""
        self._n_sessions_before = len(self.sessions())
        path = self.run_dir.path
        make_directory(path)
        with (
            open(path / "stdout.txt", "ab", opener=open_regular) as out,
            open(path / "stderr.txt", "wb", opener=open_regular) as errors,
        ):
            self._process = start_trial(arguments, devices, place, out, errors)

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """Ask the run to save and stop."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until the run has ended."""
        assert self._process is not None
        self._process.wait()

    def sessions(self) -> list[Session]:
        """Return the starts that got as far as the first step."""
        return list(read_records(self.run_dir.sessions, Session))

    @property
    def had_trained(self) -> bool:
        """Whether an earlier start has got as far as the first step."""
        return self._n_sessions_before > 0

    def has_trained(self) -> bool:
        """Return whether this start has got as far as the first step."""
        return len(self.sessions()) > self._n_sessions_before

    def validations(self) -> list[Report]:
        """Return the reports of validations so far."""
        reports = read_records(self.run_dir.metrics, Report)
        return [report for report in reports if report.group == "validation"]

    def max_steps(self) -> int:
        """Return the last step of a run that has started; 0 = it only validates."""
        experiment, _ = strict_yaml.load_experiment(self.run_dir.config)
        max_steps: int | None = experiment["hyperparameters"]["max_steps"]
        return max_steps or 0

    def last_errors(self) -> str:
        """Return the last lines that the last start printed to stderr, as one line."""
        with open(self.run_dir.path / "stderr.txt", "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MAX_ERROR_BYTES))
            errors = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return make_printable("; ".join(lines[-3:])) or "it printed no error"
