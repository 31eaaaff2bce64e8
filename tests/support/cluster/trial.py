"""Experiments and trials on the stand-in master, run by Determined's own code.

`submit` sends the package as `det experiment create` does. `Trial` does what an agent does: it runs
the container's entrypoint (`prep_container`, startup hook, rendezvous, `exec.launch`) in private
namespaces, see `container`. `run_experiment` does so for all trials of an experiment, as the
master's scheduler does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lm.launch.spawn import reserve_port
from tests.support import PATIENCE, REPOSITORY
from tests.support.cluster import container
from tests.support.cluster.master import (
    USER_TOKEN,
    Allocation,
    Experiment,
    Master,
    TrialRecord,
)
from tests.support.forked import start_python
from tests.support.hyperparameters import TINY

SHORT = TINY | {
    "max_steps": 12,
    "report_rate": 3,
    "checkpoint_rate": 6,
    "validation_batches": 1,
    "lr": 1.0e-2,
    "collective_timeout": 60,
}

PASSWORD = "password-of-a-user"

ENDED = ("STATE_COMPLETED", "STATE_ERROR")
"""States of trials that are not started again."""

FAILURES = (1, 256 - signal.SIGTERM)
"""Exit codes of a failed trial: torchrun's, or that of the signal that Determined's launcher sends
if torchrun takes longer than 3 seconds to end."""


def unavailable_reason() -> str | None:
    """Return why no container can be started on this machine, or None."""
    mount = "c.run('mount', '-t', 'tmpfs', 'x', '/run')"
    try_it = f"import {container.__name__} as c; c.enter_namespaces(); {mount}"
    done = subprocess.run(
        [sys.executable, "-c", try_it], cwd=REPOSITORY, capture_output=True, text=True
    )
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


def experiment(
    file: str = "config.yaml", *, slots: int = 1, **hyperparameters: Any
) -> dict[str, Any]:
    """Return the experiment of a shipped file, shortened by `SHORT` and `hyperparameters`.

    `None` removes a key.
    """
    config = yaml.safe_load((REPOSITORY / file).read_text())
    config["checkpoint_storage"] = {"type": "directory", "container_path": container.STORAGE}
    config["resources"] = config.get("resources", {}) | {"slots_per_trial": slots}
    changes = SHORT | hyperparameters
    merged = config["hyperparameters"] | changes
    config["hyperparameters"] = {key: value for key, value in merged.items() if value is not None}
    return config


def submit(master: Master, config: Mapping[str, Any], folder: Path) -> None:
    """Create an experiment with the CLI, which keeps its files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    command = ["-m", "determined.cli", "-m", master.url]
    command += ["experiment", "create", str(file), str(REPOSITORY)]
    login = {
        "DET_USER": "tester",
        "DET_PASS": PASSWORD,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    cli = start_python(
        command, os.environ | login, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = cli.communicate(timeout=PATIENCE)
    assert cli.returncode == 0, output


class Trial:
    """A running container of a trial; a context manager that kills it at the end.

    Args:
        hyperparameters: as chosen by the search; None = the experiment's.
        fork: whether the container's Python programs are forked. They have then imported `lm` from
            the repository.
    """

    def __init__(
        self,
        master: Master,
        number: int = 1,
        *,
        folder: Path,
        latest: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        fork: bool = True,
        **env: str,
    ) -> None:
        self.master = master
        self.allocation = master.allocate(number, latest)
        self._output = folder / f"{self.allocation.id}.log"
        master.trials[number].logs.append(self._output)
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith("DET_")
        }
        variables |= environment(master, self.allocation, hyperparameters)
        with self._output.open("ab") as output:
            self.process = start_python(
                ["-m", container.__name__, str(master.storage)],
                variables | env,
                fork=fork,
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.allocation.kill = self.process.kill

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        link = Path("/tmp/tensorboard")
        with contextlib.suppress(OSError):
            if link.readlink().name.startswith(f"tensorboard-{self.allocation.id}"):
                link.unlink()
        for leftover in Path("/tmp").glob(f"*-{self.allocation.id}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @property
    def log(self) -> str:
        """The output of `det trial logs`."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout: float = 300) -> int:
        """Return the container's exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.log}") from None


def run(
    master: Master, number: int = 1, *, folder: Path, timeout: float = 300, **how: Any
) -> Trial:
    """Run a trial to its end."""
    with Trial(master, number, folder=folder, **how) as trial:
        trial.wait(timeout)
    return trial


def run_experiment(master: Master, experiment: Experiment, folder: Path) -> None:
    """Run the trials of a new or continued experiment in turn, then collect its checkpoints."""
    searcher = experiment.searcher
    assert searcher is not None
    if not searcher.points:
        for _ in range(searcher.n_at_start()):
            master.create_trial(experiment)
    ended, records = "STATE_ERROR", list[TrialRecord]()
    try:
        while experiment.state in ("STATE_ACTIVE", "STATE_PAUSED"):
            records = [
                record for record in master.trials.values() if record.experiment == experiment.id
            ]
            waiting = [record for record in records if record.state not in ENDED]
            if not waiting:
                break
            if experiment.state == "STATE_PAUSED":
                time.sleep(0.1)
                continue
            record = waiting[0]
            has_ended = run_once(master, experiment, record, folder)
            if has_ended and searcher.replaces(record.id, record.state):
                master.create_trial(experiment)
        if experiment.state == "STATE_STOPPING_KILLED":
            ended = "STATE_CANCELED"
        elif experiment.state == "STATE_ACTIVE" and any(
            record.state == "STATE_COMPLETED" for record in records
        ):
            ended = "STATE_COMPLETED"
        master.collect(experiment)
    finally:
        experiment.state = ended


def run_once(master: Master, experiment: Experiment, record: TrialRecord, folder: Path) -> bool:
    """Start a trial and wait for its exit; return whether it has completed or failed for good."""
    finished = run(master, record.id, folder=folder, hyperparameters=record.hparams)
    if finished.allocation.acknowledged:
        return False
    policies = [
        policy
        for policy in experiment.config["log_policies"]
        if policy["action"] in ("cancel_retries", {"type": "cancel_retries"})
    ]
    is_final = any(
        re.search(f"^{policy['pattern']}$", finished.log, re.MULTILINE) for policy in policies
    )
    if finished.process.returncode == 0:
        record.state = "STATE_COMPLETED"
    elif is_final or record.restarts == experiment.config["max_restarts"]:
        record.state = "STATE_ERROR"
    else:
        record.restarts += experiment.state == "STATE_ACTIVE"  # else it was killed
    return record.state in ENDED


def environment(
    master: Master, allocation: Allocation, hyperparameters: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the environment variables that an agent sets in the trial's container."""
    slots = master.experiment["resources"]["slots_per_trial"]
    config = master.experiment
    variables = {
        "DET_MASTER": master.url,
        "DET_CLUSTER_ID": "cluster-1",
        "DET_AGENT_ID": "agent-1",
        "DET_SLOT_IDS": json.dumps(list(range(slots))),
        "DET_TASK_ID": allocation.task,
        "DET_ALLOCATION_ID": allocation.id,
        "DET_SESSION_TOKEN": allocation.token,
        "DET_TASK_TYPE": "TRIAL",
        "DET_TRIAL_ID": str(allocation.trial),
        "DET_EXPERIMENT_ID": str(master.trials[allocation.trial].experiment),
        "DET_TRIAL_SEED": "7",
        "DET_HPARAMS": json.dumps(hyperparameters or config["hyperparameters"]),
        "DET_EXPERIMENT_CONFIG": json.dumps(config),
        "DET_STEPS_COMPLETED": "0",
        "DET_TRIAL_RUN_ID": str(allocation.run),
        "DET_USER": "tester",
        "DET_USER_TOKEN": USER_TOKEN,
        "DET_RESOURCES_ID": "resources-1",
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_CONTAINER_ID": "container-1",
        "C10D_PORT": str(reserve_port()),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return variables | ({"DET_LATEST_CHECKPOINT": allocation.latest} if allocation.latest else {})
