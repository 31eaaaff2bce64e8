"""Step time and memory by model size, and memory per rank by sharding strategy, compared with formulas, on the CPU.

    python -m benchmarks.growth [--out DIRECTORY] [--steps 3] [--rounds 3]

Every point is a call of `fsdp.execute` in bfloat16 on ranks of one thread each, with config.yaml's model scaled down to
`BASE`. Growth changes one size at a time, on two ranks with full-shard; `VARIED` changes strategies, models and ranks.
Each of `rounds` measures all points with `steps` steps each. A time is the CPU seconds of the fastest step, as other
processes only make steps slower. Memory is that of tensors (benchmarks/tensors.py), not of the process.

The formulas are the memory and the time of `lm.plan`, whose time is scaled by that of `BASE` on as many ranks. Writes
growth.png, planned.png, sharding.png and growth.json, and prints tables of what was predicted and measured. Takes
12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, launched
from lm import parallelize
from lm.config import Hyperparameters
from lm.metrics.device import GIB
from lm.plan import fit, speed, timing
from lm.plan.__main__ import DTYPES, make_plan
from model import Transformer

SHAPE = {"d_model": 256, "n_heads": 8, "n_layers": 4, "vocab_size": 2048, "max_seq_len": 256}
BASE: dict[str, Any] = SHAPE | {"batch_size": 2, "amp_dtype": "bfloat16"}
RANKS = 2
SIZES = {
    "n_layers": (1, 2, 4, 8, 16),
    "d_model": (128, 192, 256, 384, 512),
    "max_seq_len": (64, 128, 256, 512, 1024),
    "batch_size": (1, 2, 4, 8, 16),
}
SHARDED = BASE | {"n_layers": 8, "max_seq_len": 64, "batch_size": 1}
LLAMA = {"ffn": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none", "n_kv_heads": 2}
GROWN = [{size: value} for size, values in SIZES.items() for value in values if value != BASE[size]]
VARIED: dict[int, list[dict[str, Any]]] = {
    1: [
        {"d_model": 512},
        {"n_layers": 8},
        {"activation_checkpointing": "selective"},
        {"max_seq_len": 1024},
        {"batch_size": 8},
        {"activation_checkpointing": "full", "batch_size": 4},
        {"sharding": "grad-shard", "total_batch_size": 4},
        {"d_model": 512, "n_layers": 8, "n_heads": 16},
    ],
    RANKS: [
        {"sharding": "grad-shard"},
        {"sharding": "no-shard"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"total_batch_size": 8},
        {"total_batch_size": 16},
        {"total_batch_size": 8, "sync_each_micro_step": True},
        {"amp_dtype": None},
        LLAMA,
        {"tie_embeddings": True, "vocab_size": 8192},
        {"vocab_size": 8192},
        {"sharding": "grad-shard", "activation_checkpointing": "full", "total_batch_size": 8},
    ],
}
"""What differs from `BASE`, by number of ranks."""
STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
PARTS = ("parameters", "gradients", "moments")
MIB = 2**20

Sample = dict[str, Any]


def run_ranks(ranks: int, points: list[dict[str, Any]], steps: int) -> list[Sample]:
    """Return what `benchmarks.tensors.measure` finds for each of `points`, hyperparameters, on `ranks` ranks."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "points.json").write_text(json.dumps(points))
        command = launched(ranks, "benchmarks/tensors.py", str(steps), "points.json", "found.json")
        env = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        print(f"measuring {len(points)} runs of {ranks} ranks", file=sys.stderr)
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(Path(directory, "found.json").read_text())


