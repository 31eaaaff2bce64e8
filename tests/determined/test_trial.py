"""A trial survives failures of its storage, master or search, or ends with their names.

Only the master is a stand-in; the CLI, the container's entrypoint, the launcher and Core API are
Determined's. What a real cluster can show as well is in test_live.py.
"""

from __future__ import annotations

import base64
import io
import itertools
import re
import tarfile
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from determined.common import constants

from tests.support import REPOSITORY
from tests.support.cluster import trial
from tests.support.cluster.master import USER_TOKEN, Master
from tests.support.runs import wait_until, write_script

UNAVAILABLE = trial.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

HYPERPARAMETERS: dict[str, Any] = {
    "max_steps": 24,
    "batch_size": 4,
    "report_rate": 1,
    "validation_rate": 6,
    "checkpoint_rate": 6,
}
ENDLESS: dict[str, Any] = {"max_steps": 100_000, "checkpoint_rate": 100}
"""until the master ends it: a trial hears of that later than its small steps are done"""


def losses(master: Master) -> dict[int, float]:
    return {m["step"]: m["metrics"]["loss"] for m in master.metrics if m["group"] == "training"}


@pytest.mark.slow
def test_detignore_keeps_the_uploaded_folder_small(master: Master, tmp_path: Path) -> None:
    trial.submit(master, trial.experiment(), tmp_path / "cli")
    packed = base64.b64decode(master.context)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = set(archive.getnames())
    assert {
        "fsdp.py",
        "model.py",
        "lm/checkpoint/checkpointer.py",
        "lm/data/loader.py",
        "startup-hook.sh",
    } <= names
    assert not {name.partition("/")[0] for name in names} & {
        "tests",
        "docs",
        "runs",
        ".venv",
        ".git",
        ".ci",
    }
    assert len(packed) < 1e6 < constants.MAX_CONTEXT_SIZE


class S3Master(Master):
    """A master whose checkpoint storage is an S3 bucket."""

    bucket: Any

    def files(self, checkpoint: str) -> dict[str, int]:
        found = self.bucket.objects.filter(Prefix=f"{checkpoint}/")
        return {
            item.key.partition("/")[2]: item.size for item in found if not item.key.endswith("/")
        }


@pytest.mark.slow
def test_trial_writes_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    endpoint, key, secret = f"http://{host}:{port}", "storage-access-key", "storage-secret-key"
    s3: Any = boto3.resource(
        "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret
    )
    master = S3Master(tmp_path)
    master.bucket = s3.Bucket("checkpoints")
    master.bucket.create()
    config = trial.experiment(max_steps=6)
    config["environment"]["environment_variables"].append(
        "STORE_PASSWORD=password-in-the-experiment"
    )
    storage = {"type": "s3", "bucket": "checkpoints", "access_key": key, "secret_key": secret}
    config["checkpoint_storage"] = storage | {"endpoint_url": endpoint}
    try:
        trial.submit(master, config, tmp_path / "cli")
        finished = trial.run(master, folder=tmp_path, STORE_PASSWORD="password-in-the-experiment")
        assert finished.process.returncode == 0, finished.log
        stored = {item.key: item.get()["Body"].read() for item in master.bucket.objects.all()}
    finally:
        master.close()
        server.stop()
    assert master.refused == []
    assert any(name.endswith("/manifest.json") for name in stored)
    assert any("tensorboard" in name and "tfevents" in name for name in stored)
    secrets = [key, secret, USER_TOKEN, finished.allocation.token, trial.PASSWORD]
    secrets.append("password-in-the-experiment")
    assert not [
        name for name, content in stored.items() for text in secrets if text.encode() in content
    ]
    assert not [
        text for text in secrets[:-1] if text in finished.log
    ]  # Determined prints the environment
    ours = "\n".join(line for line in finished.log.splitlines() if line.startswith("[rank="))
    assert ours
    assert secrets[-1] not in ours


def saved(master: Master) -> set[int]:
    return {checkpoint["metadata"]["steps_completed"] for checkpoint in master.checkpoints}


def run_script(master: Master, folder: Path, script: str) -> None:
    """Make `fsdp.py` after the lines `script` the program of the newest experiment.

    The trial's PYTHONPATH has to be the repository.
    """
    program = write_script(folder, script)
    master.experiment["entrypoint"] = (
        f"python3 -m determined.launch.torch_distributed -- python3 {program}"
    )


