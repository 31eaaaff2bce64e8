"""What users run on a GPU: kernels, bfloat16, float8, recomputation, offloading, saves.

Without a GPU, all tests are skipped but one, which makes their runs in small on a CPU.
`-m gpu_quick` selects those that end within 60 seconds, in one process.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from determined import core
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fsdp
from benchmarks.observer import StepObserver
from lm.checkpoint.cluster import ClusterCheckpoints
from lm.config.hyperparameters import Hyperparameters
from lm.data.loader import PairBatch
from lm.determined.context import TorchDistributedContext
from lm.metrics.device import peak_flops
from lm.objectives.config import ObjectiveConfig
from lm.objectives.dpo import DPO
from lm.runtime.world import World
from lm.training import parallelize, precision
from model import Transformer, add_product
from tests.support.hyperparameters import LLAMA_STYLE
from tests.support.ranks import run_ranks
from tests.support.runs import read_reports, run_fsdp

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
FLOAT8 = FLOAT8 and importlib.util.find_spec("torchao") is not None
needs_float8 = pytest.mark.skipif(
    not FLOAT8, reason="float8 needs a GPU of compute capability 8.9 and torchao"
)

# ---- gradients

SHAPE: dict[str, Any] = {
    "d_model": 128,
    "n_heads": 4,
    "n_layers": 4,
    "vocab_size": 512,
    "max_seq_len": 256,
}
SHAPE |= {"amp_dtype": None}
LLAMA = SHAPE | LLAMA_STYLE
MODELS = {
    "example": SHAPE,
    "llama": LLAMA,
    "windowed": SHAPE | {"sliding_window": 40},
    "mistral": LLAMA | {"sliding_window": 40},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "compiled": {"compile": True},
    "bfloat16": {"amp_dtype": "bfloat16"},
    "float8": {"amp_dtype": "bfloat16", "float8": "tensorwise"},
    "recompute-some": {"activation_checkpointing": "selective"},
    "recompute": {"activation_checkpointing": "full"},
    "offload": {"cpu_offload": True},
    "activation-offload": {"activation_offload": True},
    "recompute-and-offload": {"activation_offload": True, "activation_checkpointing": "selective"},
    "recompute-all-and-offload": {"activation_offload": True, "activation_checkpointing": "full"},
}
TOLERANCES = {"bfloat16": 0.15, "float8": 0.4}
"""Norm of the difference over the norm, about twice a CPU's; 0.01 in float32, or TF32."""

Gradients = dict[str, np.ndarray]


def read(settings: dict[str, Any]) -> Hyperparameters:
    return Hyperparameters.from_flat(settings)


def release() -> None:
    """Free the memory of the last model, and its compiled code."""
    torch._dynamo.reset()
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gradients(world: World | None, settings: dict[str, Any], has_documents: bool) -> Gradients:
    """The loss of a batch and all gradients, on the device of `world`, or of a plain model."""
    hp = read(settings)
    plain = Transformer(hp.own_model)
    parallelize.initialize_parameters(plain, 7)
    model, device = plain, torch.device("cpu")
    if world is not None:
        device = world.device
        mesh, dtype = (
            world.device_mesh(parallelize.mesh_shape(hp.parallel, 1, 1)),
            precision.compute_dtype(hp.precision, device),
        )
        model = fsdp.build_model(hp, mesh, dtype)
        parallelize.initialize_parameters(model, 7)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
                assert isinstance(parameter, DTensor)
                parameter.to_local().copy_(value)
    tokens = torch.randint(512, (2, 257), generator=torch.Generator().manual_seed(1)).to(device)
    document_ids = torch.arange(256, device=device).expand(2, -1) // 60 if has_documents else None
    loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document_ids)
    loss.backward()
    found = {"loss": loss.detach().cpu().numpy()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = local(parameter.grad).cpu().numpy()  # all of it: there is one rank
    return found


def all_gradients(world: World, option: dict[str, Any]) -> dict[tuple[str, bool], Gradients]:
    """`gradients` by model and whether the batch has documents."""
    found = {}
    for model, shape in MODELS.items():
        for has_documents in (False, True):
            found[model, has_documents] = gradients(world, shape | option, has_documents)
            release()
    return found


@functools.cache
def expected_gradients(model: str, has_documents: bool) -> Gradients:
    return gradients(None, MODELS[model], has_documents)


@needs_gpu
@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=needs_float8 if o == "float8" else ()) for o in OPTIONS]
)
def test_gpu_loss_and_gradients_equal_those_of_the_cpu(option: str) -> None:
    (found,) = run_ranks(1, all_gradients, OPTIONS[option])
    for (model, has_documents), values in found.items():
        expected = expected_gradients(model, has_documents)
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            difference = np.linalg.norm(values[name] - value) / np.linalg.norm(value)
            assert difference <= TOLERANCES.get(option, 0.01), (model, has_documents, name)


