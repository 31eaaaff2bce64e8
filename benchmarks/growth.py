"""Step time and memory by model size, and memory per rank by sharding strategy, compared with formulas, on the CPU.

    python -m benchmarks.growth [--out FOLDER] [--steps 3] [--rounds 2]

Every point is a call of `fsdp.execute` in bfloat16 on ranks of one thread each, with config.yaml's model scaled down to
`BASE`. Growth changes one size at a time, on two ranks with full-shard; `VARIED` changes strategies, models and ranks.
Each of `rounds` measures all points with `steps` steps each. Times are elapsed and CPU seconds, which other processes
affect less. Memory is that of tensors (benchmarks/tensors.py), not of the process.

The formulas are the memory and the time of `lm.plan`, whose time is scaled by that of `BASE`: for `VARIED`, measured
before and after each point. Writes growth.png, planned.png, sharding.png and growth.json, and prints tables of what was
predicted and measured. Takes 7 minutes on two cores.
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

from benchmarks.common import environment, launched, spread
from lm import parallelize
from lm.config import Hyperparameters
from lm.plan import fit, speed
from lm.plan.__main__ import make_plan

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
VARIED: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"sharding": "grad-shard"}),
    (2, {"sharding": "no-shard"}),
    (2, {"activation_checkpointing": "selective"}),
    (2, {"activation_checkpointing": "full"}),
    (2, {"total_batch_size": 8}),
    (2, {"total_batch_size": 16}),
    (2, {"total_batch_size": 8, "sync_each_micro_step": True}),
    (2, {"amp_dtype": None}),
    (2, LLAMA),
    (2, {"tie_embeddings": True, "vocab_size": 8192}),
    (2, {"vocab_size": 8192}),
    (2, {"sharding": "grad-shard", "activation_checkpointing": "full", "total_batch_size": 8}),
    (1, {"d_model": 512}),
    (1, {"n_layers": 8}),
    (1, {"activation_checkpointing": "selective"}),
    (1, {"max_seq_len": 1024}),
    (1, {"batch_size": 8}),
    (1, {"activation_checkpointing": "full", "batch_size": 4}),
    (1, {"sharding": "grad-shard", "total_batch_size": 4}),
    (1, {"d_model": 512, "n_layers": 8, "n_heads": 16}),
)
"""Number of ranks, and what differs from `BASE`."""
STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
PARTS = ("parameters", "gradients", "moments")
MIB = 2**20

Sample = dict[str, Any]


def run_ranks(ranks: int, points: list[dict[str, Any]], steps: int) -> list[Sample]:
    """Return what `benchmarks.tensors.measure` finds for each of `points`, hyperparameters, on `ranks` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "points.json").write_text(json.dumps(points))
        command = launched(ranks, "benchmarks/tensors.py", str(steps), "points.json", "found.json")
        env = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        print(f"measuring {len(points)} runs of {ranks} ranks", file=sys.stderr)
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(Path(folder, "found.json").read_text())


