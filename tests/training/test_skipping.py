"""Spikes and listed steps are skipped on all ranks, exactly, also after a resume."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.manifest import (
    read_manifest,
)
from lm.errors import ConfigError
from lm.launch.launch import Launch
from lm.runtime.rendezvous import join_world
from lm.runtime.world import World
from lm.storage.folder import FileRecord
from lm.training import skipping
from lm.training.skipping import WINDOW, SkipConfig, SpikeFilter, check_skipped
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp, train_in_world

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(Launch(), timeout=60) as world:
        yield world


def configure(**settings: Any) -> SkipConfig:
    return SkipConfig.model_validate(settings)


def find_skipped(
    spikes: SpikeFilter, world: World, loss: float, grad_norm: float, nonfinite: float = 0.0
) -> bool:
    loss_sum, norm, is_nonfinite = map(torch.tensor, (7 * loss, grad_norm, nonfinite))
    return bool(spikes.find_skipped(world, loss_sum, 7, norm, is_nonfinite))


def full_window(world: World, **settings: Any) -> SpikeFilter:
    """A filter after as many steps as its window holds: losses of 3 +- 0.1, norms of 1 +- 0.05."""
    spikes = SpikeFilter(configure(**{"skip_spikes": 4} | settings), CPU)
    for step in range(WINDOW):
        sign = (-1) ** step
        assert not find_skipped(spikes, world, 3 + 0.1 * sign, 1 + 0.05 * sign)
    return spikes


@pytest.mark.parametrize(
    ("loss", "grad_norm", "expected"),
    [
        (3.39, 1.19, False),
        (3.42, 1.0, True),
        (3.0, 1.21, True),
        (0.0, 0.0, False),
        (math.nan, 1.0, True),
        (math.inf, 1.0, True),
    ],
)
def test_spike_is_above_mean_plus_deviations(
    loss: float, grad_norm: float, expected: bool, world: World
) -> None:
    assert find_skipped(full_window(world), world, loss, grad_norm) is expected
    assert not find_skipped(full_window(world, skip_spikes=None), world, loss, grad_norm)


def test_spikes_need_a_full_window(world: World) -> None:
    spikes = SpikeFilter(configure(skip_spikes=4), CPU)
    values = [(3.0 + 0.01 * (step % 2), 1.0) for step in range(WINDOW - 1)]
    assert not any(find_skipped(spikes, world, *value) for value in values)
    for outlier in (math.nan, math.inf):  # of which none enters
        assert not find_skipped(spikes, world, outlier, 1.0)
        assert find_skipped(spikes, world, outlier, outlier, nonfinite=1)
    assert not find_skipped(spikes, world, 3.0, 1.0)
    assert find_skipped(spikes, world, 9.0, 1.0)


def test_skipped_steps_do_not_enter_the_window(world: World) -> None:
    spikes = full_window(world)
    before = {name: tensor.clone() for name, tensor in spikes.state_dict().items()}
    for loss, nonfinite in ((99.0, 0.0), (3.0, 1.0), (99.0, 0.0), (math.nan, 1.0)):
        assert find_skipped(spikes, world, loss, 1.0, nonfinite)
    for name, tensor in spikes.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not find_skipped(spikes, world, 3.2, 1.0)
    assert not torch.equal(spikes.state_dict()["window"], before["window"])


@pytest.mark.parametrize("n_deviations", [None, 6])
def test_check_skipped_names_what_can_be_the_cause(n_deviations: float | None) -> None:
    skip = configure(skip_nonfinite=3, skip_spikes=n_deviations)
    check_skipped(skip, 9, 2)
    with pytest.raises(
        ConfigError, match=r" 3 consecutive .* step 9 \(skip_nonfinite: 3\)"
    ) as ends:
        check_skipped(skip, 9, 3)
    assert ("skip_spikes" in str(ends.value)) == (n_deviations is not None)


# ---- runs

SHORT_WINDOW = 48
N_STEPS = 60
RESUMED_STEP = 54
POISONED = [51, 56, 60]
RUN: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 1,
    "max_seq_len": 32,
    "batch_size": 4,
    "vocab_size": 264,
    "dataset": "text",
    "train_data": "poisoned.txt",
    "val_data": "validation.txt",
    "shuffle": False,
    "max_steps": N_STEPS,
    "lr": 1e-2,
    "lr_schedule": "cosine",
    "report_rate": 1,
    "validation_rate": N_STEPS,
    "checkpoint_rate": RESUMED_STEP,
    "num_tokens": 0,
    "amp_dtype": None,
}
WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "tis"]


def write_texts(ranks: int) -> None:
    """Write a text, and one in which the last rank's batches in `POISONED` are not its language."""
    text = " ".join(random.Random(0).choices(WORDS, k=20_000))
    n_of_rank = RUN["batch_size"] * RUN["max_seq_len"]
    n_characters = ranks * n_of_rank  # of a batch
    poisoned = text
    for step in POISONED:
        end = step * n_characters
        poisoned = poisoned[: end - n_of_rank] + "~" * n_of_rank + poisoned[end:]
    n_trained = N_STEPS * n_characters + 1
    Path("clean.txt").write_text(text[:n_trained])
    Path("poisoned.txt").write_text(poisoned[:n_trained])
    Path("validation.txt").write_text(text[n_trained : n_trained + 4 * n_characters])


