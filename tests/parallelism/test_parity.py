"""Every parallelism and memory option trains the same model as one process without them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from fsdp import build_model
from lm.any_model import new_model
from lm.attention import compiler_options
from lm.checkpoint.headers import read_headers
from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.data.run_data import open_data
from lm.data.sampler import SampledSource
from lm.model_config import ModelConfig
from lm.runtime.world import MeshShape, World
from lm.training import optim, parallelize
from lm.training.float8 import convert_to_float8, find_layers
from model import IGNORE_INDEX, Transformer
from tests.support.hf import read_with_model_defaults, save_model
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.parallelism import (
    AMP_DTYPES,
    EQUIVALENT_OPTIONS,
    OFFLOADED,
    PARITY_RUN,
    PARITY_STEPS,
    read_losses,
    sharding_of,
    train_each,
)
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import checkpoints_by_step, train_in_world
from tests.support.step_counts import Collective, count_steps_of_each

pytestmark = pytest.mark.usefixtures("shared_cache")


def setup(changes: dict[str, Any]) -> tuple[Hyperparameters, SampledSource, Transformer]:
    """The hyperparameters, samples and initial model of a run in one process."""
    hp = read_hyperparameters({"hyperparameters": PARITY_RUN | changes}, [], "test")
    data = open_data(hp.data, hp.model.vocab_size, hp.model.max_seq_len, 8, 7)
    assert isinstance(data.train, SampledSource)
    model = Transformer(hp.own_model)
    parallelize.initialize_parameters(model, 7)
    return hp, data.train, model


def plain_losses(changes: dict[str, Any]) -> list[float]:
    """Training losses of one process, a document at a time, with PyTorch's clipping and AdamW."""
    hp, source, model = setup(changes)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": hp.optim.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=hp.optim.lr, betas=(hp.optim.beta1, hp.optim.beta2))
    losses = []
    for step in range(PARITY_STEPS):
        loss_sum, n_targets = torch.zeros(()), 0
        for inputs, targets, document_ids, _ in (
            dataset[i] for dataset, i in source.global_batch(step)
        ):
            ids = np.zeros_like(targets) if document_ids is None else document_ids
            for mask in (ids == document for document in np.unique(ids)):
                document_targets = torch.from_numpy(targets[mask])
                logits = model(torch.from_numpy(inputs[mask])[None])[0]
                loss_sum = loss_sum + F.cross_entropy(logits, document_targets, reduction="sum")
                n_targets += int((document_targets != IGNORE_INDEX).sum())
        (loss_sum / n_targets).backward()
        losses.append(loss_sum.item() / n_targets)
        assert hp.optim.grad_clip is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), hp.optim.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = optim.learning_rate(hp.optim, step, PARITY_STEPS)
        adamw.step()
        adamw.zero_grad()
    return losses


MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "ffn": "gelu", "bias": "all"},
    "decaying": {"lr_schedule": "linear", "warmup_steps": 2},
    "odd": {
        "d_model": 36,
        "vocab_size": 61,
        "d_ff": 50,
    },  # dimensions that are not divisible by the ranks
    "windowed": LLAMA_STYLE | {"sliding_window": 5},
    "mixture": LLAMA_STYLE | {"n_experts": 3, "d_ff": 24, "router_balance": "none"},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "dropout-recompute": {"dropout": 0.2, "activation_checkpointing": "full"},
    "dropout-recompute-some": {"dropout": 0.2, "activation_checkpointing": "selective"},
}


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The training losses of one process with `BASE`."""
    return plain_losses({})


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The training losses of the runs in `EQUAL` on two ranks."""
    return run_ranks(2, train_each, str(tmp_path_factory.mktemp("equal")), EQUIVALENT_OPTIONS)[0]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The training losses of the other runs on two ranks."""
    return run_ranks(
        2, train_each, str(tmp_path_factory.mktemp("others")), MODELS | DROPOUT | AMP_DTYPES
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUIVALENT_OPTIONS)
def test_two_ranks_train_as_one_process(
    name: str, equal: dict[str, list[float]], plain: list[float]
) -> None:
    expected = (
        plain_losses(OFFLOADED) if OFFLOADED.items() <= EQUIVALENT_OPTIONS[name].items() else plain
    )
    assert equal[name] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_groups_of_ranks_train_as_one_process(plain: list[float], tmp_path: Path) -> None:
    names = ("full-shard", "hybrid-full-shard", "hybrid-grad-shard")
    runs = {name: sharding_of(name, 4) for name in names}
    each = {"batch_size": 1, "sync_each_micro_step": True}
    runs["groups-of-2-each"] = runs["hybrid-full-shard"] | each
    for name, losses in run_ranks(4, train_each, str(tmp_path), runs)[0].items():
        assert losses == pytest.approx(plain, rel=1e-5), name


def test_two_ranks_train_a_llama_as_one_process(tmp_path: Path) -> None:
    runs = {"float32": LLAMA_STYLE, "bfloat16": LLAMA_STYLE | {"amp_dtype": "bfloat16"}}
    losses = run_ranks(2, train_each, str(tmp_path), runs)[0]
    expected = plain_losses(LLAMA_STYLE)
    assert losses["float32"] == pytest.approx(expected, rel=1e-5)
    assert losses["bfloat16"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_other_models_train_as_in_one_process(name: str, others: dict[str, list[float]]) -> None:
    assert others[name] == pytest.approx(plain_losses(MODELS[name]), rel=1e-5)


@pytest.mark.slow
def test_recomputation_repeats_dropout(others: dict[str, list[float]], plain: list[float]) -> None:
    assert others["dropout-recompute"] == pytest.approx(others["dropout"], rel=1e-6)
    assert others["dropout-recompute-some"] == pytest.approx(others["dropout"], rel=1e-6)
    assert others["dropout"] != pytest.approx(plain, rel=1e-3)


def seeds_of_steps(world: World, directory: str) -> list[int]:
    """PyTorch's seed after each step but the last."""
    os.chdir(directory)
    seeds: list[int] = []
    settings = {"dropout": 0.2, "run_name": "seeds"}
    train_in_world(world, PARITY_RUN | settings, lambda _: seeds.append(torch.initial_seed()))
    return seeds[1:]


@pytest.mark.slow
def test_dropout_differs_by_rank_and_step(tmp_path: Path) -> None:
    seeds = [seed for of_rank in run_ranks(2, seeds_of_steps, str(tmp_path)) for seed in of_rank]
    assert len(set(seeds)) == len(seeds) == 2 * (PARITY_STEPS - 1)


@torch.library.custom_op("tests::attention", mutates_args=())
def attention(values: Tensor, dropout_p: float) -> Tensor:
    """An operator with dropout, as the fused kernels of a GPU are."""
    if dropout_p == 0:
        return values.clone()
    return values * (torch.rand_like(values) >= dropout_p)


def keep_output(ctx: Any, **called: Any) -> None:
    ctx.save_for_backward(called["output"])


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (output,) = ctx.saved_tensors
    return gradient * (output != 0), None


