"""The benchmarks compute shares and measure work, and a run needs the memory that is planned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.common import STEP, compute_shares
from benchmarks.gpu_pairs import (
    EIGHT_B_SLICE,
    ONE_B,
    PRODUCTS,
    Pair,
    find_numbers,
    list_pairs,
    verdict,
)
from benchmarks.table import EndedError, Row, measure
from lm.config.hyperparameters import Hyperparameters
from lm.memory import Ranks, count_state
from lm.metrics.device import GIB
from lm.plan import fit
from lm.training.parallelize import mesh_shape
from model import Transformer
from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import FORK_RANKS, ForkedProcess
from tests.support.hyperparameters import TINY
from tests.support.tensor_bytes import TensorBytes, run_ranks


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Python programs that this process starts are forked."""
    with pytest.MonkeyPatch.context() as patch:
        if FORK_RANKS:
            patch.setattr(subprocess, "Popen", ForkedProcess)
        yield


def event(cat: str, name: str, start: float, end: float) -> dict[str, Any]:  # milliseconds
    return {"ph": "X", "cat": cat, "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3}


def test_shares_of_a_cpu_step_do_not_overlap() -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 400),
        event("cpu_op", "aten::copy_", 100, 200),  # nested
        event("user_annotation", "gloo:all_reduce", 300, 600),  # overlapped for 100
        event("cpu_op", "c10d::allreduce_", 600, 650),  # waits, computes nothing
        event("user_annotation", "Optimizer.step#AdamW.step", 700, 800),
        event("cpu_op", "aten::_fused_adamw_", 700, 800),
        {"ph": "M", "name": "process_name"},
    ]
    expected = {
        "optimizer": 0.1,
        "attention": 0,
        "matrix products": 0.4,
        "FSDP": 0.2,
        "other": 0,
        "idle": 0.3,
    }
    assert compute_shares(events, 1.0) == pytest.approx(expected)


def test_shares_of_a_gpu_step_are_those_of_its_kernels() -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 1000),
        event("user_annotation", STEP, 100, 1100),
        event("kernel", "nvjet_tst_128x256", 0, 500),
        event("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 450, 550),
        event("kernel", "ncclDevKernel_AllGather", 400, 700),
        event("gpu_memcpy", "Memcpy HtoD", 700, 750),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 800, 900),
        event("kernel", "multi_tensor_apply", 800, 900),
        event("gpu_user_annotation", "FSDP::all_gather (blocks.3)", 900, 950),
        event("kernel", "elementwise_kernel", 900, 950),
        event("kernel", "after the step", 1100, 1200),
    ]
    expected = {
        "optimizer": 0.1,
        "attention": 0.1,
        "matrix products": 0.35,
        "FSDP": 0.2,
        "other": 0.05,
        "idle": 0.2,
    }
    assert compute_shares(events, 1.0) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("ours", "fsdp1"),
        ("load", "load-dcp"),
        ("save", "save-dcp"),
        ("generate", "generate-transformers"),
    ],
)
def test_work_is_measured_next_to_others(ours: str, theirs: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps({"hyperparameters": TINY | {"num_tokens": 3, "max_seq_len": 64}}))
    times = measure(Row("work", ours, theirs, file), n_rounds=2)
    assert len(times.ours) == len(times.theirs) == 2
    assert min(times.ours + times.theirs) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps({"hyperparameters": TINY}))
    with pytest.raises(EndedError, match="vocab_size"):
        measure(Row("work", "ours+vocab_size=0", "fsdp1", file), n_rounds=1)


STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
PARTS = ("parameters", "gradients", "moments")


@dataclass(frozen=True)
class Sharded:
    """A run of two ranks, and the bytes of its tensors."""

    hp: Hyperparameters
    found: TensorBytes