def plan(point: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return `lm.plan`'s prediction for a rank of `ranks` CPU threads: "memory" by part, "step" in seconds."""
    hp = Hyperparameters.model_validate(BASE | point)
    return make_plan(hp, fit.Ranks(DTYPES[hp.amp_dtype], "cpu", ranks, ranks, GIB), speed.CARDS["cpu"])


def state_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of parameters, gradients and moments."""
    return fit.state_bytes(hp, None, shards)


def gathered_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of unsharded 16-bit parameters.

    One unit if it is resharded after forward, else all; and with several shards the all-gather buffer of a unit.
    """
    with torch.device("meta"):
        model = Transformer(hp)
    parts = (model.embedding, model.blocks[0], model.head)
    unit = max(sum(p.numel() for p in part.parameters()) for part in parts)
    unsharded = unit if hp.reshard_after_forward else hp.n_parameters
    return 2 * (unsharded + (unit if shards > 1 else 0))


def compare(ranks: int, points: list[dict[str, Any]], steps: int, rounds: int) -> list[Sample]:
    """Measure and plan runs on `ranks` ranks: that of `BASE`, which scales planned times, then those of `points`."""
    points, samples, plans = [{}, *points], [], []
    for _ in range(rounds):
        samples += run_ranks(ranks, [BASE | point for point in points], steps)
        timing.time_pass.cache_clear()
        plans += [plan(point, ranks) for point in points]
    rows, scale = [], 1.0
    for number, point in enumerate(points):
        measured, planned = samples[number :: len(points)], plans[number :: len(points)]
        times = {key: sorted(s for sample in measured for s in sample[key]) for key in ("seconds", "cpu_seconds")}
        peak = min(sample["parameters"] + sample["moments"] + min(sample["transient"]) for sample in measured)
        seconds = min(each["step"] for each in planned)
        scale = scale if number else times["cpu_seconds"][0] / seconds
        row = {"ranks": ranks, "changes": point, "expected": planned[0]["memory"], "peak": peak}
        rows.append(row | {"expected_seconds": scale * seconds} | times)
    return rows


def sharding() -> list[Sample]:
    rows = []
    for ranks in (1, 2, 4):
        points = [SHARDED | {"sharding": name, "shard_group_size": min(2, ranks)} for name in STRATEGIES]
        for point, found in zip(points, run_ranks(ranks, points, 0), strict=True):
            hp = Hyperparameters.model_validate(point)
            shards = parallelize.mesh_dims(hp, ranks, ranks)["shard"]
            expected = {"state": state_bytes(hp, shards), "gathered": gathered_bytes(hp, shards)}
            rows.append({"sharding": hp.sharding, "ranks": ranks, "shards": shards, "expected": expected} | found)
    return rows


def print_tables(rows: list[Sample], sharded: list[Sample]) -> None:
    print("| sharding | ranks | shards | parameters | gradients | moments | all | 16 P / S | gathered | formula |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in sharded:
        parts = [row[part] for part in PARTS]
        columns = (*parts, sum(parts), row["expected"]["state"], row["gathered"], row["expected"]["gathered"])
        cells = " | ".join(f"{column / MIB:.2f}" for column in columns)
        print(f"| {row['sharding']} | {row['ranks']} | {row['shards']} | {cells} |")
    print("\n| ranks | changes | CPU seconds per step (median) | planned | ratio | MiB per rank | planned | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = {"growth": [], "varied": []}
    for row in rows:
        measured, expected, planned = row["cpu_seconds"], row["expected_seconds"], sum(row["expected"].values())
        ratios = expected / measured[0], planned / row["peak"]
        if row["changes"]:
            kind = "growth" if row["ranks"] == RANKS and row["changes"] in GROWN else "varied"
            errors[kind].append((abs(ratios[0] - 1), abs(ratios[1] - 1)))
        shown = " ".join(f"{key}={value}" for key, value in row["changes"].items())
        time = f"{measured[0]:.3f} ({statistics.median(measured):.3f}) | {expected:.3f} | {ratios[0]:.2f}"
        print(
            f"| {row['ranks']} | {shown} | {time} | {row['peak'] / MIB:.1f} | {planned / MIB:.1f} | {ratios[1]:.2f} |"
        )
    print("\n| points | time within 15 % | median error | worst | worst of memory |\n|---|---|---|---|---|")
    for points, pairs in errors.items():
        time, memory = zip(*pairs, strict=True)
        within = f"{sum(error <= 0.15 for error in time)} of {len(time)}"
        print(f"| {points} | {within} | {statistics.median(time):.0%} | {max(time):.0%} | {max(memory):.1%} |")


def plot(rows: list[Sample], sharded: list[Sample], out: Path) -> None:
    import matplotlib as mpl  # a dependency of determined

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SIZES), figsize=(14, 6), sharex="col", sharey="row", layout="constrained")
    grown = {tuple(row["changes"].items()): row for row in rows if row["ranks"] == RANKS}
    for column, (size, values) in enumerate(SIZES.items()):
        curve = [grown[((size, value),) if value != BASE[size] else ()] for value in values]
        time, memory = axes[:, column]
        for key, label, style in (("seconds", "elapsed", "C1s"), ("cpu_seconds", "CPU", "C0o")):
            time.plot(values, [row[key][0] for row in curve], style, markersize=4, label=label)
        time.plot(values, [row["expected_seconds"] for row in curve], "k--", label="lm.plan")
        memory.plot(values, [row["peak"] / MIB for row in curve], "o", label="peak")
        total = [sum(row["expected"].values()) / MIB for row in curve]
        memory.plot(values, total, "k--", label="lm.plan")
        between = [row["expected"]["parameters"] + row["expected"]["moments"] for row in curve]
        memory.plot(values, [n_bytes / MIB for n_bytes in between], "k:", label="parameters and moments")
        for axis in (time, memory):
            axis.set(xscale="log", yscale="log")
            axis.minorticks_off()
            axis.set_xticks(values, map(str, values))
            axis.grid(alpha=0.3)
        memory.set_xlabel(size)
    for axis, label in zip(axes[:, 0], ("seconds of the fastest step", "MiB per rank"), strict=True):
        axis.set_ylabel(label)
    for axis in axes[:, -1]:
        axis.legend(loc="lower right")
    figure.savefig(out / "growth.png", dpi=80)

    figure, (time, memory) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for ranks in VARIED:
        points = [row for row in rows if row["ranks"] == ranks]
        time.plot([row["expected_seconds"] for row in points], [row["cpu_seconds"][0] for row in points], "o")
        planned = [sum(row["expected"].values()) / MIB for row in points]
        memory.plot(planned, [row["peak"] / MIB for row in points], "o", label=f"{ranks} ranks")
    for axis, name, margin in ((time, "CPU seconds per step", 0.15), (memory, "MiB per rank", 0.05)):
        ends = np.array(axis.get_xlim()).clip(min=axis.dataLim.x0 * 0.8)
        axis.plot(ends, ends, "k-", linewidth=0.8)
        axis.fill_between(ends, ends * (1 - margin), ends * (1 + margin), color="k", alpha=0.1, label=f"{margin:.0%}")
        axis.set(xlabel=f"{name}, planned", ylabel=f"{name}, measured")
        axis.loglog(base=2)
        axis.legend(loc="upper left")
    figure.savefig(out / "planned.png", dpi=80)

    figure, (state, gathered) = plt.subplots(1, 2, figsize=(14, 4.5), layout="constrained")
    bars = [STRATEGIES.index(row["sharding"]) + (row["ranks"].bit_length() - 2) * 0.28 for row in sharded]
    bottom = [0.0] * len(sharded)
    for part in PARTS:
        heights = [row[part] / MIB for row in sharded]
        state.bar(bars, heights, 0.24, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    gathered.bar(bars, [row["gathered"] / MIB for row in sharded], 0.24, label="unsharded parameters, peak")
    for axis, key, label in ((state, "state", "16 P / S"), (gathered, "gathered", "formula")):
        axis.plot(bars, [row["expected"][key] / MIB for row in sharded], "kD", markersize=4, label=label)
        axis.set_xticks(range(len(STRATEGIES)), [name.replace("hybrid-", "hybrid-\n") for name in STRATEGIES])
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])
        axis.set_ylabel("MiB per rank; bars: 1, 2 and 4 ranks")
        axis.legend(loc="upper left")
    figure.savefig(out / "sharding.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/growth"), help="output directory (%(default)s)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    points = {ranks: changes + (GROWN if ranks == RANKS else []) for ranks, changes in VARIED.items()}
    rows = [row for ranks, changes in points.items() for row in compare(ranks, changes, args.steps, args.rounds)]
    sharded = sharding()
    machine = {"torch": torch.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    record = machine | {"base": BASE, "points": rows, "sharded": SHARDED, "sharding": sharded}
    (args.out / "growth.json").write_text(json.dumps(record))
    print_tables(rows, sharded)
    plot(rows, sharded, args.out)


if __name__ == "__main__":
    main()
