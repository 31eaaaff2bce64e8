"""The settings nearest to those of a run that fit into memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.plan.fit import (
    USABLE,
    Ranks,
    count_state_bytes,
    predict_host_memory,
    predict_memory,
)
from lm.plan.memory import FindActivations
from lm.presets import PRESETS
from model import ModelConfig

MAX_SUGGESTIONS = 3
"""in a message"""
FULL_SHARD = {"sharding": "full-shard"}
LEAST_MEMORY = {"sharding": "full-shard", "activation_checkpointing": "full", "batch_size": 1}
"""the settings that need least memory of a GPU without offloading"""


@dataclass(frozen=True)
class Candidate:
    """Changes of hyperparameters, on a number of ranks."""

    n_ranks: int
    changes: dict[str, Any] = field(default_factory=dict)

    def list_settings(self, hp: Hyperparameters, ranks: Ranks) -> list[str]:
        """Return what differs from `hp` on `ranks`, as a user would type it."""
        changes = self.changes
        if "model" in changes:  # a preset sets the others
            changes = {"model": changes["model"]}
        settings: list[str] = []
        if self.n_ranks > ranks.size:
            settings.append(f"{self.n_ranks} ranks")
        for key, value in changes.items():
            if value != getattr(hp, key):
                settings.append(f"{key}={value}")
        return settings

    def fits(self, hp: Hyperparameters, ranks: Ranks, find_activations: FindActivations) -> bool:
        """Return whether `hp` with the changes fits into the memory of each of `ranks`."""
        changed = hp.model_copy(update=self.changes)
        if changed.offloads_too_little:
            return False
        others = replace(ranks, size=self.n_ranks, per_node=min(ranks.per_node, self.n_ranks))
        try:
            if not changed.cpu_offload:  # as measuring activations takes long, the state first
                shards = others.count_shards(changed)
                state_bytes = count_state_bytes(changed, others.dtype, shards)
                if state_bytes > USABLE * others.memory:
                    return False
            needed = predict_memory(changed, others, find_activations)
            host = predict_host_memory(changed, others, find_activations)
        except ConfigError:  # the ranks or the global batch cannot be divided
            return False
        return others.can_hold(needed, host)


def find_nearest_settings(
    hp: Hyperparameters, ranks: Ranks, find_activations: FindActivations
) -> str:
    """Return up to three changes of `hp` that each make it fit, the smallest first."""
    found: list[list[str]] = []
    for ladder in _list_ladders(hp, ranks):
        settings = _find_first(ladder, hp, ranks, find_activations)
        fits_with_fewer = any(set(other) <= set(settings) for other in found)
        if settings and not fits_with_fewer:
            found.append(settings)
        if len(found) == MAX_SUGGESTIONS:
            break
    if not found:
        return "a smaller model"
    return "; ".join(" ".join(settings) for settings in found)


def _find_first(
    ladder: list[Candidate], hp: Hyperparameters, ranks: Ranks, find_activations: FindActivations
) -> list[str]:
    """Return the settings of the first candidate that changes something and fits; else none."""
    for candidate in ladder:
        settings = candidate.list_settings(hp, ranks)
        if settings and candidate.fits(hp, ranks, find_activations):
            return settings
    return []


def _list_ladders(hp: Hyperparameters, ranks: Ranks) -> Iterator[list[Candidate]]:
    """Yield lists of candidates that change more and more, of which the first that fits counts."""
    n = ranks.size
    yield [Candidate(n, {"activation_checkpointing": mode}) for mode in ("selective", "full")]
    yield [Candidate(n, {"batch_size": size}) for size in _halve(hp.batch_size)]
    yield [Candidate(n, FULL_SHARD), Candidate(n, LEAST_MEMORY)]
    if ranks.on_gpu:
        yield [
            Candidate(n, {"activation_offload": True}),
            Candidate(n, {"cpu_offload": True}),
            Candidate(n, LEAST_MEMORY | {"cpu_offload": True}),
        ]
    for changes in (FULL_SHARD, LEAST_MEMORY):
        yield [Candidate(n * 2**power, changes) for power in range(1, 15)]
    yield [Candidate(n, {"max_seq_len": length}) for length in _halve(hp.max_seq_len)[:3]]

    if hp.init_from is not None:  # weights of this size
        if hp.float8 is None:  # which adapters do not support
            adapters = {"lora_rank": 16}
            yield [Candidate(n, adapters), Candidate(n, LEAST_MEMORY | adapters)]
        return
    state_bytes = count_state_bytes(hp, ranks.dtype, ranks.count_shards(hp))
    if state_bytes <= ranks.memory / 2:  # a smaller model saves little: activations are large
        return
    if hp.model is not None:
        smaller = _list_presets(hp, ranks)
    else:
        yield [Candidate(n, {"n_layers": n_layers}) for n_layers in _list_smaller_depths(hp)]
        smaller = [{"d_model": width} for width in _list_smaller_widths(hp)]
    fewer_layers = {"n_layers": math.ceil(hp.n_layers / 4)}
    yield [Candidate(n, size) for size in smaller]
    yield [Candidate(n, fewer_layers | size) for size in smaller]
    yield [Candidate(8 * n, FULL_SHARD | size) for size in smaller]
    yield [Candidate(64 * n, FULL_SHARD | size) for size in smaller]


def _halve(value: int) -> list[int]:
    """Return `value` halved once, twice, ... down to 1."""
    halves: list[int] = []
    while value > 1:
        value //= 2
        halves.append(value)
    return halves


def _list_smaller_depths(hp: Hyperparameters) -> list[int]:
    """Return numbers of layers, each 5 % below the one before."""
    depths: list[int] = []
    for power in itertools.count(1):
        depth = int(hp.n_layers * 0.95**power)
        if depth == 0:
            break
        depths.append(depth)
    return depths


def _list_smaller_widths(hp: Hyperparameters) -> list[int]:
    """Return `d_model` in steps of 15 %, each with an even width of a head."""
    widths: list[int] = []
    if hp.head_dim:
        return widths
    multiple = 2 * hp.n_heads
    for power in itertools.count(1):
        width = int(hp.d_model * 0.85**power) // multiple * multiple
        if width == 0:
            break
        widths.append(width)
    return widths


def _list_presets(hp: Hyperparameters, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the hyperparameters of all presets, the largest first."""
    keys = ModelConfig.model_fields.keys() - {"max_seq_len"}
    presets: list[dict[str, Any]] = []
    for name in PRESETS:
        model = ModelConfig.model_validate({"model": name})
        presets.append({key: getattr(model, key) for key in keys})

    def count_bytes(preset: dict[str, Any]) -> int:
        return count_state_bytes(hp.model_copy(update=preset), ranks.dtype, 1)

    presets.sort(key=count_bytes, reverse=True)
    return presets
