"""LoRA trains adapters of a frozen base as PEFT does, with every option, and resumes exactly."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdp import build_model
from lm import generate
from lm.any_model import AnyModel, new_model
from lm.checkpoint.contents import load_weights
from lm.checkpoint.headers import read_headers
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import MANIFEST, Base, CheckpointError, read_manifest
from lm.config.hyperparameters import Hyperparameters
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from lm.flops import count_flops_per_token
from lm.hf import __main__ as hf_main
from lm.hf import base as hf_base
from lm.hf import export, weights
from lm.memory import count_state
from lm.resume import ResumePlan, load_checkpoint
from lm.runtime.world import World
from lm.training import lora, optim, parallelize
from model import ModelConfig
from tests.support import REPOSITORY
from tests.support.checkpoints import (
    RUN_INFO,
    copy_with_hyperparameters,
    open_checkpointer,
    save_state,
    state_of,
    toy_model,
)
from tests.support.hf import (
    LLAMA,
    adapters_in_peft,
    add_tokenizer,
    initial_adapters,
    make_reference,
    read_with_model_defaults,
    save_model,
    start_as_ours,
    train_reference,
)
from tests.support.hyperparameters import TINY, named_keys
from tests.support.models import unit_sizes
from tests.support.parallelism import (
    AMP_DTYPES,
    EQUIVALENT_OPTIONS,
    train_each,
)
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, read_reports, run_fsdp
from tests.support.step_counts import count_steps_of_each

pytestmark = [
    pytest.mark.usefixtures("shared_cache"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT reads it
        "ignore:Setting `save_embedding_layers`",
    ),
]

STEPS = 4
TRAINING: dict[str, Any] = {
    "lora_rank": 3,
    "max_steps": STEPS,
    "report_rate": 1,
    "validation_rate": STEPS,
}
TRAINING |= {
    "total_batch_size": 8,
    "batch_size": 2,
    "validation_batches": 1,
    "checkpoint_rate": 100,
}
TRAINING |= {
    "max_seq_len": 16,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "amp_dtype": None,
    "seed": 7,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of small models in transformers' format, with a tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    llama = LLAMA | {"num_key_value_heads": 2, "vocab_size": 300}
    for seed, name in enumerate(("llama", "other")):
        make_reference(llama, seed).save_pretrained(folder / name)
    for path in folder.iterdir():
        add_tokenizer(path, 280)
    return {path.name: path for path in folder.iterdir()}


def settings(base: Path, **changes: Any) -> dict[str, Any]:
    """Hyperparameters of a run on `base`."""
    return TRAINING | {"init_from": str(base)} | changes


def adapters_of(checkpoint: Path) -> lora.Adapters:
    return hf_base.read_adapters(checkpoint, read_manifest(checkpoint))


def require_adapters_close(folder: Path, base: Path, expected: dict[str, torch.Tensor]) -> None:
    """PEFT reads adapters close to `expected` of what the run in `folder` has after eight steps."""
    import peft

    exported = folder / "adapter"
    export.export_model(checkpoints_by_step(folder)[8], exported, adapters_only=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    ours = adapters_in_peft(peft.PeftModel.from_pretrained(model, str(exported)))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=0)


# ---- training


def train_with_peft(
    hp: Hyperparameters, base: Path, start: Path | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and adapters of PEFT, from the same initial values on the same batches.

    They are ours, or the adapters in the directory `start`.
    """
    import peft  # imports torchao, which takes seconds: not in all ranks

    options = {
        "r": hp.lora.lora_rank,
        "lora_alpha": hp.lora.lora_alpha,
        "use_rslora": hp.lora.use_rslora,
        "target_modules": hp.lora.lora_targets or "all-linear",
    }
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    if start is None:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    else:
        model = peft.PeftModel.from_pretrained(model, str(start), is_trainable=True)
    model.train()
    trained = adapters_in_peft(model)
    if start is None:
        start_as_ours(trained, hp, 7)
    optimizer = torch.optim.AdamW(
        trained.values(), lr=hp.optim.lr, weight_decay=hp.optim.weight_decay
    )
    losses = train_reference(model, optimizer, hp, 7)
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


