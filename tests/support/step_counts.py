"""Counts of the collectives, operators and synchronizations of training steps."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.runtime.world import World
from tests.support.hyperparameters import TINY
from tests.support.runs import train_in_world

COUNTED_RUN = TINY | {
    "max_steps": 4,
    "report_rate": 100,
    "validation_batches": 1,
    "grad_clip": 1.0,
    "amp_dtype": None,
}
"""Hyperparameters of a run whose steps are counted.

Sizes are divisible by two ranks, so that FSDP adds no padding. Of the four steps only the last
reports.
"""

Collective = tuple[str, int | str, int]
"""Kind, ranks in the group (or "control", the CPU group), bytes that are gathered or reduced."""

COLLECTIVES = {
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.allreduce_": "all-reduce",
    "c10d.alltoall_base_": "all-to-all",
    "_c10d_functional.all_reduce": "all-reduce",
}
"""Other collectives keep the name of their operator; none is expected."""

SYNCHRONIZING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators that synchronize with the device, e.g. item, bool(), equal and nonzero."""


@dataclass
class StepCounts:
    """Counts of a step; `graphs` were compiled before it."""

    graphs: int
    collectives: Counter[Collective] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    synchronizations: list[str] = field(default_factory=list)


class CountOperators(TorchDispatchMode):
    """Counts every operator in the last of `steps`."""

    def __init__(self, steps: list[StepCounts], control: dist.ProcessGroup) -> None:
        super().__init__()
        self._steps = steps
        self._control = control.group_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # called again for the local tensors
        if self._steps:
            self._count(self._steps[-1], func, tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def _count(self, step: StepCounts, func: Any, args: list[Any]) -> None:
        name = str(func.overloadpacket)
        if func.namespace == "aten":
            step.operators[name] += 1
        if SYNCHRONIZING & set(func.tags):
            step.synchronizations.append(name)
        is_collective = "c10d" in name
        if is_collective and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            kind = COLLECTIVES.get(name, name)
            n_bytes = max(arg.nbytes for arg in args if isinstance(arg, torch.Tensor))
            step.collectives[kind, self._group_size(args), n_bytes] += 1

    def _group_size(self, args: list[Any]) -> int | str:
        """Return the number of ranks in the group of a collective's arguments, or "control"."""
        if isinstance(args[-1], str):
            group = _resolve_process_group(args[-1])  # type: ignore[arg-type]  # a NewType
        else:
            objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            (found,) = [each for each in objects if "ProcessGroup" in str(each._type())]
            group = dist.ProcessGroup.unbox(found)
        if group.group_name == self._control:
            return "control"
        return group.size()


class OperatorCounts(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


class CountCopies(TorchFunctionMode):
    """Counts copies of tensors to the host, which on a CPU are no operator."""

    def __init__(self, steps: list[StepCounts]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        is_copy = name in ("tolist", "numpy", "cpu", "__array__")
        is_copy |= name == "to" and args[1:2] == ("cpu",)
        if self._steps and is_copy:
            self._steps[-1].synchronizations.append(f"{name} of {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def count_steps_of_each(
    world: World,
    directory: str,
    runs: dict[str, dict[str, Any]],
    base: dict[str, Any] = COUNTED_RUN,
) -> dict[str, list[StepCounts]]:
    """Train with each of `runs`, changes of `base`.

    Returns:
        All steps but the last, by name.
    """
    os.chdir(directory)
    found = {}
    for name, changes in runs.items():
        steps: list[StepCounts] = []
        with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
            if changes.get("compile"):  # the number of graphs does not depend on the backend
                patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            else:  # a dispatch mode disables compilation
                opened.enter_context(CountOperators(steps, world.control))
                opened.enter_context(CountCopies(steps))
            train_in_world(world, base | {"run_name": name} | changes, partial(_start_step, steps))
        found[name] = steps[:-1]
    assert not counters["graph_break"]
    return found


def _start_step(steps: list[StepCounts], _step: int) -> None:
    steps.append(StepCounts(graphs=counters["stats"]["unique_graphs"]))
