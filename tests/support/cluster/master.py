"""A stand-in for Determined's master: the API calls of the CLI, the SDK and trials, on 127.0.0.1.

It validates every call as the master does (token, path, body, and for checkpoints the files in the
storage), records it in `calls`, and answers it. It refuses unknown and invalid calls and lists them
in `refused`.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import secrets
import shutil
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.cluster.searcher import Searcher, make_searcher

PROFILER_GROUPS = {"gpu", "cpu", "memory", "disk", "network"}
STARTED = "2026-11-21T23:58:16Z"
ON_PURPOSE = "refused on purpose"


class RefusalError(Exception):
    """The master refuses a call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def require(holds: Any, message: str) -> None:
    if not holds:
        raise RefusalError(400, message)


@dataclass
class Call:
    """One call; `route` is its path with names for ids, e.g. `/api/v1/trials/{trial}/progress`."""

    method: str
    route: str
    body: Any
    status: int


@dataclass
class Allocation:
    """One start of a trial."""

    trial: int
    run: int
    latest: str | None
    id: str = field(default_factory=lambda: f"alloc-{secrets.token_hex(4)}")
    token: str = field(default_factory=lambda: f"secret-{secrets.token_hex(16)}")
    preempt: threading.Event = field(default_factory=threading.Event)
    acknowledged: bool = False
    kill: Callable[[], None] = lambda: None

    @property
    def task(self) -> str:
        return f"trial.{self.trial}"


@dataclass
class TrialRecord:
    id: int
    experiment: int
    hparams: Mapping[str, Any] = field(default_factory=dict)
    forked_from: str | None = None
    state: str = "STATE_RUNNING"
    """a search's stop changes it to STATE_STOPPING_COMPLETED, and signals nothing"""
    status: str = ""
    restarts: int = 0
    logs: list[Path] = field(default_factory=list)
    external: str = ""
    """ID that an unmanaged trial was created with"""
    runs: int = 0
    """starts"""

    @property
    def task(self) -> str:
        return f"{self.experiment}.{self.external}" if self.external else f"trial.{self.id}"


@dataclass
class Experiment:
    id: int
    config: dict[str, Any]
    state: str = "STATE_ACTIVE"
    searcher: Searcher | None = None
    forked_from: int | None = None
    external: str = ""