def plan(point: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return `lm.plan`'s prediction for a rank of `ranks` CPU threads: "memory" by part, "step" in seconds."""
    return make_plan(Hyperparameters.model_validate(BASE | point), ranks, 1, 1.0, speed.CARDS["cpu"])


def state_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of parameters, gradients and moments."""
    return fit.state_bytes(hp, None, shards)


def gathered_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of unsharded 16-bit parameters.

    One unit if it is resharded after forward, else all; and with several shards the all-gather buffer of a unit.
    """
    counts = hp.parameter_counts()
    block = counts["blocks"] // hp.n_layers
    unit = max(counts["embedding"] + counts["positions"], block, counts["norm"] + counts["head"])
    unsharded = unit if hp.reshard_after_forward else hp.n_parameters
    return 2 * (unsharded + (unit if shards > 1 else 0))


def growth(steps: int, rounds: int) -> list[Sample]:
    points = [(size, value) for size, values in SIZES.items() for value in values]
    results = run_ranks(RANKS, [BASE | {size: value} for size, value in points] * rounds, steps)
    rows = [
        {"size": size, "value": value} | summarize({size: value}, RANKS, results[number :: len(points)])
        for number, (size, value) in enumerate(points)
    ]
    at_base = [s for row in rows if row["value"] == BASE[row["size"]] for s in row["cpu_seconds"]]
    scale = statistics.median(at_base) / plan({}, RANKS)["step"]
    return [row | {"expected_seconds": scale * plan({row["size"]: row["value"]}, RANKS)["step"]} for row in rows]


def varied(steps: int, rounds: int) -> list[Sample]:
    rows = []
    for ranks in (1, RANKS):
        points = [point for n, point in VARIED if n == ranks]
        mixed = [BASE | changes for point in points for changes in ({}, point)] * rounds
        samples = run_ranks(ranks, [*mixed, BASE], steps)
        for number, point in enumerate(points):
            places = range(2 * number + 1, len(samples), 2 * len(points))
            row = {"ranks": ranks, "changes": point} | summarize(point, ranks, [samples[i] for i in places])
            around = [s for i in places for sample in (samples[i - 1], samples[i + 1]) for s in sample["cpu_seconds"]]
            scale = statistics.median(around) / plan({}, ranks)["step"]
            rows.append(row | {"expected_seconds": scale * plan(point, ranks)["step"]})
    return rows


def summarize(point: dict[str, Any], ranks: int, samples: list[Sample]) -> Sample:
    times = {key: sorted(s for sample in samples for s in sample[key]) for key in ("seconds", "cpu_seconds")}
    peak = min(sample["parameters"] + sample["moments"] + min(sample["transient"]) for sample in samples)
    return {"expected": plan(point, ranks)["memory"], "peak": peak} | times


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


def print_tables(grown: list[Sample], changed: list[Sample], sharded: list[Sample]) -> None:
    print("| sharding | ranks | shards | parameters | gradients | moments | all | 16 P / S | gathered | formula |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in sharded:
        parts = [row[part] for part in PARTS]
        columns = (*parts, sum(parts), row["expected"]["state"], row["gathered"], row["expected"]["gathered"])
        cells = " | ".join(f"{column / MIB:.2f}" for column in columns)
        print(f"| {row['sharding']} | {row['ranks']} | {row['shards']} | {cells} |")
    print("\n| ranks | changes | CPU seconds per step | planned | ratio | MiB per rank | planned | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = {"growth": [], "varied": []}
    for row in grown + changed:
        expected, planned = row["expected_seconds"], sum(row["expected"].values())
        changes = row.get("changes") or {row["size"]: row["value"]}
        shown = " ".join(f"{key}={value}" for key, value in changes.items())
        ratios = expected / statistics.median(row["cpu_seconds"]), planned / row["peak"]
        errors["varied" if "changes" in row else "growth"].append((abs(ratios[0] - 1), abs(ratios[1] - 1)))
        memory = f"{row['peak'] / MIB:.1f} | {planned / MIB:.1f} | {ratios[1]:.2f}"
        time = f"{spread(row['cpu_seconds'], 3)} | {expected:.3f} | {ratios[0]:.2f}"
        print(f"| {row.get('ranks', RANKS)} | {shown} | {time} | {memory} |")
    print("\n| points | time within 15 % | median error | worst | worst of memory |\n|---|---|---|---|---|")
    for points, pairs in errors.items():
        time, memory = zip(*pairs, strict=True)
        within = f"{sum(error <= 0.15 for error in time)} of {len(time)}"
        print(f"| {points} | {within} | {statistics.median(time):.0%} | {max(time):.0%} | {max(memory):.1%} |")


def plot(grown: list[Sample], changed: list[Sample], sharded: list[Sample], out: Path) -> None:
    import matplotlib as mpl  # a dependency of determined

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SIZES), figsize=(14, 6), sharex="col", sharey="row", layout="constrained")
    for column, (size, values) in enumerate(SIZES.items()):
        rows = [row for row in grown if row["size"] == size]
        time, memory = axes[:, column]
        for key, label, style in (("seconds", "elapsed", "C1s"), ("cpu_seconds", "CPU", "C0o")):
            medians = [statistics.median(row[key]) for row in rows]
            below = [median - row[key][0] for median, row in zip(medians, rows, strict=True)]
            above = [row[key][-1] - median for median, row in zip(medians, rows, strict=True)]
            time.errorbar(values, medians, [below, above], fmt=style, markersize=4, capsize=3, label=label)
        time.plot(values, [row["expected_seconds"] for row in rows], "k--", label="lm.plan")
        memory.plot(values, [row["peak"] / MIB for row in rows], "o", label="peak")
        total = [sum(row["expected"].values()) / MIB for row in rows]
        memory.plot(values, total, "k--", label="lm.plan")
        between = [row["expected"]["parameters"] + row["expected"]["moments"] for row in rows]
        memory.plot(values, [n_bytes / MIB for n_bytes in between], "k:", label="parameters and moments")
        for axis in (time, memory):
            axis.set(xscale="log", yscale="log")
            axis.minorticks_off()
            axis.set_xticks(values, map(str, values))
            axis.grid(alpha=0.3)
        memory.set_xlabel(size)
    for row, label in zip(axes, ("seconds per step: median, minimum, maximum", "MiB per rank"), strict=True):
        row[0].set_ylabel(label)
        row[-1].legend(loc="lower right")
    figure.savefig(out / "growth.png", dpi=80)

    figure, (time, memory) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for rows, label in ((grown, "growth"), (changed, "varied")):
        measured = [statistics.median(row["cpu_seconds"]) for row in rows]
        time.plot([row["expected_seconds"] for row in rows], measured, "o", label=label)
        planned = [sum(row["expected"].values()) / MIB for row in rows]
        memory.plot(planned, [row["peak"] / MIB for row in rows], "o", label=label)
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
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    grown, changed, sharded = growth(args.steps, args.rounds), varied(args.steps, args.rounds), sharding()
    machine = {"torch": torch.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    record = machine | {"base": BASE, "growth": grown, "varied": changed}
    record |= {"sharded": SHARDED, "sharding": sharded}
    (args.out / "growth.json").write_text(json.dumps(record))
    print_tables(grown, changed, sharded)
    plot(grown, changed, sharded, args.out)


if __name__ == "__main__":
    main()
