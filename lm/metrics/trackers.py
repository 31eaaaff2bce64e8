"""Experiment trackers: Weights & Biases, MLflow, and Determined for runs outside its clusters.

A run has one run in each tracker, also after resuming. A start sends Weights & Biases and MLflow
what metrics.jsonl and samples.jsonl hold, as steps that are trained again replace earlier ones only
in this way; Determined's master replaces them itself.

Each tracker has a thread, although the clients report in the background themselves: their first and
last calls block, and none of their queues can be left with a time limit.
"""

from __future__ import annotations

import html
import json
import os
import queue
import re
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import determined as det

from lm.errors import RunError, printable
from lm.fileio import read_bytes, replace_durably
from lm.metrics.sinks import Record, Sink
from lm.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from determined.common.api import Session

MAX_WAITING = 10_000
"""records that wait for a tracker"""
CLOSE_TIMEOUT = 30.0
"""longest wait for the trackers at the end of a run (seconds)"""
HEARTBEAT = 60.0
"""seconds between heartbeats; Determined considers a trial failed after 300 seconds without one"""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives at the start."""

    id: str
    name: str
    hyperparameters: Mapping[str, Any]
    directory: Path | None = None  # None on a cluster
    history: str = ""
    """text of metrics.jsonl and samples.jsonl"""

    def records(self) -> Iterator[Record]:
        for line in self.history.splitlines():
            fields = json.loads(line)
            yield Record(fields.pop("group"), fields.pop("step"), fields.pop("time"), fields)


class Client:
    """A run of a tracker. The constructor connects to it. All methods may block, and raise any error."""

    where: str
    """its URL or directory"""

    needs_history = True
    """whether it is sent again what earlier sessions of the run have logged"""

    def write(self, record: Record) -> None:
        raise NotImplementedError

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due."""

    def end(self, status: str) -> None:
        """Set the final status: "completed", "stopped", or anything else for a failure."""
        raise NotImplementedError


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

    def write(self, record: Record) -> None:
        if record.group == "checkpoint":
            self._run.summary["checkpoint"] = f"step {record.step}, {record.fields['uuid']}"
        elif record.group == "sample":
            sample = self._to_html(f"<pre>{html.escape(record.sample)}</pre>", inject=False)
            self._run.log({"step": record.step, "sample": sample})
        else:
            metrics = {f"{record.group}/{key}": value for key, value in record.fields.items()}
            self._run.log({"step": record.step, "time": record.time, **metrics})

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status not in ("completed", "stopped")))


