"""Loss curves of bfloat16 and float8 compared with float32.

    python -m benchmarks.curves [--config recipes/quickstart.yaml] [--steps 200] [key=value ...]

The reference is float32 without compilation. The deviation of a curve is that of its mean loss over
each tenth of the run, relative to the reference.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT, environment, launched
from lm.launch.spawn import default_n_ranks
from lm.report import RunRecords

REFERENCE = ["amp_dtype=null", "compile=false"]
VARIANTS = {
    "bfloat16": ["amp_dtype=bfloat16", "compile=true"],
    "float8 tensorwise": ["amp_dtype=bfloat16", "compile=true", "float8=tensorwise"],
    "float8 rowwise": ["amp_dtype=bfloat16", "compile=true", "float8=rowwise"],
}


def losses(config: Path, settings: Sequence[str], steps: int, processes: int) -> list[float]:
    """Return the training loss of every step of a run."""
    length = [
        f"max_steps={steps}",
        f"checkpoint_rate={steps}",
        f"validation_rate={steps}",
        "report_rate=1",
    ]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            launched(
                processes,
                "fsdp.py",
                "--config",
                str(config.absolute()),
                *length,
                "prompt=null",
                *settings,
            ),
            cwd=directory,
            env=environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (run,) = Path(directory).glob("runs/*")
        return RunRecords(run).curve("training", "loss")[1]


def deviations(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the relative deviation of the mean over each tenth of the run."""
    tenth = max(1, len(curve) // 10)
    parts = [slice(start, start + tenth) for start in range(0, len(curve), tenth)]
    return [
        abs(statistics.fmean(curve[part]) / statistics.fmean(reference[part]) - 1) for part in parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nproc", type=int, default=default_n_ranks())
    args = parser.parse_args()
    reference = losses(args.config, [*args.overrides, *REFERENCE], args.steps, args.nproc)
    print("| dtype | first loss | last tenth | largest deviation |\n|---|---|---|---|")
    for name, settings in {"float32": None, **VARIANTS}.items():
        changes = [*args.overrides, *(settings or [])]
        curve = losses(args.config, changes, args.steps, args.nproc) if settings else reference
        last = statistics.fmean(curve[-max(1, args.steps // 10) :])
        print(
            f"| {name} | {curve[0]:.4f} | {last:.4f} | {max(deviations(curve, reference)):.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
