"""On object storage a checkpoint is reported once it is complete, and every machine verifies its own download.

The storage is moto's S3 server, through Determined's S3StorageManager.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from determined import core
from determined.common import storage
from torch.distributed.fsdp import fully_shard

from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.manifest import CheckpointError
from lm.determined.context import TorchDistributedContext
from lm.launch.environment import Launch
from lm.launch.spawn import free_port
from lm.runtime.world import World, join_world
from tests.test_manifest import SHARDS, save, toy

moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")

BUCKET = "checkpoints"
FILES = ["manifest.json", "metadata.json", *SHARDS]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of a local S3 server."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Reporting(core.DummyCheckpointContext):
    """Records what the storage contains at the moment a checkpoint is reported to the master."""

    reported: list[tuple[str, list[str], dict[str, Any]]]

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:  # noqa: ARG002
        self.reported.append((storage_id, objects(self._storage_manager, storage_id), metadata))


def objects(manager: storage.StorageManager, storage_id: str) -> list[str]:
    assert isinstance(manager, storage.S3StorageManager)
    return sorted(item.key.partition("/")[2] for item in manager.bucket.objects.filter(Prefix=storage_id))


class Machine(storage.S3StorageManager):
    """Storage access of one machine, which damages the last byte of the file `damages` on download."""

    damages: str | None = None

    def download(self, src: str, dst: str | os.PathLike[str], selector: storage.Selector | None = None) -> None:
        super().download(src, dst, selector)
        if self.damages:
            path = Path(dst) / self.damages
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def _enter(rank: int, port: int, endpoint: str, folder: Path, action: Callable[..., Any], results: Any) -> None:
    """Act as one of two machines, which share only the network and the storage."""
    torch.set_num_threads(1)
    os.umask(0o077)
    local = folder / f"machine-{rank}"
    local.mkdir(parents=True)
    os.environ |= {"TMPDIR": str(local), "AWS_DEFAULT_REGION": "us-east-1", "GLOO_SOCKET_IFNAME": "lo"}
    tempfile.tempdir = None
    manager = Machine(BUCKET, "key", "secret", endpoint, temp_dir=str(local))
    launch = Launch(rank, 2, local_rank=0, local_size=1, node_rank=rank, address="127.0.0.1", port=port)
    with join_world(launch, timeout=60) as world:
        world.on_rank0(lambda: manager.bucket.create() and None)
        distributed = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
        context = Reporting(distributed, manager)
        context.reported = []
        config = CheckpointConfig.model_validate({"keep_checkpoints": 2})
        checkpointer = Checkpointer(config, context, world, None, {}, distributed.use_saver_group)
        results.put((rank, action(world, checkpointer, context, local)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as fsdp.py ends: a thread may still be writing


def on_two_machines(endpoint: str, folder: Path, action: Callable[..., Any]) -> list[Any]:
    """What `action(world, checkpointer, context, local)` returns on each of two machines of one rank."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_enter, (free_port(), endpoint, folder, action, results), nprocs=2)  # type: ignore[attr-defined]
    return [value for _, value in sorted(results.get() for _ in range(2))]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def save_and_load(world: World, checkpointer: Checkpointer, context: Reporting, local: Path) -> dict[str, Any]:
    uuid = save(checkpointer, world, 3)
    left_by_save = files_in(local)
    model = toy(-1)
    fully_shard(model, mesh=world.device_mesh({"shard": world.size}))
    manifest = checkpointer.load(uuid, lambda _: {"model": model})
    shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return {
        "uuid": uuid,
        "reported": context.reported,
        "step": manifest.step,
        "sizes": [len(shard) for shard in shards],
        "equal": all(bool((shard == 3).all()) for shard in shards),
        "left": [left_by_save, files_in(local)],
    }


@pytest.mark.slow
def test_a_checkpoint_is_reported_once_complete_and_loads_on_every_machine(endpoint: str, tmp_path: Path) -> None:
    first, second = on_two_machines(endpoint, tmp_path, save_and_load)
    assert first["reported"] == [(first["uuid"], FILES, {"steps_completed": 3})]
    assert second["reported"] == []
    for rank in (first, second):
        assert rank["uuid"] == first["uuid"]
        assert (rank["step"], rank["sizes"], rank["equal"]) == (3, [3, 3], True)
        assert rank["left"] == [[], []]


def damage_each_download(
    world: World, checkpointer: Checkpointer, context: Reporting, _local: Path
) -> list[tuple[int, str, str]]:
    """The errors of loading when the download of a file is damaged on one machine."""
    uuid = save(checkpointer, world, 3)
    manager, errors = context._storage_manager, []
    assert isinstance(manager, Machine)
    for victim in range(2):
        for name in SHARDS:
            manager.damages = name if world.rank == victim else None
            model = toy(-1)
            fully_shard(model, mesh=world.device_mesh({"shard": world.size}))
            with pytest.raises(CheckpointError) as refused:
                checkpointer.load(uuid, lambda _, model=model: {"model": model})
            errors.append((victim, name, str(refused.value)))
    return errors


@pytest.mark.slow
def test_every_machine_verifies_its_download_and_all_ranks_refuse_together(endpoint: str, tmp_path: Path) -> None:
    for errors in on_two_machines(endpoint, tmp_path, damage_each_download):
        assert len(errors) == 4
        for victim, name, error in errors:
            assert error.startswith(f"{tmp_path}/machine-{victim}/")
            assert f"/{name}: damaged" in error


def fail_on_one(world: World, checkpointer: Checkpointer, context: Reporting, _local: Path) -> tuple[str, float]:
    """The error on each rank when one has no write access to the storage, and the seconds until then."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no write access to the bucket")

    if world.rank == 1:
        context._storage_manager.upload = refuse
    started = time.monotonic()
    with pytest.raises(Exception, match="no write access") as refused:
        save(checkpointer, world, 3)
    return str(refused.value), time.monotonic() - started


@pytest.mark.slow
def test_a_machine_without_write_access_fails_all_before_the_timeout(endpoint: str, tmp_path: Path) -> None:
    first, second = on_two_machines(endpoint, tmp_path, fail_on_one)
    assert "rank 1" in first[0]
    assert max(first[1], second[1]) < 30  # timeout: 60


def save_five(world: World, checkpointer: Checkpointer, context: Reporting, _local: Path) -> list[bool]:
    losses = [2.0, 1.0, 3.0, 4.0, 5.0]
    uuids = [save(checkpointer, world, step, loss=loss) for step, loss in enumerate(losses, start=1)]
    world.all_gather_object(None)
    return [bool(objects(context._storage_manager, uuid)) for uuid in uuids]


@pytest.mark.slow
def test_the_newest_and_the_best_are_kept_in_the_storage(endpoint: str, tmp_path: Path) -> None:
    for kept in on_two_machines(endpoint, tmp_path, save_five):
        assert kept == [False, True, False, True, True]
