"""The loop waits for the device only where it reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import core
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from lm import config
from lm.folder import RunFolder
from lm.mesh import TorchDistributedContext, World
from tests.support import TINY, run, run_ranks


class CountReads(TorchDispatchMode):
    """Counts how often a float tensor's value is read back, which waits for the device (on a GPU)."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            self.reads += 1
        return func(*args, **(kwargs or {}))


def reads_of(world: World, folder: str, steps: int) -> int:
    os.chdir(folder)
    changes = {"max_steps": steps, "report_rate": 1000, "grad_clip": 1.0, "run_name": f"steps-{steps}"}
    hp = config.read({"hyperparameters": TINY | changes}, [], "test")
    place = RunFolder(hp.run_name or "")
    distributed = TorchDistributedContext(world)
    storage = str(place.checkpoints.absolute())
    with core.init(distributed=distributed, checkpoint_storage=storage) as context, CountReads() as counter:
        fsdp.run(hp, world, context, None, place)
    return counter.reads


def count_reads(world: World, folder: str) -> tuple[int, int]:
    return reads_of(world, folder, 2), reads_of(world, folder, 12)


def test_steps_between_reports_read_nothing_back(tmp_path: Path) -> None:
    short, long = run_ranks(1, count_reads, str(tmp_path))[0]
    assert short == long


def test_steps_with_inf_or_nan_gradients_are_skipped_and_then_end_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "max_steps=50", "lr=1e5", "amp_dtype=float16", "report_rate=5", "skip_nonfinite=3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "lower lr" in done.stderr


@pytest.mark.parametrize("epochs", [0.5, 2])
def test_epochs_give_the_length(epochs: float, tmp_path: Path) -> None:
    done = run(tmp_path, f"max_epochs={epochs}", "total_batch_size=2", "batch_size=2")
    assert done.returncode == 0, done.stderr
    assert f"step {int(10 * epochs)}/{int(10 * epochs)}" in done.stdout


def test_negative_epochs_only_validate_and_generate(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be, that is the question\n" * 50)
    text = TINY | {"dataset": "text", "train_data": "text", "vocab_size": 257, "prompt": "to be", "num_tokens": 5}
    assert run(tmp_path, "max_steps=3", config=text).returncode == 0
    again = run(tmp_path, "max_epochs=-1", config=text)
    assert again.returncode == 0, again.stderr
    assert "validation  step 3" in again.stdout
    assert "training" not in again.stdout
    assert "\nto be" in again.stdout
