"""What to know of a cluster before training on it, each in one line: `make test-cluster`.

With DET_MASTER, and DET_USER and DET_PASS or a `det` login, the cluster is that one; otherwise it
is the stand-in. DET_SLOTS is the number of slots per trial (default 1), DET_POOL the resource pool.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from determined.common.api import bindings
from determined.experimental import client
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm.checkpoint.manifest import read_manifest
from tests.support import REPOSITORY
from tests.support.cluster import trial
from tests.support.cluster.master import PROFILER_GROUPS, Experiment, Master
from tests.support.runs import EXACT_METRICS, wait_until

MASTER = os.environ.get("DET_MASTER")
UNAVAILABLE = None if MASTER else trial.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

SOMETIMES = {
    "mfu",
    "allocation_retries",
    "save_stall_seconds",
    "busiest_expert_percent",
    "idle_experts",
}
"""Reported only if the device's peak is known, if a GPU was full, after a save since the last
report, of mixtures."""

Tell = Callable[[str], None]


@dataclass
class Cluster:
    sdk: client.Determined
    steps: int  # of a run that is long enough to be paused or killed in between
    location: dict[
        str, Any
    ]  # of the checkpoint storage, in an experiment's config; empty = the cluster's default
    storage: Path | None = None  # where this machine sees the checkpoint storage
    slots: int = int(os.environ.get("DET_SLOTS", "1"))

    def create(self, config: dict[str, Any], latest: int = 100) -> client.Experiment:
        """Create an experiment that keeps each trial's best and `latest` last checkpoints."""
        config |= {"name": "fsdp: make test-cluster", "reproducibility": {"experiment_seed": 14}}
        config["checkpoint_storage"] = self.location | {"save_trial_latest": latest}
        config["searcher"].pop("max_length", None)  # which `det experiment continue` refuses
        if pool := os.environ.get("DET_POOL"):
            config["resources"]["resource_pool"] = pool
        return self.sdk.create_experiment(config, model_dir=REPOSITORY)

    def run(
        self, keep: int | None = None, slots: int | None = None, **hyperparameters: Any
    ) -> dict[str, Any]:
        """Return a short experiment of the shape of config.yaml."""
        rates = {"report_rate": self.steps // 20, "validation_rate": self.steps // 5}
        shape: dict[str, Any] = {"max_steps": self.steps, "n_layers": 1, "dropout": 0.1, **rates}
        shape["compile"] = False
        shape["checkpoint_rate"] = shape["validation_rate"]
        config = trial.experiment(slots=slots or self.slots, **shape | hyperparameters)
        config["hyperparameters"]["keep_checkpoints"] = keep
        return config


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if MASTER:
        yield Cluster(
            client.Determined(MASTER, os.environ.get("DET_USER"), os.environ.get("DET_PASS")),
            2000,
            {},
        )
        return
    folder = tmp_path_factory.mktemp("live")
    (folder / "storage").mkdir()
    master = Master(folder / "storage")

    def start(experiment: Experiment) -> None:
        Thread(target=trial.run_experiment, args=(master, experiment, folder), daemon=True).start()

    master.on_experiment = start
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        sdk = client.Determined(master.url, "tester", trial.PASSWORD)
    yield Cluster(
        sdk,
        160,
        {"type": "directory", "container_path": str(master.storage)},
        master.storage,
        slots=2,
    )
    master.close()
    deleted = [c["uuid"] for c in master.checkpoints if c["state"] == "STATE_DELETED"]
    assert not [uuid for uuid in deleted if (master.storage / uuid).exists()]
    assert master.refused == []


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return tell


@pytest.fixture(scope="module")
def done(cluster: Cluster) -> client.Trial:
    """A trial that completed without interruption, with both profilers."""
    return completed(cluster.create(cluster.run(core_api_profiler=True, torch_profiler=True)))


def completed(experiment: client.Experiment) -> client.Trial:
    """Return the trial of an experiment once it has completed."""
    run = experiment.await_first_trial()
    assert experiment.wait(0.5) == client.ExperimentState.COMPLETED, "".join(run.iter_logs(tail=50))
    return run


def shown_trial(run: client.Trial) -> bindings.trialv1Trial:
    return bindings.get_GetTrial(run._session, trialId=run.id).trial


def curve(run: client.Trial, group: str = "training") -> dict[int, dict[str, float]]:
    return {report.steps_completed: report.metrics for report in run.iter_metrics(group)}


def exact(run: client.Trial) -> list[dict[int, dict[str, float]]]:
    """Return the metrics `EXACT` of both groups, by step."""
    curves = curve(run), curve(run, "validation")
    return [
        {step: {key: m[key] for key in EXACT_METRICS if key in m} for step, m in found.items()}
        for found in curves
    ]


def saved(run: client.Trial) -> dict[int, client.Checkpoint]:
    """Return the checkpoints of a trial that are not deleted, by step."""
    kept = [c for c in run.list_checkpoints() if c.state == client.CheckpointState.COMPLETED]
    return {(checkpoint.metadata or {})["steps_completed"]: checkpoint for checkpoint in kept}


def documented(group: str) -> set[str]:
    """Return the metrics that docs/metrics.md lists for a group, "training" or "validation"."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    section = page.partition(f"## {group.title()}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))


def test_live_run_shows_the_documented_metrics(
    cluster: Cluster, done: client.Trial, tell: Tell
) -> None:
    training, validation, checkpoints = curve(done), curve(done, "validation"), saved(done)
    rate, last = cluster.steps // 20, cluster.steps
    assert [*training] == [*range(rate, last + 1, rate)]
    assert [*validation] == [*sorted(checkpoints)] == [*range(4 * rate, last + 1, 4 * rate)]
    names = documented("training")
    for step, metrics in training.items():
        assert names - SOMETIMES <= metrics.keys() <= names, step
    for step, metrics in validation.items():
        of_text = {"bits_per_byte", "eval_TASK_acc", "eval_TASK_bpb"}
        assert metrics.keys() == documented("validation") - of_text
        assert metrics["batches"] == step
        assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert all(
        math.isfinite(value)
        for m in (*training.values(), *validation.values())
        for value in m.values()
    )
    shards = {
        f"{part}-{rank:05}-00000.safetensors"
        for rank in range(cluster.slots)
        for part in ("model", "optim")
    }
    for checkpoint in checkpoints.values():
        files = {
            path: int(size)
            for path, size in (checkpoint.resources or {}).items()
            if not path.endswith("/")
        }
        assert files.keys() == shards | {"manifest.json", "metadata.json"}
        assert all(files.values())
    metadata = checkpoints[last].metadata or {}
    assert metadata.keys() >= {
        "validation_loss",
        "tokens",
        "world_size",
        "sharding",
        "amp_dtype",
        "parameters",
    }
    assert shown_trial(done).runnerState == "completed"
    before, after = training[rate]["loss"], training[last]["loss"]
    tell(
        f"run: {last} steps, training loss {before:.2f} to {after:.2f}, "
        f"{len(checkpoints)} checkpoints"
    )


def test_live_profilers_have_data(cluster: Cluster, done: client.Trial, tell: Tell) -> None:
    answers = bindings.get_GetTrialProfilerAvailableSeries(done._session, trialId=done.id)
    series = {label.name for answer in answers for label in answer.labels}
    assert {
        name.partition("_")[0].replace("net", "network") for name in series
    } >= PROFILER_GROUPS - {"gpu"}
    traces = "the checkpoint storage is not visible from here"
    if cluster.storage:
        (board,) = cluster.storage.glob(
            f"*/tensorboard/experiment/{done.experiment_id}/trial/{done.id}"
        )
        found = [path.name for path in board.glob("*.pt.trace.json.gz")]
        assert sorted(name.partition(".")[0] for name in found) == [
            f"rank{rank}" for rank in range(cluster.slots)
        ]
        drawn = {
            event.step: event.value
            for event in EventAccumulator(str(board)).Reload().Scalars("Determined/loss")
        }
        assert drawn == pytest.approx(
            {step: metrics["loss"] for step, metrics in curve(done).items()}
        )
        traces = ", ".join(found)
    tell(f"profilers: Determined's {', '.join(sorted(series))}; PyTorch's traces: {traces}")


@pytest.mark.slow
def test_live_paused_and_killed_runs_resume_exactly(
    cluster: Cluster, done: client.Trial, tell: Tell, tmp_path: Path
) -> None:
    experiment = cluster.create(cluster.run(keep=2))
    paused = experiment.await_first_trial()
    wait_until(lambda: curve(paused))
    experiment.pause()
    wait_until(lambda: shown_trial(paused).runnerState == "stopped")
    stop = max(saved(paused))
    experiment.activate()
    completed(experiment)

    experiment = cluster.create(cluster.run(keep=2))
    killed = experiment.await_first_trial()
    wait_until(lambda: saved(killed))
    experiment.kill()
    assert experiment.wait(0.5) == client.ExperimentState.CANCELED
    left = max(saved(killed))
    request = bindings.v1ContinueExperimentRequest(id=experiment.id, overrideConfig="{}\n")
    bindings.post_ContinueExperiment(experiment._session, body=request)
    completed(experiment)

    assert max(stop, left) < cluster.steps
    assert exact(done) == exact(paused)
    # A kill loses reports up to its checkpoint that the master has not received yet.
    for expected, reported in zip(exact(done), exact(killed), strict=True):
        assert reported.items() <= expected.items()
        assert max(expected.keys() - reported.keys(), default=0) <= left
    checksums = []
    for run in (done, paused, killed):
        manifest = read_manifest(
            Path(saved(run)[cluster.steps].download(str(tmp_path / str(run.id))))
        )
        checksums.append(
            {
                name: record
                for name, record in manifest.files.items()
                if name.endswith(".safetensors")
            }
        )
    assert checksums[0] == checksums[1] == checksums[2]
    # The last two and the best, of those from which the trial resumed or which it saved after that.
    assert len([step for step in saved(paused) if step >= stop]) <= 3
    stops = f"paused after step {stop} and killed with the checkpoint of step {left}"
    tell(
        f"twins: {stops}, of {cluster.steps}; reports and the last checkpoint's "
        f"{len(checksums[0])} files equal bit for bit"
    )


def search(
    cluster: Cluster, searcher: dict[str, Any], **hyperparameters: Any
) -> dict[int, client.Trial]:
    """Run a search of a small model, and return its trials by ID."""
    data = {"dataset": "synthetic", "tokenizer": None, "compile": False, "num_tokens": 0}
    config = trial.experiment("recipes/search.yaml", **data | hyperparameters)
    config["searcher"] = {"metric": "loss", "smaller_is_better": True} | searcher
    experiment = cluster.create(config)
    assert experiment.wait(0.5) == client.ExperimentState.COMPLETED
    return {run.id: run for run in experiment.list_trials()}


ASHA = {
    "name": "adaptive_asha",
    "mode": "aggressive",
    "time_metric": "batches",
    "max_time": 200,
    "max_rungs": 2,  # steps 50 and 200
    "divisor": 4,
    "max_trials": 6 if MASTER else 4,  # on the stand-in, of each kind: kept, stopped and refused
    "max_concurrent_trials": 1,  # one after the other: their losses tell which ones survive
}
LENGTHS = {"max_steps": 200, "report_rate": 10, "validation_rate": 50, "checkpoint_rate": 50}


REFUSED = 1.5
"""A dropout that is refused."""
POINTS = {"dropout": {"type": "categorical", "vals": [0.0, REFUSED]}, "n_layers": 2}


@pytest.mark.slow
def test_live_search_stops_its_losers_and_survives_refused_points(
    cluster: Cluster, tell: Tell
) -> None:
    lr = {"type": "log", "base": 10, "minval": -4, "maxval": -1}
    runs = search(cluster, ASHA, lr=lr, weight_decay=0.1, **POINTS, **LENGTHS)
    trained = check_points(runs)
    kept = {number: step for number, step in trained.items() if step}
    expected: dict[int, int] = {}
    best = math.inf
    for number in sorted(kept):
        loss = curve(runs[number], "validation")[50]["loss"]
        expected[number] = 50  # of fewer than 8 trials, the best one survives the rung
        if loss <= best:
            expected[number] = 200
        best = min(best, loss)
    assert kept == expected
    assert kept == {number: max(saved(runs[number])) for number in kept}
    total = f"{sum(kept.values())} steps in all, {len(kept) * 200} without stops"
    tell(f"search: trials trained {[*trained.values()]} steps (0: refused); {total}")


def check_points(runs: dict[int, client.Trial]) -> dict[int, int]:
    """Return the steps that each trial trained; refused points trained none and are in ERROR."""
    assert len(runs) == ASHA["max_trials"]
    trained = {}
    for number, run in runs.items():
        shown = shown_trial(run)
        assert shown.restarts == 0
        trained[number] = max(curve(run), default=0)
        if shown.hparams["dropout"] == REFUSED:
            assert shown.state == bindings.trialv1State.ERROR, number
            assert any("dropout: 1.5" in line for line in run.iter_logs(sources=["task"])), number
            assert trained[number] == 0
        else:
            assert shown.state == bindings.trialv1State.COMPLETED, number
            assert trained[number] > 0
    assert 0 in trained.values(), "no point was refused: change experiment_seed"
    return trained


@pytest.mark.slow
def test_live_fork_starts_with_the_weights(
    cluster: Cluster, done: client.Trial, tell: Tell
) -> None:
    source, rate = saved(done)[cluster.steps].uuid, cluster.steps // 20
    short = {"slots": 1, "max_steps": 4 * rate, "validation_rate": rate, "checkpoint_rate": rate}
    forked = cluster.run(**short)
    forked["searcher"]["source_checkpoint_uuid"] = source
    fork = completed(cluster.create(forked, latest=1))
    assert exact(fork) == exact(completed(cluster.create(cluster.run(**short, init_from=source))))
    before, after = (curve(run)[rate]["loss"] for run in (done, fork))
    assert after < before
    tell(
        f"fork: training loss {after:.2f} at step {rate}, {before:.2f} without the weights; "
        "equal to init_from"
    )
    losses = {step: metrics["loss"] for step, metrics in curve(fork, "validation").items()}
    kept = {min(losses, key=losses.__getitem__), max(losses)}
    wait_until(lambda: saved(fork).keys() == kept)
    tell(
        f"collection: of {len(losses)} checkpoints, those of steps {sorted(kept)} are left: "
        "the best and the latest"
    )


@pytest.mark.slow
def test_live_bad_hyperparameter_exits_with_2(cluster: Cluster, tell: Tell) -> None:
    experiment = cluster.create(cluster.run(slots=1, ffn="relux"))
    refused = experiment.await_first_trial()
    assert experiment.wait(0.5) == client.ExperimentState.ERROR
    log = [line.rstrip() for line in refused.iter_logs(sources=["task"])]
    assert any(re.search(r"\bexitcode *: 2 ", line) for line in log)
    (*_, last) = [line for line in log[-5:] if 'ffn: "relux"' in line]
    assert shown_trial(refused).restarts == 0
    tell(f"refusal: exit code 2, not retried; the log ends with: {last}")
