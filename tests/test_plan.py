"""A plan's memory is that of FSDP's step on fake tensors and on CPUs; a run says what it needs before it starts."""

from __future__ import annotations

import json
import re
import statistics
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
from torch.utils.benchmark import Timer

from lm import lora, optim, parallelize, precision
from lm.config import Hyperparameters
from lm.metrics.device import GIB
from lm.plan import fit, memory, speed
from lm.plan.__main__ import DTYPES, main, make_plan
from lm.plan.trace import LiveBytes, trace
from model import Transformer
from tests.conftest import Message
from tests.support import ROOT, run


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
    """Peak bytes of a step of rank 0, as `fsdp.train` makes it, with a process group that does not communicate."""
    dtype, cpu = DTYPES[hp.amp_dtype], torch.device("cpu")
    dims = parallelize.mesh_dims(hp, ranks, 4)
    n_micro_batches = (hp.total_batch_size or hp.batch_size * ranks) // (hp.batch_size * ranks)
    monkeypatch.setattr(parallelize, "initialize", lambda *_: None)  # reads values
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        with torch.device("meta"):
            model = lora.add_adapters(Transformer(hp), hp, dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = parallelize.parallelize(model, hp, mesh, dtype, 0)
            optimizer = optim.Optimizer(hp, model.named_parameters())
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
                optimizer.clip_grad_norm(scaler.scale)
                optimizer.step(1e-3)
        return live.peak
    finally:
        dist.destroy_process_group()


LLAMA = {"model": "mistral", "d_model": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 2048, "max_seq_len": 256}
GPT2 = {"model": "gpt2", "d_model": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 2048, "max_seq_len": 256}
DEFAULT = {"d_model": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 4096, "max_seq_len": 256}
QWEN3 = LLAMA | {"n_kv_heads": 2, "head_dim": 48, "qk_norm": "head", "tie_embeddings": True}
OLMO2 = LLAMA | {"norm_placement": "post", "qk_norm": "projection"}
LORA = LLAMA | {"lora_rank": 8, "init_from": "base"}
ACCUMULATED = {"total_batch_size": 24}

STEPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"sharding": "full-shard", "activation_checkpointing": "full"}),
    (LLAMA, {"sharding": "grad-shard", "activation_checkpointing": "selective"}),
    (LLAMA, {"sharding": "no-shard"}),
    (LLAMA, {"sharding": "full-shard", "amp_dtype": None} | ACCUMULATED),
    (LLAMA, {"sharding": "grad-shard", "sync_each_micro_step": True} | ACCUMULATED),
    (DEFAULT, {"sharding": "hybrid-full-shard"} | ACCUMULATED),
    (DEFAULT, {"sharding": "hybrid-grad-shard", "activation_checkpointing": "full", "batch_size": 5}),
    (GPT2, {"sharding": "full-shard", "activation_checkpointing": "selective"}),
    (GPT2, {"sharding": "grad-shard", "layer_wrap": False}),
    (QWEN3, {"sharding": "grad-shard"}),
    (OLMO2, {"sharding": "full-shard", "activation_checkpointing": "selective"}),
    (LORA, {"sharding": "grad-shard", "activation_checkpointing": "full"} | ACCUMULATED),
    (LORA, {"sharding": "full-shard"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changes"), STEPS, ids=str)
def test_memory_is_that_of_a_step_on_fake_tensors(
    model: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = Hyperparameters.model_validate({"amp_dtype": "bfloat16", "compile": False} | model | changes)
    ranks = fit.Ranks(DTYPES[hp.amp_dtype], "cpu", 8, 4, 0)
    predicted = sum(fit.required_memory(hp, ranks).values())
    assert predicted == pytest.approx(step_on_fake_tensors(hp, 8, monkeypatch), rel=0.02)
    assert predicted <= sum(fit.required_memory(hp, ranks, memory.bound).values()) <= 4 * predicted


def plan(hp: Hyperparameters, gpus: int = 8, card: str = "h100", gib: float = 80) -> dict[str, Any]:
    """Plan a run on GPUs of `gib` GiB in nodes of 8."""
    ranks = fit.Ranks(DTYPES[hp.amp_dtype], "cuda", gpus, min(gpus, 8), gib * GIB)
    return make_plan(hp, ranks, speed.CARDS[card])


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "init_from": "base"}], ids=str)
def test_forward_and_backward_are_timed_on_a_cpu(changes: dict[str, Any]) -> None:
    hp = Hyperparameters.model_validate(GPT2 | {"d_model": 128, "amp_dtype": None, "compile": False} | changes)
    ranks, model = fit.Ranks(None, "cpu", 1, 1, GIB), lora.add_adapters(Transformer(hp), hp, None)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(hp.vocab_size, (1, hp.max_seq_len))
    timer = Timer("model(tokens, tokens).backward()", globals={"model": model, "tokens": tokens})
    seconds = min(timer.blocked_autorange(min_run_time=0.2).times)
    assert make_plan(hp, ranks, speed.CARDS["cpu"])["seconds"]["compute"] == pytest.approx(seconds, rel=0.5)


