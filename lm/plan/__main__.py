"""Command line for predicting the memory and the time of a training run, without a GPU.

    python -m lm.plan --config FILE [key=value ...] [--gpu NAME | --memory GIB] [--gpus N] [--nodes M] [--search]

Prints the memory of a GPU by part in the phase of a step that needs most, whether that fits, the largest batch size,
and how fast the run is. --search prints the fastest settings on 1, 2, 4, ... N GPUs and the cheapest of all. --plot
draws memory by strategy, and the speed of up to 10,000 GPUs. --gpu cpu plans for ranks on this machine. --calibrate RUN
scales times by those of a run. Host memory counts where it is known: from --host-memory, or on a machine with such a
GPU. Memory is tested against FSDP on fake tensors and steps on CPUs. Times were compared with those of CPUs
(docs/log.md); nothing was measured on a GPU.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm import config, parallelize, precision
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError, command, oserror_as_config_error
from lm.fileio import read_records
from lm.hf import weights
from lm.launch.environment import host_memory
from lm.metrics.device import GIB
from lm.plan import fit, memory, speed

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, None: None}
"""Compute dtype on a GPU that has bfloat16, by `amp_dtype`; None = float32."""
SHARDINGS = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
GRID: dict[str, Sequence[Any]] = {"activation_checkpointing": ("none", "selective", "full")}
GRID |= {"activation_offload": (False, True), "cpu_offload": (False, True)}
"""What --search combines with sharding, batch size, `optim_dtype` and adapters."""

Plan = dict[str, Any]


def _dtype(hp: Hyperparameters, card: speed.Card) -> torch.dtype | None:
    return precision.compute_dtype(hp, torch.device("cpu")) if card.device_type == "cpu" else DTYPES[hp.amp_dtype]


def make_plan(hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card | None = None, network: float = 50.0) -> Plan:
    """Predict a run, and its times if a `card` is given and, on a CPU, the run fits.

    Args:
        network: GB/s per GPU to other nodes.

    Returns:
        Bytes are those of a GPU, except for "host": what a node needs of its memory for the copy for asynchronous
        checkpoints, and for what is offloaded to it.

    Raises:
        ConfigError: the GPUs cannot be divided into shard groups, or the global batch into micro-batches, or the card
            does not support float8, or is a CPU and the run compiles.
    """
    if card and hp.float8 and not card.has_float8:
        raise ConfigError(f"float8: {card.name} does not support float8; use float8: null", keys=("float8",))
    if card and card.device_type == "cpu" and hp.compiles(False, hp.float8):
        remedy = "pass compile=false float8=null; fsdp.py --dry-run says what the run needs"
        raise ConfigError(f"compile: --gpu cpu times steps without compilation; {remedy}", keys=("compile", "float8"))
    mesh = parallelize.mesh_dims(hp, ranks.size, ranks.per_node)
    global_batch_size = derive_global_batch_size(hp, ranks.size)
    n_micro_batches = global_batch_size // (hp.batch_size * ranks.size)
    parts, host = fit.required_memory(hp, ranks), fit.required_host_memory(hp, ranks)
    total = memory.count(hp, ranks.dtype, mesh["shard"])
    plan: Plan = {"parameters": total.n, "trained": total.trained, "gpus": ranks.size}
    plan |= {"nodes": ranks.size // ranks.per_node, "mesh": mesh}
    plan |= {"sharding": hp.sharding, "activation_checkpointing": hp.activation_checkpointing}
    plan |= {
        "batch_size": hp.batch_size,
        "micro_batches": n_micro_batches,
        "memory": parts,
        "host": ranks.per_node * host,
    }
    plan |= {"peak": sum(parts.values()), "available": ranks.memory, "fits": ranks.fit(parts, host)}
    plan["host_available"] = None if math.isinf(ranks.host_memory) else ranks.host_memory
    plan["tokens_per_step"] = global_batch_size * hp.max_seq_len
    if card and (ranks.device_type == "cuda" or plan["fits"]):
        plan |= speed.step_time(hp, ranks.dtype, card, mesh, ranks.per_node, network, n_micro_batches)
        rate = plan["tokens_per_second"] = plan["tokens_per_step"] / plan["step"]
        plan["gpu_hours_per_billion_tokens"] = ranks.size / rate / 3.6e-6
        plan["mfu"] = plan["flops"] / plan["step"] / card.flops if card.flops else None
        if hp.max_epochs is None:
            plan["hours"] = plan["step"] * hp.run_length(None) / 3600
    return plan


def search(hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card, network: float) -> Iterator[Plan]:
    """Yield for 1, 2, 4, ... and all GPUs the fastest plan that fits, if any; given weights, another with adapters.

    A plan's "settings" are those that differ from `hp`.
    """
    moments = ("float32", "bfloat16") if hp.beta2 <= 0.99 else (hp.optim_dtype,)
    adapters = (None, 16) if hp.init_from and not (hp.lora_rank or hp.float8) else (hp.lora_rank,)
    counts = {2**power for power in range(ranks.size.bit_length())} | {ranks.size}
    counts = sorted(n for n in counts if n < ranks.per_node or n % ranks.per_node == 0)
    for count, lora_rank in itertools.product(counts, adapters):
        some, found = replace(ranks, size=count, per_node=min(count, ranks.per_node)), []
        has_groups = count > ranks.per_node and count % (hp.shard_group_size or ranks.per_node) == 0
        shardings = SHARDINGS if has_groups else SHARDINGS[: min(count + 1, 3)]
        grid = {"lora_rank": (lora_rank,), "sharding": shardings, "optim_dtype": moments} | GRID
        for values in itertools.product(*grid.values()):
            for size in (1, 2, 4, 8, 16, 32, 64):
                changes = dict(zip(grid, values, strict=True)) | {"batch_size": size}
                if hp.total_batch_size and hp.total_batch_size % (size * count):
                    continue
                plan = make_plan(hp.model_copy(update=changes), some, card, network)
                if not plan["fits"]:
                    break
                plan["settings"] = {key: value for key, value in changes.items() if value != getattr(hp, key)}
                found.append(plan)
        yield from sorted(found, key=lambda plan: -plan["tokens_per_second"])[:1]


def search_table(plans: Sequence[Plan]) -> str:
    """Return a row for each of `plans`, and the cheapest, for a person to read."""
    rows = [
        "| GPUs | settings | GiB | host GiB per node | tokens/s | MFU | GPU-hours per 10⁹ tokens |",
        "|---" * 7 + "|",
    ]
    for plan in plans:
        settings = " ".join(f"{key}={value}" for key, value in plan["settings"].items()) or "as in the file"
        mfu = "-" if plan["mfu"] is None else f"{plan['mfu']:.0%}"
        rate = f"{plan['tokens_per_second']:,.0f} | {mfu} | {plan['gpu_hours_per_billion_tokens']:,.1f}"
        sizes = f"{plan['peak'] / GIB:.1f} | {plan['host'] / GIB:.1f}"
        rows.append(f"| {plan['gpus']} | {settings} | {sizes} | {rate} |")
    best = min(range(len(plans)), key=lambda row: plans[row]["gpu_hours_per_billion_tokens"])
    return "\n".join([*rows, "", f"cheapest: {rows[best + 2]}"])


def plot(hp: Hyperparameters, ranks: fit.Ranks, card: speed.Card, network: float, path: Path) -> None:
    """Draw memory by part over GPUs and strategies, and tokens/s per GPU of up to 10,000 GPUs in nodes of 8."""

    def planned(sharding: str, size: int, card: speed.Card | None) -> Plan:
        changes = {"sharding": sharding, "total_batch_size": None, "shard_group_size": None}
        some = replace(ranks, size=size, per_node=min(size, 8))
        return make_plan(hp.model_copy(update=changes), some, card, network)

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot requires a package: pip install matplotlib") from None
    counts = [*(2**power for power in range(14)), 10000]
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = []
    for count, sharding in itertools.product((n for n in counts if n <= ranks.size), SHARDINGS):
        if count > 8 or not sharding.startswith("hybrid"):  # otherwise a hybrid is the same as full- or grad-shard
            bottom = 0.0
            for color, (part, n_bytes) in enumerate(planned(sharding, count, None)["memory"].items()):
                left.bar(len(names), n_bytes / GIB, 0.8, bottom, color=f"C{color}", label="" if names else part)
                bottom += n_bytes / GIB
            names.append(f"{count} {sharding}")
    left.axhline(ranks.memory / GIB, color="k", linestyle="--", label=f"{card.name}: {ranks.memory / GIB:g} GiB")
    left.set_xticks(range(len(names)), names, rotation=90)
    left.set_ylabel("GiB per GPU")
    left.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    for sharding in ("full-shard", "hybrid-full-shard"):
        plans = [planned(sharding, n, card) for n in counts]
        right.plot(counts, [plan["tokens_per_second"] / plan["gpus"] for plan in plans], "o-", label=sharding)
    right.set(xscale="log", xlabel="GPUs", ylabel="tokens/s per GPU (not measured)", ylim=0)
    right.legend()
    figure.savefig(path, dpi=80)


def text(plan: Plan, hp: Hyperparameters) -> str:
    """Return the plan for a person to read."""
    adapters = f", {plan['trained'] / 1e6:,.1f}M trained" if plan["trained"] < plan["parameters"] else ""
    mesh = f"{plan['mesh']['replicate']} replicas x {plan['mesh']['shard']} shards"
    size = f"{plan['batch_size']} x {hp.max_seq_len} tokens, {plan['micro_batches']} micro-steps"
    host = f", {plan['host_available'] / GIB:.1f} GiB available" if plan["host_available"] else ""
    lines = [
        f"{plan['parameters'] / 1e6:,.1f}M parameters{adapters}; {plan['sharding']} over {mesh}",
        f"per GPU and step: {size}; {plan['tokens_per_step']:,} tokens per step in all\n",
        *fit.table(plan["memory"]),
        f"{fit.table({'peak': plan['peak']})[0]}, {plan['available'] / GIB:.1f} GiB available",
        f"{fit.table({'host': plan['host']})[0]} per node{host}",
        f"\n{'fits' if plan['fits'] else 'does not fit'}, as {fit.USABLE:.0%} of memory can be used",
        f"largest batch_size without accumulation: {plan['largest_batch_size']}",
    ]
    if "step" in plan:
        is_timed = plan["mfu"] is None
        source = "forward and backward timed on this CPU" if is_timed else "not measured on a GPU"
        links = [f"{n_bytes / 1e9:.1f} GB in the {link}" for link, n_bytes in plan["links"].items() if n_bytes]
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in plan["seconds"].items())
        lines += [
            "; ".join([f"{plan['flops'] / 1e12:,.1f} TFLOP per GPU and step", *links]),
            f"{plan['step']:.3f} s per step ({parts}), {source}",
            f"{plan['tokens_per_second']:,.0f} tokens/s" + ("" if is_timed else f", MFU {plan['mfu']:.1%}"),
        ]
    if "hours" in plan:
        lines += [f"{plan['hours']:,.2f} hours, {plan['hours'] * plan['gpus']:,.1f} GPU-hours"]
    return "\n".join(lines)


@oserror_as_config_error
def calibration(run: Path, card: speed.Card, network: float) -> float:
    """Return by which factor the steps of a run's last session take longer than predicted.

    Raises:
        ConfigError: it is not a run, or its last session has too few reports or another kind of device.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"--calibrate: {run}: is not a run directory: it has no metrics.jsonl")
    reports = read_records(run / "metrics.jsonl", {"step", "step_seconds"})
    reports = [report for report in reports if isinstance(report["step_seconds"], float)]
    sessions = read_records(run / "sessions.jsonl", {"step", "gpus", "device", "ranks"})
    session: dict[str, Any] = sessions[-1] if sessions else {"step": math.inf}
    seconds = [report["step_seconds"] for report in reports if report["step"] > session["step"]][1:]  # first: start-up
    if not seconds:
        raise ConfigError(f"--calibrate: {run}: the last session has fewer than two training reports; train longer")
    if (session["gpus"] == 0) != (card.device_type == "cpu"):
        raise ConfigError(f"--calibrate: {run} ran on {session['device']}; set --gpu to its kind (cpu for a CPU)")
    hp, size = config.load(run / "config.yaml", []), session["ranks"]
    nodes = -(-session["gpus"] // 8) or 1
    ranks = fit.Ranks(_dtype(hp, card), card.device_type, size, size // nodes, math.inf)
    return statistics.median(seconds) / make_plan(hp, ranks, card, network)["step"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: a value is unknown or out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m lm.plan", description="Predict the memory and time of a run.")
    add = parser.add_argument
    add("--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    add("--gpu", metavar="NAME", default="h100", help=f"one of {', '.join(speed.CARDS)} (%(default)s)")
    add("--memory", type=float, metavar="GIB", help="memory of an unknown GPU, without times")
    add("--host-memory", type=float, metavar="GIB", help="memory of a node (this machine's if it has such a GPU)")
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs (%(default)s)")
    add("--nodes", type=int, metavar="M", help="number of nodes (8 GPUs per node)")
    add("--network", type=float, default=50.0, metavar="GBPS", help="GB/s per GPU to other nodes (%(default)s)")
    add("--search", action="store_true", help="find the fastest settings on 1, 2, 4, ... N GPUs, and the cheapest")
    add("--plot", type=Path, metavar="FILE.png", help="draw memory by strategy and the speed of up to 10,000 GPUs")
    add("--calibrate", type=Path, metavar="RUN", help="scale times by those of the run in the directory RUN")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(arguments)
    on_cpu = args.gpu == "cpu"
    args.nodes = (1 if on_cpu else max(1, -(-args.gpus // 8))) if args.nodes is None else args.nodes
    near = difflib.get_close_matches(args.gpu, speed.CARDS, n=3, cutoff=0.3) or speed.CARDS
    is_timed = args.search or args.plot or args.calibrate
    can_divide = args.nodes < 1 or args.gpus % args.nodes == 0
    amounts = {"--memory": args.memory, "--host-memory": args.host_memory, "--network": args.network}
    amounts = {option: value for option, value in amounts.items() if value is not None}
    is_valid = {f"{option}: {n:g} must be finite and above 0": 0 < n < math.inf for option, n in amounts.items()}
    is_valid |= {
        f"--gpu: {args.gpu} is unknown; did you mean {', '.join(near)}? Or use --memory GIB": args.gpu in speed.CARDS,
        f"--gpus: {args.gpus} must be 1 or more": args.gpus >= 1,
        f"--nodes: {args.nodes} must be 1 or more": args.nodes >= 1,
        f"--nodes: {args.nodes} nodes cannot share {args.gpus} GPUs; set it to a divisor": can_divide,
        "--nodes: --gpu cpu plans for this machine; use one node": args.nodes <= 1 or not on_cpu,
        "--memory: --search, --plot and --calibrate need --gpu": not (args.memory and is_timed),
        "--plot: compares GPUs; set --gpu to one": not (args.plot and on_cpu),
    }
    if not all(is_valid.values()):
        raise ConfigError(*(problem for problem, valid in is_valid.items() if not valid))
    return args


def load(args: argparse.Namespace) -> Hyperparameters:
    """Read the experiment file. Weights that are not on this machine are not needed if `model` names their shape."""
    hp = config.load(args.config, args.overrides)
    if hp.init_from is not None and Path(hp.init_from).exists():
        return config.load(args.config, args.overrides, weights.model_defaults)
    if hp.init_from is not None and hp.model is None:
        problem = f"init_from: {hp.init_from} does not exist; set model to the preset with its shape"
        raise ConfigError(problem, keys=("init_from", "model"))
    return hp


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse(arguments)
    hp, card, per_node = load(args), speed.CARDS[args.gpu], args.gpus // args.nodes
    gib = args.memory or card.gib or host_memory()[0] / per_node / GIB
    host = args.host_memory * GIB if args.host_memory else math.inf
    if not args.host_memory and torch.cuda.is_available() and card.name in torch.cuda.get_device_name():
        host = host_memory()[0]
    ranks = fit.Ranks(_dtype(hp, card), card.device_type, args.gpus, per_node, round(gib * GIB), host)
    if args.calibrate:
        card = replace(card, slowdown=calibration(args.calibrate, card, args.network))
    if args.plot:
        plot(hp, ranks, card, args.network, args.plot)
    if args.search:
        plans = list(search(hp, ranks, card, args.network))
        if not plans:
            raise ConfigError(
                f"--search: no settings fit on {args.gpus} GPUs or fewer; increase --gpus, or set lora_rank"
            )
        print(json.dumps(plans) if args.json else search_table(plans))
        return 0
    plan = make_plan(hp, ranks, None if args.memory else card, args.network)
    plan["largest_batch_size"] = fit.largest_batch_size(hp, ranks)
    print(json.dumps(plan) if args.json else text(plan, hp))
    return 0


if __name__ == "__main__":
    sys.exit(main())
