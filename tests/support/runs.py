"""Runs of `fsdp.py`, and what they leave in their directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from determined import core

import fsdp
from benchmarks.observer import StepObserver
from lm.checkpoint.cluster import open_store
from lm.config.reading import read_hyperparameters
from lm.determined.context import TorchDistributedContext
from lm.hf import weights
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import READ_AT_START, start_python
from tests.support.hyperparameters import TINY

EXACT_METRICS = ("loss", "perplexity", "bits_per_byte", "grad_norm", "lr", "skipped_steps")
"""Metrics that are bit-identical however often a run is stopped and resumed."""


def train_in_world(
    world: World,
    hyperparameters: Mapping[str, Any],
    on_step_start: Callable[[int], None] = lambda _: None,
) -> Path:
    """Call `fsdp.execute` off the cluster on the ranks of `world`; return the run's directory."""
    hp = read_hyperparameters(
        {"hyperparameters": hyperparameters}, [], "test", defaults=weights.model_defaults
    )
    run_dir = RunDir(hp.run.run_name or "test")
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    with (
        pytest.MonkeyPatch.context() as patch,
        core.init(
            distributed=distributed, checkpoint_storage=str(run_dir.checkpoints.absolute())
        ) as context,
    ):
        # Optional, as in a run without it: drawing the report takes half of a short run.
        patch.setitem(sys.modules, "matplotlib.figure", None)
        job = fsdp.Job(hp, None, run_dir)
        store = open_store(context.checkpoint, None, run_dir, world)
        fsdp.execute(job, world, context, store, StepObserver(world, on_step_start))
    return run_dir.path


def start_fsdp(
    folder: Path,
    *overrides: str,
    ranks: int = 1,
    config: Mapping[str, Any] | None = None,
    launcher: Sequence[str] | None = None,
    script: str = "",
    fork: bool = True,
    **env: str,
) -> subprocess.Popen[str]:
    """Start `fsdp.py` in `folder` on `ranks` ranks; forked if `env` allows it.

    Args:
        config: hyperparameters (default: `TINY`), written to `folder/test.yaml`.
        launcher: Python's arguments that start the ranks (default: those of `lm.launch`, if `ranks`
            > 1).
        script: Python lines that every rank runs before; they can use `rank`.
        fork: whether processes may be forked; else they import PyTorch.
        env: environment variables to set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hyperparameters = dict(TINY if config is None else config)
    (folder / "test.yaml").write_text(json.dumps({"hyperparameters": hyperparameters}))
    if launcher is None:
        launcher = ["-m", "lm.launch", "--nproc", str(ranks)] if ranks > 1 else []
    program = write_script(folder, script) if script else REPOSITORY / "fsdp.py"
    variables = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        variables.pop(name, None)
    variables |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return start_python(
        [*launcher, str(program), "--config", "test.yaml", *overrides],
        variables | env,
        fork=fork and not env.keys() & READ_AT_START,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def write_script(folder: Path, script: str) -> Path:
    """Write a program that runs `fsdp.py` after the Python lines `script`, which can use `rank`."""
    path = folder / "script.py"
    before = "import os, sys\nimport fsdp\nrank = int(os.environ.get('RANK', 0))\n"
    path.write_text(f"{before}{script}\nfsdp.run_and_exit(fsdp.main)\n")
    return path


def run_fsdp(
    folder: Path, *overrides: str, code: int | None = None, timeout: float = PATIENCE, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run `fsdp.py` as `start_fsdp` does, and return its exit code, which is `code` if given."""
    process = start_fsdp(folder, *overrides, **how)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{output}\n{errors}") from None
    assert code in (None, process.returncode), errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


SAVE_FIRST_GRADIENTS = """
from safetensors.torch import save_file
from lm.training.optim import Optimizer

measure = Optimizer.measure_gradients

def save_and_measure(self, loss_scale):
    gradients = {name: p.grad.full_tensor() for name, p in self._parameters.items()}
    if rank == 0 and not os.path.exists("gradients"):
        save_file(gradients, "gradients")
    return measure(self, loss_scale)

Optimizer.measure_gradients = save_and_measure
"""
"""Lines for `script` that write the gradients of the first step to the file `gradients`."""


def wait_until(
    condition: Callable[[], Any], explain: Callable[[], str] = str, seconds: float = PATIENCE
) -> None:
    """Wait until `condition()` is true; after `seconds`, fail with `explain()`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def read_reports(
    folder: Path, group: str = "training", name: str = "test"
) -> dict[int, dict[str, Any]]:
    """Return the lines of one group in metrics.jsonl of a run, by step."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record for record in records if record["group"] == group}


def read_exact_metrics(
    folder: Path, group: str = "training", name: str = "test"
) -> dict[int, dict[str, Any]]:
    """Return the `EXACT_METRICS` of a run, by step."""
    metrics = {}
    for step, line in read_reports(folder, group, name).items():
        metrics[step] = {key: line[key] for key in EXACT_METRICS if key in line}
    return metrics


def checkpoints_by_step(folder: Path, name: str = "test") -> dict[int, Path]:
    """Return the checkpoint directories of a run by step, in the order of the steps."""
    manifests = (folder / "runs" / name / "checkpoints").glob("[!.]*/manifest.json")
    by_step = {json.loads(path.read_text())["step"]: path.parent for path in manifests}
    return dict(sorted(by_step.items()))
