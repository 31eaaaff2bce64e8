"""NF4 has the bits of bitsandbytes; adapters on it train as PEFT's, and as one process does."""

from __future__ import annotations

import json
import re
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from lm import evaluate, generate
from lm.any_model import AnyModel, new_model
from lm.checkpoint.headers import read_headers
from lm.checkpoint.manifest import read_manifest
from lm.config.hyperparameters import Hyperparameters
from lm.errors import ConfigError
from lm.hf import __main__ as hf_main
from lm.hf import base as hf_base
from lm.hf import weights
from lm.runtime.world import World
from lm.training import four_bits, lora
from lm.training.config import LoraConfig
from lm.training.four_bits import NF4, NF4Linear, quantize_nf4
from tests.support import REPOSITORY
from tests.support.hf import (
    LLAMA,
    adapters_in_peft,
    add_tokenizer,
    make_reference,
    read_with_model_defaults,
    start_as_ours,
    train_reference,
)
from tests.support.parallelism import train_each
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SAVE_FIRST_GRADIENTS,
    checkpoints_by_step,
    read_exact_metrics,
    read_reports,
    run_fsdp,
)

pytestmark = pytest.mark.usefixtures("shared_cache")

# ---- the arithmetic


def split_rows(packed: Tensor) -> tuple[bytes, list[float]]:
    """The indices and the scales in the bytes of all rows."""
    n_pairs = packed.shape[1] * 8 // 9
    indices = bytes(packed[:, :n_pairs].flatten().tolist())
    scales = bytes(packed[:, n_pairs:].flatten().tolist())
    return indices, list(struct.unpack(f"<{len(scales) // 4}f", scales))


def test_dequantized_weight_is_the_nearest_level_times_the_scale() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    packed = quantize_nf4(weight)
    assert packed.numel() * 8 == 4.5 * weight.numel()
    found = NF4.dequantize(packed, torch.float32)
    for block, values in zip(weight.view(-1, 64), found.view(-1, 64), strict=True):
        scale = block.abs().max().item()
        for value, dequantized in zip(block.tolist(), values.tolist(), strict=True):
            nearest = min(NF4.levels, key=lambda level: abs(level - value / scale))
            assert dequantized == torch.tensor(nearest).mul(scale).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(97, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-30
    weight[4] = 0
    weight[5, 7] = 1e4
    weight = weight.to(dtype)
    expected, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    packed = quantize_nf4(weight)
    indices, scales = split_rows(packed)
    assert indices == bytes(expected.flatten().tolist())
    assert scales == state.absmax.tolist()
    dequantized = functional.dequantize_4bit(expected, state)
    assert NF4.dequantize(packed, dtype).equal(dequantized)


def test_dequantizes_as_before_after_a_plan_did_on_fake_tensors() -> None:
    packed = quantize_nf4(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))
    with FakeTensorMode() as fake:
        NF4.dequantize(fake.from_tensor(packed), torch.float32)
    first = NF4.dequantize(packed, torch.float32)
    assert type(first) is torch.Tensor
    assert first.abs().amax() <= packed[:, 32:].contiguous().view(torch.float32).amax()


def test_blocks_of_rows_dequantize_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = quantize_nf4(torch.randn(7, 128, generator=torch.Generator().manual_seed(0)))
    expected = NF4.dequantize(packed, torch.bfloat16)
    monkeypatch.setattr(four_bits, "CHUNK_BYTES", 2 * 4 * 128)
    assert NF4.dequantize(packed, torch.bfloat16).equal(expected)


# ---- a layer


