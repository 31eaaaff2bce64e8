"""Ranks meet or say in one line why not, agree on results and errors, and name who is missing."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch
from lm.launch.spawn import reserve_port
from lm.runtime import rendezvous, watchdog
from lm.runtime.failures import as_run_error
from lm.runtime.rendezvous import choose_device, join_world
from lm.runtime.watchdog import Heartbeat, Watchdog
from lm.runtime.world import MeshShape, World
from lm.training import precision
from tests.support import PATIENCE, REPOSITORY
from tests.support.ranks import RANK_TIMEOUT, in_world, run_ranks
from tests.support.runs import run_fsdp


def launch(rank: int, size: int, port: int, nodes: int = 1) -> Launch:
    return Launch(rank, size, rank // nodes, size // nodes, rank % nodes, "127.0.0.1", port)


# ---- rendezvous


@pytest.mark.slow
def test_join_names_a_host_that_does_not_resolve(
    capfd: pytest.CaptureFixture[str],
) -> None:
    began = time.monotonic()
    unknown = Launch(1, 2, 0, 1, 1, "no-such-host.invalid", 29500)
    expected = r"^rank 1 of 2, .*no-such-host.invalid:29500: .*MASTER_ADDR"
    with pytest.raises(RunError, match=expected), join_world(unknown, timeout=600):
        pass
    assert time.monotonic() - began < 300
    assert capfd.readouterr().err == "", "no lines of PyTorch"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "nodes"), [(0, 1), (1, 2)])
def test_join_timeout_names_rank_and_address(rank: int, nodes: int) -> None:
    port = reserve_port()
    expected = rf"^rank {rank} of 2, .*127.0.0.1:{port}: timed out after 1 s \(collective_timeout\)"
    with (
        pytest.raises(RunError, match=expected),
        join_world(launch(rank, 2, port, nodes), timeout=1),
    ):
        pass


@pytest.mark.parametrize(("address", "nodes"), [("127.0.0.1", 1), ("0.0.0.0", 2)])
def test_join_names_a_port_in_use(address: str, nodes: int) -> None:
    with socket.create_server((address, 0)) as other:
        port = other.getsockname()[1]
        expected = f"^rank 0 of 2, .*127.0.0.1:{port}: .*uses this port.*MASTER_PORT"
        with (
            pytest.raises(RunError, match=expected),
            join_world(launch(0, 2, port, nodes), timeout=PATIENCE),
        ):
            pass


def cannot_join(launch: Launch) -> RunError:
    """Return the error of a rendezvous that fails at once."""
    began = time.monotonic()
    with pytest.raises(RunError) as failed, join_world(launch, timeout=300):
        pass
    assert time.monotonic() - began < 150
    return failed.value


@pytest.mark.parametrize("nodes", [1, 2])
def test_join_names_a_port_that_is_not_allowed(nodes: int) -> None:
    "localhost".encode("idna")  # a module that only root may be able to import
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may use every port
    try:
        error = cannot_join(launch(0, 2, 80, nodes))
    finally:
        os.seteuid(user)
    assert re.search(r"127.0.0.1:80: Permission denied.*MASTER_PORT", str(error))


def test_join_names_too_many_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with suppress(OSError):
            while True:
                stack.enter_context(Path(os.devnull).open())
        error = cannot_join(launch(0, 2, 29500))
    assert "ulimit -n" in str(error)


NCCL_ERROR = "NCCL error in: NCCLUtils.cpp:94, unhandled {} error\nncclError: ...\nLast error:\n{}"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "MemoryError"),
        (
            dist.DistBackendError(NCCL_ERROR.format("cuda", "Cuda failure 2 'out of memory'")),
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error",
        ),
        (
            dist.DistBackendError(NCCL_ERROR.format("cuda", "Failed to CUDA calloc 64 bytes")),
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error",
        ),
    ],
    ids=["no text", "NCCL", "NCCL calloc"],
)
def test_as_run_error_of_too_little_memory(error: BaseException, cause: str) -> None:
    assert str(as_run_error(error, 3)).startswith(f"rank 3: out of memory ({cause}); ")


# With exit code 0, as `lm.launch` ends the other ranks for another.
LEAVE_WHILE_JOINING = """
import torch.distributed
if rank == 1:
    torch.distributed.all_gather_object = lambda *_, **__: os._exit(0)