WAIT_FOR_OUTAGE = """
import time
from determined.core._metrics import _Shipper
from lm.data.loader import Loader

training = Loader.training

def wait_for_outage(self, start):
    for step, batch in enumerate(training(self, start), start):
        while step == 8 and not os.path.exists("{file}"):
            time.sleep(0.01)
        yield batch

Loader.training = wait_for_outage
_Shipper.METRICS_QUEUE_MAXSIZE = 3  # instead of 1,000 reports
"""
"""until `file` exists: a fast trial is complete before the master has its first reports"""


@pytest.mark.slow
def test_trial_trains_through_an_outage_of_the_master(master: Master, tmp_path: Path) -> None:
    """A container that prints while the master is away ends after 11 minutes, by the log shipper.

    Core API's queue of reports would block rank 0 once it is full.
    """
    trial.submit(master, trial.experiment(**HYPERPARAMETERS), tmp_path / "cli")
    file = tmp_path / "away"
    run_script(master, tmp_path, WAIT_FOR_OUTAGE.format(file=file))
    master.experiment["hyperparameters"]["checkpoint_rate"] = 100

    def leave(group: str, step: int) -> None:
        master.delay = 0.3
        if (group, step) == ("training", 4):
            master.is_away = True
            file.touch()

    master.on_metrics = leave
    with trial.Trial(master, folder=tmp_path, PYTHONPATH=str(REPOSITORY)) as running:
        wait_until(file.exists, lambda: running.log)
        printed = running.log
        wait_until(lambda: [*master.storage.glob("*/manifest.json")], lambda: running.log)
        assert running.process.poll() is None, running.log
        assert len(losses(master)) < 6
        assert running.log == printed
        master.on_metrics = lambda _group, _step: None
        master.delay = 0
        master.is_away = False
        assert running.wait() == 0, running.log
    assert sorted(losses(master)) == list(range(1, 25))
    assert [
        int(step)
        for step in re.findall(r"^\[rank=0\] training +step +(\d+)", running.log, re.MULTILINE)
    ] == [*range(1, 25)]
    assert master.bodies("/api/v1/trials/{trial}/progress")[-1]["progress"] == 1.0
    assert saved(master) == {24}
    assert master.refused == []


@pytest.mark.slow
def test_trial_ends_after_a_refused_report(master: Master, tmp_path: Path) -> None:
    trial.submit(
        master, trial.experiment(async_checkpoint=False, **HYPERPARAMETERS), tmp_path / "cli"
    )
    refusal = {"/api/v1/trials/{trial}/metrics": 500}
    master.on_metrics = lambda _group, step: master.refuse.update(refusal) if step == 7 else None
    master.refuse = {"/api/v1/task/logs": 404}
    refused = trial.run(master, folder=tmp_path)
    assert refused.process.returncode in trial.FAILURES
    ours = [line for line in refused.log.splitlines() if line.startswith("[rank=0]")]
    assert "refused on purpose" in ours[-1]
    assert [line for line in ours if "training    step  6/24" in line], (
        "lines that the master refuses are printed"
    )
    assert not [line for line in ours if "Traceback" in line]
    assert max(losses(master)) == 7
    assert 6 in saved(master)  # to resume from


FAIL_IN_BUILD = """
def fail(*_):
    raise fsdp.RunError("the checkpointer fails")

fsdp.Checkpointer = fail
"""


