"""Do learning rates carry over to other widths and depths with `base_width` and `base_depth`?

    python -m benchmarks.transfer RESULTS [--sweeps NAME ...] [--draw DIRECTORY]

Trains small models on the source of the Python standard library, on one thread, with and without
the two keys. Appends a line per run to RESULTS, and skips runs that have one. The sweeps:

    activations    the mean absolute output of each block after ten steps, by width
    width          the validation loss by learning rate and width, scaled from width 256
    width-from-64  the same, scaled from width 64
    depth          the validation loss by learning rate and depth, scaled from 2 layers
    muon-depth     the same with Muon

`--draw` draws transfer-activations.png and transfer-rates.png. All tables are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.data.loader import Loader
from lm.data.run_data import open_data
from lm.training import optim, parallelize
from lm.training.transfer import Transfer
from model import Transformer

HEAD_DIM = 16
SEED = 7
N_STEPS = 200
ACTIVATION_WIDTHS = (64, 128, 256, 512, 1024)
ACTIVATION_RUN = {
    "lr": 2.0**-8,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "batch_size": 1,
}
ACTIVATION_SEEDS = (1, 2)
ACTIVATION_BASE = {"base_width": 256, "base_depth": 2}

SETTINGS: dict[str, Any] = {
    "dataset": "text",
    "tokenizer": "bytes",
    "vocab_size": 264,
    "max_seq_len": 64,
    "batch_size": 8,
    "norm": "rmsnorm",
    "positions": "rope",
    "ffn": "swiglu",
    "bias": "none",
    "lr_schedule": "linear",
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "validation_batches": 16,
    "amp_dtype": None,
}

Row = dict[str, Any]
"""a run: its `settings`, and what was found"""
TITLES = {False: "not scaled", True: "scaled from the base"}


class Size(NamedTuple):
    """Of a model."""

    width: int
    depth: int

    def __str__(self) -> str:
        return f"{self.width} x {self.depth}"


class Point(NamedTuple):
    """Of a curve."""

    lr: float
    loss: float


@dataclass(frozen=True)
class Sweep:
    """Models of several sizes, each trained with several learning rates, scaled and not."""

    sizes: Sequence[Size]
    key: str
    """base_width or base_depth"""
    base: int
    """its value, where scaled"""
    optimizer: str = "adamw"
    rates: Sequence[float] = tuple(2.0**exponent for exponent in range(-11, -4))

    def settings(self, size: Size, lr: float, scaled: bool) -> Row:
        """Return the hyperparameters of a run."""
        settings = shape(size) | {"seed": SEED, "lr": lr}
        if self.optimizer != "adamw":
            settings["optimizer"] = self.optimizer
        if scaled and not self.is_base(size):
            settings[self.key] = self.base
        return settings

    def is_base(self, size: Size) -> bool:
        """Return whether `key` changes nothing at `size`."""
        if self.key == "base_width":
            return size.width == self.base
        return size.depth == self.base


WIDTHS = [Size(64, 2), Size(128, 2), Size(256, 2), Size(512, 2)]
DEPTHS = [Size(64, 2), Size(64, 4), Size(64, 8)]
SWEEPS = {
    "width": Sweep(WIDTHS, "base_width", 256),
    "width-from-64": Sweep(WIDTHS, "base_width", 64),
    "depth": Sweep(DEPTHS, "base_depth", 2),
    "muon-depth": Sweep(
        DEPTHS, "base_depth", 2, "muon", tuple(2.0**exponent for exponent in range(-9, -2))
    ),
}
"""of learning rates, by name"""
DRAWN = [
    [("width", False), ("width", True), ("width-from-64", True)],
    [("depth", False), ("depth", True)],
]
"""sweeps in each row of the picture, scaled or not"""


class Run:
    """A model that trains on one thread, with the parts of the trainer."""

    def __init__(self, settings: Row) -> None:
        hp = read_hyperparameters({"hyperparameters": SETTINGS | settings}, [], "benchmark")
        self.hp: Hyperparameters = hp
        seed = hp.run.seed
        assert seed is not None
        transfer = Transfer.of(hp.transfer, hp.model, hp.optim.optimizer)
        self.model = Transformer(hp.own_model)
        parallelize.initialize_parameters(self.model, seed, transfer)
        self.optimizer = optim.Optimizer(hp.optim, self.model, transfer)
        data = open_data(
            hp.data, hp.model.vocab_size, hp.model.max_seq_len, hp.data.batch_size, SEED
        )
        self.loader = Loader(hp.data, data, hp.data.batch_size, 0, 1, torch.device("cpu"))

    def train(self, n_steps: int) -> None:
        """Train `n_steps` of the run."""
        batches = self.loader.training(0)
        for step in range(n_steps):
            batch = next(batches)
            (micro_batch,) = batch.micro_batches
            loss = self.model(*micro_batch) / batch.n_terms
            loss.backward()
            _, skipped, divisor = self.optimizer.measure_gradients(1.0)
            lr = optim.learning_rate(self.hp.optim, step, N_STEPS)
            self.optimizer.step(lr, divisor, skipped)
            self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean validation loss."""
        batches = [batch for _, batch in self.loader.validation()]
        n_targets = sum(batch.targets.numel() for batch in batches)
        loss_sum = sum(self.model(*batch).item() for batch in batches)
        return loss_sum / n_targets

    @torch.no_grad()
    def activations(self) -> list[float]:
        """Return the mean absolute output of each block, then of the head, in validation."""
        found: list[float] = []

        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            activations = tree_leaves(output)[0]  # of a block the first one of several
            found.append(activations.abs().mean().item())

        hooks = [block.register_forward_hook(record) for block in self.model.blocks]
        hooks.append(self.model.head.register_forward_hook(record))
        _, batch = next(self.loader.validation())
        self.model(batch.inputs)
        for hook in hooks:
            hook.remove()
        return found


