"""A plan's memory is that of FSDP's step on fake tensors; a run says first what it needs."""

from __future__ import annotations

import json
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lm.config import Hyperparameters
from lm.metrics.device import GIB
from lm.plan import fit, memory, speed
from lm.plan.__main__ import main
from lm.plan.predict import Plan, make_plan
from lm.plan.trace import LiveBytes, measure_activations
from lm.training import lora, optim, parallelize, precision
from model import Transformer
from tests.support import REPOSITORY
from tests.support.runs import run_fsdp


class StorageBytes(LiveBytes):
    """Also counts what FSDP frees and allocates in place, by resizing storages."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)
        super().add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see_resized()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.see_resized()
        return result

    def see_resized(self) -> None:
        for key, size in list(self.sizes.items()):
            storage = self.storages[key]()
            if storage is not None and storage.nbytes() != size:
                self.sizes[key] = storage.nbytes()
                self.now += self.sizes[key] - size
        self.peak = max(self.peak, self.now)


def step_on_fake_tensors(hp: Hyperparameters, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Peak bytes of a step of rank 0, with a process group that does not communicate."""
    dtype, cpu = precision.choose_dtype(hp, torch.bfloat16), torch.device("cpu")
    shape = parallelize.mesh_shape(hp, ranks, 4)
    n_micro_batches = (hp.total_batch_size or hp.batch_size * ranks) // (hp.batch_size * ranks)
    monkeypatch.setattr(parallelize, "initialize_parameters", lambda *_: None)  # reads values
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=shape._fields)
        with torch.device("meta"):
            model = lora.add_adapters(Transformer(hp), hp, dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = parallelize.parallelize(model, hp, mesh, dtype, 0)
            optimizer = optim.Optimizer(hp, model.named_parameters(), compute_dtype=dtype)
            with StorageBytes() as live:
                for tensor in (*model.parameters(), *optimizer.state_dict().values()):
                    live.add(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                scaler = precision.LossScaler(dtype, cpu)
                tokens = torch.zeros(hp.batch_size, hp.max_seq_len, dtype=torch.int64)
                for micro_batch in range(n_micro_batches):
                    parallelize.start_micro_step(model, hp, micro_batch == n_micro_batches - 1)
                    loss = model(tokens, tokens)
                    (loss * (scaler.scale * 2)).backward()
                    del loss
                _, nonfinite = optimizer.clip_grad_norm(scaler.scale)
                optimizer.step(1e-3, nonfinite)
        return live.peak
    finally:
        dist.destroy_process_group()


LLAMA = {
    "model": "mistral",
    "d_model": 512,
    "n_layers": 4,
    "n_heads": 8,
    "vocab_size": 2048,
    "max_seq_len": 256,
}
GPT2 = {
    "model": "gpt2",
    "d_model": 512,
    "n_layers": 4,
    "n_heads": 8,
    "vocab_size": 2048,
    "max_seq_len": 256,
}
DEFAULT = {"d_model": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 4096, "max_seq_len": 256}
QWEN3 = LLAMA | {"n_kv_heads": 2, "head_dim": 48, "qk_norm": "head", "tie_embeddings": True}
OLMO2 = LLAMA | {"norm_placement": "post", "qk_norm": "projection"}
SMOLLM3 = LLAMA | {"layer_pattern": [{}, {}, {}, {"rope": False}]}
OLMO3 = OLMO2 | {"layer_pattern": [{"sliding_window": 64}, {"sliding_window": 32}, {}]}
GEMMA3 = QWEN3 | {
    "norm": "rmsnorm-centered",
    "norm_placement": "both",
    "ffn": "geglu",
    "layer_pattern": [{"sliding_window": 64}, {}],
}
GLM4 = LLAMA | {
    "norm_placement": "both",
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
}
LORA = LLAMA | {"lora_rank": 8, "init_from": "base"}
ACCUMULATED = {"total_batch_size": 24}

STEPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"sharding": "full-shard", "activation_checkpointing": "full"}),
    (LLAMA, {"sharding": "grad-shard", "activation_checkpointing": "selective"}),
    (LLAMA, {"sharding": "no-shard"}),
    (LLAMA, {"sharding": "full-shard", "amp_dtype": None} | ACCUMULATED),
    (LLAMA, {"sharding": "grad-shard", "sync_each_micro_step": True} | ACCUMULATED),
    (DEFAULT, {"sharding": "hybrid-full-shard"} | ACCUMULATED),
    (
        DEFAULT,
        {"sharding": "hybrid-grad-shard", "activation_checkpointing": "full", "batch_size": 5},
    ),
    (GPT2, {"sharding": "full-shard", "activation_checkpointing": "selective"}),
    (GPT2, {"sharding": "grad-shard", "layer_wrap": False}),
    (QWEN3, {"sharding": "grad-shard"}),
    (OLMO2, {"sharding": "full-shard", "activation_checkpointing": "selective"}),
    (SMOLLM3, {"sharding": "grad-shard"}),
    (OLMO3, {"sharding": "full-shard"}),
    (GLM4, {"sharding": "grad-shard"}),
    (GEMMA3, {"sharding": "full-shard", "activation_checkpointing": "selective"}),
    (LORA, {"sharding": "grad-shard", "activation_checkpointing": "full"} | ACCUMULATED),
    (LORA, {"sharding": "full-shard"}),
    (LLAMA, {"sharding": "full-shard", "optimizer": "muon"}),
    (LLAMA, {"sharding": "no-shard", "optimizer": "muon"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changes"), STEPS, ids=str)
def test_required_memory_is_that_of_a_step_on_fake_tensors(
    model: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = Hyperparameters.model_validate(
        {"amp_dtype": "bfloat16", "compile": False} | model | changes
    )
    ranks = fit.Ranks(precision.choose_dtype(hp, torch.bfloat16), "cpu", 8, 4, 0)
    predicted = fit.predict_memory(hp, ranks).total
    assert predicted == pytest.approx(step_on_fake_tensors(hp, 8, monkeypatch), rel=0.02)
    assert (
        predicted <= fit.predict_memory(hp, ranks, memory.bound_activations).total <= 4 * predicted
    )


def plan(hp: Hyperparameters, gpus: int = 8, card: str = "h100", gib: float = 80) -> Plan:
    """Plan a run on GPUs of `gib` GiB in nodes of 8."""
    ranks = fit.Ranks(
        precision.choose_dtype(hp, torch.bfloat16), "cuda", gpus, min(gpus, 8), gib * GIB
    )
    return make_plan(hp, ranks, speed.CARDS[card])


def test_trace_of_a_compiled_block_is_the_partitioners() -> None:
    d, q, kv, f = 128, 128, 64, 512
    shape = LLAMA | {"d_model": d, "n_heads": 4, "n_kv_heads": 2, "d_ff": f}
    saved = {
        "none": 4 * d + 2 * q + 2 * kv + 3 * f,
        "selective": 2 * d + 2 * q + 2 * kv + 2 * f,
        "full": d,
    }
    for mode, values in saved.items():
        hp = Hyperparameters.model_validate(shape | {"activation_checkpointing": mode})
        held = measure_activations(hp, torch.bfloat16, "cuda").block.held
        assert held == pytest.approx(2 * values * hp.max_seq_len, rel=0.02, abs=6000), (
            mode
        )  # 5 kB: the RNG's state


def test_plan_command_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "--config",
                str(REPOSITORY / "recipes" / "chess_codellama.yaml"),
                "--gpus",
                "8",
                "--json",
                "compile=false",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["mesh"] == {"replicate": 1, "shard": 8}
    assert (
        found["memory"]["parameters"]
        == found["memory"]["moments"] // 2
        == found["parameters"] * 4 // 8
    )
    assert found["peak"] == sum(found["memory"].values())
    assert found["tokens_per_step"] == 64 * 1024
    assert found["tokens_per_second"] == pytest.approx(found["tokens_per_step"] / found["step"])


CODELLAMA = {
    "model": "codellama-7b",
    "max_seq_len": 1024,
    "compile": False,
    "activation_checkpointing": "full",
}


def test_largest_batch_size_fits_and_one_more_does_not() -> None:
    hp = Hyperparameters.model_validate(CODELLAMA)
    ranks = fit.Ranks(torch.bfloat16, "cuda", 8, 8, 80 * GIB)
    largest = fit.find_largest_batch_size(hp, ranks)
    assert plan(hp.model_copy(update={"batch_size": largest})).fits
    assert not plan(hp.model_copy(update={"batch_size": largest + 1})).fits


def test_plan_of_offloading_uses_host_memory_and_time() -> None:
    hp = Hyperparameters.model_validate(CODELLAMA)
    kept = plan(hp)
    moved = plan(hp.model_copy(update={"cpu_offload": True, "activation_offload": True}))
    assert moved.memory.parameters == moved.memory.moments == 0
    assert moved.peak < kept.peak
    block_inputs = 8 * 30 * 2 * 1024 * 4096  # of all blocks but two, in bfloat16
    assert moved.host - kept.host == pytest.approx(16 * kept.parameters + block_inputs, rel=1e-3)
    assert moved.times is not None
    assert moved.times.seconds.offload > 0


def test_plan_links_carry_parameters_and_gradients() -> None:
    hp = Hyperparameters.model_validate(CODELLAMA)
    full = plan(hp, 64)
    grouped = plan(hp.model_copy(update={"sharding": "hybrid-full-shard"}), 64)
    assert full.times is not None
    assert grouped.times is not None
    p = full.parameters
    in_ring = 8 * p * 63 / 64  # 16-bit parameters gathered twice, and float32 gradients reduced
    assert full.times.links.node == pytest.approx(7 / 8 * in_ring)
    assert full.times.links.network == pytest.approx(1 / 8 * in_ring)
    assert grouped.times.links.node == pytest.approx(8 * p * 7 / 8)
    assert grouped.times.links.network == pytest.approx(8 * p / 8 * 7 / 8)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu", "h110"], "--gpu: h110 .*h100, h200, a100-80"),
        (["--gpu", "a100"], "--gpu: a100 .* a100-80 or a100-40"),
        (["--gpu", "NVIDIA H100 PCIe"], "--gpu: NVIDIA H100 PCIe is unknown"),
        (["--gpus", "0"], "--gpus: 0 "),
        (["--gpus", "7", "--nodes", "2"], "--nodes: 2 .*7 GPUs"),
        (["--nodes", "0"], "--nodes: 0 "),
        (["--memory", "0"], "--memory: 0 "),
        (["--host-memory", "inf"], "--host-memory: inf "),
        (["n_heads=7"], r"argument n_heads: 7 .*\[1, 2, 4, 8\]"),
        (["--search", "d_model=65536", "compile=false"], "--search: .*1 GPUs"),
        (["--gpu", "a100-80", "float8=tensorwise"], "float8: A100 "),
    ],
    ids=str,
)
def test_plan_command_refuses_wrong_arguments(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(REPOSITORY / "config.yaml"), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    (problem,) = [line for line in lines if "planning" not in line]  # without those on progress
    assert re.match(part, problem)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("a100-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("rtx4090", "4090"),
        ("NVIDIA L4", "l4"),
        ("L40s", "l40s"),
        *((key, key) for key in speed.CARDS),
    ],
)
def test_plan_gpu_is_found_by_its_names(name: str, key: str) -> None:
    assert speed.find_card(name) is speed.CARDS[key]


SMALL = ["--config", str(REPOSITORY / "config.yaml"), "compile=false"]


def test_plan_rounds_the_batch_up_for_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["batch_size=2", "total_batch_size=256", "--gpus", "1024", "--memory", "2"]
    assert main([*SMALL, *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"total_batch_size": 2048}
    assert found["tokens_per_step"] == 2048 * 2048
    assert main([*SMALL, *sizes]) == 0
    (line, *_) = capsys.readouterr().out.splitlines()
    assert re.match("total_batch_size: 256 .* 2 x 1,024 GPUs.* 2048$", line)


def test_plan_search_rounds_the_batch_up(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "model=gpt2", "total_batch_size=2", "--gpus", "3", "--search", "--json"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    plans = json.loads(captured.out)
    assert [plan["settings"].get("total_batch_size") for plan in plans] == [None, None, 3]
    _, *progress = captured.err.splitlines()  # after what `model` overrides
    assert [line.partition("(")[2][:6] for line in progress] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]


def test_plan_says_how_to_shard_accumulated_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "total_batch_size=32", "--gpus", "8", "--memory", "2"]
    assert main(arguments) == 0
    (advice,) = re.findall("^with sync_each_micro_step=true .*", capsys.readouterr().out, re.M)
    assert main([*arguments, "sync_each_micro_step=true"]) == 0
    out = capsys.readouterr().out
    assert "with sync_each_micro_step" not in out
    (peak,) = re.findall(r"^peak +([\d.]+ [MG]iB)", out, re.M)
    assert peak in advice


def test_plan_that_does_not_fit_says_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "batch_size=256", "--gpu", "l4"]) == 0
    out = capsys.readouterr().out
    (setting,) = re.findall(
        r"^does not fit .* what fits: (activation\S+|batch_size\S+);", out, re.M
    )
    assert main([*SMALL, "batch_size=256", "--gpu", "l4", setting]) == 0
    assert "fits into 90%" in capsys.readouterr().out