@pytest.fixture(scope="module")
def sharded(forked: None) -> list[Sharded]:  # noqa: ARG001
    """A run for each strategy, hybrid ones in groups of one rank.

    First in float32, as products in bfloat16 need scratch memory on CPUs without it, then in
    bfloat16.
    """
    points: list[dict[str, Any]] = []
    for name in STRATEGIES:
        point = TINY | {"max_seq_len": 64, "batch_size": 4, "amp_dtype": None, "sharding": name}
        if name.startswith("hybrid"):
            point["shard_group_size"] = 1
        points.append(point)
    points += [point | {"amp_dtype": "bfloat16"} for point in points]
    # Of several steps the least: gloo's thread can free a buffer later than the step needs it.
    found = run_ranks(2, points, 5)
    hps = [Hyperparameters.from_flat(point) for point in points]
    return [Sharded(hp, each) for hp, each in zip(hps, found, strict=True)]


def count_gathered_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of unsharded 16-bit parameters.

    One unit if it is resharded after forward, else all; and with several shards the all-gather
    buffer of a unit.
    """
    with torch.device("meta"):
        model = Transformer(hp.own_model)
    largest = 0
    for unit in (model.embedding, model.blocks[0], model.head):
        largest = max(largest, sum(parameter.numel() for parameter in unit.parameters()))
    n_unsharded = hp.model.n_parameters
    if hp.parallel.reshard_after_forward:
        n_unsharded = largest
    n_buffered = 0
    if shards > 1:
        n_buffered = largest
    return 2 * (n_unsharded + n_buffered)


@pytest.mark.slow
def test_sharding_memory_equals_the_formulas(sharded: list[Sharded]) -> None:
    for run in sharded[len(STRATEGIES) :]:
        hp, found = run.hp, run.found
        shards = mesh_shape(hp.parallel, 2, 2).shard
        assert [getattr(found, part) for part in PARTS] == [
            4 * hp.model.n_parameters // shards * times for times in (1, 1, 2)
        ]
        assert sum(getattr(found, part) for part in PARTS) == (
            count_state(hp, torch.bfloat16).total // shards
        )
        assert found.gathered == count_gathered_bytes(hp, shards), hp.parallel.sharding


@pytest.mark.slow
def test_sharding_peak_is_the_planned_one(sharded: list[Sharded]) -> None:
    for run in sharded[: len(STRATEGIES)]:
        peak = run.found.parameters + run.found.moments + min(run.found.transient)
        planned = fit.measure(run.hp, Ranks(None, "cpu", 2, 2, GIB)).peak
        assert peak == pytest.approx(planned, rel=0.01), run.hp.parallel.sharding


INSTALLED = """
torch torchgen functorch torchao triton numpy sympy mpmath networkx jinja2 markupsafe fsspec
setuptools pydantic pydantic_core annotated_types typing_extensions typing_inspection google_crc32c
determined ruamel appdirs safetensors requests urllib3 idna certifi charset_normalizer psutil pynvml
filelock pytest _pytest py pluggy iniconfig packaging pygments
"""
"""What is installed to measure a GPU: the packages of docs/performance.md and what they import."""

OURS = ["lm", "model", "fsdp", "benchmarks", "tests"]

OTHERS_ARE_MISSING = f"""
import sys
from importlib.machinery import PathFinder

ALLOWED = {{*sys.stdlib_module_names, *{INSTALLED.split()}, *{OURS}}}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        allowed = path is not None or name in ALLOWED or name.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if allowed else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


