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
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lm import config
from lm.config import Hyperparameters
from lm.errors import ConfigError, command
from lm.hf import adapters
from lm.launch.console import format_elapsed
from lm.launch.machine import host_memory
from lm.metrics.device import GIB
from lm.plan import fit, speed
from lm.plan.nearest import find_nearest_settings
from lm.plan.predict import (
    SHARDINGS,
    Plan,
    Times,
    list_counts,
    make_plan,
    round_up_batch,
    search_settings,
)
from lm.plan.trace import measure_activations
from lm.training.precision import choose_dtype
from lm.units import format_bytes, format_parameters

GPUS_PER_NODE = 8


def format_search(plans: Sequence[Plan]) -> str:
    """Return a row for each of `plans`, and the cheapest, for a person to read."""
    rows: list[str] = []
    prices: list[float] = []
    for plan in plans:
        assert plan.times is not None
        rows.append(_format_row(plan, plan.times))
        prices.append(plan.times.gpu_hours_per_billion_tokens)
    cheapest = plans[prices.index(min(prices))]
    lines = [
        "| GPUs | settings | GiB per GPU | host GiB per node | tokens/s | MFU | GPU-hours per 10⁹"
        " tokens |",
        "|---" * 7 + "|",
        *rows,
        "",
        f"cheapest: {format_count(cheapest.gpus, 'GPU')}, {_format_settings(cheapest)}:"
        f" {min(prices):,.1f} GPU-hours per 10⁹ tokens (not measured on a GPU)",
    ]
    return "\n".join(lines)


def _format_settings(plan: Plan) -> str:
    if not plan.settings:
        return "as in the file"
    settings: list[str] = []
    for key, value in plan.settings.items():
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        settings.append(f"{key}={text}")
    return " ".join(settings)


