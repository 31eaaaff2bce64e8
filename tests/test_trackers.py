"""A run has one run in each tracker, which shows what its directory holds; no tracker delays or ends a run."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import requests
from determined.core import DummyTrainContext

from lm import config
from lm.errors import ConfigError, RunError
from lm.launch.spawn import free_port
from lm.metrics import trackers
from lm.metrics.logger import MetricLogger
from lm.preflight import preflight
from tests.cluster.master import Master
from tests.conftest import Message
from tests.support import EXACT_RUN, ROOT, TINY, checkpoints, in_world, reports, run, start, wait_until

LOSSES = {"training": {"loss": 3.0, "lr": 0.1}, "validation": {"loss": 2.5, "batches": 10}}
THEIR_WORDS = r"(?<=Exception: ).*"


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    master = Master(tmp_path / "storage")
    for key, value in {"DET_MASTER": master.url, "DET_USER": "tester", "DET_PASS": "secret"}.items():
        monkeypatch.setenv(key, value)
    yield master
    master.close()
    assert not master.refused


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "DET_USER", "DET_PASS", "DET_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("DO_NOT_TRACK", "true")


def logger(run_dir: Path, *names: str, step: int = 0, **hyperparameters: Any) -> MetricLogger:
    run_dir.mkdir(exist_ok=True)
    opened = MetricLogger(0, run_dir, DummyTrainContext(), max_steps=100)
    opened.start(step, hyperparameters={"lr": 0.1, "tracker": list(names)} | hyperparameters)
    return opened


# ---- a run that is killed and resumed with another learning rate --------------------------------------------------


def wandb_records(directory: Path) -> list[Any]:
    """Return the records of an offline run, whose file is a log of blocks as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("run-*.wandb")
    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := -position % 32768) and left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            records.append(wandb_internal_pb2.Record.FromString(parts))  # pyright: ignore[reportAttributeAccessIssue]
            parts = b""
    return records


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    items = [r.history.item for r in wandb_records(directory) if r.WhichOneof("record_type") == "history"]
    return [{e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in each} for each in items]


