"""The original FSDP example: random samples are memorised, and random validation samples cannot be predicted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT, reports, run


@pytest.mark.slow
def test_training_loss_falls_and_validation_loss_does_not(tmp_path: Path) -> None:
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
