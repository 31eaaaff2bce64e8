"""A run starts with the weights of another run or of Hugging Face, on any ranks.

transformers trains from the same weights on the same batches for comparison.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lm.any_model import new_model
from lm.checkpoint.compare import require_same_structure
from lm.errors import ConfigError, RunError
from lm.hf import weights
from lm.runtime.world import World
from lm.transformers_config import TransformersConfig
from model import ModelConfig
from tests.support.hf import (
    GPT2,
    LLAMA,
    QWEN3,
    add_tokenizer,
    make_reference,
    read_with_model_defaults,
    train_reference,
)
from tests.support.hyperparameters import TINY, named_keys
from tests.support.ranks import in_world
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp
from tests.support.tokenizer_files import byte_level_tokenizer

pytestmark = pytest.mark.usefixtures("shared_cache")

TRAINING = {
    "max_steps": 3,
    "report_rate": 1,
    "checkpoint_rate": 100,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
}
TRAINING |= {"total_batch_size": 4, "validation_batches": 1, "amp_dtype": None}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""of GPT-2"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of small models in transformers' format, with a tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    for raw in (LLAMA | {"num_key_value_heads": 2}, QWEN3, GPT2):
        name = str(raw["model_type"])
        make_reference(raw | NO_DROPOUT | {"vocab_size": 300}).save_pretrained(folder / name)
        add_tokenizer(folder / name, 280)
    return {path.name: path for path in folder.iterdir()}


def settings(source: Path, **changes: Any) -> dict[str, Any]:
    return TRAINING | {"max_seq_len": 64, "init_from": str(source)} | changes


def transformers_losses(folder: Path, hyperparameters: dict[str, Any]) -> list[float]:
    """The loss of each step when transformers trains the model in `folder`."""
    hp = read_with_model_defaults(hyperparameters)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": hp.optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return train_reference(model, torch.optim.AdamW(groups, lr=hp.optim.lr), hp, 42)


@pytest.mark.slow
def test_init_from_trains_as_transformers(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["gpt2"]
    sharding = {"sharding": "hybrid-grad-shard", "shard_group_size": 1}
    hyperparameters = settings(source, **sharding, max_seq_len=32)  # of 64 positions
    done = run_fsdp(tmp_path, ranks=2, config=hyperparameters, code=0)
    assert f"loaded the weights of {source} in " in done.stdout
    losses = [report["loss"] for report in read_reports(tmp_path).values()]
    expected = transformers_losses(source, hyperparameters)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] > 5.8  # random initial weights have ln 300 = 5.7

    done = run_fsdp(tmp_path, "max_steps=4", config=hyperparameters, code=0)
    assert "step 3\n" in done.stdout
    assert "weights of" not in done.stdout
    assert [*read_reports(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_init_from_accepts_a_run_directory(tmp_path: Path) -> None:
    shape = TINY | {"positions": "rope", "validation_batches": 1}
    run_fsdp(tmp_path / "a", "max_steps=1", config=shape, code=0)
    first = tmp_path / "a" / "runs" / "test"
    how = [f"init_from={first}", "max_steps=1", "max_seq_len=8", "dropout=0.1", "seed=7"]
    done = run_fsdp(tmp_path / "b", *how, config=shape, code=0)
    assert f"weights of checkpoint {checkpoints_by_step(tmp_path / 'a')[1]}" in done.stdout
    assert [*read_reports(tmp_path / "b")] == [1]


@pytest.mark.slow
def test_init_from_sets_the_keys_of_a_runs_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 40)
    (tmp_path / "tokenizer.json").write_bytes(byte_level_tokenizer())
    text = {"dataset": "text", "train_data": "a.txt", "val_data": "a.txt", "max_steps": 1}
    text |= {"batch_size": 2, "num_tokens": 0, "validation_batches": 1}
    run_fsdp(
        tmp_path, config=TINY | text | {"vocab_size": None, "tokenizer": "tokenizer.json"}, code=0
    )
    first = tmp_path / "runs" / "test"
    hp = read_with_model_defaults(text | {"init_from": str(first)})
    assert (hp.own_model.d_model, hp.own_model.vocab_size) == (TINY["d_model"], 320)
    assert hp.data.tokenizer == str(checkpoints_by_step(tmp_path)[1])
    done = run_fsdp(tmp_path, config=text | {"init_from": str(first), "run_name": "next"}, code=0)
    assert "weights of checkpoint" in done.stdout
    with pytest.raises(ConfigError, match=r"d_model: 48 differs from \d+ in "):
        read_with_model_defaults(text | {"init_from": str(first), "d_model": 48})


def test_init_from_sets_the_keys_of_the_model(sources: dict[str, Path]) -> None:
    hp = read_with_model_defaults({"init_from": str(sources["qwen3"]), "dataset": "text"})
    assert isinstance(hp.model, TransformersConfig)
    assert (hp.model.vocab_size, hp.model.max_seq_len) == (300, 64)
    assert hp.model.transformers_config["head_dim"] == 12
    assert hp.data.tokenizer == str(sources["qwen3"])
    again = read_with_model_defaults(
        hp.to_flat(), f"tokenizer={sources['qwen3'] / 'tokenizer.json'}"
    )
    assert again.replace(tokenizer=hp.data.tokenizer) == hp
    assert (
        read_with_model_defaults({"init_from": str(sources["llama"])}).data.tokenizer is None
    )  # synthetic data have no tokenizer


def test_init_from_refuses_keys_of_the_model(sources: dict[str, Path]) -> None:
    changes = {"n_layers": 2, "norm_eps": 1e-3, "dataset": "text", "tokenizer": "bytes"}
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults(settings(sources["llama"], **changes), "d_model=32")
    assert len(refused.value.problems) == 4
    assert named_keys(refused.value) >= {"n_layers", "norm_eps", "d_model", "tokenizer"}
    assert "tokenizer: bytes differs from the one in" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults(settings(sources["llama"], model="llama2-7b"))
    (problem,) = refused.value.problems
    assert problem.endswith("remove model")
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults(settings(sources["llama"], lr=-1, n_heads=3))
    assert named_keys(refused.value) >= {"lr", "n_heads"}


def test_checkpoints_of_model_py_do_not_mix_with_classes(sources: dict[str, Path]) -> None:
    """As of runs that model.py computed from such a directory."""
    hp = read_with_model_defaults({"init_from": str(sources["llama"])})
    ours = ModelConfig.model_validate(TINY)
    for saved, now in ((ours, hp.model), (hp.model, ours)):
        with pytest.raises(ConfigError, match=r"^init_from: .*lm\.hf export.*resume=fresh"):
            require_same_structure(saved, now)


@pytest.mark.slow
def test_init_from_warns_of_positions_the_model_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    limits = {"plain": (None, 64), "llama3": (llama3, 64)}
    for name, (scaling, limit) in limits.items():
        raw = copy.deepcopy(LLAMA | {"rope_scaling": scaling})  # to which transformers adds keys
        make_reference(raw).save_pretrained(tmp_path / name)
        model = {"init_from": str(tmp_path / name)}
        read_with_model_defaults(model)
        capsys.readouterr()  # the progress of saving, and the examination
        read_with_model_defaults(model, f"max_seq_len={limit}")
        assert capsys.readouterr().err == ""
        assert (
            read_with_model_defaults(model, f"max_seq_len={limit + 1}").model.max_seq_len
            == limit + 1
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"max_seq_len: {limit + 1} exceeds the {limit} positions")


@pytest.mark.slow
def test_init_from_refuses_positions_that_a_table_lacks(sources: dict[str, Path]) -> None:
    gpt2 = {"init_from": str(sources["gpt2"])}
    assert read_with_model_defaults(gpt2).model.max_seq_len == 64
    with pytest.raises(ConfigError, match=r"max_seq_len: 65 exceeds n_positions: 64 .* most 64$"):
        read_with_model_defaults(gpt2, "max_seq_len=65")


def test_init_from_refuses_text_without_a_tokenizer(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(sources["llama"] / name)
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults({"init_from": str(tmp_path), "dataset": "text"})
    assert named_keys(refused.value) >= {"tokenizer"}
    assert (
        read_with_model_defaults(
            {"init_from": str(tmp_path), "dataset": "text", "tokenizer": "bytes"}
        ).data.tokenizer
        == "bytes"
    )


def change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WEIGHTS = "model.safetensors"
INDEX = "in/model.safetensors.index.json: weight_map"


def end_beyond_the_model(folder: Path) -> None:
    tokenizer = add_tokenizer(folder, 320)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(305)
    tokenizer.save_pretrained(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("["),
        "config.json: invalid JSON",
    ),
    "a pointer": (
        lambda folder: (folder / "config.json").write_text("version https://git-lfs"),
        "config.json: a Git LFS pointer; download the file, `git lfs pull`",
    ),
    "weights that are a pointer": (
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1"),
        "model.safetensors: a Git LFS pointer; download the file, `git lfs pull`",
    ),
    "a tokenizer that is a pointer": (
        lambda folder: (folder / "tokenizer.json").write_text("version https://git-lfs"),
        "tokenizer.json: a Git LFS pointer; download the file, `git lfs pull`",
    ),
    "appended bytes": (
        lambda folder: os.truncate(folder / WEIGHTS, 2**40),
        "longer than its tensors",
    ),
    "no mapping": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json: not a JSON object",
    ),
    "deep": (
        lambda folder: change_config(folder, num_hidden_layers=4000),
        "num_hidden_layers: 4,000 layers, but 21 tensors",
    ),
    "wide": (
        lambda folder: change_config(folder, hidden_size=2**20),
        "lm_head.weight: [300, 32] in the file, [300, 1048576]",
    ),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "in: has no weights; download them, ",
    ),
    "pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "in: has no model.safetensors or ",
    ),
    "truncated weights": (
        lambda folder: os.truncate(folder / WEIGHTS, 9999),
        "in/model.safetensors: damaged header: the file is cut short",
    ),
    "missing shard": (
        lambda folder: write_index(folder, {"a": WEIGHTS, "b": "other.safetensors"}),
        "in/other.safetensors: missing",
    ),
    "shard outside": (lambda folder: write_index(folder, {"a": f"../{WEIGHTS}"}), INDEX),
    "shard without a name": (lambda folder: write_index(folder, {"a": ""}), INDEX),
    "no weight map": (lambda folder: write_index(folder, 5), INDEX),
    "missing tensor": (
        lambda folder: change_tensors(folder, {"model.norm.weight": None}),
        "model.norm.weight: missing",
    ),
    "another shape": (
        lambda folder: change_tensors(folder, {"lm_head.weight": torch.zeros(299, 32)}),
        "lm_head.weight: [299, 32] in the file, [300, 32]",
    ),
    "quantized": (
        lambda folder: change_tensors(
            folder, {"lm_head.weight": torch.zeros(300, 32, dtype=torch.int8)}
        ),
        "lm_head.weight: int8 is a quantized dtype",
    ),
    "inf": (
        lambda folder: change_tensors(folder, {"model.norm.weight": torch.full((32,), torch.inf)}),
        "in/model.norm.weight: contains inf or NaN",
    ),
    "nan": (
        lambda folder: change_tensors(
            folder, {"model.embed_tokens.weight": torch.full((300, 32), torch.nan)}
        ),
        "in/model.embed_tokens.weight: contains inf or NaN",
    ),
    "tied head": (
        lambda folder: change_config(folder, tie_word_embeddings=True),
        "tie_word_embeddings: false",
    ),
    "tied head of another shape": (
        lambda folder: [
            change_config(folder, tie_word_embeddings=True),
            change_tensors(folder, {"lm_head.weight": torch.zeros(299, 32)}),
        ],
        "lm_head.weight: [299, 32] in the file, [300, 32]",
    ),
    "end of text without an embedding": (
        end_beyond_the_model,
        "is id 305, which the model, with 300 ids",
    ),
    "damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "in: transformers cannot use it: ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_init_from_refuses_a_damaged_folder_at_once(
    damage: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["llama"], tmp_path / "in"))
    harm, part = DAMAGES[damage]
    harm(folder)
    files = sorted(tmp_path.rglob("*"))

    def load(world: World) -> None:
        hp = read_with_model_defaults({"init_from": str(folder)})
        weights.load_into(new_model(hp.model).to_empty(device="cpu"), str(folder), world, print)

    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(RunError) as refused:
        in_world(load)
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10, "KiB"
    assert not any("\n" in problem for problem in refused.value.problems)
    assert sorted(tmp_path.rglob("*")) == files
    assert (
        len(refused.value.problems) == 1
        or " the tensors do not match config.json:" in refused.value.problems[0]
    )
    is_damaged = damage in ("truncated weights", "appended bytes", "inf", "nan")
    assert refused.value.exit_code == (1 if is_damaged else 2)
    assert part in str(refused.value)
