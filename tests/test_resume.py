"""A run resumes exactly: bit for bit with the same world size, on the same samples with any other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm import config
from lm.checkpoint import checkpointer
from lm.checkpoint.manifest import read_manifest
from lm.checkpoint.resume import IDENTITY, UNLOGGED
from lm.data import loader
from model import ModelConfig, Transformer
from tests.support import TINY, checkpoints, reports, run, start

RUN = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "lr_schedule": "constant",
    "total_batch_size": 12,
    "report_rate": 1,
    "validation_batches": 1,
    "checkpoint_rate": 5,
    "amp_dtype": None,
    "max_steps": 10,
}
EXACT = ("loss", "grad_norm", "lr", "batches", "tokens", "skipped_steps")


def losses(folder: Path, group: str = "training") -> dict[int, Any]:
    return {step: {key: line[key] for key in EXACT if key in line} for step, line in reports(folder, group).items()}


def files(path: Path) -> dict[str, Any]:
    """Size and checksum of every file."""
    return json.loads((path / "manifest.json").read_text())["files"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    manifest = read_manifest(path)
    model = Transformer(ModelConfig.model_validate(manifest.model))
    checkpointer.load_weights(path, model)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten uninterrupted steps on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    done = run(folder, ranks=2, config=RUN)
    assert done.returncode == 0, done.stderr
    assert sorted(checkpoints(folder)) == [5, 10]
    return folder


def test_hyperparameters_that_are_compared_exist() -> None:
    assert config.Hyperparameters.model_fields.keys() >= IDENTITY | UNLOGGED
    assert not IDENTITY & UNLOGGED


def test_five_steps_and_five_more_equal_ten_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "max_steps=5", ranks=2, config=RUN).returncode == 0
    second = run(tmp_path, ranks=2, config=RUN)
    assert second.returncode == 0, second.stderr
    assert "resumed from checkpoint" in second.stdout
    assert losses(tmp_path) == losses(reference)
    assert losses(tmp_path, "validation") == losses(reference, "validation")
    assert files(checkpoints(tmp_path)[10]) == files(checkpoints(reference)[10])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_world_size_resumes_with_the_same_weights_and_samples(ranks: int, tmp_path: Path) -> None:
    quiet = RUN | {"dropout": 0.0}
    assert run(tmp_path / "two", ranks=2, config=quiet).returncode == 0
    source = checkpoints(tmp_path / "two")[5]
    other = run(tmp_path / "other", f"resume={source}", ranks=ranks, config=quiet)
    assert other.returncode == 0, other.stderr
    expected, found = reports(tmp_path / "two"), reports(tmp_path / "other")
    assert sorted(found) == [6, 7, 8, 9, 10]
    for step, line in found.items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-6)


@pytest.mark.slow
def test_weights_survive_being_saved_by_two_ranks_and_again_by_three(tmp_path: Path) -> None:
    assert run(tmp_path / "two", "max_steps=5", ranks=2, config=RUN).returncode == 0
    source = checkpoints(tmp_path / "two")[5]
    again = run(
        tmp_path / "three", f"resume={source}", "max_steps=6", "lr=1e-30", "weight_decay=0", ranks=3, config=RUN
    )
    assert again.returncode == 0, again.stderr
    assert "changed: lr" in again.stdout
    before, after = weights(source), weights(checkpoints(tmp_path / "three")[6])
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float16"), ("float16", "null"), ("float16", "float16")])
def test_a_resumed_run_may_change_its_precision(before: str, after: str, tmp_path: Path) -> None:
    assert run(tmp_path, f"amp_dtype={before}", "max_steps=2", "checkpoint_rate=2", config=RUN).returncode == 0
    done = run(tmp_path, f"amp_dtype={after}", "max_steps=4", config=RUN)
    assert done.returncode == 0, done.stderr
    assert ("changed: amp_dtype" in done.stdout) == (before != after)
    assert reports(tmp_path)[4]["skipped_steps"] == 0


def test_global_batches_do_not_depend_on_the_world_size() -> None:
    hp = config.read({"hyperparameters": RUN}, [], "test")

    def training(dp_rank: int, dp_size: int) -> Iterator[loader.Batch]:
        data = loader.open_data(hp, hp.vocab_size, hp.max_seq_len, 12, 1, dp_rank, dp_size)
        return loader.Loader(hp, data, 12, dp_rank, dp_size, torch.device("cpu")).training(3)

    single, parts = training(0, 1), [training(rank, 3) for rank in range(3)]
    for _ in range(4):
        inputs = np.concatenate([micro.inputs.numpy() for part in parts for micro in next(part).micro_batches])
        assert np.array_equal(inputs, np.concatenate([micro.inputs.numpy() for micro in next(single).micro_batches]))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_saves_a_checkpoint_and_the_resumed_run_has_the_same_losses(
    signum: signal.Signals, reference: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "checkpoint_rate=1000", ranks=2, config=RUN)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training"):
            process.send_signal(signum)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (step,) = checkpoints(tmp_path)
    if step < 10:
        assert "stopped" in output
    assert run(tmp_path, ranks=2, config=RUN).returncode == 0
    assert losses(tmp_path) == losses(reference)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(reference: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "max_steps=1000", "checkpoint_rate=1000", ranks=2, config=RUN)
    assert process.stdout is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for line in process.stdout:
        if line.startswith("training"):
            os.kill(int(children.read_text().split()[1]), signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (step,) = checkpoints(tmp_path)
    assert max(losses(tmp_path)) == step < 1000
    first = {key: value for key, value in losses(reference).items() if key <= step}
    assert {key: value for key, value in losses(tmp_path).items() if key <= 10} == first


@pytest.mark.slow
def test_a_complete_run_reports_it_and_changes_nothing(reference: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (reference / "runs").rglob("*") if path.name != "lock"}

    before = times()
    again = run(reference, config=RUN)
    assert again.returncode == 0
    assert "max_steps=20" in again.stdout
    assert times() == before


@pytest.mark.slow
def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path: Path) -> None:
    short = RUN | {"max_steps": 2}
    assert run(tmp_path, config=short).returncode == 0
    (old,) = checkpoints(tmp_path).values()
    assert run(tmp_path, "resume=fresh", "seed=9", config=short).returncode == 0
    (aside,) = (tmp_path / "runs" / "test").glob("before-*")
    assert files(aside / "checkpoints" / old.name)
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 4
    assert old.name not in {path.name for path in checkpoints(tmp_path).values()}


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_launchers_restart_resumes_whatever_resume_was_set_to(variable: str, tmp_path: Path) -> None:
    elsewhere = run(tmp_path, "max_steps=2", "run_name=elsewhere")
    assert elsewhere.returncode == 0, elsewhere.stderr
    source = checkpoints(tmp_path, "elsewhere")[2]
    restart: dict[str, Any] = {variable: "1"}
    for resume in ("fresh", str(source)):
        name = f"run_name={'fresh' if resume == 'fresh' else 'from'}"
        first = run(tmp_path, "max_steps=3", name, f"resume={resume}")
        assert first.returncode == 0, first.stderr
        assert ("resumed from" in first.stdout) == (resume != "fresh")
        again = run(tmp_path, "max_steps=4", name, f"resume={resume}", **restart)
        assert again.returncode == 0, again.stderr
        assert ", step 3\n" in again.stdout
    assert not list((tmp_path / "runs" / "fresh").glob("before-*"))


@pytest.mark.slow
def test_a_restart_before_the_first_checkpoint_starts_where_the_first_start_did(tmp_path: Path) -> None:
    assert run(tmp_path, "max_steps=2", "run_name=elsewhere").returncode == 0
    source = checkpoints(tmp_path, "elsewhere")[2]
    done = run(tmp_path, "max_steps=3", f"resume={source}", TORCHELASTIC_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert f"resumed from checkpoint {source.name}, step 2" in done.stdout


@pytest.mark.slow
def test_the_config_of_a_run_that_only_validates_can_be_read_again(tmp_path: Path) -> None:
    assert run(tmp_path, "max_epochs=-1").returncode == 0
    kept = config.load(tmp_path / "runs" / "test" / "config.yaml", [])
    assert (kept.max_epochs, kept.max_steps, kept.run_name) == (-1, None, "test")
