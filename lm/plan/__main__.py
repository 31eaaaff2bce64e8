"""Command line for predicting the memory and the time of a training run, without a GPU.

    python -m lm.plan --config FILE [key=value ...] [--gpu NAME | --memory GIB] [--gpus N]
        [--nodes M] [--search]

Prints the memory of a GPU by part at the instant of a step that needs most, whether that fits, the
largest batch size, and how fast the run is. --search prints the fastest settings on 1, 2, 4, ... N
GPUs and the cheapest of all. --plot draws memory by strategy, and the speed of up to 10,000 GPUs.
Host memory counts where it is known: from --host-memory, or on a machine with such a GPU. Memory is
tested against FSDP on fake tensors and on CPUs; nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lm import config
from lm.config import Hyperparameters
from lm.errors import ConfigError, command
from lm.hf import weights
from lm.launch.machine import host_memory
from lm.metrics.device import GIB
from lm.plan import fit, speed
from lm.plan.predict import (
    SHARDINGS,
    Plan,
    Times,
    make_plan,
    search_settings,
)
from lm.training.precision import choose_dtype

GPUS_PER_NODE = 8


def format_search(plans: Sequence[Plan]) -> str:
    """Return a row for each of `plans`, and the cheapest, for a person to read."""
    rows: list[str] = []
    prices: list[float] = []
    for plan in plans:
        assert plan.times is not None
        rows.append(_format_row(plan, plan.times))
        prices.append(plan.times.gpu_hours_per_billion_tokens)
    cheapest = rows[prices.index(min(prices))]
    lines = [
        "| GPUs | settings | GiB | host GiB per node | tokens/s | MFU | GPU-hours per 10⁹ tokens |",
        "|---" * 7 + "|",
        *rows,
        "",
        f"cheapest: {cheapest}",
    ]
    return "\n".join(lines)


def _format_row(plan: Plan, times: Times) -> str:
    settings = "as in the file"
    if plan.settings:
        settings = " ".join(f"{key}={value}" for key, value in plan.settings.items())
    cells = [
        str(plan.gpus),
        settings,
        f"{plan.peak / GIB:.1f}",
        f"{plan.host / GIB:.1f}",
        f"{times.tokens_per_second:,.0f}",
        f"{times.mfu:.0%}",
        f"{times.gpu_hours_per_billion_tokens:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def plot_plans(
    hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card, network: float, path: Path
) -> None:
    """Draw memory by part over GPUs and strategies, and tokens/s per GPU of up to 10,000 GPUs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot requires a package: pip install matplotlib") from None

    def plan_on(n_gpus: int, sharding: str, card: speed.Card | None) -> Plan:
        changes = {"sharding": sharding, "total_batch_size": None, "shard_group_size": None}
        some = replace(ranks, size=n_gpus, per_node=min(n_gpus, GPUS_PER_NODE))
        return make_plan(hp.model_copy(update=changes), some, card, network)

    counts = [*(2**power for power in range(14)), 10000]
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2)

    bars: list[str] = []
    for count in counts:
        for sharding in SHARDINGS:
            is_on_one_node = count <= GPUS_PER_NODE
            is_same_as_other = is_on_one_node and sharding.startswith("hybrid")  # without "hybrid-"
            if count > ranks.size or is_same_as_other:
                continue
            bottom = 0.0
            memory = asdict(plan_on(count, sharding, None).memory)
            for color, (part, n_bytes) in enumerate(memory.items()):
                label = ""
                if not bars:  # in the legend once
                    label = part
                height = n_bytes / GIB
                left.bar(len(bars), height, 0.8, bottom, color=f"C{color}", label=label)
                bottom += height
            bars.append(f"{count} {sharding}")
    available = ranks.memory / GIB
    left.axhline(available, color="k", linestyle="--", label=f"{card.name}: {available:g} GiB")
    left.set_xticks(range(len(bars)), bars, rotation=90)
    left.set_ylabel("GiB per GPU")
    left.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))

    for sharding in ("full-shard", "hybrid-full-shard"):
        rates: list[float] = []
        for count in counts:
            times = plan_on(count, sharding, card).times
            assert times is not None
            rates.append(times.tokens_per_second / count)
        right.plot(counts, rates, "o-", label=sharding)
    right.set(xscale="log", xlabel="GPUs", ylabel="tokens/s per GPU (not measured)", ylim=0)
    right.legend()
    figure.savefig(path, dpi=80)


def format_plan(plan: Plan, hp: Hyperparameters) -> str:
    """Return the plan for a person to read."""
    adapters = ""
    if plan.trained < plan.parameters:
        adapters = f", {plan.trained / 1e6:,.1f}M trained"
    mesh = f"{plan.mesh.replicate} replicas x {plan.mesh.shard} shards"
    size = f"{plan.batch_size} x {hp.max_seq_len} tokens, {plan.micro_batches} micro-steps"
    host_available = ""
    if plan.host_available is not None:
        host_available = f", {plan.host_available / GIB:.1f} GiB available"
    verdict = "fits" if plan.fits else "does not fit"
    lines = [
        f"{plan.parameters / 1e6:,.1f}M parameters{adapters}; {plan.sharding} over {mesh}",
        f"per GPU and step: {size}; {plan.tokens_per_step:,} tokens per step in all",
        "",
        *fit.format_memory(plan.memory),
        f"{fit.format_part('peak', plan.peak)}, {plan.available / GIB:.1f} GiB available",
        f"{fit.format_part('host', plan.host)} per node{host_available}",
        "",
        f"{verdict}, as {fit.USABLE:.0%} of memory can be used",
        f"largest batch_size without accumulation: {plan.largest_batch_size}",
    ]
    if plan.times is not None:
        lines += _format_times(plan.times, plan.gpus)
    return "\n".join(lines)


