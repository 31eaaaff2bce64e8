"""Speed and memory of fsdp.py and of reference loops, measured alternately on one machine.

    python -m benchmarks.throughput [--config config.yaml] [key=value ...] [--contenders ours
    fsdp1-bfloat16] python -m benchmarks.throughput --sweep batch_size=1,2,4
    max_seq_len=512,1024,2048 --plot sweep.png

Contenders: `ours`, fsdp.py; `fsdp1-float32` and `fsdp1-bfloat16`, FullyShardedDataParallel with
transformer_auto_wrap_policy, autocast and AdamW; `transformers`, Hugging Face's model with FSDP2;
`torchtitan`, its Llama, compiled and sharded by its code, if installed (pip install
"torchtitan<0.3" triton). `ours+key=value` changes hyperparameters of ours. Every contender has its
own processes and trains the same batch size; they alternate round by round. If a GPU cannot hold
all of them, use `--alone`.

Step times are medians over rounds. MFU is causal (half of the attention square), without
embeddings, relative to the GPU's dense 16-bit peak, or to the measured speed of 2048 x 2048 matrix
products on all ranks of a CPU. Shares are those of a profiled round on rank 0, see
`benchmarks.common.shares`; the data share is what the run reports.
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

from benchmarks.common import ROOT, SHARES, environment, launched, shares, spread
from benchmarks.contender import MARK, as_llama
from lm import config
from lm.data.loader import derive_global_batch_size
from lm.launch.spawn import default_n_ranks

CONTENDERS = ["ours+compile=true", "fsdp1-float32", "fsdp1-bfloat16", "transformers"]
CONTENDERS += ["torchtitan"] if find_spec("torchtitan") else []
FOREVER = [f"{key}=1000000000" for key in ("max_steps", "checkpoint_rate", "validation_rate")]


class EndedError(Exception):
    """The processes of a contender exited, most often out of memory."""


class Contender:
    """The processes of one contender, which train on command."""

    def __init__(self, name: str, file: Path, overrides: Sequence[str], processes: int) -> None:
        kind, *changes = name.split("+")
        self.directory = tempfile.TemporaryDirectory()
        self._errors = (Path(self.directory.name) / "errors").open("w+")
        settings = [*FOREVER, "report_rate=2", *overrides, *changes]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            launched(processes, "benchmarks/contender.py", kind, str(file.absolute()), *settings),
            cwd=self.directory.name,
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._answer()
        self.first_step = time.perf_counter() - start

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._errors.seek(0)
        raise EndedError("".join(self._errors.readlines()[-5:]))

    def command(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def profile(self, steps: int) -> tuple[dict[str, float], float | None]:
        """Return the shares of `steps` profiled steps on rank 0, and the peak of all ranks (FLOP/s)."""
        trace = Path(self.directory.name) / "trace.json"
        answer = self.command("profile", steps, trace)
        parts = shares(json.loads(trace.read_text())["traceEvents"], answer["seconds"])
        for reports in Path(self.directory.name).glob("runs/*/metrics.jsonl"):
            last = json.loads(reports.read_text().splitlines()[-1])
            parts["data"] = last["waiting_for_data_percent"] / 100
        return parts, answer["peak_flops"]

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # already exited
            self._process.stdin.close()
        self._process.wait()
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
        return self.peak_flops and self.flops / self.step / self.peak_flops

    def row(self, first: Result) -> str:
        ratio = statistics.median(
            time / reference for time, reference in zip(self.steps, first.steps, strict=True)
        )
        parts = [f"{self.shares[part]:.1%}" if part in self.shares else "" for part in PARTS]
        mfu = f"{self.mfu:.1%}" if self.mfu else ""
        cells = [
            self.name,
            f"{self.tokens / self.step:,.0f}",
            spread(self.steps, 3),
            f"{ratio:.2f}",
            mfu,
        ]
        return (
            "| "
            + " | ".join([*cells, f"{self.peak_gib:.2f}", f"{self.first_step:.1f}", *parts])
            + " |"
        )


PARTS = (*SHARES, "data")
HEAD = [
    "contender",
    "tokens/s",
    "step s (spread)",
    "x first's time",
    "MFU",
    "peak GiB",
    "first step s",
    *PARTS,
]


# ---- measuring
# ---------------------------------------------------------------------------------------------


def compare(
    names: Sequence[str], args: argparse.Namespace, overrides: Sequence[str]
) -> list[Result]:
    """Measure the contenders `names`; those that run out of memory have no result."""
    running: dict[str, Contender] = {}
    results: dict[str, Result] = {}

    def drop(name: str, why: object) -> None:
        print(f"{name} {' '.join(overrides)}: failed: {str(why).strip()}", file=sys.stderr)
        results.pop(name, None)
        if name in running:
            running.pop(name).close()

    for name in names:
        try:
            running[name] = started = Contender(name, args.config, overrides, args.nproc)
        except EndedError as error:
            drop(name, error)
            continue
        hp = config.load_hyperparameters(args.config, [*overrides, *name.split("+")[1:]])
        if name == "torchtitan":
            hp = as_llama(hp)
        tokens = derive_global_batch_size(hp, args.nproc) * hp.max_seq_len
        flops = tokens * hp.flops_per_token(hp.max_seq_len)
        results[name] = Result(name, started.first_step, tokens, flops)
    for turn in range(args.rounds + 1):  # the first is for warm-up
        for name in list(running):
            try:
                answer = running[name].command("run", args.steps)
                results[name].peak_gib = answer["peak_gib"]
                if turn:
                    results[name].steps.append(answer["seconds"] / answer["steps"])
            except (EndedError, OSError) as error:
                drop(name, error)
    for name in list(running):
        try:
            results[name].shares, results[name].peak_flops = running[name].profile(2)
            running.pop(name).close()
        except (EndedError, OSError) as error:
            drop(name, error)
    for result in results.values():  # one peak for all
        result.peak_flops = (
            max((other.peak_flops or 0 for other in results.values()), default=0) or None
        )
    return [results[name] for name in names if name in results]


def table(results: Sequence[Result]) -> str:
    if not results:
        return "all contenders failed"
    rows = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    return "\n".join([*rows, *(result.row(results[0]) for result in results)])


def as_json(result: Result) -> dict[str, Any]:
    return vars(result) | {"tokens_per_second": result.tokens / result.step, "mfu": result.mfu}


def plot(path: Path, points: Sequence[tuple[dict[str, str], list[Result]]]) -> None:
    """Plot tokens/s over the last swept hyperparameter, a line per contender and value of the others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    lines: dict[str, tuple[list[str], list[float]]] = {}
    for settings, results in points:
        *others, (_, last) = settings.items()
        for result in results:
            label = ", ".join([result.name, *(f"{key} {value}" for key, value in others)])
            x, y = lines.setdefault(label, ([], []))
            x.append(last)
            y.append(result.tokens / result.step)
    for label, (x, y) in lines.items():
        axes.plot(x, y, marker="o", label=label)
    axes.set(xlabel=list(points[0][0])[-1], ylabel="tokens/s", ylim=(0, None))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=ROOT / "config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all contenders")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="key=a,b,c", help="measure all combinations"
    )
    parser.add_argument("--nproc", type=int, default=default_n_ranks(), help="ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="per round (%(default)s)")
    parser.add_argument(
        "--alone", action="store_true", help="one contender after another instead of alternating"
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--plot", type=Path, help="plot tokens/s of a sweep to this file")
    args = parser.parse_args()
    keys = [sweep.partition("=")[0] for sweep in args.sweep]
    values = [sweep.partition("=")[2].split(",") for sweep in args.sweep]
    points = []
    for combination in itertools.product(*values):
        settings = dict(zip(keys, combination, strict=True))
        overrides = [*args.overrides, *(f"{key}={value}" for key, value in settings.items())]
        groups = [[name] for name in args.contenders] if args.alone else [args.contenders]
        results = [result for group in groups for result in compare(group, args, overrides)]
        points.append((settings, results))
        print(*(f"{key}={value}" for key, value in settings.items()))
        print(table(results), flush=True)
    if args.json:
        record = [
            {"settings": settings, "results": list(map(as_json, results))}
            for settings, results in points
        ]
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot and args.sweep:
        plot(args.plot, points)


if __name__ == "__main__":
    main()
