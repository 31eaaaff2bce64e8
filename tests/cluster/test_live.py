"""A trial on a real cluster: `make test-cluster` with DET_MASTER, and DET_USER and DET_PASS or a `det` login.

DET_SLOTS is the number of slots (default 1), DET_POOL the resource pool.
"""

from __future__ import annotations

import os

import pytest

from tests.cluster import shown, trial
from tests.support import ROOT

MASTER = os.environ.get("DET_MASTER")
pytestmark = [
    pytest.mark.skipif(MASTER is None, reason="DET_MASTER is not set"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:GitWildMatchPattern:DeprecationWarning"),  # of the SDK
]


def test_a_cluster_shows_the_documented_metrics_and_checkpoints() -> None:
    from determined.experimental import client

    slots = int(os.environ.get("DET_SLOTS", "1"))
    config = trial.experiment(slots=slots, keep_checkpoints=None, compile=False)
    hyperparameters = config["hyperparameters"] | {"keep_checkpoints": None}
    config |= {"hyperparameters": hyperparameters, "name": "fsdp: make test-cluster"}
    config["checkpoint_storage"] = {"save_trial_latest": 100}  # keeps all until they are compared
    if pool := os.environ.get("DET_POOL"):
        config["resources"]["resource_pool"] = pool
    cluster = client.Determined(MASTER, os.environ.get("DET_USER"), os.environ.get("DET_PASS"))
    experiment = cluster.create_experiment(config, model_dir=ROOT)
    run = experiment.await_first_trial()
    state = experiment.wait()
    assert state == client.ExperimentState.COMPLETED, "\n".join(run.logs(tail=50))
    training, validation = (
        {report.steps_completed: report.metrics for report in run.iter_metrics(group)}
        for group in ("training", "validation")
    )
    checkpoints = {}
    for checkpoint in run.list_checkpoints():
        files = {path: int(size) for path, size in (checkpoint.resources or {}).items() if not path.endswith("/")}
        checkpoints[(checkpoint.metadata or {})["steps_completed"]] = files
    shown.check(training, validation, checkpoints, hyperparameters, ranks=slots)
