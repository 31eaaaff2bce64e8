"""A run in object storage is as safe as one on a disk, and needs nothing of the machines that made it.

The servers are moto for S3, gcp-storage-emulator for Google's storage, Microsoft's Azurite for Azure's. A proxy in
front of moto fails on request.
"""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import fsspec
import pytest
from determined import core
from fsspec.registry import _registry
from torch.distributed.fsdp import fully_shard

from lm import config
from lm.checkpoint import __main__ as command
from lm.checkpoint import bucket, object_storage
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.manifest import CheckpointError, read_manifest, verify
from lm.checkpoint.object_storage import ObjectStorage, stored
from lm.checkpoint.resume import ResumePlan, find_checkpoint, plan_resume, resume
from lm.checkpoint.retention import COMMITTED
from lm.determined.context import TorchDistributedContext
from lm.errors import ConfigError, RunError
from lm.launch.spawn import free_port
from lm.preflight import preflight
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from tests.conftest import Message
from tests.soak import soak
from tests.support import EXACT_RUN, TINY, checkpoints, exact, in_world, reports, run, run_ranks
from tests.test_manifest import RUN_INFO, SHARDS, opened, save, toy

pytest.importorskip("s3fs", reason="needs s3fs")
pytest.importorskip("moto.server", reason="needs moto's server")
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Python version:FutureWarning")

UUID = r"[0-9a-f]{8}-[0-9a-f-]{27}"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
ISOLATED = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "none", "AWS_SHARED_CREDENTIALS_FILE": "none"}


@contextmanager
def serving(*command: str, port: int, **env: str) -> Iterator[str]:
    """The address of a server in a separate process."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=os.environ | env, stdout=quiet, stderr=quiet)
    try:
        for _ in range(200):
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                    connection.request("GET", "/")
                    connection.getresponse()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    port = free_port()
    with serving(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port) as address:
        yield address


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL below which nothing is stored yet."""
    for name, value in (CREDENTIALS | ISOLATED | {"AWS_ENDPOINT_URL": s3_server}).items():
        monkeypatch.setenv(name, value)
    fresh_sessions()
    fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture(scope="module")
def gs_server() -> Iterator[str]:
    for package in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(package, reason="needs gcsfs and gcp-storage-emulator")
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import create_server

    upload = objects._multipart_upload

    def upload_on_condition(request: Any, response: Any, storage: Any) -> None:
        """Respect `ifGenerationMatch=0`, as Google documents it; the emulator ignores it."""
        try:
            storage.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
            exists = True
        except NotFound:
            exists = False
        if exists and request.query.get("ifGenerationMatch") == ["0"]:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            upload(request, response, storage)

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_multipart_upload", upload_on_condition)
        with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture
def gs(gs_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gs_server)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    fresh_sessions()
    return f"gs://bucket/{tmp_path.name}"


@pytest.fixture(scope="module")
def az_server() -> Iterator[str]:
    pytest.importorskip("adlfs", reason="needs adlfs")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("needs azurite: npm install --global azurite")
    port = free_port()
    options = ("--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck")
    with serving(azurite, *options, f"--blobPort={port}", port=port, AZURITE_ACCOUNTS="account:a2V5") as address:
        yield address