# ---- runs

RUN: dict[str, Any] = LLAMA_STYLE | {
    "d_model": 256,
    "n_heads": 8,
    "n_layers": 8,
    "vocab_size": 512,
    "lr": 3e-3,
}
RUN |= {
    "max_seq_len": 1024,
    "batch_size": 8,
    "validation_batches": 1,
    "amp_dtype": "bfloat16",
    "compile": False,
}
RUN |= {"report_rate": 1, "max_steps": 10**6, "checkpoint_rate": 10**6, "validation_rate": 10**6}
STEPS = 12


def execute(
    world: World, settings: dict[str, Any], folder: Path, on_step_start: Callable[[int], None]
) -> list[Any]:
    """The metrics of every step of a run, which `on_step_start` ends by raising StopIteration."""
    reports: list[dict[str, float]] = []
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    with core.init(distributed=distributed, checkpoint_storage=str(folder)) as context:

        def report(_group: str, steps_completed: int, metrics: dict[str, float]) -> None:
            reports.append({"step": steps_completed} | metrics)

        with patch.object(context.train, "report_metrics", report):
            try:
                store = ClusterCheckpoints(context.checkpoint, None, writes_in_place=True)
                job = fsdp.Job(read(settings), None, None)
                fsdp.execute(job, world, context, store, StepObserver(world, on_step_start))
            except StopIteration:
                return reports
    raise AssertionError("the run has ended")


def train(world: World, **settings: Any) -> list[dict[str, float]]:
    """The metrics of `STEPS` steps."""

    def stop(step: int) -> None:
        if step == STEPS:
            raise StopIteration

    with tempfile.TemporaryDirectory() as own_folder:
        text = "".join(f"{n} is the square of {n**0.5:.3f}.\n" for n in range(10_000))
        Path(own_folder, "text").write_text(text)
        folder = Path(world.all_gather_object(own_folder)[0])
        data = {"dataset": "text", "train_data": str(folder / "text")}
        reports = execute(world, RUN | data | settings, folder, stop)
        world.all_gather_object(None)  # the folder is rank 0's
        return reports


def attention(world: World) -> set[str]:
    """The operators that causal attention calls."""
    hp = read(RUN)
    mesh = world.device_mesh(parallelize.mesh_shape(hp.parallel, 1, 1))
    model = fsdp.build_model(hp, mesh, torch.bfloat16)
    parallelize.initialize_parameters(model, 7)
    tokens = torch.zeros(2, hp.model.max_seq_len, dtype=torch.int64, device=world.device)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(tokens, tokens).backward()
    return {event.key for event in profiler.key_averages()}


