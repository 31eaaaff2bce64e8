"""The counted cost of a step: bytes between ranks, synchronizations, operators, compilations.

Dispatch modes count in `fsdp.execute` itself, including backward and FSDP's hooks. A step is
everything between two calls of `on_step_start`, in steps without a report.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lm.config.reading import read_hyperparameters
from model import Transformer
from tests.support.models import unit_sizes
from tests.support.ranks import run_ranks
from tests.support.step_counts import COUNTED_RUN, Collective, StepCounts, count_steps_of_each

SHARDINGS = ("full-shard", "grad-shard", "no-shard")
QUICK: dict[str, dict[str, Any]] = {
    "full-shard": {},
    "layers-1": {"n_layers": 1},
    "layers-3": {"n_layers": 3},
}
TWO: dict[str, dict[str, Any]] = {  # runs of two ranks
    **{f"{name}-x3": {"sharding": name, "total_batch_size": 6} for name in SHARDINGS},
    "full-shard-x3-each": {"total_batch_size": 6, "sync_each_micro_step": True},
    "one-unit": {"layer_wrap": False},
    "tied": {"tie_embeddings": True},
    "bfloat16": {"amp_dtype": "bfloat16"},
    "reduced-in-bfloat16": {"amp_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "float16": {"amp_dtype": "float16"},
    "skip-spikes": {"skip_spikes": 6, "total_batch_size": 6},
}
FOUR: dict[str, dict[str, Any]] = {  # runs of four ranks, two groups of two
    "hybrid-full-shard": {"sharding": "hybrid-full-shard", "shard_group_size": 2},
    "hybrid-grad-shard-x3": {
        "sharding": "hybrid-grad-shard",
        "shard_group_size": 2,
        "total_batch_size": 12,
    },
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepCounts]]:
    """Steps of the runs in `QUICK`, on the last rank."""
    return run_ranks(2, count_steps_of_each, str(tmp_path_factory.mktemp("quick")), QUICK)[-1]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepCounts]]:
    """Steps of the other runs, on the last rank."""
    runs = TWO | {"muon": {"optimizer": "muon"}}
    for how in ("selective", "full"):
        runs[f"recompute-{how}"] = {"activation_checkpointing": how}
    two = run_ranks(2, count_steps_of_each, str(tmp_path_factory.mktemp("two")), runs)[-1]
    return two | run_ranks(4, count_steps_of_each, str(tmp_path_factory.mktemp("four")), FOUR)[-1]


def expected(ranks: int, changes: dict[str, Any]) -> Counter[Collective]:
    """The collectives of a step, from the parameter counts."""
    hp = read_hyperparameters({"hyperparameters": COUNTED_RUN | changes}, [], "test")
    *blocks, embedding, head = unit_sizes(hp.own_model)
    blocks, ends = blocks if hp.parallel.layer_wrap else [], [embedding, head]
    units = (
        [*blocks, *([sum(ends)] if hp.own_model.tie_embeddings else ends)]
        if hp.parallel.layer_wrap
        else [hp.model.n_parameters]
    )
    gathered = units
    micro_steps = (hp.data.total_batch_size or ranks) // ranks
    if (
        hp.parallel.reshard_after_forward
    ):  # in every micro-step, and blocks, which are resharded after forward, twice
        gathered = (units + blocks) * micro_steps
    reduced = units * (micro_steps if hp.parallel.sync_each_micro_step else 1)
    replicas = (
        ranks
        if hp.parallel.sharding == "no-shard"
        else ranks // (hp.parallel.shard_group_size or ranks)
    )
    shards = ranks // replicas
    width = 4 if hp.precision.amp_dtype is None else 2  # bytes per gathered value
    reduced_width = 4 if hp.parallel.reduce_dtype == "float32" else 2
    step: Counter[Collective] = Counter(
        {("all-reduce", "control", 8): 1}
    )  # the preemption agreement, two int32
    if shards > 1:
        step.update(("all-gather", shards, width * size) for size in gathered)
        step.update(("reduce-scatter", shards, reduced_width * size) for size in reduced)
        step["all-reduce", shards, 4 * len(list(Transformer(hp.own_model).parameters()))] += (
            1  # gradient norms
        )
    if hp.skipping.skip_spikes is not None:
        step["all-reduce", ranks, 8 * 2 * ranks] += 1  # every rank's loss and norm, in float64
    if replicas > 1:
        step.update(("all-reduce", replicas, 4 * size // shards) for size in units)
    return step


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in TWO | FOUR)]
)
def test_step_collectives_and_synchronizations(name: str, request: pytest.FixtureRequest) -> None:
    wanted = expected(4, FOUR[name]) if name in FOUR else expected(2, (QUICK | TWO)[name])
    for step in request.getfixturevalue("quick" if name in QUICK else "others")[name]:
        assert step.collectives == wanted
        # The preemption decision, which gloo reduces on the host.
        assert step.synchronizations == ["tolist of torch.int32"]


def test_step_operators_grow_linearly_with_the_layers(quick: dict[str, list[StepCounts]]) -> None:
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
def test_step_of_muon_has_two_all_to_alls_for_small_matrices(
    quick: dict[str, list[StepCounts]], others: dict[str, list[StepCounts]]
) -> None:
    for muon, adamw in zip(others["muon"], quick["full-shard"], strict=True):
        kinds = Counter(kind for kind, _, _ in (muon.collectives - adamw.collectives).elements())
        assert kinds == {"all-to-all": 2}
        assert muon.synchronizations == adamw.synchronizations


@pytest.mark.slow
def test_selective_checkpointing_repeats_no_product_or_attention(
    quick: dict[str, list[StepCounts]], others: dict[str, list[StepCounts]]
) -> None:
    attention, products = (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        ("aten.mm", "aten.addmm"),
    )
    nothing = quick["full-shard"][-1].operators
    selective, full = (others[f"recompute-{how}"][-1].operators for how in ("selective", "full"))
    assert selective[attention] == nothing[attention] == 2  # blocks
    assert [selective[name] for name in products] == [nothing[name] for name in products]
    assert selective.total() > nothing.total()
    assert full[attention] == 2 * nothing[attention]
    assert sum(full[name] for name in products) > sum(nothing[name] for name in products)