def test_plan_command_refuses_gpus_that_no_mesh_takes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["sharding=hybrid-full-shard", "shard_group_size=3"]
    assert main(["--config", str(REPOSITORY / "config.yaml"), "--gpus", "8", *sizes]) == 2
    assert re.match(r"shard_group_size: 8 ranks .*\[1, 2, 4, 8\]\n", capsys.readouterr().err)


REFUSAL = """
import time
imported, main = time.process_time(), fsdp.main
def measured():
    code = main()
    print(time.process_time() - imported)
    return code
fsdp.main = measured
"""
"""Prints the processor time of a refusal, without imports."""


@pytest.mark.slow
def test_run_that_cannot_fit_is_refused_with_what_fits(tmp_path: Path) -> None:
    config = {"d_model": 32768, "n_layers": 80, "n_heads": 8}
    done = run_fsdp(
        tmp_path, config=config, script=REFUSAL, timeout=120, PYTHONPATH=str(REPOSITORY)
    )  # starts Python
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1.5  # seconds; takes 0.2, with traces 4
    assert "parameters, moments and gradients take 15,392.6" in done.stderr
    suggestions = done.stderr.partition("what fits: ")[2].strip().split("; ")
    assert len(suggestions) == 3
    done = run_fsdp(tmp_path, *suggestions[0].split(), "--dry-run", timeout=60)
    assert done.returncode == 0, done.stderr
    assert "what needs at most" not in done.stdout


