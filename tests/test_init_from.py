"""A run starts with the weights of another run or of Hugging Face, on any ranks, and resumes from its own checkpoints.

transformers trains from the same weights on the same batches for comparison.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lm import config
from lm.checkpoint.checkpointer import find_tensors
from lm.checkpoint.tensor_files import read_into
from lm.data import loader
from lm.hf import export
from lm.parallelize import ParallelConfig, parallelize
from lm.runtime.world import World
from model import ModelConfig, Transformer
from tests import support
from tests.conftest import Message
from tests.test_hf import GPT2, LLAMA, make_reference

TRAINING = {"max_steps": 3, "report_rate": 1, "checkpoint_rate": 100, "lr": 1e-2, "weight_decay": 0.1, "grad_clip": 1.0}
TRAINING |= {"total_batch_size": 4, "validation_batches": 1, "amp_dtype": None}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a small Llama and a small GPT-2 with several files per tensor, and transformers' models."""
    folder = tmp_path_factory.mktemp("imported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "FILE_BYTES", 900)
        for raw in (LLAMA | {"num_key_value_heads": 2}, GPT2):
            name = str(raw["model_type"])
            make_reference(raw).save_pretrained(folder / f"{name}-in")
            export.import_model(str(folder / f"{name}-in"), folder / name)
    return {path.name: path for path in folder.iterdir()}


def settings(imported: dict[str, Path], name: str, **changes: Any) -> dict[str, Any]:
    model = dict(export.read_manifest(imported[name]).model)
    return model | TRAINING | {"max_seq_len": 64, "init_from": str(imported[name])} | changes


def transformers_losses(folder: Path, hyperparameters: dict[str, Any]) -> list[float]:
    """The loss of each step when transformers trains the model in `folder` with `hyperparameters`."""
    hp = config.read({"hyperparameters": hyperparameters}, [], "test")
    data = loader.open_data(hp, hp.vocab_size, hp.max_seq_len, 4, 42)
    batches = loader.Loader(hp, data, 4, 0, 1, torch.device("cpu")).training(0)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": hp.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=hp.lr)
    losses = []
    for _ in range(3):
        micro_batches = next(batches).micro_batches
        inputs, targets = (
            torch.cat([getattr(micro, name) for micro in micro_batches]) for name in ("inputs", "targets")
        )
        loss = nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("llama", 1, {"sharding": "no-shard"}),
        ("llama", 2, {"sharding": "full-shard", "batch_size": 2}),
        ("gpt2", 2, {"sharding": "hybrid-grad-shard", "shard_group_size": 1, "dropout": 0.0}),
    ],
)
def test_training_from_imported_weights_equals_training_in_transformers(
    name: str, ranks: int, changes: dict[str, Any], imported: dict[str, Path], tmp_path: Path
) -> None:
    hyperparameters = settings(imported, name, **changes)
    done = support.run(tmp_path, ranks=ranks, config=hyperparameters)
    assert done.returncode == 0, done.stderr
    assert f"weights of checkpoint {imported[name]} in " in done.stdout
    losses = [report["loss"] for report in support.reports(tmp_path).values()]
    expected = transformers_losses(imported[f"{name}-in"], hyperparameters)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] > 4.6  # random initial weights have ln 96 = 4.56

    done = support.run(tmp_path, "max_steps=4", ranks=3 - ranks, config=hyperparameters | {"batch_size": 1})
    assert done.returncode == 0, done.stderr
    assert "step 3\n" in done.stdout
    assert "weights of" not in done.stdout
    assert [*support.reports(tmp_path)] == [1, 2, 3, 4]


def test_init_from_accepts_a_run_directory_and_a_changed_length_and_dropout(tmp_path: Path) -> None:
    shape = support.TINY | {"positions": "rope", "validation_batches": 1}
    assert support.run(tmp_path / "a", "max_steps=1", config=shape).returncode == 0
    first = tmp_path / "a" / "runs" / "test"
    how = [f"init_from={first}", "max_steps=1", "max_seq_len=8", "dropout=0.1", "seed=7"]
    done = support.run(tmp_path / "b", *how, config=shape)
    assert done.returncode == 0, done.stderr
    assert f"weights of checkpoint {support.checkpoints(tmp_path / 'a')[1]}" in done.stdout
    assert [*support.reports(tmp_path / "b")] == [1]


def test_init_from_refuses_another_model_and_a_missing_directory(
    imported: dict[str, Path], tmp_path: Path, message: Message
) -> None:
    done = support.run(tmp_path, config=settings(imported, "gpt2", max_seq_len=32, n_heads=2, norm_eps=1e-6))
    assert done.returncode == 2
    keys = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert keys[:-1] == ["n_heads", "max_seq_len", "n_kv_heads", "norm_eps"]
    message(done.stderr)
    done = support.run(tmp_path, "init_from=nowhere", config=support.TINY)
    assert done.returncode == 2
    message(done.stderr)


def _bytes_read(world: World, folder: str) -> tuple[int, int]:
    """Bytes of values that this rank reads for its half of the weights, and their total."""
    manifest = export.read_manifest(Path(folder))
    with torch.device("meta"):
        model = Transformer(ModelConfig.model_validate(manifest.model))
    parallelize(
        model, ParallelConfig.model_validate({}), world.device_mesh({"replicate": 1, "shard": world.size}), None, 0
    )
    read, preadv = 0, os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        nonlocal read
        read += (n := preadv(file, buffers, offset))
        return n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        for tensor, source in find_tensors(Path(folder), manifest, {"model": model}).values():
            read_into(tensor, source)
    return read, sum(tensor.nbytes for tensor in model.state_dict().values())


def test_each_rank_reads_only_its_own_slices(imported: dict[str, Path]) -> None:
    for read, total in support.run_ranks(2, _bytes_read, str(imported["llama"])):
        assert 0.45 < read / total < 0.55