def stored_losses(master: Master, group: str) -> dict[int, float]:
    """What a Determined master shows: reports of a later start of the trial replace earlier ones."""
    return {m["step"]: m["metrics"]["loss"] for m in master.metrics if m["group"] == group}


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    port, store = str(free_port()), f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--workers", "1"]
    where = ["--artifacts-destination", str(tmp_path / "artifacts"), "--host", "127.0.0.1", "--port", port]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "mlflow.log").open("w") as log:
        server = subprocess.Popen([*command, *where], stdout=log, stderr=log, env=env)

    def is_up() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        wait_until(is_up)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_every_tracker_has_one_run_with_what_the_run_directory_holds(
    tmp_path: Path, master: Master, mlflow_server: str
) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 200)
    hyperparameters = EXACT_RUN | {"dataset": "text", "train_data": str(text), "vocab_size": None, "max_steps": 10}
    hyperparameters |= {"checkpoint_rate": 4, "validation_rate": 2, "num_tokens": 8, "keep_checkpoints": 1}
    hyperparameters |= {"tracker": ["wandb", "mlflow", "determined"], "dropout": 0.0}
    env: dict[str, Any] = {"MLFLOW_TRACKING_URI": mlflow_server.replace("//", "//user:secret@")}
    env |= {"WANDB_MODE": "offline"}
    api = f"{mlflow_server}/api/2.0/mlflow"
    found: list[dict[str, Any]] = []

    def mlflow_history(metric: str) -> list[dict[str, Any]]:
        body = {"experiment_ids": ["0"]}
        found[:] = requests.post(f"{api}/runs/search", json=body, timeout=10).json().get("runs", [])
        query = {"run_id": found[0]["info"]["run_id"], "metric_key": metric} if found else {}
        answer = requests.get(f"{api}/metrics/get-history", query, timeout=10).json()
        return answer.get("metrics", []) if query else []

    hang = "report = fsdp.report\ndef slow(t, step):\n report(t, step)\n if step == 7: __import__('time').sleep(99)\n"
    killed = start(tmp_path, config=hyperparameters, script=hang + "fsdp.report = slow", **env)
    wait_until(lambda: len(mlflow_history("training/loss")) == 7 and len(stored_losses(master, "training")) == 7)
    killed.kill()
    killed.communicate()
    mlflow_history("training/loss")
    assert found[0]["info"]["status"] == "RUNNING"
    assert [trial.state for trial in master.trials.values()] == ["STATE_RUNNING"]
    first_losses = stored_losses(master, "training")

    result = run(tmp_path, "lr=0.05", config=hyperparameters, **env)
    assert result.returncode == 0, result.stderr
    run_dir = tmp_path / "runs" / "test"
    truth = {group: {step: r["loss"] for step, r in reports(tmp_path, group).items()} for group in LOSSES}
    assert len(truth["training"]) == 10
    assert {step for step in range(1, 11) if first_losses.get(step) != truth["training"][step]} >= {6, 7}
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    saved = {step: path.name for step, path in checkpoints(tmp_path).items()}
    # Weights & Biases: the newest directory holds everything once.
    history = wandb_history(run_dir / "wandb" / "latest-run")
    for group, losses in truth.items():
        shown = [(row["step"], row[f"{group}/loss"]) for row in history if f"{group}/loss" in row]
        assert shown == list(losses.items())
    assert [row["step"] for row in history if "sample/path" in row] == [sample["step"] for sample in samples]
    records = wandb_records(run_dir / "wandb" / "latest-run")
    summary = {e.key: json.loads(e.value_json) for r in records for e in r.summary.update}
    assert (summary["status"], summary["checkpoint"]) == ("completed", f"step 10, {saved[10]}")
    runs = [r.run for path in run_dir.glob("wandb/offline-run-*") for r in wandb_records(path)]
    identifier = (run_dir / "tracker_id").read_text()
    assert {each.run_id for each in runs if each.run_id} == {identifier}
    # MLflow: one run. Steps with another loss are there twice, and the later value counts; equal ones once.
    for group, losses in truth.items():
        points = mlflow_history(f"{group}/loss")
        assert {int(point.get("step", 0)): point["value"] for point in points} == losses
        twice = set(first_losses) - {s for s, loss in losses.items() if first_losses.get(s) == loss}
        assert group == "validation" or len(points) == len(losses) + len(twice)
    (theirs,) = found
    tags = {tag["key"]: tag["value"] for tag in theirs["data"]["tags"]}
    params = {param["key"]: param["value"] for param in theirs["data"]["params"]}
    assert (theirs["info"]["status"], theirs["info"]["run_name"]) == ("FINISHED", "test")
    assert (params["lr"], tags["lr"], tags["checkpoint"]) == ("0.01", "0.05", f"step 10, {saved[10]}")
    texts = {f"step-{s['step']}.txt": s["prompt"] + s["text"] for s in samples}
    stored = (tmp_path / "artifacts").rglob("step-*.txt")
    assert {path.name: path.read_text() for path in stored} == texts
    # Determined: one experiment and trial, started twice.
    (trial,) = master.trials.values()
    assert (trial.external, trial.runs, trial.state) == (identifier, 2, "STATE_COMPLETED")
    assert trial.hparams["lr"] == 0.01
    assert {group: stored_losses(master, group) for group in truth} == truth
    kept = {c["metadata"]["steps_completed"]: c["uuid"] for c in master.checkpoints if c["state"] == "STATE_COMPLETED"}
    assert kept == saved
    assert f"sample of step 10: {samples[-1]['prompt']}{samples[-1]['text']}\n" in [line["log"] for line in master.logs]
    # No token or password is written.
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() for path in written)
    assert "secret" not in result.stdout + result.stderr


# ---- Determined ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "state"), [("stopped", "PAUSED"), ("completed", "COMPLETED"), ("failed", "ERROR")])
def test_the_final_status_is_the_state_of_the_trial(tmp_path: Path, master: Master, status: str, state: str) -> None:
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
    (tmp_path / "run" / "tracker_id").unlink()  # as a fresh start moves it
    logger(tmp_path / "run", "determined").close()
    assert len(master.trials) == 2


def test_a_run_that_reports_nothing_sends_heartbeats(
    tmp_path: Path, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "HEARTBEAT", 0.05)
    opened = logger(tmp_path / "run", "determined")
    wait_until(lambda: len(master.bodies("/api/v1/trials/{trial}", "PATCH")) > 5)
    opened.close()


