"""Memory of a rank by sharding strategy on 1, 2 and 4 CPU ranks, compared with formulas.

    python -m benchmarks.sharding [--out DIRECTORY]

Every point is a call of `fsdp.execute` in bfloat16. Memory is that of tensors
(benchmarks/tensors.py), not of the process. Prints a table and writes sharding.png. Takes one
minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import TensorBytes, launch_command, make_environment
from lm.config.hyperparameters import Hyperparameters
from lm.memory import count_state
from lm.training import parallelize
from model import Transformer

SHAPE = {"d_model": 256, "n_heads": 8, "n_layers": 8, "vocab_size": 2048, "max_seq_len": 64}
STRATEGIES = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
RANKS = (1, 2, 4)
PARTS = ("parameters", "gradients", "moments")
MIB = 2**20


@dataclass(frozen=True)
class Point:
    """Bytes of a rank in a run, and what formulas say."""

    sharding: str
    ranks: int
    shards: int
    measured: TensorBytes
    expected_state: int
    """of parameters, gradients and moments"""
    expected_gathered: int


def run_ranks(ranks: int, points: list[dict[str, Any]], steps: int) -> list[TensorBytes]:
    """Return what `benchmarks/tensors.py` measures for each of `points`, hyperparameters."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "points.json").write_text(json.dumps(points))
        arguments = (str(steps), "points.json", "found.json")
        command = launch_command(ranks, "benchmarks/tensors.py", *arguments)
        env = make_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        print(f"measuring {len(points)} runs of {ranks} ranks", file=sys.stderr)
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = json.loads(Path(directory, "found.json").read_text())
        return [TensorBytes(**each) for each in found]


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


def measure_strategies() -> list[Point]:
    """Return a point for each strategy and number of ranks, hybrid ones in groups of 2."""
    points: list[Point] = []
    for ranks in RANKS:
        settings: list[dict[str, Any]] = []
        for sharding in STRATEGIES:
            setting = SHAPE | {"batch_size": 1, "amp_dtype": "bfloat16", "sharding": sharding}
            if sharding.startswith("hybrid"):
                setting["shard_group_size"] = min(2, ranks)
            settings.append(setting)
        for setting, measured in zip(settings, run_ranks(ranks, settings, 0), strict=True):
            hp = Hyperparameters.from_flat(setting)
            shards = parallelize.mesh_shape(hp.parallel, ranks, ranks).shard
            state = count_state(hp, None).total // shards
            gathered = count_gathered_bytes(hp, shards)
            points.append(Point(hp.parallel.sharding, ranks, shards, measured, state, gathered))
    return points


def print_table(points: list[Point]) -> None:
    """Print MiB per rank."""
    state_columns = "parameters | gradients | moments | 16 P / S"
    print(f"| sharding | ranks | shards | {state_columns} | gathered | formula |")
    print("|---|---|---|---|---|---|---|---|---|")
    for point in points:
        columns = [getattr(point.measured, part) for part in PARTS]
        columns += [point.expected_state, point.measured.gathered, point.expected_gathered]
        cells = " | ".join(f"{column / MIB:.2f}" for column in columns)
        print(f"| {point.sharding} | {point.ranks} | {point.shards} | {cells} |")


def plot_points(points: list[Point], path: Path) -> None:
    """Draw bars of what was measured, and the formulas as markers."""
    from matplotlib.figure import Figure  # a dependency of determined

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    state, gathered = figure.subplots(1, 2)
    # A group of bars for each strategy, in it one for each number of ranks.
    bars: list[float] = []
    for point in points:
        position_in_group = RANKS.index(point.ranks) - 1
        bars.append(STRATEGIES.index(point.sharding) + 0.28 * position_in_group)
    bottom = [0.0] * len(points)
    for part in PARTS:
        heights = [getattr(point.measured, part) / MIB for point in points]
        state.bar(bars, heights, 0.24, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    heights = [point.measured.gathered / MIB for point in points]
    gathered.bar(bars, heights, 0.24, label="unsharded parameters, peak")
    expected_state = [point.expected_state / MIB for point in points]
    expected_gathered = [point.expected_gathered / MIB for point in points]
    state.plot(bars, expected_state, "kD", markersize=4, label="16 P / S")
    gathered.plot(bars, expected_gathered, "kD", markersize=4, label="formula")
    names = [name.replace("hybrid-", "hybrid-\n") for name in STRATEGIES]
    for axis in (state, gathered):
        axis.set_xticks(range(len(STRATEGIES)), names)
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])
        axis.set_ylabel("MiB per rank; bars: 1, 2 and 4 ranks")
        axis.legend(loc="upper left")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    out_help = "output directory (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/sharding"), help=out_help)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    points = measure_strategies()
    print_table(points)
    plot_points(points, args.out / "sharding.png")


if __name__ == "__main__":
    main()
