"""Command: search hyperparameters on this machine, with the experiment file of a cluster.

    python -m lm.search FILE [key=value ...] [--parallel N] [--dry-run]

FILE is what `det experiment create FILE .` accepts: `searcher` single, random, grid or
adaptive_asha, and ranges under `hyperparameters`. Each trial is a run in `runs/<name>/trial-N/`.
What is known of a search is an Optuna study, `runs/<name>/search.journal`. Killed, it continues
when the same command is run again.

Reading order: `experiment` (the file), `search` (the study), `trials` (their processes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lm.command_line import number, path_argument
from lm.errors import ConfigError, Parser, command, open_standard_streams
from lm.launch.requirements import requires


def parse_search_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; raise ConfigError for what is wrong with it."""
    parser = Parser(
        prog="python -m lm.search",
        description="Search hyperparameters on this machine, by Optuna.",
        epilog="Run the same command again to continue.",
    )
    parser.add_argument(
        "file", type=path_argument, metavar="FILE", help="experiment file with a searcher"
    )
    argument_help = "hyperparameters to change, or searcher.KEY=VALUE"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=argument_help)
    parser.add_argument(
        "--parallel",
        type=number(int, 1),
        metavar="N",
        help="trials at once (default: one per GPU, or 1)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the file, and a point of each end; start none"
    )
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    open_standard_streams(lossy_stdout=True)
    args = parse_search_arguments(arguments)
    try:
        import optuna  # noqa: F401 - a second, which a wrong command line does not wait for
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(f"lm.search {requires('optuna')}") from None
    from lm.search.search import run_search

    return run_search(args.file, args.overrides, args.parallel, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
