"""The settings nearest to those of a run that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lm.config import Hyperparameters
from lm.errors import ConfigError
from lm.plan.fit import USABLE, Ranks, required_host_memory, required_memory, state_bytes
from lm.plan.memory import Activations
from model import PRESETS, ModelConfig

MOST = 3
"""suggestions of a message"""
LEAST_MEMORY = {"sharding": "full-shard", "activation_checkpointing": "full", "batch_size": 1}
"""the settings that need least memory of a GPU without offloading"""


@dataclass(frozen=True)
class Candidate:
    """Changes of hyperparameters, on a number of ranks."""

    n_ranks: int
    changes: dict[str, Any] = field(default_factory=dict)

    def settings(self, hp: Hyperparameters, ranks: Ranks) -> list[str]:
        """Return what differs from `hp` on `ranks`, as a user would type it."""
        changes = self.changes
        if "model" in changes:  # a preset sets the others
            changes = {"model": changes["model"]}
        shown = [f"{key}={value}" for key, value in changes.items() if getattr(hp, key) != value]
        if self.n_ranks > ranks.size:
            return [f"{self.n_ranks} ranks", *shown]
        return shown

    def fits(self, hp: Hyperparameters, ranks: Ranks, activations: Activations) -> bool:
        """Return whether `hp` with the changes fits into the memory of each of `ranks`."""
        changed = hp.model_copy(update=self.changes)
        others = replace(ranks, size=self.n_ranks, per_node=min(ranks.per_node, self.n_ranks))
        try:
            if not changed.cpu_offload:  # as a trace takes long, the state first
                state = state_bytes(changed, others.dtype, others.shards(changed))
                if state > USABLE * others.memory:
                    return False
            needed = required_memory(changed, others, activations)
            return others.fit(needed, required_host_memory(changed, others, activations))
        except ConfigError:  # the ranks or the global batch cannot be divided
            return False


def nearest(hp: Hyperparameters, ranks: Ranks, activations: Activations) -> str:
    """Return up to three changes of `hp` that each make it fit, the smallest first."""
    found: list[list[str]] = []
    for alternatives in _ladders(hp, ranks):
        for candidate in alternatives:
            settings = candidate.settings(hp, ranks)
            if not settings or not candidate.fits(hp, ranks, activations):
                continue
            fits_with_fewer = any(set(other) <= set(settings) for other in found)
            if not fits_with_fewer:
                found.append(settings)
            break
        if len(found) == MOST:
            break
    if not found:
        return "a smaller model"
    return "; ".join(" ".join(settings) for settings in found)


def _ladders(hp: Hyperparameters, ranks: Ranks) -> Iterator[list[Candidate]]:
    """Yield lists of candidates that change more and more, of which the first that fits counts."""
    n = ranks.size
    full_shard = {"sharding": "full-shard"}

    yield [Candidate(n, {"activation_checkpointing": mode}) for mode in ("selective", "full")]
    yield [Candidate(n, {"batch_size": size}) for size in _halves(hp.batch_size)]
    yield [Candidate(n, full_shard), Candidate(n, LEAST_MEMORY)]
    if ranks.on_gpu:
        offload = {"cpu_offload": True}
        yield [
            Candidate(n, {"activation_offload": True}),
            Candidate(n, offload),
            Candidate(n, LEAST_MEMORY | offload),
        ]
    for changes in (full_shard, LEAST_MEMORY):
        yield [Candidate(n * 2**power, changes) for power in range(1, 15)]
    yield [Candidate(n, {"max_seq_len": length}) for length in _halves(hp.max_seq_len)[:3]]

    if hp.init_from is not None:  # weights of this size
        if hp.float8 is None:  # which adapters do not support
            adapters = {"lora_rank": 16}
            yield [Candidate(n, adapters), Candidate(n, LEAST_MEMORY | adapters)]
        return
    is_state_large = state_bytes(hp, ranks.dtype, ranks.shards(hp)) > ranks.memory / 2
    if not is_state_large:  # a smaller model saves little: activations are large
        return
    if hp.model is not None:
        smaller = _smaller_presets(hp, ranks)
    else:
        yield [Candidate(n, {"n_layers": n_layers}) for n_layers in _smaller_depths(hp)]
        smaller = [{"d_model": width} for width in _smaller_widths(hp)]
    fewer_layers = {"n_layers": -(-hp.n_layers // 4)}
    for n_ranks, others in ((n, {}), (n, fewer_layers), (8 * n, full_shard), (64 * n, full_shard)):
        yield [Candidate(n_ranks, others | size) for size in smaller]


def _halves(value: int) -> list[int]:
    """Return `value` halved once, twice, ... down to 1."""
    return [value >> power for power in range(1, value.bit_length())]


def _smaller_depths(hp: Hyperparameters) -> list[int]:
    """Return numbers of layers, each 5 % below the one before."""
    depths = [int(hp.n_layers * 0.95**power) for power in range(1, 160)]
    return [depth for depth in depths if depth > 0]


def _smaller_widths(hp: Hyperparameters) -> list[int]:
    """Return `d_model` in steps of 15 %, each with an even width of a head."""
    if hp.head_dim:
        return []
    multiple = 2 * hp.n_heads
    widths = [int(hp.d_model * 0.85**power) // multiple * multiple for power in range(1, 40)]
    return [width for width in widths if width > 0]


def _smaller_presets(hp: Hyperparameters, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the hyperparameters of all presets, the largest first."""
    keys = ModelConfig.model_fields.keys() - {"max_seq_len"}
    presets = []
    for name in PRESETS:
        model = ModelConfig.model_validate({"model": name})
        presets.append({key: getattr(model, key) for key in keys})
    presets.sort(
        key=lambda preset: state_bytes(hp.model_copy(update=preset), ranks.dtype, 1), reverse=True
    )
    return presets