"""


def test_join_whose_other_rank_leaves_is_one_line(tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, ranks=2, script=LEAVE_WHILE_JOINING, code=1)
    assert re.fullmatch(r"rank 0: lost the connection .*\n", done.stderr)


def test_join_names_an_unknown_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    error = cannot_join(Launch())
    assert error.exit_code == 2
    assert str(error).startswith("rank 0: GLOO_SOCKET_IFNAME=eth99: ")


def join_bound(world: World) -> list[int]:
    """Join again with a default group that is bound to a device, as that of NCCL is."""
    launch = world.launch
    again = dist.PrefixStore("again", world.rendezvous_store)
    dist.destroy_process_group()
    initialize = dist.init_process_group

    def initialize_bound(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        everyone = dist.group.WORLD
        assert everyone is not None
        everyone.bound_device_id = torch.device("cuda", 0)

    with (
        patch.object(rendezvous, "_make_store", return_value=again),
        patch.object(dist, "init_process_group", initialize_bound),
        join_world(launch, RANK_TIMEOUT) as joined,
    ):
        of_node: list[Any] = [None] * dist.get_world_size(joined.node)
        dist.all_gather_object(of_node, launch.rank, group=joined.node)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # to be destroyed
    return of_node


def test_groups_of_nodes_split_no_communicator() -> None:
    assert run_ranks(2, join_bound, nodes=2) == [[0], [1]]


def listeners(_: World) -> list[str]:
    return [
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_join_on_one_machine_uses_loopback_ports() -> None:
    assert {address for addresses in run_ranks(2, listeners) for address in addresses} == {
        "127.0.0.1"
    }
    assert set(in_world(listeners)) <= {"127.0.0.1"}


# ---- devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What PyTorch reports about the GPUs of the machine."""
    machine = SimpleNamespace(count=2, capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    return machine


@pytest.mark.usefixtures("gpus")
def test_choose_device_uses_the_local_rank() -> None:
    assert [choose_device(launch(rank, 2, 1)) for rank in range(2)] == [
        torch.device("cuda", rank) for rank in range(2)
    ]


@pytest.mark.parametrize("launcher", ["srun", "Open MPI", "PALS", "Hydra"])
def test_choose_device_with_one_visible_gpu_per_rank(launcher: str, gpus: SimpleNamespace) -> None:
    gpus.count = 1
    assert choose_device(Launch(3, 4, 1, 2, 1, "node0", 1, launcher)) == torch.device("cuda", 0)


def test_choose_device_refuses_more_ranks_than_gpus(gpus: SimpleNamespace) -> None:
    gpus.count = 1
    with pytest.raises(ConfigError, match=r"2 ranks .*1 visible GPU;.* 1 per node"):
        choose_device(launch(0, 2, 1))


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "0", "0,1", "GPU-1a2b", "3"])
def test_choose_device_without_a_gpu(
    visible: str, gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_device(Launch()) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible in ("", "-1", "NoDevFiles"):
        assert choose_device(Launch()) == torch.device("cpu")
    else:
        with pytest.raises(ConfigError, match=f"^CUDA_VISIBLE_DEVICES={visible}: "):
            choose_device(Launch())


def test_amp_dtype_of_a_gpu(
    gpus: SimpleNamespace,
) -> None:
    def dtype(amp_dtype: str, float8: str | None = None) -> torch.dtype | None:
        config = precision.PrecisionConfig.model_validate(
            {"amp_dtype": amp_dtype, "float8": float8}
        )
        return precision.compute_dtype(config, torch.device("cuda", 0))

    with pytest.raises(ConfigError, match=r"^float8: Tesla T4"):
        dtype("auto", "rowwise")
    gpus.capability = (7, 5)
    assert dtype("auto") == torch.float16
    with pytest.raises(ConfigError, match=r"^amp_dtype: Tesla T4"):
        dtype("bfloat16")


# ---- collectives of Python objects


def outcome(action: Any) -> Any:
    try:
        return action()
    except Exception as error:
        return type(error).__name__, str(error)


def use_collectives(world: World) -> dict[str, Any]:
    def in_block(action: Callable[[], int]) -> int:
        with world.all_or_none():
            return action()

    def fail_except_on_0() -> int:
        if world.rank:
            raise ConfigError(f"problem of rank {world.rank}")
        return 7

    def fail() -> int:
        raise RunError("not today")

    def fail_while_0_waits() -> None:
        if world.rank:
            fail()
        threading.Event().wait()

    ran_on: list[int] = []
    return {
        "gathered": world.all_gather_object(("rank", world.rank)),
        "all": outcome(lambda: in_block(lambda: world.rank * 10)),
        "none: refused": outcome(lambda: in_block(fail_except_on_0)),
        "none: crashed": outcome(lambda: in_block(lambda: 1 // (world.rank - 1))),
        "equal": outcome(lambda: world.require_equal("data", {"a": 1, "b": [2]})),
        "different": outcome(lambda: world.require_equal("data", {"a": 1, "b": world.rank // 2})),
        "on rank 0": outcome(
            lambda: world.on_rank0(lambda: ran_on.append(world.rank) or f"by {world.rank}")
        ),
        "on rank 0: refused": outcome(lambda: world.on_rank0(fail)),
        "on each node": world.run_in_thread_on_each_node(lambda: f"by {world.rank}"),
        "in threads": outcome(lambda: world.run_in_thread(fail_while_0_waits)),
        "ran on": ran_on,
    }


Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What collectives return or raise, by rank."""
    return run_ranks(3, use_collectives)


@pytest.mark.slow
def test_all_gather_object(outcomes: Outcomes) -> None:
    gathered = [("rank", 0), ("rank", 1), ("rank", 2)]
    assert [rank["gathered"] for rank in outcomes] == [gathered] * 3


@pytest.mark.slow
def test_call_on_each_node_returns_its_result_there(outcomes: Outcomes) -> None:
    assert [rank["on each node"] for rank in outcomes] == ["by 0", None, None]


@pytest.mark.slow
def test_all_or_none_succeeds_on_every_rank(outcomes: Outcomes) -> None:
    assert [rank["all"] for rank in outcomes] == [0, 10, 20]


@pytest.mark.slow
def test_all_or_none_raises_the_error_of_the_lowest_rank(outcomes: Outcomes) -> None:
    refused = ("ConfigError", "problem of rank 1")
    assert [rank["none: refused"] for rank in outcomes] == [refused] * 3


@pytest.mark.slow
def test_all_or_none_names_the_rank_that_crashed(outcomes: Outcomes) -> None:
    crashes = [rank["none: crashed"] for rank in outcomes]
    assert [name for name, _ in crashes] == ["RuntimeError", "ZeroDivisionError", "RuntimeError"]
    assert crashes[0] == crashes[2]
    assert re.match(r"rank 1 failed:\nTraceback .*\n( .*\n)+ZeroDivisionError: .*", crashes[0][1])


@pytest.mark.slow
def test_require_equal_names_what_differs(outcomes: Outcomes) -> None:
    assert [rank["equal"] for rank in outcomes] == [None] * 3
    name, text = outcomes[0]["different"]
    assert name == "ConfigError"
    assert "b is 0 on rank 0 but 1 on rank 2" in text
    assert [rank["different"] for rank in outcomes] == [(name, text)] * 3


@pytest.mark.slow
def test_on_rank0_returns_or_raises_on_every_rank(outcomes: Outcomes) -> None:
    assert [rank["on rank 0"] for rank in outcomes] == ["by 0"] * 3
    assert [rank["ran on"] for rank in outcomes] == [[0], [], []]
    refused = ("RunError", "not today")
    assert [rank["on rank 0: refused"] for rank in outcomes] == [refused] * 3


@pytest.mark.slow
def test_run_in_thread_fails_while_another_ranks_thread_is_running(outcomes: Outcomes) -> None:
    assert [rank["in threads"] for rank in outcomes] == [("RunError", "not today")] * 3


# ---- watchdog


GLOO_TIMEOUT = "Timed out waiting 8000ms for recv operation to complete"
NCCL_TIMEOUT = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
SILENT = r"rank 0 \(last completed step 3\), which does not respond"


@pytest.mark.parametrize(
    ("error", "store_ends", "part"),
    [
        (RuntimeError(GLOO_TIMEOUT), False, f"timed out after 8 s .*{SILENT}"),
        (
            RuntimeError(GLOO_TIMEOUT),
            True,
            "timed out after 8 s .*an unknown rank, .*store of rank 0",
        ),
        (dist.DistBackendError(NCCL_TIMEOUT), False, f"timed out after 8 s .*{SILENT}"),
        (
            dist.DistBackendError("NCCL error: remote process exited"),
            False,
            f"lost the connection .*{SILENT}",
        ),
        (
            dist.DistBackendError(NCCL_ERROR.format("system", "/dev/shm: No space left")),
            False,
            rf"lost the connection .*{SILENT}.*\nrank 1 .*: NCCL: /dev/shm: No space left$",
        ),
    ],
    ids=["gloo", "store", "NCCL", "peer", "disk"],
)
def test_watchdog_names_the_rank_that_was_waited_for(
    error: RuntimeError, store_ends: bool, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    servers[0].set("watchdog/0", json.dumps(Heartbeat(3, 1, False)))  # and no beat after it
    client = dist.TCPStore("127.0.0.1", servers[0].port, wait_for_workers=False)
    read_error = watchdog._read_published_error

    def end_store(*arguments: Any) -> bool:
        """End it between the two readings of the heartbeats."""
        found = read_error(*arguments)
        servers.clear()
        return found

    if store_ends:
        monkeypatch.setattr(watchdog, "_read_published_error", end_store)
    expected = rf"^rank 1 \(last completed step 0\): {part}"
    with pytest.raises(RunError, match=expected), Watchdog(client, rank=1, size=2, timeout=8):
        raise error


class FailsOnce(dist.HashStore):
    """A store whose first request fails."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False

    def clone(self) -> FailsOnce:
        return self

    def set(self, key: str, value: str) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("Connection reset by peer")
        super().set(key, value)


def test_heartbeats_continue_after_an_error_of_the_store() -> None:
    store = FailsOnce()
    with Watchdog(store, rank=1, size=2, timeout=8):
        heartbeat = Heartbeat(*json.loads(store.get("watchdog/1")))
    assert heartbeat.beats >= 2


# ---- mesh


def build_mesh(
    world: World, shape: MeshShape
) -> tuple[list[Any], tuple[str, ...] | None, set[float]]:
    mesh = world.device_mesh(shape)
    groups = [world.control, world.saver, world.node, *mesh.get_all_groups()]
    backends = [cast(Any, group)._get_backend(torch.device("cpu")) for group in groups]
    timeouts = {backend.options._timeout.total_seconds() for backend in backends}
    return mesh.mesh.tolist(), mesh.mesh_dim_names, timeouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ranks", "names"),
    [
        (MeshShape(1, 4), [0, 1, 2, 3], ("shard",)),
        (MeshShape(2, 2), [[0, 1], [2, 3]], ("replicate", "shard")),
        (MeshShape(4, 1), [[0], [1], [2], [3]], ("replicate", "shard")),
    ],
)
def test_device_mesh_shape_and_timeouts(
    shape: MeshShape, ranks: list[Any], names: tuple[str, ...]
) -> None:
    assert run_ranks(4, build_mesh, shape) == [(ranks, names, {RANK_TIMEOUT})] * 4


THREADS = """
import os, sys, torch
from lm.launch.launch import Launch
from lm.runtime.rendezvous import join_world
os.sched_setaffinity(0, eval(sys.argv[1])[int(os.environ["RANK"])])
with join_world(Launch.from_env(os.environ), 60) as world, world.all_or_none():
    os.write(1, f"{torch.get_num_threads()}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("launcher", "given"), [("lm.launch", "2"), ("torch.distributed.run", "")])
def test_omp_num_threads_divide_the_cores(tmp_path: Path, launcher: str, given: str) -> None:
    (tmp_path / "threads.py").write_text(THREADS)
    cores = [set(sorted(os.sched_getaffinity(0))[:2])] * 2
    option = "--nproc" if launcher == "lm.launch" else "--nproc-per-node"
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
        "PYTHONPATH": str(REPOSITORY)
    }
    env |= {"OMP_NUM_THREADS": given} if given else {}
    command = [sys.executable, "-m", launcher, option, "2", "threads.py", str(cores)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [given or "1"] * 2, done.stderr
