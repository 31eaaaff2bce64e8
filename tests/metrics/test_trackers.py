"""A run is one run in each tracker, with what its directory holds; none delays or ends it."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from determined.core import DummyTrainContext

from lm.checkpoint.store import LocalCheckpoints
from lm.config.reading import read_hyperparameters
from lm.errors import ConfigError, RunError
from lm.launch.spawn import reserve_port
from lm.metrics import trackers
from lm.metrics.logger import MetricLogger
from lm.preflight import Job, preflight
from tests.support import REPOSITORY
from tests.support.cluster.master import Master
from tests.support.hyperparameters import EXACT_RUN, TINY
from tests.support.ranks import in_world
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp, start_fsdp, wait_until

LOSSES = {"training": {"loss": 3.0, "lr": 0.1}, "validation": {"loss": 2.5, "batches": 10}}


def log_in(patch: pytest.MonkeyPatch, master_url: str) -> None:
    patch.setenv("DET_MASTER", master_url)
    patch.setenv("DET_USER", "tester")
    patch.setenv("DET_PASS", "secret")


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    master = Master(tmp_path / "storage")
    log_in(monkeypatch, master.url)
    yield master
    master.close()
    assert not master.refused


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "DET_USER", "DET_PASS", "DET_MASTER"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.setenv("DO_NOT_TRACK", "true")
        yield


def logger(run_dir: Path, *names: str, step: int = 0, **hyperparameters: Any) -> MetricLogger:
    run_dir.mkdir(exist_ok=True)
    opened = MetricLogger(0, run_dir, DummyTrainContext(), max_steps=100)
    opened.open(step, hyperparameters={"lr": 0.1, "tracker": list(names)} | hyperparameters)
    return opened


def tracker_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("tracker")]


# ---- servers and files of the trackers


@dataclass(frozen=True)
class MLflowServer:
    url: str
    artifacts: Path

    def runs(self, run_id: str) -> list[dict[str, Any]]:
        """Return the runs with the tag `run_id`."""
        body = {"experiment_ids": ["0"], "filter": f"tags.run_id = '{run_id}'"}
        return (
            requests.post(f"{self.url}/api/2.0/mlflow/runs/search", json=body, timeout=10)
            .json()
            .get("runs", [])
        )

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Return step and value of a metric's points in the only run with the tag `run_id`."""
        (found,) = self.runs(run_id)
        query = {"run_id": found["info"]["run_id"], "metric_key": metric}
        answer = requests.get(
            f"{self.url}/api/2.0/mlflow/metrics/get-history", query, timeout=10
        ).json()
        return [(int(point.get("step", 0)), point["value"]) for point in answer.get("metrics", [])]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = str(reserve_port())
    server = MLflowServer(f"http://127.0.0.1:{port}", folder / "artifacts")
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
    ]
    command += [
        "--artifacts-destination",
        str(server.artifacts),
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--workers", "1"], stdout=log, stderr=log, env=env)

    def is_up() -> bool:
        try:
            return requests.get(f"{server.url}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        wait_until(is_up)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def wandb_records(directory: Path) -> list[Any]:
    """Return the records of an offline run, whose file is a log of blocks as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("run-*.wandb")
    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left_in_block = -position % 32768
        if 0 < left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            records.append(wandb_internal_pb2.Record.FromString(parts))  # pyright: ignore[reportAttributeAccessIssue]
            parts = b""
    return records


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    items = [
        r.history.item for r in wandb_records(directory) if r.WhichOneof("record_type") == "history"
    ]
    return [
        {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in each} for each in items
    ]


def wandb_summary(directory: Path) -> dict[str, Any]:
    return {
        e.key: json.loads(e.value_json) for r in wandb_records(directory) for e in r.summary.update
    }


def stored_losses(master: Master, group: str) -> dict[int, float]:
    """What a Determined master shows: reports of a later start replace earlier ones."""
    return {m["step"]: m["metrics"]["loss"] for m in master.metrics if m["group"] == group}


# ---- a run that is killed after 7 steps, resumed with another lr, stopped after 9 and completed

DISTURBANCE = """
import os, time
from lm.metrics.logger import MetricLogger

log = MetricLogger.log

def disturbed(self, group, step, *metrics, **options):
    log(self, group, step, *metrics, **options)
    if (group, step) == ("training", {step}):
        {action}

MetricLogger.log = disturbed
"""
"""Acts after a training report."""


@dataclass(frozen=True)
class Story:
    folder: Path
    master: Master
    mlflow: MLflowServer
    statuses: list[tuple[str, str]]
    """of MLflow and Determined, after each session"""
    killed_losses: dict[int, float]
    """training losses when the run was killed"""
    output: str

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "test"

    @property
    def id(self) -> str:
        return (self.run_dir / "tracker_id").read_text()

    @property
    def wandb(self) -> Path:
        return self.run_dir / "wandb" / "latest-run"

    def losses(self, group: str) -> dict[int, float]:
        return {step: report["loss"] for step, report in read_reports(self.folder, group).items()}

    def samples(self) -> dict[int, str]:
        samples = [
            json.loads(line) for line in (self.run_dir / "samples.jsonl").read_text().splitlines()
        ]
        return {sample["step"]: sample["prompt"] + sample["text"] for sample in samples}


@pytest.fixture(scope="module")
def story(mlflow_server: MLflowServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    (folder / "text").write_text("to be or not to be " * 200)
    hyperparameters = EXACT_RUN | {
        "dataset": "text",
        "train_data": str(folder / "text"),
        "vocab_size": None,
    }
    hyperparameters |= {
        "max_steps": 10,
        "checkpoint_rate": 4,
        "validation_rate": 2,
        "keep_checkpoints": 1,
    }
    hyperparameters |= {
        "num_tokens": 8,
        "dropout": 0.0,
        "tracker": ["wandb", "mlflow", "determined"],
    }
    master = Master(folder / "storage")
    env: dict[str, Any] = {"WANDB_MODE": "offline", "DET_MASTER": master.url}
    env |= {"MLFLOW_TRACKING_URI": mlflow_server.url.replace("//", "//user:secret@")}
    env |= {"DET_USER": "tester", "DET_PASS": "secret"}
    story = Story(folder, master, mlflow_server, [], {}, "")

    def note_statuses() -> None:
        (found,) = mlflow_server.runs(story.id)
        (trial,) = master.trials.values()
        story.statuses.append((found["info"]["status"], trial.state))

    def is_reported() -> bool:
        if not master.trials or len(stored_losses(master, "training")) < 7:
            return False
        return (
            bool(mlflow_server.runs(story.id))
            and len(mlflow_server.history(story.id, "training/loss")) == 7
        )

    hang = DISTURBANCE.format(step=7, action="time.sleep(999)")
    killed = start_fsdp(folder, config=hyperparameters, script=hang, **env)
    wait_until(is_reported)
    killed.kill()
    killed.communicate()
    note_statuses()
    story.killed_losses.update(stored_losses(master, "training"))

    stop = DISTURBANCE.format(step=8, action="os.kill(os.getpid(), 15)")
    stopped = run_fsdp(folder, "lr=0.05", config=hyperparameters, script=stop, **env)
    note_statuses()
    completed = run_fsdp(folder, "lr=0.05", config=hyperparameters, code=0, **env)
    note_statuses()
    output = "".join((stopped.stdout, stopped.stderr, completed.stdout, completed.stderr))
    yield Story(folder, master, mlflow_server, story.statuses, story.killed_losses, output)
    master.close()
    assert not master.refused


@pytest.mark.slow
def test_resumed_run_replaces_reports(story: Story) -> None:
    assert list(story.losses("training")) == list(range(1, 11))
    changed = {
        step
        for step, loss in story.losses("training").items()
        if story.killed_losses.get(step) != loss
    }
    assert changed >= {6, 7}


@pytest.mark.slow
def test_tracker_status_follows_the_run(story: Story) -> None:
    killed, stopped, completed = story.statuses
    assert killed == ("RUNNING", "STATE_RUNNING")
    assert stopped == ("KILLED", "STATE_PAUSED")
    assert completed == ("FINISHED", "STATE_COMPLETED")


@pytest.mark.slow
def test_trackers_write_no_secret(story: Story) -> None:
    written = [path for path in story.run_dir.rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() for path in written)
    assert "secret" not in story.output


@pytest.mark.slow
@pytest.mark.parametrize("group", LOSSES)
def test_wandb_has_each_report_once(story: Story, group: str) -> None:
    rows = [row for row in wandb_history(story.wandb) if f"{group}/loss" in row]
    assert [(row["step"], row[f"{group}/loss"]) for row in rows] == list(
        story.losses(group).items()
    )


@pytest.mark.slow
def test_wandb_has_one_run(story: Story) -> None:
    directories = list(story.run_dir.glob("wandb/offline-run-*"))
    assert len(directories) == 3
    runs = [record.run for directory in directories for record in wandb_records(directory)]
    assert {each.run_id for each in runs if each.run_id} == {story.id}


@pytest.mark.slow
def test_wandb_has_samples_checkpoint_and_status(story: Story) -> None:
    rows = [row for row in wandb_history(story.wandb) if "sample/path" in row]
    assert [row["step"] for row in rows] == list(story.samples())
    summary = wandb_summary(story.wandb)
    assert summary["status"] == "completed"
    assert summary["checkpoint"] == f"step 10, {checkpoints_by_step(story.folder)[10].name}"


@pytest.mark.slow
@pytest.mark.parametrize("group", LOSSES)
def test_mlflow_has_each_report_or_its_later_value(story: Story, group: str) -> None:
    points = story.mlflow.history(story.id, f"{group}/loss")
    losses = story.losses(group)
    assert dict(points) == losses
    if group == "training":
        changed = [step for step, loss in story.killed_losses.items() if loss != losses[step]]
        assert len(points) == len(losses) + len(changed)


@pytest.mark.slow
def test_mlflow_has_hyperparameters_and_their_changes(story: Story) -> None:
    (found,) = story.mlflow.runs(story.id)
    params = {param["key"]: param["value"] for param in found["data"]["params"]}
    tags = {tag["key"]: tag["value"] for tag in found["data"]["tags"]}
    assert found["info"]["run_name"] == "test"
    assert (params["lr"], tags["lr"]) == ("0.01", "0.05")
    assert not params.keys() & tags.keys() - {"lr"}
    assert tags["checkpoint"] == f"step 10, {checkpoints_by_step(story.folder)[10].name}"


@pytest.mark.slow
def test_mlflow_has_samples(story: Story) -> None:
    stored = {path.name: path.read_text() for path in story.mlflow.artifacts.rglob("step-*.txt")}
    assert stored == {f"step-{step}.txt": text for step, text in story.samples().items()}


@pytest.mark.slow
@pytest.mark.parametrize("group", LOSSES)
def test_determined_has_each_report(story: Story, group: str) -> None:
    assert stored_losses(story.master, group) == story.losses(group)


@pytest.mark.slow
def test_determined_has_one_trial(story: Story) -> None:
    (trial,) = story.master.trials.values()
    assert (trial.external, trial.runs) == (story.id, 3)
    assert trial.hparams["lr"] == 0.01


@pytest.mark.slow
def test_determined_has_samples_and_checkpoints_in_its_log(story: Story) -> None:
    lines = [line["log"] for line in story.master.logs]
    for step, path in checkpoints_by_step(story.folder).items():
        assert f"checkpoint of step {step}: {path.name}\n" in lines
    assert f"sample of step 10: {story.samples()[10]}\n" in lines


# ---- Determined


@pytest.mark.parametrize(
    ("status", "state"), [("stopped", "PAUSED"), ("completed", "COMPLETED"), ("failed", "ERROR")]
)
def test_determined_trial_has_the_final_status(
    tmp_path: Path, master: Master, status: str, state: str
) -> None:
    opened = logger(tmp_path / "run", "determined")
    opened.log("validation", 10, LOSSES["validation"])
    if status == "failed":
        with pytest.raises(RunError), opened:
            raise RunError("failed")
    else:
        opened.set_status(status)
        opened.close()
    assert [trial.state for trial in master.trials.values()] == [f"STATE_{state}"]
    resumed = logger(tmp_path / "run", "determined", step=10)
    wait_until(lambda: master.trials[1].state == "STATE_RUNNING")
    resumed.close()
    assert len(master.trials) == 1


def test_determined_is_no_tracker_of_its_own_trials() -> None:
    trial = SimpleNamespace(trial_id=1, trial_seed=0)
    info: Any = SimpleNamespace(latest_checkpoint=None, trial=trial)
    hp = read_hyperparameters({"hyperparameters": TINY | {"tracker": "determined"}}, [], "test")
    store = LocalCheckpoints(Path("nothing"))
    with pytest.raises(ConfigError, match="tracker: determined"):
        in_world(lambda world: preflight(Job(hp, info, None), None, world, store))


# ---- failures


def without_package(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "wandb", None)
    return "wandb"


def without_server(patch: pytest.MonkeyPatch) -> str:
    log_in(patch, "http://127.0.0.1:1")
    return "determined"


@pytest.mark.parametrize(
    ("break_tracker", "part"),
    [
        (without_package, "wandb is off, .*pip install wandb"),
        (without_server, "determined is off, .*MasterNotFoundException"),
    ],
)
def test_tracker_that_cannot_start_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_tracker: Callable[[pytest.MonkeyPatch], str],
    part: str,
) -> None:
    opened = logger(tmp_path / "run", break_tracker(monkeypatch))
    opened.log("training", 10, LOSSES["training"])
    opened.close()
    (line,) = tracker_lines(capsys.readouterr().out)
    assert "secret" not in line
    assert re.match(f"tracker {part}", line)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def go_away(master: Master) -> None:
    master.is_away = True


def refuse(master: Master) -> None:
    master.refuse["/api/v1/trials/{trial}/metrics"] = 403


def hang(master: Master) -> None:
    master.delay = 5


@pytest.mark.parametrize("break_master", [go_away, refuse, hang])
def test_determined_failure_during_a_run_is_one_line(
    tmp_path: Path,
    master: Master,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_master: Callable[[Master], None],
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT", 1)
    monkeypatch.setenv("DET_RETRY_CONFIG", '{"total": 0}')
    opened = logger(tmp_path / "run", "determined")
    opened.log("training", 1, LOSSES["training"])
    wait_until(lambda: master.metrics)
    break_master(master)
    before = time.monotonic()
    for step in range(2, 20):
        opened.log("training", step, LOSSES["training"])
    opened.close()
    assert time.monotonic() - before < 80, "18 reports wait for 5 s each"
    connected, off = tracker_lines(capsys.readouterr().out)
    assert master.url in connected
    assert "off" in off
    assert len(master.metrics) == 1


@pytest.mark.parametrize(("limit", "part"), [(10_000, "no answer for 1 s"), (5, "5 records")])
def test_determined_that_never_answers_delays_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: int,
    part: str,
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT", 1)
    monkeypatch.setattr(trackers, "MAX_WAITING", limit)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        log_in(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        opened = logger(tmp_path / "run", "determined")
        before = time.monotonic()
        for step in range(20):
            opened.log("training", step, LOSSES["training"])
        opened.close()
        assert time.monotonic() - before < 80, "18 reports wait for 5 s each"
    (line,) = tracker_lines(capsys.readouterr().out)
    assert re.match(f"tracker determined is off, .*{part}", line)


# ---- W&B and MLflow, which change the process they run in


def log_in_another_process(
    folder: Path,
    *names: str,
    env: dict[str, str],
    run_dir: str = "Path('.')",
    info: str = "None",
    step: int = 1,
    timeout: int = 100,
) -> list[str]:
    """Log one report to the trackers `names` as a run of one step; return the lines about them.

    Args:
        timeout: how long they may take at the end (seconds).
    """
    script = f"""
import os, sys
from pathlib import Path
from types import SimpleNamespace
from determined.core import DummyTrainContext
from lm.metrics import trackers
from lm.metrics.logger import MetricLogger
trackers.CLOSE_TIMEOUT = {timeout}
train = DummyTrainContext()
train._session = None  # the log is sent to no master
opened = MetricLogger(0, {run_dir}, train, 100, {info})
opened.open({step - 1}, hyperparameters={{"tracker": {list(names)}}})
opened.log("training", {step}, {{"loss": {step}.0}})
opened.set_status("completed")
opened.close()
sys.stdout.flush()
os._exit(0)
"""
    command = [sys.executable, "-c", script]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
    result = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert "secret" not in result.stdout + result.stderr
    return tracker_lines(result.stdout)


@pytest.mark.slow
def test_mlflow_receives_later_what_it_missed(tmp_path: Path, mlflow_server: MLflowServer) -> None:
    away = {"MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:1"}
    mlflow, wandb = sorted(log_in_another_process(tmp_path, "wandb", "mlflow", env=away))
    assert re.match("tracker mlflow is off, .*MlflowException", mlflow)
    assert re.match("tracker wandb is off, .*no login: .*WANDB_API_KEY", wandb)
    report = {"group": "training", "time": time.time()}
    reports = [
        report | {"step": 2, "skipped_steps": 1.0},  # all steps since the last one
        report | {"step": 3, "skipped_steps": 0.0, "loss": 3.5},
        {"step": 4},  # malformed
    ]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in reports)
    here = {"MLFLOW_TRACKING_URI": mlflow_server.url}
    (line,) = log_in_another_process(tmp_path, "mlflow", env=here, step=4)
    assert line.startswith("tracker mlflow: http")
    run_id = (tmp_path / "tracker_id").read_text()
    assert mlflow_server.history(run_id, "training/skipped_steps") == [(2, 1.0), (3, 0.0)]
    assert mlflow_server.history(run_id, "training/loss") == [(1, 1.0), (3, 3.5), (4, 4.0)]


@pytest.mark.slow
def test_wandb_and_mlflow_that_never_answer(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"MLFLOW_TRACKING_URI": url, "WANDB_BASE_URL": url, "WANDB_API_KEY": 40 * "a"}
        before = time.monotonic()
        lines = log_in_another_process(tmp_path, "wandb", "mlflow", env=env, timeout=2)
        assert time.monotonic() - before < 120  # with the start of Python, and imports
    assert [line.split()[:4] for line in sorted(lines)] == [
        ["tracker", "mlflow", "is", "off,"],
        ["tracker", "wandb", "is", "off,"],
    ]


@pytest.mark.slow
def test_wandb_run_on_a_cluster_is_named_by_the_trial(tmp_path: Path) -> None:
    trial = "SimpleNamespace(trial_id=7)"
    ids = "cluster_id='c-1', task_id='', allocation_id='', agent_id=''"
    info = f"SimpleNamespace({ids}, trial={trial})"
    env = {"WANDB_MODE": "offline"}
    log_in_another_process(tmp_path, "wandb", env=env, run_dir="None", info=info)
    (directory,) = (tmp_path / "wandb").glob("offline-run-*-c-1-7")
    assert [row["training/loss"] for row in wandb_history(directory)] == [1.0]
