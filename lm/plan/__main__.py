"""Command: measure the memory of a run without a GPU.

    python -m lm.plan --config FILE [key=value ...] [--gpu NAME | --memory GIB] [--gpus N]
        [--nodes M]

Takes the run's own step on fake tensors. Prints the memory of a GPU by part at the instant of the
step that needs most, whether that fits, the largest batch size, and if it does not fit which
settings and how many GPUs do. Host memory counts where it is known: from --host-memory, or on a
machine with such a GPU. Compared with FSDP's memory on CPUs; compiled runs on GPUs need less.
Ends with exit code 2 if it does not fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.config.reading import check_values
from lm.errors import ConfigError, command
from lm.fileio import home_path
from lm.plan.gpus import CARDS, GPUS_PER_NODE


def parse_plan_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: a value is unknown or out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lm.plan", description="Measure the memory of a run without a GPU."
    )
    add = parser.add_argument
    add(
        "--config",
        type=home_path,
        default=Path("config.yaml"),
        help="experiment file (%(default)s)",
    )
    add("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    add("--gpu", metavar="NAME", default="h100", help=f"{', '.join(CARDS)} (%(default)s)")
    add("--memory", type=float, metavar="GIB", help="memory of another GPU")
    host_help = "memory of a node (this machine's if it has a GPU)"
    add("--host-memory", type=float, metavar="GIB", help=host_help)
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs (%(default)s)")
    nodes_help = f"number of nodes ({GPUS_PER_NODE} GPUs per node)"
    add("--nodes", type=int, metavar="M", help=nodes_help)
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_intermixed_args(arguments)
    if args.nodes is None:
        args.nodes = max(1, math.ceil(args.gpus / GPUS_PER_NODE))

    problems: list[str] = []
    card = args.gpu.lower().removeprefix("rtx").strip(" -")
    if args.memory is None and card not in CARDS:
        near = [name for name in CARDS if name.startswith(card) or card.startswith(name)]
        remedy = f"did you mean {' or '.join(near)}" if near else f"use one of {', '.join(CARDS)}"
        problems.append(f"--gpu: {args.gpu} is unknown; {remedy}, or --memory GIB")
    if args.gpus < 1:
        problems.append(f"--gpus: {args.gpus} must be 1 or more")
    if args.nodes < 1:
        problems.append(f"--nodes: {args.nodes} must be 1 or more")
    elif args.gpus % args.nodes:
        problems.append(
            f"--nodes: {args.nodes} nodes cannot share {args.gpus} GPUs; set it to a divisor"
        )
    for option, value in {"--memory": args.memory, "--host-memory": args.host_memory}.items():
        if value is not None and not 0 < value < math.inf:
            problems.append(f"{option}: {value:g} must be finite and above 0")
    if problems:
        raise ConfigError(*problems)
    args.card = "GPU"
    if args.memory is None:
        args.card = card
        args.memory = CARDS[card]
    return args


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_plan_arguments(arguments)
    check_values(args.config, args.overrides)

    from lm.plan.describe import describe_plan  # imports PyTorch, which takes seconds

    plan = describe_plan(args)
    print(plan.text)
    return 0 if plan.fits else 2


if __name__ == "__main__":
    sys.exit(main())