def test_determined_shows_the_checkpoints_of_a_run_in_object_storage(tmp_path: Path, master: Master) -> None:
    storage = fsspec.filesystem("memory")
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    opened = logger(tmp_path / "run", "determined", checkpoint_storage="memory://bucket/")
    storage.pipe_file(f"/bucket/run/checkpoints/{first}/manifest.json", b"12345")
    opened.log_checkpoint(4, first)
    wait_until(lambda: master.checkpoints)
    storage.pipe_file(f"/bucket/run/checkpoints/{second}/manifest.json", b"123")
    storage.rm(f"/bucket/run/checkpoints/{first}", recursive=True)
    opened.log_checkpoint(8, second)
    opened.close()
    shown = {c["uuid"]: (c["state"], c["metadata"]["steps_completed"], c["resources"]) for c in master.checkpoints}
    assert shown[first] == ("STATE_DELETED", 4, {})
    assert shown[second] == ("STATE_COMPLETED", 8, {"manifest.json": "3"})


def test_determined_is_not_a_tracker_of_its_own_trials(message: Message) -> None:
    trial = SimpleNamespace(trial_id=1, trial_seed=0)
    info: Any = SimpleNamespace(latest_checkpoint=None, trial=trial)
    hp = config.read({"hyperparameters": TINY | {"tracker": "determined"}}, [], "test")
    context: Any = None
    with pytest.raises(ConfigError) as error:
        in_world(lambda world: preflight(hp, world, info, None, context))
    assert error.value.keys == {"tracker"}
    message(error.value)


# ---- failures -----------------------------------------------------------------------------------------------------


def without_package(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "wandb", None)
    return "wandb"


def without_login(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:1")
    return "determined"


def without_server(monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in {"DET_MASTER": "http://127.0.0.1:1", "DET_USER": "tester", "DET_PASS": "secret"}.items():
        monkeypatch.setenv(key, value)
    return "determined"


@pytest.mark.parametrize("break_tracker", [without_package, without_login, without_server])
def test_a_tracker_that_cannot_start_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_tracker: Callable[[pytest.MonkeyPatch], str],
    message: Message,
) -> None:
    opened = logger(tmp_path / "run", break_tracker(monkeypatch))
    opened.log("training", 10, LOSSES["training"])
    opened.close()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tracker"))
    assert "secret" not in line
    message(line, mask=THEIR_WORDS)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def log_in_another_process(folder: Path, setup: str, run_dir: str, info: str, **env: str) -> list[str]:
    """Report once to W&B and MLflow, which change their process; return the lines about them."""
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from determined.core import DummyTrainContext\nfrom lm.metrics.logger import MetricLogger\n"
        "context = DummyTrainContext()\ncontext._session = None\n"
        f"{setup}\nopened = MetricLogger(0, {run_dir}, context, 100, {info})\n"
        "opened.start(0, hyperparameters={'tracker': ['wandb', 'mlflow']})\n"
        "opened.log('training', 1, {'loss': 1.0})\nopened.close()\nsys.stdout.flush()\nos._exit(0)"
    )
    env = {"MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:1", "PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "secret" not in result.stdout + result.stderr
    return sorted(line for line in result.stdout.splitlines() if line.startswith("tracker"))


@pytest.mark.slow
def test_a_missing_login_and_a_server_that_is_away_are_a_line_each(tmp_path: Path, message: Message) -> None:
    lines = log_in_another_process(tmp_path, "", "Path('.')", "None")
    assert len(lines) == 2
    message("\n".join(lines), mask=THEIR_WORDS)


@pytest.mark.slow
def test_on_a_cluster_the_trial_identifies_the_run(tmp_path: Path) -> None:
    info = "SimpleNamespace(cluster_id='c-1', task_id='', allocation_id='', agent_id='', trial=TRIAL)"
    info = info.replace("TRIAL", "SimpleNamespace(trial_id=7, _config={})")
    log_in_another_process(tmp_path, "sys.modules['mlflow'] = None", "None", info, WANDB_MODE="offline")
    (directory,) = (tmp_path / "wandb").glob("offline-run-*-c-1-7")
    assert [row["training/loss"] for row in wandb_history(directory)] == [1.0]


def test_a_server_that_never_answers_delays_neither_reports_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: Message
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("DET_MASTER", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("DET_USER", "tester")
        monkeypatch.setenv("DET_PASS", "secret")
        for limit in (10_000, 5):
            monkeypatch.setattr(trackers, "MAX_WAITING", limit)
            opened, before = logger(tmp_path / str(limit), "determined"), time.monotonic()
            for step in range(20):
                opened.log("training", step, LOSSES["training"])
            assert time.monotonic() - before < 1
            opened.close()
            assert time.monotonic() - before < 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tracker")]
    assert len(lines) == 2
    message("\n".join(lines))
