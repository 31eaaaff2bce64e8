"""Functions on real ranks with gloo, without `fsdp.py`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lm.launch.launch import Launch
from lm.launch.spawn import reserve_port
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from tests.support.forked import START_METHOD

RANK_TIMEOUT = 300
"""seconds that a rank waits for others in a collective"""


@dataclass(frozen=True)
class _Job:
    """What every rank runs."""

    size: int
    nodes: int
    port: int
    action: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Path
    env: dict[str, str]


def _enter(rank: int, job: _Job) -> None:
    faulthandler.enable()  # a rank that PyTorch aborts prints where it was
    os.environ.update(job.env)
    torch.set_num_threads(1)
    per_node = job.size // job.nodes
    node, local_rank = divmod(rank, per_node)
    launch = Launch(rank, job.size, local_rank, per_node, node, "127.0.0.1", job.port)
    with join_world(launch, timeout=RANK_TIMEOUT) as world:
        result = job.action(world, *job.arguments)
        (job.results / str(rank)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # As fsdp.py: PyTorch aborts if the interpreter shuts down while one of its threads runs.
    os._exit(0)


def run_ranks(size: int, action: Callable[..., Any], *arguments: Any, nodes: int = 1) -> list[Any]:
    """Run `action(world, *arguments)` on `size` ranks with gloo; return the results by rank.

    `action` is a function at the top level of a module; its result is picklable and holds no
    tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        job = _Job(size, nodes, reserve_port(), action, arguments, results, dict(os.environ))
        mp.start_processes(_enter, (job,), nprocs=size, start_method=START_METHOD)  # type: ignore[attr-defined]
        return [pickle.loads((results / str(rank)).read_bytes()) for rank in range(size)]


def in_world(action: Callable[[World], Any]) -> Any:
    """Run `action(world)` in this process as the only rank."""
    with join_world(Launch(), timeout=RANK_TIMEOUT) as world:
        return action(world)
