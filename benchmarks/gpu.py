"""Speed, memory and saving on one GPU, with models of 1B and 8B parameters, in eight minutes.

    python -m benchmarks.gpu [POINT ...] [--out gpu.jsonl] [--limit SECONDS]
    python -m benchmarks.gpu [POINT ...] --pairs

Points, most valuable first: the machine, the quick GPU tests (while the first model compiles),
Llama 3.2 1B in bfloat16, what asynchronous saves and the training loop add to its step, 1B in
float8, a slice of Llama 3 8B in both, all of 8B, and kernels alone. `--pairs` instead compares
settings A with B and C, measures A first and last, and says of what was predicted for an H200
whether it held or is refuted (`benchmarks.gpu_pairs`).

One process measures all points, and writes a line of JSON to `--out` after each. The command ends
after `--limit` seconds. Run it again for the rest: points with a result, an error or a crash are
not repeated. The log of the runs is next to `--out`. `--table` prints the results as Markdown;
`--tiny` uses tiny sizes, also on a CPU. Checkpoints go to TMPDIR: choose one on a fast disk or in
memory.

Step times are those of three rounds after three steps of warm-up, in pairs of four steps after two;
clocks and power are sampled ten times a second meanwhile. MFU is causal (half of the
attention square), without embeddings, relative to the dense 16-bit peak, also in float8. The shares
of a profiled step are defined in `benchmarks.common.compute_shares`; its own time is next to them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import SHARES, format_spread
from lm.launch.process import die_with_parent

Row = dict[str, Any]
"""A line of results: `point`, and what was measured, or `error`, or `started` before it runs."""

HEAD = [
    "point",
    "tokens/s",
    "step s (spread)",
    "MFU",
    "peak GiB",
    "first step s",
    "profiled s",
    *SHARES,
    "clock, power",
]
HEAD_OF_PAIRS = ["pair", "number", "predicted", "refuted above", "found"]


def read_rows(path: Path) -> dict[str, Row]:
    """Return the last row of every point in the file `path`."""
    rows: dict[str, Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["point"]] = row
    return rows


def append_row(path: Path, row: Row) -> None:
    """Append `row` to the file `path` and print it."""
    line = json.dumps(row)
    with path.open("a") as file:
        file.write(line + "\n")
    if "started" not in row:
        print(line, file=sys.__stdout__, flush=True)


def measure_points(args: argparse.Namespace) -> None:
    """Run the points that have no result until the time limit.

    A process measures them one after another. If it crashes, another measures the rest.
    """
    deadline = time.monotonic() + args.limit
    options = {"pairs": args.pairs, "tiny": args.tiny, "names": args.points}
    command = [sys.executable, "-m", "benchmarks.gpu_points", str(args.out), json.dumps(options)]
    kill_with_parent = partial(die_with_parent, os.getpid(), signal.SIGKILL)
    with args.out.with_suffix(".log").open("a") as log:
        while True:
            start = time.time()
            worker = subprocess.Popen(command, stderr=log, preexec_fn=kill_with_parent)
            try:
                code = worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                advice = "run the same command again for the rest"
                print(f"stopped after {args.limit:g} s; {advice}", file=sys.stderr)
                return
            rows = read_rows(args.out).values()
            crashed = [row["point"] for row in rows if row.get("started", 0.0) >= start]
            for point in crashed:
                error = f"crashed with exit code {code}"
                append_row(args.out, {"point": point, "error": error})
            if code == 0:
                return
            if not crashed:
                sys.exit(f"exit code {code} before the first point: see {log.name}")


def format_rows(rows: Iterable[Row]) -> str:
    """Return the steps as a Markdown table, and a line per other result."""
    steps: list[Sequence[str]] = []
    numbers: list[Sequence[str]] = []
    others: list[str] = []
    for row in rows:
        if "step_seconds" in row:
            steps.append(_format_step(row))
        elif "verdict" in row:
            numbers += _format_pair(row)
            others.append(f"- {row['point']}: {row['verdict']}")
        elif "error" in row:
            others.append(f"- {row['point']}: failed: {row['error']}")
        elif "started" not in row:
            values = [f"{key} {_format_value(row[key])}" for key in row if key != "point"]
            others.append(f"- {row['point']}: {', '.join(values)}")
    lines: list[str] = []
    for head, body in ((HEAD, steps), (HEAD_OF_PAIRS, numbers)):
        if body:
            lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
            lines += [f"| {' | '.join(cells)} |" for cells in body]
            lines.append("")
    return "\n".join([*lines, *others])


def _format_pair(row: Row) -> list[Sequence[str]]:
    """Return rows of the table with the columns `HEAD_OF_PAIRS`."""
    cells: list[Sequence[str]] = []
    for number, value in row["found"].items():
        predicted = _format_value(row["predicted"].get(number, ""))
        limit = _format_value(row["refuted_above"].get(number, ""))
        found = "" if value is None else _format_value(value)
        cells.append([row["point"], number, predicted, limit, found])
    return cells


def _format_step(row: Row) -> Sequence[str]:
    """Return the cells of the table with the columns `HEAD`."""
    seconds = row["step_seconds"]
    mfu = ""
    if row["mfu"]:
        mfu = f"{row['mfu']:.1%}"
    return [
        row["point"],
        f"{row['tokens'] / statistics.median(seconds):,.0f}",
        format_spread(seconds, 4),
        mfu,
        f"{row['peak_gib']:.1f}",
        f"{row['first_step']:.1f}",
        f"{row['profiled_seconds']:.4f}",
        *(f"{row['shares'][part]:.1%}" for part in SHARES),
        row["clocks"],
    ]


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_format_value(item) for item in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    points_help = "names of the points to measure (default: all)"
    add("points", nargs="*", metavar="POINT", help=points_help)
    add("--out", type=Path, default=Path("gpu.jsonl"), help="file of results (%(default)s)")
    add("--limit", type=float, help="seconds (480, of pairs 400)")
    add("--pairs", action="store_true", help="compare settings, and predictions with what is found")
    add("--tiny", action="store_true", help="tiny sizes, also on a CPU")
    add("--table", action="store_true", help="print the results, measure nothing")
    args = parser.parse_args(arguments)
    if args.limit is None:
        args.limit = 400 if args.pairs else 480
    if not args.table:
        measure_points(args)
    print(format_rows(read_rows(args.out).values()))


if __name__ == "__main__":
    main()
