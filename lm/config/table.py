"""Rows of the tables of keys and presets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from lm.config.hyperparameters import SCHEMA
from lm.config.wording import accepted, nested
from lm.fields import Config
from lm.model_config import ModelConfig
from lm.presets import PRESETS


class KeyRow(NamedTuple):
    """A row of the table of keys."""

    key: str
    default: str
    accepted: str
    meaning: str


class PresetRow(NamedTuple):
    """A row of the table of presets."""

    name: str
    size: str
    keys: str


def key_rows(part: type[Config]) -> Iterator[KeyRow]:
    """Yield a row for each key of `part`, and for each inside of a mapping."""
    for key, info in part.model_fields.items():
        schema = SCHEMA["properties"][key]
        default = json.dumps(info.default)
        yield KeyRow(key, default, accepted(schema), schema["description"])
        for name, inner in nested(schema).items():
            if name != "*":
                default = "required"
                if "default" in inner:
                    default = json.dumps(inner["default"])
                yield KeyRow(f"{key}.{name}", default, accepted(inner), inner["description"])


def preset_rows() -> Iterator[PresetRow]:
    """Yield a row for each preset."""
    for name, preset in PRESETS.items():
        size = "any"
        if "d_model" in preset:
            n_parameters = ModelConfig.model_validate({"model": name}).n_parameters
            size = f"{n_parameters / 1e6:,.0f}M"
        keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in preset.items())
        yield PresetRow(name, size, keys)


def summary(part: type[Config]) -> str:
    """Return what `part` is about."""
    return (part.__doc__ or "").partition("\n")[0]