class GpuBenchmark:
    """`benchmarks.gpu` on a machine with little more than PyTorch, in the folder of its results."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(OTHERS_ARE_MISSING)
        self.out = folder / "gpu.jsonl"
        self.env = os.environ | {"PYTHONPATH": str(folder)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(self.out), *arguments]
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def rows(self) -> dict[str, dict[str, Any]]:
        """The results so far, by point."""
        if not self.out.exists():
            return {}
        rows = [json.loads(line) for line in self.out.read_text().splitlines()]
        return {row["point"]: row for row in rows}


@dataclass(frozen=True)
class Measured:
    """A complete benchmark, in which the process that measured "1B tensorwise" was killed."""

    benchmark: GpuBenchmark
    rows: dict[str, dict[str, Any]]
    printed: str


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    benchmark = GpuBenchmark(tmp_path_factory.mktemp("gpu"))
    process = benchmark.start("--tiny")
    while "1B tensorwise" not in benchmark.rows() and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is not None:
        pytest.fail(
            "\n".join([*process.communicate(), benchmark.out.with_suffix(".log").read_text()])
        )
    children = psutil.Process(process.pid).children()
    (worker,) = [child for child in children if "gpu_points" in " ".join(child.cmdline())]
    worker.kill()
    printed, errors = process.communicate(timeout=PATIENCE)
    log = benchmark.out.with_suffix(".log")
    assert process.returncode == 0, errors + log.read_text()
    return Measured(benchmark, benchmark.rows(), printed)


@pytest.mark.slow
def test_gpu_benchmark_survives_a_crash_of_one_point(measured: Measured) -> None:
    failed = [row["point"] for row in measured.rows.values() if "error" in row]
    assert failed == ["1B tensorwise"], measured.rows
    assert measured.rows["1B tensorwise"]["error"] == "crashed with exit code -9"
    assert "- 1B tensorwise: failed: crashed with exit code -9" in measured.printed


@pytest.mark.slow
def test_gpu_benchmark_runs_the_gpu_tests(measured: Measured) -> None:
    assert measured.rows["tests"]["exit_code"] == 0, measured.rows["tests"]


@pytest.mark.slow
def test_gpu_benchmark_times_steps_and_their_shares(measured: Measured) -> None:
    steps = [row for row in measured.rows.values() if "step_seconds" in row]
    assert len(steps) == 6
    for row in steps:
        assert len(row["step_seconds"]) == 3
        assert row["tokens"] > 0
        assert row["profiled_seconds"] > 0
        assert sum(row["shares"].values()) == pytest.approx(1)
    assert len(re.findall(r"^\| (1B|8B)", measured.printed, re.MULTILINE)) == 6


@pytest.mark.slow
def test_gpu_benchmark_times_saves(measured: Measured) -> None:
    saves = measured.rows["1B saves"]
    for key in ("stall_seconds", "steps_after", "write_seconds"):
        assert len(saves[key]) == 3
    assert saves["bytes"] > saves["copy_seconds"] > 0


@pytest.mark.slow
def test_gpu_benchmark_measures_the_loop_and_the_limits(measured: Measured) -> None:
    assert measured.rows["1B bare"]["loop_adds"] > -1
    for point in ("attention TFLOP/s", "matrix products TFLOP/s", "GB/s"):
        values = [value for key, value in measured.rows[point].items() if key != "point"]
        assert any(values), point


@pytest.mark.slow
def test_gpu_benchmark_pairs_are_compared_with_predictions(measured: Measured) -> None:
    pairs = list_pairs(ONE_B, EIGHT_B_SLICE)
    first = next(iter(pairs))
    process = measured.benchmark.start("--tiny", "--pairs", first, PRODUCTS)
    printed, errors = process.communicate(timeout=PATIENCE)
    rows = measured.benchmark.rows()
    assert rows.keys() == measured.rows.keys() | {first, PRODUCTS}
    for name in (first, PRODUCTS):
        row = rows[name]
        pair = pairs[name]
        assert row["found"]["B/A"] if "B/A" in pair.predicted else row["found"]["B step"], errors
        for arm in pair.arms:
            n_times = 2 if arm == "A" else 1  # first and last
            assert len(row["measured"][arm]["step_seconds"]) == 4 * n_times
        assert f"- {name}: {row['verdict']}" in printed
    of_slice = rows[first]
    assert of_slice["measured"]["B"]["shares"]["FSDP"] == of_slice["found"]["B FSDP"]
    assert rows[PRODUCTS]["verdict"] == "not measured: C/A"  # a CPU has no such product


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ({"step": 1.8, "retries": 0}, "held"),
        ({"step": 1.9, "retries": 0}, "refuted: B/A"),
        ({"step": 1.9, "retries": 2}, "refuted: B/A, B retries"),
        ({"step": None, "retries": 0}, "not measured: B/A"),
    ],
)
def test_prediction_is_refuted_above_its_limits(b: dict[str, Any], expected: str) -> None:
    pair = Pair({"A": {}, "B": {}}, {"B/A": 0.8}, {"B/A": 0.9, "B retries": 0})
    found = find_numbers(pair, {"A": {"step": 2.0}, "B": b})
    assert verdict(found, pair.refuted_above) == expected