def _format_times(times: Times, n_gpus: int) -> list[str]:
    work = [f"{times.flops / 1e12:,.1f} TFLOP per GPU and step"]
    for link, n_bytes in asdict(times.links).items():
        if n_bytes:
            work.append(f"{n_bytes / 1e9:.1f} GB in the {link}")
    parts: list[str] = []
    for part, seconds in asdict(times.seconds).items():
        if seconds:
            parts.append(f"{part.replace('_', ' ')} {seconds:.3f}")
    lines = [
        "; ".join(work),
        f"{times.step:.3f} s per step ({', '.join(parts)}), not measured on a GPU",
        f"{times.tokens_per_second:,.0f} tokens/s, MFU {times.mfu:.1%}",
    ]
    if times.hours is not None:
        lines.append(f"{times.hours:,.2f} hours, {times.hours * n_gpus:,.1f} GPU-hours")
    return lines


def parse_plan_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: a value is unknown or out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lm.plan", description="Predict the memory and time of a run."
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    gpu_help = f"one of {', '.join(speed.CARDS)} (%(default)s)"
    add("--gpu", metavar="NAME", default="h100", help=gpu_help)
    add("--memory", type=float, metavar="GIB", help="memory of an unknown GPU, without times")
    host_help = "memory of a node (this machine's if it has such a GPU)"
    add("--host-memory", type=float, metavar="GIB", help=host_help)
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs (%(default)s)")
    nodes_help = f"number of nodes ({GPUS_PER_NODE} GPUs per node)"
    add("--nodes", type=int, metavar="M", help=nodes_help)
    network_help = "GB/s per GPU to other nodes (%(default)s)"
    add("--network", type=float, default=50.0, metavar="GBPS", help=network_help)
    search_help = "find the fastest settings on 1, 2, 4, ... N GPUs, and the cheapest"
    add("--search", action="store_true", help=search_help)
    plot_help = "draw memory by strategy and the speed of up to 10,000 GPUs"
    add("--plot", type=Path, metavar="FILE.png", help=plot_help)
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(arguments)
    if args.nodes is None:
        args.nodes = max(1, math.ceil(args.gpus / GPUS_PER_NODE))

    problems: list[str] = []
    if args.gpu not in speed.CARDS:
        near = difflib.get_close_matches(args.gpu, speed.CARDS, n=3, cutoff=0.3)
        names = ", ".join(near or speed.CARDS)
        problems.append(f"--gpu: {args.gpu} is unknown; did you mean {names}? Or use --memory GIB")
    if args.gpus < 1:
        problems.append(f"--gpus: {args.gpus} must be 1 or more")
    if args.nodes < 1:
        problems.append(f"--nodes: {args.nodes} must be 1 or more")
    elif args.gpus % args.nodes:
        problems.append(
            f"--nodes: {args.nodes} nodes cannot share {args.gpus} GPUs; set it to a divisor"
        )
    amounts = {
        "--memory": args.memory,
        "--host-memory": args.host_memory,
        "--network": args.network,
    }
    for option, value in amounts.items():
        if value is not None and not 0 < value < math.inf:
            problems.append(f"{option}: {value:g} must be finite and above 0")
    if args.memory and (args.search or args.plot):
        problems.append("--memory: --search and --plot need --gpu")
    if problems:
        raise ConfigError(*problems)
    return args


def load_hyperparameters(args: argparse.Namespace) -> Hyperparameters:
    """Read the experiment file. Weights that are not here are not needed if `model` is given."""
    hp = config.load_hyperparameters(args.config, args.overrides)
    if hp.init_from is None:
        return hp
    if Path(hp.init_from).exists():
        return config.load_hyperparameters(args.config, args.overrides, weights.model_defaults)
    if hp.model is None:
        raise ConfigError(
            f"init_from: {hp.init_from} does not exist; set model to the preset with its shape"
        )
    return hp


def describe_ranks(args: argparse.Namespace, hp: Hyperparameters, card: speed.Card) -> fit.Ranks:
    """Return the ranks of a plan. Host memory is unknown unless given or this machine's."""
    host_bytes = math.inf
    if args.host_memory:
        host_bytes = args.host_memory * GIB
    elif torch.cuda.is_available() and card.name in torch.cuda.get_device_name():
        host_bytes = host_memory().total
    return fit.Ranks(
        dtype=choose_dtype(hp, torch.bfloat16),
        device_type="cuda",
        size=args.gpus,
        per_node=args.gpus // args.nodes,
        memory=round((args.memory or card.gib) * GIB),
        host_memory=host_bytes,
    )


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_plan_arguments(arguments)
    hp = load_hyperparameters(args)
    card = speed.CARDS[args.gpu]
    ranks = describe_ranks(args, hp, card)
    if args.plot:
        plot_plans(hp, ranks, card, args.network, args.plot)
    if args.search:
        plans = list(search_settings(hp, ranks, card, args.network))
        if not plans:
            raise ConfigError(
                f"--search: no settings fit on {args.gpus} GPUs or fewer; increase --gpus, or set"
                " lora_rank"
            )
        if args.json:
            print(json.dumps([plan.flatten() for plan in plans]))
        else:
            print(format_search(plans))
        return 0
    known_card: speed.Card | None = card
    if args.memory:
        known_card = None
    plan = make_plan(hp, ranks, known_card, args.network)
    plan = replace(plan, largest_batch_size=fit.find_largest_batch_size(hp, ranks))
    if args.json:
        print(json.dumps(plan.flatten()))
    else:
        print(format_plan(plan, hp))
    return 0


if __name__ == "__main__":
    sys.exit(main())
