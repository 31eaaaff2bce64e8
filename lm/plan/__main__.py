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

from lm.command_line import number, path_argument
from lm.config.reading import check_values
from lm.errors import ConfigError, Parser, command
from lm.plan.gpus import CARDS, GPUS_PER_NODE


def parse_plan_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: the nodes cannot share the GPUs.
    """
    parser = Parser(
        prog="python -m lm.plan", description="Measure the memory of a run without a GPU."
    )
    add = parser.add_argument
    add(
        "--config",
        type=path_argument,
        default=Path("config.yaml"),
        help="experiment file (%(default)s)",
    )
    add("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    add("--gpu", type=str.lower, choices=CARDS, default="h100", help="kind of GPU (%(default)s)")
    gib = number(float, 0.1, 1_000_000)
    add("--memory", type=gib, metavar="GIB", help="memory of another GPU")
    host_help = "memory of a node (this machine's if it has a GPU)"
    add("--host-memory", type=gib, metavar="GIB", help=host_help)
    gpus_help = "number of GPUs (%(default)s)"
    add("--gpus", type=number(int, 1), default=1, metavar="N", help=gpus_help)
    nodes_help = f"number of nodes ({GPUS_PER_NODE} GPUs per node)"
    add("--nodes", type=number(int, 1), metavar="M", help=nodes_help)
    args = parser.parse_intermixed_args(arguments)
    if args.nodes is None:
        args.nodes = max(1, math.ceil(args.gpus / GPUS_PER_NODE))
    if args.gpus % args.nodes:
        problem = f"{args.nodes} nodes cannot share {args.gpus} GPUs"
        raise ConfigError(f"--nodes: {problem}; set it to a divisor")
    args.card = "GPU"
    if args.memory is None:
        args.card = args.gpu
        args.memory = CARDS[args.gpu]
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