def make_layer(n_out: int, inner: int, dtype: torch.dtype, bias: bool = True) -> NF4Linear:
    torch.manual_seed(0)
    base = nn.Linear(inner, n_out, bias=bias)
    layer = NF4Linear(base).requires_grad_(False).to(dtype)
    layer.weight.copy_(quantize_nf4(base.weight.detach()))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_computes_with_the_dequantized_weight(dtype: torch.dtype) -> None:
    layer = make_layer(97, 128, dtype)
    assert layer.weight.dtype == torch.uint8
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    y = layer(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    expected = F.linear(x, NF4.dequantize(layer.weight, dtype), layer.bias)
    assert y.equal(expected)
    assert grad.equal(torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, which meets its own
@pytest.mark.parametrize(
    "is_compiled",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                shutil.which("g++") is None, reason="compiling for the CPU needs g++"
            ),
        ),
    ],
)
def test_backward_needs_no_dense_weight(is_compiled: bool) -> None:
    first = make_layer(256, 128, torch.bfloat16)
    second = make_layer(128, 256, torch.bfloat16)

    def compute(x: Tensor) -> Tensor:
        return second(F.silu(first(x)))

    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    run = compute
    if is_compiled:
        run = torch.compile(compute, fullgraph=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert first.weight.shape in saved
    assert max(shape.numel() for shape in saved) == first.weight.numel()
    torch.testing.assert_close(y, compute(x), atol=2e-2, rtol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(compute(x).sum(), x)[0], atol=2e-2, rtol=0)


# ---- a run

TRAINING: dict[str, Any] = {
    "lora_rank": 4,
    "base_dtype": "nf4",
    "max_steps": 4,
    "report_rate": 1,
    "validation_rate": 4,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "total_batch_size": 12,
    "batch_size": 3,
    "max_seq_len": 32,
    "lr": 1e-2,
    "grad_clip": 1.0,
    "amp_dtype": None,
    "seed": 7,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "vocab_size": 300,
    },
}
MODELS["tied"] = MODELS["llama"] | {"tie_word_embeddings": True}
"""Models of which 64 divides the inputs of all layers, and three ranks not their outputs."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of small models in transformers' format, with a tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    for name, raw in MODELS.items():
        make_reference(raw).save_pretrained(folder / name)
        add_tokenizer(folder / name, 280)
    return {path.name: path for path in folder.iterdir()}


def settings(base: Path, **changes: Any) -> dict[str, Any]:
    """Hyperparameters of a run on `base`."""
    return TRAINING | {"init_from": str(base)} | changes


SOME_LAYERS = {"lora_targets": ["q_proj", "down_proj"]}
GROUPS = {"shard_group_size": 2}
OPTIONS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "full-shard": {},
        "grad-shard": {"sharding": "grad-shard", "activation_checkpointing": "selective"},
        "no-shard": {"sharding": "no-shard", "activation_checkpointing": "full"},
        "offload": {"cpu_offload": True},
    },
    3: {"uneven-rows": {"batch_size": 2}},
    4: {
        "hybrid-full-shard": GROUPS | {"sharding": "hybrid-full-shard"},
    },
}
"""of runs, by ranks, of which three cannot share the rows of a layer evenly"""


@pytest.mark.slow
def test_runs_on_nf4_train_as_one_process_does(bases: dict[str, Path], tmp_path: Path) -> None:
    def train(ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        return run_ranks(ranks, train_each, str(tmp_path), runs, {})[0]

    base = settings(bases["llama"])
    tied = settings(bases["tied"])
    alone = {"one": base, "tied": tied}
    one = train(1, alone | {"16-bits": base | {"base_dtype": None}})
    assert one["16-bits"] != pytest.approx(one["one"], rel=1e-4)
    for ranks, options in OPTIONS.items():
        runs = {name: base | changes for name, changes in options.items()}
        if ranks == 2:
            runs |= {"tied": tied, "bfloat16": base | {"amp_dtype": "bfloat16"}}
        found = train(ranks, runs)
        if ranks == 2:
            assert found.pop("bfloat16") == pytest.approx(one["one"], rel=2e-2)
        for name, losses in found.items():
            assert losses == pytest.approx(one.get(name, one["one"]), rel=1e-6), name


def train_traced(
    world: World, folder: str, runs: dict[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """Return the losses of runs whose graphs are traced, without the compiler's code for them."""
    backend = "aot_eager_decomp_partition"
    torch.compile = partial(torch.compile, backend=backend)  # type: ignore[assignment]
    return train_each(world, folder, runs, {})


@pytest.mark.slow
def test_compiled_runs_on_nf4_train_the_same(bases: dict[str, Path], tmp_path: Path) -> None:
    """Of layers with adapters and without, recomputed, for two steps without a validation."""
    base = settings(bases["llama"], **SOME_LAYERS, activation_checkpointing="full", stop_at_step=2)
    runs = {"eager": base, "compiled": base | {"compile": True}}
    losses = run_ranks(1, train_traced, str(tmp_path), runs)[0]
    assert len(losses["eager"]) == 2
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-5)


class Trained(NamedTuple):
    """What eight steps of PEFT's adapters are compared by."""

    losses: list[float]
    gradients: dict[str, Tensor]
    """of the first step"""
    adapters: dict[str, nn.Parameter]


