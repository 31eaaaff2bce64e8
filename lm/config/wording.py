"""How keys, their values and what they accept are written in messages and tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from lm.config.elsewhere import meaning_elsewhere, without_section
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


def nearest(written: str, known: Iterable[str]) -> str:
    """Return the hint at the one of `known` that `written` misspells, or at the list of all."""
    for name in known:
        if _misspells(written.lower(), name):
            return f"; did you mean {name}?"
    return "; python -m lm.config lists all"


def nearest_key(written: str, keys: Iterable[str], arguments: Iterable[str] = ()) -> str:
    """Return the hint at what to set instead of a hyperparameter that does not exist.

    It says what the key means in other trainers. Letters count only for a key that is misspelt:
    what looks alike often is something else, as `local_batch_size` and `global_batch_size`.

    Args:
        keys: those that can be set instead.
        arguments: of the command line, which `written` can mean, too.
    """
    meaning = meaning_elsewhere(written)
    if meaning is not None:
        return f"; {meaning}"
    bare = _without_separators(without_section(written))
    names = {_without_separators(name.removeprefix("--")): name for name in (*keys, *arguments)}
    known = dict(names)
    for key in names.values():
        if key in FIELDS:
            known |= {_without_separators(alias): key for alias in aliases_of(FIELDS[key])}
    for name in (_without_separators(written), bare):
        if name in known:
            return f"; did you mean {known[name]}?"
    section = without_section(written).partition(".")[0]
    if nested(SCHEMA["properties"].get(section, {})):
        return f"; did you mean {section}, a mapping?"
    for name, key in known.items():
        if (name in names or len(name) > 5) and _misspells(bare, name):
            return f"; did you mean {key}?"
    return "; python -m lm.config lists all"


def _misspells(written: str, name: str) -> bool:
    """Return whether a letter is wrong, missing or too many, or two are swapped."""
    n = 0
    while written[n : n + 1] == name[n : n + 1] != "":
        n += 1
    rest = written[n:]
    other = name[n:]
    replaced = rest[1:] == other[1:]
    missing = rest == other[1:]
    added = rest[1:] == other
    swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
    return replaced or missing or added or swapped


def nearest_value(key: str, value: str | bool, schema: Mapping[str, Any]) -> str:
    """Return the hint at what `value` means for `key`, or "": the error lists all by their letters.

    `schema` is that of `key`, or of a key in its mapping.
    """
    written = _without_separators(value)
    meaning = meanings_of(FIELDS[key]).get(written)
    if meaning is not None:
        return f"; {meaning}"
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "null" and written == "none":
            return "; did you mean null?"
        for name in option.get("enum", []):
            if written == _without_separators(name):
                return f"; did you mean {name}?"
    return ""


def _without_separators(value: str | bool) -> str:
    return re.sub("[-_ ]", "", str(value).lower())