@pytest.mark.slow
def test_memory_is_that_of_measured_steps_on_cpus() -> None:
    """The measurements are those of `benchmarks.growth`."""
    record = json.loads((ROOT / "docs" / "growth.json").read_text())
    for row in record["points"]:
        hp = Hyperparameters.model_validate(record["base"] | row["changes"])
        ranks = fit.Ranks(DTYPES[hp.amp_dtype], "cpu", row["ranks"], row["ranks"], GIB)
        assert sum(fit.required_memory(hp, ranks).values()) == pytest.approx(row["peak"], rel=0.05), row["changes"]


def test_a_compiled_block_saves_what_the_partitioner_decides() -> None:
    d, q, kv, f = 128, 128, 64, 512
    shape = LLAMA | {"d_model": d, "n_heads": 4, "n_kv_heads": 2, "d_ff": f}
    saved = {"none": 4 * d + 2 * q + 2 * kv + 3 * f, "selective": 2 * d + 2 * q + 2 * kv + 2 * f, "full": d}
    for mode, values in saved.items():
        hp = Hyperparameters.model_validate(shape | {"activation_checkpointing": mode})
        held = trace(hp, torch.bfloat16, "cuda").block.held
        assert held == pytest.approx(2 * values * hp.max_seq_len, rel=0.02, abs=6000), mode  # 5 kB: the RNG's state


def test_a_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--config", str(ROOT / "recipes" / "chess_codellama.yaml"), "--gpus", "8", "--json", "compile=false"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["mesh"] == {"replicate": 1, "shard": 8}
    assert found["memory"]["parameters"] == found["memory"]["moments"] // 2 == found["parameters"] * 4 // 8
    assert found["peak"] == sum(found["memory"].values())
    assert found["tokens_per_step"] == 64 * 1024
    assert found["tokens_per_second"] == pytest.approx(found["tokens_per_step"] / found["step"])
    hp = Hyperparameters.model_validate({"model": "codellama-7b", "max_seq_len": 1024, "compile": False})
    hp = hp.model_copy(update={"activation_checkpointing": "full"})
    for size, fits in ((found["largest_batch_size"], True), (found["largest_batch_size"] + 1, False)):
        larger = plan(hp.model_copy(update={"batch_size": size}), gib=speed.CARDS["h100"].gib)
        assert larger["fits"] is fits
    offloaded = {"cpu_offload": True, "activation_offload": True}
    kept, moved = (plan(hp.model_copy(update=c)) for c in ({}, offloaded))
    assert moved["memory"].keys() == {"gradients", "gathered", "activations"}
    assert moved["peak"] < kept["peak"]
    block_inputs = 8 * 30 * 2 * 1024 * 4096  # of all blocks but two, in bfloat16
    assert moved["host"] - kept["host"] == pytest.approx(16 * kept["parameters"] + block_inputs, rel=1e-3)
    assert moved["seconds"]["offload"] > 0
    hybrid = {"sharding": "hybrid-full-shard"}
    full, grouped = (plan(hp.model_copy(update=c), 64) for c in ({}, hybrid))
    p, one = full["parameters"], {"node": 7 / 8, "network": 1 / 8}
    for link, share in one.items():  # 16-bit parameters gathered twice and float32 gradients reduced, in one ring
        assert full["links"][link] == pytest.approx(share * 8 * p * 63 / 64)
    assert grouped["links"] == pytest.approx({"node": 8 * p * 7 / 8, "network": 8 * p / 8 * 7 / 8})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "h110"],
        ["--gpus", "0"],
        ["--gpus", "7", "--nodes", "2"],
        ["--nodes", "0"],
        ["--memory", "0"],
        ["--host-memory", "inf"],
        ["n_heads=7"],
        ["--search", "d_model=65536", "compile=false"],
        ["--gpu", "a100-80", "float8=tensorwise"],
        ["--gpu", "cpu", "--plot", "plan.png"],
        ["--gpu", "cpu", "--gpus", "2", "--nodes", "2"],
        ["--gpu", "cpu", "compile=true"],
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(ROOT / "config.yaml"), *arguments]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    message(problem)


