"""Functions on real ranks with gloo, without `fsdp.py`."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lm.launch.launch import Launch
from lm.launch.spawn import free_port
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from tests.support.forked import METHOD


def _enter(
    rank: int,
    size: int,
    nodes: int,
    port: int,
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Path,
    env: Mapping[str, str],
) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    per_node = size // nodes
    launch = Launch(rank, size, rank % per_node, per_node, rank // per_node, "127.0.0.1", port)
    with join_world(launch, timeout=60) as world:
        (results / str(rank)).write_bytes(pickle.dumps(action(world, *arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # as fsdp.py: PyTorch aborts if the interpreter shuts down while one of its threads runs


def run_ranks(size: int, action: Callable[..., Any], *arguments: Any, nodes: int = 1) -> list[Any]:
    """Run `action(world, *arguments)` on `size` ranks with gloo; return the results by rank.

    `action` is a function at the top level of a module; its result is picklable and holds no
    tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        how = (size, nodes, free_port(), action, arguments, Path(folder), dict(os.environ))
        mp.start_processes(_enter, how, nprocs=size, start_method=METHOD)  # type: ignore[attr-defined]
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def in_world(action: Callable[[World], Any]) -> Any:
    """Run `action(world)` in this process as the only rank."""
    with join_world(Launch(), timeout=60) as world:
        return action(world)
