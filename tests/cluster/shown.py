"""What the Web UI shows for a completed trial, on the stand-in master or a real cluster, and what it must show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.master import Master
from tests.support import ROOT

SOMETIMES = {"mfu", "save_stall_seconds"}
"""Reported only if the device's peak is known, or if a checkpoint was saved since the last report."""


@dataclass
class Shown:
    training: dict[int, dict[str, float]]
    """metrics by step, as for validation"""
    validation: dict[int, dict[str, float]]
    checkpoints: dict[int, dict[str, int]]
    """files and their bytes, by step"""
    progress: float | None = None
    statuses: list[str] | None = None
    """None = unknown"""


def of_stand_in(master: Master, trial: int) -> Shown:
    """Return what the trial reported to `master`."""

    def steps(group: str) -> dict[int, dict[str, float]]:
        return {m["step"]: m["metrics"] for m in master.metrics if (m["group"], m["trial"]) == (group, trial)}

    checkpoints = [c for c in master.checkpoints if c["taskId"] == f"trial.{trial}"]
    return Shown(
        training=steps("training"),
        validation=steps("validation"),
        checkpoints={
            c["metadata"]["steps_completed"]: {path: int(size) for path, size in c["resources"].items()}
            for c in checkpoints
        },
        progress=master.bodies("/api/v1/trials/{trial}/progress")[-1]["progress"],
        statuses=[body["state"] for body in master.bodies("/api/v1/trials/{trial}/runner/metadata")],
    )


def documented(group: str) -> set[str]:
    """Return the metrics that docs/performance.md lists for a group, "training" or "validation"."""
    section = (ROOT / "docs" / "performance.md").read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    training, _, validation = section.partition("Validation:")
    return set(re.findall(r"`(\w+)`[:.,]", {"training": training, "validation": validation}[group]))


def check(shown: Shown, hyperparameters: Mapping[str, Any], ranks: int) -> None:
    """Compare what is shown for an uninterrupted run with its hyperparameters."""
    last, rate = hyperparameters["max_steps"], hyperparameters["report_rate"]
    saves = multiples(hyperparameters["checkpoint_rate"], last)
    validations = multiples(hyperparameters.get("validation_rate") or rate, last) | saves
    assert set(shown.training) == multiples(rate, last)
    assert set(shown.validation) == validations
    names = documented("training")
    for step, metrics in shown.training.items():
        assert names - SOMETIMES <= metrics.keys() <= names, step
        assert metrics["batches"] == step
    for step, metrics in shown.validation.items():
        assert metrics.keys() == documented("validation")
        assert metrics["batches"] == step
        assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert all(map(math.isfinite, values(shown.training.values()))), "training metrics"
    assert all(map(math.isfinite, values(shown.validation.values()))), "validation metrics"
    assert set(shown.checkpoints) == saves
    for files in shown.checkpoints.values():
        shards = {f"{part}-{rank:05}-00000.safetensors" for rank in range(ranks) for part in ("model", "optim")}
        assert files.keys() == shards | {"manifest.json", "metadata.json"}
        assert all(files.values())
    if shown.progress is not None:
        assert shown.progress == 1.0
    if shown.statuses is not None:
        # The background reporter skips outdated statuses.
        assert {"training"} <= set(shown.statuses) <= {"training", "validating", "saving"}


def multiples(rate: int, last: int) -> set[int]:
    return {*range(rate, last + 1, rate), last}


def values(reports: Iterable[Mapping[str, float]]) -> list[float]:
    return [value for metrics in reports for value in metrics.values()]
