"""Ranks that divide the tokens of sequences among them train as ranks with complete sequences."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp import build_model
from lm.checkpoint.contents import load_weights
from lm.config.reading import read_hyperparameters
from lm.data.loader import Loader, MicroBatch
from lm.data.run_data import open_data
from lm.errors import ConfigError
from lm.hf.weights import read_directory
from lm.objectives.dpo import DPO
from lm.objectives.objective import NextToken
from lm.runtime.world import World
from lm.training import parallelize
from lm.transformers_linear import apply_rule
from model import Transformer
from tests.support.hf import read_with_model_defaults, save_model
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.parallelism import PARITY_RUN
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp
from tests.support.step_counts import OperatorCounts

pytestmark = pytest.mark.usefixtures("shared_cache")

BASE = PARITY_RUN | LLAMA_STYLE | {"max_seq_len": 64, "batch_size": 1, "total_batch_size": 8}
ANSWERS = {
    "dataset": "jsonl",
    "train_data": "answers.jsonl",
    "tokenizer": "bytes",
    "loss_on": "completion",
    "vocab_size": 300,
}
FINE_TUNING = {
    "dataset": "jsonl",
    "train_data": "answers.jsonl",
    "max_seq_len": 64,
    "batch_size": 1,
    "total_batch_size": 4,
    "amp_dtype": None,
}
SHAPES = {"two": (2, 2), "four": (4, 4), "two of two": (4, 2)}
"""ranks, and how many of them divide a sequence"""
ON_FOUR_RANKS = ("text", "separate answers", "answers and a window", "padded", "balanced documents")
"""kinds whose pieces or sums depend on how many ranks there are"""
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "answers": ANSWERS,
    "separate answers": ANSWERS | {"packing": False},
    "window": {"sliding_window": 9},
    "answers and a window": ANSWERS | {"sliding_window": 9},
    "learned positions": TINY | {"positions": "learned", "max_seq_len": 64, "n_kv_heads": None},
    "padded": {"max_seq_len": 50},
    "mixture": {"n_experts": 3, "d_ff": 24, "router_balance": "bias"},
    "balanced documents": ANSWERS
    | {"n_experts": 3, "d_ff": 24, "router_balance": "sequence", "router_balance_rate": 1.0},
    "full recomputation": ANSWERS | {"activation_checkpointing": "full"},
    "selective recomputation": ANSWERS | {"activation_checkpointing": "selective"},
}
QUICK = "answers and a window"
CLASSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "delta nets": ("qwen3_5_text", {}, {"activation_checkpointing": "selective"}),
    "heads that ranks do not divide": (
        "qwen3_next",
        {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
        {},
    ),
    "delta nets without positions": ("olmo_hybrid", {}, {}),
    "convolutions": ("lfm3", {}, {"activation_checkpointing": "full"}),
}
"""kinds of transformers, sizes of their models, and how they train"""
CLASSES_ON_FOUR_RANKS = ("heads that ranks do not divide", "convolutions")
RUNS_OF_CLASSES: dict[str, dict[str, Any]] = {
    name: FINE_TUNING | {"init_from": name} | changes for name, (_, _, changes) in CLASSES.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with answers, some shorter than a piece of a sequence, some longer than all."""
    path = tmp_path_factory.mktemp("context")
    generator = np.random.default_rng(0)
    lines: list[str] = []
    for length in generator.integers(1, 70, 120):
        words = "".join(chr(97 + letter) for letter in generator.integers(0, 26, length))
        lines.append(json.dumps({"prompt": words[:5], "completion": words}))
    (path / "answers.jsonl").write_text("\n".join(lines))
    return str(path)


