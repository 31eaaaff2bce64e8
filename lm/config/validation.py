"""Validation of each part by pydantic, whose errors become sentences that name the key's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lm.config.draft import Draft
from lm.config.hyperparameters import (
    FIELDS,
    KEYS_OF_ALIASES,
    SCHEMA,
    Hyperparameters,
    of_part,
    parts_of,
)
from lm.config.wording import accepted, nearest, nearest_key, nearest_value, nested, show
from lm.errors import ConfigError
from lm.model_config import ModelConfig

_PROBLEMS = {
    "missing": "is missing; {accepted} is needed",
    "extra_forbidden": "no such key{nearest}",
    "string_type": "{value} is not {accepted}; put it in quotes",
    "string_too_short": "{value} is empty; {accepted} is needed",
    "value_error": "{message}",
}
"""What is wrong, by pydantic's type of the error."""
_OTHER_PROBLEM = "{value} is not {accepted}"
_DATA = ("train_data", "val_data")
_MAX_UNKNOWN = 20
"""Unknown keys for which the nearest one is searched; that takes a millisecond each."""


def validate(draft: Draft) -> Hyperparameters:
    """Return the hyperparameters, or raise all errors in the order of the keys."""
    parts = validate_parts(draft)
    draft.raise_errors()
    return Hyperparameters(**parts)


def validate_parts(draft: Draft, relations: bool = True) -> dict[str, Any]:
    """Return the parts that are valid, by name, and add the errors of all others to `draft`.

    An error in one part does not hide the relations between keys of another.

    Args:
        relations: whether to add errors that concern several keys of a part.
    """
    parts_of_draft = parts_of(draft.values)
    known_keys = FIELDS.keys() | parts_of_draft["model"].model_fields.keys()
    unknown = [key for key in draft.values if key not in known_keys and (key,) not in draft.errors]
    if not relations:  # whose model may be one of transformers, which has no such keys
        of_model = ModelConfig.model_fields
        unknown = [key for key in unknown if KEYS_OF_ALIASES.get(key) not in of_model]
    for key in unknown[:_MAX_UNKNOWN]:
        keys = [name for part in parts_of_draft.values() for name in part.model_fields]
        arguments = ("--config", "--dry-run") if key in draft.arguments else ()
        draft.refuse(key, f"no such hyperparameter{nearest_key(key, keys, arguments)}")
    n_more = len(unknown) - _MAX_UNKNOWN
    if n_more > 0:
        draft.refuse(
            unknown[_MAX_UNKNOWN],
            f"no such hyperparameter; {n_more:,} keys are unknown from here on",
        )
    parts: dict[str, Any] = {}
    for name, part in parts_of_draft.items():
        try:
            parts[name] = part.model_validate(of_part(draft.values, part))
        except ValidationError as invalid:
            _add_errors(draft, invalid, relations)
    return parts


def _add_errors(draft: Draft, invalid: ValidationError, relations: bool) -> None:
    """Add the errors of a part to `draft`, one for each key."""
    # The innermost first: a mapping's wrong key hides that the mapping is not a string either.
    for problem in sorted(invalid.errors(), key=lambda problem: -len(problem["loc"])):
        if problem["loc"]:
            _add_error_of_value(draft, problem)
        elif relations:
            _add_errors_of_relations(draft, problem)


def _add_error(draft: Draft, path: tuple[str, ...], error: ConfigError) -> None:
    """Add `error` unless there is one of `path`, inside of it, or around it."""
    for known in draft.errors:
        n_common = min(len(path), len(known))
        if path[:n_common] == known[:n_common]:
            return
    draft.errors[path] = error


def _add_errors_of_relations(draft: Draft, problem: ErrorDetails) -> None:
    """Add the errors of a validator of the whole part: one per line, which starts with a key."""
    for line in _message(problem).splitlines():
        key = line.partition(":")[0]
        error = ConfigError(draft.label(key, line) + line.removeprefix(key))
        _add_error(draft, (key,), error)


def _add_error_of_value(draft: Draft, problem: ErrorDetails) -> None:
    """Add the error of a key, or of one inside of its mapping."""
    key, *inner = map(str, problem["loc"])
    path = (key,)
    value = draft.values[key]
    schema = SCHEMA["properties"][key]
    siblings: Mapping[str, Any] = {}
    for name in inner:
        # pydantic also lists members of unions, e.g. "dict[str,float]", which are no keys.
        if isinstance(value, dict) and (name in value or problem["type"] == "missing"):
            siblings = nested(schema)
            path = (*path, name)
            value = value.get(name)
            schema = siblings.get(name, siblings.get("*", {}))

    template = _PROBLEMS.get(problem["type"], _OTHER_PROBLEM)
    is_item = isinstance(problem["loc"][-1], int)  # of a list, which is shown as one value
    quotes_help = not isinstance(value, dict | list)
    if is_item or (problem["type"] == "string_type" and not quotes_help):
        template = _OTHER_PROBLEM
    text = template.format(
        value=show(value),
        accepted=accepted(schema),
        message=_message(problem),
        nearest=nearest(path[-1], siblings),
    )
    if template == _OTHER_PROBLEM and isinstance(value, str | bool):
        text += nearest_value(key, value, schema)
    if isinstance(value, list) and path[0] in _DATA:
        text += "; for several files, write their directory or a glob"
    label = ".".join([draft.label(key), *path[1:]])
    _add_error(draft, path, ConfigError(f"{label}: {text}"))


def _message(problem: ErrorDetails) -> str:
    return problem["msg"].removeprefix("Value error, ")