def train_with_peft(hp: Hyperparameters, base: Path, eps: float) -> Trained:
    """Train PEFT's adapters on bitsandbytes' layers, from our initial values."""
    import peft

    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, attn_implementation="sdpa", quantization_config=quantization, dtype=torch.float32
    )
    options: dict[str, Any] = {
        "r": hp.lora.lora_rank,
        "lora_alpha": hp.lora.lora_alpha,
        "target_modules": "all-linear",
    }
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()
    adapters = adapters_in_peft(model)
    start_as_ours(adapters, hp, 7)
    gradients: dict[str, Tensor] = {}
    for name, parameter in adapters.items():

        def keep_first(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            gradients.setdefault(name, parameter.grad.clone())

        parameter.register_post_accumulate_grad_hook(keep_first)
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=hp.optim.lr, weight_decay=hp.optim.weight_decay, eps=eps
    )
    return Trained(train_reference(model, optimizer, hp, 7), gradients, adapters)


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "bound"), [(1e-8, 5e-5), (1e-4, 1e-6)])
def test_runs_on_nf4_train_as_peft_on_bitsandbytes(
    eps: float, bound: float, bases: dict[str, Path], tmp_path: Path
) -> None:
    # AdamW's first step divides a gradient by itself plus epsilon: with that of a run, 1e-8, a
    # gradient that is only rounding changes its weight as much as any other.
    hyperparameters = settings(bases["llama"], max_steps=8, lr=1e-3, adam_eps=eps)
    run_fsdp(tmp_path, ranks=2, config=hyperparameters, script=SAVE_FIRST_GRADIENTS, code=0)
    expected = train_with_peft(read_with_model_defaults(hyperparameters), bases["llama"], eps)
    losses = [report["loss"] for report in read_reports(tmp_path).values()]
    assert losses == pytest.approx(expected.losses, abs=2e-6)
    gradients = load_file(tmp_path / "gradients")
    for name, gradient in expected.gradients.items():
        assert torch.dist(gradients[name], gradient) <= 2e-6 * gradient.norm(), name
    checkpoint = checkpoints_by_step(tmp_path)[8]
    ours = hf_base.read_adapters(checkpoint, read_manifest(checkpoint))
    assert ours.keys() == expected.adapters.keys()
    for name, tensor in expected.adapters.items():
        torch.testing.assert_close(ours[name], tensor.detach(), atol=bound, rtol=0)


# ---- checkpoints, export, generation