def _format_row(plan: Plan, times: Times) -> str:
    cells = [
        str(plan.gpus),
        _format_settings(plan),
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
        changes = {"sharding": sharding, "shard_group_size": None}
        changed = round_up_batch(hp.model_copy(update=changes), n_gpus)
        some = replace(ranks, size=n_gpus, per_node=min(n_gpus, GPUS_PER_NODE))
        return make_plan(changed, some, card, network)

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


def format_count(n: int, noun: str) -> str:
    """Return e.g. "1 step" or "1,000 steps"."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}s"


def format_plan(plan: Plan, hp: Hyperparameters, ranks: fit.Ranks, advice: Sequence[str]) -> str:
    """Return the plan for a person to read, with lines of `advice`."""
    adapters = ""
    if plan.trained < plan.parameters:
        adapters = f" ({format_parameters(plan.trained)} trained)"
    gpus = format_count(plan.gpus, "GPU")
    if plan.gpu is not None:
        gpus = f"{plan.gpus:,} x {plan.gpu}"
    nodes = format_count(plan.nodes, "node")
    replicas = format_count(plan.mesh.replicate, "replica")
    shards = "not sharded"
    if plan.mesh.shard > 1:
        shards = f"sharded over {plan.mesh.shard:,} GPUs"
        if plan.mesh.replicate > 1:
            shards = f"each {shards}"
    micro_steps = format_count(plan.micro_batches, "micro-step")
    sequences = format_count(plan.batch_size, "sequence")
    available = format_bytes(plan.available)
    host = f"per node, for {_describe_host(hp)}"
    if plan.host_available is not None:
        host += f", of {format_bytes(plan.host_available)}"
    lines = [
        f"{format_parameters(plan.parameters)} parameters{adapters} on {gpus} in {nodes}",
        f"{plan.sharding}: {replicas} of the model, {shards}",
        f"a step: {micro_steps} of {sequences} of {hp.max_seq_len:,} tokens on each GPU,"
        f" {plan.tokens_per_step:,} tokens in all",
        "",
        "memory of each GPU at the peak of a step:",
        *fit.format_memory(plan.memory, hp, ranks),
        fit.format_part("peak", plan.peak, f"of {available}"),
        fit.format_part("host", plan.host, host),
        "",
    ]
    if plan.fits:
        usable = format_bytes(fit.USABLE * plan.available)
        rest = "CUDA, NCCL and fragmentation take the rest"
        lines.append(f"fits into {fit.USABLE:.0%} of memory, {usable}; {rest}")
    lines += advice
    largest = plan.largest_batch_size
    lines.append(f"largest batch_size that fits without accumulation: {largest}")
    if plan.times is not None:
        lines += ["", *_format_times(plan.times, plan.gpus, hp)]
    return "\n".join(lines)


def _describe_host(hp: Hyperparameters) -> str:
    uses: list[str] = []
    if hp.async_checkpoint:
        uses.append("asynchronous checkpoints")
    if hp.cpu_offload:
        uses.append("offloaded parameters, gradients and moments")
    if hp.activation_offload:
        uses.append("offloaded activations")
    return ", ".join(uses) or "nothing"


_PARTS_OF_A_STEP = {
    "compute": "products and attention",
    "memory": "other operators",
    "optimizer": "the optimizer and FSDP's copies",
    "exposed_communication": "waiting for other GPUs",
    "offload": "waiting for the host",
}


def _format_times(times: Times, n_gpus: int, hp: Hyperparameters) -> list[str]:
    seconds = asdict(times.seconds)
    parts = [f"{_PARTS_OF_A_STEP[part]} {seconds[part]:.3f}" for part in seconds if seconds[part]]
    work = [f"{times.flops / 1e12:,.1f} TFLOP"]
    if times.links.node:
        work.append(f"{times.links.node / 1e9:,.1f} GB sent to GPUs of its node")
    if times.links.network:
        work.append(f"{times.links.network / 1e9:,.1f} GB sent to other nodes")
    lines = [
        f"{times.step:.3f} s per step, not measured on a GPU:",
        f"  {', '.join(parts)}",
        f"each GPU and step: {', '.join(work)}",
        f"{times.tokens_per_second:,.0f} tokens/s, MFU {times.mfu:.1%}",
    ]
    if times.hours is not None:
        steps = format_count(hp.run_length(None), "step")
        gpu_hours = f"{times.hours * n_gpus:,.1f}"
        if times.hours * n_gpus < 0.1:
            gpu_hours = "under 0.1"
        lines.append(f"{_format_hours(times.hours)} for {steps}, {gpu_hours} GPU-hours")
    return lines


def _format_hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    if hours >= 1 / 60:
        return f"{hours * 60:.1f} minutes"
    return f"{hours * 3600:.1f} seconds"


def give_advice(
    plan: Plan, hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card | None, network: float
) -> list[str]:
    """Return lines that say what fits, and which setting shards the gradients."""
    advice: list[str] = []
    if not plan.fits:
        what_fits = find_nearest_settings(hp, ranks, measure_activations)
        memory = "host memory"
        if plan.peak > fit.USABLE * plan.available:
            memory = "the GPU's memory"
        advice.append(f"does not fit into {fit.USABLE:.0%} of {memory}; what fits: {what_fits}")
    if plan.micro_batches > 1 and not hp.sync_each_micro_step:
        changed = hp.model_copy(update={"sync_each_micro_step": True})
        other = make_plan(changed, ranks, card, network)
        if other.peak < plan.peak:
            change = f"peak {format_bytes(other.peak)}"
            if other.times is not None:
                change += f", {other.times.step:.3f} s per step"
            advice.append(
                f"with sync_each_micro_step=true each micro-step reduces its gradients: {change}"
            )
    return advice


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
    gpu_help = f"{', '.join(speed.CARDS)}, or a name that nvidia-smi prints (%(default)s)"
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
    try:
        args.card = speed.find_card(args.gpu)
    except ConfigError as error:
        problems += error.problems
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
        return config.load_hyperparameters(args.config, args.overrides, adapters.model_defaults)
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
    card: speed.Card = args.card
    ranks = describe_ranks(args, hp, card)
    if args.plot:
        plot_plans(hp, ranks, card, args.network, args.plot)
    if args.search:
        plans = search(hp, ranks, card, args.network)
        if args.json:
            print(json.dumps([plan.flatten() for plan in plans]))
        else:
            print(format_search(plans))
        return 0

    known_card: speed.Card | None = card
    if args.memory:
        known_card = None
    rounded = round_up_batch(hp, ranks.size)
    plan = make_plan(rounded, ranks, known_card, args.network)
    settings: dict[str, Any] = {}
    if rounded.total_batch_size != hp.total_batch_size:
        settings["total_batch_size"] = rounded.total_batch_size
    largest = fit.find_largest_batch_size(hp, ranks)
    plan = replace(plan, largest_batch_size=largest, settings=settings)
    if args.json:
        print(json.dumps(plan.flatten()))
        return 0
    if settings:
        print(
            f"total_batch_size: {hp.total_batch_size} is not a multiple of batch_size"
            f" {hp.batch_size} x {format_count(ranks.size, 'GPU')}, and a run would be refused;"
            f" planned with {rounded.total_batch_size}\n"
        )
    advice = give_advice(plan, rounded, ranks, known_card, args.network)
    print(format_plan(plan, rounded, ranks, advice))
    return 0


def search(hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card, network: float) -> list[Plan]:
    """Return the fastest plans on 1, 2, 4, ... and all GPUs.

    Raises:
        ConfigError: none fits.
    """
    plans: list[Plan] = []
    counts = list_counts(ranks)
    for number, count in enumerate(counts, 1):
        line = f"planning {format_count(count, 'GPU')} ({number} of {len(counts)})"
        if number == 1:
            line += ", which takes longest: it traces the model with all settings"
        print(f"{format_elapsed()}  {line}", file=sys.stderr, flush=True)
        some = replace(ranks, size=count, per_node=min(count, ranks.per_node))
        plans += search_settings(hp, some, card, network)
    if not plans:
        raise ConfigError(
            f"--search: no settings fit on {ranks.size} GPUs or fewer; increase --gpus, or set"
            " lora_rank"
        )
    return plans


if __name__ == "__main__":
    sys.exit(main())
