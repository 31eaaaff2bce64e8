"""What models must have in common for the weights of one to mean the same in the other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from lm.checkpoint.manifest import RunInfo
from lm.errors import ConfigError
from lm.transformers_config import AnyModelConfig, model_config


def require_same_model(saved: RunInfo, run_info: RunInfo) -> list[str]:
    """Raise ConfigError if weights of the one mean something else in the other.

    Returns:
        A change of the tokenizer, if any.
    """
    require_same_structure(model_config(saved.model), model_config(run_info.model))
    require_same_base(saved, run_info)
    if saved.tokenizer is None or run_info.tokenizer is None:
        return []
    if saved.tokenizer == run_info.tokenizer:
        return []
    change = f"{saved.tokenizer} in the checkpoint, now {run_info.tokenizer}"
    return [f"tokenizer: {change}: token IDs mean other text"]


def require_same_structure(saved: AnyModelConfig, now: AnyModelConfig) -> None:
    """Raise ConfigError if weights of the model `saved` mean something else in the model `now`."""
    by = saved.computed_by
    if by != now.computed_by:
        problem = f"the checkpoint is of a model that {by} computes, and init_from of another"
        remedy = "export it with python -m lm.hf export, and start from that directory"
        raise ConfigError(f"init_from: {problem}; {remedy}, with resume=fresh or another run_name")
    old = saved.structure()
    new = now.structure()
    changes = find_changes(old, new, {**old, **new})
    if changes:
        remedy = "the model differs from the checkpoint's: use the checkpoint's values"
        raise ConfigError(*changes.values(), remedy)


def require_same_base(saved: RunInfo, run_info: RunInfo) -> None:
    """Raise ConfigError unless both have all weights, or adapters of the same base."""
    old = saved.base
    new = run_info.base
    if new is None:
        refuse_adapters(saved, run_info.hyperparameters.get("init_from"))
        return
    if old is None:
        problem = "lora_rank: the checkpoint holds all weights and no adapters"
        raise ConfigError(f"{problem}; use lora_rank: null, or resume: fresh")
    if old.files != new.files:
        problem = f"{new.source} differs from the weights that the adapters in the checkpoint"
        remedy = "use these, or start a new run with resume=fresh or another run_name"
        raise ConfigError(f"init_from: {problem} belong to ({old.source}); {remedy}")


def refuse_adapters(saved: RunInfo, init_from: str | None) -> None:
    """Raise ConfigError if the checkpoint of `saved` holds adapters instead of all weights."""
    if saved.base:
        problem = f"{init_from or 'the checkpoint'} holds only LoRA adapters of {saved.base.source}"
        command = f"`python -m lm.hf export {shlex.quote(init_from or 'CHECKPOINT')} DIRECTORY`"
        remedy = f"merge them with {command}, and set init_from to the directory"
        raise ConfigError(f"init_from: {problem}; {remedy}")


def find_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, str]:
    """Return a line with both values of each of `keys` whose value differs, by key."""
    changes = {}
    for key in keys:
        before = old.get(key)
        now = new.get(key)
        if before != now:
            changes[key] = f"{key}: {json.dumps(before)} in the checkpoint, now {json.dumps(now)}"
    return changes