@pytest.mark.slow
def test_dry_run_compares_the_run_with_its_checkpoints(tmp_path: Path) -> None:
    run_fsdp(tmp_path, code=0)
    complete = run_fsdp(tmp_path, "--dry-run", code=0)
    assert "is complete" in complete.stdout
    other = run_fsdp(tmp_path, "--dry-run", "seed=43", code=2)
    assert "seed: 42 in the checkpoint, now 43" in other.stderr


def test_dry_run_says_what_a_run_needs(tmp_path: Path) -> None:
    config = {"d_model": 64, "n_layers": 1, "vocab_size": 30000, "max_seq_len": 16, "max_steps": 1}
    done = run_fsdp(
        tmp_path, "--dry-run", config=config, TMPDIR=str(tmp_path), PYTHONPATH=str(REPOSITORY)
    )  # starts Python
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["test.yaml"]
    parts = re.findall(r"^(\w+) +([\d.]+) MiB  ", done.stdout.partition("needs about ")[2], re.M)
    expected = {"parameters": "14.8", "moments": "29.7", "gradients": "22.2"}
    assert dict(parts).items() >= expected.items()


def test_run_says_what_memory_it_needs(tmp_path: Path) -> None:
    config = {
        "d_model": 256,
        "n_layers": 2,
        "vocab_size": 60000,
        "max_seq_len": 16,
        "max_steps": 3,
        "report_rate": 1,
    }
    done = run_fsdp(tmp_path, config=config)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"needs about [\d.]+ MiB of .* GiB per rank", done.stdout)) == 1