class Master:
    """A master whose checkpoint storage is the directory `storage`.

    Attributes:
        version: 0.35.0 or later; those before 0.38 accept experiments of an older form only.
        delay: seconds before every answer.
        is_away: whether a proxy answers calls with 503, as while the master restarts.
        refuse: status codes to refuse calls with, by route.
        on_metrics: called with (group, steps completed) for every report.
        on_experiment: called with every experiment that is created or continued.
    """

    def __init__(self, storage: Path, version: str = "0.38.1") -> None:
        self.storage = storage
        self.version = version
        self.calls: list[Call] = []
        self.refused: list[str] = []
        self.delay = 0.0
        self.is_away = False
        self.refuse: dict[str, int] = {}
        self.on_metrics: Callable[[str, int], None] = lambda _group, _step: None
        self.on_experiment: Callable[[Experiment], None] = lambda _experiment: None
        self.experiments: list[Experiment] = []
        self.experiment: dict[str, Any] = {}
        """config of the newest experiment"""
        self.context = ""
        self.allocation: Allocation | None = None
        self.checkpoints: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.trials: dict[int, TrialRecord] = {}
        self.logs: list[dict[str, Any]] = []
        """lines that unmanaged trials sent"""
        self._lock = threading.Lock()
        self._server = self._start()

    # ---- start and stop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _start(self) -> ThreadingHTTPServer:
        master = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                master._answer(self)

            do_GET = do_POST = do_PUT = do_PATCH = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that disconnected."""

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def close(self) -> None:
        for experiment in self.experiments:
            experiment.state = "STATE_STOPPING_KILLED"
        if self.allocation:
            self.allocation.preempt.set()  # ends a long poll
            self.allocation.kill()
        self._server.shutdown()
        self._server.server_close()

    # ---- trials

    def create_trial(self, experiment: Experiment) -> None:
        """Create the next trial that the experiment's searcher wants."""
        assert experiment.searcher is not None
        source = experiment.config["searcher"].get("source_checkpoint_uuid")
        record = TrialRecord(
            len(self.trials) + 1, experiment.id, experiment.searcher.create(), source
        )
        self.trials[record.id] = record

    def allocate(self, trial: int, latest: str | None = None) -> Allocation:
        """Return a new start of a trial from its newest checkpoint; a fork starts from `latest`."""
        record = self.trials.setdefault(
            trial, TrialRecord(trial, len(self.experiments), forked_from=latest)
        )
        record.runs += 1
        kept = self.kept(trial)
        self.allocation = Allocation(
            trial, record.runs, kept[-1]["uuid"] if kept else record.forked_from
        )
        return self.allocation

    def kept(self, trial: int) -> list[dict[str, Any]]:
        """Return the checkpoints of a trial that are not deleted, by step."""
        mine = [
            c
            for c in self.checkpoints
            if c["taskId"] == f"trial.{trial}" and c["state"] == "STATE_COMPLETED"
        ]
        return sorted(mine, key=lambda c: c["metadata"]["steps_completed"])

    def collect(self, experiment: Experiment) -> None:
        """Delete what `checkpoint_storage` does not keep after the experiment's end."""
        n_latest = experiment.config["checkpoint_storage"].get("save_trial_latest", 1)
        for trial in (t.id for t in self.trials.values() if t.experiment == experiment.id):
            validations = [
                m for m in self.metrics if (m["trial"], m["group"]) == (trial, "validation")
            ]
            losses = {m["step"]: m["metrics"]["loss"] for m in validations}
            by_loss = sorted(
                self.kept(trial),
                key=lambda c: losses.get(c["metadata"]["steps_completed"], math.inf),
            )
            for checkpoint in by_loss[1:]:
                if checkpoint not in self.kept(trial)[-n_latest:]:
                    shutil.rmtree(self.storage / checkpoint["uuid"])
                    checkpoint |= {"state": "STATE_DELETED", "resources": {}}

    def files(self, checkpoint: str) -> dict[str, int]:
        """Return the files of a checkpoint in the storage and their sizes in bytes."""
        folder = self.storage / checkpoint
        return {
            str(path.relative_to(folder)): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file()
        }

    # ---- answering

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        text = handler.rfile.read(length)
        if len(text) < length:  # the client was killed while sending
            handler.close_connection = True
            return
        url = urlsplit(handler.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        route, body, status, answer = url.path, None, 200, {}
        try:
            body = json.loads(text) if text else None
            action, route, ids = self._find(handler.command, url.path)
            self._check_token(handler.headers, route)
            time.sleep(self.delay)
            if self.is_away or route in self.refuse:
                raise RefusalError(self.refuse.get(route, 503), ON_PURPOSE)
            answer = action(self, body, query, **ids) or {}
        except RefusalError as refusal:
            status, answer = refusal.status, {"error": {"code": 3, "error": str(refusal)}}
            if str(refusal) != ON_PURPOSE:
                self.refused.append(f"{handler.command} {handler.path}: {refusal}")
        except Exception as error:
            status, answer = 500, {"error": {"code": 13, "error": repr(error)}}
            self.refused.append(f"{handler.command} {handler.path}: {error!r}, {body}")
        with self._lock:
            self.calls.append(Call(handler.command, route, body, status))
        payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(payload)))
        handler.end_headers()
        handler.wfile.write(payload)

    def _find(self, method: str, path: str) -> tuple[Callable[..., Any], str, dict[str, str]]:
        for known, route, pattern, action in ROUTES:
            if known == method and (found := re.fullmatch(pattern, path)):
                return action, route, found.groupdict()
        raise RefusalError(404, "no such call")

    def _check_token(self, headers: Any, route: str) -> None:
        if route in PUBLIC or headers.get("Authorization") == f"Bearer {USER_TOKEN}":
            return
        token = headers.get("Grpc-Metadata-x-allocation-token")
        if self.allocation is None or token != f"Bearer {self.allocation.token}":
            raise RefusalError(401, "wrong token")

    def _require_current(self, **ids: str) -> Allocation:
        """Return the current allocation; refuse IDs of another one."""
        allocation = self.allocation
        assert allocation is not None
        known = {
            "allocation": allocation.id,
            "task": allocation.task,
            "trial": str(allocation.trial),
        }
        wrong = {name: value for name, value in ids.items() if known[name] != str(value)}
        require(not wrong, f"not of the current allocation: {wrong}")
        return allocation

    def bodies(self, route: str, method: str = "POST") -> list[Any]:
        """Return the bodies of the accepted calls of `route`."""
        return [c.body for c in self.calls if (c.method, c.route, c.status) == (method, route, 200)]


