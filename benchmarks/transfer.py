"""Do learning rates carry over to other widths and depths with `base_width` and `base_depth`?

    python -m benchmarks.transfer RESULTS [--sweeps NAME ...] [--draw DIRECTORY]

Trains small models on the source of the Python standard library, on one thread, with and without
the two keys. Appends a line per run to RESULTS, and skips runs that have one. The sweeps:

    activations  the mean absolute output of each block after ten steps, by width
    width        the validation loss by learning rate and width
    depth        the validation loss by learning rate and depth

`--draw` draws transfer-activations.png and transfer-rates.png. All tables are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm import config
from lm.config import Hyperparameters
from lm.data.loader import Loader
from lm.data.run_data import open_data
from lm.training import optim, parallelize
from lm.training.transfer import Transfer
from model import Transformer

BASE = {"base_width": 256, "base_depth": 2}
HEAD_DIM = 16
SEED = 7
N_STEPS = 200
RATES = [2.0**exponent for exponent in range(-11, -4)]
ACTIVATION_WIDTHS = (64, 128, 256, 512, 1024)
ACTIVATION_RUN = {
    "lr": 2.0**-8,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "batch_size": 1,
}
ACTIVATION_SEEDS = (1, 2)

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


SIZES = {
    "width": [Size(64, 2), Size(128, 2), Size(256, 2)],
    "depth": [Size(64, 2), Size(64, 4), Size(64, 8)],
}
"""by sweep"""
BASE_KEYS = {"width": "base_width", "depth": "base_depth"}


def is_base(size: Size, key: str) -> bool:
    """Return whether `key` changes nothing at `size`."""
    if key == "base_width":
        return size.width == BASE[key]
    return size.depth == BASE[key]


class Run:
    """A model that trains on one thread, with the parts of the trainer."""

    def __init__(self, settings: Row) -> None:
        hp = config.read_hyperparameters({"hyperparameters": SETTINGS | settings}, [], "benchmark")
        self.hp: Hyperparameters = hp
        seed = hp.seed
        assert seed is not None
        transfer = Transfer.of(hp, hp, hp.optimizer)
        self.model = Transformer(hp)
        parallelize.initialize_parameters(self.model, seed, transfer)
        self.optimizer = optim.Optimizer(hp, self.model.named_parameters(), transfer)
        data = open_data(hp, hp.vocab_size, hp.max_seq_len, hp.batch_size, SEED)
        self.loader = Loader(hp, data, hp.batch_size, 0, 1, torch.device("cpu"))

    def train(self, n_steps: int) -> None:
        """Train `n_steps` of the run."""
        batches = self.loader.training(0)
        for step in range(n_steps):
            batch = next(batches)
            (micro_batch,) = batch.micro_batches
            loss = self.model(*micro_batch) / batch.n_target_tokens
            loss.backward()
            _, skipped = self.optimizer.clip_grad_norm(1.0)
            self.optimizer.step(optim.learning_rate(self.hp, step, N_STEPS), skipped)
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

        def record(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            found.append(output.abs().mean().item())

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
                yield run | BASE
        return
    key = BASE_KEYS[sweep]
    for size in SIZES[sweep]:
        for lr in RATES:
            run = shape(size) | {"seed": SEED, "lr": lr}
            yield run
            if not is_base(size, key):
                yield run | {key: BASE[key]}


def measure(results: Path, sweeps: Sequence[str]) -> None:
    """Run the points of `sweeps` that `results` lacks, and append them to it."""
    torch.set_num_threads(1)
    known = [row["settings"] for row in read_rows(results)]
    for sweep in sweeps:
        for settings in points(sweep):
            if settings in known:
                continue
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


def loss_table(rows: Sequence[Row], sweep: str, scaled: bool) -> dict[Size, list[Point]]:
    """Return by size the validation loss at each rate."""
    key = BASE_KEYS[sweep]
    table: dict[Size, list[Point]] = {size: [] for size in SIZES[sweep]}
    for row in rows:
        settings = row["settings"]
        size = Size(settings["d_model"], settings["n_layers"])
        keys = [key] if scaled and not is_base(size, key) else []
        if "loss" in row and size in table and [k for k in BASE if k in settings] == keys:
            table[size].append(Point(settings["lr"], row["loss"]))
    return {size: sorted(curve) for size, curve in table.items() if curve}


def print_tables(rows: Sequence[Row]) -> None:
    """Print all results as Markdown."""
    for scaled in (False, True):
        print(f"\nactivations, {TITLES[scaled]}\n")
        table = activation_table(rows, scaled)
        for width, values in table.items():
            print(f"| {width} | {' | '.join(f'{value:.3g}' for value in values)} |")
        for sweep in SIZES:
            print(f"\n{sweep}, {TITLES[scaled]}\n")
            print(f"| size | {' | '.join(f'2^{math.log2(lr):g}' for lr in RATES)} | best |")
            for size, curve in loss_table(rows, sweep, scaled).items():
                losses = {point.lr: f"{point.loss:.3f}" for point in curve}
                best = min(curve, key=lambda point: point.loss)
                cells = " | ".join(losses.get(lr, "") for lr in RATES)
                print(f"| {size} | {cells} | 2^{math.log2(best.lr):g} |")


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

    figure, grid = plt.subplots(
        2, 2, figsize=(9, 7), sharex=True, sharey=True, layout="constrained"
    )
    for row_of_axes, sweep in zip(grid, SIZES, strict=True):
        for axis, scaled in zip(row_of_axes, (False, True), strict=True):
            for size, curve in loss_table(rows, sweep, scaled).items():
                (line,) = axis.plot(*zip(*curve, strict=True), marker=".", label=str(size))
                best = min(curve, key=lambda point: point.loss)
                axis.plot(*best, marker="*", markersize=14, color=line.get_color())
            axis.set(title=f"{sweep}, {TITLES[scaled]}", xscale="log", xlabel="lr")
            axis.legend()
        row_of_axes[0].set_ylabel("validation loss (nats per byte)")
    figure.savefig(directory / "transfer-rates.png", dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("results", type=Path)
    parser.add_argument("--sweeps", nargs="*", default=["activations", *SIZES])
    parser.add_argument("--draw", type=Path, metavar="DIRECTORY")
    args = parser.parse_args(arguments)
    measure(args.results, args.sweeps)
    rows = read_rows(args.results)
    print_tables(rows)
    if args.draw is not None:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
