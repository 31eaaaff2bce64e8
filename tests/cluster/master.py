"""A stand-in for a cluster's master: the calls that an experiment and its trials make, and nothing else.

Every call is checked as the master would (token, path, body, and for checkpoints the files in the storage), recorded
and answered; one that is unknown or wrong is refused, and remembered in `refused`. It serves this machine alone.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import re
import secrets
import socket
import tarfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

PROFILER_GROUPS = {"gpu", "cpu", "memory", "disk", "network"}
VERSION = "0.38.1"


class RefusalError(Exception):
    """What the master answers to a call that it does not take."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def require(holds: Any, message: str) -> None:
    if not holds:
        raise RefusalError(400, message)


@dataclass
class Call:
    """One call: `route` is its path with ids replaced by their names, e.g. `/api/v1/trials/{trial}/progress`."""

    method: str
    route: str
    query: dict[str, str]
    body: Any
    status: int
    arrived: float
    """seconds, `time.monotonic()`"""
    saved: int
    """whole checkpoints in the storage by then"""


@dataclass
class Allocation:
    """One start of a trial on the cluster's machine."""

    trial: int
    run: int
    latest: str | None
    id: str = field(default_factory=lambda: f"alloc-{secrets.token_hex(4)}")
    token: str = field(default_factory=lambda: f"secret-{secrets.token_hex(16)}")
    preempt: threading.Event = field(default_factory=threading.Event)
    acknowledged: bool = False
    invalid: bool = False
    """it reported hyperparameters that cannot work"""

    @property
    def task(self) -> str:
        return f"trial.{self.trial}"


class Master:
    """The master of a cluster whose checkpoints lie in `storage`.

    Attributes to steer it by:
        delay: seconds before every answer.
        refuse: status codes to answer calls of these routes with.
        on_metrics: called with (group, steps completed) of every report.
    """

    def __init__(self, storage: Path, port: int = 0) -> None:
        self.storage = storage
        self.calls: list[Call] = []
        self.refused: list[str] = []
        self.delay = 0.0
        self.refuse: dict[str, int] = {}
        self.on_metrics: Callable[[str, int], None] = lambda _group, _step: None
        self.experiment: dict[str, Any] = {}
        self.context = ""
        self.allocation: Allocation | None = None
        self.checkpoints: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.trials: dict[int, str | None] = {}
        """trials by number, and what each was forked from"""
        self._runs = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._open: set[socket.socket] = set()
        self._telling: set[socket.socket] = set()
        """those of the open connections on which something is being told, and not only asked"""
        self.port = port
        self.appear()

    # ---- being there, and not -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def appear(self) -> None:
        """Listen, on the same port as before."""
        master = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                master._open.add(self.connection)

            def finish(self) -> None:
                master._open.discard(self.connection)
                super().finish()

            def answer(self) -> None:
                if self.command != "GET":
                    master._telling.add(self.connection)
                if master._server is not None:
                    master._answer(self)
                else:
                    self.close_connection = True
                master._telling.discard(self.connection)

            do_GET = do_POST = do_PATCH = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that is gone is no matter."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def vanish(self) -> None:
        """Listen no more, and break off every connection; what is being told is still answered.

        A report whose answer is lost would be told again, and refused, as a master refuses to change metrics.
        """
        assert self._server is not None
        server, self._server = self._server, None
        server.shutdown()
        server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD if connection in self._telling else socket.SHUT_RDWR)

    def close(self) -> None:
        if self.allocation:
            self.allocation.preempt.set()  # sets a long poll free
        if self._server:
            self.vanish()

    # ---- what a trial is told -------------------------------------------------------------------------

    def allocate(self, trial: int, latest: str | None = None) -> Allocation:
        """A new start of the trial numbered `trial`, from its own newest checkpoint.

        Args:
            latest: the checkpoint that a new trial is forked from.
        """
        self._runs += 1
        self.trials.setdefault(trial, latest)
        mine = [c for c in self.checkpoints if c["taskId"] == f"trial.{trial}" and c["state"] == "STATE_COMPLETED"]
        newest = max(mine, key=lambda c: c["metadata"]["steps_completed"], default=None)
        self.allocation = Allocation(trial, self._runs, newest["uuid"] if newest else self.trials[trial])
        return self.allocation

    def files(self, checkpoint: str) -> dict[str, int]:
        """What the storage holds of a checkpoint, and its bytes."""
        folder = self.storage / checkpoint
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    # ---- answering ------------------------------------------------------------------------------------

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        arrived = time.monotonic()
        saved = len(list(self.storage.glob("*/manifest.json")))
        length = int(handler.headers.get("Content-Length", 0))
        text = handler.rfile.read(length)
        if len(text) < length:  # the caller died in the middle of it
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
            if route in self.refuse:
                raise RefusalError(self.refuse[route], "refused on purpose")
            answer = action(self, body, query, **ids) or {}
        except RefusalError as refusal:
            status, answer = refusal.status, {"error": {"code": 3, "error": str(refusal)}}
            if route not in self.refuse:
                self.refused.append(f"{handler.command} {handler.path}: {refusal}")
        except Exception as error:
            status, answer = 500, {"error": {"code": 13, "error": repr(error)}}
            self.refused.append(f"{handler.command} {handler.path}: {error!r}, {body}")
        with self._lock:
            self.calls.append(Call(handler.command, route, query, body, status, arrived, saved))
        payload = json.dumps(answer).encode()
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
        if route in FROM_PEOPLE:
            return
        if self.allocation is None or headers.get("Grpc-Metadata-x-allocation-token") != (
            f"Bearer {self.allocation.token}"
        ):
            raise RefusalError(401, "wrong token")

    def _is(self, **ids: str) -> Allocation:
        """The allocation of now, which the ids in a path or body have to be those of."""
        allocation = self.allocation
        assert allocation is not None
        known = {"allocation": allocation.id, "task": allocation.task, "trial": str(allocation.trial)}
        wrong = {name: value for name, value in ids.items() if known[name] != str(value)}
        require(not wrong, f"not those of this allocation: {wrong}")
        return allocation

    def count(self) -> Counter[str]:
        """How often each call was made."""
        return Counter(f"{call.method} {call.route}" for call in self.calls)

    def bodies(self, route: str, method: str = "POST") -> list[Any]:
        """What was sent to `route` and taken."""
        return [c.body for c in self.calls if (c.method, c.route, c.status) == (method, route, 200)]