# ---- calls

Body = Mapping[str, Any]


USER = {"id": 1, "username": "tester", "admin": False, "active": True}
USER_TOKEN = "token-of-a-user"


def describe_master(master: Master, _body: None, _query: Body) -> dict[str, Any]:
    fixed = {"masterId": "m", "clusterId": "c", "clusterName": "", "telemetryEnabled": False}
    return {"version": master.version} | fixed


def log_in(_master: Master, body: Body, _query: Body) -> dict[str, Any]:
    require(body["username"] == "tester" and body["isHashed"], "no such user")
    return {"token": USER_TOKEN, "user": USER}


def create_experiment(master: Master, body: Body, _query: Body) -> dict[str, Any]:
    """Accept an experiment as the CLI sends it, and pack its folder as the master does."""
    master.experiment = yaml.safe_load(body["config"])
    check_form(master)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for entry in body["modelDefinition"]:
            info = tarfile.TarInfo(entry["path"])
            info.mode, info.mtime, info.type = (
                entry["mode"] & 0o7777,
                int(entry["mtime"]),
                bytes([entry["type"]]),
            )
            content = base64.b64decode(entry.get("content") or "")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    master.context = base64.b64encode(packed.getvalue()).decode()
    number = len(master.experiments) + 1
    experiment = Experiment(number, master.experiment, searcher=make_searcher(master.experiment))
    master.experiments.append(experiment)
    master.on_experiment(experiment)
    return show_experiment(master, None, {}, str(experiment.id)) | {"warnings": []}


def check_form(master: Master) -> None:
    """Refuse a form of the newest experiment that came with a later version."""
    if master.version >= "0.38":
        return
    require("max_length" in master.experiment["searcher"], "searcher.max_length is required")
    for policy in master.experiment["log_policies"]:
        require("name" not in policy and "type" in policy["action"], "not a log policy")


def show_experiment(master: Master, _body: None, _query: Body, experiment: str) -> dict[str, Any]:
    found = master.experiments[int(experiment) - 1]
    texts = dict.fromkeys(("originalConfig", "username", "startTime", "jobId", "searcherType"), "")
    shown = {"id": found.id, "name": found.config["name"], "state": found.state, "archived": False}
    shown |= texts | {
        "config": found.config,
        "hyperparameters": {},
        "forkedFrom": found.forked_from,
        "projectId": 1,
        "projectOwnerId": 1,
    }
    return {
        "experiment": shown | {"numTrials": len(master.trials)},
        "config": found.config,
        "jobSummary": None,
    }


def change_experiment(state: str) -> Callable[..., None]:
    def change(master: Master, _body: None, _query: Body, experiment: str) -> None:
        master.experiments[int(experiment) - 1].state = state
        if master.allocation and state == "STATE_PAUSED":
            master.allocation.preempt.set()
        if master.allocation and state == "STATE_STOPPING_KILLED":
            master.allocation.kill()

    return change


def continue_experiment(master: Master, body: Body, query: Body) -> dict[str, Any]:
    change_experiment("STATE_ACTIVE")(master, None, query, body["id"])
    for trial in master.trials.values():
        if trial.experiment == body["id"]:
            trial.state = "STATE_RUNNING"
    master.on_experiment(master.experiments[body["id"] - 1])
    return show_experiment(master, None, query, body["id"])


