"""Bytes of the tensors of a run's ranks, which call `fsdp.execute` and measure its steps.

    python -m lm.launch tests/support/tensor_bytes.py STEPS POINTS FOUND

POINTS is a JSON list of hyperparameters; rank 0 writes to the file FOUND a list of `TensorBytes`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import launch_command, make_environment
from benchmarks.observer import StepObserver
from lm.checkpoint.cluster import open_store
from lm.config.reading import read_hyperparameters
from lm.determined.context import TorchDistributedContext
from lm.launch.launch import Launch
from lm.launch.process import run_and_exit
from lm.runtime.rendezvous import join_world
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from lm.training import optim
from model import Transformer


@dataclass
class TensorBytes:
    """Bytes of tensors on a rank."""

    parameters: int = 0
    """of the shards when the optimizer step starts, as those of gradients and moments"""
    gradients: int = 0
    moments: int = 0
    gathered: int = 0
    """peak of unsharded parameters and all-gather buffers"""
    transient: list[int] = field(default_factory=list)
    """peak of each step, in addition to parameters and moments"""


def run_ranks(ranks: int, points: list[dict[str, Any]], steps: int) -> list[TensorBytes]:
    """Return what is measured of a run for each of `points`, hyperparameters."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "points.json").write_text(json.dumps(points))
        arguments = (str(steps), "points.json", "found.json")
        command = launch_command(ranks, "tests/support/tensor_bytes.py", *arguments)
        env = make_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(Path(directory, "found.json").read_text())
        return [TensorBytes(**each) for each in found]


def measure_run(
    world: World, context: core.Context, point: dict[str, Any], steps: int, name: str
) -> TensorBytes:
    """Measure a run with the hyperparameters `point`, of the rank that has most bytes.

    The transient bytes are those of `steps` steps on rank 0.
    """
    endless = {"max_steps": 10**6, "report_rate": 10**6}
    hp = read_hyperparameters({"hyperparameters": point | endless}, [], "point")
    found = TensorBytes()
    stages = _observe_steps(steps, found)
    with suppress(StopIteration):
        run_dir = RunDir(name)
        job = fsdp.Job(hp, None, run_dir)
        store = open_store(context.checkpoint, None, run_dir, world)
        observer = StepObserver(world, lambda _: next(stages))
        fsdp.execute(job, world, context, store, observer)
    gc.unfreeze()
    gc.collect()  # the model, before the next one is made
    everyone: list[TensorBytes] = world.all_gather_object(found)
    return TensorBytes(
        parameters=max(rank.parameters for rank in everyone),
        gradients=max(rank.gradients for rank in everyone),
        moments=max(rank.moments for rank in everyone),
        gathered=max(rank.gathered for rank in everyone),
        transient=found.transient,
    )


def _observe_steps(steps: int, found: TensorBytes) -> Iterator[None]:
    """Fill `found`; to be resumed at the start of every step."""
    models: list[torch.nn.Module] = []

    def see_model(module: torch.nn.Module, _inputs: Any) -> None:
        if isinstance(module, Transformer):
            models.append(module)

    def see_state(optimizer: optim.AdamW, *args: Any) -> None:
        found.parameters = found.gradients = found.moments = 0
        for parameter, state in optimizer.state.items():
            found.parameters += _count_bytes(parameter)
            assert parameter.grad is not None
            found.gradients += _count_bytes(parameter.grad)
            for moment in ("exp_avg", "exp_avg_sq"):
                found.moments += _count_bytes(state[moment])
        step(optimizer, *args)

    step = optim.AdamW.step
    optim.AdamW.step = see_state  # type: ignore[method-assign]
    with register_module_forward_pre_hook(see_model):
        yield
        yield  # one more step for warm-up
    # gloo's threads free buffers late and unseen by the profiler, which only increases a peak: use
    # the minimum.
    peaks: list[int] = []
    for _ in range(2):
        with _GatheredBytes(models[0]) as gathered:
            yield
        peaks.append(gathered.peak)
    found.gathered = min(peaks)
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        kineto: Any = profiler.profiler
        events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        live_bytes = accumulate(event.nbytes() for event in events)
        found.transient.append(max(live_bytes))


def _count_bytes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.nbytes


class _GatheredBytes(TorchDispatchMode):
    """Records the peak bytes of unsharded parameters of `model` and of live all-gather buffers."""

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

        unsharded: dict[int, int] = {}  # bytes by address, as parameters can share storage
        for parameter in self._model.parameters():
            if not isinstance(parameter, DTensor):
                storage = parameter.untyped_storage()
                unsharded[storage.data_ptr()] = storage.nbytes()
        self._buffers = [(buffer, size) for buffer, size in self._buffers if not buffer.expired()]
        n_buffered = sum(size for _, size in self._buffers)
        self.peak = max(self.peak, sum(unsharded.values()) + n_buffered)
        return result


def main() -> int:
    steps, points_file, out = sys.argv[1:]
    points = json.loads(Path(points_file).read_text())
    with join_world(Launch.from_env(os.environ), timeout=300) as world:
        distributed = TorchDistributedContext(world.launch, world.saver, world.node)
        found: list[TensorBytes] = []
        with core.init(distributed=distributed, checkpoint_storage=str(Path.cwd())) as context:
            for number, point in enumerate(points):
                found.append(measure_run(world, context, point, int(steps), str(number)))
        if world.rank == 0:
            Path(out).write_text(json.dumps([asdict(each) for each in found]))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
