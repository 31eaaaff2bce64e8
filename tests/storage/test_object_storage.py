"""A run in object storage is as safe as one on a disk, and needs nothing of earlier machines.

The servers are moto for S3 and, with other headers, for Google's storage, and Microsoft's Azurite
for Azure's. A proxy in front of moto fails on request.
"""

from __future__ import annotations

import errno
import http.client
import http.server
import itertools
import json
import os
import pickle
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from lm.checkpoint import __main__ as command
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.contents import verify
from lm.checkpoint.locate import find_checkpoint, locate_checkpoint
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import MANIFEST, PARTS, WEIGHTS, CheckpointError, read_manifest
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import LocalCheckpoints
from lm.config.reading import read_hyperparameters
from lm.errors import ConfigError, RunError
from lm.fileio import MAX_JSON_BYTES
from lm.launch.spawn import reserve_port
from lm.preflight import Job, preflight
from lm.resume import ResumePlan, load_checkpoint, plan_resume
from lm.runtime.run_dir import RunDir
from lm.runtime.run_state import RunState, begin_run, read_state, record_early, write_state
from lm.runtime.world import MeshShape, World
from lm.storage import bucket, lease
from lm.storage.place import Directory
from tests.soak import soak
from tests.support.checkpoints import (
    RUN_INFO,
    SHARDS,
    load_state,
    open_checkpointer,
    save_toy,
    toy_model,
)
from tests.support.hyperparameters import EXACT_RUN, TINY
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, run_fsdp
from tests.support.servers import serving, use_s3

pytest.importorskip("moto.server", reason="needs moto's server")
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Python version:FutureWarning")

NO_CHECKPOINTS = LocalCheckpoints(Path("nothing"))