@pytest.mark.slow
def test_trial_log_has_the_lines_before_a_failure(master: Master, tmp_path: Path) -> None:
    trial.submit(master, trial.experiment(), tmp_path / "cli")
    run_script(master, tmp_path, FAIL_IN_BUILD)
    failed = trial.run(master, folder=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert failed.process.returncode in trial.FAILURES
    assert re.search(r"^\[rank=0\] .*\bparameters\b", failed.log, re.MULTILINE), failed.log
    assert "[rank=0] the checkpointer fails\n" in failed.log
    assert next(iter(master.trials.values())).status == "failed"


@pytest.mark.slow
def test_trial_that_starts_at_step_0_says_why(master: Master, tmp_path: Path) -> None:
    trial.submit(master, trial.experiment(max_steps=3), tmp_path / "cli")
    first = trial.run(master, folder=tmp_path)
    (checkpoint,) = master.checkpoints
    fork = trial.run(master, 2, folder=tmp_path, latest=checkpoint["uuid"])
    assert "trial 2 starts at step 0 with the weights alone" in fork.log
    assert "to resume trial 1 after step 3 instead: det experiment continue 1\n" in fork.log
    checkpoint["state"] = "STATE_PARTIALLY_DELETED"
    lost = trial.run(master, folder=tmp_path)
    assert "Determined passes no checkpoint" in lost.log
    for started in (first, fork):
        assert "Determined passes no checkpoint" not in started.log


@pytest.mark.slow
def test_trial_resumes_from_the_checkpoint_that_it_names(master: Master, tmp_path: Path) -> None:
    trial.submit(master, trial.experiment(max_steps=3), tmp_path / "cli")
    trial.run(master, folder=tmp_path)
    (checkpoint,) = master.checkpoints
    named = {"resume": checkpoint["uuid"], "max_steps": 6, "keep_checkpoints": 1}
    hyperparameters = master.experiment["hyperparameters"] | named
    resumed = trial.run(master, 2, folder=tmp_path, hyperparameters=hyperparameters)
    assert f"resumed from checkpoint {checkpoint['uuid']}, step 3\n" in resumed.log
    assert sorted(losses(master)) == [3, 6]
    assert checkpoint["state"] == "STATE_COMPLETED"  # it is the other trial's to delete


# ---- search

POINT = {"lr": 1.0e-2, "n_layers": 2, "weight_decay": 0.1}


@pytest.fixture
def searching(master: Master, tmp_path: Path) -> Master:
    """A master with the shipped search, on a small model."""
    config = trial.experiment("recipes/search.yaml", **HYPERPARAMETERS)
    config["searcher"] |= {"max_time": 24, "max_rungs": 2}  # the rungs are 6 and 24
    ranges = yaml.safe_load((REPOSITORY / "recipes" / "search.yaml").read_text())["hyperparameters"]
    config["hyperparameters"] |= {key: ranges[key] for key in POINT}
    config["hyperparameters"] |= {"vocab_size": 257, "amp_dtype": "float16", "n_heads": 4}
    (tmp_path / "a.txt").write_text(
        "a" * 20_000
    )  # gradients of float16 overflow at the first scale of the loss
    config["hyperparameters"] |= {"train_data": str(tmp_path / "a.txt")}
    trial.submit(master, config, tmp_path / "cli")
    return master


def point(master: Master, **changes: Any) -> dict[str, Any]:
    """Return hyperparameters that the searcher chooses for a trial."""
    return master.experiment["hyperparameters"] | POINT | changes


@pytest.mark.slow
def test_trial_whose_state_is_refused_trains_to_its_end(searching: Master, tmp_path: Path) -> None:
    route, statuses = (
        "/api/v1/trials/{trial}",
        [401, 403, 404, 500, 200],
    )  # 200 without a trial in the answer
    turn = itertools.cycle(statuses)
    searching.on_metrics = lambda _group, _step: searching.refuse.update({route: next(turn)})
    hyperparameters = point(searching, validation_rate=2, num_tokens=0)
    done = trial.run(searching, folder=tmp_path, hyperparameters=hyperparameters)
    assert done.process.returncode == 0, done.log
    assert {
        call.status for call in searching.calls if (call.method, call.route) == ("GET", route)
    } == {*statuses}
    assert max(saved(searching)) == 24


def last_step(master: Master) -> int:
    """Return the step of the last training report."""
    return max(m["step"] for m in master.metrics if m["group"] == "training")


def stop_at(master: Master, rung: int) -> None:
    """Let the search stop its trial at the validation of step `rung`."""
    searcher = master.experiments[-1].searcher
    assert searcher is not None
    searcher.stops = lambda _trial, steps, _loss: steps == rung  # type: ignore[method-assign]


@pytest.mark.slow
def test_trial_stopped_at_a_rung_trains_no_step_after_it(searching: Master, tmp_path: Path) -> None:
    searching.experiment["resources"]["slots_per_trial"] = 2
    searching.delay = 0.3
    stop_at(searching, 6)
    stopped = trial.run(searching, folder=tmp_path, hyperparameters=point(searching))
    assert stopped.process.returncode == 0, stopped.log
    assert last_step(searching) == 6
    assert saved(searching) == {6}
    assert not stopped.allocation.acknowledged
    (line,) = [line for line in stopped.log.splitlines() if "stopped after step 6/24" in line]
    loss = next(m["metrics"]["loss"] for m in searching.metrics if m["group"] == "validation")
    assert "search" in line
    assert f"loss {loss:.4f} at step 6" in line
    assert "rerun" not in line
    assert searching.refused == []


WAIT_BEFORE_STEP_11 = """
import threading
from lm.data.loader import Loader
from lm.determined import search

answered = threading.Event()
ask, training = search.SearchStop._ask, Loader.training

def ask_and_tell(self, cause):
    ask(self, cause)
    if self.reason is not None:
        answered.set()

def wait_for_answer(self, start):
    for step, batch in enumerate(training(self, start), start):
        if step == 10:
            answered.wait(240)
        yield batch

search.SearchStop._ask, Loader.training = ask_and_tell, wait_for_answer
"""
"""until the trial knows that its search has stopped it"""
DO_NOT_WAIT_AT_RUNGS = "search.DECISION_TIMEOUT = 0.0\n"


@pytest.mark.slow
def test_trial_stops_when_the_master_decides_late(searching: Master, tmp_path: Path) -> None:
    run_script(searching, tmp_path, WAIT_BEFORE_STEP_11 + DO_NOT_WAIT_AT_RUNGS)
    searching.delay = 0.3
    stop_at(searching, 6)
    # No samples, as a stop is also noticed while sampling.
    hyperparameters = point(searching, num_tokens=0)
    stopped = trial.run(
        searching, folder=tmp_path, hyperparameters=hyperparameters, PYTHONPATH=str(REPOSITORY)
    )
    assert stopped.process.returncode == 0, stopped.log
    assert 6 < max(saved(searching)) <= 11  # not the last report: a stop prevents that of its step
    assert "at step 6" in stopped.log.split("stopped after step ")[1]


@pytest.mark.slow
def test_trial_asks_again_until_the_search_has_answered(searching: Master, tmp_path: Path) -> None:
    stop_at(searching, 6)
    route = "/api/v1/trials/{trial}"

    def refuse_once(group: str, step: int) -> None:
        if group == "validation" and step == 6:
            searching.refuse[route] = 500
        if group == "training" and step == 9:
            del searching.refuse[route]

    searching.on_metrics = refuse_once
    run_script(searching, tmp_path, WAIT_BEFORE_STEP_11)
    hyperparameters = point(searching, report_rate=3, num_tokens=0)
    stopped = trial.run(
        searching, folder=tmp_path, hyperparameters=hyperparameters, PYTHONPATH=str(REPOSITORY)
    )
    assert stopped.process.returncode == 0, stopped.log
    assert 9 < max(saved(searching)) <= 11  # the next validation is that of step 12
    assert "at step 6" in stopped.log.split("stopped after step ")[1]


@pytest.mark.slow
def test_trial_that_is_canceled_is_not_stopped_by_its_search(
    searching: Master, tmp_path: Path
) -> None:
    def cancel(group: str, step: int) -> None:
        if group == "validation" and step == 6 and searching.allocation:
            searching.trials[searching.allocation.trial].state = "STATE_STOPPING_CANCELED"
            searching.allocation.preempt.set()

    searching.on_metrics = cancel
    hyperparameters = point(searching, **ENDLESS)
    canceled = trial.run(searching, folder=tmp_path, hyperparameters=hyperparameters)
    assert canceled.process.returncode == 0, canceled.log
    assert canceled.allocation.acknowledged
    (line,) = [line for line in canceled.log.splitlines() if "stopped after step" in line]
    assert f"resumes from step {max(saved(searching))} when" in line
    assert "unless it was canceled" in line


@pytest.mark.slow
def test_trial_with_a_wrong_searcher_ends_before_step_1(searching: Master, tmp_path: Path) -> None:
    searching.experiment["searcher"] |= {"metric": "validation_loss", "max_time": 100}
    refused = trial.run(searching, folder=tmp_path, hyperparameters=point(searching))
    assert re.search(r"exitcode *: 2 ", refused.log)
    lines = [
        line.removeprefix("[rank=0] ")
        for line in refused.log.splitlines()
        if line.startswith("[rank=0] ")
    ]
    problems = [line.partition(":")[0] for line in lines if line.startswith("searcher.")]
    assert problems == ["searcher.metric", "searcher.max_time"]
    assert not searching.bodies("/api/v1/trials/{trial}/early_exit")
    assert searching.metrics == []
    assert searching.refused == []


OUT_OF_MEMORY = """
import torch
from lm.data.loader import Loader

training = Loader.training

def allocate_too_much(self, start):
    for step, batch in enumerate(training(self, start), start):
        if rank == 0 and step == 3:
            torch.empty(1 << 60)
        yield batch

Loader.training = allocate_too_much
"""


@pytest.mark.slow
def test_trial_fails_if_one_rank_runs_out_of_memory(searching: Master, tmp_path: Path) -> None:
    searching.experiment["resources"]["slots_per_trial"] = 2
    run_script(searching, tmp_path, OUT_OF_MEMORY)
    failed = trial.run(
        searching, folder=tmp_path, hyperparameters=point(searching), PYTHONPATH=str(REPOSITORY)
    )
    assert failed.process.returncode != 0, failed.log
    assert re.search(r"rank 1\b.*step 3\b.*rank 0\b.*out of memory \(", failed.log)
    assert searching.refused == []