def train_poisoned(world: World, folder: str) -> None:
    skipping.WINDOW = SHORT_WINDOW
    os.chdir(folder)
    world.on_rank0(write_texts, world.size)
    ranges = [[step, step] for step in POISONED]
    train_in_world(world, RUN | {"run_name": "clean", "train_data": "clean.txt"})
    train_in_world(world, RUN | {"run_name": "listed", "skip_steps": ranges})
    train_in_world(world, RUN | {"run_name": "spikes", "skip_spikes": 6})
    middle = checkpoints_by_step(Path.cwd(), "spikes")[RESUMED_STEP]
    resumed = {"run_name": "resumed", "skip_spikes": 6, "resume": str(middle)}
    train_in_world(world, RUN | resumed)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are on a clean text and on a poisoned one, on two ranks."""
    folder = tmp_path_factory.mktemp("poisoned")
    run_ranks(2, train_poisoned, str(folder))
    return folder


def last_files(folder: Path, name: str) -> dict[str, FileRecord]:
    """Return the files of a run's last checkpoint, with checksums."""
    return read_manifest(checkpoints_by_step(folder, name)[N_STEPS]).files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spikes", "listed"])
def test_poisoned_batches_change_nothing_if_skipped(name: str, poisoned: Path) -> None:
    losses = [
        read_reports(poisoned, "validation", each)[N_STEPS]["loss"] for each in ("clean", name)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    reports = read_reports(poisoned, name=name)
    assert [step for step, line in reports.items() if line["skipped_steps"]] == POISONED
    assert [step for step, line in reports.items() if "loss" not in line] == POISONED


@pytest.mark.slow
def test_skip_steps_of_the_spikes_give_the_same_weights(poisoned: Path) -> None:
    spikes = last_files(poisoned, "spikes")
    window = {name for name in spikes if name.startswith("spikes-")}
    assert window
    weights = {name: spikes[name] for name in spikes.keys() - window}
    assert last_files(poisoned, "listed") == weights


@pytest.mark.slow
def test_skip_spikes_resumes_bit_for_bit(poisoned: Path) -> None:
    assert last_files(poisoned, "resumed") == last_files(poisoned, "spikes")
    for step, line in read_reports(poisoned, name="resumed").items():
        expected = read_reports(poisoned, name="spikes")[step]
        assert line.get("loss") == expected.get("loss")


@pytest.mark.slow
def test_skip_spikes_may_be_set_at_a_resume(poisoned: Path, tmp_path: Path) -> None:
    shutil.copytree(poisoned, tmp_path, dirs_exist_ok=True)
    for name, changes in (
        ("listed", ["skip_spikes=6", "skip_steps=null"]),
        ("spikes", ["skip_spikes=null"]),
    ):
        longer = [f"run_name={name}", f"max_steps={N_STEPS + 2}"]
        done = run_fsdp(tmp_path, *longer, *changes, config=RUN | {"total_batch_size": 8}, code=0)
        assert f"resumed from checkpoint {checkpoints_by_step(tmp_path, name)[N_STEPS].name}" in (
            done.stdout
        )


@pytest.mark.slow
def test_skip_steps_beyond_or_before_the_run(tmp_path: Path) -> None:
    beyond = run_fsdp(tmp_path, "skip_steps=[[3, 5]]", "max_steps=4", code=2)
    assert beyond.stderr.startswith("skip_steps: [3, 5] goes beyond the last step, 4")
    skipped = ["skip_steps=[[1, 2]]", "skip_spikes=6"]
    run_fsdp(tmp_path, *skipped, "max_steps=2", "report_rate=2", code=0)
    report = read_reports(tmp_path)[2]
    assert report["skipped_steps"] == 2
    assert "loss" not in report
    late = run_fsdp(tmp_path, "skip_steps=[[1, 2], [2, 3]]", "max_steps=4", code=2)
    assert "sort the ranges" in late.stderr
    late = run_fsdp(tmp_path, "skip_steps=[[1, 1], [2, 3]]", "max_steps=4", code=0)
    assert "skip_steps: [2, 3] starts too late" in late.stdout
    assert read_reports(tmp_path)[4]["loss"] > 0