def compute_gradients(
    world: World, folder: str, kinds: dict[str, dict[str, Any]], context_parallel: int
) -> dict[str, dict[str, Any]]:
    """Return the loss and the gradients of the first step of each kind, by name."""
    os.chdir(folder)
    # Traced, without the code of PyTorch's compiler, which test_parity.py runs.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found: dict[str, dict[str, Any]] = {}
    group = world.context_group(context_parallel)
    dp = world.rank // group.size, world.size // group.size
    for kind, changes in kinds.items():
        settings = {"context_parallel": context_parallel} | changes
        if "init_from" not in settings:
            settings = BASE | settings
        hp = read_with_model_defaults(settings)
        length = hp.model.max_seq_len
        total = hp.data.total_batch_size
        assert total is not None
        data = open_data(hp.data, hp.model.vocab_size, length, total, 7, *dp)
        loader = Loader(hp.data, data, total, *dp, world.device, group)
        shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
        model = build_model(hp, world.device_mesh(shape), None)
        parallelize.initialize_parameters(model, 7)
        if hp.checkpoint.init_from is not None:
            read_directory(Path(hp.checkpoint.init_from), model)
        model.train()
        batch = next(loader.training(0))
        loss_sum = torch.zeros(())
        for micro_batch in batch.micro_batches:
            loss = NextToken().losses(model, micro_batch).minimized_sum
            (loss * (world.size / batch.n_global_terms)).backward()
            loss_sum += loss.detach()
        gradients = {"loss": (world.all_gather(loss_sum).sum() / batch.n_global_terms).numpy()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor().numpy()
        found[kind] = gradients
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.linalg.norm(value) for value in expected.values())
    for name, value in expected.items():
        scale = max(np.linalg.norm(value), 1e-2 * largest)
        assert np.linalg.norm(found[name] - value) <= 1e-6 * scale, name


def test_divided_sequences_have_the_loss_and_gradients_of_complete_ones(folder: str) -> None:
    kinds = {QUICK: KINDS[QUICK]}
    [complete] = run_ranks(1, compute_gradients, folder, kinds, 1)
    divided = run_ranks(2, compute_gradients, folder, kinds, 2)[0]
    compare(divided[QUICK], complete[QUICK])


