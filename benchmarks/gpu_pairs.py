"""Pairs of settings for one GPU, what they are expected to show, and what refutes that.

Predictions are computed from counted bytes, for one H200: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
"""Hyperparameters, and `without`: names of what is turned off, of `gpu_points.CHANGES`."""

LLAMA = {"max_seq_len": 4096, "amp_dtype": "bfloat16", "sharding": "grad-shard"}
ONE_B: Settings = LLAMA | {"model": "llama3.2-1b", "batch_size": 8, "total_batch_size": 8}
EIGHT_B: Settings = LLAMA | {"model": "llama3-8b", "batch_size": 1}
EIGHT_B_SLICE: Settings = EIGHT_B | {"n_layers": 16, "batch_size": 4, "total_batch_size": 8}
SMALL_MOMENTS: Settings = EIGHT_B | {
    "optim_dtype": "bfloat16",
    "beta2": 0.95,
    "total_batch_size": 8,
}
FLOAT8: Settings = {"float8": "tensorwise"}


@dataclass(frozen=True)
class Pair:
    """Settings A, those to compare with it, and numbers to be found in what is measured.

    A number is a ratio of step times, as "B/A", or a key of what was measured of one, as "B mfu".
    """

    arms: Mapping[str, Settings]
    """by name; none for kernels, which `gpu_points` measures by themselves"""
    predicted: Mapping[str, float]
    refuted_above: Mapping[str, float] = field(default_factory=dict)


def list_pairs(one_b: Settings, part: Settings) -> dict[str, Pair]:
    """Return the pairs by name, most valuable first.

    Args:
        one_b: the 1B model, `ONE_B` or smaller.
        part: the layers of the 8B model that fit, `EIGHT_B_SLICE` or fewer.
    """
    by_one = part | {"batch_size": 1}
    at_once = part | {"batch_size": 8}
    recomputed = at_once | {"activation_checkpointing": "selective"}
    full_shard = EIGHT_B | {"sharding": "full-shard"}
    copied = {"without": ["in place"]}
    by_layers = {"without": ["gather"]}
    n_layers = part["n_layers"]
    return {
        f"{n_layers} layers of 8B, batch_size": Pair(
            {"A": by_one | copied, "B": part, "C": recomputed},
            {"B/A": 0.90, "C/A": 0.89, "B mfu": 0.595, "C mfu": 0.60},
            {"B/A": 0.93, "B FSDP": 0.05, "B allocation_retries": 0},
        ),
        f"{n_layers} layers of 8B, float8, batch_size": Pair(
            {
                "A": by_one | FLOAT8 | {"without": ["in place", "gather"]},
                "B": part | FLOAT8 | by_layers,
                "C": at_once | FLOAT8 | by_layers,
            },
            {"B/A": 0.83, "C/A": 0.80, "B mfu": 0.77, "C mfu": 0.79},
            {"B/A": 0.87, "B other": 0.11, "B allocation_retries": 0},
        ),
        "8B, reduced in place": Pair(
            {"A": full_shard | copied, "B": full_shard, "C": EIGHT_B},
            {"B step": 0.46, "C step": 0.435, "B reserved_gib": 130.0},
            {"B step": 0.50, "B allocation_retries": 0},
        ),
        f"{n_layers} layers of 8B, float8 converted once": Pair(
            {"A": by_one | FLOAT8 | by_layers, "B": by_one | FLOAT8},
            {"B/A": 0.97},
            {"B/A": 0.985},
        ),
        "1B, reduced in place, head in float32": Pair(
            {"A": one_b | {"without": ["in place", "head in float32"]}, "B": one_b},
            {"B/A": 0.988, "B mfu": 0.54},
            {"B/A": 0.995},
        ),
        "8B, bfloat16 moments, reduced in place": Pair(
            {"A": SMALL_MOMENTS | copied, "B": SMALL_MOMENTS},
            {"B step": 3.0},
            {"B step": 3.1, "B allocation_retries": 0},
        ),
        PRODUCTS: Pair({}, {"B/A": 1.3, "C/A": 1.08}, {"C/A": 1.2}),
    }


PRODUCTS = "product, added after it, added in it"
"""The pair of kernels: A is a matrix product in bfloat16, B adds it to a float32 matrix, and C is a
product that adds itself to that."""


def find_numbers(pair: Pair, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return what was found of the numbers of `pair`; None = not on this device.

    Args:
        measured: of each setting, by key; `step` in seconds.
    """
    found: dict[str, float | None] = {}
    for number in {**pair.predicted, **pair.refuted_above}:
        if "/" in number:
            over, under = (measured[name]["step"] for name in number.split("/"))
            found[number] = None if over is None or under is None else over / under
            continue
        name, key = number.split(" ", 1)
        found[number] = measured[name].get(key, measured[name].get("shares", {}).get(key))
    return found


def verdict(found: Mapping[str, float | None], refuted_above: Mapping[str, float]) -> str:
    """Return whether the prediction held: "held", "refuted" or "not measured", with the reasons."""
    above: list[str] = []
    for number, limit in refuted_above.items():
        value = found[number]
        if value is None:
            return f"not measured: {number}"
        if value > limit:
            above.append(number)
    if above:
        return f"refuted: {', '.join(above)}"
    return "held"