def pages(name: str, items: list[Any]) -> dict[str, Any]:
    """Return a list that is complete in one page."""
    return {
        name: items,
        "pagination": {"offset": 0, "limit": 0, "endIndex": len(items), "total": len(items)},
    }


def stream(items: Iterable[Any]) -> bytes:
    return "".join(json.dumps({"result": item}) + "\n" for item in items).encode()


def put_experiment(master: Master, body: Body, query: Body, external: str) -> dict[str, Any]:
    """Create an unmanaged experiment, or return the one with this external ID."""
    config = yaml.safe_load(body["config"])
    require(
        body["unmanaged"] is True and config["checkpoint_storage"], "not an unmanaged experiment"
    )
    require(
        config["searcher"]["name"] == "single" and config["searcher"]["metric"] == "loss",
        "charts need a metric",
    )
    require(config["searcher"]["max_length"], "before 0.38, searcher.max_length is required")
    known = next((e for e in master.experiments if e.external == external), None)
    if known is None:
        known = Experiment(len(master.experiments) + 1, config, "STATE_PAUSED", external=external)
        master.experiments.append(known)
    return show_experiment(master, None, query, str(known.id))


def put_trial(master: Master, body: Body, query: Body) -> dict[str, Any]:
    """Create an unmanaged trial, or return the one with this external ID."""
    created, external = body["createTrialRequest"], body["externalTrialId"]
    require(created["unmanaged"] is True and external, "not an unmanaged trial")
    known = next((t for t in master.trials.values() if t.external == external), None)
    if known is None:
        number = len(master.trials) + 1
        known = TrialRecord(
            number,
            created["experimentId"],
            created["hparams"],
            state="STATE_PAUSED",
            external=external,
        )
        master.trials[number] = known
    return {
        "trial": show_trial(master, None, query, str(known.id))["trial"] | {"taskId": known.task}
    }


def start_trial(master: Master, body: Body, _query: Body, trial: str) -> dict[str, Any]:
    found = master.trials[int(trial)]
    require(
        found.external and body == {"trialId": found.id, "resume": True},
        "not a start of an unmanaged trial",
    )
    found.runs += 1
    steps = [m["step"] for m in master.metrics if m["trial"] == found.id]
    return {"trialRunId": found.runs, "stepsCompleted": max(steps, default=0)}


def change_trial(master: Master, body: Body, query: Body, trial: str) -> dict[str, Any]:
    """Accept a heartbeat of an unmanaged trial, with or without a state."""
    found = master.trials[int(trial)]
    require(found.runs and body["trialId"] == found.id, "not a started unmanaged trial")
    states = {"STATE_RUNNING", "STATE_PAUSED", "STATE_COMPLETED", "STATE_ERROR"}
    require(body.get("state", found.state) in states, "not a state")
    found.state = body.get("state", found.state)
    return show_trial(master, None, query, trial)


def accept_logs(master: Master, body: list[Body], _query: Body) -> bytes:
    tasks = {t.task for t in master.trials.values() if t.external}
    known = {"task_id", "timestamp", "rank", "log"}
    require(
        all(entry["task_id"] in tasks and entry.keys() == known for entry in body),
        "not of an unmanaged trial",
    )
    master.logs += [dict(entry) for entry in body]
    return b""


def show_trials(master: Master, _body: None, query: Body, experiment: str) -> dict[str, Any]:
    mine = [trial.id for trial in [*master.trials.values()] if trial.experiment == int(experiment)]
    return pages("trials", [show_trial(master, None, query, str(trial))["trial"] for trial in mine])


