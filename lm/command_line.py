"""The command line of fsdp.py, and how it is written again."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.fileio import home_path


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--lr=1e-3` and `--lr 1e-3` on a command line to `lr=1e-3`.

    Leaves out `--local-rank`, which torch.distributed.launch and DeepSpeed add to LOCAL_RANK.
    """
    rewritten: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        key, equals, value = argument.removeprefix("--").partition("=")
        is_option = key in ("", "config", "dry-run", "help")
        if is_option or not argument.startswith("--"):
            rewritten.append(argument)
            continue
        if not equals:
            value = next(rest, "")
        name = key.replace("-", "_")
        if name != "local_rank":
            rewritten.append(f"{name}={value}")
    return rewritten


def rerun_command(*overrides: str) -> str:
    """Return the command of this process with other `overrides`, as make spells it if make ran it.

    Launchers other than make, lm.launch and torchrun on one machine are left out.
    """
    changed = {override.partition("=")[0] for override in overrides}
    arguments: list[str] = []
    for argument in as_overrides(sys.argv[1:]):
        key, equals, _ = argument.partition("=")
        is_replaced = equals != "" and key in changed
        if argument != "--dry-run" and not is_replaced:
            arguments.append(argument)
    arguments += overrides
    target = os.environ.get("MAKE_TARGET")
    if target is None:
        return shlex.join([*_launcher(), sys.argv[0], *arguments])
    _, config, *hyperparameters = arguments  # as in the Makefile
    variables = [f"CONFIG={shlex.quote(config)}"]
    if os.environ.get("NPROC"):  # on make's command line
        variables.append(f"NPROC={os.environ['NPROC']}")
    args = shlex.join(hyperparameters).replace("$", "$$")
    if re.search(r"[\"$`\\!]", args):
        args = shlex.quote(args)
    else:
        args = f'"{args}"'
    return f"make {target} {' '.join(variables)} ARGS={args}"


def _launcher() -> list[str]:
    """Return what comes before the script in the command of this process."""
    if "LAUNCH_COMMAND" in os.environ:
        return shlex.split(os.environ["LAUNCH_COMMAND"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return [sys.orig_argv[0]]  # Python, as it was typed


HELP = "python -m lm.config lists all hyperparameters, python -m lm.config KEY describes one."


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of fsdp.py: `config`, `overrides`, `dry_run`.

    Args:
        arguments: None = those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Train a language model with PyTorch FSDP.", epilog=HELP
    )
    parser.add_argument(
        "--config", type=home_path, default=Path("config.yaml"), help="experiment (%(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="hyperparameters to change"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the memory of a step, then exit",
    )
    if arguments is None:
        arguments = sys.argv[1:]
    return parser.parse_intermixed_args(as_overrides(arguments))
