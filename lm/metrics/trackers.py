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

from lm.errors import RunError, make_printable
from lm.fileio import read_bytes, read_records, replace_durably
from lm.launch.requirements import requires
from lm.metrics.records import Report, Sample
from lm.metrics.sinks import Record, Sink

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
    directory: Path | None = None
    """None on a cluster"""
    history_sizes: tuple[int, int] = (0, 0)
    """bytes of metrics.jsonl and samples.jsonl that earlier sessions of the run have written"""

    def records(self) -> Iterator[Record]:
        """Yield what earlier sessions of the run have logged."""
        if self.directory is None:
            return
        n_reports, n_samples = self.history_sizes
        for line in read_records(self.directory / "metrics.jsonl", Report, n_reports):
            yield Record(line.group, line.step, line.time, line.__pydantic_extra__)
        for line in read_records(self.directory / "samples.jsonl", Sample, n_samples):
            fields = {"prompt": line.prompt, "text": line.text}
            yield Record(line.group, line.step, line.time, fields)


class Client:
    """A run of a tracker, to which the constructor connects.

    All methods may block, and raise any error.
    """

    where: str
    """its URL or directory"""

    needs_history = True
    """whether it is sent again what earlier sessions of the run have logged"""

    def write(self, record: Record) -> None:
        """Send `record`."""
        raise NotImplementedError

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due."""

    def end(self, status: str) -> None:
        """Set the final status: "completed", "stopped", or anything else for a failure."""
        raise NotImplementedError


class WandB(Client):
    """A run of Weights & Biases, written again at every start.

    On a cluster, which keeps no files of the run, it is resumed.
    """

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
        self.where = str(self._run.url)
        if self._run.offline:
            self.where = str(Path(self._run.dir).parent)

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
        has_failed = status not in ("completed", "stopped")
        self._run.finish(exit_code=1 if has_failed else 0)


class MLflow(Client):
    """A run of MLflow, found by its tag `run_id`.

    A report that MLflow already has, with the same loss, is not sent.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient, entities

        self._client = MlflowClient()
        self._to_metric = entities.Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = self._client.get_experiment_by_name(name)
        if known:
            experiment = known.experiment_id
        else:
            experiment = self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.run_id = '{run.id}'")
        if found:
            its_run = found[0]
        else:
            tags = {"run_id": run.id}
            its_run = self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = its_run.info.run_id
        self._client.update_run(self._id, "RUNNING")
        self._log_hyperparameters(run.hyperparameters, its_run.data.params | its_run.data.tags)
        self._losses: dict[tuple[str, int], float] = {}
        """of the reports that MLflow has, by group and step"""
        for group in ("training", "validation"):
            for point in self._client.get_metric_history(self._id, f"{group}/loss"):
                self._losses[group, point.step] = point.value
        self.where = f"{self._client.tracking_uri}/#/experiments/{experiment}/runs/{self._id}"

    def _log_hyperparameters(
        self, hyperparameters: Mapping[str, Any], shown: Mapping[str, str]
    ) -> None:
        for key, hyperparameter in hyperparameters.items():
            if hyperparameter is None:
                continue
            value = str(hyperparameter)[:6000]  # MLflow's longest
            if key not in shown:
                self._client.log_param(self._id, key, value)
            elif shown[key] != value:  # parameters cannot be changed, tags can
                self._client.set_tag(self._id, key, value)

    def write(self, record: Record) -> None:
        if record.group == "checkpoint":
            checkpoint = f"step {record.step}, {record.fields['uuid']}"
            self._client.set_tag(self._id, "checkpoint", checkpoint)
        elif record.group == "sample":
            self._client.log_text(self._id, record.sample, f"samples/step-{record.step}.txt")
        elif not self._has(record):
            milliseconds = int(record.time * 1000)
            metrics: list[Any] = []
            for key, value in record.fields.items():
                name = f"{record.group}/{key}"
                metrics.append(self._to_metric(name, value, milliseconds, record.step))
            self._client.log_batch(self._id, metrics)

    def _has(self, record: Record) -> bool:
        loss = record.fields.get("loss")  # none if all of its steps were skipped
        return loss is not None and self._losses.get((record.group, record.step)) == loss

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
        from determined.common import api, util

        assert run.directory is not None
        master = api.canonicalize_master_url(api.get_default_master_url())
        session = _log_in(master)
        directory = str(run.directory.absolute() / "checkpoints")
        config = {
            "name": run.name,
            "checkpoint_storage": {"type": "directory", "container_path": directory},
            # Without a metric, the Overview has no chart. Masters before 0.38 require a length.
            "searcher": {"name": "single", "metric": "loss", "max_length": 1},
        }
        body = {"config": json.dumps(config), "unmanaged": True}
        answer = session.put(f"api/v1/experiments/by-external-id/{run.id}", json=body)
        experiment = answer.json()["experiment"]["id"]

        hyperparameters = dict(run.hyperparameters)
        trial = {"experimentId": experiment, "hparams": hyperparameters, "unmanaged": True}
        body = {"createTrialRequest": trial, "externalTrialId": run.id}
        created = session.put("api/v1/trials", json=body).json()["trial"]
        self._trial_id = created["id"]
        self._task_id = created["taskId"]
        self._trial = f"api/v1/trials/{self._trial_id}"

        body = {"trialId": self._trial_id, "resume": True}
        started = session.post(f"{self._trial}/start", json=body).json()
        self._run_id = started["trialRunId"]
        self._session = session.with_retry(util.get_max_retries_config())
        self._next_beat = 0.0
        self.where = f"{master}/det/experiments/{experiment}"

    def write(self, record: Record) -> None:
        date = datetime.fromtimestamp(record.time, UTC).isoformat()
        if record.group == "checkpoint":
            self._log(date, f"checkpoint of step {record.step}: {record.fields['uuid']}")
        elif record.group == "sample":
            self._log(date, f"sample of step {record.step}: {record.sample}")
        else:
            report = {
                "trialId": self._trial_id,
                "trialRunId": self._run_id,
                "stepsCompleted": record.step,
                "reportTime": date,
                "metrics": {"avgMetrics": record.fields},
            }
            body = {"group": record.group, "metrics": report}
            self._session.post(f"{self._trial}/metrics", json=body)

    def _log(self, date: str, line: str) -> None:
        entry = {"task_id": self._task_id, "timestamp": date, "rank": "0", "log": f"{line}\n"}
        self._session.post("task-logs", json=[entry])

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
    if user:
        token = store.get_token(user)
        if token:
            return api.Session(master, user, token, cert)
    raise RunError(f"no login at {master}: run det user login NAME, or set DET_USER and DET_PASS")