@pytest.fixture(scope="module")
def complete(folder: str) -> dict[str, dict[str, Any]]:
    """The gradients of complete sequences, by kind."""
    return run_ranks(1, compute_gradients, folder, KINDS, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_has_the_loss_and_gradients_of_complete_sequences(
    folder: str, complete: dict[str, dict[str, Any]], shape: str
) -> None:
    n_ranks, n_of_a_sequence = SHAPES[shape]
    kinds = {kind: KINDS[kind] for kind in ON_FOUR_RANKS}
    if shape == "two of two":
        kinds = {kind: KINDS[kind] for kind in ("separate answers", "balanced documents")}
    if shape == "two":  # where two ranks compile, not four
        kinds = KINDS | {"compiled": ANSWERS | {"compile": True}}
    divided = run_ranks(n_ranks, compute_gradients, folder, kinds, n_of_a_sequence)[0]
    for kind in kinds:
        compare(divided[kind], complete["answers" if kind == "compiled" else kind])


@pytest.fixture(scope="module")
def complete_classes(folder: str) -> dict[str, dict[str, Any]]:
    """The gradients of complete sequences of classes of transformers, which are saved, by kind."""
    for name, (kind, sizes, _) in CLASSES.items():
        save_model(kind, Path(folder, name), sizes)
    return run_ranks(1, compute_gradients, folder, RUNS_OF_CLASSES, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["two", "four"])
def test_linear_attention_and_convolutions_have_those_of_complete_sequences(
    folder: str, complete_classes: dict[str, dict[str, Any]], shape: str
) -> None:
    n_ranks, n_of_a_sequence = SHAPES[shape]
    kinds = {kind: RUNS_OF_CLASSES[kind] for kind in CLASSES_ON_FOUR_RANKS}
    if shape == "two":  # where the compiler runs twice, not four times
        name = "delta nets without positions"
        kinds = RUNS_OF_CLASSES | {name: RUNS_OF_CLASSES[name] | {"compile": True}}
    found = run_ranks(n_ranks, compute_gradients, folder, kinds, n_of_a_sequence)[0]
    for kind in kinds:
        compare(found[kind], complete_classes[kind])


def compute_gradients_of_pairs(world: World, folder: str, context_parallel: int) -> dict[str, Any]:
    """Return what DPO computes of a batch of pairs: loss, statistics, reference and gradients."""
    os.chdir(folder)
    group = world.context_group(context_parallel)
    dp = world.rank // group.size, world.size // group.size
    settings = BASE | ANSWERS | {"train_data": "pairs.jsonl", "loss_on": "all", "init_from": "x"}
    settings |= {"objective": "dpo", "dpo_loss": "ipo", "sft_weight": 0.5}
    settings |= {"context_parallel": context_parallel}
    hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
    data = open_data(hp.data, hp.model.vocab_size, 64, 8, 7, *dp, pairs=True)
    loader = Loader(hp.data, data, 8, *dp, world.device, group)
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
    models: list[Any] = []
    for seed in (7, 8):
        model = build_model(hp, world.device_mesh(shape), None)
        parallelize.initialize_parameters(model, seed)
        models.append(model.train())
    initial, model = models
    dpo = DPO(hp.objective, data.n_replies, world.device)
    list(dpo.prepare(initial, loader, world, lambda _: None))
    batch = next(loader.training(0))
    loss_sum = torch.zeros(())
    statistics = torch.zeros(len(dpo.statistics), dtype=torch.float64)
    for micro_batch in batch.micro_batches:
        losses = dpo.losses(model, micro_batch)
        (losses.minimized_sum * (world.size / batch.n_global_terms)).backward()
        loss_sum += losses.loss_sum.detach().float()
        statistics += losses.statistics
    found = {
        "loss": (world.all_gather(loss_sum).sum() / batch.n_global_terms).numpy(),
        "statistics": world.all_gather(statistics).sum(dim=0).numpy(),
        "reference": dpo.reference.numpy(),
    }
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.full_tensor().numpy()
    return found


@pytest.mark.slow
def test_replies_that_are_divided_have_the_loss_and_gradients_of_complete_ones(
    tmp_path: Path,
) -> None:
    """With a loss that also depends on the lengths of replies."""
    pairs = [
        {"prompt": "abcd", "chosen": "fgh" * (i % 7 + 1), "rejected": "xy" * (i % 5 + 1)}
        for i in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    [complete] = run_ranks(1, compute_gradients_of_pairs, str(tmp_path), 1)
    compare(run_ranks(4, compute_gradients_of_pairs, str(tmp_path), 2)[0], complete)


RUN = BASE | ANSWERS | {"sliding_window": 9, "max_steps": 6, "validation_rate": 3}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the last step of the run in `folder`."""
    hp = read_hyperparameters({"hyperparameters": RUN}, [], "test")
    found = Transformer(hp.own_model).state_dict()
    load_weights(checkpoints_by_step(folder)[RUN["max_steps"]], found)
    return found


@pytest.mark.slow
def test_a_run_resumes_with_divided_sequences_and_trains_as_with_complete_ones(
    folder: str, tmp_path: Path
) -> None:
    run = RUN | {"train_data": f"{folder}/answers.jsonl"}
    run_fsdp(tmp_path / "complete", config=run, code=0)
    run_fsdp(tmp_path / "divided", "stop_at_step=3", config=run, code=0)
    n_ranks, n_of_a_sequence = SHAPES["two of two"]
    divided = run | {"context_parallel": n_of_a_sequence}
    run_fsdp(tmp_path / "divided", ranks=n_ranks, config=divided, code=0)
    compare_reports(tmp_path / "divided", tmp_path / "complete")
    expected_weights = read_weights(tmp_path / "complete")
    found_weights = read_weights(tmp_path / "divided")
    for name, weight in expected_weights.items():
        assert (found_weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.slow
def test_a_class_of_transformers_trains_with_divided_sequences_as_with_complete_ones(
    folder: str, tmp_path: Path
) -> None:
    """With windows and sinks; also after a resume."""
    save_model("gpt_oss", tmp_path / "model")
    run = {
        "init_from": str(tmp_path / "model"),
        "dataset": "jsonl",
        "train_data": f"{folder}/answers.jsonl",
        "max_seq_len": 50,
        "batch_size": 1,
        "total_batch_size": 4,
        "max_steps": 4,
        "report_rate": 1,
        "amp_dtype": None,
        "compile": False,
        "num_tokens": 0,
    }
    run_fsdp(tmp_path / "complete", config=run, code=0)
    run_fsdp(tmp_path / "divided", "stop_at_step=2", config=run, code=0)
    run_fsdp(tmp_path / "divided", ranks=2, config=run | {"context_parallel": 2}, code=0)
    compare_reports(tmp_path / "divided", tmp_path / "complete")


def compare_reports(divided: Path, complete: Path) -> None:
    for group in ("training", "validation"):
        expected = read_reports(complete, group)
        found = read_reports(divided, group)
        assert found.keys() == expected.keys()
        for step, report in expected.items():
            for metric in {"loss", "grad_norm", "perplexity", "bits_per_byte"} & report.keys():
                assert found[step][metric] == pytest.approx(report[metric], rel=1e-5)


def test_sequences_of_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^test: context_parallel: "):
        read_hyperparameters({"hyperparameters": BASE | {"context_parallel": 33}}, [], "test")


def test_ranks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    refused = run_fsdp(tmp_path, "context_parallel=2", code=2)
    assert "context_parallel: 1 ranks" in refused.stderr
    assert "use one of [1]" in refused.stderr


def train_blocks(world: World) -> dict[str, dict[str, int]]:
    """Return how often each operator is called in a step of two blocks, by how they recompute."""
    found: dict[str, dict[str, int]] = {}
    group = world.context_group(2)
    for mode in ("none", "selective", "full"):
        settings = BASE | {"activation_checkpointing": mode, "context_parallel": 2}
        hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
        shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
        model = build_model(hp, world.device_mesh(shape), None)
        parallelize.initialize_parameters(model, 7)
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        part = group.part(torch.from_numpy(group.own_indices(64))[None])
        with OperatorCounts() as counts:
            batch = MicroBatch(tokens, tokens, torch.zeros(1, 64, dtype=torch.int64), part)
            NextToken().losses(model, batch).minimized_sum.backward()
        found[mode] = {func.name(): n for func, n in counts.calls.items()}
    return found


def test_a_layer_gathers_once_or_again_where_it_is_recomputed() -> None:
    n_layers = BASE["n_layers"]
    for of_rank in run_ranks(2, train_blocks):
        for mode, n_gathers in (("none", 1), ("selective", 2), ("full", 2)):
            counts = of_rank[mode]
            assert counts["_c10d_functional::all_gather_into_tensor"] == n_layers * n_gathers
            assert counts["_c10d_functional::reduce_scatter_tensor"] == n_layers


def differentiate_a_rule(world: World) -> dict[str, int]:
    """Return how often each operator is called by a gated delta rule and its derivative."""
    group = world.context_group(2)
    part = group.part(torch.from_numpy(group.own_indices(64))[None])
    shapes = [(1, 32, 2, 8), (1, 32, 2, 8), (1, 32, 4, 8), (1, 32, 4), (1, 32, 4)]
    query, key, value, g, beta = (torch.rand(shape, requires_grad=True) for shape in shapes)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with OperatorCounts() as counts:
        apply_rule(query, key, value, g, beta, ids, part).sum().backward()
    return {func.name(): n for func, n in counts.calls.items()}


def test_a_gated_delta_rule_exchanges_six_times_and_as_often_in_backward() -> None:
    for counts in run_ranks(2, differentiate_a_rule):
        assert counts["_c10d_functional::all_to_all_single"] == 12
        assert "_c10d_functional::all_gather_into_tensor" not in counts
