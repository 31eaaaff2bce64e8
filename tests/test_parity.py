"""Every way of spreading a run over processes trains the same model as one plain process without any of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from determined import core
from torch.distributed.checkpoint import FileSystemReader

import fsdp
from lm import config, optim, parallelize
from lm.data import loader
from lm.data.dataset import MixtureDataset
from lm.determined.context import TorchDistributedContext
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from model import IGNORE_INDEX, ModelConfig, Transformer
from tests.support import TINY, run_ranks

STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
STEPS = 5
BASE = TINY | {
    "max_steps": STEPS,
    "report_rate": 1,
    "validation_rate": STEPS,
    "total_batch_size": 8,
    "batch_size": 2,
    "validation_batches": 1,
    "amp_dtype": None,
    "lr": 1e-2,
    "grad_clip": 0.5,
    "seed": 7,
}


def prepared(changes: dict[str, Any]) -> tuple[config.Hyperparameters, MixtureDataset, loader.Loader, Transformer]:
    """What a run of one plain process starts with: settings, samples, their order, and the initial model."""
    hp = config.read({"hyperparameters": BASE | changes}, [], "test")
    data = loader.open_data(hp, hp.vocab_size, hp.max_seq_len, 8, 7)
    assert isinstance(data.train, MixtureDataset)
    model = Transformer(hp)
    parallelize.initialize(model, 7)
    return hp, data.train, loader.Loader(hp, data, 8, 0, 1, 7, torch.device("cpu")), model


def plain_losses(changes: dict[str, Any]) -> list[float]:
    """Training losses of the textbook loop: one process, whole batches, PyTorch's own clipping and AdamW."""
    hp, source, batches, model = prepared(changes)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": hp.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=hp.lr, betas=(hp.beta1, hp.beta2))
    losses = []
    for step in range(STEPS):
        rows = [source[i] for i in batches.sample_ids(step)]
        inputs, targets = (torch.from_numpy(np.stack(part)) for part in list(zip(*rows, strict=True))[:2])
        loss = model(inputs, targets) / targets.numel()
        losses.append(loss.item())
        loss.backward()
        assert hp.grad_clip is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = optim.learning_rate(hp, step, STEPS)
        adamw.step()
        adamw.zero_grad()
    return losses


def sample_by_sample(changes: dict[str, Any]) -> list[float]:
    """Training losses on packed samples, of one process that puts each piece of a sample through the model alone."""
    hp, source, batches, model = prepared(changes)
    optimizer = optim.Optimizer(hp, model.named_parameters())
    losses = []
    for step in range(STEPS):
        loss_sum, count = torch.zeros(()), 0
        for inputs, targets, document_ids in (source[i] for i in batches.sample_ids(step)):
            assert document_ids is not None
            for document in np.unique(document_ids):
                piece = document_ids == document
                learned = torch.from_numpy(targets[piece])
                logits = model(torch.from_numpy(inputs[piece])[None])[0]
                loss_sum = loss_sum + F.cross_entropy(logits, learned, reduction="sum", ignore_index=IGNORE_INDEX)
                count += int((learned != IGNORE_INDEX).sum())
        (loss_sum / count).backward()
        losses.append(loss_sum.item() / count)
        optimizer.step(optim.learning_rate(hp, step, STEPS), torch.ones(()))
    return losses