def test_gpus_that_no_mesh_takes_are_refused(message: Message, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["sharding=hybrid-full-shard", "shard_group_size=3"]
    assert main(["--config", str(ROOT / "config.yaml"), "--gpus", "8", *sizes]) == 2
    message(capsys.readouterr().err)


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
def test_a_run_that_cannot_fit_is_refused_at_once_with_what_fits(tmp_path: Path, message: Message) -> None:
    config = {"d_model": 32768, "n_layers": 80, "n_heads": 8}
    done = run(tmp_path, config=config, script=REFUSAL, timeout=120, PYTHONPATH=str(ROOT))  # starts Python
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1.5  # seconds; takes 0.2, with traces 4
    suggestions = done.stderr.partition("what fits: ")[2].strip().split("; ")
    assert len(suggestions) == 3
    message(done.stderr, r"(?<= of )[\d.]+ GiB|\d+(?= ranks)|(?<=d_model=)\d+")
    done = run(tmp_path, *suggestions[0].split(), "--dry-run", timeout=60)
    assert done.returncode == 0, done.stderr
    assert "what needs at most" not in done.stdout


def test_a_dry_run_says_what_a_run_needs_and_writes_nothing(tmp_path: Path, message: Message) -> None:
    config = {"d_model": 64, "n_layers": 1, "vocab_size": 30000, "max_seq_len": 16, "max_steps": 1}
    done = run(tmp_path, "--dry-run", config=config, TMPDIR=str(tmp_path), PYTHONPATH=str(ROOT))  # starts Python
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["test.yaml"]
    message(done.stdout[done.stdout.index("needs about") :], r"(?<= of )[\d.]+ GiB")


def test_a_run_says_what_it_needs(tmp_path: Path, message: Message, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"d_model": 256, "n_layers": 2, "vocab_size": 60000, "max_seq_len": 16, "max_steps": 3, "report_rate": 1}
    done = run(tmp_path, config=config)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"needs about .*", done.stdout)
    message(line, r"(?<= of )[\d.]+ GiB")
    # A plan can be scaled by the run.
    metrics = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
    seconds = [report["step_seconds"] for report in map(json.loads, metrics) if report["group"] == "training"]
    arguments = ["--config", str(tmp_path / "test.yaml"), "--json", "--calibrate", str(tmp_path / "runs" / "test")]
    assert main([*arguments, "--gpu", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == pytest.approx(statistics.median(seconds[1:]))
    assert main([*arguments[:3], "--gpu", "cpu"]) == 0
    assert 1 / 4 < json.loads(capsys.readouterr().out)["step"] / min(seconds[1:]) < 4
    assert main([*arguments, "--gpu", "h100"]) == 2
    message(capsys.readouterr().err, r"\S+/runs/test|CPU of \d+ cores")
    with (tmp_path / "runs" / "test" / "sessions.jsonl").open("a") as file:
        file.write('{"step": 3, "gpus": 0, "device": "CPU", "ranks": 1}\n{"step"')
    assert main([*arguments, "--gpu", "cpu"]) == 2  # the last session has no reports
    message(capsys.readouterr().err, r"\S+/runs/test")


SEARCHED = ["--config", str(ROOT / "config.yaml"), "model=gpt2", "init_from=base", "compile=false", "beta2=0.95"]


def test_a_search_finds_the_fastest_settings_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["batch_size=2", "total_batch_size=12"]
    assert main([*SEARCHED, *sizes, "--gpu", "l4", "--gpus", "3", "--search", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out.splitlines()[-1])
    kinds = [(plan["gpus"], plan["settings"].get("lora_rank")) for plan in plans]
    assert kinds == [(1, None), (1, 16), (2, None), (2, 16), (3, None), (3, 16)]
    assert all(plan["fits"] for plan in plans)
    gib, shape = speed.CARDS["l4"].gib, {"model": "gpt2", "init_from": "base", "compile": False, "beta2": 0.95}
    for best in plans:
        hp = Hyperparameters.model_validate(shape | {"batch_size": 2, "total_batch_size": 12} | best["settings"])
        again = plan(hp, best["gpus"], "l4", gib)
        assert again["tokens_per_second"] == pytest.approx(best["tokens_per_second"])
        for other in ({"activation_checkpointing": "full"}, {"sharding": "grad-shard"}, {"batch_size": 1}):
            slower = plan(hp.model_copy(update=other), best["gpus"], "l4", gib)
            assert slower["tokens_per_second"] <= best["tokens_per_second"] or not slower["fits"]


def test_a_search_needs_no_more_host_memory_than_a_node_has(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SEARCHED, "model=gpt2-xl", "batch_size=1", "--gpu", "l4", "--search", "--json"]
    found = {}
    for size in (8, 64):
        assert main([*arguments, "--host-memory", str(size)]) == 0
        plans = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert all(plan["host"] <= fit.USABLE * size * GIB for plan in plans)
        found[size] = [plan["settings"].get("lora_rank") for plan in plans]
    assert found == {8: [16], 64: [None, 16]}  # 1.6B trained parameters have 12 GB of weights and 16-bit moments


def test_a_plot_needs_matplotlib(
    tmp_path: Path, message: Message, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "plan.png"
    assert main([*SEARCHED, "shard_group_size=8", "--gpus", "16", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SEARCHED, "--plot", str(picture)]) == 2
    message(capsys.readouterr().err)


def test_float8_halves_the_bytes_of_the_blocks_matrices() -> None:
    shape = {"model": "llama2-7b", "compile": False, "activation_checkpointing": "full"}
    hp = Hyperparameters.model_validate(shape)
    tensorwise = {"float8": "tensorwise"}
    changes = ({}, tensorwise, {"float8": "rowwise"}, tensorwise | {"cpu_offload": True})
    bfloat16, *others = (plan(hp.model_copy(update=c)) for c in changes)
    matrices = hp.n_layers * (4 * hp.d_model**2 + 3 * hp.d_model * hp.ffn_width)
    for other, gathered in zip(others, (matrices, 0, 0), strict=True):  # twice: in forward and in backward
        assert bfloat16["links"]["node"] - other["links"]["node"] == pytest.approx(2 * gathered * 7 / 8)
        assert other["seconds"]["compute"] < bfloat16["seconds"]["compute"]
    unit = matrices // hp.n_layers  # a block and the all-gather buffer of the next
    assert bfloat16["memory"]["gathered"] - others[0]["memory"]["gathered"] in (unit, 2 * unit)


def table_row(name: str, hp: Hyperparameters, places: list[tuple[int, float]]) -> str:
    """A row of docs/performance.md: the largest batch sizes by number of GPUs and memory of each in GiB."""
    ranks = [fit.Ranks(torch.bfloat16, "cuda", n, min(n, 8), gib * GIB) for n, gib in places]
    sizes = [fit.largest_batch_size(hp, each) for each in ranks]
    return f"| {name} | {' | '.join(str(size or '-') for size in sizes)} |"


@pytest.mark.slow
def test_the_documentation_shows_the_largest_batch_sizes() -> None:
    text = (ROOT / "docs" / "performance.md").read_text().splitlines()
    common = {"activation_checkpointing": "full", "init_from": "base"}
    for sharding in ("no-shard", "grad-shard", "full-shard"):
        hp = Hyperparameters.model_validate(common | {"model": "llama2-7b", "sharding": sharding})
        assert table_row(sharding, hp, [(n, 80) for n in (1, 2, 4, 8)]) in text
    hp = Hyperparameters.model_validate(common | {"model": "codellama-7b", "max_seq_len": 1024})
    adapted = hp.model_copy(update={"lora_rank": 16})
    for name, tuned, n in (("all weights | 1", hp, 1), ("all weights | 8", hp, 8), ("LoRA, rank 16 | 1", adapted, 1)):
        assert table_row(name, tuned, [(n, gib) for gib in (24, 40, 80, 141)]) in text
    hp = Hyperparameters.model_validate(common | {"model": "llama3-70b"})
    for gib in (80, 141):
        assert table_row(f"{gib} GiB", hp, [(n, gib) for n in (8, 16, 32, 64)]) in text
