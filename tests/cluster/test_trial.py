"""An experiment on Determined, from `det experiment create` to the last checkpoint.

Only the master is a stand-in; the CLI, the container's entrypoint, the launcher and Core API are Determined's.
"""

from __future__ import annotations

import base64
import io
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from determined.common import constants
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm.checkpoint.manifest import read_manifest
from tests.cluster import shown, trial
from tests.cluster.master import PROFILER_GROUPS, Master
from tests.support import ROOT, scripted

UNAVAILABLE = trial.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

# A step takes longer than a report, so that the master's reaction to a report arrives within the next few steps.
HYPERPARAMETERS: dict[str, Any] = {
    "max_steps": 24,
    "batch_size": 16,
    "max_seq_len": 128,
    "report_rate": 1,
    "validation_rate": 6,
    "checkpoint_rate": 6,
    "dropout": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A master without an experiment."""
    (tmp_path / "storage").mkdir()
    master = Master(tmp_path / "storage")
    yield master
    master.close()


@pytest.fixture(scope="module")
def done(folder: Path) -> Iterator[tuple[Master, trial.Trial]]:
    """An experiment whose trial 1 completed without interruption on two slots, with both profilers."""
    storage = folder / "storage"
    storage.mkdir()
    master = Master(storage)
    config = trial.experiment(slots=2, core_api_profiler=True, torch_profiler=True, **HYPERPARAMETERS)
    config["environment"]["environment_variables"].append("STORE_PASSWORD=password-in-the-experiment")
    trial.submit(master, config, folder / "cli")
    yield master, trial.run(master, 1, folder=folder, STORE_PASSWORD="password-in-the-experiment")
    master.close()


def losses(master: Master, number: int, group: str = "training") -> dict[int, float]:
    return {m["step"]: m["metrics"]["loss"] for m in master.metrics if (m["trial"], m["group"]) == (number, group)}


# ---- without interruptions --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_uploaded_folder_is_small_and_contains_the_package(done: tuple[Master, trial.Trial]) -> None:
    packed = base64.b64decode(done[0].context)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = set(archive.getnames())
    assert {"fsdp.py", "model.py", "lm/checkpoint/checkpointer.py", "lm/data/loader.py", "startup-hook.sh"} <= names
    assert not {name.partition("/")[0] for name in names} & {"tests", "docs", "runs", ".venv", ".git", ".ci"}
    assert len(packed) < 1e6 < constants.MAX_CONTEXT_SIZE


def test_the_master_accepts_every_call_of_a_trial_and_the_trial_completes(done: tuple[Master, trial.Trial]) -> None:
    master, finished = done
    assert finished.process.returncode == 0, finished.log
    assert master.refused == []
    calls = master.count()
    assert calls["POST /api/v1/runs/start"] == 2  # one per rank
    assert calls["POST /api/v1/allocations/{allocation}/signals/ack_preemption"] == 0  # which would restart the trial
    assert "[rank=0] training    step 24/24" in finished.log


def test_the_web_ui_shows_the_documented_metrics_and_checkpoints(done: tuple[Master, trial.Trial]) -> None:
    master, _ = done
    training, validation = (
        {m["step"]: m["metrics"] for m in master.metrics if (m["trial"], m["group"]) == (1, group)}
        for group in ("training", "validation")
    )
    checkpoints = {
        c["metadata"]["steps_completed"]: {path: int(size) for path, size in c["resources"].items()}
        for c in master.checkpoints
        if c["taskId"] == "trial.1"
    }
    shown.check(training, validation, checkpoints, trial.SHORT | HYPERPARAMETERS, ranks=2)
    assert master.bodies("/api/v1/trials/{trial}/progress")[-1]["progress"] == 1.0
    # The background reporter skips outdated statuses.
    statuses = [body["state"] for body in master.bodies("/api/v1/trials/{trial}/runner/metadata")]
    assert {"training"} <= set(statuses) <= {"training", "validating", "saving", "completed"}
    assert statuses[-1] == "completed"


def test_the_profiler_page_has_data(done: tuple[Master, trial.Trial]) -> None:
    groups = {m["group"] for m in done[0].metrics}
    assert groups == {"training", "validation"} | PROFILER_GROUPS - {"gpu"}
    (cpu, *_) = [m["metrics"]["agent-1"] for m in done[0].metrics if m["group"] == "cpu"]
    assert 0 <= cpu["cpu_util_simple"] <= 100


def test_the_storage_contains_tensorboard_curves_and_a_trace_of_every_rank(done: tuple[Master, trial.Trial]) -> None:
    board = done[0].storage / "cluster-1" / "tensorboard" / "experiment" / "1" / "trial" / "1"
    traces = list(board.glob("*.pt.trace.json.gz"))
    assert sorted(path.name.partition(".")[0] for path in traces) == ["rank0", "rank1"]
    assert all(0 < path.stat().st_size < 50e6 for path in traces)
    events = EventAccumulator(str(board)).Reload()
    for tag, group in (("Determined/loss", "training"), ("Determined/val_loss", "validation")):
        drawn = {event.step: event.value for event in events.Scalars(tag)}
        assert drawn == pytest.approx(losses(done[0], 1, group))


def test_checkpoints_are_deleted_through_the_master(done: tuple[Master, trial.Trial]) -> None:
    master, _ = done
    kept = {c["metadata"]["steps_completed"]: c["uuid"] for c in master.checkpoints if c["state"] == "STATE_COMPLETED"}
    best = min(saved(master, 1), key=losses(master, 1, "validation").__getitem__)
    assert kept.keys() == {18, 24, best}
    assert {path.parent.name for path in master.storage.glob("*/manifest.json")} == set(kept.values())
    assert master.count()["PATCH /api/v1/checkpoints"] == len(saved(master, 1)) - len(kept)
    (last,) = [c["metadata"] for c in master.checkpoints if c["uuid"] == kept[24]]
    assert last["validation_loss"] == losses(master, 1, "validation")[24]
    assert last.keys() >= {"tokens", "world_size", "sharding", "amp_dtype", "parameters"}


def test_secrets_are_not_in_files_or_logs_of_a_trial(done: tuple[Master, trial.Trial]) -> None:
    master, finished = done
    secrets = [finished.allocation.token, trial.PASSWORD, "password-in-the-experiment"]
    stored = [path for path in master.storage.rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in stored)
    for path in stored:
        assert not [secret for secret in secrets if secret.encode() in path.read_bytes()], path
    ours = [line for line in finished.log.splitlines() if line.startswith("[rank=")]
    assert ours
    assert not [secret for secret in secrets if secret in "\n".join(ours)]
    assert not [secret for secret in secrets[:2] if secret in finished.log]  # Determined prints the environment


class S3Master(Master):
    """A master whose checkpoint storage is an S3 bucket."""

    bucket: Any

    def files(self, checkpoint: str) -> dict[str, int]:
        found = self.bucket.objects.filter(Prefix=f"{checkpoint}/")
        return {item.key.partition("/")[2]: item.size for item in found if not item.key.endswith("/")}


@pytest.mark.slow
def test_storage_credentials_are_not_in_checkpoints_tensorboard_files_or_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    endpoint, key, secret = f"http://{host}:{port}", "storage-access-key", "storage-secret-key"
    s3: Any = boto3.resource("s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret)
    master = S3Master(tmp_path)
    master.bucket = s3.Bucket("checkpoints")
    master.bucket.create()
    config = trial.experiment(max_steps=6)
    storage = {"type": "s3", "bucket": "checkpoints", "access_key": key, "secret_key": secret}
    config["checkpoint_storage"] = storage | {"endpoint_url": endpoint}
    try:
        trial.submit(master, config, tmp_path / "cli")
        finished = trial.run(master, folder=tmp_path)
        assert finished.process.returncode == 0, finished.log
        stored = {item.key: item.get()["Body"].read() for item in master.bucket.objects.all()}
    finally:
        master.close()
        server.stop()
    assert master.refused == []
    assert any(name.endswith("/manifest.json") for name in stored)
    assert any("tensorboard" in name and "tfevents" in name for name in stored)
    for text in (key, secret, finished.allocation.token):
        assert not [name for name, content in stored.items() if text.encode() in content]
        assert text not in finished.log


# ---- interruptions ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preempted_and_killed_trial_has_the_losses_and_weights_of_an_uninterrupted_one(
    done: tuple[Master, trial.Trial], folder: Path
) -> None:
    master, _ = done
    uninterrupted = losses(master, 1), losses(master, 1, "validation")
    master.experiment["hyperparameters"] |= {"core_api_profiler": False, "torch_profiler": False}

    # Preempted between two checkpoints: saves, acknowledges, exits with 0.
    master.on_metrics = lambda group, step: preempt(master) if (group, step) == ("training", 8) else None
    preempted = trial.run(master, 2, folder=folder)
    assert preempted.process.returncode == 0, preempted.log
    assert preempted.allocation.acknowledged
    (stop,) = (step for step in saved(master, 2) if step > 6)
    assert 8 <= stop < 24
    assert re.search(rf"stopped \w+ step {stop}\b", preempted.log)
    (acknowledged,) = [call for call in master.calls if call.route.endswith("/ack_preemption")]
    assert acknowledged.saved == len(list(master.storage.glob("*/manifest.json")))

    # Killed two steps later: the master restarts it from the same checkpoint.
    with trial.Trial(master, 2, folder=folder) as killed:
        assert killed.allocation.latest == saved(master, 2)[stop]
        master.on_metrics = lambda group, step: killed.kill() if (group, step) == ("training", stop + 2) else None
        assert killed.wait() != 0
    master.on_metrics = lambda _group, _step: None
    assert f"from checkpoint {killed.allocation.latest}, step {stop}" in killed.log
    last = trial.run(master, 2, folder=folder)
    assert last.process.returncode == 0, last.log
    assert not last.allocation.acknowledged
    again = [m for m in master.metrics if m["trial"] == 2 and m["group"] == "training"]
    assert {(m["step"], m["metrics"]["loss"]) for m in again} == set(uninterrupted[0].items())
    assert len({m["run"] for m in again}) == 3
    assert uninterrupted[1].items() <= losses(master, 2, "validation").items()
    weights = [
        {name: record for name, record in manifest.files.items() if name.endswith(".safetensors")}
        for manifest in (read_manifest(master.storage / saved(master, number)[24]) for number in (1, 2))
    ]
    assert weights[0] == weights[1]
    kept = [c["uuid"] for c in master.checkpoints if c["state"] == "STATE_COMPLETED"]
    validations = losses(master, 2, "validation")
    best = min((step for step in saved(master, 2) if step >= stop and step in validations), key=validations.__getitem__)
    assert saved(master, 2)[best] in kept
    assert (saved(master, 2)[stop] in kept) == (stop == best)  # retention counts what the run resumed from
    assert master.refused == []


def preempt(master: Master) -> None:
    assert master.allocation is not None
    master.allocation.preempt.set()


def saved(master: Master, number: int) -> dict[int, str]:
    """Return the UUIDs of a trial's checkpoints, by step."""
    mine = [c for c in master.checkpoints if c["taskId"] == f"trial.{number}"]
    return {c["metadata"]["steps_completed"]: c["uuid"] for c in mine}


OUTAGE = 20.0
"""shortest time that the master is unreachable (seconds)"""


@pytest.mark.slow
def test_a_fork_starts_at_step_0_with_the_weights_and_trains_through_an_outage_of_the_master(
    done: tuple[Master, trial.Trial], folder: Path
) -> None:
    master, _ = done
    master.experiment["resources"]["slots_per_trial"] = 1
    master.experiment["hyperparameters"] |= {"total_batch_size": 32, "checkpoint_rate": 100}
    source = saved(master, 1)[24]
    away = threading.Event()

    def leave(group: str, step: int) -> None:
        master.delay = 0.3
        if (group, step) == ("training", 4):
            master.is_away = True
            away.set()

    master.on_metrics = leave
    with trial.Trial(master, 3, latest=source, folder=folder) as fork:
        assert away.wait(240), fork.log
        began = time.monotonic()
        while "training    step 24/24" not in fork.log or time.monotonic() < began + OUTAGE:
            assert time.monotonic() < began + 240, fork.log
            assert fork.process.poll() is None, fork.log
            time.sleep(0.1)
        assert len(losses(master, 3)) < 6
        master.on_metrics = lambda _group, _step: None
        master.delay = 0
        master.is_away = False
        assert fork.wait() == 0, fork.log
    assert f"weights of checkpoint {source}" in fork.log
    reported = losses(master, 3)
    assert sorted(reported) == list(range(1, 25))
    assert master.bodies("/api/v1/trials/{trial}/progress")[-1]["progress"] == 1.0
    assert reported[1] < losses(master, 1)[1] - 0.1  # trained weights
    assert list(saved(master, 3)) == [24]
    assert read_manifest(master.storage / saved(master, 3)[24]).trial_id == 3


@pytest.mark.slow
def test_init_from_loads_the_weights_of_a_checkpoint_by_its_uuid(
    done: tuple[Master, trial.Trial], folder: Path
) -> None:
    master, _ = done
    master.experiment["resources"]["slots_per_trial"] = 1
    source = saved(master, 1)[24]
    point = master.experiment["hyperparameters"] | {"init_from": source, "max_steps": 2, "total_batch_size": 32}
    fresh = trial.run(master, 5, folder=folder, hyperparameters=point)
    assert fresh.process.returncode == 0, fresh.log
    assert f"weights of checkpoint {source}" in fresh.log
    assert list(saved(master, 5)) == [2]


@pytest.mark.slow
def test_a_refused_report_ends_the_run_with_one_line(master: Master, tmp_path: Path) -> None:
    trial.submit(master, trial.experiment(async_checkpoint=False, **HYPERPARAMETERS), tmp_path / "cli")
    refusal = {"/api/v1/trials/{trial}/metrics": 500}
    master.on_metrics = lambda _group, step: master.refuse.update(refusal) if step == 7 else None
    refused = trial.run(master, folder=tmp_path)
    assert refused.process.returncode == 1
    ours = [line for line in refused.log.splitlines() if line.startswith("[rank=0]")]
    assert "refused on purpose" in ours[-1]
    assert not [line for line in ours if "Traceback" in line]
    assert max(losses(master, 1)) == 7
    assert 6 in saved(master, 1)  # to resume from


# ---- search -----------------------------------------------------------------------------------------------

POINT = {"lr": 1.0e-2, "n_layers": 2, "weight_decay": 0.1}


@pytest.fixture
def searching(master: Master, tmp_path: Path) -> Master:
    """A master with the shipped search, on a small model."""
    config = trial.experiment("recipes/search.yaml", **HYPERPARAMETERS)
    ranges = yaml.safe_load((ROOT / "recipes" / "search.yaml").read_text())["hyperparameters"]
    config["hyperparameters"] |= {key: ranges[key] for key in POINT}
    config["hyperparameters"] |= {"vocab_size": 257, "amp_dtype": "float16", "n_heads": 4}
    (tmp_path / "a.txt").write_text("a" * 20_000)  # gradients of float16 overflow at the first scale of the loss
    config["hyperparameters"] |= {"train_data": str(tmp_path / "a.txt")}
    trial.submit(master, config, tmp_path / "cli")
    return master


def point(master: Master, **changes: Any) -> dict[str, Any]:
    """Return hyperparameters that the searcher chooses for a trial."""
    return master.experiment["hyperparameters"] | POINT | changes


def stop_by_search(master: Master) -> None:
    assert master.allocation is not None
    master.allocation.state = "STATE_STOPPING_COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [preempt, stop_by_search])
def test_a_trial_of_a_search_saves_and_ends_when_stopped(
    searching: Master, tmp_path: Path, stop: Callable[[Master], None]
) -> None:
    searching.on_metrics = lambda group, step: stop(searching) if (group, step) == ("validation", 12) else None
    stopped = trial.run(searching, folder=tmp_path, hyperparameters=point(searching))
    assert stopped.process.returncode == 0, stopped.log
    assert stopped.allocation.acknowledged == (stop is preempt)  # otherwise exit code 0 completes the trial
    assert searching.refused == []  # the master refuses validation reports without finite loss and batches
    validations = [m for m in searching.metrics if m["group"] == "validation"]
    assert all(m["metrics"]["batches"] == m["step"] for m in validations)
    last = max(saved(searching, 1))
    assert {6, 12} == {m["step"] for m in validations}
    assert 12 <= last < 24
    skipped = sum(m["metrics"]["skipped_steps"] for m in searching.metrics if m["group"] == "training")
    assert skipped > 0


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_trial_whose_state_is_refused_trains_to_its_end(searching: Master, tmp_path: Path, status: int) -> None:
    searching.refuse["/api/v1/trials/{trial}"] = status
    done = trial.run(searching, folder=tmp_path, hyperparameters=point(searching))
    assert done.process.returncode == 0, done.log
    assert searching.count()["GET /api/v1/trials/{trial}"] > 1
    assert max(saved(searching, 1)) == 24


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "why"), [(-1.0, "lr: -1.0"), (1.0e5, "lower lr")], ids=["invalid", "diverged"])
def test_a_search_drops_a_trial_with_invalid_hyperparameters(
    searching: Master, tmp_path: Path, lr: float, why: str
) -> None:
    dropped = trial.run(searching, folder=tmp_path, hyperparameters=point(searching, lr=lr))
    assert dropped.process.returncode == 0, dropped.log
    assert searching.allocation is not None
    assert searching.allocation.invalid
    assert why in dropped.log
    assert searching.refused == []


