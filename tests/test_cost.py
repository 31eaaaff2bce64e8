"""What a step costs, counted rather than timed: bytes between ranks, waits of the host, operators, compilations.

All is counted in `fsdp.run` itself, by modes that see every operator below autograd, backward's and its hooks' too. A
step is what happens from one call of `reached` to the next: the whole body of the loop where nothing is reported.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from determined import core
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp
from lm import config, parallelize
from lm.determined.context import TorchDistributedContext
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from model import ModelConfig, Transformer
from tests.support import ROOT, TINY, run_ranks

BASE = TINY | {"max_steps": 4, "report_rate": 100, "validation_batches": 1, "grad_clip": 1.0, "amp_dtype": None}
"""Sizes that two ranks divide evenly, so that FSDP pads nothing. Of the four steps, the last one reports."""

Collective = tuple[str, int | str, int]
"""Kind, ranks that take part (or "control", the group of decisions), bytes of what is gathered or reduced."""

KINDS = {
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.allreduce_": "all-reduce",
    "_c10d_functional.all_reduce": "all-reduce",
}
"""Any other collective keeps its operator's name, and is none that is expected."""

READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operators that the host has to see a value for: item, bool(), equal, nonzero, masked_select."""


@dataclass
class Step:
    """What was counted; `reads` made the host wait for a value, `graphs` had been compiled when the step began."""

    graphs: int
    collectives: Counter[Collective] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    reads: list[str] = field(default_factory=list)


class Operators(TorchDispatchMode):
    """Notes every operator in the newest of `steps`, those of sharded tensors as what they do with their shards."""

    def __init__(self, steps: list[Step], control: dist.ProcessGroup) -> None:
        super().__init__()
        self._steps, self._control = steps, control.group_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again, for the shards
        if self._steps:
            self._note(self._steps[-1], func, tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def _note(self, step: Step, func: Any, args: list[Any]) -> None:
        name = str(func.overloadpacket)
        if func.namespace == "aten":
            step.operators[name] += 1
        if READING & set(func.tags):
            step.reads.append(name)
        if "c10d" not in name or name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            return
        if isinstance(args[-1], str):
            group = _resolve_process_group(args[-1])  # type: ignore[arg-type]  # a NewType
        else:
            objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            (group,) = (dist.ProcessGroup.unbox(arg) for arg in objects if "ProcessGroup" in str(arg._type()))
        place = "control" if group.group_name == self._control else group.size()
        step.collectives[KINDS.get(name, name), place, max(x.nbytes for x in args if isinstance(x, torch.Tensor))] += 1


class Copies(TorchFunctionMode):
    """Notes values handed to the host as a whole: where that is the device, no operator does it."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if self._steps and (name in ("tolist", "numpy", "cpu", "__array__") or (name == "to" and "cpu" in args[1:2])):
            self._steps[-1].reads.append(f"{name} of {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def count_each(world: World, folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, list[Step]]:
    """On every rank: the three steps of each of `runs` that report nothing, by name."""
    os.chdir(folder)
    found = {}
    for name, changes in runs.items():
        hp = config.read({"hyperparameters": BASE | {"run_name": name} | changes}, [], "test")
        place = RunDir(name)
        storage = str(place.checkpoints.absolute())
        steps: list[Step] = []
        with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
            context = opened.enter_context(
                core.init(
                    distributed=TorchDistributedContext(world.launch, world.control, world.saver, world.node),
                    checkpoint_storage=storage,
                )
            )
            if name == "one-kept":
                patch.setattr(parallelize, "begin_micro_step", keep_first_block)
            if hp.compile is True:  # how often does not depend on what code is made
                patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            else:  # under a mode, nothing is compiled
                opened.enter_context(Operators(steps, world.control))
                opened.enter_context(Copies(steps))
            fsdp.run(hp, world, context, None, place, partial(begin, steps))
        found[name] = steps[:-1]
    assert not counters["graph_break"]
    return found


def begin(steps: list[Step], _number: int) -> None:
    steps.append(Step(graphs=counters["stats"]["unique_graphs"]))


def keep_first_block(model: Any, *arguments: Any, original: Callable[..., None] = parallelize.begin_micro_step) -> None:
    model.blocks[0].set_reshard_after_forward(False)
    original(model, *arguments)


TWO: dict[str, dict[str, Any]] = {  # runs of two ranks
    **{name: {"sharding": name} for name in ("full-shard", "grad-shard", "no-shard")},
    **{f"{name}-x3": {"sharding": name, "total_batch_size": 6} for name in ("full-shard", "grad-shard", "no-shard")},
    "full-shard-x3-each": {"total_batch_size": 6, "sync_each_micro_step": True},
    "one-unit": {"layer_wrap": False},
    "tied": {"tie_embeddings": True},
    "bfloat16": {"amp_dtype": "bfloat16"},
    "float16": {"amp_dtype": "float16"},
}
FOUR: dict[str, dict[str, Any]] = {  # runs of four ranks, two groups of two
    "hybrid-full-shard": {"sharding": "hybrid-full-shard", "shard_group_size": 2},
    "hybrid-grad-shard": {"sharding": "hybrid-grad-shard", "shard_group_size": 2},
    "hybrid-grad-shard-x3": {"sharding": "hybrid-grad-shard", "shard_group_size": 2, "total_batch_size": 12},
}
FOUR["hybrid-grad-shard-x3-each"] = FOUR["hybrid-grad-shard-x3"] | {"sync_each_micro_step": True}
DEPTHS: dict[str, dict[str, Any]] = {f"layers-{n}": {"n_layers": n} for n in (1, 3)}
OTHERS: dict[str, dict[str, Any]] = {"one-kept": {}, "compiled": {"compile": True}}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """Steps of every run above, on the last of its ranks."""
    two = run_ranks(2, count_each, str(tmp_path_factory.mktemp("two")), TWO | DEPTHS | OTHERS)[-1]
    return two | run_ranks(4, count_each, str(tmp_path_factory.mktemp("four")), FOUR)[-1]


def expected(ranks: int, changes: dict[str, Any]) -> Counter[Collective]:
    """The collectives of a step, from the numbers of parameters."""
    hp = config.read({"hyperparameters": BASE | changes}, [], "test")
    counts = hp.parameter_counts()
    ends = [counts["embedding"] + counts["positions"], counts["norm"] + counts["head"]]
    blocks = [counts["blocks"] // hp.n_layers] * hp.n_layers if hp.layer_wrap else []
    units = [*blocks, *([sum(ends)] if hp.tie_embeddings else ends)] if hp.layer_wrap else [hp.n_parameters]
    gathered = units
    micro_steps = (hp.total_batch_size or ranks) // ranks
    if hp.sharding.endswith("full-shard"):  # anew in every micro-step, and blocks, dropped behind forward, twice
        gathered = (units + blocks) * micro_steps
    reduced = units * (micro_steps if hp.sync_each_micro_step else 1)
    replicas = ranks if hp.sharding == "no-shard" else ranks // (hp.shard_group_size or ranks)
    shards = ranks // replicas
    width = 4 if hp.amp_dtype is None else 2  # bytes of a gathered value; gradients are reduced in float32
    step: Counter[Collective] = Counter({("all-reduce", "control", 8): 1})  # StopRequest's question, two int32
    if shards > 1:
        step.update(("all-gather", shards, width * size) for size in gathered)
        step.update(("reduce-scatter", shards, 4 * size) for size in reduced)
        step["all-reduce", shards, 4 * len(list(Transformer(hp).parameters()))] += 1  # norms of the gradients
    if replicas > 1:
        step.update(("all-reduce", replicas, 4 * size // shards) for size in units)
    return step


@pytest.mark.parametrize("name", TWO | FOUR)
def test_a_step_moves_what_its_strategy_says(name: str, counted: dict[str, list[Step]]) -> None:
    wanted = expected(4, FOUR[name]) if name in FOUR else expected(2, TWO[name])
    for step in counted[name]:
        assert step.collectives == wanted


def test_a_gather_that_is_missing_is_noticed(counted: dict[str, list[Step]]) -> None:
    hp = config.read({"hyperparameters": BASE}, [], "test")
    block = 4 * hp.parameter_counts()["blocks"] // hp.n_layers
    for whole, less in zip(counted["full-shard"], counted["one-kept"], strict=True):
        assert whole.collectives - less.collectives == Counter({("all-gather", 2, block): 1})


@pytest.mark.parametrize("name", TWO | FOUR)
def test_a_step_reads_nothing_back_from_the_device(name: str, counted: dict[str, list[Step]]) -> None:
    for step in counted[name]:
        # StopRequest's answer, which gloo brought to the host: it never was on the device.
        assert step.reads == ["tolist of torch.int32"]


def test_a_layer_more_costs_the_same_operators_each_time(counted: dict[str, list[Step]]) -> None:
    totals = []
    for name in ("layers-1", "full-shard", "layers-3"):
        _, second, third = counted[name]
        assert second.operators == third.operators
        assert second.operators["aten._fused_adamw_"] == 2  # parameters with weight decay, and without
        totals.append(second.operators.total())
    one, two, three = totals
    assert three - two == two - one
    (tested,) = re.findall("^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if torch.__version__.partition("+")[0] != tested:
        pytest.skip(f"{totals} operators in torch {torch.__version__}; the exact numbers are those of torch {tested}")
    assert (2 * one - two, two - one) == (112, 136)  # outside of blocks, and per block


def test_one_compiled_block_serves_all(counted: dict[str, list[Step]]) -> None:
    # The step after the first begins with a graph of a block and one of the head, and later ones with no more.
    assert [step.graphs for step in counted["compiled"]] == [0, 2, 2]


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_selective_recomputation_runs_neither_products_nor_attention_again(
    documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # it is traced as it is for a GPU
    model = Transformer(ModelConfig.model_validate(TINY | {"n_heads": 2}))
    row = torch.arange(16)
    positions, _ = model._positions_inside((row > 8)[None], row, use_flex=True)
    forward = partial(parallelize._recompute("selective"), model.blocks[0].forward)
    graphs: list[Counter[str]] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(forward, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    x = torch.randn(1, 16, 32, requires_grad=True)
    compiled(x, positions if documents else model._positions(row, 16)).sum().backward()
    before, behind = graphs
    attention = "flex_attention" if documents else "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert (before[attention], behind[attention]) == (1, 0)
    products = [sum(graph[f"aten.{name}.default"] for name in ("mm", "addmm")) for graph in graphs]
    assert products == [4, 8]  # a linear layer's gradients are two