# ---- the calls ------------------------------------------------------------------------------------------

Body = Mapping[str, Any]


def show_master(_master: Master, _body: None, _query: Body) -> dict[str, Any]:
    return {"version": VERSION, "masterId": "m", "clusterId": "c", "clusterName": "", "telemetryEnabled": False}


def show_info(_master: Master, _body: None, _query: Body) -> dict[str, Any]:
    return {"version": VERSION}


def log_in(_master: Master, body: Body, _query: Body) -> dict[str, Any]:
    require(body["username"] == "tester" and body["isHashed"], "no such user")
    user = {"id": 1, "username": "tester", "admin": False, "active": True}
    return {"token": "token-of-a-person", "user": user}


def show_me(_master: Master, _body: None, _query: Body) -> dict[str, Any]:
    return {"user": {"id": 1, "username": "tester", "admin": False, "active": True}}


def create_experiment(master: Master, body: Body, _query: Body) -> dict[str, Any]:
    """Take the config and the folder as the CLI sends them; the folder is handed out as the master packs it."""
    master.experiment = yaml.safe_load(body["config"])
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for entry in body["modelDefinition"]:
            info = tarfile.TarInfo(entry["path"])
            info.mode, info.mtime, info.type = entry["mode"] & 0o7777, int(entry["mtime"]), bytes([entry["type"]])
            content = base64.b64decode(entry.get("content") or "")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    master.context = base64.b64encode(packed.getvalue()).decode()
    texts = dict.fromkeys(("originalConfig", "username", "startTime", "jobId", "searcherType"), "")
    shown = {"id": 1, "name": master.experiment["name"], "state": "STATE_ACTIVE", "archived": False, "config": {}}
    shown |= texts | {"hyperparameters": {}, "numTrials": 0, "projectId": 1, "projectOwnerId": 1}
    return {"experiment": shown, "config": {}, "jobSummary": None, "warnings": []}


def send_context(master: Master, _body: None, _query: Body, task: str) -> dict[str, Any]:
    master._is(task=task)
    return {"b64Tgz": master.context}


def take_accelerators(master: Master, body: Body, _query: Body, allocation: str) -> None:
    master._is(allocation=allocation, task=body["acceleratorData"]["taskId"])
    require(body["acceleratorData"]["acceleratorType"], "no accelerator type")


