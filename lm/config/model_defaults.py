"""The keys that the model of `init_from` sets, and those that contradict them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from lm.config.draft import Draft
from lm.config.hyperparameters import KEYS_OF_ALIASES, Hyperparameters, of_part
from lm.config.wording import as_argument, show
from lm.errors import ConfigError, error_prefix, without_prefix
from lm.launch.console import warn
from lm.model_config import ModelConfig
from lm.transformers_config import (
    AnyModelConfig,
    Kernels,
    TransformersConfig,
    kind_of_model,
    model_config,
    reason_against_bfloat16,
)

ModelDefaults = Callable[[str, Kernels | None], Mapping[str, Any]]
"""Maps `init_from` to the hyperparameters of its model and its `tokenizer` (None = it has none).

A plan, which needs no tokenizer, leaves it out. Empty if the model is not on this disk.
"""


def read_model_defaults(draft: Draft, defaults: ModelDefaults) -> Mapping[str, Any]:
    """Return the hyperparameters that the model of `init_from` sets, {} without one.

    Raises:
        ConfigError: the model cannot be trained; each line starts with where `init_from` is set.
    """
    source = draft.values.get("init_from")
    if not isinstance(source, str):
        return {}
    attention = draft.values.get("attn_implementation")
    amp_dtype = draft.values.get("amp_dtype", "auto")
    kernels: Kernels | None = None
    if amp_dtype in (None, "auto", "bfloat16", "float16"):
        kernels = Kernels(attention if isinstance(attention, str) else None, amp_dtype)
    with error_prefix(draft.label("init_from")), without_prefix("init_from"):
        return defaults(source, kernels)


def apply_model_defaults(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Set the keys that are not set to those of the model of `init_from`; refuse all others."""
    if not defaults:
        return
    source = draft.values["init_from"]
    given = {**draft.preset, **draft.values}
    model = model_of(defaults)
    if isinstance(model, TransformersConfig):  # which refuses a preset
        given = dict(draft.values)
        _check_model_of_transformers(draft, model)
    else:
        _refuse_other_values(draft, given, defaults)
    for key, value in defaults.items():
        if key not in given and key != "tokenizer":
            draft.set(key, value, f"init_from: {source}: {key}")

    if "tokenizer" not in defaults:
        return
    dataset = given.get("dataset", "synthetic")
    tokenizer = given.get("tokenizer")
    its_tokenizer = defaults["tokenizer"]
    if tokenizer is None and dataset != "synthetic":
        if its_tokenizer is None and dataset != "tokens":
            remedy = "set tokenizer to the one that it was trained with"
            draft.refuse("tokenizer", f"{source} has no tokenizer.json; {remedy}", "init_from")
        label = draft.labels.get("tokenizer", f"init_from: {source}: tokenizer")
        draft.set("tokenizer", its_tokenizer, label)
    elif isinstance(tokenizer, str) and its_tokenizer is not None:
        from lm.data.tokenizer.loading import load_tokenizer

        try:
            differs = load_tokenizer(tokenizer).identity != load_tokenizer(its_tokenizer).identity
        except ConfigError as error:
            path = ("tokenizer",)
            draft.errors[path] = error
            return
        if differs:
            problem = f"{tokenizer} differs from the one in {source}"
            draft.refuse("tokenizer", f"{problem}; remove tokenizer, or use other weights")


def _check_model_of_transformers(draft: Draft, model: TransformersConfig) -> None:
    """Refuse keys that the model of `init_from` does not have, or does not stand."""
    given = draft.values
    source = given["init_from"]
    for key in given:
        label = draft.label(key)
        ours = KEYS_OF_ALIASES.get(key, key)
        if key == "vocab_size" and given[key] not in (None, model.vocab_size):
            problem = f"{show(given[key])} differs from {model.vocab_size} in {source}"
            draft.refuse(key, f"{problem}; remove vocab_size", label)
        elif ours in ModelConfig.model_fields and ours not in TransformersConfig.model_fields:
            problem = f"{source} is a model of transformers ({model.model_type})"
            reason = "whose config.json says it"
            if ours.startswith("router_balance"):
                reason = "whose experts are balanced neither by a loss nor by a bias"
            draft.refuse(key, f"{problem}, {reason}; remove {key}", label)
    if not model.examined.bfloat16 and given.get("amp_dtype", "auto") == "auto":
        warn(f"amp_dtype: null, as {reason_against_bfloat16(model)}")
        draft.set("amp_dtype", None, f"init_from: {source}: amp_dtype")
    if model.examined.packing or given.get("dataset") != "jsonl":
        return
    if given.get("packing") is True:
        problem = f"true, but {model.name} does not keep samples of one sequence apart"
        draft.refuse("packing", f"{problem}; remove packing")
    elif "packing" not in given:
        warn(
            f"packing: false, as {model.name} does not keep samples of one sequence apart:"
            " rows are padded instead"
        )
        draft.set("packing", False, f"init_from: {source}: packing")


def _refuse_other_values(
    draft: Draft, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse keys of `given` with which the weights of `init_from` would mean something else."""
    structure = model_of(defaults).structure()
    for key in [key for key in structure if key in given]:
        try:
            value = model_of({**defaults, key: given[key]}).structure()[key]
        except ValidationError:
            continue  # `validate` reports it
        if value != structure[key]:
            label = draft.labels.get(key, f"{draft.label('model')}: {key}")  # of the preset
            source = draft.values["init_from"]
            problem = f"{show(given[key])} differs from {show(structure[key])} in {source}"
            remedy = f"use {as_argument(key, structure[key])}, or other weights"
            draft.refuse(key, f"{problem}; {remedy}", label)


def model_of(defaults: Mapping[str, Any]) -> AnyModelConfig:
    """Return the model of `init_from`, from the hyperparameters that it sets."""
    return model_config(of_part(defaults, kind_of_model(defaults)))


def warn_of_long_sequences(hp: Hyperparameters, model: AnyModelConfig) -> None:
    """Warn of positions for which the `model` of `init_from` was not made."""
    limit = model.context_length
    length = hp.model.max_seq_len
    if length <= limit:
        return
    source = hp.checkpoint.init_from
    problem = f"{length} exceeds the {limit} positions for which {source} was made"
    warn(f"max_seq_len: {problem}; use max_seq_len={limit} or less, or a model with more")