_CLIENTS: dict[str, Callable[[TrackedRun], Client]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "determined": Determined,
}


class Tracker(Sink):
    """A sink that passes records to a client in a thread.

    The first error turns it off, with one line to `info`.
    """

    def __init__(self, name: str, run: TrackedRun, info: Callable[[str], None]) -> None:
        self._name = name
        self._info = info
        self._is_off = False
        self._status = ""
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        """None is the end"""
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def _work(self, run: TrackedRun) -> None:
        try:
            self._send_all(run)
        except ModuleNotFoundError as error:
            self._turn_off(requires(error.name or str(error)))
        except RunError as error:
            self._turn_off(str(error))
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}")

    def _send_all(self, run: TrackedRun) -> None:
        client = _CLIENTS[self._name](run)
        if self._is_off:  # it has taken too long
            return
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
            reason = make_printable(textwrap.shorten(_without_login(reason), 300))
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
    """Start the trackers that `hyperparameters` name, for the run in `directory` or the trial."""
    names = hyperparameters["tracker"]
    if isinstance(names, str):
        names = [names]
    if directory is not None:
        files = (directory / "metrics.jsonl", directory / "samples.jsonl")
        n_reports, n_samples = (file.stat().st_size for file in files)
        run = TrackedRun(
            id=_read_or_create_id(directory / "tracker_id"),
            name=directory.name,
            hyperparameters=hyperparameters,
            directory=directory,
            history_sizes=(n_reports, n_samples),
        )
    else:
        assert cluster_info is not None
        trial = cluster_info.trial.trial_id
        run = TrackedRun(
            id=f"{cluster_info.cluster_id}-{trial}",
            name=f"trial {trial}",
            hyperparameters=hyperparameters,
        )
    return [Tracker(name, run, info) for name in dict.fromkeys(names)]


def _read_or_create_id(path: Path) -> str:
    with suppress(FileNotFoundError, ValueError):
        return uuid.UUID(read_bytes(path, 100).decode()).hex
    created = uuid.uuid4().hex
    replace_durably(path, created.encode())
    return created