class MLflow(Client):
    """A run of MLflow, found by its tag `run_id`. A report that MLflow has with the same loss is not sent."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient, entities

        self._client = MlflowClient()
        self._to_metric = entities.Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.run_id = '{run.id}'")
        if not runs:
            runs = [self._client.create_run(experiment, run_name=run.name, tags={"run_id": run.id})]
        self._id = runs[0].info.run_id
        self._client.update_run(self._id, "RUNNING")
        shown = runs[0].data.params | runs[0].data.tags
        for key, hyperparameter in run.hyperparameters.items():
            value = str(hyperparameter)[:6000]
            if hyperparameter is not None and key not in shown:
                self._client.log_param(self._id, key, value)
            elif hyperparameter is not None and shown[key] != value:  # parameters cannot be changed
                self._client.set_tag(self._id, key, value)
        self._losses = {
            (group, point.step): point.value
            for group in ("training", "validation")
            for point in self._client.get_metric_history(self._id, f"{group}/loss")
        }
        self.where = f"{self._client.tracking_uri}/#/experiments/{experiment}/runs/{self._id}"

    def write(self, record: Record) -> None:
        if record.group == "checkpoint":
            self._client.set_tag(
                self._id, "checkpoint", f"step {record.step}, {record.fields['uuid']}"
            )
        elif record.group == "sample":
            self._client.log_text(self._id, record.sample, f"samples/step-{record.step}.txt")
        elif self._losses.get((record.group, record.step)) != record.fields["loss"]:
            milliseconds = int(record.time * 1000)
            metrics = [
                self._to_metric(f"{record.group}/{key}", value, milliseconds, record.step)
                for key, value in record.fields.items()
            ]
            self._client.log_batch(self._id, metrics)

    def end(self, status: str) -> None:
        statuses = {"completed": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, statuses.get(status, "FAILED"))


class Determined(Client):
    """A trial of an unmanaged experiment.

    The SDK's `core_v2` is not used: it sends the same calls, but replaces stdout, `sys.exit` and
    `sys.excepthook`, has no PAUSED, and blocks if the master does not answer: the run that prints
    or reports to it, and `close` for ever.
    """

    needs_history = False

    def __init__(self, run: TrackedRun) -> None:
        import fsspec
        from determined.common import api, util

        assert run.directory is not None
        master = api.canonicalize_master_url(api.get_default_master_url())
        session = _log_in(master)
        directory = str(run.directory.absolute() / "checkpoints")
        bucket = RunDir(run.name, run.hyperparameters.get("checkpoint_storage")).url
        checkpoints = f"{bucket}/checkpoints" if bucket else directory
        self._files, self._root = fsspec.url_to_fs(checkpoints, use_listings_cache=False)

        config = {
            "name": run.name,
            "checkpoint_storage": {"type": "directory", "container_path": directory},
            "searcher": {
                "name": "single",
                "metric": "loss",
            },  # without a metric, the Overview has no chart
        }
        body = {"config": json.dumps(config), "unmanaged": True}
        answer = session.put(f"api/v1/experiments/by-external-id/{run.id}", json=body)
        experiment = answer.json()["experiment"]["id"]
        trial = {
            "experimentId": experiment,
            "hparams": dict(run.hyperparameters),
            "unmanaged": True,
        }
        answer = session.put(
            "api/v1/trials", json={"createTrialRequest": trial, "externalTrialId": run.id}
        )
        self._trial_id = answer.json()["trial"]["id"]
        self._task_id = answer.json()["trial"]["taskId"]
        self._trial = f"api/v1/trials/{self._trial_id}"
        answer = session.post(
            f"{self._trial}/start", json={"trialId": self._trial_id, "resume": True}
        )
        self._run_id = answer.json()["trialRunId"]
        self._session = session.with_retry(util.get_max_retries_config())
        self._next_beat = 0.0
        self.where = f"{master}/det/experiments/{experiment}"

    def write(self, record: Record) -> None:
        date = datetime.fromtimestamp(record.time, UTC).isoformat()
        if record.group == "checkpoint":
            self._write_checkpoint(record, date)
        elif record.group == "sample":
            line = f"sample of step {record.step}: {record.sample}\n"
            entry = {"task_id": self._task_id, "timestamp": date, "rank": "0", "log": line}
            self._session.post("task-logs", json=[entry])
        else:
            report = {
                "trialId": self._trial_id,
                "trialRunId": self._run_id,
                "stepsCompleted": record.step,
                "reportTime": date,
                "metrics": {"avgMetrics": record.fields},
            }
            self._session.post(
                f"{self._trial}/metrics", json={"group": record.group, "metrics": report}
            )

    def _write_checkpoint(self, record: Record, date: str) -> None:
        sizes: dict[str, dict[str, str]] = {}
        with suppress(Exception):  # of object storage that does not answer now
            for path, file in self._files.find(self._root, detail=True).items():
                name, _, inside = path.removeprefix(f"{self._root}/").partition("/")
                sizes.setdefault(name, {})[inside] = str(file["size"])
        if (
            record.fields["uuid"] not in sizes
        ):  # already deleted by retention: the next one shows what is left
            return
        checkpoint = {
            "uuid": record.fields["uuid"],
            "taskId": self._task_id,
            "reportTime": date,
            "resources": sizes[record.fields["uuid"]],
            "state": "STATE_COMPLETED",
            "metadata": {"steps_completed": record.step},
            "training": {},
        }
        self._session.post("api/v1/checkpoints", json=checkpoint)
        known = self._session.get(f"{self._trial}/checkpoints?states=STATE_COMPLETED").json()[
            "checkpoints"
        ]
        for checkpoint in known:
            if checkpoint["uuid"] not in sizes:
                deleted = {"uuid": checkpoint["uuid"], "resources": {"resources": {}}}
                self._session.patch("api/v1/checkpoints", json={"checkpoints": [deleted]})

    def keep_alive(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + HEARTBEAT
            self._set_state("STATE_RUNNING")

    def end(self, status: str) -> None:
        states = {"completed": "STATE_COMPLETED", "stopped": "STATE_PAUSED"}
        self._set_state(states.get(status, "STATE_ERROR"))

    def _set_state(self, state: str) -> None:
        self._session.patch(self._trial, json={"trialId": self._trial_id, "state": state})


def _log_in(master: str) -> Session:
    # `login_with_cache` could ask for a password, and writes the token to a file.
    from determined.common import api
    from determined.common.api import authentication, certs

    cert = certs.default_load(master)
    user = os.environ.get("DET_USER")
    password = os.environ.get("DET_PASS")
    if user and password is not None:
        return authentication.login(master, user, password, cert)
    store = authentication.TokenStore(master)
    user = store.get_active_user()
    token = store.get_token(user) if user else None
    if user and token:
        return api.Session(master, user, token, cert)
    raise RunError(f"no login at {master}: run det user login NAME, or set DET_USER and DET_PASS")


_CLIENTS: dict[str, Callable[[TrackedRun], Client]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "determined": Determined,
}


class Tracker(Sink):
    """A sink that passes records to a client in a thread. The first error turns it off, with one line to `info`."""

    def __init__(self, name: str, run: TrackedRun, info: Callable[[str], None]) -> None:
        self._name = name
        self._info = info
        self._is_off = False
        self._status = ""
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        """ends with None"""
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def _work(self, run: TrackedRun) -> None:
        try:
            self._send_all(run)
        except ModuleNotFoundError as error:
            self._turn_off(f"requires a package: pip install {error.name}")
        except RunError as error:
            self._turn_off(str(error))
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}")

    def _send_all(self, run: TrackedRun) -> None:
        client = _CLIENTS[self._name](run)
        self._info(f"tracker {self._name}: {_without_login(client.where)}")
        if client.needs_history:
            for record in run.records():
                client.write(record)
        while not self._is_off:
            client.keep_alive()
            try:
                record = self._waiting.get(timeout=HEARTBEAT / 2)
            except queue.Empty:
                continue
            if record is None:
                client.end(self._status)
                return
            client.write(record)

    def _turn_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            reason = textwrap.shorten(_without_login(printable(reason)), 300)
            self._info(f"tracker {self._name} is off, the run continues: {reason}")

    def set_status(self, status: str) -> None:
        self._status = status

    def write(self, record: Record) -> None:
        self._put(record)

    def end(self) -> None:
        self._deadline = time.monotonic() + CLOSE_TIMEOUT
        self._put(None)

    def _put(self, record: Record | None) -> None:
        if self._is_off:
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._turn_off(f"{MAX_WAITING:,} records wait for it")

    def close(self) -> None:
        if self._is_off:
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
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
    if isinstance(names, str):
        names = [names]
    if names and directory:
        history = "".join(
            (directory / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")
        )
        run = TrackedRun(
            _read_id(directory / "tracker_id"), directory.name, hyperparameters, directory, history
        )
    elif names and cluster_info:
        trial = cluster_info.trial.trial_id
        run = TrackedRun(f"{cluster_info.cluster_id}-{trial}", f"trial {trial}", hyperparameters)
    else:
        return []
    return [Tracker(name, run, info) for name in dict.fromkeys(names)]


def _read_id(path: Path) -> str:
    with suppress(FileNotFoundError, ValueError):
        return uuid.UUID(read_bytes(path, 100).decode()).hex
    created = uuid.uuid4().hex
    replace_durably(path, created.encode())
    return created
