"""The ranks as one group: they meet or say who is missing, decide together, and are open to nobody else."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from lm import precision
from lm.determined.context import TorchDistributedContext
from lm.errors import ConfigError, RankError, RunError
from lm.launch.environment import Launch
from lm.launch.spawn import free_port
from lm.runtime.world import World, choose_device, join_world
from tests.support import in_world, run, run_ranks


def place(rank: int, size: int, port: int) -> Launch:
    return Launch(rank, size, rank, size, 0, "127.0.0.1", port)


# ---- meeting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_in_vain_says_for_whom_where_and_how_long(rank: int, machines: int) -> None:
    port = free_port()
    launch = place(rank, 2, port) if machines == 1 else Launch(rank, 2, 0, 1, rank, "127.0.0.1", port)
    with pytest.raises(RankError) as failed, join_world(launch, timeout=1):
        pass
    assert str(failed.value) == (
        f"rank {rank} of 2, rendezvous at 127.0.0.1:{port}: not all ranks came within 1 s (collective_timeout);"
        " check that WORLD_SIZE is what was started and that this machine reaches 127.0.0.1"
    )


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_named(address: str, machines: int) -> None:
    with socket.create_server((address, 0)) as squatter:
        port = squatter.getsockname()[1]
        launch = place(0, 2, port) if machines == 1 else Launch(0, 2, 0, 1, 0, "127.0.0.1", port)
        with pytest.raises(RankError) as failed, join_world(launch, timeout=5):
            pass
    assert str(failed.value) == (
        f"rank 0 of 2, rendezvous at 127.0.0.1:{port}: the port is taken by another process; choose another MASTER_PORT"
    )


def test_a_run_whose_other_rank_was_not_started_ends_with_a_line(tmp_path: Path) -> None:
    port = free_port()
    there = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run(tmp_path, "collective_timeout=3", timeout=60, RANK="0", WORLD_SIZE="2", **there)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rank 0 of 2, rendezvous at 127.0.0.1:{port}: not all ranks came within 3 s (collective_t")


def listeners(_: World) -> list[str]:
    return [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]


def test_on_one_machine_no_port_is_open_to_others() -> None:
    everyone = run_ranks(2, listeners)
    assert {address for addresses in everyone for address in addresses} == {"127.0.0.1"}


def test_a_single_process_opens_no_port_for_the_rendezvous() -> None:
    assert set(in_world(listeners)) <= {"127.0.0.1"}


# ---- devices ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs, as far as PyTorch says."""
    machine = SimpleNamespace(count=2, capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    return machine


def test_each_rank_has_a_gpu_of_its_own(gpus: SimpleNamespace) -> None:
    assert gpus.count == 2
    assert [choose_device(place(rank, 2, 1)) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("launcher", ["srun", "Open MPI", "PALS", "Hydra"])
def test_a_launcher_may_show_each_rank_its_own_gpu_alone(launcher: str, gpus: SimpleNamespace) -> None:
    gpus.count = 1
    assert choose_device(Launch(3, 4, 1, 2, 1, "node0", 1, launcher)) == torch.device("cuda", 0)


def test_more_ranks_than_gpus_are_refused(gpus: SimpleNamespace) -> None:
    gpus.count = 1
    with pytest.raises(ConfigError) as refused:
        choose_device(place(0, 2, 1))
    assert str(refused.value) == "2 processes on a machine with 1 visible GPUs: start at most 1 per machine"


@pytest.mark.parametrize("asked", ["0", "0,1", "GPU-1a2b", "3"])
def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(
    asked: str, gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={asked} asks for a GPU, but PyTorch .* sees none"):
        choose_device(Launch())


@pytest.mark.parametrize("asked", [None, "", "-1", "NoDevFiles"])
def test_without_a_gpu_and_without_asking_for_one_it_is_the_cpu(
    asked: str | None, gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert choose_device(Launch()) == torch.device("cpu")


def test_bfloat16_on_a_gpu_without_it_is_refused_and_auto_is_float16(gpus: SimpleNamespace) -> None:
    gpus.capability = (7, 5)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError) as refused:
        precision.compute_dtype(precision.PrecisionConfig(amp_dtype="bfloat16", float8=None), gpu)
    assert str(refused.value) == "amp_dtype: Tesla T4 has no bfloat16; use amp_dtype: float16 or auto"
    assert precision.compute_dtype(precision.PrecisionConfig(amp_dtype="auto", float8=None), gpu) == torch.float16


def test_float8_on_a_gpu_without_it_is_refused(gpus: SimpleNamespace) -> None:
    gpus.capability = (8, 0)
    with pytest.raises(ConfigError) as refused:
        precision.compute_dtype(precision.PrecisionConfig(amp_dtype="auto", float8="rowwise"), torch.device("cuda", 0))
    assert str(refused.value) == "float8: Tesla T4 has none; use float8: null"


# ---- deciding together ------------------------------------------------------------------------------------


def outcome(action: Any) -> str:
    try:
        return f"got {action()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def meet(world: World) -> dict[str, Any]:
    def fail_beyond_0() -> int:
        if world.rank:
            raise ConfigError(f"problem of rank {world.rank}")
        return 7

    def crash_on_1() -> int:
        return 1 // (world.rank - 1)

    def never() -> int:
        raise RunError("not today")

    called: list[int] = []
    return {
        "gather": world.all_gather_object(("rank", world.rank)),
        "together": outcome(lambda: world.all_or_none(lambda: world.rank * 10)),
        "together, refused": outcome(lambda: world.all_or_none(fail_beyond_0)),
        "together, crashed": outcome(lambda: world.all_or_none(crash_on_1)),
        "same": outcome(lambda: world.require_equal("data", {"a": 1, "b": [2]})),
        "same, refused": outcome(lambda: world.require_equal("data", {"a": 1, "b": world.rank // 2})),
        "first": outcome(lambda: world.on_rank0(lambda: called.append(world.rank) or f"by {world.rank}")),
        "first, refused": outcome(lambda: world.on_rank0(never)),
        "called": called,
    }


def test_ranks_go_on_together_or_fail_together() -> None:
    first, second, third = run_ranks(3, meet)
    assert [rank["gather"] for rank in (first, second, third)] == [[("rank", 0), ("rank", 1), ("rank", 2)]] * 3
    assert [rank["together"] for rank in (first, second, third)] == ["got 0", "got 10", "got 20"]
    assert {rank["together, refused"] for rank in (first, second, third)} == {"ConfigError: problem of rank 1"}
    assert second["together, crashed"].startswith("ZeroDivisionError: ")
    assert first["together, crashed"].startswith("RuntimeError: rank 1 failed: ZeroDivisionError: ")
    assert third["together, crashed"] == first["together, crashed"]
    assert {rank["same"] for rank in (first, second, third)} == {"got {'a': 1, 'b': [2]}"}
    assert {rank["same, refused"] for rank in (first, second, third)} == {
        "ConfigError: data: b is 0 on rank 0 and 1 on rank 2; give all machines the same files and arguments"
    }
    assert {rank["first"] for rank in (first, second, third)} == {"got 'by 0'"}
    assert {rank["first, refused"] for rank in (first, second, third)} == {"RunError: not today"}
    assert [rank["called"] for rank in (first, second, third)] == [[0], [], []]


def test_a_mesh_has_rows_of_neighbours() -> None:
    def rows(world: World) -> Any:
        return world.mesh(1, 1).mesh.tolist(), world.mesh(1, 1).mesh_dim_names

    assert in_world(rows) == ([[0]], ("replicate", "shard"))


def patience(world: World) -> set[float]:
    groups = [world.control, world.saver, world.node, *world.mesh(2, 2).get_all_groups()]
    backends = [cast(Any, group)._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_all_groups_of_ranks_wait_equally_long() -> None:
    assert run_ranks(4, patience) == [{60}] * 4


def core_api(world: World) -> dict[str, Any]:
    context = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
    rank = context.get_rank()
    return {
        "place": (rank, context.get_size(), context.get_local_rank(), context.local_size, context.cross_size),
        "allgather": context.allgather(rank),
        "gather": context.gather(rank),
        "broadcast": context.broadcast(f"from {rank}"),
        "allgather_local": context.allgather_local(rank),
        "gather_local": context.gather_local(rank),
        "broadcast_local": context.broadcast_local(f"from {rank}"),
    }


def test_core_api_sees_the_same_ranks() -> None:
    same = {
        "allgather": [0, 1],
        "broadcast": "from 0",
        "allgather_local": [0, 1],
        "broadcast_local": "from 0",
    }
    assert run_ranks(2, core_api) == [
        same | {"place": (0, 2, 0, 2, 1), "gather": [0, 1], "gather_local": [0, 1]},
        same | {"place": (1, 2, 1, 2, 1), "gather": None, "gather_local": None},
    ]