def rendezvous(master: Master, _body: None, _query: Body, allocation: str, resources: str) -> dict[str, Any]:
    master._is(allocation=allocation)
    require(resources == "resources-1", "no such resources")
    slots = master.experiment["resources"]["slots_per_trial"]
    return {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": [slots]}}


def prepare_run(master: Master, body: Body, _query: Body) -> dict[str, Any]:
    master._is(trial=body["runId"])
    require(body.get("checkpointStorage"), "no checkpoint storage")
    return {"storageId": 1}


def tell_preemption(master: Master, _body: None, query: Body, allocation: str) -> dict[str, Any]:
    found = master._is(allocation=allocation)
    found.preempt.wait(int(query["timeout_seconds"]))
    return {"preempt": found.preempt.is_set()}


def acknowledge_preemption(master: Master, _body: Body | None, _query: Body, allocation: str) -> None:
    found = master._is(allocation=allocation)
    require(found.preempt.is_set(), "nothing to acknowledge")
    found.acknowledged = True


def take_metrics(master: Master, body: Body, _query: Body, trial: str) -> None:
    report, group = body["metrics"], body["group"]
    found = master._is(trial=trial)
    require(report["trialId"] == found.trial and report["trialRunId"] == found.run, "not of this run of the trial")
    require("." not in group, "a group's name may hold no dot")
    values = report["metrics"]["avgMetrics"]
    steps = report["stepsCompleted"]
    if group in PROFILER_GROUPS:
        require(steps is None and list(values) == ["agent-1"] and report["reportTime"], "not as the profiler reports")
    else:
        require(isinstance(steps, int) and steps >= 0, "steps completed are a whole number")
        of_run = [m for m in master.metrics if (m["group"], m["run"], m["step"]) == (group, found.run, steps)]
        require(not any(m["metrics"].keys() & values.keys() for m in of_run), "reported twice")
        require(all(isinstance(value, int | float) for value in values.values()), "metrics are numbers")
        searcher = master.experiment["searcher"]
        if group == "validation":  # otherwise the experiment fails
            needed = [searcher["metric"], *([searcher["time_metric"]] if "time_metric" in searcher else [])]
            require(all(math.isfinite(values.get(key, math.nan)) for key in needed), f"{needed} have to be finite")
    with master._lock:
        master.metrics.append(
            {"group": group, "trial": found.trial, "run": found.run, "step": steps, "metrics": values}
        )
    if steps is not None:
        master.on_metrics(group, steps)


def take_progress(master: Master, body: Body, _query: Body, trial: str) -> None:
    master._is(trial=trial)
    require(body["is_raw"] is True and 0 <= body["progress"] <= 1, "progress is raw, from 0 to 1")


def take_status(master: Master, body: Body, _query: Body, trial: str) -> None:
    master._is(trial=trial)
    require(isinstance(body["state"], str) and body["state"], "the status is a text")


def take_checkpoint(master: Master, body: Body, _query: Body) -> None:
    """Every file that is reported has to be in the storage by now, whole."""
    master._is(allocation=body["allocationId"], task=body["taskId"])
    uuid.UUID(body["uuid"])
    require(body["state"] == "STATE_COMPLETED" and body["storageId"] == 1, "not completed")
    require(isinstance(body["metadata"]["steps_completed"], int), "no steps_completed")
    there = master.files(body["uuid"])
    said = {path: int(size) for path, size in body["resources"].items() if not path.endswith("/")}
    if "metadata.json" not in said:  # the library counts it only on storage that is a file system
        there.pop("metadata.json")
    require(said == there, f"the storage holds {there}, reported was {said}")
    with master._lock:
        master.checkpoints.append(dict(body))


def change_checkpoints(master: Master, body: Body, _query: Body) -> None:
    for change in body["checkpoints"]:
        known = next((c for c in master.checkpoints if c["uuid"] == change["uuid"]), None)
        require(known, f"no such checkpoint: {change['uuid']}")
        assert known is not None
        known["state"] = "STATE_DELETED"


def exit_early(master: Master, body: Body, _query: Body, trial: str) -> None:
    found = master._is(trial=trial)
    require(body["reason"] == "EXITED_REASON_INVALID_HP", "not a reason")
    require(not found.invalid, "was reported already")
    found.invalid = True


_CALLS: dict[str, Callable[..., Any]] = {
    "GET /info": show_info,
    "GET /api/v1/master": show_master,
    "GET /api/v1/me": show_me,
    "POST /api/v1/auth/login": log_in,
    "POST /api/v1/experiments": create_experiment,
    "GET /api/v1/tasks/{task}/context_directory": send_context,
    "POST /api/v1/allocations/{allocation}/acceleratorData": take_accelerators,
    "GET /api/v1/allocations/{allocation}/resources/{resources}/rendezvous": rendezvous,
    "GET /api/v1/allocations/{allocation}/signals/preemption": tell_preemption,
    "POST /api/v1/allocations/{allocation}/signals/ack_preemption": acknowledge_preemption,
    "POST /api/v1/runs/start": prepare_run,
    "POST /api/v1/trials/{trial}/metrics": take_metrics,
    "POST /api/v1/trials/{trial}/progress": take_progress,
    "POST /api/v1/trials/{trial}/runner/metadata": take_status,
    "POST /api/v1/trials/{trial}/early_exit": exit_early,
    "POST /api/v1/checkpoints": take_checkpoint,
    "PATCH /api/v1/checkpoints": change_checkpoints,
}
ROUTES = [
    (*call.split(" "), re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", call.partition(" ")[2]), action)
    for call, action in _CALLS.items()
]
FROM_PEOPLE = {"/info", "/api/v1/master", "/api/v1/me", "/api/v1/auth/login", "/api/v1/experiments"}
