"""The benchmarks compute shares and deviations correctly, and measure what their formulas predict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.curves import deviations
from benchmarks.growth import PARTS, STRATEGIES, gathered_bytes, memory_bytes, run_ranks
from benchmarks.throughput import shares
from lm.config import Hyperparameters
from lm.parallelize import mesh_dims
from tests.support import ROOT, TINY


def event(cat: str, name: str, start: float, end: float) -> dict[str, Any]:  # milliseconds
    return {"ph": "X", "cat": cat, "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3}


def test_the_shares_of_a_cpu_step_do_not_overlap() -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 400),
        event("cpu_op", "aten::copy_", 100, 200),  # nested
        event("user_annotation", "gloo:all_reduce", 300, 600),  # overlapped for 100
        event("cpu_op", "c10d::allreduce_", 600, 650),  # waits, computes nothing
        event("user_annotation", "Optimizer.step#AdamW.step", 700, 800),
        event("cpu_op", "aten::_fused_adamw_", 700, 800),
        {"ph": "M", "name": "process_name"},
    ]
    found = shares(events, 1.0)
    assert found == pytest.approx({"operators": 0.4, "communication": 0.2, "optimizer": 0.1, "host": 0.3})


def test_the_shares_of_a_gpu_step_are_those_of_its_kernels() -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 1000),
        event("kernel", "gemm", 0, 500),
        event("kernel", "ncclDevKernel_AllGather", 400, 700),
        event("gpu_memcpy", "Memcpy HtoD", 700, 750),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 800, 900),
        event("kernel", "multi_tensor_apply", 800, 900),
    ]
    found = shares(events, 1.0)
    assert found == pytest.approx({"operators": 0.55, "communication": 0.2, "optimizer": 0.1, "host": 0.15})


def test_the_deviation_is_that_of_the_mean_of_each_tenth() -> None:
    assert deviations([2.0] * 10 + [1.1] * 10, [2.0] * 10 + [1.0] * 10) == pytest.approx([0.0] * 5 + [0.1] * 5)


@pytest.mark.slow
def test_ours_and_fsdp1_are_measured(tmp_path: Path) -> None:
    settings = [f"{key}={value}" for key, value in TINY.items()]
    short = ["--nproc", "1", "--rounds", "2", "--steps", "1", "--json", str(tmp_path / "found.json")]
    names = ["ours", "fsdp1-float32", "ours+vocab_size=0"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", *settings, *short, "--contenders", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "ours+vocab_size=0" in done.stderr  # reported, and left out
    (point,) = json.loads((tmp_path / "found.json").read_text())
    assert [result["name"] for result in point["results"]] == names[:2]
    for result in point["results"]:
        assert len(result["steps"]) == 2
        assert result["tokens_per_second"] > 0
        assert sum(result["shares"][part] for part in ("operators", "communication", "optimizer", "host")) > 0.5


@pytest.mark.slow
def test_the_memory_of_a_rank_equals_the_formulas() -> None:
    shape = TINY | {"max_seq_len": 64, "batch_size": 4, "amp_dtype": "bfloat16", "shard_group_size": 1}
    points = [shape | {"sharding": name} for name in STRATEGIES]
    for point, found in zip(points, run_ranks(2, points, 1), strict=True):
        hp = Hyperparameters.model_validate(point)
        shards = mesh_dims(hp, 2, 2)["shard"]
        expected = memory_bytes(hp, shards)
        assert [found[part] for part in PARTS] == [4 * hp.n_parameters // shards * times for times in (1, 1, 2)]
        assert sum(found[part] for part in PARTS) == expected["state"]
        assert found["gathered"] == gathered_bytes(hp, shards), hp.sharding
        peak = found["parameters"] + found["moments"] + min(found["transient"])
        assert 0.75 < peak / sum(expected.values()) < 1.05, hp.sharding
        assert len(found["seconds"]) == 1
