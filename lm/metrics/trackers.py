"""Experiment trackers: Weights & Biases, MLflow, and Determined for runs outside its clusters.

A run has one run in each tracker, also after resuming. A start sends Weights & Biases and MLflow what metrics.jsonl and
samples.jsonl hold, which fills gaps; Determined's master replaces reports of steps that are trained again.
"""

from __future__ import annotations

import json
import os
import queue
import re
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import determined as det

from lm.errors import RunError, printable
from lm.fileio import read_bytes, replace_durably
from lm.runtime.run_dir import RunDir

MAX_WAITING = 10_000
"""records that wait for a tracker"""
CLOSE_TIMEOUT = 30.0
"""longest wait for the trackers at the end of a run (seconds)"""
HEARTBEAT = 60.0
"""seconds between heartbeats; Determined considers a trial failed after 300 seconds without one"""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives at the start. `history` is the text of metrics.jsonl and samples.jsonl."""

    id: str
    name: str
    hyperparameters: Mapping[str, Any]
    directory: Path | None = None  # None on a cluster
    history: str = ""


class Client(Protocol):
    """A run of a tracker. The constructor connects to it. All methods may block, and raise any error."""

    where: str
    """its URL or directory"""

    def send(self, group: str, step: int, seconds: float, fields: Mapping[str, Any]) -> None:
        """Send metrics, or the fields of a "sample" or "checkpoint", recorded after `step` steps at time `seconds`."""

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due."""

    def end(self, status: str) -> None:
        """Set the final status: "completed", "stopped", or anything else for a failure."""


class WandB(Client):
    """A run of Weights & Biases, written again at every start; on a cluster, which keeps no files of it, resumed."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_git=True)
        if wandb.setup(settings).settings.mode == "online" and not wandb.login(prompt=False):
            raise RunError("no login: run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            dir=run.directory,
            config=dict(run.hyperparameters),
            resume=None if run.directory else "allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own step can only increase
        self._to_html = wandb.Html
        self.where = str(Path(self._run.dir).parent if self._run.offline else self._run.url)

    def send(self, group: str, step: int, seconds: float, fields: Mapping[str, Any]) -> None:
        if group == "checkpoint":
            self._run.summary["checkpoint"] = f"step {step}, {fields['uuid']}"
        elif group == "sample":
            text = (fields["prompt"] + fields["text"]).replace("&", "&amp;").replace("<", "&lt;")
            self._run.log({"step": step, "sample": self._to_html(f"<pre>{text}</pre>", inject=False)})
        else:
            self._run.log({"step": step, "time": seconds} | {f"{group}/{key}": fields[key] for key in fields})

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status not in ("completed", "stopped")))


class MLflow(Client):
    """A run of MLflow, found by its tag `run_id`. A report that MLflow has with the same loss is not sent."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient, entities

        self._client = client = MlflowClient()
        self._to_metric, name = entities.Metric, os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.run_id = '{run.id}'")
        theirs = found[0] if found else client.create_run(experiment, run_name=run.name, tags={"run_id": run.id})
        self._id, params = theirs.info.run_id, theirs.data.params
        client.update_run(self._id, "RUNNING")
        values = {key: str(value)[:6000] for key, value in run.hyperparameters.items() if value is not None}
        new = [entities.Param(key, value) for key, value in values.items() if key not in params]
        for first in range(0, len(new), 100):  # as many as one call may have
            client.log_batch(self._id, params=new[first : first + 100])
        for key, value in values.items():
            if key in theirs.data.tags or params.get(key, value) != value:  # parameters cannot be changed
                client.set_tag(self._id, key, value)
        self._losses = {
            group: {point.step: point.value for point in client.get_metric_history(self._id, f"{group}/loss")}
            for group in ("training", "validation")
        }
        self.where = f"{client.tracking_uri}/#/experiments/{experiment}/runs/{self._id}"

    def send(self, group: str, step: int, seconds: float, fields: Mapping[str, Any]) -> None:
        if group == "checkpoint":
            self._client.set_tag(self._id, "checkpoint", f"step {step}, {fields['uuid']}")
        elif group == "sample":
            self._client.log_text(self._id, fields["prompt"] + fields["text"], f"samples/step-{step}.txt")
        elif step not in self._losses[group] or self._losses[group][step] != fields.get("loss"):
            milliseconds = int(seconds * 1000)
            metrics = [self._to_metric(f"{group}/{key}", fields[key], milliseconds, step) for key in fields]
            self._client.log_batch(self._id, metrics)

    def end(self, status: str) -> None:
        statuses = {"completed": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, statuses.get(status, "FAILED"))