def run_each(world: World, folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """On every rank: `fsdp.run` for each of `runs`; returns their training losses by name."""
    os.chdir(folder)
    losses = {}
    for name, changes in runs.items():
        hp = config.read({"hyperparameters": BASE | {"run_name": name} | changes}, [], "test")
        place = RunDir(name)
        distributed = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
        with core.init(distributed=distributed, checkpoint_storage=str(place.checkpoints.absolute())) as context:
            fsdp.run(hp, world, context, None, place)
        lines = [json.loads(line) for line in (place.path / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if line["group"] == "training"]
    return losses


LLAMA = {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none", "n_kv_heads": 2}
EQUAL: dict[str, dict[str, Any]] = {  # the same training, spread or computed otherwise
    **{name: {"sharding": name} for name in STRATEGIES},
    "4x1": {"batch_size": 4},
    "2x2": {"batch_size": 2},
    "1x4": {"batch_size": 1},
    "1x4-no-shard": {"batch_size": 1, "sharding": "no-shard"},
    "1x4-each": {"batch_size": 1, "sync_each_micro_step": True},
    "1x4-no-shard-each": {"batch_size": 1, "sharding": "no-shard", "sync_each_micro_step": True},
    "one-unit": {"layer_wrap": False},
    "recompute": {"activation_checkpointing": "full"},
    "recompute-some": {"activation_checkpointing": "selective"},
    "offload-activations": {"activation_offload": True},
    "recompute-and-offload": {"activation_checkpointing": "full", "activation_offload": True},
    "compiled-offload": {"activation_offload": True, "compile": True},
    "compiled-recompute-and-offload": {
        "activation_checkpointing": "full",
        "activation_offload": True,
        "compile": True,
    },
    "offload": {"cpu_offload": True},
}
OTHERS: dict[str, dict[str, Any]] = {  # other models
    "llama": LLAMA,
    "tied": {"tie_embeddings": True, "ffn": "gelu", "bias": "all"},
    "odd": {"d_model": 36, "vocab_size": 61, "d_ff": 50},  # rows that no number of ranks divides
    "windowed": LLAMA | {"sliding_window": 5},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "dropout-recompute": {"dropout": 0.2, "activation_checkpointing": "full"},
    "dropout-recompute-some": {"dropout": 0.2, "activation_checkpointing": "selective"},
}
LOW: dict[str, dict[str, Any]] = {"bfloat16": {"amp_dtype": "bfloat16"}, "float16": {"amp_dtype": "float16"}}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The training losses of every run above, made by two processes."""
    return run_ranks(2, run_each, str(tmp_path_factory.mktemp("two")), EQUAL | OTHERS | DROPOUT | LOW)[0]


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_have_the_losses_of_a_plain_process(name: str, two_ranks: dict[str, list[float]]) -> None:
    assert two_ranks[name] == pytest.approx(plain_losses({}), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_so_do_one_and_four(ranks: int, tmp_path: Path) -> None:
    runs = {name: EQUAL[name] for name in STRATEGIES}
    if ranks == 4:
        runs["groups-of-2"] = {"sharding": "hybrid-full-shard", "shard_group_size": 2}
        runs["groups-of-2-each"] = runs["groups-of-2"] | {"batch_size": 1, "sync_each_micro_step": True}
    for name, losses in run_ranks(ranks, run_each, str(tmp_path), runs)[0].items():
        assert losses == pytest.approx(plain_losses({}), rel=1e-5), name


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_shard_alike(name: str, two_ranks: dict[str, list[float]]) -> None:
    assert two_ranks[name] == pytest.approx(plain_losses(OTHERS[name]), rel=1e-5)


def test_recomputation_under_dropout_draws_the_same_numbers(two_ranks: dict[str, list[float]]) -> None:
    assert two_ranks["dropout-recompute"] == pytest.approx(two_ranks["dropout"], rel=1e-6)
    assert two_ranks["dropout-recompute-some"] == pytest.approx(two_ranks["dropout"], rel=1e-6)
    assert two_ranks["dropout"] != pytest.approx(plain_losses({}), rel=1e-3)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_packed_samples_have_the_loss_of_each_alone_over_all_ranks_and_micro_steps(
    positions: str, tmp_path: Path
) -> None:
    lines = [
        {"prompt": f"{n} squared is ", "completion": f"{n * n}, which is {'even' if n % 2 else 'odd'}"}
        for n in range(60)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = str(tmp_path / "samples.jsonl")
    data = {"dataset": "jsonl", "train_data": name, "val_data": name, "loss_on": "completion", "vocab_size": 264}
    changes = data | {"batch_size": 1, "max_seq_len": 40, "positions": positions}
    losses = run_ranks(2, run_each, str(tmp_path), {"packed": changes})[0]["packed"]
    assert losses == pytest.approx(sample_by_sample(changes), rel=1e-5)


@pytest.mark.parametrize("dtype", LOW)
def test_lower_precision_follows_float32(dtype: str, two_ranks: dict[str, list[float]]) -> None:
    assert two_ranks[dtype] == pytest.approx(plain_losses({}), rel=1e-2)
    assert two_ranks[dtype] != pytest.approx(plain_losses({}), rel=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_compiled_blocks_compute_the_same(tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {"compiled": {"compile": True, "activation_checkpointing": "full"}}
    assert run_ranks(1, run_each, str(tmp_path), runs)[0]["compiled"] == pytest.approx(plain_losses({}), rel=1e-5)


def test_float8_learns_as_bfloat16_does_and_keeps_the_parameters_names(tmp_path: Path) -> None:
    base: dict[str, Any] = {"d_model": 32, "n_heads": 4, "amp_dtype": "bfloat16", "compile": False}
    recipes: list[str | None] = [None, "tensorwise", "rowwise"]
    losses = run_ranks(2, run_each, str(tmp_path), {str(recipe): base | {"float8": recipe} for recipe in recipes})[0]
    for recipe in ("tensorwise", "rowwise"):
        assert losses[recipe] != losses["None"]
        assert losses[recipe] == pytest.approx(losses["None"], rel=0.02)
    folders = (
        next((tmp_path / "runs" / str(recipe) / "checkpoints").glob("*/manifest.json")).parent for recipe in recipes
    )
    names = [set(FileSystemReader(folder).read_metadata().state_dict_metadata) for folder in folders]
    assert names[0] == names[1] == names[2]


@pytest.mark.parametrize(
    ("settings", "document_ids", "device", "kernel"),
    [
        ({}, False, "cpu", "flash attention"),
        ({"n_heads": 8, "n_kv_heads": 2}, False, "cpu", "flash attention"),
        ({"sliding_window": 8}, False, "cpu", "flash attention"),
        ({"dropout": 0.1}, False, "cpu", "math"),
        ({}, True, "cpu", "flash attention"),
        ({"d_model": 128}, True, "cuda", "FlexAttention"),
        ({"d_model": 128, "sliding_window": 8}, False, "cuda", "FlexAttention"),
    ],
)
def test_the_kernel_that_computes_attention_is_named(
    settings: dict[str, Any], document_ids: bool, device: str, kernel: str
) -> None:
    model = ModelConfig.model_validate({"d_model": 64, "n_heads": 4, "max_seq_len": 32} | settings)
    assert parallelize.attention_kernel(model, document_ids, torch.bfloat16, torch.device(device)) == kernel


def initial_weights(world: World, shardings: list[str]) -> list[dict[str, Any]]:
    """On every rank: the whole initial weights under each of `shardings`, as arrays by name."""
    found = []
    for sharding in shardings:
        hp = config.read({"hyperparameters": BASE | {"sharding": sharding}}, [], "test")
        with torch.device("meta"):
            model = Transformer(hp)
        shape = parallelize.mesh_shape(hp, world.size, world.launch.local_size)
        parallelize.parallelize(model, hp, world.mesh(*shape), None, 7)
        found.append({name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()})  # type: ignore
    return found


def test_initial_weights_depend_on_neither_world_size_nor_strategy() -> None:
    plain = Transformer(config.read({"hyperparameters": BASE}, [], "test"))
    parallelize.initialize(plain, 7)
    for weights in run_ranks(3, initial_weights, ["full-shard", "no-shard"])[-1]:
        for name, parameter in plain.named_parameters():
            assert np.array_equal(weights[name], parameter.detach().numpy()), name


def test_a_rank_draws_only_the_chunks_that_its_rows_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "_CHUNK", 64)  # 8 rows of 8
    shape, device = torch.Size((50, 8)), torch.device("cpu")
    whole = torch.cat([values for _, values in parallelize._chunks(shape, 0, 50, device, (1,))])
    assert whole.shape == shape
    pieces = list(parallelize._chunks(shape, 19, 42, device, (1,)))
    assert [rows for rows, _ in pieces] == [range(19, 24), range(24, 32), range(32, 40), range(40, 42)]
    assert torch.equal(torch.cat([values for _, values in pieces]), whole[19:42])