def show_checkpoints(master: Master, _body: None, query: Body, trial: str) -> dict[str, Any]:
    experiment = master.experiments[master.trials[int(trial)].experiment - 1]
    training = {
        "trialId": int(trial),
        "experimentId": experiment.id,
        "experimentConfig": experiment.config,
    }
    mine = [
        c | {"training": training}
        for c in master.checkpoints
        if c["taskId"] == master.trials[int(trial)].task
    ]
    mine = [c for c in mine if c["state"] == query.get("states", c["state"])]
    return pages("checkpoints", mine)


def stream_metrics(master: Master, _body: None, query: Body) -> bytes:
    """Answer with a trial's reports; another run of the trial replaces those that it repeats."""
    group, trial = query["group"], int(query["trialIds"])
    mine = {m["step"]: m for m in master.metrics if (m["trial"], m["group"]) == (trial, group)}
    name = "validation_metrics" if group == "validation" else "avg_metrics"
    fixed = {"trialId": trial, "group": group, "archived": False, "id": 1}
    reports = [
        fixed
        | {
            "endTime": m["time"],
            "totalBatches": step,
            "trialRunId": m["run"],
            "metrics": {name: m["metrics"]},
        }
        for step, m in mine.items()
    ]
    return stream([{"metrics": reports}])


def stream_profiler_series(master: Master, _body: None, _query: Body, trial: str) -> bytes:
    mine = [
        m["metrics"]
        for m in master.metrics
        if m["trial"] == int(trial) and m["group"] in PROFILER_GROUPS
    ]
    names = {
        (agent, name)
        for m in mine
        for agent, values in m.items()
        for name in values
        if "/" not in name
    }
    return stream(
        [
            {
                "labels": [
                    {"trialId": int(trial), "agentId": agent, "name": name} for agent, name in names
                ]
            }
        ]
    )


def stream_logs(master: Master, _body: None, _query: Body, trial: str) -> bytes:
    lines = [
        line
        for path in master.trials[int(trial)].logs
        for line in path.read_text(errors="replace").splitlines()
    ]
    fixed = {
        "trialId": int(trial),
        "level": "LOG_LEVEL_INFO",
        "timestamp": STARTED,
        "source": "task",
    }
    return stream(
        fixed | {"id": str(number), "message": line + "\n"} for number, line in enumerate(lines)
    )


def context_directory(master: Master, _body: None, _query: Body, task: str) -> dict[str, Any]:
    master._require_current(task=task)
    return {"b64Tgz": master.context}


def accept_accelerators(master: Master, body: Body, _query: Body, allocation: str) -> None:
    master._require_current(allocation=allocation, task=body["acceleratorData"]["taskId"])
    require(body["acceleratorData"]["acceleratorType"], "no accelerator type")


def rendezvous(
    master: Master, _body: None, _query: Body, allocation: str, resources: str
) -> dict[str, Any]:
    master._require_current(allocation=allocation)
    require(resources == "resources-1", "no such resources")
    slots = master.experiment["resources"]["slots_per_trial"]
    return {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [slots]}}


def start_run(master: Master, body: Body, _query: Body) -> dict[str, Any]:
    master._require_current(trial=body["runId"])
    require(body.get("checkpointStorage"), "no checkpoint storage")
    return {"storageId": 1}


def preemption_signal(master: Master, _body: None, query: Body, allocation: str) -> dict[str, Any]:
    found = master._require_current(allocation=allocation)
    found.preempt.wait(int(query["timeout_seconds"]))
    return {"preempt": found.preempt.is_set()}


def acknowledge_preemption(
    master: Master, _body: Body | None, _query: Body, allocation: str
) -> None:
    found = master._require_current(allocation=allocation)
    require(found.preempt.is_set(), "nothing to acknowledge")
    found.acknowledged = True


def show_trial(master: Master, _body: None, _query: Body, trial: str) -> dict[str, Any]:
    found = master.trials[int(trial)]
    shown = {
        "id": found.id,
        "experimentId": found.experiment,
        "hparams": found.hparams,
        "state": found.state,
    }
    shown |= {"restarts": found.restarts, "runnerState": found.status, "totalBatchesProcessed": 0}
    return {"trial": shown | {"startTime": STARTED, "summaryMetrics": {}}}


