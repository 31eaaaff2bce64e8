"""A run trains as the original example, skips steps with inf or NaN gradients, and ends after its steps or epochs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from lm import config
from tests.conftest import Message
from tests.support import ROOT, TINY, reports, run


def test_too_many_consecutive_inf_or_nan_gradients_end_the_run(tmp_path: Path, message: Message) -> None:
    done = run(tmp_path, "max_steps=50", "lr=1e5", "amp_dtype=float16", "report_rate=5", "skip_nonfinite=3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    message(done.stderr, mask=r"in \d+ consecutive steps up to step \d+")


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [0.5, 2])
def test_the_length_follows_from_the_epochs(epochs: float, tmp_path: Path) -> None:
    done = run(tmp_path, f"max_epochs={epochs}", "total_batch_size=2", "batch_size=2")
    assert done.returncode == 0, done.stderr
    assert f"step {int(10 * epochs)}/{int(10 * epochs)}" in done.stdout


@pytest.mark.slow
def test_a_prompt_without_a_token_is_refused_before_training(tmp_path: Path, message: Message) -> None:
    done = run(tmp_path, config=TINY | {"prompt": "to be"})
    assert done.returncode == 2
    message(done.stderr)


@pytest.mark.slow
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
    assert config.load(tmp_path / "runs" / "test" / "config.yaml", []).max_epochs == -1


@pytest.mark.slow
def test_the_original_example_memorises_random_samples_and_cannot_predict_others(tmp_path: Path) -> None:
    """config.yaml with a smaller model and vocabulary, so that 100 steps take seconds."""
    hyperparameters = yaml.safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
    small = {"d_model": 64, "n_heads": 2, "n_layers": 2, "vocab_size": 500, "max_seq_len": 64, "lr": 1e-3}
    done = run(tmp_path, "max_steps=100", ranks=2, config=hyperparameters | small)
    assert done.returncode == 0, done.stderr
    training, validation = reports(tmp_path), reports(tmp_path, "validation")
    assert sorted(training) == sorted(validation) == list(range(10, 101, 10))
    uniform = math.log(500)
    assert abs(training[10]["loss"] - uniform) < 0.3
    assert training[100]["loss"] < uniform - 1.0
    assert all(abs(line["loss"] - uniform) < 0.5 for line in validation.values())
