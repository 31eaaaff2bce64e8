"""The training loop skips steps with inf or NaN gradients, and its length follows from steps or epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm import config
from tests.conftest import Message
from tests.support import TINY, run


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