def saves(world: World, n_layers: int = 4, d_model: int = 1024) -> dict[int, dict[str, bool]]:
    """By step of three checkpoints and tensor, whether its bytes are those of the training."""
    build = fsdp.Trainer
    trainers: list[fsdp.Trainer] = []
    expected: dict[int, dict[str, torch.Tensor]] = {}

    def build_and_keep(*args: Any) -> fsdp.Trainer:
        trainers.append(build(*args))
        return trainers[0]

    def on_step_start(step: int) -> None:
        if step in (
            2,
            4,
            6,
        ):  # cloned on the device, so that the next steps do not wait for the copy to the host
            expected[step] = {
                f"{part}.{name}": local(tensor).clone()
                for part, tensors in trainers[0].state().items()
                for name, tensor in tensors.items()
            }
        if step == 7:
            deadline = time.monotonic() + 60
            while (
                len(list(Path(folder).glob("*/manifest.json"))) < 3 and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            raise StopIteration

    size = {"n_layers": n_layers, "d_model": d_model, "max_seq_len": 64, "batch_size": 1}
    with tempfile.TemporaryDirectory() as folder, patch.object(fsdp, "Trainer", build_and_keep):
        execute(
            world,
            RUN | size | {"checkpoint_rate": 2, "keep_checkpoints": None},
            Path(folder),
            on_step_start,
        )
        same: dict[int, dict[str, bool]] = {}
        for manifest in Path(folder).glob("*/manifest.json"):
            step, tensors = json.loads(manifest.read_text())["step"], read_tensors(manifest.parent)
            assert tensors.keys() == expected[step].keys()
            same[step] = {
                name: contents(expected[step][name]) == data for name, data in tensors.items()
            }
    return same


def steps_without_waiting(world: World) -> int:
    """Completed steps of a run: after two, one that waits for the GPU is an error."""
    completed = 0

    def on_step_start(step: int) -> None:
        nonlocal completed
        completed = step
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        if step == 4:
            raise StopIteration

    rare = {"report_rate": 10**6, "skip_spikes": 6.0, "activation_checkpointing": "selective"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            execute(world, RUN | rare | {"total_batch_size": 16}, Path(folder), on_step_start)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return completed


def pairs_without_waiting(world: World) -> bool:
    """Whether forward and backward of a pair of replies, once warm, do not wait for the GPU."""
    hp = read(RUN)
    mesh = world.device_mesh(parallelize.mesh_shape(hp.parallel, 1, 1))
    model = fsdp.build_model(hp, mesh, torch.bfloat16)
    parallelize.initialize_parameters(model, 7)
    numbers = torch.arange(8, device=world.device)
    lengths = torch.tensor([5, 3], device=world.device)
    pairs = PairBatch(numbers[None], None, numbers, numbers, [5, 3], lengths, numbers[:2])
    config_of_pairs = ObjectiveConfig.model_validate({"objective": "dpo", "sft_weight": 1.0})
    objective = DPO(config_of_pairs, 2, world.device)
    try:
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            objective.losses(model, pairs).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def contents(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_tensors(directory: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint of one rank, by part and name."""
    found = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[f"{path.name.partition('-')[0]}.{name}"] = data[start + begin : start + end]
    return found


CASES: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "saves": saves,
    "plain": train,
    "selective": functools.partial(train, activation_checkpointing="selective"),
    "full": functools.partial(train, activation_checkpointing="full"),
    "activation_offload": functools.partial(train, activation_offload=True),
    "full, activation_offload": functools.partial(
        train, activation_checkpointing="full", activation_offload=True
    ),
    "steps_without_waiting": steps_without_waiting,
    "pairs_without_waiting": pairs_without_waiting,
    "cpu_offload": functools.partial(train, cpu_offload=True),
    "compiled": functools.partial(train, compile=True),
    "float8": functools.partial(train, float8="tensorwise", compile=True),
}
ON_TWO_GPUS: dict[str, Callable[..., Any]] = {
    "no-shard": functools.partial(train, sharding="no-shard"),
    "grad-shard": functools.partial(train, sharding="grad-shard"),
    "hybrid": functools.partial(train, sharding="hybrid-full-shard", shard_group_size=1),
}


def run_cases(world: World, names: list[str]) -> dict[str, tuple[Any, str]]:
    """The results of all cases, or what they raised."""
    found: dict[str, tuple[Any, str]] = {}
    for name in names:
        try:
            found[name] = (CASES | ON_TWO_GPUS)[name](world), ""
        except Exception:
            found[name] = None, traceback.format_exc()
        release()
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, str]]:
    return run_ranks(1, run_cases, [name for name in CASES if FLOAT8 or name != "float8"])[0]


@pytest.fixture
def result(outcomes: dict[str, tuple[Any, str]]) -> Callable[[str], Any]:
    """Return the result of a case."""

    def get(name: str) -> Any:
        value, error = outcomes[name]
        assert not error, error
        return value

    return get


def losses(metrics: list[dict[str, float]]) -> list[float]:
    return [report["loss"] for report in metrics]


SMALL = {"d_model": 32, "n_layers": 2, "max_seq_len": 64, "batch_size": 1, "amp_dtype": None}


def small_runs(world: World) -> dict[str, list[float]]:
    """The losses of the runs that need nothing of a GPU, of a small model."""
    names = ["plain", "selective", "full", "cpu_offload", *ON_TWO_GPUS]
    return {name: losses((CASES | ON_TWO_GPUS)[name](world, **SMALL)) for name in names}


@pytest.mark.slow
def test_runs_of_the_gpu_tests_end_on_a_cpu() -> None:
    """So that they are right on the day that there is a GPU."""
    found = run_ranks(2, small_runs)[0]
    for name, values in found.items():
        assert len(values) == STEPS
        assert values == pytest.approx(found["plain"], rel=1e-4), name
    (same,) = run_ranks(1, functools.partial(saves, n_layers=1, d_model=32))
    for step in (2, 4, 6):
        assert {*same[step].values()} == {True}


@needs_gpu
@pytest.mark.gpu_quick
def test_attention_runs_in_a_fused_kernel(result: Callable[[str], Any]) -> None:
    prefix = "aten::_scaled_dot_product_"
    kernels = {name.removeprefix(prefix) for name in result("attention") if name.startswith(prefix)}
    assert kernels & {"flash_attention", "cudnn_attention", "efficient_attention"}


@needs_gpu
@pytest.mark.gpu_quick
def test_products_are_added_without_rounding_them() -> None:
    a, b = torch.randn(2, 256, 256, dtype=torch.bfloat16, device="cuda")
    total = add_product(None, a, b)
    assert add_product(total, a, b).data_ptr() == total.data_ptr()
    expected = 2 * (a.double() @ b.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


@needs_gpu
@pytest.mark.gpu_quick
def test_async_checkpoint_holds_the_state_of_its_step(
    result: Callable[[str], Any],
) -> None:
    same = result("saves")
    assert sorted(same) == [2, 4, 6]
    assert [
        (step, name)
        for step, tensors in same.items()
        for name, equal in tensors.items()
        if not equal
    ] == []


@needs_gpu
@pytest.mark.gpu_quick
def test_bfloat16_training_learns(result: Callable[[str], Any]) -> None:
    plain, compiled = result("plain"), result("compiled")
    assert losses(plain)[0] == pytest.approx(math.log(RUN["vocab_size"]), rel=0.05)
    assert losses(plain)[-1] < losses(plain)[0] - 1
    assert losses(compiled) == pytest.approx(losses(plain), rel=0.02)
    known = peak_flops(torch.device("cuda", 0), torch.bfloat16) is not None
    assert [known] * STEPS == [0 < report.get("mfu", 0) < 1 for report in compiled]


@needs_gpu
@pytest.mark.gpu_quick
@needs_float8
def test_float8_training_follows_bfloat16(result: Callable[[str], Any]) -> None:
    assert losses(result("float8")) == pytest.approx(losses(result("plain")), rel=0.04)


@needs_gpu
@pytest.mark.gpu_quick
@pytest.mark.parametrize(
    "option", ["selective", "full", "activation_offload", "full, activation_offload", "cpu_offload"]
)
def test_memory_options_compute_the_same(option: str, result: Callable[[str], Any]) -> None:
    plain, other = result("plain"), result(option)
    assert losses(other) == pytest.approx(losses(plain), rel=0.02)
    assert other[-1]["peak_memory_gib"] < plain[-1]["peak_memory_gib"]


@needs_gpu
@pytest.mark.gpu_quick
def test_activation_checkpointing_memory_order(
    result: Callable[[str], Any],
) -> None:
    order = ("full, activation_offload", "full", "selective")
    peaks = [result(name)[-1]["peak_memory_gib"] for name in order]
    assert peaks == sorted(set(peaks))


@needs_gpu
@pytest.mark.gpu_quick
def test_steps_do_not_wait_for_the_gpu(result: Callable[[str], Any]) -> None:
    assert result("steps_without_waiting") == 4
    assert result("pairs_without_waiting")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_strategies_train_alike_on_two_gpus() -> None:
    others = list(ON_TWO_GPUS)
    if FLOAT8:
        others.append("float8")
    found = run_ranks(2, run_cases, ["plain", *others])[0]
    assert [error for _, error in found.values()] == [""] * len(found)
    for name in others:
        tolerance = 0.04 if name == "float8" else 0.02
        assert losses(found[name][0]) == pytest.approx(losses(found["plain"][0]), rel=tolerance)


@needs_gpu
def test_gpu_out_of_memory_names_the_keys_that_help(tmp_path: Path) -> None:
    limit = "import torch\ntorch.cuda.set_per_process_memory_fraction(0.005)"
    done = run_fsdp(tmp_path, "d_model=2048", "n_layers=8", "n_heads=16", script=limit)
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert all(
        key in done.stderr for key in ("batch_size", "activation_checkpointing", "cpu_offload")
    )
    assert "Traceback" not in done.stderr


@needs_gpu
def test_gpu_without_a_c_compiler_trains_on_documents(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a short line\n\n" * 10_000)
    settings = {key: value for key, value in RUN.items() if key != "compile"}
    settings |= {"dataset": "text", "train_data": str(text), "max_steps": 2, "num_tokens": 0}
    done = run_fsdp(
        tmp_path,
        config=settings,
        code=0,
        CC="/bin/false",
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert "cannot compile this model" in done.stderr
    losses_found = [report["loss"] for report in read_reports(tmp_path).values()]
    assert losses_found[0] == pytest.approx(math.log(RUN["vocab_size"]), rel=0.05)


@needs_gpu
def test_gpu_run_of_a_class_that_it_examines_is_deterministic(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.hf import save_model

    save_model("llama", tmp_path / "in")
    settings = {"init_from": str(tmp_path / "in"), "deterministic": True, "max_steps": 2}
    settings |= {"max_seq_len": 32, "num_tokens": 0}
    cache = str(tmp_path / "cache")
    done = run_fsdp(tmp_path, config=settings, code=0, XDG_CACHE_HOME=cache)
    assert "examining llama" in done.stderr
