"""One rank of `benchmarks.sharding`, which calls `fsdp.execute` for each point and measures a step.

    python -m lm.launch benchmarks/tensors.py STEPS POINTS FOUND

POINTS is a JSON list of hyperparameters; rank 0 writes the list of what `measure` returned to the
file FOUND.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsdp  # sets up the environment before torch is imported

# isort: split
import torch
from determined import core
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.observer import StepObserver
from lm import config
from lm.determined.context import TorchDistributedContext
from lm.launch.launch import Launch
from lm.launch.spawn import run_and_exit
from lm.runtime.rendezvous import join_world
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from model import Transformer


def measure(
    world: World, context: core.Context, point: dict[str, Any], steps: int, name: str
) -> dict[str, Any]:
    """Measure a run with the hyperparameters `point`.

    Returns:
        parameters, gradients, moments: bytes of the shards of a rank when the optimizer step
        starts. gathered: peak bytes of unsharded parameters and all-gather buffers.
        transient: peak bytes in addition to parameters and moments, of each of `steps` steps on
        rank 0. Bytes are those of the rank that has most, unless stated.
    """
    hp = config.read_hyperparameters(
        {"hyperparameters": point | {"max_steps": 10**6, "report_rate": 10**6}}, [], "point"
    )
    found: dict[str, Any] = {}
    stages = _watch(steps, found)
    with suppress(StopIteration):
        run_dir = RunDir(name)
        job = fsdp.Job(hp, None, run_dir)
        store = fsdp.open_store(job, world, context)
        observer = StepObserver(world, lambda _: next(stages))
        fsdp.execute(job, world, context, store, observer)
    gc.unfreeze()
    gc.collect()  # the model, before the next one is made
    everyone = world.all_gather_object(found)
    return {
        key: value if isinstance(value, list) else max(o[key] for o in everyone)
        for key, value in found.items()
    }


def _watch(steps: int, found: dict[str, Any]) -> Iterator[None]:
    """Fill `found`; to be resumed at the start of every step."""
    models: list[torch.nn.Module] = []

    def see_model(module: torch.nn.Module, _inputs: Any) -> None:
        if isinstance(module, Transformer):
            models.append(module)

    def see_state(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found["parameters"] = _bytes(parameters)
        found["gradients"] = _bytes(p.grad for p in parameters)
        found["moments"] = _bytes(
            optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")
        )

    with register_module_forward_pre_hook(see_model), register_optimizer_step_pre_hook(see_state):
        yield
        yield  # one more step for warm-up
    # gloo's threads free buffers late and unseen by the profiler, which only increases a peak: use
    # the minimum.
    gathered: list[int] = []
    for _ in range(2):
        with _Gathered(models[0]) as mode:
            yield
        gathered.append(mode.peak)
    found |= {"gathered": min(gathered), "transient": []}
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        kineto: Any = profiler.profiler
        events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        found["transient"].append(max(accumulate(event.nbytes() for event in events)))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


class _Gathered(TorchDispatchMode):
    """Records after every operator the bytes of unsharded parameters of `model` and of live all-gather buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._buffers: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            storage = args[0].untyped_storage()
            self._buffers.append((StorageWeakRef(storage), storage.nbytes()))
        result = func(*args, **(kwargs or {}))
        unsharded = [
            p.untyped_storage() for p in self._model.parameters() if not isinstance(p, DTensor)
        ]
        n_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in unsharded}.values())
        self._buffers = [(buffer, size) for buffer, size in self._buffers if not buffer.expired()]
        self.peak = max(self.peak, n_bytes + sum(size for _, size in self._buffers))
        return result


def main() -> int:
    steps, points_file, out = sys.argv[1:]
    with join_world(Launch.from_env(os.environ), timeout=300) as world:
        distributed = TorchDistributedContext(world.launch, world.saver, world.node)
        with core.init(distributed=distributed, checkpoint_storage=str(Path.cwd())) as context:
            points = enumerate(json.loads(Path(points_file).read_text()))
            found = [
                measure(world, context, point, int(steps), str(number)) for number, point in points
            ]
        if world.rank == 0:
            Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