def accept_metrics(master: Master, body: Body, _query: Body, trial: str) -> None:
    report, group = body["metrics"], body["group"]
    record = master.trials.get(int(trial))
    if record and record.external:
        found = Allocation(record.id, record.runs, None)
    else:
        found = master._require_current(trial=trial)
    require(
        report["trialId"] == found.trial and report["trialRunId"] == found.run,
        "not of this run of the trial",
    )
    require("." not in group, "a group name contains a dot")
    values = report["metrics"]["avgMetrics"]
    steps = report["stepsCompleted"]
    if group in PROFILER_GROUPS:
        require(
            steps is None and list(values) == ["agent-1"] and report["reportTime"],
            "not a report of the profiler",
        )
    else:
        require(isinstance(steps, int) and steps >= 0, "stepsCompleted is not an integer")
        this = found.trial, found.run, group, steps
        of_run = [
            m for m in master.metrics if (m["trial"], m["run"], m["group"], m["step"]) == this
        ]
        require(not any(m["metrics"].keys() & values.keys() for m in of_run), "reported twice")
        require(
            all(isinstance(value, int | float) for value in values.values()),
            "a metric is not a number",
        )
    with master._lock:
        fixed = {"trial": found.trial, "run": found.run, "time": f"{datetime.now(UTC):%FT%TZ}"}
        master.metrics.append(fixed | {"group": group, "step": steps, "metrics": values})
        if group == "validation":
            decide(master, found, values)
    if steps is not None:
        master.on_metrics(group, steps)


def decide(master: Master, allocation: Allocation, values: Mapping[str, float]) -> None:
    """Let the searcher decide about a trial after a validation.

    The experiment fails if a metric is missing.
    """
    trial = master.trials[allocation.trial]
    experiment = master.experiments[trial.experiment - 1]
    config = experiment.config["searcher"]
    needed = [config[key] for key in ("metric", "time_metric") if key in config]
    if not all(math.isfinite(values.get(key, math.nan)) for key in needed):
        experiment.state = "STATE_ERROR"
        allocation.kill()
        return
    value = values[config["metric"]]
    if not config.get("smaller_is_better", True):
        value = -value
    steps = int(values.get(config.get("time_metric", ""), 0))
    searcher = experiment.searcher
    if searcher and searcher.stops(trial.id, steps, value):
        trial.state = "STATE_STOPPING_COMPLETED"
        if searcher.wants_more:
            master.create_trial(experiment)


def accept_progress(master: Master, body: Body, _query: Body, trial: str) -> None:
    master._require_current(trial=trial)
    require(
        body["is_raw"] is True and 0 <= body["progress"] <= 1, "progress is not raw from 0 to 1"
    )


def accept_status(master: Master, body: Body, _query: Body, trial: str) -> None:
    found = master._require_current(trial=trial)
    require(isinstance(body["state"], str) and body["state"], "the status is empty")
    master.trials[found.trial].status = body["state"]


def accept_checkpoint(master: Master, body: Body, _query: Body) -> None:
    """Accept a checkpoint if the storage contains exactly the reported files."""
    is_unmanaged = any(t.external and t.task == body["taskId"] for t in master.trials.values())
    if not is_unmanaged:
        master._require_current(allocation=body["allocationId"], task=body["taskId"])
    uuid.UUID(body["uuid"])
    require(body["state"] == "STATE_COMPLETED", "not completed")
    require(isinstance(body["metadata"]["steps_completed"], int), "no steps_completed")
    if is_unmanaged:
        require(body["resources"] and body["reportTime"], "no files, or no time")
        master.checkpoints.append(dict(body))
        return
    require(body["storageId"] == 1, "not in the storage")
    stored = master.files(body["uuid"])
    reported = {
        path: int(size) for path, size in body["resources"].items() if not path.endswith("/")
    }
    if "metadata.json" not in reported:  # Core API reports it only for file system storage
        stored.pop("metadata.json")
    require(reported == stored, f"the storage contains {stored}, reported was {reported}")
    with master._lock:
        master.checkpoints.append(dict(body))


