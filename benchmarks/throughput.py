"""Speed and memory of fsdp.py and of reference loops, measured alternately on one machine.

    python -m benchmarks.throughput [--config config.yaml] [key=value ...]
        [--contenders ours fsdp1-bfloat16]
    python -m benchmarks.throughput --sweep batch_size=1,2,4 max_seq_len=512,1024,2048
        --plot sweep.png

Contenders: `ours`, fsdp.py; `loop-fsdp2` and `loop-ddp`, our model in the loop of a tutorial with
`fully_shard` or DistributedDataParallel, clipped gradients and fused AdamW; `fsdp1-float32` and
`fsdp1-bfloat16`, FullyShardedDataParallel with transformer_auto_wrap_policy, autocast and AdamW;
`transformers`, Hugging Face's model with FSDP2 in the run's dtype; `torchtitan`, its Llama,
compiled and sharded by its code, if installed (pip install "torchtitan<0.3" triton).
`ours+key=value` changes hyperparameters of ours. Every contender has its own processes and trains
the same batch size; they alternate round by round. If a GPU cannot hold all of them, use
`--alone`. A newcomer's size, next to loops that do the same:

    python -m benchmarks.throughput --config recipes/quickstart.yaml optimizer=adamw grad_clip=1
        --contenders ours loop-fsdp2 ours+sharding=no-shard loop-ddp

Step times are medians over rounds. MFU is causal (half of the attention square), without
embeddings, relative to the GPU's dense 16-bit peak, or to the measured speed of 2048 x 2048 matrix
products on all ranks of a CPU. Shares are those of a profiled round on rank 0, see
`benchmarks.common.compute_shares`; the data share is what the run reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import (
    REPOSITORY,
    SHARES,
    compute_shares,
    format_spread,
    launch_command,
    make_environment,
)
from benchmarks.contender import MARK, convert_to_llama
from lm.config.reading import load_hyperparameters
from lm.data.config import derive_global_batch_size
from lm.launch.spawn import default_n_ranks

CONTENDERS = ["ours+compile=true", "fsdp1-float32", "fsdp1-bfloat16", "transformers"]
if find_spec("torchtitan"):
    CONTENDERS.append("torchtitan")
ENDLESS = ["max_steps=1000000000", "checkpoint_rate=1000000000", "validation_rate=1000000000"]
PARTS = (*SHARES, "data")
"""of a step, in the table"""


class EndedError(Exception):
    """The processes of a contender exited, most often out of memory."""


class Contender:
    """The processes of one contender, which train on command.

    Raises:
        EndedError: of all methods.
    """

    def __init__(self, name: str, file: Path, overrides: Sequence[str], processes: int) -> None:
        kind, *changes = name.split("+")
        self.directory = tempfile.TemporaryDirectory()
        self._errors = (Path(self.directory.name) / "errors").open("w+")
        settings = [*ENDLESS, "report_rate=2", *overrides, *changes]
        arguments = [kind, str(file.absolute()), *settings]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            launch_command(processes, "benchmarks/contender.py", *arguments),
            cwd=self.directory.name,
            env=make_environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self._read_answer()
        except EndedError:
            self.close()
            raise
        self.first_step = time.perf_counter() - start

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._errors.seek(0)
        raise EndedError("".join(self._errors.readlines()[-5:]))

    def command(self, *words: object) -> dict[str, Any]:
        """Send a command, and return the answer; see `benchmarks.contender`."""
        assert self._process.stdin is not None
        try:
            print(*words, file=self._process.stdin, flush=True)
        except OSError as error:
            raise EndedError(str(error)) from None
        return self._read_answer()

    def profile(self, steps: int) -> tuple[dict[str, float], float | None]:
        """Return the shares of profiled steps on rank 0, and the peak of all ranks (FLOP/s)."""
        trace = Path(self.directory.name) / "trace.json"
        answer = self.command("profile", steps, trace)
        events = json.loads(trace.read_text())["traceEvents"]
        parts = compute_shares(events, answer["seconds"])
        for reports in Path(self.directory.name).glob("runs/*/metrics.jsonl"):
            last = json.loads(reports.read_text().splitlines()[-1])
            parts["data"] = last["waiting_for_data_percent"] / 100
        return parts, answer["peak_flops"]

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # already exited
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self.directory.cleanup()


@dataclass
class Result:
    """Measurements of one contender; times in seconds."""

    name: str
    first_step: float
    tokens: int  # per step
    flops: float  # per step
    steps: list[float] = field(default_factory=list)  # mean step time of each round
    peak_gib: float = 0.0
    peak_flops: float | None = None  # of all ranks
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    @property
    def mfu(self) -> float | None:
        if self.peak_flops is None:
            return None
        return self.flops / self.step / self.peak_flops

    def cells(self, first: Result) -> dict[str, str]:
        """Return the cells of a row of the table by the name of their column."""
        rounds = zip(self.steps, first.steps, strict=True)
        ratio = statistics.median(time / reference for time, reference in rounds)
        cells = {
            "contender": self.name,
            "tokens/s": f"{self.tokens / self.step:,.0f}",
            "step s (spread)": format_spread(self.steps, 3),
            "x first's time": f"{ratio:.2f}",
            "MFU": "",
            "peak GiB": f"{self.peak_gib:.2f}",
            "first step s": f"{self.first_step:.1f}",
        }
        if self.mfu is not None:
            cells["MFU"] = f"{self.mfu:.1%}"
        for part in PARTS:
            cells[part] = ""
            if part in self.shares:
                cells[part] = f"{self.shares[part]:.1%}"
        return cells


def measure_contenders(
    names: Sequence[str], args: argparse.Namespace, overrides: Sequence[str]
) -> list[Result]:
    """Measure the contenders `names`; those that run out of memory have no result."""
    running: dict[str, Contender] = {}
    results: dict[str, Result] = {}

    def drop(name: str, error: EndedError) -> None:
        print(f"{name} {' '.join(overrides)}: failed: {str(error).strip()}", file=sys.stderr)
        del results[name]
        running.pop(name).close()

    for name in names:
        try:
            contender = Contender(name, args.config, overrides, args.nproc)
        except EndedError as error:
            print(f"{name} {' '.join(overrides)}: failed: {str(error).strip()}", file=sys.stderr)
            continue
        running[name] = contender
        results[name] = _expect_result(name, contender, args, overrides)
    for turn in range(args.rounds + 1):
        for name, contender in list(running.items()):
            try:
                answer = contender.command("run", args.steps)
            except EndedError as error:
                drop(name, error)
                continue
            results[name].peak_gib = answer["peak_gib"]
            is_warmup = turn == 0
            if not is_warmup:
                results[name].steps.append(answer["seconds"] / answer["steps"])
    for name, contender in list(running.items()):
        try:
            results[name].shares, results[name].peak_flops = contender.profile(2)
        except EndedError as error:
            drop(name, error)
            continue
        running.pop(name).close()

    peaks = [result.peak_flops for result in results.values() if result.peak_flops is not None]
    if peaks:
        for result in results.values():
            result.peak_flops = max(peaks)  # one for all
    return list(results.values())


def _expect_result(
    name: str, contender: Contender, args: argparse.Namespace, overrides: Sequence[str]
) -> Result:
    """Return the result of a contender, before it is measured."""
    _, *changes = name.split("+")
    hp = load_hyperparameters(args.config, [*overrides, *changes])
    if name == "torchtitan":
        hp = convert_to_llama(hp)
    tokens = derive_global_batch_size(hp.data, args.nproc) * hp.model.max_seq_len
    flops = tokens * hp.own_model.flops_per_token(hp.model.max_seq_len)
    return Result(name, contender.first_step, tokens, flops)


def format_results(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    if not results:
        return "all contenders failed"
    rows = [result.cells(results[0]) for result in results]
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    return "\n".join(lines)


def result_to_json(result: Result) -> dict[str, Any]:
    return vars(result) | {"tokens_per_second": result.tokens / result.step, "mfu": result.mfu}


@dataclass(frozen=True)
class SweepPoint:
    """Swept hyperparameters, and what was measured with them."""

    settings: dict[str, str]
    results: list[Result]


def plot_sweep(path: Path, points: Sequence[SweepPoint]) -> None:
    """Plot tokens/s over the last swept hyperparameter.

    Each contender has a line for each combination of the others.
    """
    from matplotlib.figure import Figure

    *other_keys, last_key = points[0].settings
    lines: dict[str, list[tuple[str, float]]] = {}
    for point in points:
        for result in point.results:
            label = ", ".join(
                [result.name, *(f"{key} {point.settings[key]}" for key in other_keys)]
            )
            rate = result.tokens / result.step
            lines.setdefault(label, []).append((point.settings[last_key], rate))

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for label, line in lines.items():
        values = [value for value, _ in line]
        rates = [rate for _, rate in line]
        axes.plot(values, rates, marker="o", label=label)
    axes.set(xlabel=last_key, ylabel="tokens/s", ylim=(0, None))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def parse_throughput_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, default=REPOSITORY / "config.yaml")
    add("overrides", nargs="*", metavar="key=value", help="for all contenders")
    add("--contenders", nargs="+", default=CONTENDERS)
    sweep_help = "measure all combinations"
    add("--sweep", nargs="+", default=[], metavar="key=a,b,c", help=sweep_help)
    add("--nproc", type=int, default=default_n_ranks(), help="ranks (%(default)s)")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--steps", type=int, default=2, help="per round (%(default)s)")
    alone_help = "one contender after another instead of alternating"
    add("--alone", action="store_true", help=alone_help)
    add("--json", type=Path, help="write all measurements to this file")
    add("--plot", type=Path, help="plot tokens/s of a sweep to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_throughput_arguments()
    swept: dict[str, list[str]] = {}
    for sweep in args.sweep:
        key, _, values = sweep.partition("=")
        swept[key] = values.split(",")
    groups = [args.contenders]
    if args.alone:
        groups = [[name] for name in args.contenders]

    points: list[SweepPoint] = []
    for combination in itertools.product(*swept.values()):
        settings = dict(zip(swept, combination, strict=True))
        changes = [f"{key}={value}" for key, value in settings.items()]
        point = SweepPoint(settings, [])
        for group in groups:
            point.results.extend(measure_contenders(group, args, [*args.overrides, *changes]))
        points.append(point)
        print(*changes)
        print(format_results(point.results), flush=True)
    if args.json:
        record: list[dict[str, Any]] = []
        for point in points:
            results = [result_to_json(result) for result in point.results]
            record.append({"settings": point.settings, "results": results})
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot and args.sweep:
        plot_sweep(args.plot, points)


if __name__ == "__main__":
    main()