AS_S3 = {
    "x-goog-copy-source": "x-amz-copy-source",
    "x-goog-if-generation-match": "If-None-Match",
    "if-none-match": "If-None-Match",
}


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests to `address`, or treats them as `fault` says.

    A fault is a status and a code, "stall", or "away". Headers of Google's XML API get the names of
    S3's, whose requests are otherwise the same.
    """

    daemon_threads = True

    def __init__(self, address: str) -> None:
        self.fault: Callable[[str, str], tuple[int, str] | str | None] = lambda *_: None
        host = address.removeprefix("http://")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue"

            def forward(handler) -> None:  # noqa: N805 # pyright: ignore[reportSelfClsParameterName]
                body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                match self.fault(handler.command, handler.path):
                    case (status, text):
                        handler.send_response(status)
                        content = (
                            f"<Error><Code>{text}</Code><Message>{text}</Message></Error>".encode()
                        )
                        headers = {"Content-Length": str(len(content))}
                    case str(fault):
                        handler.close_connection = True
                        if fault == "stall":
                            handler.connection.recv(1)  # until the client gives up
                        return
                    case _:
                        with closing(http.client.HTTPConnection(host, timeout=20)) as connection:
                            sent = {
                                AS_S3.get(name.lower(), name): value
                                for name, value in handler.headers.items()
                            }
                            if "If-None-Match" in sent:
                                sent["If-None-Match"] = "*"
                            connection.request(handler.command, handler.path, body, sent)
                            response = connection.getresponse()
                            content = response.read()
                        handler.send_response(response.status)
                        headers = {
                            k: v
                            for k, v in response.getheaders()
                            if k.lower() not in ("connection", "server")
                        }
                for name, value in headers.items():
                    handler.send_header(name, value)
                handler.end_headers()
                if handler.command != "HEAD":
                    handler.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def gs_proxy(s3: str, s3_server: str) -> Iterator[Proxy]:  # noqa: ARG001
    server = Proxy(s3_server)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def gs(gs_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{gs_proxy.server_address[1]}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    return f"gs://bucket/{tmp_path.name}"


@pytest.fixture(scope="module")
def az_server() -> Iterator[str]:
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("needs azurite: npm install --global azurite")
    port = reserve_port()
    options = ("--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck")
    with serving(
        azurite, *options, f"--blobPort={port}", port=port, AZURITE_ACCOUNTS="account:a2V5"
    ) as address:
        yield address


@pytest.fixture
def az(az_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    from azure.core.exceptions import ResourceExistsError
    from azure.storage.blob import BlobServiceClient

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{az_server}/account")
    credential = {"account_name": "account", "account_key": "a2V5"}
    with suppress(ResourceExistsError):
        BlobServiceClient(f"{az_server}/account", credential).create_container("bucket")
    return f"az://bucket/{tmp_path.name}"


@pytest.fixture(
    params=[
        "s3",
        pytest.param("gs", marks=pytest.mark.slow),
        pytest.param("az", marks=pytest.mark.slow),
    ]
)
def storage(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


@contextmanager
def machine(
    world: World, url: str, folder: Path, keep: int | None = 2
) -> Iterator[tuple[Checkpointer, BucketCheckpoints]]:
    """The run "test" under `url` on a machine with the working directory `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)
    tempfile.tempdir = str(folder)
    try:
        with chdir(folder):
            run_dir = RunDir("test", url)
            run_dir.lock(world)
            store = BucketCheckpoints(f"{url}/test", run_dir.path)
            config = CheckpointConfig.model_validate({"keep_checkpoints": keep})
            try:
                store.start(world)
                yield Checkpointer(config, store, world, {}), store
            except RunError:
                store.close_after_error()
                raise
            store.close(world)
    finally:
        tempfile.tempdir = None
        os.umask(mask)


def load(checkpointer: Checkpointer, world: World, checkpoint: Location) -> tuple[int, bool]:
    """The step of the checkpoint at a path or URL, and whether its model is that step's."""
    model = toy_model(-1)
    fully_shard(model, mesh=world.device_mesh(MeshShape(1, world.size)))
    step = load_state(checkpointer, checkpoint, {"model": model.state_dict()}).step
    return step, all(bool((parameter.to_local() == step).all()) for parameter in model.parameters())  # type: ignore[attr-defined]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def damage(place: BucketCheckpoints, uuid: str, name: str) -> None:
    path = f"checkpoints/{uuid}/{name}"
    content = place.bucket.read(path)
    place.bucket.write(path, content[:-1] + bytes([content[-1] ^ 1]))


def flip_last_bit(checkpoint: Path) -> Path:
    path = checkpoint / SHARDS[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return checkpoint


def use_two_machines(world: World, url: str, root: Path) -> dict[str, Any]:
    folder = root / f"machine-{world.rank}"
    with machine(world, url, folder) as (checkpointer, place):
        (folder / "runs" / "test" / "metrics.jsonl").write_text("1\n")
        uuids = [
            save_toy(checkpointer, world, step, loss=loss)
            for step, loss in enumerate([3.0, 1.0, 4.0, 5.0], start=1)
        ]
        left = [name for name in files_in(folder) if "safetensors" in name]
        saved = [entry.name for entry in place.list_saved()[0]]
        found = load(checkpointer, world, place.locate(uuids[3]))
        world.on_rank0(lambda: damage(place, uuids[3], SHARDS[1]))
        with pytest.raises(CheckpointError) as refused:
            load(checkpointer, world, place.locate(uuids[3]))
        again = load(checkpointer, world, place.locate(uuids[2]))
    errors = [str(refused.value)]
    if world.rank == 1:  # damage its download of the file that rank 0 verifies on a shared disk
        download = Location.download
        Location.download = lambda self, directory, parts=PARTS: flip_last_bit(
            download(self, directory, parts)
        )
    (root / "shared").mkdir(exist_ok=True)
    with (
        open_checkpointer(world, root / "shared") as on_disk,
        pytest.raises(CheckpointError) as refused,
    ):
        load(on_disk, world, place.locate(uuids[2]))
    errors.append(str(refused.value))
    return {
        "uuids": uuids,
        "left": left,
        "saved": saved,
        "loaded": [found, again],
        "errors": errors,
    }


@dataclass(frozen=True)
class TwoMachines:
    """A run of two machines that share no disk, which saved four checkpoints.

    The files that the newest needs are damaged in the storage; the one before it is intact there.
    """

    url: str
    by_rank: list[dict[str, Any]]

    @property
    def uuids(self) -> list[str]:
        return self.by_rank[0]["uuids"]


@pytest.fixture(scope="module")
def two_machines(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    folder = tmp_path_factory.mktemp("two_machines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        root = use_s3(patch, s3_server, folder.name)
        by_rank = run_ranks(2, use_two_machines, root, folder, nodes=2)
        yield TwoMachines(f"{root}/test", by_rank)


@pytest.mark.slow
def test_machines_without_a_shared_disk_save_and_load(two_machines: TwoMachines) -> None:
    for rank in two_machines.by_rank:
        assert rank["uuids"] == two_machines.uuids
        assert rank["left"] == []
        assert rank["saved"] == rank["uuids"][1:]  # the newest two and the best
        assert rank["loaded"] == [(4, True), (3, True)]


@pytest.mark.slow
def test_machines_refuse_damage_together(two_machines: TwoMachines) -> None:
    uuids = two_machines.uuids
    damaged = [f"{uuids[3]}/{SHARDS[1]}", f"{uuids[2]}/{SHARDS[0]}"]
    for rank in two_machines.by_rank:
        for error, name in zip(rank["errors"], damaged, strict=True):
            assert error.startswith(f"{two_machines.url}/checkpoints/{name}: damaged")


@pytest.mark.slow
def test_checkpoint_list_of_a_url(
    two_machines: TwoMachines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    connect = bucket.Bucket.retry_for

    def count(new: bucket.Bucket, seconds: float) -> None:
        opened.append(new.url)
        connect(new, seconds)

    monkeypatch.setattr(bucket.Bucket, "retry_for", count)
    assert command.main(["list", two_machines.url]) == 0
    assert opened == [two_machines.url], "once for all checkpoints"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == two_machines.uuids[1:]
    assert lines[0].endswith("best")


@pytest.mark.slow
def test_checkpoint_verify_of_a_url(
    two_machines: TwoMachines,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []

    def download_and_count(self: Location, *args: Any) -> Path:
        path = download(self, *args)
        copies.append(len(list(tmp_path.glob(f"*/*/{MANIFEST}"))))
        return path

    download = Location.download
    monkeypatch.setattr(Location, "download", download_and_count)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    checkpoints = f"{two_machines.url}/checkpoints"
    newest, intact = two_machines.uuids[3], two_machines.uuids[2]
    assert command.main(["verify", f"{checkpoints}/{intact}"]) == 0
    capsys.readouterr()
    assert command.main(["verify", two_machines.url]) == CheckpointError.exit_code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == two_machines.uuids[1:]
    assert lines[-1].startswith(
        f"{newest}  not complete: {checkpoints}/{newest}/{SHARDS[1]}: damaged"
    )
    assert copies == [1] * (1 + len(lines)), "one checkpoint at a time is on this disk"


@pytest.mark.slow
def test_find_checkpoint_downloads_a_url(two_machines: TwoMachines) -> None:
    folder = find_checkpoint(f"{two_machines.url}/checkpoints/{two_machines.uuids[2]}")
    assert verify(folder, read_manifest(folder), parts=WEIGHTS)
    assert not list(folder.glob("optim-*"))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_plan_resume_accepts_a_url(two_machines: TwoMachines, key: str) -> None:
    url = f"{two_machines.url}/checkpoints/{two_machines.uuids[2]}"
    config = CheckpointConfig.model_validate({key: url})
    plan = plan_resume(config.resume, config.init_from, NO_CHECKPOINTS, restarted={})
    assert (plan.resume_candidates or plan.init_candidates) == (Location(url),)


def test_storage_moves_a_run_to_an_empty_machine(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save on a machine, continue on another, fail in a save there, start anew on a third."""
    metrics, tracker = Path("runs/test/metrics.jsonl"), Path("runs/test/tracker_id")

    def first(world: World) -> str:
        with machine(world, storage, tmp_path / "1") as (checkpointer, _):
            metrics.write_text("1\n")
            tracker.write_text("id")
            uuid = save_toy(checkpointer, world, 1)
            metrics.write_text("1\n2\n")  # put at the end
            return uuid

    def second(world: World) -> list[str]:
        with machine(world, storage, tmp_path / "2", keep=1) as (checkpointer, place):
            assert (metrics.read_text(), tracker.read_text()) == ("1\n2\n", "id")
            assert load(checkpointer, world, place.locate(uuid)) == (1, True)
            with monkeypatch.context() as patch:
                patch.setattr(place, "commit", fail)
                with pytest.raises(RunError):
                    save_toy(checkpointer, world, 2)
            saved, incomplete = place.list_saved()
            assert ([entry.name for entry in saved], len(incomplete)) == ([uuid], 1)
            newer = save_toy(checkpointer, world, 3)
            assert list(place.folders()) == [newer]  # neither the expired nor the abandoned one
            return [newer]

    def fail(_path: Path, name: str) -> None:
        raise RunError(name)

    def third(world: World) -> None:
        with machine(world, storage, tmp_path / "3") as (checkpointer, place):
            if storage.startswith("az:"):  # whose copies may end later
                with pytest.raises(ConfigError, match="choose another run_name"):
                    begin_run(place.places, RunState(), fresh=True)
                return
            begin_run(place.places, RunState(), fresh=True)
            assert not place.list_saved()[0]
            assert not place.was_committed()
            (aside,) = {
                path.partition("/")[0]
                for path in place.bucket.sizes()
                if path.startswith("before-")
            }
            moved = Location(f"{place.bucket.url}/{aside}/checkpoints/{newest[0]}")
            assert load(checkpointer, world, moved) == (3, True)

    uuid = in_world(first)
    newest = in_world(second)
    in_world(third)


def test_storage_has_the_metrics_after_an_error(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 600)

    def diverge(world: World) -> None:
        with machine(world, s3, tmp_path / "1"):
            Path("runs/test/metrics.jsonl").write_text("1\n")
            raise RunError("diverged")

    with pytest.raises(RunError, match="diverged"):
        in_world(diverge)
    started = time.monotonic()
    (tmp_path / "2").mkdir()
    place = BucketCheckpoints(f"{s3}/test", tmp_path / "2")
    place.acquire()
    assert time.monotonic() - started < 300, "it waits for no lease"
    assert (tmp_path / "2" / "metrics.jsonl").read_text() == "1\n"
    place.release()


def kill(place: BucketCheckpoints) -> None:
    """Neither renew nor release the lease any more."""
    assert place._lease is not None
    place._lease._released.set()


@pytest.mark.slow
def test_lease_of_a_dead_run_is_replaced(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 12)  # renewed every 2
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    a, b, c = (BucketCheckpoints(f"{storage}/test", folder) for folder in folders)
    a.acquire()
    with pytest.raises(RunError, match=r"/test: in use by process .* since .*run_name"):
        b.acquire()  # which waits until it is renewed
    kill(a)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 300)
    again = BucketCheckpoints(f"{storage}/test", folders[0])
    started = time.monotonic()
    again.acquire()  # on the same machine, at once
    assert time.monotonic() - started < 150
    kill(again)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.2)
    b.acquire()  # on another, after the lease has run out
    for late in (a, again):
        with pytest.raises(RunError, match="in use by process"):
            late.commit(folders[0], "late")
    b.release()
    c.acquire()  # released: at once
    c.release()
    # A run on this disk, which would seem to be lost:
    complete = folders[2] / "checkpoints" / "1"
    complete.mkdir(parents=True)
    (complete / MANIFEST).touch()
    with pytest.raises(ConfigError, match=f"^{folders[2]}: .*run_name, with resume={folders[2]} "):
        c.acquire()


def test_location_in_a_bucket_can_be_sent_to_other_ranks(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.Bucket(f"{s3}/checkpoint").write(MANIFEST, b"")
    expiring = {"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "secret"}
    expiring |= {"SessionToken": "token", "Expiration": "2099-01-01T00:00:00Z"}
    (tmp_path / "credentials.json").write_text(json.dumps(expiring))
    process = f"credential_process = cat {tmp_path / 'credentials.json'}\n"
    (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\n{process}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    location = locate_checkpoint(f"{s3}/checkpoint")
    assert pickle.loads(pickle.dumps(location)) == location


def test_reports_of_many_steps_are_downloaded(s3: str, tmp_path: Path) -> None:
    place = BucketCheckpoints(f"{s3}/test", tmp_path)
    place.bucket.write("metrics.jsonl", b"1\n" * MAX_JSON_BYTES)
    place.acquire()
    assert (tmp_path / "metrics.jsonl").stat().st_size == 2 * MAX_JSON_BYTES
    place.release()


def test_start_in_a_bucket_is_recorded_before_its_weights_are_loaded(
    s3: str, tmp_path: Path
) -> None:
    place = BucketCheckpoints(f"{s3}/test", tmp_path)
    place.acquire()
    record_early(place.places, RunState(init_from="pretrained"))
    assert read_state([bucket.Bucket(f"{s3}/test")]).init_from == "pretrained"
    place.bucket.write("metrics.jsonl", b"")
    record_early(
        place.places, RunState(init_from="another")
    )  # whose start would move that file aside first
    assert read_state([bucket.Bucket(f"{s3}/test")]).init_from == "pretrained"
    place.release()


def test_run_under_another_url_is_refused(s3: str, tmp_path: Path) -> None:
    """Its working copy says that it has saved."""
    write_state([Directory(tmp_path)], RunState(has_saved=True))
    with pytest.raises(ConfigError, match="another checkpoint_storage"):
        plan_resume("auto", None, BucketCheckpoints(f"{s3}/other", tmp_path), restarted={})


def test_lease_that_is_none_is_replaced_at_once(s3: str, tmp_path: Path) -> None:
    no_leases = [
        b"5",
        b"[]",
        b'{"holder": 5, "token": "a"}',
        b'{"holder": "x", "token": {}}',
        b'{"holder": "x", "time": "now"}',
        b"[" * 100_000,
        b"\xff",
        b'{"holder": "%b", "token": "a"}' % (b"x" * 5_000_000),
    ]
    started = time.monotonic()
    for number, content in enumerate(no_leases):
        place = BucketCheckpoints(f"{s3}/{number}", tmp_path)
        place.bucket.write("lease/000007", content)
        place.acquire()
        assert list(place.bucket.sizes("lease")) == ["000008"]
        place.release()
    assert time.monotonic() - started < 120, "each would wait for a lease"


def test_file_is_created_by_one_only(storage: str) -> None:
    place = bucket.Bucket(storage)
    place.create("lease", b"first")
    with pytest.raises(FileExistsError):
        place.create("lease", b"second")
    assert place.read("lease") == b"first"


def test_lease_goes_to_one_of_many_that_start_at_once(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.2)
    holders: list[BucketCheckpoints] = []

    def compete(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        place = BucketCheckpoints(f"{s3}/test", folder)
        try:
            place.acquire()
            holders.append(place)
        except RunError:
            pass

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = holders
    holder.release()


@pytest.fixture
def proxy(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:  # noqa: ARG001
    server = Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(bucket, "REQUEST_SECONDS", 2)
    yield server
    server.shutdown()
    server.server_close()


def test_storage_with_a_private_certificate(
    s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -noenc -keyout key.pem -out cert.pem -days 2"
        " -subj /CN=test -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE",
        shell=True,
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{proxy.server_address[1]}")
    stranger = bucket.Bucket(s3)
    stranger.retry_for(0)
    with pytest.raises(RunError, match="list failed"):
        stranger.sizes()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "cert.pem"))
    assert bucket.Bucket(s3).sizes() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "times"), [((503, "SlowDown"), 3), ("stall", 1)], ids=["503", "stall"]
)
def test_storage_that_fails_for_a_while_costs_only_time(
    fault: Any, times: int, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    place = BucketCheckpoints(f"{s3}/test", tmp_path)
    place.bucket.retry_for(30)
    requests = itertools.count()
    proxy.fault = lambda *_: fault if next(requests) < times else None
    place.acquire()
    place.release()
    assert next(requests) > times


@dataclass
class Outage:
    """A storage that fails until a run has reported twice more, and two requests at least."""

    kind: Any
    n_reports: int
    """when it began"""
    n_failed: int = 0
    is_over: bool = False

    def fail(self, n_reports: int) -> Any:
        """Return what a request meets."""
        self.is_over = self.is_over or (self.n_failed >= 2 and n_reports >= self.n_reports + 2)
        if self.is_over:
            return None
        self.n_failed += 1
        return self.kind


WAIT_FOR_OUTAGES = """
import time
from lm.data.loader import Loader
from lm.storage import bucket

bucket.REQUEST_SECONDS = 1.0
training = Loader.training

def wait_for_outages(self, start):
    for step, batch in enumerate(training(self, start), start):
        while step in (4, 8, 12) and not os.path.exists(f"outage-{step}"):
            time.sleep(0.01)
        yield batch

Loader.training = wait_for_outages
"""


@pytest.mark.slow
def test_storage_failure_during_a_save_stalls_no_training(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    hp = EXACT_RUN | {"max_steps": 16, "checkpoint_rate": 4}
    run_fsdp(tmp_path / "disk", config=hp, code=0)
    kinds = ["stall", (500, "InternalError"), "away"]
    outages: list[Outage] = []
    seen: set[str] = set()
    metrics = tmp_path / "s3" / "runs" / "test" / "metrics.jsonl"

    def fail(method: str, path: str) -> Any:
        """Fail from each checkpoint's second file on, until training has gone on meanwhile."""
        n_reports = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if method == "PUT" and "/optim-" in path and path not in seen and kinds:
            outages.append(Outage(kinds.pop(), n_reports))
            seen.add(path)
            (tmp_path / "s3" / f"outage-{4 * len(outages)}").touch()
        return outages[-1].fail(n_reports) if outages else None

    proxy.fault = fail
    run_fsdp(
        tmp_path / "s3", f"checkpoint_storage={s3}", config=hp, script=WAIT_FOR_OUTAGES, code=0
    )
    assert read_exact_metrics(tmp_path / "s3") == read_exact_metrics(tmp_path / "disk")
    assert not kinds
    assert all(outage.is_over for outage in outages), "training waited"
    (last, *_) = reversed(BucketCheckpoints(f"{s3}/test").list_saved()[0])
    there = Location(f"{s3}/test/checkpoints/{last.name}").read_manifest()
    assert there.files == read_manifest(checkpoints_by_step(tmp_path / "disk")[16]).files


def test_storage_download_failure_uploads_no_older_metrics(
    s3: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(path: Path, content: bytes) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def start_again(world: World) -> None:
        with machine(world, s3, tmp_path / "1") as (checkpointer, place):
            Path("runs/test/metrics.jsonl").write_text("newer\n")
            save_toy(checkpointer, world, 1)
        stale = tmp_path / "2" / "runs" / "test" / "metrics.jsonl"
        stale.parent.mkdir(parents=True)
        stale.write_text("older\n")
        monkeypatch.setattr("lm.checkpoint.object_storage.write_durably", fail)
        with pytest.raises(ConfigError, match="No space left"), machine(world, s3, tmp_path / "2"):
            pass
        assert place.bucket.read("metrics.jsonl") == b"newer\n"

    in_world(start_again)


@pytest.mark.slow
def test_storage_away_for_too_long_names_the_kept_checkpoint(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    def lose_server(world: World) -> None:
        with machine(world, s3, tmp_path / "1") as (checkpointer, place):
            kept = save_toy(checkpointer, world, 1)
            place.bucket.retry_for(2)
            proxy.fault = lambda method, _: (500, "InternalError") if method == "PUT" else None
            with pytest.raises(RunError) as failed:
                save_toy(checkpointer, world, 2)
            proxy.fault = lambda *_: None
            assert re.search(
                f"InternalError.* for 2 s; .*checkpoint {kept} is kept", str(failed.value)
            )
            assert [entry.name for entry in place.list_saved()[0]] == [kept]

    in_world(lose_server)


DENIED = "s3://bucket/runs/test: access denied"
REFUSED: dict[str, tuple[str, dict[str, str], Any, str]] = {
    "scheme": ("azure://bucket/runs", {}, None, "azure://.* s3://BUCKET/PREFIX"),
    "path": ("/data/runs", {}, None, ".* s3://BUCKET/PREFIX"),
    "password": ("s3://key:secret@bucket/runs", {}, None, "s3://.* s3://BUCKET/PREFIX"),
    "account": (
        "az://bucket/runs",
        {},
        None,
        "az://bucket/runs/test: access denied .*AZURE_STORAGE_ACCOUNT_NAME",
    ),
    "bucket": (
        "s3://no-such-bucket/runs",
        {},
        None,
        "s3://no-such-bucket/runs/test: .*create the bucket",
    ),
    "no credentials": (
        "s3://bucket/runs",
        {"AWS_ACCESS_KEY_ID": ""},
        None,
        f"{DENIED} .*no credentials",
    ),
    "expired": ("s3://bucket/runs", {}, (403, "ExpiredToken"), f"{DENIED} .*ExpiredToken"),
    "not writable": ("s3://bucket/runs", {}, (403, "AccessDenied"), f"{DENIED} .*AccessDenied"),
    "disk": ("s3://bucket/runs", {}, None, "runs/test/lease: Is a directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_storage_that_cannot_be_used_is_one_line(
    case: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, variables, fault, part = REFUSED[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if case == "disk":
        (tmp_path / "runs" / "test" / "lease").mkdir(parents=True)  # in place of the file
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    proxy.fault = lambda method, _: fault if method == "PUT" or case == "expired" else None

    def start(world: World) -> None:
        with machine(world, url, tmp_path):
            pass

    with pytest.raises(ConfigError) as refused:
        in_world(start)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)
    assert re.match(part, str(refused.value))


def test_checkpoint_storage_url_that_is_mistyped(
    s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typo = f"{s3}/typo"
    for key, url, part in (
        ("resume", typo, f"{typo}: neither a checkpoint"),
        ("init_from", typo, f"{typo}: neither a checkpoint"),
        ("init_from", "s3://a b", "s3://.* s3://BUCKET/PREFIX"),
    ):
        config = CheckpointConfig.model_validate({key: url})
        with pytest.raises(ConfigError, match=f"^{key}: {part}"):
            plan_resume(config.resume, config.init_from, NO_CHECKPOINTS, restarted={})
    assert command.main(["list", typo]) == 2
    assert capsys.readouterr().err.startswith(f"{typo}: neither a checkpoint")


@pytest.mark.slow
def test_init_from_skips_a_checkpoint_deleted_meanwhile(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    def resume_meanwhile(world: World) -> None:
        with machine(world, s3, tmp_path) as (checkpointer, place):
            older, newer = (place.locate(save_toy(checkpointer, world, step)) for step in (1, 2))
            for gone in ("/model-", "/manifest.json"):
                proxy.fault = lambda method, path, gone=gone: (
                    (404, "NoSuchKey") if method == "GET" and newer.name + gone in path else None
                )
                model, log = toy_model(-1), list[str]()
                plan = ResumePlan(init_candidates=(newer, older))
                state = {"model": model.state_dict(), "scaler": {}}
                load_checkpoint(plan, checkpointer, state, RUN_INFO, log.append)
                assert all(bool((parameter == 1).all()) for parameter in model.parameters())
                assert log[0].startswith(f"skipping {newer}: ")
            found = BucketCheckpoints(place.bucket.url)  # of another run that resumes from this one
            assert [found.locate(entry.name) for entry in found.list_saved()[0]] == [older]
            proxy.fault = lambda *_: None

    in_world(resume_meanwhile)


@pytest.mark.slow
def test_lease_wait_may_exceed_the_collective_timeout(s3: str, tmp_path: Path) -> None:
    dead = BucketCheckpoints(f"{s3}/test", tmp_path)
    dead.acquire()
    kill(dead)
    script = "from lm.storage import lease\nlease.LEASE_SECONDS = 10.0"
    overrides = (f"checkpoint_storage={s3}", "collective_timeout=8", "max_steps=1")
    run_fsdp(tmp_path, *overrides, ranks=2, script=script, code=0)


@pytest.mark.slow
def test_gs_denied_access_is_one_line(gs: str, gs_proxy: Proxy, tmp_path: Path) -> None:
    for status in (401, 403):
        gs_proxy.fault = lambda *_, status=status: (status, "no")
        with pytest.raises(ConfigError, match="access denied"):
            BucketCheckpoints(f"{gs}/test", tmp_path).acquire()


@pytest.mark.slow
def test_az_errors_say_what_is_wrong(
    az: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="create the bucket"):
        BucketCheckpoints("az://no-such-container/test", tmp_path).acquire()
    for wrong in ("b3RoZXI=", ""):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
        with pytest.raises(ConfigError, match="access denied"):
            BucketCheckpoints(f"{az}/test", tmp_path).acquire()


def test_checkpoint_storage_on_a_cluster_is_the_platforms() -> None:
    hp = read_hyperparameters(
        {"hyperparameters": TINY | {"checkpoint_storage": "s3://bucket"}}, [], "test"
    )
    nothing: Any = None
    cluster: Any = object()
    with pytest.raises(
        ConfigError, match=r"^checkpoint_storage: .*top level of the experiment config"
    ):
        preflight(Job(hp, cluster, None), None, nothing, nothing)


@pytest.mark.slow
def test_soak_on_changing_machines(s3: str, tmp_path: Path) -> None:
    lost = soak(tmp_path, 3, seed=2, ranks=1, storage=s3, in_operations=False)
    assert sum(map(len, lost.values())) == 3


@pytest.mark.parametrize(
    ("scheme", "name"), [("s3", "AWS_ENDPOINT_URL"), ("gs", "GOOGLE_BASE_URL")]
)
def test_endpoint_that_is_no_url_is_refused(
    scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for credential in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(credential, "a")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv(name, "a")
    with pytest.raises(ConfigError, match=name):
        bucket.Bucket(f"{scheme}://bucket/run").read("state.json")