OUT_OF_MEMORY = """
import torch
from lm.data.loader import Loader

training = Loader.training

def allocate_too_much(self, start):
    for step, batch in enumerate(training(self, start), start):
        if rank == {victim} and step == 3:
            torch.empty(1 << 60)
        yield batch

Loader.training = allocate_too_much
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_search_drops_a_trial_in_which_one_rank_runs_out_of_memory(
    searching: Master, tmp_path: Path, victim: int
) -> None:
    script = scripted(tmp_path, OUT_OF_MEMORY.format(victim=victim))
    searching.experiment["resources"]["slots_per_trial"] = 2
    searching.experiment["entrypoint"] = f"python3 -m determined.launch.torch_distributed -- python3 {script}"
    dropped = trial.run(searching, folder=tmp_path, hyperparameters=point(searching), PYTHONPATH=str(ROOT))
    assert dropped.process.returncode == 0, dropped.log
    assert searching.allocation is not None
    assert searching.allocation.invalid
    assert re.search(rf"rank {1 - victim}\b.*step 3\b.*rank {victim}\b.*out of memory \(", dropped.log)
    assert all("/early_exit: reported twice" in refusal for refusal in searching.refused)


@pytest.mark.slow
def test_an_error_that_the_search_did_not_cause_ends_the_trial_and_is_not_retried(
    searching: Master, tmp_path: Path
) -> None:
    mistaken = trial.run(searching, folder=tmp_path, hyperparameters=point(searching, ffn="relux", lr=-1.0))
    assert mistaken.process.returncode == 1
    assert searching.allocation is not None
    assert not searching.allocation.invalid
    assert 'ffn: "relux"' in mistaken.log
    table = mistaken.log.rpartition("Root Cause")[2]  # the end of torchrun's report
    assert 'ffn: "relux"' in table
    (policy,) = [p for p in searching.experiment["log_policies"] if p["name"] == "bad configuration"]
    assert re.search(f"^{policy['pattern']}$", mistaken.log, re.MULTILINE)