@pytest.fixture(scope="module")
def trained(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of six steps, without a stop."""
    folder = tmp_path_factory.mktemp("trained")
    run_fsdp(folder, ranks=2, config=resumable(bases), code=0)
    return folder


def resumable(bases: dict[str, Path]) -> dict[str, Any]:
    text = {"train_data": str(REPOSITORY / "model.py"), "val_data": str(REPOSITORY / "fsdp.py")}
    steps = {"max_steps": 6, "checkpoint_rate": 3, "num_tokens": 5}
    return settings(bases["llama"], dataset="text", **steps) | text


@pytest.mark.slow
def test_nf4_run_resumes_exactly_and_only_on_nf4(
    bases: dict[str, Path], trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "runs" / "test", tmp_path / "runs" / "test")
    checkpoint = checkpoints_by_step(trained)[6]
    manifest = read_manifest(checkpoint)
    assert manifest.base is not None
    assert manifest.base.files == hf_base.compute_checksums(bases["llama"])
    names = read_headers(checkpoint / name for name in manifest.files if "model-" in name)
    assert all(".lora_" in name for name in names)
    shutil.rmtree(checkpoints_by_step(tmp_path)[6])
    other = run_fsdp(tmp_path, "base_dtype=null", config=resumable(bases), code=2)
    assert 'base_dtype: "nf4" in the checkpoint, now null' in other.stderr
    done = run_fsdp(tmp_path, ranks=2, config=resumable(bases), code=0)
    assert ", step 3\n" in done.stdout
    assert ", float32, base in nf4; " in done.stdout
    assert read_exact_metrics(tmp_path) == read_exact_metrics(trained)


def dense_model(bases: dict[str, Path], checkpoint: Path) -> AnyModel:
    """The model of a checkpoint in a plain loop: the base, dequantized, plus B A."""
    adapters = hf_base.read_adapters(checkpoint, read_manifest(checkpoint))
    config = weights.read_structure(bases["llama"])
    model = weights.load_model(bases["llama"], config, torch.device("cpu"), torch.float32)
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            packed = quantize_nf4(parameter.detach())
            layer = name.removesuffix(".weight")
            product = adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
            scaled = adapters.config.lora_scale * product
            parameter.data.copy_(NF4.dequantize(packed, torch.float32) + scaled)
    return model


@pytest.mark.slow
def test_commands_compute_with_the_quantized_base(
    bases: dict[str, Path], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoints_by_step(trained)[6]
    model, _ = hf_base.load_model(checkpoint, torch.device("cpu"))
    assert any(parameter.dtype == torch.uint8 for parameter in model.parameters())
    texts: list[str] = []
    for option in ([], ["--base", str(bases["llama"])], ["--dtype", "bfloat16"]):
        command = [str(checkpoint), "--prompt", "class", "--max-new-tokens", "20", *option]
        assert generate.main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_evaluation_on_nf4_is_that_of_the_run(
    bases: dict[str, Path], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"context": "class", "choices": [" Transformer", " of"], "gold": 0}
    (tmp_path / "task.jsonl").write_text(json.dumps(question) + "\n")
    tasks = ["--tasks", str(tmp_path / "task.jsonl"), "--json"]
    checkpoint = str(checkpoints_by_step(trained)[6])
    assert evaluate.main([checkpoint, *tasks]) == 0
    (of_tasks,) = json.loads(capsys.readouterr().out).values()
    run = resumable(bases) | {"eval_tasks": [str(tmp_path / "task.jsonl")], "max_steps": 7}
    shutil.copytree(trained / "runs", tmp_path / "runs")
    run_fsdp(tmp_path, "lr=1e-30", config=run, code=0)
    *_, report = read_reports(tmp_path, "validation").values()
    assert of_tasks["task"]["bpb"] == pytest.approx(report["eval_task_bpb"], rel=1e-5)


@pytest.mark.slow
def test_export_computes_what_commands_do(
    bases: dict[str, Path], trained: Path, tmp_path: Path
) -> None:
    run = str(trained / "runs" / "test")
    checkpoint = checkpoints_by_step(trained)[6]
    tokens = torch.arange(20)[None]
    out = tmp_path / "merged"
    assert hf_main.main(["export", run, str(out), "--dtype", "float32"]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    of_run, _ = hf_base.load_model(checkpoint, torch.device("cpu"))
    with torch.no_grad():
        logits = exported(tokens).logits
        bound = 2e-6 * logits.abs().max().item()
        torch.testing.assert_close(logits, of_run(tokens), atol=bound, rtol=0)
        expected = dense_model(bases, checkpoint)(tokens)
    torch.testing.assert_close(logits, expected, atol=bound, rtol=0)
    assert hf_main.main(["export", run, str(tmp_path / "adapter"), "--adapter"]) == 0
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 2


# ---- errors


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"lora_rank": None}, ["base_dtype: needs lora_rank"]),
        ({"base_dtype": "fp4"}, ['base_dtype: "fp4" is not one of nf4, mxfp4 or null']),
        ({"load_in_4bit": True}, ["load_in_4bit: .*base_dtype"]),
    ],
    ids=str,
)
def test_values_that_do_not_fit_nf4_are_refused(
    changes: dict[str, Any], parts: list[str], bases: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_with_model_defaults(settings(bases["llama"]) | changes)
    for problem, part in zip(refused.value.problems, parts, strict=True):
        assert re.search(part, problem)


def test_layers_whose_inputs_64_does_not_divide_stay_dense_and_are_named(tmp_path: Path) -> None:
    make_reference(MODELS["llama"] | {"intermediate_size": 96}).save_pretrained(tmp_path)
    hp = read_with_model_defaults(settings(tmp_path))
    model = lora.add_adapters(new_model(hp.model), hp.lora, torch.bfloat16)
    dtypes = {name.split(".")[-2]: p.dtype for name, p in model.blocks[0].named_parameters()}
    assert dtypes["up_proj"] == torch.uint8
    assert dtypes["down_proj"] == torch.bfloat16
    (note,) = lora.notes(hp.lora, model)
    assert re.search(r"nf4 holds 78% .* stay mlp.down_proj.weight \(12.3K\)$", note)


def test_models_without_a_layer_that_64_divides_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 96}
    make_reference(MODELS["llama"] | sizes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"base_dtype: nf4: no linear layer .* of 64 inputs"):
        read_with_model_defaults(settings(tmp_path))


def test_nf4_is_refused_where_fsdp_shards_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    four_bits.check_base_dtype(LoraConfig.model_validate({"lora_rank": 4, "base_dtype": "nf4"}))
    monkeypatch.setattr(four_bits, "SHARDS_BYTES", False)
    four_bits.check_base_dtype(LoraConfig.model_validate({"lora_rank": 4}))
    with pytest.raises(ConfigError, match=r"base_dtype: nf4: .*; use PyTorch 2\.12 or newer"):
        four_bits.check_base_dtype(LoraConfig.model_validate({"lora_rank": 4, "base_dtype": "nf4"}))
