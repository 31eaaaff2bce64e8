"""How keys, their values and what they accept are written in messages and tables."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from lm.config.hyperparameters import FIELDS, SCHEMA
from lm.fields import aliases_of, meanings_of

_TYPES = {
    "integer": "an integer",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def show(value: Any) -> str:
    """Return `value` as JSON, cut to 60 characters."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # contains itself, or is nested deeply
        text = "this"
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_argument(key: str, value: Any) -> str:
    """Return `value` as the argument that sets it is typed in a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={shlex.quote(text)}"


def accepted(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON Schema accepts, e.g. "an integer > 0 or null"."""
    match schema:
        case {"anyOf": options}:
            return " or ".join(map(accepted, options))
        case {"enum": names}:
            return f"one of {', '.join(names)}"
        case {"const": name}:
            return name
        case {"format": "date"}:
            return "a date"
        case {"items": {"enum": _}}:
            return "a list of these"
        case {"items": {"prefixItems": items}}:
            return f"a list of lists of {len(items)} values, each {accepted(items[0])}"
        case {"items": {"type": kind}}:
            return f"a list of {kind}s"
        case {"prefixItems": items}:
            return f"a list of {len(items)} {items[0]['type']}s"
    kind = schema.get("type", "object")
    limits = [f"{sign} {schema[key]:.15g}" for key, sign in _BOUNDS.items() if key in schema]
    described = _TYPES.get(kind, f"a {kind}")
    if limits:
        described += " " + " and ".join(limits)
    return described


def nested(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of each key of a mapping that `schema` accepts, "*" for any key."""
    for option in schema.get("anyOf", ()):
        if "$ref" in option:
            name = option["$ref"].rpartition("/")[2]
            return SCHEMA["$defs"][name]["properties"]
        if "additionalProperties" in option:
            return {"*": option["additionalProperties"]}
    return {}


def nearest(key: str, known: Iterable[str]) -> str:
    """Return the hint at the key that `key` most likely means, or at the list of all."""
    ours = {name: name for name in known}
    for name, info in FIELDS.items():
        if name in ours:
            ours |= dict.fromkeys(aliases_of(info), name)
    bare = key.lower().removeprefix("hyperparameters.")
    near = difflib.get_close_matches(bare, ours, n=1, cutoff=0.65)
    return f"; did you mean {ours[near[0]]}?" if near else "; python -m lm.config lists all"


def nearest_value(key: str, value: str | bool, schema: Mapping[str, Any]) -> str:
    """Return the hint at what `value` most likely means for `key`, or "".

    `schema` is that of `key`, or of a key in its mapping.
    """
    meaning = meanings_of(FIELDS[key]).get(re.sub("[-_ ]", "", str(value).lower()))
    if meaning is not None:
        return f"; {meaning}"
    if isinstance(value, bool):
        return ""
    known: list[str] = []
    for option in schema.get("anyOf", [schema]):
        known += option.get("enum", [])
        if option.get("type") == "null":
            known.append("null")
    if value.lower() == "none" and "null" in known:
        return "; did you mean null?"
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)  # fp16, too
    return f"; did you mean {near[0]}?" if near else ""