def shape(size: Size) -> Row:
    """Return the hyperparameters of a size; heads are added at a constant width of a head."""
    return {
        "d_model": size.width,
        "n_layers": size.depth,
        "n_heads": size.width // HEAD_DIM,
        "d_ff": 3 * size.width,
    }


def points(sweep: str) -> Iterator[Row]:
    """Yield the hyperparameters of each run of a sweep."""
    if sweep == "activations":
        for width in ACTIVATION_WIDTHS:
            for seed in ACTIVATION_SEEDS:
                run = shape(Size(width, 4)) | ACTIVATION_RUN | {"seed": seed}
                yield run
                yield run | ACTIVATION_BASE
        return
    for size in SWEEPS[sweep].sizes:
        for lr in SWEEPS[sweep].rates:
            for scaled in (False, True):
                yield SWEEPS[sweep].settings(size, lr, scaled)


def measure(results: Path, sweeps: Sequence[str]) -> None:
    """Run the points of `sweeps` that `results` lacks, and append them to it."""
    torch.set_num_threads(1)
    known = [row["settings"] for row in read_rows(results)]
    for sweep in sweeps:
        for settings in points(sweep):
            if settings in known:
                continue
            known.append(settings)
            start = time.process_time()
            run = Run(settings)
            row: Row = {"settings": settings}
            if sweep == "activations":
                run.train(10)
                row["activations"] = run.activations()
            else:
                run.train(N_STEPS)
                row["loss"] = run.validate()
            row["seconds"] = time.process_time() - start
            with results.open("a") as file:
                print(json.dumps(row), file=file)