class Determined(Client):
    """A trial of an unmanaged experiment. The master itself replaces reports of steps that are trained again."""

    def __init__(self, run: TrackedRun) -> None:
        import fsspec
        from determined.common import api, util
        from determined.common.api import authentication, certs

        assert run.directory is not None
        master = api.canonicalize_master_url(api.get_default_master_url())
        cert, store = certs.default_load(master), authentication.TokenStore(master)
        user, password, active = os.environ.get("DET_USER"), os.environ.get("DET_PASS"), store.get_active_user()
        if user and password is not None:  # `login_with_cache` could ask for a password, and writes the token to a file
            self._session = authentication.login(master, user, password, cert)
        elif active and (token := store.get_token(active)):
            self._session = api.Session(master, active, token, cert)
        else:
            raise RunError(f"no login at {master}: run det user login NAME, or set DET_USER and DET_PASS")
        self._next_beat, directory = 0.0, str(run.directory.absolute() / "checkpoints")
        url = RunDir(run.name, run.hyperparameters.get("checkpoint_storage")).url
        where = f"{url}/checkpoints" if url else directory
        self._files, self._root = fsspec.url_to_fs(where, use_listings_cache=False)
        storage = {"type": "directory", "container_path": directory}
        config = {"name": run.name, "checkpoint_storage": storage, "searcher": {"name": "single", "metric": "loss"}}
        body = {"config": json.dumps(config), "unmanaged": True}
        experiment = self._call("put", f"experiments/by-external-id/{run.id}", body)["experiment"]["id"]
        body = {"experimentId": experiment, "hparams": dict(run.hyperparameters), "unmanaged": True}
        trial = self._call("put", "trials", {"createTrialRequest": body, "externalTrialId": run.id})["trial"]
        self._id, self._task_id, self._trial = trial["id"], trial["taskId"], f"trials/{trial['id']}"
        self._run_id = self._call("post", f"{self._trial}/start", {"trialId": self._id, "resume": True})["trialRunId"]
        self._session = self._session.with_retry(util.get_max_retries_config())
        self.where = f"{master}/det/experiments/{experiment}"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return getattr(self._session, method)(f"api/v1/{path}", **({"json": body} if body else {})).json()

    def send(self, group: str, step: int, seconds: float, fields: Mapping[str, Any]) -> None:
        date = datetime.fromtimestamp(seconds, UTC).isoformat()
        if group == "checkpoint":
            self._send_checkpoint(fields["uuid"], step, date)
        elif group == "sample":
            line = f"sample of step {step}: {fields['prompt']}{fields['text']}\n"
            entry = {"task_id": self._task_id, "timestamp": date, "rank": "0", "log": line}
            self._session.post("task-logs", json=[entry])
        else:
            report = {"trialId": self._id, "trialRunId": self._run_id, "stepsCompleted": step, "reportTime": date}
            report["metrics"] = {"avgMetrics": fields}
            self._call("post", f"{self._trial}/metrics", {"group": group, "metrics": report})

    def _send_checkpoint(self, uuid: str, step: int, date: str) -> None:
        sizes: dict[str, dict[str, str]] = {}
        with suppress(Exception):  # of object storage that does not answer now
            for path, file in self._files.find(self._root, detail=True).items():
                name, _, inside = path.removeprefix(f"{self._root}/").partition("/")
                sizes.setdefault(name, {})[inside] = str(file["size"])
        if uuid not in sizes:  # already deleted by retention: the next one shows what is left
            return
        body = {"uuid": uuid, "taskId": self._task_id, "reportTime": date, "resources": sizes[uuid], "training": {}}
        body |= {"state": "STATE_COMPLETED", "metadata": {"steps_completed": step}}
        self._call("post", "checkpoints", body)
        known = self._call("get", f"{self._trial}/checkpoints?states=STATE_COMPLETED")["checkpoints"]
        gone = [{"uuid": each["uuid"], "resources": {"resources": {}}} for each in known if each["uuid"] not in sizes]
        if gone:
            self._call("patch", "checkpoints", {"checkpoints": gone})

    def keep_alive(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + HEARTBEAT
            self._set_state("STATE_RUNNING")

    def end(self, status: str) -> None:
        self._set_state({"completed": "STATE_COMPLETED", "stopped": "STATE_PAUSED"}.get(status, "STATE_ERROR"))

    def _set_state(self, state: str) -> None:
        self._call("patch", self._trial, {"trialId": self._id, "state": state})


_CLIENTS: dict[str, Callable[[TrackedRun], Client]] = {"wandb": WandB, "mlflow": MLflow, "determined": Determined}


class Tracker:
    """A sink that passes everything to a client in a thread. The first error turns it off, with one line to `info`."""

    def __init__(self, name: str, run: TrackedRun, info: Callable[[str], None]) -> None:
        self._name, self._info, self._is_off = name, info, False
        self._records: queue.Queue[tuple[str, int, float, Mapping[str, Any]]] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def _work(self, run: TrackedRun) -> None:
        try:
            client = _CLIENTS[self._name](run)
            self._info(f"tracker {self._name}: {_without_login(client.where)}")
            for line in [] if isinstance(client, Determined) else run.history.splitlines():
                record = json.loads(line)
                client.send(record.pop("group"), record.pop("step"), record.pop("time"), record)
            group = ""
            while group != "end" and not self._is_off:
                client.keep_alive()
                with suppress(queue.Empty):
                    group, step, seconds, fields = self._records.get(timeout=HEARTBEAT / 2)
                    client.end(fields["status"]) if group == "end" else client.send(group, step, seconds, fields)
        except ModuleNotFoundError as error:
            self._turn_off(f"requires a package: pip install {error.name}")
        except Exception as error:
            self._turn_off(str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")

    def _turn_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            reason = textwrap.shorten(_without_login(printable(reason)), 300)
            self._info(f"tracker {self._name} is off, the run continues: {reason}")

    def log(self, group: str, step: int, metrics: Mapping[str, Any]) -> None:
        try:
            if not self._is_off:
                self._records.put_nowait((group, step, time.time(), dict(metrics)))
        except queue.Full:
            self._turn_off(f"{MAX_WAITING:,} records wait for it")

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        self.log("sample", step, {"prompt": prompt, "text": text})

    def end(self, status: str) -> None:
        """Send the final status; `close` waits until `CLOSE_TIMEOUT` from now."""
        self._deadline = time.monotonic() + CLOSE_TIMEOUT
        self.log("end", 0, {"status": status})

    def close(self) -> None:
        while self._thread.is_alive() and not self._is_off and time.monotonic() < self._deadline:
            self._thread.join(0.1)
        if self._thread.is_alive():
            self._turn_off(f"no answer for {CLOSE_TIMEOUT:.0f} s at the end")


def _without_login(text: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//", text)


def open_trackers(
    hyperparameters: Mapping[str, Any],
    directory: Path | None,
    cluster_info: det.ClusterInfo | None,
    info: Callable[[str], None],
) -> list[Tracker]:
    """Start the trackers that `hyperparameters` name, for the run in `directory`, or for the trial on a cluster."""
    names = hyperparameters.get("tracker") or []
    names = list(dict.fromkeys([names] if isinstance(names, str) else names))
    if names and directory:
        history = "".join((directory / name).read_text() for name in ("metrics.jsonl", "samples.jsonl"))
        run = TrackedRun(_read_id(directory / "tracker_id"), directory.name, hyperparameters, directory, history)
    elif names and cluster_info:
        trial = cluster_info.trial.trial_id
        run = TrackedRun(f"{cluster_info.cluster_id}-{trial}", f"trial {trial}", hyperparameters)
    else:
        return []
    return [Tracker(name, run, info) for name in names]


def _read_id(path: Path) -> str:
    with suppress(FileNotFoundError, ValueError):
        return uuid.UUID(read_bytes(path, 100).decode()).hex
    created = uuid.uuid4().hex
    replace_durably(path, created.encode())
    return created
