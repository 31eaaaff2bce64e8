"""A checkpoint on a cluster's S3 is reported once complete; every machine verifies its download.

The storage is moto's S3 server, through Determined's S3StorageManager.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from determined import core
from determined.common import storage
from torch.distributed.fsdp import fully_shard

from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.cluster import ClusterCheckpoints
from lm.checkpoint.location import ClusterLocation
from lm.checkpoint.manifest import CheckpointError
from lm.determined.context import TorchDistributedContext
from lm.runtime.world import MeshShape, World
from tests.support.checkpoints import OPTIM_SHARDS, SHARDS, load_state, save_toy, toy_model
from tests.support.ranks import RANK_TIMEOUT, run_ranks

moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")

BUCKET = "checkpoints"
FILES = ["manifest.json", "metadata.json", *SHARDS, *OPTIM_SHARDS]


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

    def _report_checkpoint(
        self,
        storage_id: str,
        resources: Any = None,  # noqa: ARG002
        metadata: Any = None,
    ) -> None:
        self.reported.append((storage_id, objects(self._storage_manager, storage_id), metadata))


def objects(manager: storage.StorageManager, storage_id: str) -> list[str]:
    assert isinstance(manager, storage.S3StorageManager)
    return sorted(
        item.key.partition("/")[2] for item in manager.bucket.objects.filter(Prefix=storage_id)
    )


class Machine(storage.S3StorageManager):
    """Storage access of a machine, which damages the last byte of the file `damages` it reads."""

    damages: str | None = None

    def download(
        self, src: str, dst: str | os.PathLike[str], selector: storage.Selector | None = None
    ) -> None:
        super().download(src, dst, selector)
        if self.damages:
            path = Path(dst) / self.damages
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def create_bucket(manager: Machine) -> None:
    manager.bucket.create()


def use_storage(world: World, endpoint: str, folder: Path, action: Callable[..., Any]) -> Any:
    """Call `action(world, checkpointer, context, local)` with the machine's directory `local`."""
    os.umask(0o077)
    local = folder / f"machine-{world.rank}"
    local.mkdir(parents=True)
    tempfile.tempdir = str(local)
    manager = Machine(BUCKET, "key", "secret", endpoint, temp_dir=str(local))
    world.on_rank0(create_bucket, manager)
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    context = Reporting(distributed, manager)
    context.reported = []
    config = CheckpointConfig.model_validate({"keep_checkpoints": 2})
    store = ClusterCheckpoints(context, None, writes_in_place=False)
    return action(world, Checkpointer(config, store, world, {}), context, local)


OnTwoMachines = Callable[[Callable[..., Any]], list[Any]]


@pytest.fixture
def on_two_machines(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OnTwoMachines:
    """Runs an action on two machines of one rank, which share only the network and the storage."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return lambda action: run_ranks(2, use_storage, endpoint, tmp_path, action, nodes=2)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def save_and_load(
    world: World, checkpointer: Checkpointer, context: Reporting, local: Path
) -> dict[str, Any]:
    uuids = [
        save_toy(checkpointer, world, step, loss=loss)
        for step, loss in enumerate([3.0, 1.0, 4.0, 5.0], start=1)
    ]
    left_by_save = files_in(local)
    model = toy_model(-1)
    fully_shard(model, mesh=world.device_mesh(MeshShape(1, world.size)))
    manifest = load_state(checkpointer, ClusterLocation(uuids[3]), {"model": model.state_dict()})
    shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return {
        "uuids": uuids,
        "kept": [bool(objects(context._storage_manager, uuid)) for uuid in uuids],
        "reported": [
            (uuid, files, metadata["steps_completed"]) for uuid, files, metadata in context.reported
        ],
        "step": manifest.step,
        "sizes": [len(shard) for shard in shards],
        "equal": all(bool((shard == 4).all()) for shard in shards),
        "left": [left_by_save, files_in(local)],
    }


@pytest.mark.slow
def test_cluster_checkpoint_is_reported_once_complete(
    on_two_machines: OnTwoMachines,
) -> None:
    first, second = on_two_machines(save_and_load)
    reports = [(uuid, FILES, step) for step, uuid in enumerate(first["uuids"], start=1)]
    assert (first["reported"], second["reported"]) == (reports, [])
    for rank in (first, second):
        assert rank["uuids"] == first["uuids"]
        assert rank["kept"] == [False, True, True, True]  # the newest two and the best
        assert (rank["step"], rank["sizes"], rank["equal"]) == (4, [3, *[2] * 9, 3], True)
        assert rank["left"] == [[], []]


def damage_each_download(
    world: World, checkpointer: Checkpointer, context: Reporting, _local: Path
) -> list[tuple[int, str, str]]:
    """The errors of loading when the download of a file is damaged on one machine."""
    uuid = save_toy(checkpointer, world, 3)
    manager, errors = context._storage_manager, []
    assert isinstance(manager, Machine)
    for victim in range(2):
        for name in SHARDS:
            manager.damages = name if world.rank == victim else None
            model = toy_model(-1)
            fully_shard(model, mesh=world.device_mesh(MeshShape(1, world.size)))
            with pytest.raises(CheckpointError) as refused:
                load_state(checkpointer, ClusterLocation(uuid), {"model": model.state_dict()})
            errors.append((victim, name, str(refused.value)))
    return errors


@pytest.mark.slow
def test_cluster_checkpoint_damage_is_refused_together(
    on_two_machines: OnTwoMachines, tmp_path: Path
) -> None:
    for errors in on_two_machines(damage_each_download):
        assert len(errors) == 4
        for victim, name, error in errors:
            assert error.startswith(f"{tmp_path}/machine-{victim}/")
            assert f"/{name}: damaged" in error


def fail_on_one(
    world: World, checkpointer: Checkpointer, context: Reporting, _local: Path
) -> tuple[str, float]:
    """The error on each rank when one cannot write to the storage, and the seconds until then."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no write access to the bucket")

    if world.rank == 1:
        context._storage_manager.upload = refuse
    started = time.monotonic()
    with pytest.raises(Exception, match="no write access") as refused:
        save_toy(checkpointer, world, 3)
    return str(refused.value), time.monotonic() - started


@pytest.mark.slow
def test_cluster_checkpoint_without_write_access_fails_all(
    on_two_machines: OnTwoMachines,
) -> None:
    first, second = on_two_machines(fail_on_one)
    assert "rank 1" in first[0]
    assert max(first[1], second[1]) < RANK_TIMEOUT / 2
