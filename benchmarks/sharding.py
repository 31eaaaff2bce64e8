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

from benchmarks.common import environment, launched
from lm.config import Hyperparameters
from lm.plan.fit import count_state_bytes
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
    measured: dict[str, Any]
    """see `benchmarks.tensors.measure`"""
    expected_state: int
    """of parameters, gradients and moments"""
    expected_gathered: int


def run_ranks(ranks: int, points: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return what `benchmarks.tensors.measure` finds for each of `points`, hyperparameters."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "points.json").write_text(json.dumps(points))
        command = launched(ranks, "benchmarks/tensors.py", str(steps), "points.json", "found.json")
        env = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        print(f"measuring {len(points)} runs of {ranks} ranks", file=sys.stderr)
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(Path(directory, "found.json").read_text())


def gathered_bytes(hp: Hyperparameters, shards: int) -> int:
    """Return the bytes of unsharded 16-bit parameters.

    One unit if it is resharded after forward, else all; and with several shards the all-gather
    buffer of a unit.
    """
    with torch.device("meta"):
        model = Transformer(hp)
    units = (model.embedding, model.blocks[0], model.head)
    largest = max(sum(p.numel() for p in unit.parameters()) for unit in units)
    n = largest if hp.reshard_after_forward else hp.n_parameters
    if shards > 1:
        n += largest
    return 2 * n


def measure() -> list[Point]:
    """Return a point for each strategy and number of ranks, hybrid ones in groups of 2."""
    found = []
    for ranks in RANKS:
        common = SHAPE | {
            "batch_size": 1,
            "amp_dtype": "bfloat16",
            "shard_group_size": min(2, ranks),
        }
        settings = [common | {"sharding": sharding} for sharding in STRATEGIES]
        for setting, measured in zip(settings, run_ranks(ranks, settings, 0), strict=True):
            hp = Hyperparameters.model_validate(setting)
            shards = parallelize.mesh_shape(hp, ranks, ranks).shard
            state = count_state_bytes(hp, None, shards)
            gathered = gathered_bytes(hp, shards)
            found.append(Point(hp.sharding, ranks, shards, measured, state, gathered))
    return found


def print_table(points: list[Point]) -> None:
    """Print MiB per rank."""
    print(
        "| sharding | ranks | shards | parameters | gradients | moments | 16 P / S | gathered | formula |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for point in points:
        columns = [point.measured[part] for part in PARTS]
        columns += [point.expected_state, point.measured["gathered"], point.expected_gathered]
        cells = " | ".join(f"{column / MIB:.2f}" for column in columns)
        print(f"| {point.sharding} | {point.ranks} | {point.shards} | {cells} |")


def plot(points: list[Point], path: Path) -> None:
    """Draw bars of what was measured, and the formulas as markers."""
    from matplotlib.figure import Figure  # a dependency of determined

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    state, gathered = figure.subplots(1, 2)
    # A group of bars for each strategy, in it one for each number of ranks.
    bars = [STRATEGIES.index(p.sharding) + (RANKS.index(p.ranks) - 1) * 0.28 for p in points]
    bottom = [0.0] * len(points)
    for part in PARTS:
        heights = [point.measured[part] / MIB for point in points]
        state.bar(bars, heights, 0.24, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    heights = [point.measured["gathered"] / MIB for point in points]
    gathered.bar(bars, heights, 0.24, label="unsharded parameters, peak")
    expected_state = [point.expected_state / MIB for point in points]
    expected_gathered = [point.expected_gathered / MIB for point in points]
    state.plot(bars, expected_state, "kD", markersize=4, label="16 P / S")
    gathered.plot(bars, expected_gathered, "kD", markersize=4, label="formula")
    for axis in (state, gathered):
        axis.set_xticks(
            range(len(STRATEGIES)), [name.replace("hybrid-", "hybrid-\n") for name in STRATEGIES]
        )
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])
        axis.set_ylabel("MiB per rank; bars: 1, 2 and 4 ranks")
        axis.legend(loc="upper left")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sharding"), help="output directory (%(default)s)"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    points = measure()
    print_table(points)
    plot(points, args.out / "sharding.png")


if __name__ == "__main__":
    main()
