"""The cost of a step, counted and not timed: bytes between ranks, synchronizations, operators, compilations.

Dispatch modes count in `fsdp.execute` itself, including backward and FSDP's hooks. A step is
everything between two calls of `on_step_start`, in steps without a report.
"""

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

from lm import config
from lm.runtime.world import World
from model import Transformer
from tests.support import TINY, execute, run_ranks, unit_sizes

BASE = TINY | {
    "max_steps": 4,
    "report_rate": 100,
    "validation_batches": 1,
    "grad_clip": 1.0,
    "amp_dtype": None,
}
"""Sizes divisible by two ranks, so that FSDP adds no padding. Only the last of the four steps reports."""

Collective = tuple[str, int | str, int]
"""Kind, ranks in the group (or "control", the CPU group), bytes that are gathered or reduced."""

KINDS = {
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.allreduce_": "all-reduce",
    "_c10d_functional.all_reduce": "all-reduce",
}
"""Other collectives keep the name of their operator; none is expected."""

SYNCHRONIZING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators that synchronize with the device: item, bool(), equal, nonzero, masked_select."""


@dataclass
class Step:
    """Counts of a step; `graphs` were compiled before it."""

    graphs: int
    collectives: Counter[Collective] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    synchronizations: list[str] = field(default_factory=list)


class Operators(TorchDispatchMode):
    """Counts every operator in the last of `steps`."""

    def __init__(self, steps: list[Step], control: dist.ProcessGroup) -> None:
        super().__init__()
        self._steps, self._control = steps, control.group_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # called again for the local tensors
        if self._steps:
            self._count(self._steps[-1], func, tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def _count(self, step: Step, func: Any, args: list[Any]) -> None:
        name = str(func.overloadpacket)
        if func.namespace == "aten":
            step.operators[name] += 1
        if SYNCHRONIZING & set(func.tags):
            step.synchronizations.append(name)
        if "c10d" not in name or name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            return
        if isinstance(args[-1], str):
            group = _resolve_process_group(args[-1])  # type: ignore[arg-type]  # a NewType
        else:
            objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            (group,) = (
                dist.ProcessGroup.unbox(arg)
                for arg in objects
                if "ProcessGroup" in str(arg._type())
            )
        size = "control" if group.group_name == self._control else group.size()
        step.collectives[
            KINDS.get(name, name), size, max(x.nbytes for x in args if isinstance(x, torch.Tensor))
        ] += 1


class Copies(TorchFunctionMode):
    """Counts copies of tensors to the host, which on a CPU are no operator."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if self._steps and (
            name in ("tolist", "numpy", "cpu", "__array__") or (name == "to" and "cpu" in args[1:2])
        ):
            self._steps[-1].synchronizations.append(f"{name} of {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def count_each(
    world: World, directory: str, runs: dict[str, dict[str, Any]]
) -> dict[str, list[Step]]:
    """Train with the hyperparameters of each of `runs`; return the three steps without a report, by name."""
    os.chdir(directory)
    found = {}
    for name, changes in runs.items():
        steps: list[Step] = []
        with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
            if changes.get("compile"):  # the number of graphs does not depend on the backend
                patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            else:  # a dispatch mode disables compilation
                opened.enter_context(Operators(steps, world.control))
                opened.enter_context(Copies(steps))
            execute(world, BASE | {"run_name": name} | changes, partial(start_step, steps))
        found[name] = steps[:-1]
    assert not counters["graph_break"]
    return found


def start_step(steps: list[Step], _step: int) -> None:
    steps.append(Step(graphs=counters["stats"]["unique_graphs"]))