SEARCHED = [
    "--config",
    str(REPOSITORY / "config.yaml"),
    "model=gpt2",
    "init_from=base",
    "compile=false",
    "beta2=0.95",
]


def test_plan_search_finds_the_fastest_settings(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["batch_size=2", "total_batch_size=12"]
    assert main([*SEARCHED, *sizes, "--gpu", "l4", "--gpus", "3", "--search", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    kinds = [(plan["gpus"], plan["settings"].get("lora_rank")) for plan in plans]
    assert kinds == [(1, None), (1, 16), (2, None), (2, 16), (3, None), (3, 16)]
    assert all(plan["fits"] for plan in plans)
    gib, shape = (
        speed.CARDS["l4"].gib,
        {"model": "gpt2", "init_from": "base", "compile": False, "beta2": 0.95},
    )
    for best in plans:
        hp = Hyperparameters.model_validate(
            shape | {"batch_size": 2, "total_batch_size": 12} | best["settings"]
        )
        again = plan(hp, best["gpus"], "l4", gib)
        assert again.times is not None
        assert again.times.tokens_per_second == pytest.approx(best["tokens_per_second"])
        for other in (
            {"activation_checkpointing": "full"},
            {"sharding": "grad-shard"},
            {"batch_size": 1},
        ):
            slower = plan(hp.model_copy(update=other), best["gpus"], "l4", gib)
            assert slower.times is not None
            assert slower.times.tokens_per_second <= best["tokens_per_second"] or not slower.fits


def test_plan_search_respects_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*SEARCHED, "model=gpt2-xl", "batch_size=1", "--gpu", "l4", "--search", "--json"]
    found = {}
    for size in (8, 64):
        assert main([*arguments, "--host-memory", str(size)]) == 0
        plans = json.loads(capsys.readouterr().out)
        assert all(plan["host"] <= fit.USABLE * size * GIB for plan in plans)
        found[size] = [plan["settings"].get("lora_rank") for plan in plans]
    assert found == {
        8: [16],
        64: [None, 16],
    }  # 1.6B trained parameters have 12 GB of weights and 16-bit moments


def test_plan_plot_shows_accumulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "plan.png"
    assert main([*SEARCHED, "shard_group_size=8", "--gpus", "16", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "accumulated.png"
    sizes = ["shard_group_size=8", "total_batch_size=64", "--gpus", "16"]
    assert main([*SEARCHED, *sizes, "--plot", str(other)]) == 0
    assert picture.read_bytes() != other.read_bytes()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SEARCHED, "--plot", str(picture)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_plan_of_float8_halves_the_bytes_of_matrices() -> None:
    shape = {"model": "llama2-7b", "compile": False, "activation_checkpointing": "full"}
    hp = Hyperparameters.model_validate(shape)
    tensorwise = {"float8": "tensorwise"}
    bfloat16 = plan(hp)
    matrices = hp.n_layers * (4 * hp.d_model**2 + 3 * hp.d_model * hp.ffn_width)
    unit = matrices // hp.n_layers  # a byte of each
    for changes, in_float8 in (
        (tensorwise, matrices),
        ({"float8": "rowwise"}, 0),
        (tensorwise | {"cpu_offload": True}, 0),
    ):
        other = plan(hp.model_copy(update=changes))
        assert bfloat16.times is not None
        assert other.times is not None
        fewer_bytes = bfloat16.times.links.node - other.times.links.node
        assert fewer_bytes == pytest.approx(2 * in_float8 * 7 / 8)  # in forward and in backward
        assert other.times.seconds.compute < bfloat16.times.seconds.compute
        if in_float8:  # of a block, and of the all-gather buffer of the next
            assert bfloat16.memory.gathered - other.memory.gathered in (unit, 2 * unit)


def table_row(name: str, hp: Hyperparameters, places: list[tuple[int, float]]) -> str:
    """A row of docs/planning.md: the largest batch sizes by number of GPUs and GiB of each."""
    ranks = [fit.Ranks(torch.bfloat16, "cuda", n, min(n, 8), gib * GIB) for n, gib in places]
    sizes = [fit.find_largest_batch_size(hp, each) for each in ranks]
    return f"| {name} | {' | '.join(str(size or '-') for size in sizes)} |"


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="the page is of PyTorch 2.13; newer ones need other memory"
)
def test_planning_page_shows_the_largest_batch_sizes() -> None:
    text = (REPOSITORY / "docs" / "planning.md").read_text().splitlines()
    common = {"activation_checkpointing": "full", "init_from": "base"}
    for sharding in ("no-shard", "grad-shard", "full-shard"):
        hp = Hyperparameters.model_validate(common | {"model": "llama2-7b", "sharding": sharding})
        assert table_row(sharding, hp, [(n, 80) for n in (1, 2, 4, 8)]) in text
    hp = Hyperparameters.model_validate(common | {"model": "codellama-7b", "max_seq_len": 1024})
    adapted = hp.model_copy(update={"lora_rank": 16})
    for name, tuned, n in (
        ("all weights | 1", hp, 1),
        ("all weights | 8", hp, 8),
        ("LoRA, rank 16 | 1", adapted, 1),
    ):
        assert table_row(name, tuned, [(n, gib) for gib in (24, 40, 80, 141)]) in text
    hp = Hyperparameters.model_validate(common | {"model": "llama3-70b"})
    for gib in (80, 141):
        assert table_row(f"{gib} GiB", hp, [(n, gib) for n in (8, 16, 32, 64)]) in text
