"""Command line for predicting the memory and the time of a training run, without a GPU.

    python -m lm.plan --config FILE [key=value ...] [--gpu NAME | --memory GIB] [--gpus N] [--nodes M] [--search]

Prints what a GPU holds at the moment of a step that needs most, whether that fits, the largest batch size, and how fast
the run is. --search prints the fastest sharding, recomputation and batch size on 1, 2, 4, ... N GPUs. --calibrate RUN
scales times by those of a run with this configuration. Memory is tested against FSDP on fake tensors and on CPUs;
neither memory nor time was measured on a GPU.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lm import config, parallelize
from lm.config import Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.errors import ConfigError, command
from lm.hf import weights
from lm.plan import fit, memory, speed
from lm.plan.fit import GIB
from lm.plan.trace import trace

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, None: None}
"""Compute dtype on a GPU that has bfloat16, by `amp_dtype`; None = float32."""
SHARDINGS = ("full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard")
RECOMPUTATION = ("none", "selective", "full")

Plan = dict[str, Any]


def make_plan(
    hp: Hyperparameters, gpus: int, nodes: int, gib: float, card: speed.Card | None, network: float = 50.0
) -> Plan:
    """Predict a run on `gpus` GPUs of `gib` GiB in `nodes` nodes, and its times if they are a known `card`.

    Returns:
        Bytes are those of a GPU. "host" is what it needs of its node's memory: the copy for an asynchronous checkpoint,
        and what `cpu_offload` moves there.

    Raises:
        ConfigError: the GPUs cannot be divided into shard groups, or the global batch into micro-batches.
    """
    dtype, node = DTYPES[hp.amp_dtype], gpus // nodes
    mesh = parallelize.mesh_dims(hp, gpus, node)
    global_batch_size = derive_global_batch_size(hp, gpus)
    n_micro_batches = global_batch_size // (hp.batch_size * gpus)
    parts, total = fit.need(hp, dtype, "cuda", gpus, node), memory.count(hp, dtype)
    host = 12 * total.trained // mesh["shard"] if hp.async_checkpoint else 0
    host += fit.state_bytes(hp, dtype, mesh["shard"]) if hp.cpu_offload else 0
    plan: Plan = {"parameters": total.n, "trained": total.trained, "gpus": gpus, "nodes": nodes, "mesh": mesh}
    plan |= {"sharding": hp.sharding, "activation_checkpointing": hp.activation_checkpointing}
    plan |= {"batch_size": hp.batch_size, "micro_batches": n_micro_batches, "memory": parts, "host": host}
    plan |= {"peak": sum(parts.values()), "available": round(gib * GIB)}
    plan["fits"] = plan["peak"] <= fit.USABLE * plan["available"]
    tokens = plan["tokens_per_step"] = global_batch_size * hp.max_seq_len
    if card:
        without = hp.model_copy(update={"activation_checkpointing": "none"})
        saved = hp.n_layers * trace(without, dtype, "cuda", hp.compile is not False).block.held
        shape = mesh["shard"], mesh["replicate"], node, network, n_micro_batches
        plan |= speed.step_time(hp, dtype, card, *shape, saved)
        plan |= {"tokens_per_second": tokens / plan["step"], "mfu": plan["flops"] / plan["step"] / card.flops}
        if hp.max_epochs is None:
            plan["hours"] = plan["step"] * hp.run_length(None) / 3600
    return plan


def search(
    hp: Hyperparameters, gpus: int, per_node: int, gib: float, card: speed.Card, network: float
) -> Iterator[Plan]:
    """Yield for 1, 2, 4, ... `gpus` GPUs the fastest plan that fits, if any."""
    for count in (2**power for power in range(gpus.bit_length())):
        nodes, found = max(1, count // per_node), []
        shardings = SHARDINGS if nodes > 1 else SHARDINGS[:3] if count > 1 else SHARDINGS[:1]
        for sharding, mode in itertools.product(shardings, RECOMPUTATION):
            for size in (1, 2, 4, 8, 16, 32, 64):
                changes = {"sharding": sharding, "activation_checkpointing": mode, "batch_size": size}
                if hp.total_batch_size and hp.total_batch_size % (size * count):
                    continue
                plan = make_plan(hp.model_copy(update=changes), count, nodes, gib, card, network)
                if not plan["fits"]:
                    break
                found.append(plan)
        yield from sorted(found, key=lambda plan: -plan["tokens_per_second"])[:1]


def text(plan: Plan, hp: Hyperparameters) -> str:
    """Return the plan for a person to read."""
    adapters = f", {plan['trained'] / 1e6:,.1f}M trained" if plan["trained"] < plan["parameters"] else ""
    mesh = f"{plan['mesh']['replicate']} replicas x {plan['mesh']['shard']} shards"
    lines = [f"{plan['parameters'] / 1e6:,.1f}M parameters{adapters}; {plan['sharding']} over {mesh}"]
    size = f"{plan['batch_size']} x {hp.max_seq_len} tokens, {plan['micro_batches']} micro-steps"
    lines += [f"per GPU and step: {size}; {plan['tokens_per_step']:,} tokens per step in all", ""]
    lines += [f"{part:<14}{n_bytes / GIB:8.2f} GiB" for part, n_bytes in plan["memory"].items()]
    verdict = "fits" if plan["fits"] else "does not fit"
    limit = f"{fit.USABLE:.0%} of {plan['available'] / GIB:.1f} GiB can be used"
    lines += [f"{'peak':<14}{plan['peak'] / GIB:8.2f} GiB: {verdict}, {limit}"]
    lines += [f"{'host':<14}{plan['host'] / GIB:8.2f} GiB of the node's memory", ""]
    lines += [f"largest batch_size without accumulation: {plan['largest_batch_size']}"]
    if "step" in plan:
        links = " and ".join(
            f"{n_bytes / 1e9:.1f} GB over {link}" for link, n_bytes in plan["links"].items() if n_bytes
        )
        lines += [f"{plan['flops'] / 1e12:,.1f} TFLOP per GPU and step{links and '; '}{links}"]
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in plan["seconds"].items())
        lines += [f"{plan['step']:.3f} s per step ({parts}), not measured on a GPU"]
        lines += [f"{plan['tokens_per_second']:,.0f} tokens/s, MFU {plan['mfu']:.1%}"]
    if "hours" in plan:
        lines += [f"{plan['hours']:,.2f} hours, {plan['hours'] * plan['gpus']:,.1f} GPU-hours"]
    return "\n".join(lines)


def measured_seconds(run: Path) -> float:
    """Return the median step time of a run, without its first report; raise ConfigError if it has no other."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"--calibrate: {path} does not exist; name the directory of a run")
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = [report["step_seconds"] for report in reports if report["group"] == "training"][1:]
    if not seconds:
        raise ConfigError(f"--calibrate: {path} has fewer than two training reports; train longer")
    return statistics.median(seconds)


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
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs (%(default)s)")
    add("--nodes", type=int, metavar="M", help="number of nodes (8 GPUs per node)")
    add("--network", type=float, default=50.0, metavar="GBPS", help="GB/s per GPU to other nodes (%(default)s)")
    add("--search", action="store_true", help="find the fastest settings on 1, 2, 4, ... N GPUs")
    add("--calibrate", type=Path, metavar="RUN", help="scale times by those of a run with this configuration")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(arguments)
    args.nodes = args.nodes or max(1, -(-args.gpus // 8))
    near = difflib.get_close_matches(args.gpu, speed.CARDS, n=3, cutoff=0.3) or speed.CARDS
    is_valid = {
        f"--gpu: {args.gpu} is unknown; did you mean {', '.join(near)}? Or use --memory GIB": args.gpu in speed.CARDS,
        f"--gpus: {args.gpus} must be 1 or more": args.gpus >= 1,
        f"--gpus: {args.gpus} GPUs cannot be divided among {args.nodes} nodes": args.gpus % args.nodes == 0,
        f"--memory: {args.memory or 0:g} must be above 0": args.memory is None or args.memory > 0,
        f"--network: {args.network:g} must be above 0": args.network > 0,
        "--memory: --search and --calibrate need --gpu": not (args.memory and (args.search or args.calibrate)),
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
    hp, card = load(args), None if args.memory else speed.CARDS[args.gpu]
    gib = args.memory or speed.CARDS[args.gpu].gib
    if args.search:
        assert card
        plans = list(search(hp, args.gpus, max(1, args.gpus // args.nodes), gib, card, args.network))
        if not plans:
            raise ConfigError(f"--search: nothing fits on up to {args.gpus} GPUs; use more, or lora_rank")
        rows = [
            "| GPUs | sharding | recomputation | batch_size | GiB | tokens/s | MFU |",
            "|---|---|---|---|---|---|---|",
        ]
        for plan in plans:
            settings = (str(plan[key]) for key in ("gpus", "sharding", "activation_checkpointing", "batch_size"))
            rate = f"{plan['peak'] / GIB:.1f} | {plan['tokens_per_second']:,.0f} | {plan['mfu']:.0%}"
            rows.append(f"| {' | '.join(settings)} | {rate} |")
        print(json.dumps(plans) if args.json else "\n".join(rows))
        return 0
    plan = make_plan(hp, args.gpus, args.nodes, gib, card, args.network)
    if args.calibrate:
        factor = measured_seconds(args.calibrate) / plan["step"]
        plan |= {"step": plan["step"] * factor, "mfu": plan["mfu"] / factor, "hours": plan.get("hours", 0.0) * factor}
        plan["tokens_per_second"] /= factor
    limit = fit.USABLE * plan["available"]
    size = fit.largest_batch_size(hp, DTYPES[hp.amp_dtype], args.gpus, args.gpus // args.nodes, limit)
    plan["largest_batch_size"] = size
    print(json.dumps(plan) if args.json else text(plan, hp))
    return 0


if __name__ == "__main__":
    sys.exit(main())
