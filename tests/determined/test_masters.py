"""A trial works with the SDK of an older master.

The platform installs it in every container.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import trial
from tests.support.cluster.master import Master

UNAVAILABLE = trial.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


OLDEST = "0.35.0"


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """The SDK of `OLDEST` from the package index, to be put before the installed one."""
    folder = tmp_path / "sdk"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(folder), f"determined=={OLDEST}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"determined {OLDEST} cannot be installed: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    (tmp_path / "storage").mkdir()
    master = Master(tmp_path / "storage", OLDEST)
    yield master
    master.close()


def in_the_older_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return the experiment as docs/clusters.md writes it for masters before 0.38."""
    config["searcher"]["max_length"] = 1
    config["log_policies"] = [
        {"pattern": policy["pattern"], "action": {"type": policy["action"]}}
        for policy in config["log_policies"]
    ]
    return config


@pytest.mark.slow
def test_trial_uses_the_sdk_of_its_master(master: Master, sdk: Path, tmp_path: Path) -> None:
    # Forked programs would have imported another version, and `lm` not from what is uploaded.
    how: dict[str, Any] = {"PYTHONPATH": str(sdk), "PIP_NO_INDEX": "1"}
    how |= {"folder": tmp_path, "fork": False}
    # The pause ends it: a trial hears of that later than its small steps are done.
    config = trial.experiment(max_steps=100_000, report_rate=1, checkpoint_rate=100, num_tokens=0)
    trial.submit(master, in_the_older_form(config), tmp_path / "cli")

    def pause(group: str, step: int) -> None:
        if (group, step) == ("training", 5) and master.allocation:
            master.allocation.preempt.set()

    master.on_metrics = pause
    paused = trial.run(master, **how)
    assert paused.process.returncode == 0, paused.log
    assert paused.allocation.acknowledged, paused.log
    stop = master.kept(1)[-1]["metadata"]["steps_completed"]
    shorter = config["hyperparameters"] | {"max_steps": stop + 5}
    resumed = trial.run(master, hyperparameters=shorter, **how)
    assert resumed.process.returncode == 0, resumed.log
    assert not resumed.allocation.acknowledged
    steps = [m["step"] for m in master.metrics if m["group"] == "training"]
    assert steps == [*range(1, stop + 6)]
    assert master.kept(1)[-1]["metadata"]["steps_completed"] == stop + 5
    assert master.trials[1].status == "completed"
    assert not master.bodies("/api/v1/trials/{trial}/progress")
    assert master.refused == []
