"""Command: search hyperparameters on this machine, with the experiment file of a cluster.

    python -m lm.search FILE [key=value ...] [--parallel N]

FILE is what `det experiment create FILE .` accepts: `searcher` single, random, grid or
adaptive_asha, and ranges under `hyperparameters`. Each trial is a run in `runs/<name>/trial-N/`. At
a rung it saves a checkpoint and ends; if it survives, it resumes. What is known of a search is
`runs/<name>/search.json`, which has the points, and the files of its trials, from which every
decision is computed again. Killed, it continues when the same command is run again.

Reading order: `experiment` (the file), `halving` (who survives), `trials`, `search`, `runner`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lm.errors import (
    ConfigError,
    RunError,
    command,
    open_standard_streams,
    oserror_as_config_error,
)
from lm.fileio import home_path
from lm.launch.launch import exit_code_of_stop
from lm.search.experiment import MAX_TRIALS
from lm.search.halving import Replay
from lm.search.report import Table, explain_overtaken, write_report
from lm.search.runner import Devices, Runner
from lm.search.search import Search


def parse_search_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.search",
        description="Search hyperparameters on this machine.",
        epilog="Run the same command again to continue.",
    )
    parser.add_argument(
        "file", type=home_path, metavar="FILE", help="experiment file with a searcher"
    )
    argument_help = "hyperparameters to change, or searcher.KEY=VALUE"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=argument_help)
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="trials at once (default: one per GPU, or 1)"
    )
    args = parser.parse_intermixed_args(arguments)
    if args.parallel is not None and not 1 <= args.parallel <= MAX_TRIALS:
        raise ConfigError(f"--parallel: {args.parallel} must be from 1 to {MAX_TRIALS}")
    return args


def finish(search: Search, replay: Replay, table: Table) -> int:
    """Write the report, and say which trial is the best. Return the exit code."""
    search.require_unchanged(*search.trials)
    search.require_same_inputs(*[trial for trial in search.trials if trial.values()])
    rows = search.ranked(search.rows(replay.standings))
    table.show(rows, set())
    best = rows[0]
    if not best.values:
        reasons = {row.note for row in rows}
        raise RunError(f"{search.path}: no trial has a result", *sorted(reasons)[:5])
    metric = search.experiment.searcher.metric
    arguments = search.command_of(best)
    note = explain_overtaken(search.overtaken(rows))
    written = write_report(search.path, rows, metric, arguments, note)
    table.end(best, metric, arguments, written, note)
    return 0


@oserror_as_config_error
def open_search(args: argparse.Namespace) -> tuple[Search, Devices]:
    """Read the experiment file, find the devices, and save the points of the search."""
    search = Search(args.file, args.overrides)
    devices = Devices(search.experiment.slots, args.parallel)
    search.save()
    return search, devices


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    open_standard_streams(lossy_stdout=True)
    args = parse_search_arguments(arguments)
    search, devices = open_search(args)
    table = Table(search.experiment.searcher.metric)
    runner = Runner(search, devices, table)
    runner.install_signals()
    replay = runner.run()
    if replay.waiting:
        rows = search.rows(replay.standings)
        table.show(rows, set())
        print(f"stopped as requested; rerun the same command to continue {search.path}")
        return exit_code_of_stop(os.environ)
    return finish(search, replay, table)


if __name__ == "__main__":
    sys.exit(main())
