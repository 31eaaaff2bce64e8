"""Hyperparameters are read from an experiment's config and a command line, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.combinations import check_combinations
from lm.config.draft import read_draft
from lm.config.hyperparameters import Hyperparameters
from lm.config.model_defaults import (
    ModelDefaults,
    apply_model_defaults,
    model_of,
    read_model_defaults,
    warn_of_long_sequences,
)
from lm.config.validation import validate, validate_parts
from lm.launch.console import warn


def load_hyperparameters(
    path: Path,
    overrides: Sequence[str],
    defaults: ModelDefaults | None = None,
) -> Hyperparameters:
    """Read the experiment file at `path`; see `read_hyperparameters`."""
    from lm import strict_yaml  # benchmarks.gpu runs without PyYAML

    contents, lines = strict_yaml.load_experiment(path)
    return read_hyperparameters(contents, overrides, str(path), lines, defaults)


def read_hyperparameters(
    contents: Mapping[str, Any],
    overrides: Sequence[str],
    name: str,
    lines: Mapping[str, int] | None = None,
    defaults: ModelDefaults | None = None,
) -> Hyperparameters:
    """Return the hyperparameters of an experiment's config, e.g. of the one that a trial is passed.

    The value of a key is the first of these that exists:

        1. `key=value` on the command line
        2. the preset of `model=NAME` on the command line
        3. the config
        4. the preset of `model` in the config
        5. the model of `init_from`, with which 1 to 4 must agree
        6. the default

    But max_seq_len of 3 comes before that of 2, unless positions are learned. A preset of a size in
    2 also drops what else shapes the model in 3, max_steps or max_epochs in 1 the other one in 3,
    and any argument the keys in 3 that are not read with it, e.g. lora_rank=null those of adapters.

    Args:
        overrides: `key=value`; the value is YAML, or for a key that accepts a string, the literal
            text, without quotes around it.
        name: of the config in errors, with `lines` of its keys, e.g. `{"hyperparameters.lr": 12}`.
        defaults: None = `init_from` has none.

    Raises:
        ConfigError: lists every problem.
    """
    draft = read_draft(contents, overrides, name, lines or {})
    for warning in draft.warnings:
        warn(warning)
    its_keys: Mapping[str, Any] = {}
    if defaults is not None:
        its_keys = read_model_defaults(draft, defaults)
        apply_model_defaults(draft, its_keys)

    hp = validate(draft)
    check_combinations(hp, draft)
    if its_keys:
        warn_of_long_sequences(hp, model_of(its_keys))
    has_vocab_size = "vocab_size" in draft.values or "vocab_size" in draft.preset
    if hp.data.dataset == "synthetic" or has_vocab_size:
        return hp
    from lm.data.run_data import default_vocab_size

    return hp.replace(vocab_size=default_vocab_size(hp.data))


def check_values(path: Path, overrides: Sequence[str]) -> None:
    """Check what `load_hyperparameters` reads of a file, as far as that needs no other file.

    So it is fast, and needs no PyTorch. What the model of `init_from` sets is unknown here: with
    it, every value is checked by itself.

    Raises:
        ConfigError: lists every problem.
    """
    from lm import strict_yaml

    contents, lines = strict_yaml.load_experiment(path)
    draft = read_draft(contents, overrides, str(path), lines)
    if draft.values.get("init_from") is None:
        check_combinations(validate(draft), draft)
    else:
        validate_parts(draft, relations=False)
        draft.raise_errors()
