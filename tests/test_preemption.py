"""On a cluster: a preemption is saved before it is acknowledged, a fork starts anew, old checkpoints are deleted there.

The library's own preemption watcher and checkpoint context run here; the master is a small HTTP server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import determined as det
import pytest
from determined import core
from determined.common.api import Session

import fsdp
from lm import config
from lm.manifest import read_manifest
from lm.mesh import TorchDistributedContext, World
from tests.support import TINY, run_ranks

SETTINGS = TINY | {"max_steps": 400, "report_rate": 1000, "checkpoint_rate": 1000, "validation_batches": 1, "seed": 1}


class Master:
    """Preempts when told to, and keeps what it was asked, with the checkpoints that were whole by then."""

    def __init__(self, storage: Path) -> None:
        self.preempt = threading.Event()
        self.calls: list[tuple[str, int]] = []
        master = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                what = self.path.partition("?")[0].rpartition("/")[2]
                master.calls.append((what, len(list(storage.glob("*/manifest.json")))))
                if self.path.endswith("timeout_seconds=60"):
                    master.preempt.wait(60)
                body = json.dumps({"preempt": master.preempt.is_set()}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def cluster_info(url: str, trial: int, latest: str | None) -> det.ClusterInfo:
    trial_info = det.TrialInfo(trial, 1, 1, {}, {}, 0, 0, False, None)
    return det.ClusterInfo(url, "c", "a", [0], "t", "alloc", "token", "TRIAL", None, None, latest, trial_info)


@contextmanager
def on_cluster(world: World, storage: str, info: det.ClusterInfo) -> Iterator[core.Context]:
    distributed = TorchDistributedContext(world)
    with core.init(distributed=distributed, checkpoint_storage=storage) as context:
        session = Session(info.master_url, "user", "token", None)
        mode = core.PreemptMode.ChiefOnly
        context.preempt = core.PreemptContext(session, info.allocation_id, distributed, mode).start()
        context.train.get_tensorboard_path = lambda: Path(storage) / "tensorboard"  # type: ignore[method-assign]
        yield context


def train(world: World, storage: str, url: str, trial: int, latest: str | None, changes: dict[str, Any]) -> None:
    hp = config.read({"hyperparameters": SETTINGS | changes}, [], "trial")
    info = cluster_info(url, trial, latest)
    with on_cluster(world, storage, info) as context:
        fsdp.run(hp, world, context, info, None)


def whole(storage: Path) -> dict[int, str]:
    return {read_manifest(path.parent).step: path.parent.name for path in storage.glob("*/manifest.json")}


def test_a_preemption_is_acknowledged_once_the_checkpoint_is_there_and_the_trial_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    master = Master(tmp_path)
    threading.Thread(target=lambda: (_wait_for(master, "preemption"), time.sleep(2), master.preempt.set())).start()
    run_ranks(2, train, str(tmp_path), master.url, 7, None, {})
    ((step, uuid),) = whole(tmp_path).items()
    assert 0 < step < 400
    assert f"stopped behind step {step} of 400" in capfd.readouterr().out
    assert [saved for what, saved in master.calls if what == "ack_preemption"] == [1]

    master = Master(tmp_path)
    run_ranks(2, train, str(tmp_path), master.url, 7, uuid, {"max_steps": step + 3})
    assert f"going on from checkpoint {uuid}, step {step}" in capfd.readouterr().out
    assert sorted(whole(tmp_path)) == [step, step + 3]
    assert "ack_preemption" not in [what for what, _ in master.calls]

    run_ranks(1, train, str(tmp_path), master.url, 8, uuid, {"max_steps": 2, "total_batch_size": 1, "seed": 5})
    assert f"weights of checkpoint {uuid}" in capfd.readouterr().out
    assert sorted(whole(tmp_path)) == [2, step, step + 3]


def _wait_for(master: Master, call: str) -> None:
    while call not in [what for what, _ in master.calls]:
        time.sleep(0.05)


def test_what_is_not_to_be_kept_is_deleted_through_the_context(tmp_path: Path) -> None:
    master = Master(tmp_path)
    run_ranks(1, train, str(tmp_path), master.url, 7, None, {"max_steps": 8, "checkpoint_rate": 2, "lr": 1e-2})
    left = whole(tmp_path)
    assert {6, 8} <= left.keys()
    assert len(left) <= 3
    best = min(left, key=lambda step: read_manifest(tmp_path / left[step]).validation_loss or 0)
    assert left.keys() == {6, 8, best}