Q_AND_V = {"lora_targets": ["q_proj", "v_proj"], "lora_alpha": 3.0, "use_rslora": True}


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(Q_AND_V, marks=pytest.mark.slow)], ids=["all", "q, v"]
)
def test_lora_trains_as_peft(
    changes: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    hyperparameters = settings(bases["llama"], max_steps=8, lr=1e-3, **changes)
    run_fsdp(tmp_path, ranks=2, config=hyperparameters, code=0)
    expected, adapters = train_with_peft(read_with_model_defaults(hyperparameters), bases["llama"])
    losses = [report["loss"] for report in read_reports(tmp_path).values()]
    assert losses == pytest.approx(expected, abs=1e-5)
    require_adapters_close(tmp_path, bases["llama"], adapters)


OPTIONS = (
    "full-shard",
    "grad-shard",
    "1x4-no-shard-each",
    "one-unit",
    "recompute",
    "recompute-some",
    "offload",
)
"""of runs on two ranks"""
DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.2},
    "dropout-recompute": {"lora_dropout": 0.2, "activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def losses(
    bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """The losses on one rank, and those of every run above on two."""
    folder = str(tmp_path_factory.mktemp("losses"))
    base = settings(bases["llama"])
    runs = {name: EQUIVALENT_OPTIONS[name] for name in OPTIONS} | AMP_DTYPES | DROPOUT
    two = {name: base | changes for name, changes in runs.items()}
    one = run_ranks(1, train_each, folder, {"one": base}, {})[0]
    return one | run_ranks(2, train_each, folder, two, {})[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_lora_on_two_ranks_trains_as_on_one(name: str, losses: dict[str, list[float]]) -> None:
    assert losses[name] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", AMP_DTYPES)
def test_lora_in_lower_precision_is_close_to_float32(
    name: str, losses: dict[str, list[float]]
) -> None:
    assert losses[name] == pytest.approx(losses["one"], rel=1e-2)
    assert losses[name] != pytest.approx(losses["one"], rel=1e-6)


@pytest.mark.slow
def test_lora_dropout_is_repeated_by_recomputation(losses: dict[str, list[float]]) -> None:
    assert losses["dropout-recompute"] == pytest.approx(losses["dropout"], rel=1e-6)
    assert losses["dropout"][0] == pytest.approx(losses["one"][0], rel=1e-5)  # B is 0
    assert losses["dropout"] != pytest.approx(losses["one"], rel=1e-4)


# ---- what is frozen


def built(
    world: World, hyperparameters: dict[str, Any], dtype: torch.dtype | None
) -> tuple[AnyModel, Any]:
    hp = read_with_model_defaults(hyperparameters)
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
    model = build_model(hp, world.device_mesh(shape), dtype)
    parallelize.initialize_parameters(model, 7)
    weights.load_into(model, str(hp.checkpoint.init_from), world, lambda _: None)
    return model, optim.Optimizer(hp.optim, model)


def sizes(world: World, hyperparameters: dict[str, Any]) -> dict[str, int]:
    """Bytes on this rank of the base, the adapters, their gradients and moments, after a step."""
    model, optimizer = built(world, hyperparameters, torch.bfloat16)
    tokens = torch.arange(16)[None]
    model(tokens, tokens).backward()

    def local(tensors: Any) -> int:
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    base = [p for p in model.parameters() if not p.requires_grad]
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert not [p for p in base if p.grad is not None]
    moments = [
        tensor for name, tensor in optimizer.state_dict().items() if not name.endswith("step")
    ]
    return {
        "base": local(base),
        "adapters": local(adapters),
        "gradients": local(p.grad for p in adapters),
    } | {"moments": local(moments)}


@pytest.mark.slow
def test_lora_base_is_frozen_sharded_and_in_compute_dtype(bases: dict[str, Path]) -> None:
    hyperparameters = settings(bases["llama"], lora_rank=4)
    hp = read_with_model_defaults(hyperparameters)
    adapters = hp.n_trained_parameters
    state = count_state(hp, torch.bfloat16).total // 2
    for found in run_ranks(2, sizes, hyperparameters):
        assert found == {"base": hp.model.n_parameters, "adapters": 2 * adapters} | {
            "gradients": 2 * adapters,
            "moments": 4 * adapters,
        }
        assert sum(found.values()) == state


QKV = ["q_proj", "k_proj", "v_proj"]
SHAPE = {
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "vocab_size": 300,
    "d_ff": 48,
    "max_seq_len": 16,
    "norm": "rmsnorm",
    "positions": "rope",
    "ffn": "swiglu",
    "bias": "none",
}
"""of the base llama, as model.py says it"""


@pytest.mark.parametrize(
    ("changes", "unneeded", "attention"),
    [
        ({}, QKV, 1),
        ({"lora_targets": ["down_proj"]}, [*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"], 0),
        ({"lora_targets": ["o_proj", "up_proj"]}, [*QKV, "o_proj"], 0),
    ],
    ids=str,
)
def test_lora_computes_no_gradient_of_the_base(
    changes: dict[str, Any], unneeded: list[str], attention: int, bases: dict[str, Path]
) -> None:
    """Nor of what precedes the first adapters in the first block.

    There, the inputs of the layers `unneeded` need none, nor does attention, if that is 0.
    """
    hp = read_with_model_defaults(settings(bases["llama"], lora_targets=None) | changes)
    model = ModelConfig.model_validate(SHAPE)
    assert model.n_parameters == hp.model.n_parameters
    rank = hp.lora.lora_rank
    assert rank is not None
    n_in_block = sum(out * inner for out, inner in model.layer_shapes.values())
    n_frozen = model.n_layers * n_in_block + model.vocab_size * model.d_model
    expected = model.flops_per_token(model.max_seq_len)
    expected += 6 * hp.n_trained_parameters - 2 * n_frozen
    for layer in unneeded:
        out, inner = model.layer_shapes[layer]
        expected -= 2 * out * inner
        if layer in (hp.lora.lora_targets or model.layer_shapes):
            expected -= 2 * rank * inner
    if not attention:
        keys = model.mean_keys(model.max_seq_len)
        expected -= 8 * model.n_heads * model.head_width * keys
    assert count_flops_per_token(hp.lora, model) == expected


@pytest.mark.slow
def test_lora_step_collectives(bases: dict[str, Path], tmp_path: Path) -> None:
    hyperparameters = settings(
        bases["llama"], lora_rank=4, amp_dtype="bfloat16", report_rate=100, total_batch_size=4
    )
    hp = read_with_model_defaults(hyperparameters)
    model = ModelConfig.model_validate(SHAPE)
    *blocks, embedding, head = unit_sizes(model)
    adapters = hp.n_trained_parameters // model.n_layers
    norm = model.d_model  # of the root, which the head of a class does not have
    gathered = [embedding, head - norm, norm, *(2 * [size + adapters for size in blocks])]
    wanted = Counter(
        {("all-reduce", "control", 8): 1, ("all-reduce", 2, 4 * 14 * model.n_layers): 1}
    )
    wanted.update(("all-gather", 2, 2 * size) for size in gathered)
    wanted["reduce-scatter", 2, 4 * adapters] += model.n_layers
    for step in run_ranks(2, count_steps_of_each, str(tmp_path), {"lora": hyperparameters}, {})[0][
        "lora"
    ]:
        assert step.collectives == wanted


@pytest.mark.slow
def test_lora_compile_makes_two_graphs_of_blocks_and_trains_the_same(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """Traced, without the code of PyTorch's compiler, which test_parity.py runs."""
    run = settings(bases["llama"], lora_dropout=0.1, activation_checkpointing="full")
    read_with_model_defaults(run)  # examines the class, which compiles some layers
    runs = {"eager": run, "compiled": run | {"compile": True}}
    steps = run_ranks(1, count_steps_of_each, str(tmp_path), runs, {})[0]
    assert [step.graphs for step in steps["compiled"]] == [0, 3, 3]  # and one of the loss
    eager, compiled = (
        [report["loss"] for report in read_reports(tmp_path, name=name).values()] for name in runs
    )
    assert len(eager) == STEPS
    assert compiled == pytest.approx(eager, rel=1e-6)


def adapters_on(world: World, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    model, _ = built(world, hyperparameters, None)
    found = {
        name: p.full_tensor().numpy()
        for name, p in lora.trained_parameters(model).items()
        if isinstance(p, DTensor)
    }
    world.all_gather_object(None)  # no rank leaves while another one needs its store
    return found


@pytest.mark.slow
def test_lora_initial_adapters_are_those_of_peft(
    bases: dict[str, Path],
) -> None:
    hp = read_with_model_defaults(settings(bases["llama"]))
    initial = initial_adapters(hp, 7)
    for ranks, sharding in ((3, "full-shard"), (2, "no-shard")):
        found = run_ranks(ranks, adapters_on, settings(bases["llama"], sharding=sharding))[0]
        assert found.keys() == initial.keys()
        assert all(torch.from_numpy(found[name]).equal(tensor) for name, tensor in initial.items())
    for name, tensor in initial.items():
        if "lora_B" in name:
            assert not tensor.any()
            continue
        reference = nn.init.kaiming_uniform_(torch.empty(400, tensor.shape[1]), a=5**0.5)
        assert tensor.abs().max() <= 1 / tensor.shape[1] ** 0.5
        assert tensor.std().item() == pytest.approx(reference.std().item(), rel=0.2)


# ---- from adapters of PEFT


def test_adapters_of_peft_are_merged_before_they_are_a_start(
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the lines in docs/finetuning.md; without them, they are refused wherever a model is."""
    import peft

    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(bases["llama"])
    base = AutoModelForCausalLM.from_pretrained("base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained("adapter")
    for run in (TRAINING, TRAINING | {"lora_rank": None}):
        with pytest.raises(ConfigError, match=r"^test: init_from: adapter: .*merge_and_unload\(\)"):
            read_with_model_defaults(run | {"init_from": "adapter"})
    with pytest.raises(ConfigError, match=r"^adapter: .*merge_and_unload\(\)"):
        hf_base.open_model("adapter")
    assert hf_main.main(["examine", "adapter"]) == 2
    errors = capsys.readouterr().err
    assert "merge_and_unload()" in errors
    assert "init_from" not in errors

    docs = (REPOSITORY / "docs" / "finetuning.md").read_text()
    (lines,) = [code for code in re.findall(r"```python\n(.*?)```", docs, re.S) if "peft" in code]
    exec(lines)
    ours, tokenizer = hf_base.open_model("merged")
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model.eval()(tokens).logits, atol=1e-5, rtol=0)
    assert tokenizer.identity == load_tokenizer(str(bases["llama"])).identity


# ---- checkpoints


@pytest.fixture(scope="module")
def trained(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of six steps, without a stop."""
    folder = tmp_path_factory.mktemp("trained")
    run_fsdp(folder, ranks=2, config=resumable(bases), code=0)
    return folder


def resumable(bases: dict[str, Path]) -> dict[str, Any]:
    return settings(
        bases["llama"],
        lora_dropout=0.1,
        max_steps=6,
        checkpoint_rate=3,
        batch_size=1,
        num_tokens=5,
        dataset="text",
    ) | {
        "train_data": str(REPOSITORY / "model.py"),
        "val_data": str(REPOSITORY / "fsdp.py"),
    }


@pytest.mark.slow
def test_lora_checkpoint_holds_adapters_and_names_the_base(
    bases: dict[str, Path], trained: Path
) -> None:
    checkpoint = checkpoints_by_step(trained)[6]
    manifest = read_manifest(checkpoint)
    tensors = read_headers(
        checkpoint / name for name in manifest.files if name.startswith(("model-", "optim-"))
    )
    assert tensors
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in tensors)
    assert manifest.base is not None
    assert manifest.base.source == str(bases["llama"])
    assert manifest.base.files == hf_base.compute_checksums(bases["llama"])


@pytest.mark.slow
def test_lora_resumes_exactly(bases: dict[str, Path], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs" / "test", tmp_path / "runs" / "test")
    shutil.rmtree(checkpoints_by_step(tmp_path)[6])
    done = run_fsdp(tmp_path, ranks=2, config=resumable(bases), code=0)
    assert ", step 3\n" in done.stdout
    assert f"loaded the weights of {bases['llama']} in " in done.stdout
    assert read_exact_metrics(tmp_path) == read_exact_metrics(trained)
    ours, expected = (adapters_of(checkpoints_by_step(folder)[6]) for folder in (tmp_path, trained))
    assert all(ours[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_lora_resume_refuses_another_base(
    bases: dict[str, Path], trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "runs" / "test", tmp_path / "runs" / "test")
    longer, other = "max_steps=8", f"init_from={bases['other']}"
    rank, none = ("lora_rank=2", "lora_alpha=8"), ("lora_rank=null", "lora_dropout=0")
    another_base = f"^init_from: {bases['other']} .*{bases['llama']}"
    for overrides, part in (
        ((longer, other), another_base),
        ((other,), another_base),
        ((longer, *rank), "^lora_rank: 3 .*now 2\nlora_alpha: 16.0 .*now 8.0\n"),
        ((longer, *none), "^lora_rank: 3 .*now null\nlora_dropout: 0.1 .*now 0.0\n"),
    ):
        done = run_fsdp(tmp_path, *overrides, config=resumable(bases), code=2)
        assert re.search(part, done.stderr, re.MULTILINE)  # after the examination


@pytest.mark.slow
def test_init_from_refuses_adapters(bases: dict[str, Path], trained: Path, tmp_path: Path) -> None:
    source = checkpoints_by_step(trained)[6]
    hyperparameters = resumable(bases) | {"init_from": str(source)}
    for changes in ({"lora_rank": None, "lora_dropout": 0.0}, {}):
        done = run_fsdp(tmp_path, config=hyperparameters | changes, code=2)
        assert re.match(f"init_from: {source} .*{bases['llama']}; .*lm.hf export ", done.stderr)


def test_lora_refuses_a_checkpoint_of_all_weights(tmp_path: Path) -> None:
    """As in a trial on Determined that is forked from one without adapters."""

    def fork(world: World) -> None:
        with open_checkpointer(world, tmp_path) as saver:
            state = state_of(toy_model(1.0))
            saved = tmp_path / save_state(saver, state, 1)
            plan = ResumePlan(init_candidates=(Location(str(saved)),))
            info = RUN_INFO.model_copy(update={"base": Base(source="base", files={})})
            load_checkpoint(plan, saver, state, info, print)

    with pytest.raises(ConfigError) as refused:
        in_world(fork)
    assert named_keys(refused.value) >= {"lora_rank"}


ON_A_CHECKPOINT = ["init_from=runs/base", "lora_rank=2", "max_steps=2", "lr=0.01"]
SMALL = TINY | {"validation_batches": 1}


@pytest.fixture(scope="module")
def on_a_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run "base" of two steps, and of adapters of its checkpoint."""
    folder = tmp_path_factory.mktemp("on_a_checkpoint")
    run_fsdp(folder, "max_steps=2", "run_name=base", config=SMALL, code=0)
    run_fsdp(folder, *ON_A_CHECKPOINT, config=SMALL, code=0)
    return folder


@pytest.mark.slow
def test_lora_base_can_be_a_checkpoint(on_a_checkpoint: Path) -> None:
    source = checkpoints_by_step(on_a_checkpoint, "base")[2]
    adapted = checkpoints_by_step(on_a_checkpoint)[2]
    manifest = read_manifest(adapted)
    assert manifest.base is not None
    assert manifest.base.source == str(source)
    model = hf_base.load_trained_model(adapted, torch.device("cpu"))
    base = new_model(model.config)
    load_weights(source, base.state_dict())
    of_run = dict(model.named_parameters())
    for name, parameter in base.named_parameters():
        assert parameter.equal(of_run[name]), name
        if name.startswith("blocks") and parameter.ndim == 2:
            assert of_run[f"{name.removesuffix('.weight')}.lora_B.weight"].any(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"), [("lora_targets", ["x"]), ("lora_rank", 99), ("lora_alpha", 1e999)]
)
def test_read_adapters_refuses_what_the_model_lacks(
    key: str, value: object, on_a_checkpoint: Path, tmp_path: Path
) -> None:
    original = checkpoints_by_step(on_a_checkpoint)[2]
    forged = copy_with_hyperparameters(original, tmp_path / "forged", {key: value})
    with pytest.raises(CheckpointError, match=f"^{forged / MANIFEST}: damaged: hyperparam.*{key}"):
        adapters_of(forged)


@pytest.mark.slow
def test_lora_resume_refuses_a_newer_checkpoint_as_base(
    on_a_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(on_a_checkpoint / "runs", tmp_path / "runs")
    run_fsdp(tmp_path, "max_steps=3", "run_name=base", config=SMALL, code=0)
    done = run_fsdp(tmp_path, *ON_A_CHECKPOINT, "max_steps=4", config=SMALL, code=2)
    source = checkpoints_by_step(on_a_checkpoint, "base")[2]
    newer = checkpoints_by_step(tmp_path, "base")[3]
    assert re.match(f"init_from: {newer} .*{source}", done.stderr)


@pytest.mark.slow
def test_lora_refuses_another_shape_than_its_bases(on_a_checkpoint: Path) -> None:
    overrides = [*ON_A_CHECKPOINT, "run_name=wide", "n_heads=2"]
    done = run_fsdp(on_a_checkpoint, *overrides, config=SMALL, code=2)
    assert re.match("argument n_heads: 2 differs from 4 in runs/base; ", done.stderr)


# ---- export and generation


@pytest.mark.slow
def test_lora_export_loads_in_transformers_and_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    import peft

    hyperparameters = settings(
        bases["llama"],
        lora_targets=["q_proj", "v_proj", "down_proj"],
        lora_alpha=5.0,
        use_rslora=True,
        max_steps=3,
        max_seq_len=64,
    )
    run_fsdp(tmp_path, config=hyperparameters, code=0)
    run = tmp_path / "runs" / "test"
    assert hf_main.main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert hf_main.main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(bases["llama"])
    before = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    ours = hf_base.load_trained_model(checkpoints_by_step(tmp_path)[3], torch.device("cpu"))
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.eval()(tokens), merged, atol=1e-5, rtol=0)
    assert (merged - before).abs().max() > 0.1


def test_lora_base_in_object_storage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^init_from: .*lm.hf export s3://bucket/run "):
        in_world(lambda world: hf_base.find_base("s3://bucket/run", world))


@pytest.mark.slow
def test_generate_reads_the_base_of_adapters_or_a_copy(
    bases: dict[str, Path], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoints_by_step(trained)[6]
    command = [str(checkpoint), "--prompt", "class", "--max-new-tokens", "5"]
    assert generate.main(command) == 0
    said = capsys.readouterr().out
    assert (
        generate.main([*command, "--base", str(shutil.copytree(bases["llama"], tmp_path / "copy"))])
        == 0
    )
    assert capsys.readouterr().out == said
    for wrong, part in (
        (bases["other"], f"differ from .*{bases['llama']}.*--base"),
        (tmp_path / "nowhere", "--base"),
    ):
        assert generate.main([*command, "--base", str(wrong)]) == 2
        assert re.search(f"{wrong}: .*{part}", capsys.readouterr().err)


@pytest.mark.slow
def test_export_adapters_needs_adapters(tmp_path: Path) -> None:
    run_fsdp(tmp_path, "max_steps=1", config=TINY, code=0)
    with pytest.raises(ConfigError, match=r"lora_rank: null.* without --adapter"):
        export.export_model(tmp_path / "runs" / "test", tmp_path / "out", adapters_only=True)


# ---- errors


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"init_from": None}, ["lora_rank: .*rank 3 .*init_from"]),
        (
            {"lora_rank": 17, "lora_targets": ["q_proj", "k_proj"]},
            [r"lora_rank: 17 .*k_proj \(16 x 32\).* 16$"],
        ),
        ({"lora_rank": 0}, ["lora_rank: 0 "]),
        (
            {"modules_to_save": ["lm_head"], "use_dora": True},
            ["modules_to_save: .*remove modules_to_save", "use_dora: .*remove use_dora"],
        ),
        ({"target_modules": ["q_proj"]}, ["target_modules: .*did you mean lora_targets"]),
        (
            {"lora_rank": 40, "lora_targets": ["down_proj"]},
            [r"lora_rank: 40 .*down_proj \(32 x 48\).* 32$"],
        ),
        (
            {"lora_targets": ["q_proj", "qkv_proj"]},
            ["lora_targets: .*qkv_proj; .*q_proj, k_proj, .*, down_proj$"],
        ),
        ({"lora_targets": "q_proj"}, ['lora_targets: "q_proj" ']),
        ({"lora_targets": []}, [r"lora_targets: \[\] "]),
        (
            {"lora_rank": None, "lora_alpha": 8.0, "lora_dropout": 0.1},
            ["lora_alpha: ", "lora_dropout: .*lora_rank"],
        ),
        ({"float8": "rowwise"}, ["float8: rowwise .*lora_rank: 3"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_lora_values_that_are_wrong_are_refused(
    changes: dict[str, Any], parts: list[str], bases: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults(settings(bases["llama"]) | changes)
    for problem, part in zip(refused.value.problems, parts, strict=True):
        assert re.search(f": {part}", problem)


@pytest.mark.slow
def test_what_adapters_leave_out_is_said(tmp_path: Path) -> None:
    save_model("qwen2_moe", tmp_path)
    source = {"init_from": str(tmp_path), "dataset": "synthetic"}
    hp = read_with_model_defaults(source | {"lora_rank": 4})
    with torch.device("meta"):
        model = lora.add_adapters(new_model(hp.model), hp.lora, None)
    trained = lora.trained_parameters(model)
    assert sum(tensor.numel() for tensor in trained.values()) == hp.n_trained_parameters
    assert any(".shared_expert.up_proj." in name for name in trained)
    assert not [name for name in trained if "shared_expert_gate" in name]  # of one output
    (note,) = lora.notes(hp.lora, model)
    assert re.search(r"change \d+% .*; as they are stay .*experts\.gate_up_proj \(", note)

    hp = read_with_model_defaults(source | {"lora_rank": 4, "lora_targets": ["q_proj"]})
    with torch.device("meta"):
        model = lora.add_adapters(new_model(hp.model), hp.lora, None)
    (note,) = lora.notes(hp.lora, model)
    assert "experts.gate_up_proj" in note
    assert "k_proj.weight" in note
    assert "q_proj.weight" not in note
    with pytest.raises(ConfigError, match=r"4 exceeds .* shared_expert_gate \(1 x 64\)"):
        read_with_model_defaults(
            source | {"lora_rank": 4, "lora_targets": ["shared_expert_gate", "q_proj"]}
        )
    with pytest.raises(ConfigError, match=r"1000 exceeds .*; use at most 64"):
        read_with_model_defaults(source | {"lora_rank": 1000})
