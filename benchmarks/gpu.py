"""Speed, memory and saving on one GPU, with models of 1B and 8B parameters, in eight minutes.

    python -m benchmarks.gpu [POINT ...] [--out gpu.jsonl] [--limit 480]
    python -m benchmarks.gpu [POINT ...] --pairs

Points, most valuable first: the machine, the quick GPU tests (while the first model compiles),
Llama 3.2 1B in bfloat16, what asynchronous saves and the training loop add to its step, 1B in
float8, a slice of Llama 3 8B in both, all of 8B, and kernels alone. `--pairs` measures settings A
and B in turns (A, B, A, B) instead.

One process measures all points, and writes a line of JSON to `--out` after each. The command ends
after `--limit` seconds. Run it again for the rest: points with a result, an error or a crash are
not repeated. The log of the runs is next to `--out`. `--table` prints the results as Markdown;
`--tiny` uses tiny sizes, also on a CPU. Checkpoints go to TMPDIR: choose one on a fast disk or in
memory.

Step times are those of three rounds after three steps of warm-up. MFU is causal (half of the
attention square), without embeddings, relative to the dense 16-bit peak, also in float8. The shares
of a profiled step are defined in `benchmarks.common.shares`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import SHARES, spread
from lm.launch.spawn import die_with_parent

Row = dict[str, Any]
"""A line of results: `point`, and what was measured, or `error`; or `started`, before the point runs."""

HEAD = [
    "point",
    "tokens/s",
    "step s (spread)",
    "MFU",
    "peak GiB",
    "first step s",
    *SHARES,
    "clock, power",
]


def read(path: Path) -> dict[str, Row]:
    """Return the last row of every point in the file `path`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["point"]: row for row in map(json.loads, lines)}


def write(path: Path, row: Row) -> None:
    """Append `row` to the file `path` and print it."""
    line = json.dumps(row)
    with path.open("a") as file:
        file.write(line + "\n")
    if "started" not in row:
        print(line, file=sys.__stdout__, flush=True)


def measure(args: argparse.Namespace) -> None:
    """Run the points that have no result until the time limit."""
    deadline = time.monotonic() + args.limit
    command = [sys.executable, "-m", "benchmarks.gpu_points", str(args.out)]
    command += [json.dumps({"pairs": args.pairs, "tiny": args.tiny, "names": args.points})]
    with args.out.with_suffix(".log").open("a") as log:
        code: int | None = 1
        while code:
            start = time.time()
            worker = subprocess.Popen(
                command, stderr=log, preexec_fn=partial(die_with_parent, signal.SIGKILL)
            )
            try:
                code = worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                print(
                    f"stopped after {args.limit:g} s; run the same command again for the rest",
                    file=sys.stderr,
                )
                return
            crashed = [row for row in read(args.out).values() if row.get("started", 0.0) >= start]
            if code and not crashed:
                sys.exit(f"exit code {code} before the first point: see {log.name}")
            for row in crashed:
                write(args.out, {"point": row["point"], "error": f"crashed with exit code {code}"})


def table(rows: Iterable[Row]) -> str:
    """Return the steps as a Markdown table, and a line per other result."""
    steps, lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)], []
    for row in rows:
        if "step_seconds" in row:
            seconds, parts = row["step_seconds"], [f"{row['shares'][part]:.1%}" for part in SHARES]
            tokens, mfu = (
                row["tokens"] / statistics.median(seconds),
                f"{row['mfu']:.1%}" if row["mfu"] else "",
            )
            cells = [
                row["point"],
                f"{tokens:,.0f}",
                spread(seconds, 4),
                mfu,
                f"{row['peak_gib']:.1f}",
            ]
            steps.append(
                f"| {' | '.join([*cells, format(row['first_step'], '.1f'), *parts, row['clocks']])} |"
            )
        elif "error" in row:
            lines.append(f"- {row['point']}: failed: {row['error']}")
        elif "started" not in row:
            lines.append(
                f"- {row['point']}: {', '.join(f'{k} {_shown(v)}' for k, v in row.items() if k != 'point')}"
            )
    return "\n".join([*steps, "", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "points", nargs="*", metavar="POINT", help="names of the points to measure (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.jsonl"), help="file of results (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=480, help="seconds (%(default)s)")
    parser.add_argument("--pairs", action="store_true", help="measure settings A and B in turns")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--table", action="store_true", help="print the results, measure nothing")
    args = parser.parse_args(arguments)
    if not args.table:
        measure(args)
    print(table(read(args.out).values()))


if __name__ == "__main__":
    main()