@pytest.fixture
def az(az_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    connection = f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey=a2V5;BlobEndpoint={az_server}/account;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    fresh_sessions()
    with suppress(FileExistsError):
        fsspec.filesystem("az").mkdir("bucket")
    return f"az://bucket/{tmp_path.name}"


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.slow), pytest.param("az", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def fresh_sessions() -> None:
    """Forget the file systems of other servers and credentials, which fsspec keeps."""
    for scheme in bucket.PACKAGES:
        with suppress(ImportError):
            fsspec.get_filesystem_class(scheme).clear_instance_cache()


@contextmanager
def machine(world: World, url: str, folder: Path, keep: int | None = 2) -> Iterator[tuple[Checkpointer, ObjectStorage]]:
    """The run "test" under `url` on a machine with the working directory `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)
    tempfile.tempdir = str(folder)
    try:
        with chdir(folder):
            run_dir = RunDir("test", url)
            run_dir.lock(world)
            distributed = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
            with (
                ExitStack() as after_error,
                core.init(distributed=distributed) as context,
                stored(run_dir, context, world, after_error),
            ):
                place = context.checkpoint._storage_manager
                assert isinstance(place, ObjectStorage)
                world.on_rank0(lambda: place.start(run_dir.path))
                config = CheckpointConfig.model_validate({"keep_checkpoints": keep})
                yield Checkpointer(config, context.checkpoint, world, run_dir.checkpoints, {}), place
    finally:
        tempfile.tempdir = None
        os.umask(mask)


def load(checkpointer: Checkpointer, world: World, checkpoint: str) -> tuple[int, bool]:
    """The step of the checkpoint at a path or URL, and whether the loaded model is the one that was saved."""
    model = toy(-1)
    fully_shard(model, mesh=world.device_mesh({"shard": world.size}))
    step = checkpointer.load(checkpoint, lambda _: {"model": model.state_dict()}).step
    return step, all(bool((parameter.to_local() == step).all()) for parameter in model.parameters())  # type: ignore[attr-defined]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def damage(place: ObjectStorage, uuid: str, name: str) -> None:
    path = f"checkpoints/{uuid}/{name}"
    content = place.bucket.call("cat_file", path)
    place.bucket.call("pipe_file", path, content[:-1] + bytes([content[-1] ^ 1]))


def flip_last_bit(checkpoint: Path) -> Path:
    path = checkpoint / SHARDS[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return checkpoint


def use_two_machines(world: World, url: str, root: Path) -> dict[str, Any]:
    folder = root / f"machine-{world.rank}"
    with machine(world, url, folder) as (checkpointer, place):
        (folder / "runs" / "test" / "metrics.jsonl").write_text("1\n")
        uuids = [save(checkpointer, world, step, loss=loss) for step, loss in enumerate([3.0, 1.0, 4.0, 5.0], start=1)]
        left = [name for name in files_in(folder) if "safetensors" in name]
        saved = [entry.name for entry in place.list_saved()[0]]
        found = load(checkpointer, world, place.locate(uuids[3]))
        world.on_rank0(lambda: damage(place, uuids[3], SHARDS[1]))
        with pytest.raises(CheckpointError) as refused:
            load(checkpointer, world, place.locate(uuids[3]))
        again = load(checkpointer, world, place.locate(uuids[2]))
    errors = [str(refused.value)]
    if world.rank == 1:  # damage its download of the file that rank 0 verifies on a shared disk
        fetch = ObjectStorage.fetch_checkpoint
        ObjectStorage.fetch_checkpoint = lambda self, directory: flip_last_bit(fetch(self, directory))
    (root / "shared").mkdir(exist_ok=True)
    with opened(world, root / "shared") as on_disk, pytest.raises(CheckpointError) as refused:
        load(on_disk, world, place.locate(uuids[2]))
    errors.append(str(refused.value))
    return {"uuids": uuids, "left": left, "saved": saved, "loaded": [found, again], "errors": errors}


@pytest.mark.slow
def test_machines_that_share_no_disk_save_load_and_refuse_damage_together(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    url = f"{s3}/test"
    first, second = run_ranks(2, use_two_machines, s3, tmp_path, nodes=2)
    for rank in (first, second):
        assert rank["uuids"] == first["uuids"]
        assert rank["left"] == []
        assert rank["saved"] == rank["uuids"][1:]  # the newest two and the best
        assert rank["loaded"] == [(4, True), (3, True)]
        for error, uuid, name in zip(rank["errors"], (rank["uuids"][3], rank["uuids"][2]), SHARDS[::-1], strict=True):
            assert error.startswith(f"{url}/checkpoints/{uuid}/{name}: damaged")
    # From elsewhere, without a lease.
    assert command.main(["list", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == first["uuids"][1:]
    assert lines[0].endswith("best")
    third = f"{url}/checkpoints/{first['uuids'][2]}"
    assert command.main(["verify", third]) == 0
    assert command.main(["verify", url]) == CheckpointError.exit_code  # the newest is damaged
    assert capsys.readouterr().err.startswith(f"{url}/checkpoints/{first['uuids'][3]}/{SHARDS[1]}: damaged")
    folder = find_checkpoint(third)
    verify(folder, read_manifest(folder))
    for key in ("resume", "init_from"):
        plan = plan_resume(CheckpointConfig.model_validate({key: third}), None, None, restarted=False)
        assert (plan.resume_candidates or plan.init_candidates) == (third,)


def test_the_run_moves_to_an_empty_machine_with_its_metrics(storage: str, tmp_path: Path) -> None:
    """Save on one machine, continue on another, be killed in a save there, start anew on a third."""
    metrics, tracker = Path("runs/test/metrics.jsonl"), Path("runs/test/tracker_id")

    def first(world: World) -> str:
        with machine(world, storage, tmp_path / "1") as (checkpointer, _):
            metrics.write_text("1\n")
            tracker.write_text("id")
            uuid = save(checkpointer, world, 1)
            metrics.write_text("1\n2\n")  # put at the end
            return uuid

    def second(world: World) -> list[str]:
        with machine(world, storage, tmp_path / "2", keep=1) as (checkpointer, place):
            assert (metrics.read_text(), tracker.read_text()) == ("1\n2\n", "id")
            assert load(checkpointer, world, place.locate(uuid)) == (1, True)
            commit, place.commit = place.commit, fail
            with pytest.raises(RunError):
                save(checkpointer, world, 2)
            place.commit = commit
            saved, incomplete = place.list_saved()
            assert ([entry.name for entry in saved], len(incomplete)) == ([uuid], 1)
            newer = save(checkpointer, world, 3)
            assert list(place.checkpoints()) == [newer]  # neither the expired nor the abandoned one
            return [newer]

    def fail(name: str) -> None:
        raise RunError(name)

    def third(world: World) -> None:
        with machine(world, storage, tmp_path / "3") as (checkpointer, place):
            if storage.startswith("az:"):  # whose copies may end later
                with pytest.raises(ConfigError, match="choose another run_name"):
                    checkpointer.move_aside()
                return
            checkpointer.move_aside()
            assert not place.list_saved()[0]
            assert not place.was_committed()
            (aside,) = {path.partition("/")[0] for path in place.bucket.sizes() if path.startswith("before-")}
            moved = f"{place.url}/{aside}/checkpoints/{newest[0]}"
            assert load(checkpointer, world, moved) == (3, True)

    uuid = in_world(first)
    newest = in_world(second)
    in_world(third)


def test_after_an_error_the_metrics_are_stored_and_any_machine_resumes_at_once(s3: str, tmp_path: Path) -> None:
    def diverge(world: World) -> None:
        with machine(world, s3, tmp_path / "1"):
            Path("runs/test/metrics.jsonl").write_text("1\n")
            raise RunError("diverged")

    with pytest.raises(RunError, match="diverged"):
        in_world(diverge)
    started = time.monotonic()
    (tmp_path / "2").mkdir()
    place = ObjectStorage(f"{s3}/test")
    place.start(tmp_path / "2")
    assert time.monotonic() - started < 5
    assert (tmp_path / "2" / "metrics.jsonl").read_text() == "1\n"
    place.close()


def test_one_run_at_a_time_writes_and_a_dead_one_is_replaced(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    monkeypatch.setattr(object_storage, "LEASE_SECONDS", 1.2)
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    a, b, c = (ObjectStorage(f"{storage}/test") for _ in range(3))
    a.start(folders[0])
    with pytest.raises(RunError) as refused:
        b.start(folders[1])
    message(refused.value, mask=r"process .*? since [-\d]+ [:\d]+|\w+://[^:]*/test")
    a._closed.set()  # as if killed: nothing is renewed nor released
    again = ObjectStorage(f"{storage}/test")
    started = time.monotonic()
    again.start(folders[0])  # on the same machine, at once
    assert time.monotonic() - started < 1
    again._closed.set()
    b.start(folders[1])  # on another, after the lease has run out
    for late in (a.require_lease, lambda: again.commit("late")):
        with pytest.raises(RunError, match="in use by process"):
            late()
    b.close()
    c.start(folders[2])  # released: at once
    c.close()
    (folders[2] / "checkpoints").mkdir()
    (folders[2] / "checkpoints" / COMMITTED).touch()  # a run on this disk, which would seem to be lost
    with pytest.raises(ConfigError) as refused:
        c.start(folders[2])
    message(refused.value)


def test_of_many_that_start_at_once_one_gets_the_lease(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "LEASE_SECONDS", 1.2)
    holders: list[ObjectStorage] = []

    def compete(number: int) -> None:
        place, folder = ObjectStorage(f"{s3}/test"), tmp_path / str(number)
        folder.mkdir()
        try:
            place.start(folder)
            holders.append(place)
        except RunError:
            pass

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = holders
    holder.close()


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests to `address`, or treats them as `fault` says: a status and a code, "stall", or "away"."""

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
                        content = f"<Error><Code>{text}</Code><Message>{text}</Message></Error>".encode()
                        headers = {"Content-Length": str(len(content))}
                    case str(fault):
                        handler.close_connection = True
                        time.sleep(5 if fault == "stall" else 0)
                        return
                    case _:
                        with closing(http.client.HTTPConnection(host, timeout=20)) as connection:
                            connection.request(handler.command, handler.path, body, dict(handler.headers))
                            response = connection.getresponse()
                            content = response.read()
                        handler.send_response(response.status)
                        headers = {k: v for k, v in response.getheaders() if k.lower() not in ("connection", "server")}
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
def proxy(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:  # noqa: ARG001
    server = Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    settings = {"connect_timeout": 1, "read_timeout": 1, "retries": {"total_max_attempts": 1}}
    monkeypatch.setitem(bucket._OPTIONS, "s3", {"config_kwargs": settings})
    monkeypatch.setattr(bucket, "REQUEST_SECONDS", 2)
    fresh_sessions()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("fault", [(500, "InternalError"), (503, "SlowDown"), "stall"], ids=["500", "503", "stall"])
def test_a_server_that_fails_for_a_while_costs_nothing_but_time(
    fault: Any, s3: str, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ObjectStorage(f"{s3}/test")
    place.bucket.retry_seconds = 30
    until = time.monotonic() + 1.5
    proxy.fault = lambda *_: fault if time.monotonic() < until else None
    place.start(tmp_path)
    place.close()
    assert "retrying for" in capsys.readouterr().err or fault != (500, "InternalError")


@pytest.mark.slow
def test_training_continues_while_storage_fails_in_the_middle_of_a_save(s3: str, proxy: Proxy, tmp_path: Path) -> None:
    hp = EXACT_RUN | {"max_steps": 40, "checkpoint_rate": 10}
    assert run(tmp_path / "disk", config=hp).returncode == 0
    kinds: list[Any] = ["away", (500, "InternalError"), "stall"]
    outages: list[tuple[float, float, Any]] = []
    seen: set[str] = set()

    def fail(method: str, path: str) -> Any:
        """Fail for 2 s from each checkpoint's second file on, in another way each time."""
        if method == "PUT" and "/optim-" in path and path not in seen and kinds:
            seen.add(path)
            outages.append((time.time(), time.time() + 2, kinds.pop(0)))
        start, end, kind = outages[-1] if outages else (0.0, 0.0, None)
        return kind if start <= time.time() < end else None

    proxy.fault = fail
    script = "from lm.checkpoint import bucket\nbucket.REQUEST_SECONDS = 1.0"
    done = run(tmp_path / "s3", f"checkpoint_storage={s3}", config=hp, script=script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("retrying for") >= 2
    assert exact(tmp_path / "s3") == exact(tmp_path / "disk")
    times = [line["time"] for line in reports(tmp_path / "s3").values()]
    assert all(any(start < each < end for each in times) for start, end, _ in outages), "training waited"
    (last, *_) = reversed(ObjectStorage(f"{s3}/test").list_saved()[0])
    there = ObjectStorage(f"{s3}/test/checkpoints/{last.name}").read_manifest()
    assert there.files == read_manifest(checkpoints(tmp_path / "disk")[40]).files
    assert not kinds


@pytest.mark.slow
def test_a_server_away_for_too_long_ends_the_run_with_the_checkpoint_that_is_kept(
    s3: str, proxy: Proxy, tmp_path: Path, message: Message
) -> None:
    def lose_server(world: World) -> str:
        with machine(world, s3, tmp_path / "1") as (checkpointer, place):
            kept = save(checkpointer, world, 1)
            place.bucket.retry_seconds = 2
            proxy.fault = lambda method, _: (500, "InternalError") if method == "PUT" else None
            with pytest.raises(RunError) as failed:
                save(checkpointer, world, 2)
            proxy.fault = lambda *_: None
            assert kept in str(failed.value)
            assert [entry.name for entry in place.list_saved()[0]] == [kept]
            return str(failed.value)

    message(in_world(lose_server), mask=f"s3://[^:]*/test|{UUID}")


REFUSED: dict[str, tuple[str, dict[str, str], Any]] = {
    "scheme": ("azure://bucket/runs", {}, None),
    "path": ("/data/runs", {}, None),
    "password": ("s3://key:secret@bucket/runs", {}, None),
    "package": ("az://bucket/runs", {}, None),
    "bucket": ("s3://no-such-bucket/runs", {}, None),
    "no credentials": ("s3://bucket/runs", {"AWS_ACCESS_KEY_ID": ""}, None),
    "expired": ("s3://bucket/runs", {}, (403, "ExpiredToken")),
    "not writable": ("s3://bucket/runs", {}, (403, "AccessDenied")),
    "disk": ("s3://bucket/runs", {}, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_storage_that_cannot_be_used_is_one_line(
    case: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: Message
) -> None:
    url, variables, fault = REFUSED[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if case == "disk":
        (tmp_path / "runs" / "test" / "lease").mkdir(parents=True)  # in place of the file
    monkeypatch.setitem(sys.modules, "adlfs", None)
    monkeypatch.delitem(_registry, "az", raising=False)
    proxy.fault = lambda method, _: fault if method == "PUT" or case == "expired" else None

    def start(world: World) -> None:
        with machine(world, url, tmp_path):
            pass

    with pytest.raises(ConfigError) as refused:
        in_world(start)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)
    message(refused.value)


def test_a_mistyped_url_is_a_configuration_error(s3: str, message: Message, capsys: pytest.CaptureFixture[str]) -> None:
    for key, url in (("resume", f"{s3}/typo"), ("init_from", f"{s3}/typo"), ("init_from", "s3://a b")):
        with pytest.raises(ConfigError) as refused:
            plan_resume(CheckpointConfig.model_validate({key: url}), None, None, restarted=False)
        assert refused.value.keys == {key}
        message(refused.value, mask=s3)
    assert command.main(["list", f"{s3}/typo"]) == 2
    message(capsys.readouterr().err, mask=s3)


def test_a_checkpoint_that_its_run_deletes_during_the_download_is_skipped(
    s3: str, proxy: Proxy, tmp_path: Path, message: Message
) -> None:
    def resume_meanwhile(world: World) -> None:
        with machine(world, s3, tmp_path) as (checkpointer, place):
            older, newer = (place.locate(save(checkpointer, world, step)) for step in (1, 2))
            for gone in ("/model-", "/manifest.json"):
                proxy.fault = lambda method, path, gone=gone: (
                    (404, "NoSuchKey") if method == "GET" and newer[-36:] + gone in path else None
                )
                model, log = toy(-1), list[str]()
                plan = ResumePlan(init_candidates=(newer, older))
                resume(plan, checkpointer, {"model": model.state_dict()}, RUN_INFO, None, log.append)
                assert all(bool((parameter == 1).all()) for parameter in model.parameters())
                message(log[0], mask=f"{s3}|{UUID}")
            found = ObjectStorage(place.url)  # of another run that resumes from this one
            assert [found.locate(entry.name) for entry in found.list_saved()[0]] == [older]
            proxy.fault = lambda *_: None

    in_world(resume_meanwhile)


@pytest.mark.slow
def test_the_wait_for_a_dead_run_may_exceed_the_collective_timeout(s3: str, tmp_path: Path) -> None:
    dead = ObjectStorage(f"{s3}/test")
    dead.start(tmp_path)
    dead._closed.set()  # as if killed: nothing is renewed nor released
    script = "from lm.checkpoint import object_storage\nobject_storage.LEASE_SECONDS = 12.0"
    overrides = (f"checkpoint_storage={s3}", "collective_timeout=8", "max_steps=1")
    run(tmp_path, *overrides, ranks=2, script=script, code=0)


@pytest.mark.slow
def test_google_denies_access_in_one_line(
    gs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.server_address[1]}")
    fresh_sessions()
    for status in (401, 403):
        proxy.fault = lambda *_, status=status: (status, "no")
        with pytest.raises(ConfigError, match="access denied"):
            ObjectStorage(f"{gs}/test").start(tmp_path)
    assert not [record for record in caplog.records if record.name == "gcsfs"], "it logs tracebacks"
    proxy.shutdown()
    proxy.server_close()


@pytest.mark.slow
def test_azure_says_what_is_wrong(az: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create the bucket"):
        ObjectStorage("az://no-such-container/test").start(tmp_path)
    connection = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    for wrong in (connection.replace("a2V5", "b3RoZXI="), ""):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", wrong)
        fresh_sessions()
        with pytest.raises(ConfigError, match="access denied"):
            ObjectStorage(f"{az}/test").start(tmp_path)


def test_on_a_cluster_the_platforms_storage_is_the_one(message: Message) -> None:
    hp = config.read({"hyperparameters": TINY | {"checkpoint_storage": "s3://bucket"}}, [], "test")
    nothing: Any = None
    cluster: Any = object()
    with pytest.raises(ConfigError) as refused:
        preflight(hp, nothing, cluster, nothing, nothing)
    assert refused.value.keys == {"checkpoint_storage"}
    message(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_a_run_says_what_is_wrong_with_its_storage_and_ends_with_2(tmp_path: Path) -> None:
    done = run(tmp_path, "checkpoint_storage=s3://no-such-bucket", config=TINY)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "secret" not in (tmp_path / "test.yaml").read_text() + done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_killed_three_times_on_changing_machines_equals_an_uninterrupted_one(s3: str, tmp_path: Path) -> None:
    lost = soak(tmp_path, 3, seed=2, ranks=1, storage=s3)
    assert sum(map(len, lost.values())) == 3
