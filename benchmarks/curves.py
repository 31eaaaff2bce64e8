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

from benchmarks.common import REPOSITORY, launch_command, make_environment
from lm.launch.spawn import default_n_ranks
from lm.report import RunRecords

REFERENCE = ["amp_dtype=null", "compile=false"]
VARIANTS = {
    "bfloat16": ["amp_dtype=bfloat16", "compile=true"],
    "float8 tensorwise": ["amp_dtype=bfloat16", "compile=true", "float8=tensorwise"],
    "float8 rowwise": ["amp_dtype=bfloat16", "compile=true", "float8=rowwise"],
}


def run_losses(config: Path, settings: Sequence[str], steps: int, processes: int) -> list[float]:
    """Return the training loss of every step of a run."""
    overrides = [
        f"max_steps={steps}",
        f"checkpoint_rate={steps}",
        f"validation_rate={steps}",
        "report_rate=1",
        "prompt=null",
        *settings,
    ]
    config_path = str(config.absolute())
    command = launch_command(processes, "fsdp.py", "--config", config_path, *overrides)
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            command,
            cwd=directory,
            env=make_environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (run,) = Path(directory).glob("runs/*")
        _, losses = RunRecords(run).curve("training", "loss")
        return list(losses)


def compute_deviations(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the relative deviation of the mean over each tenth of the run."""
    tenth = max(1, len(curve) // 10)
    deviations: list[float] = []
    for start in range(0, len(curve), tenth):
        mean = statistics.fmean(curve[start : start + tenth])
        reference_mean = statistics.fmean(reference[start : start + tenth])
        deviations.append(abs(mean / reference_mean - 1))
    return deviations


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "recipes" / "quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nproc", type=int, default=default_n_ranks())
    args = parser.parse_args()

    def run(settings: Sequence[str]) -> list[float]:
        return run_losses(args.config, [*args.overrides, *settings], args.steps, args.nproc)

    def print_row(name: str, curve: Sequence[float], reference: Sequence[float]) -> None:
        tenth = max(1, args.steps // 10)
        last = statistics.fmean(curve[-tenth:])
        largest = max(compute_deviations(curve, reference))
        print(f"| {name} | {curve[0]:.4f} | {last:.4f} | {largest:.2%} |", flush=True)

    reference = run(REFERENCE)
    print("| dtype | first loss | last tenth | largest deviation |\n|---|---|---|---|")
    print_row("float32", reference, reference)
    for name, settings in VARIANTS.items():
        print_row(name, run(settings), reference)


if __name__ == "__main__":
    main()