SHARDINGS = ("full-shard", "grad-shard", "no-shard")
QUICK: dict[str, dict[str, Any]] = {
    "full-shard": {},
    "layers-1": {"n_layers": 1},
    "layers-3": {"n_layers": 3},
}
TWO: dict[str, dict[str, Any]] = {  # runs of two ranks
    **{name: {"sharding": name} for name in SHARDINGS[1:]},
    **{f"{name}-x3": {"sharding": name, "total_batch_size": 6} for name in SHARDINGS},
    "full-shard-x3-each": {"total_batch_size": 6, "sync_each_micro_step": True},
    "one-unit": {"layer_wrap": False},
    "tied": {"tie_embeddings": True},
    "bfloat16": {"amp_dtype": "bfloat16"},
    "reduced-in-bfloat16": {"amp_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "float16": {"amp_dtype": "float16"},
}
FOUR: dict[str, dict[str, Any]] = {  # runs of four ranks, two groups of two
    "hybrid-full-shard": {"sharding": "hybrid-full-shard", "shard_group_size": 2},
    "hybrid-grad-shard": {"sharding": "hybrid-grad-shard", "shard_group_size": 2},
    "hybrid-grad-shard-x3": {
        "sharding": "hybrid-grad-shard",
        "shard_group_size": 2,
        "total_batch_size": 12,
    },
}
FOUR["hybrid-grad-shard-x3-each"] = FOUR["hybrid-grad-shard-x3"] | {"sync_each_micro_step": True}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """Steps of the runs in `QUICK`, on the last rank."""
    return run_ranks(2, count_each, str(tmp_path_factory.mktemp("quick")), QUICK)[-1]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """Steps of the other runs, on the last rank."""
    runs = TWO | {
        f"recompute-{how}": {"activation_checkpointing": how}
        for how in ("none", "selective", "full")
    }
    runs["compiled"] = {"compile": True}
    two = run_ranks(2, count_each, str(tmp_path_factory.mktemp("two")), runs)[-1]
    return two | run_ranks(4, count_each, str(tmp_path_factory.mktemp("four")), FOUR)[-1]


def expected(ranks: int, changes: dict[str, Any]) -> Counter[Collective]:
    """The collectives of a step, from the parameter counts."""
    hp = config.read({"hyperparameters": BASE | changes}, [], "test")
    *blocks, embedding, head = unit_sizes(hp)
    blocks, ends = blocks if hp.layer_wrap else [], [embedding, head]
    units = (
        [*blocks, *([sum(ends)] if hp.tie_embeddings else ends)]
        if hp.layer_wrap
        else [hp.n_parameters]
    )
    gathered = units
    micro_steps = (hp.total_batch_size or ranks) // ranks
    if (
        hp.reshard_after_forward
    ):  # in every micro-step, and blocks, which are resharded after forward, twice
        gathered = (units + blocks) * micro_steps
    reduced = units * (micro_steps if hp.sync_each_micro_step else 1)
    replicas = ranks if hp.sharding == "no-shard" else ranks // (hp.shard_group_size or ranks)
    shards = ranks // replicas
    width = 4 if hp.amp_dtype is None else 2  # bytes per gathered value
    reduced_width = 4 if hp.reduce_dtype == "float32" else 2
    step: Counter[Collective] = Counter(
        {("all-reduce", "control", 8): 1}
    )  # the preemption agreement, two int32
    if shards > 1:
        step.update(("all-gather", shards, width * size) for size in gathered)
        step.update(("reduce-scatter", shards, reduced_width * size) for size in reduced)
        step["all-reduce", shards, 4 * len(list(Transformer(hp).parameters()))] += (
            1  # gradient norms
        )
    if replicas > 1:
        step.update(("all-reduce", replicas, 4 * size // shards) for size in units)
    return step


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in TWO | FOUR)]
)
def test_a_step_has_the_collectives_of_its_strategy_and_no_synchronization(
    name: str, request: pytest.FixtureRequest
) -> None:
    wanted = expected(4, FOUR[name]) if name in FOUR else expected(2, (QUICK | TWO)[name])
    for step in request.getfixturevalue("quick" if name in QUICK else "others")[name]:
        assert step.collectives == wanted
        # The preemption decision, which gloo reduces on the host.
        assert step.synchronizations == ["tolist of torch.int32"]


def test_the_operators_grow_linearly_with_the_layers(quick: dict[str, list[Step]]) -> None:
    totals = []
    for name in ("layers-1", "full-shard", "layers-3"):
        _, second, third = quick[name]
        assert second.operators == third.operators
        assert (
            second.operators["aten._fused_adamw_"] == 2
        )  # parameters with weight decay, and without
        totals.append(second.operators.total())
    one, two, three = totals
    assert three - two == two - one
    # Room for other versions of PyTorch: with 2.13 a step has 112 operators outside of blocks and
    # 168 per block.
    assert 2 * one - two < 150
    assert two - one < 190


@pytest.mark.slow
def test_one_compiled_block_serves_all(others: dict[str, list[Step]]) -> None:
    # One graph of a block and one of the head are compiled in the first step.
    assert [step.graphs for step in others["compiled"]] == [0, 2, 2]


@pytest.mark.slow
def test_selective_recomputation_repeats_neither_products_nor_attention(
    others: dict[str, list[Step]],
) -> None:
    attention, products = (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        ("aten.mm", "aten.addmm"),
    )
    nothing, selective, full = (
        others[f"recompute-{how}"][-1].operators for how in ("none", "selective", "full")
    )
    assert selective[attention] == nothing[attention] == 2  # blocks
    assert [selective[name] for name in products] == [nothing[name] for name in products]
    assert selective.total() > nothing.total()
    assert full[attention] == 2 * nothing[attention]
    assert sum(full[name] for name in products) > sum(nothing[name] for name in products)
