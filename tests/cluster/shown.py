"""What Determined's Web UI must show for a completed trial, on the stand-in master or a real cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tests.support import ROOT

SOMETIMES = {"mfu", "save_stall_seconds"}
"""Reported only if the device's peak is known, or if a checkpoint was saved since the last report."""


def documented(group: str) -> set[str]:
    """Return the metrics that docs/performance.md lists for a group, "training" or "validation"."""
    section = (ROOT / "docs" / "performance.md").read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    training, _, validation = section.partition("Validation:")
    return set(re.findall(r"`(\w+)`[:.,]", {"training": training, "validation": validation}[group]))


def multiples(rate: int, last: int) -> set[int]:
    return {*range(rate, last + 1, rate), last}


def check(
    training: Mapping[int, dict[str, float]],
    validation: Mapping[int, dict[str, float]],
    checkpoints: Mapping[int, dict[str, int]],
    hyperparameters: Mapping[str, Any],
    ranks: int,
) -> None:
    """Compare what is shown for an uninterrupted run with its hyperparameters.

    Args:
        training: metrics by step, as in `validation`.
        checkpoints: files and their bytes, by step.
    """
    last, rate = hyperparameters["max_steps"], hyperparameters["report_rate"]
    saves = multiples(hyperparameters["checkpoint_rate"], last)
    assert training.keys() == multiples(rate, last)
    assert validation.keys() == multiples(hyperparameters.get("validation_rate") or rate, last)
    names = documented("training")
    for step, metrics in training.items():
        assert names - SOMETIMES <= metrics.keys() <= names, step
    for step, metrics in validation.items():
        assert metrics.keys() == documented("validation")
        assert metrics["batches"] == step
        assert metrics["perplexity"] == math.exp(metrics["loss"])
    for step, metrics in (*training.items(), *validation.items()):
        assert all(map(math.isfinite, metrics.values())), step
    assert checkpoints.keys() == saves
    for files in checkpoints.values():
        shards = {f"{part}-{rank:05}-00000.safetensors" for rank in range(ranks) for part in ("model", "optim")}
        assert files.keys() == shards | {"manifest.json", "metadata.json"}
        assert all(files.values())