def read_rows(results: Path) -> list[Row]:
    """Return the runs in `results`."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def activation_table(rows: Sequence[Row], scaled: bool) -> dict[int, list[float]]:
    """Return by width the mean over seeds of each block's and the head's activation."""
    table: dict[int, list[float]] = {}
    for width in ACTIVATION_WIDTHS:
        found: list[list[float]] = []
        for row in rows:
            settings = row["settings"]
            is_scaled = "base_width" in settings
            if "activations" in row and settings["d_model"] == width and is_scaled == scaled:
                found.append(row["activations"])
        if found:
            table[width] = [statistics.fmean(values) for values in zip(*found, strict=True)]
    return table


def loss_table(rows: Sequence[Row], sweep: Sweep, scaled: bool) -> dict[Size, list[Point]]:
    """Return by size the validation loss at each rate."""
    table: dict[Size, list[Point]] = {}
    for size in sweep.sizes:
        curve: list[Point] = []
        for lr in sweep.rates:
            settings = sweep.settings(size, lr, scaled)
            curve += [Point(lr, row["loss"]) for row in rows if row["settings"] == settings]
        if curve:
            table[size] = curve
    return table


def best_of(curve: Sequence[Point]) -> Point:
    """Return the point of the smallest loss."""
    return min(curve, key=lambda point: point.loss)


def print_tables(rows: Sequence[Row]) -> None:
    """Print all results as Markdown."""
    for scaled in (False, True):
        print(f"\nactivations, {TITLES[scaled]}\n")
        table = activation_table(rows, scaled)
        for width, values in table.items():
            print(f"| {width} | {' | '.join(f'{value:.3g}' for value in values)} |")
        for name, sweep in SWEEPS.items():
            print(f"\n{name}, {TITLES[scaled]}\n")
            print(f"| size | {' | '.join(f'2^{math.log2(lr):g}' for lr in sweep.rates)} | best |")
            for size, curve in loss_table(rows, sweep, scaled).items():
                losses = {point.lr: f"{point.loss:.3f}" for point in curve}
                cells = " | ".join(losses.get(lr, "") for lr in sweep.rates)
                print(f"| {size} | {cells} | 2^{math.log2(best_of(curve).lr):g} |")


def draw(rows: Sequence[Row], directory: Path) -> None:
    """Draw both pictures."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, scaled in zip(axes, (False, True), strict=True):
        table = activation_table(rows, scaled)
        for block, values in enumerate(zip(*table.values(), strict=True), start=1):
            label = "logits" if block == len(next(iter(table.values()))) else f"block {block}"
            axis.plot(list(table), values, marker="o", label=label)
        axis.set(title=TITLES[scaled], xlabel="d_model", xscale="log", yscale="log")
        axis.set_xticks(list(table), [str(width) for width in table], minor=False)
        axis.minorticks_off()
    axes[0].set_ylabel("mean absolute activation after 10 steps")
    axes[0].legend()
    figure.savefig(directory / "transfer-activations.png", dpi=100)

    n_columns = max(map(len, DRAWN))
    figure, grid = plt.subplots(
        len(DRAWN), n_columns, figsize=(13, 7), sharex=True, sharey=True, layout="constrained"
    )
    for row_of_axes, panels in zip(grid, DRAWN, strict=True):
        for axis, (name, scaled) in zip(row_of_axes, panels, strict=False):
            for size, curve in loss_table(rows, SWEEPS[name], scaled).items():
                (line,) = axis.plot(*zip(*curve, strict=True), marker=".", label=str(size))
                axis.plot(*best_of(curve), marker="*", markersize=14, color=line.get_color())
            title = f"{name}, not scaled"
            if scaled:
                title = f"{SWEEPS[name].key}: {SWEEPS[name].base}"
            axis.set(title=title, xscale="log", xlabel="lr")
            axis.legend()
        for axis in row_of_axes[len(panels) :]:
            axis.remove()
        row_of_axes[0].set_ylabel("validation loss (nats per byte)")
    figure.savefig(directory / "transfer-rates.png", dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--sweeps",
        nargs="*",
        choices=["activations", *SWEEPS],
        default=["activations", "width", "width-from-64", "depth"],
    )
    parser.add_argument("--draw", type=Path, metavar="DIRECTORY")
    args = parser.parse_args(arguments)
    measure(args.results, args.sweeps)
    rows = read_rows(args.results)
    print_tables(rows)
    if args.draw is not None:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