attention.register_autograd(backward, setup_context=keep_output)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_draws_after_attention_what_forward_drew(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = torch.ops.tests.attention.default
    monkeypatch.setattr(parallelize, "SAVE_OPS", parallelize.SAVE_OPS | {operator})
    values = torch.randn(100, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def block(values: Tensor) -> Tensor:
        return F.dropout(operator(values, dropout), 0.5) ** 2

    gradients: list[Tensor] = []
    for recompute in (False, True):
        torch.manual_seed(0)
        selective = parallelize.checkpoint_function("selective", has_experts=False)
        outputs = selective(block, values) if recompute else block(values)
        gradients += torch.autograd.grad(outputs.sum(), values)
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_packed_documents_train_as_separate_ones(tmp_path: Path) -> None:
    lines = [
        {
            "prompt": f"{n} squared is ",
            "completion": f"{n * n}, which is {'even' if n % 2 else 'odd'}",
        }
        for n in range(60)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = str(tmp_path / "samples.jsonl")
    data = {
        "dataset": "jsonl",
        "train_data": name,
        "val_data": name,
        "loss_on": "completion",
        "vocab_size": 264,
    }
    packed = data | {"batch_size": 1, "max_seq_len": 40}
    runs = {positions: packed | {"positions": positions} for positions in ("learned", "rope")}
    losses = run_ranks(2, train_each, str(tmp_path), runs)[0]
    for positions, run in runs.items():
        assert losses[positions] == pytest.approx(plain_losses(run), rel=1e-5), positions


@pytest.mark.slow
@pytest.mark.parametrize("dtype", AMP_DTYPES)
def test_lower_precision_trains_close_to_float32(
    dtype: str, others: dict[str, list[float]], plain: list[float]
) -> None:
    assert others[dtype] == pytest.approx(plain, rel=1e-2)
    assert others[dtype] != pytest.approx(plain, rel=1e-6)


COMPILED = MODELS["mixture"] | OFFLOADED | {"activation_checkpointing": "selective"}


def train_compiled(world: World, directory: str) -> tuple[list[float], list[int]]:
    """The losses, and how many graphs were compiled before each step."""
    os.chdir(directory)
    graphs: list[int] = []

    def on_step_start(_step: int) -> None:
        graphs.append(counters["stats"]["unique_graphs"])

    settings = COMPILED | {"compile": True, "run_name": "compiled"}
    train_in_world(world, PARITY_RUN | settings, on_step_start)
    assert not counters["graph_break"]
    return read_losses(Path(), "compiled"), graphs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_compile_trains_the_same_with_one_graph_for_all_blocks(tmp_path: Path) -> None:
    """Of a mixture, partly recomputed, whose activations are offloaded."""
    ((losses, graphs),) = run_ranks(1, train_compiled, str(tmp_path))
    assert losses == pytest.approx(plain_losses(COMPILED), rel=1e-5)
    # One graph of a block and one of the head are compiled in the first step.
    assert graphs == [0, 2, 2, 2, 2]


FLOAT8: dict[str, Any] = {"amp_dtype": "bfloat16", "compile": False, "ffn": "gelu", "bias": "none"}
RECIPES: dict[str, dict[str, Any]] = {
    "bfloat16": FLOAT8,
    "rowwise": FLOAT8 | {"float8": "rowwise"},
    "tensorwise": FLOAT8 | {"float8": "tensorwise"},
    "gathered-in-bfloat16": FLOAT8 | {"float8": "tensorwise", "cpu_offload": True},
    "stopped": FLOAT8 | {"float8": "tensorwise", "max_steps": 3},
}


@dataclass(frozen=True)
class Float8Runs:
    """What runs with each of `RECIPES` on two ranks leave."""

    losses: dict[str, list[float]]
    """of every step, also of the run "resumed", which resumes "stopped", and of "one-rank" """
    collectives: dict[str, Counter[Collective]]
    """of a step"""
    slices: list[dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]]
    """dtype, shape and start of every tensor's slices, by checkpoint"""


def train_with_float8(
    world: World, directory: str
) -> tuple[dict[str, list[float]], dict[str, Counter[Collective]]]:
    steps = count_steps_of_each(world, directory, RECIPES, PARITY_RUN)
    losses = {name: read_losses(Path(directory), name) for name in RECIPES}
    (manifest,) = Path(directory, "runs", "stopped", "checkpoints").glob("*/manifest.json")
    resumed = RECIPES["tensorwise"] | {"resume": str(manifest.parent)}
    losses |= train_each(world, directory, {"resumed": resumed})
    return losses, {name: counted[-1].collectives for name, counted in steps.items()}


@pytest.fixture(scope="module")
def float8_runs(tmp_path_factory: pytest.TempPathFactory) -> Float8Runs:
    if torch.__version__ < "2.13":
        pytest.skip("on CPUs, older PyTorch than 2.13 multiplies with one scale per tensor only")
    folder = tmp_path_factory.mktemp("float8")
    losses, collectives = run_ranks(2, train_with_float8, str(folder))[0]
    one_rank = {"one-rank": RECIPES["tensorwise"]}
    losses |= run_ranks(1, train_each, str(folder), one_rank)[0]
    found = []
    for recipe in RECIPES:
        for manifest in (folder / "runs" / recipe / "checkpoints").glob("*/manifest.json"):
            slices = {}
            for name, parts in read_headers(manifest.parent.glob("*.safetensors")).items():
                slices[name] = [(part.dtype, part.shape, part.start) for part in parts]
            found.append(slices)
    return Float8Runs(losses, collectives, found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_float8_trains_close_to_bfloat16(recipe: str, float8_runs: Float8Runs) -> None:
    losses = float8_runs.losses
    assert losses[recipe] != losses["bfloat16"]
    assert losses[recipe] == pytest.approx(losses["bfloat16"], rel=0.02)


@pytest.mark.slow
def test_float8_all_gather_trains_as_one_in_bfloat16(float8_runs: Float8Runs) -> None:
    losses = float8_runs.losses
    assert losses["tensorwise"] == pytest.approx(losses["gathered-in-bfloat16"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "bytes_of_a_weight"),
    [("bfloat16", 2), ("tensorwise", 1), ("gathered-in-bfloat16", 2)],
)
def test_float8_all_gather_bytes(
    recipe: str, bytes_of_a_weight: int, float8_runs: Float8Runs
) -> None:
    weights = TINY["d_model"] ** 2 * 12
    norms = 2 * TINY["d_model"]
    n_bytes = weights * bytes_of_a_weight + norms * 2  # norms are gathered in bfloat16
    # In two micro-batches, both blocks are gathered before forward and before backward.
    assert float8_runs.collectives[recipe]["all-gather", 2, n_bytes] == 8


@pytest.mark.slow
def test_float8_weights_are_converted_alike_on_any_number_of_ranks(float8_runs: Float8Runs) -> None:
    losses = float8_runs.losses
    assert losses["one-rank"] == pytest.approx(losses["tensorwise"], rel=1e-6)


@pytest.mark.slow
def test_float8_scales_are_computed_once_a_step(float8_runs: Float8Runs) -> None:
    n_weights = TINY["n_layers"] * 6
    reductions = float8_runs.collectives["tensorwise"] - float8_runs.collectives["bfloat16"]
    scales = {key: times for key, times in reductions.items() if key[0] == "all-reduce"}
    assert scales == {("all-reduce", 2, 4 * n_weights): 1}  # of two micro-batches


@pytest.mark.slow
def test_float8_resumes_exactly(float8_runs: Float8Runs) -> None:
    losses = float8_runs.losses
    assert losses["stopped"] + losses["resumed"] == losses["tensorwise"]


@pytest.mark.slow
def test_float8_checkpoints_are_those_of_bfloat16(float8_runs: Float8Runs) -> None:
    assert len(float8_runs.slices) >= len(RECIPES)
    assert all(slices == float8_runs.slices[0] for slices in float8_runs.slices)


OF_CLASS: dict[str, Any] = {
    key: value
    for key, value in PARITY_RUN.items()
    if key not in ModelConfig.model_fields or key == "max_seq_len"
}
OF_CLASS |= {"amp_dtype": "bfloat16", "compile": False, "max_steps": 3, "validation_rate": 3}


def train_class_with_float8(
    world: World, directory: str, run: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, Counter[Collective]]]:
    float8 = {"float8": "tensorwise"}
    runs = {"bfloat16": {}, "tensorwise": float8, "stopped": float8 | {"stop_at_step": 2}}
    steps = count_steps_of_each(world, directory, runs, run)
    losses = {name: read_losses(Path(directory), name) for name in runs}
    stopped = checkpoints_by_step(Path(directory), "stopped")[2]
    losses |= train_each(world, directory, {"resumed": float8 | {"resume": str(stopped)}}, run)
    return losses, {name: counted[-1].collectives for name, counted in steps.items()}


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older ones multiply with one scale per tensor only"
)
def test_float8_trains_linear_layers_of_a_class_of_transformers(tmp_path: Path) -> None:
    """Their weights are gathered in float8, with scales that are computed once a step."""
    save_model("glm4_moe", tmp_path / "model")
    run = OF_CLASS | {"init_from": str(tmp_path / "model")}
    losses, collectives = run_ranks(2, train_class_with_float8, str(tmp_path), run)[0]
    assert losses["stopped"] + losses["resumed"] == losses["tensorwise"]
    assert losses["tensorwise"] != losses["bfloat16"]
    assert losses["tensorwise"] == pytest.approx(losses["bfloat16"], rel=0.02)
    model = new_model(read_with_model_defaults(run).model)
    n_layers = len(find_layers(model, "tensorwise", on_gpu=False))
    assert n_layers > 8
    added = collectives["tensorwise"] - collectives["bfloat16"]
    scales = {key: times for key, times in added.items() if key[0] == "all-reduce"}
    assert scales == {("all-reduce", 2, 4 * n_layers): 1}


@pytest.mark.slow
def test_what_float8_leaves_out_is_said(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    model = new_model(read_with_model_defaults(OF_CLASS | {"init_from": str(tmp_path)}).model)
    note = convert_to_float8(model, "tensorwise", on_gpu=False, shards=1)
    assert re.search(
        r"^float8: tensorwise computes \d+% .* mlp\.experts\.gate_up_proj \(", str(note)
    )


def _gradients(
    world: World, sharding: str, amp_dtype: torch.dtype | None, n_micro_steps: int
) -> dict[str, Tensor]:
    """Return the gradients of one rank after a step of random tokens."""
    hp = read_hyperparameters({"hyperparameters": TINY | {"sharding": sharding}}, [], "test")
    mesh = world.device_mesh(parallelize.mesh_shape(hp.parallel, 1, 1))
    model = build_model(hp, mesh, amp_dtype)
    parallelize.initialize_parameters(model, 7)
    generator = torch.Generator().manual_seed(0)
    for i in range(n_micro_steps):
        tokens = torch.randint(hp.model.vocab_size, (2, 16), generator=generator)
        parallelize.start_micro_step(model, hp.parallel, i == n_micro_steps - 1)
        cast(Tensor, model(tokens, tokens)).backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.to_local()
    return gradients


@pytest.mark.parametrize("sharding", ["full-shard", "grad-shard", "no-shard"])
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_micro_steps", [1, 4])
def test_one_rank_reduces_in_place_to_equal_bits(
    sharding: str,
    amp_dtype: torch.dtype | None,
    n_micro_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocated: list[Tensor] = []
    allocate = parallelize.ReduceInPlace.allocate

    def record(self: parallelize.ReduceInPlace, *args: Any, **options: Any) -> Tensor:
        allocated.append(allocate(self, *args, **options))
        return allocated[-1]

    monkeypatch.setattr(parallelize.ReduceInPlace, "allocate", record)
    found = in_world(lambda world: _gradients(world, sharding, amp_dtype, n_micro_steps))
    buffers = {tensor.untyped_storage().data_ptr() for tensor in allocated}
    assert len(allocated) == 2 * len(buffers)  # an input and an output of each unit
    assert {each.untyped_storage().data_ptr() for each in found.values()} == buffers

    monkeypatch.setattr(parallelize, "reduce_in_place_on_one_rank", lambda *_: None)
    copied = in_world(lambda world: _gradients(world, sharding, amp_dtype, n_micro_steps))
    assert all(torch.equal(found[name], gradient) for name, gradient in copied.items())


def test_deterministic_selects_deterministic_kernels() -> None:
    def build(world: World) -> dict[str, Any]:
        settings = PARITY_RUN | {"deterministic": True, "compile": True}
        hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
        build_model(hp, world.device_mesh(MeshShape(1, 1)), None)
        assert torch.are_deterministic_algorithms_enabled()
        return compiler_options()

    assert compiler_options() == {}
    try:
        assert in_world(build) == {"deterministic": True}
    finally:
        torch.use_deterministic_algorithms(False)


def initial_weights(
    world: World, shardings: list[str], changes: dict[str, Any]
) -> list[dict[str, Any]]:
    """The initial weights for each of `shardings`."""
    found = []
    for sharding in shardings:
        hp = read_hyperparameters(
            {"hyperparameters": PARITY_RUN | changes | {"sharding": sharding}}, [], "test"
        )
        shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
        model = build_model(hp, world.device_mesh(shape), None)
        parallelize.initialize_parameters(model, 7)
        parameters = dict(model.named_parameters())
        full = {name: cast(DTensor, p).full_tensor() for name, p in parameters.items()}
        found.append({name: tensor.detach().numpy() for name, tensor in full.items()})
    world.all_gather_object(None)  # no rank leaves while another one needs its store
    return found


@pytest.mark.slow
def test_initial_weights_depend_on_no_world_size_or_strategy() -> None:
    size = {"vocab_size": 2**17, "n_layers": 1}  # embedding and head are drawn in 4 chunks each
    hp = read_hyperparameters({"hyperparameters": PARITY_RUN | size}, [], "test")
    plain = Transformer(hp.own_model)
    parallelize.initialize_parameters(plain, 7)
    for weights in run_ranks(3, initial_weights, ["full-shard", "no-shard"], size)[-1]:
        for name, parameter in plain.named_parameters():
            assert np.array_equal(weights[name], parameter.detach().numpy()), name


def test_initial_weights_differ_by_name_and_seed() -> None:
    hp = read_hyperparameters({"hyperparameters": PARITY_RUN}, [], "test")
    drawn: list[Tensor] = []
    for seed in (7, 8):
        model = Transformer(hp.own_model)
        parallelize.initialize_parameters(model, seed)
        drawn += [model.get_parameter(f"blocks.{i}.attention.q_proj.weight") for i in (0, 1)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))