def change_checkpoints(master: Master, body: Body, _query: Body) -> None:
    for change in body["checkpoints"]:
        known = next((c for c in master.checkpoints if c["uuid"] == change["uuid"]), None)
        require(known, f"no such checkpoint: {change['uuid']}")
        assert known is not None
        known["state"] = "STATE_DELETED"
        known["resources"] = {}


def accept_task_logs(master: Master, body: Body, _query: Body) -> None:
    """Add lines to the log of the current allocation, as of `det trial logs`."""
    for line in body["logs"]:
        found = master._require_current(allocation=line["allocationId"], task=line["taskId"])
        datetime.fromisoformat(line["timestamp"])
        require(
            (line["source"], line["stdtype"]) == ("task", "stdout") and line["log"].endswith("\n"),
            "not a log line",
        )
        with master.trials[found.trial].logs[-1].open("a") as log:
            log.write(f"[rank={line['rankId']}] {line['log']}")


def exit_early(master: Master, body: Body, _query: Body, trial: str) -> None:
    """Accept the report, and lose it, as the real master does."""
    master._require_current(trial=trial)
    require(body["reason"] == "EXITED_REASON_INVALID_HP", "not a reason")


_CALLS: dict[str, Callable[..., Any]] = {
    "GET /info": describe_master,
    "GET /api/v1/master": describe_master,
    "GET /api/v1/me": lambda *_: {"user": USER},
    "POST /api/v1/auth/login": log_in,
    "POST /api/v1/experiments": create_experiment,
    "POST /api/v1/experiments/continue": continue_experiment,
    "GET /api/v1/experiments/{experiment}": show_experiment,
    "POST /api/v1/experiments/{experiment}/pause": change_experiment("STATE_PAUSED"),
    "POST /api/v1/experiments/{experiment}/activate": change_experiment("STATE_ACTIVE"),
    "POST /api/v1/experiments/{experiment}/kill": change_experiment("STATE_STOPPING_KILLED"),
    "GET /api/v1/experiments/{experiment}/trials": show_trials,
    "PUT /api/v1/experiments/by-external-id/{external}": put_experiment,
    "PUT /api/v1/trials": put_trial,
    "POST /api/v1/trials/{trial}/start": start_trial,
    "PATCH /api/v1/trials/{trial}": change_trial,
    "POST /task-logs": accept_logs,
    "GET /api/v1/tasks/{task}/context_directory": context_directory,
    "POST /api/v1/allocations/{allocation}/acceleratorData": accept_accelerators,
    "GET /api/v1/allocations/{allocation}/resources/{resources}/rendezvous": rendezvous,
    "GET /api/v1/allocations/{allocation}/signals/preemption": preemption_signal,
    "POST /api/v1/allocations/{allocation}/signals/ack_preemption": acknowledge_preemption,
    "POST /api/v1/runs/start": start_run,
    "GET /api/v1/trials/{trial}": show_trial,
    "GET /api/v1/trials/{trial}/checkpoints": show_checkpoints,
    "GET /api/v1/trials/{trial}/logs": stream_logs,
    "GET /api/v1/trials/{trial}/profiler/available_series": stream_profiler_series,
    "GET /api/v1/trials/metrics/trial_metrics": stream_metrics,
    "POST /api/v1/trials/{trial}/metrics": accept_metrics,
    "POST /api/v1/trials/{trial}/progress": accept_progress,
    "POST /api/v1/trials/{trial}/runner/metadata": accept_status,
    "POST /api/v1/trials/{trial}/early_exit": exit_early,
    "POST /api/v1/task/logs": accept_task_logs,
    "POST /api/v1/checkpoints": accept_checkpoint,
    "PATCH /api/v1/checkpoints": change_checkpoints,
}
ROUTES = [
    (*call.split(" "), re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", call.partition(" ")[2]), action)
    for call, action in _CALLS.items()
]
PUBLIC = {"/info", "/api/v1/master", "/api/v1/me", "/api/v1/auth/login"}
