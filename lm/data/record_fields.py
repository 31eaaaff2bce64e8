"""What the keys of a record hold: by the hyperparameter `fields`, or by their own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.named_fields import OF_CHATS, OF_MESSAGES, as_yaml, parse_template
from lm.errors import ConfigError

_KINDS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
"""keys of records that are read without `fields`, each by itself"""
_EXAMPLES = (
    "{user: KEY, assistant: KEY}, {prompt: KEY, completion: KEY} or {text: KEY}, and with"
    " objective: dpo {user: KEY, chosen: KEY, rejected: KEY} (docs/data.md has examples)"
)


@dataclass(frozen=True)
class Value:
    """What a record has under a key, or a text made of several."""

    content: Any
    place: str
    """the key or the template, for errors"""

    @property
    def is_made(self) -> bool:
        """Whether it is the text of a template."""
        return "{" in self.place


@dataclass(frozen=True)
class RecordFields:
    """Selects what is read of records.

    Args:
        named: the hyperparameter `fields`; None = records are known by their own keys.
        pairs: records are preferences.
    """

    named: Mapping[str, str] | None = None
    pairs: bool = False

    @property
    def of_messages(self) -> dict[str, str]:
        """The keys of a message by what they hold; {} = they are known by their own names."""
        return {what: key for what, key in (self.named or {}).items() if what in OF_MESSAGES}

    def select(self, record: Mapping[str, Any]) -> dict[str, Value]:
        """Return the values of a record by what they are, without nulls.

        Raises:
            ConfigError: it lacks a key, or has one that is not read.
        """
        named = self.named
        if named is None:
            named = self._name_keys(record)
        values: dict[str, Value] = {}
        for what, source in named.items():
            if what in OF_MESSAGES:
                continue
            content = fill(source, record)
            if content is not None:
                values[what] = Value(content, source)
            elif what not in OF_CHATS:
                raise ConfigError(f"{source} is null, and fields reads it; remove the line")
        return values

    def _name_keys(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return what `fields` would say of a record that is known by its own keys."""
        keys = [key for key, value in record.items() if value is not None]
        kinds = _KINDS
        if self.pairs:
            are_replies = "prompt" in keys or isinstance(record.get("chosen"), str)
            kinds = (("prompt", "chosen", "rejected") if are_replies else ("chosen", "rejected"),)
        known = [kind for kind in kinds if all(key in keys for key in kind)]
        if not known:
            problem = f"the line has the keys: {', '.join(keys) or 'none'}"
            raise ConfigError(f"{problem}; say what they hold, fields: {_EXAMPLES}")
        kind = known[0]
        read = kind if kind == ("text",) else (*kind, *OF_CHATS)
        named = {"messages" if key == "conversations" else key: key for key in read if key in keys}
        unread = [key for key in keys if key not in read]
        if unread:
            remedy = f"to leave it out, name the rest, fields: {as_yaml(named)}"
            raise ConfigError(f"{', '.join(unread)}: not read; {remedy}")
        return named


def fill(source: str, record: Mapping[str, Any]) -> Any:
    """Return what `fields` names in a record: the value of a key, or the text of a template.

    What precedes an empty value in a template is left out with it: of "{question} {context}", the
    space.
    """
    if "{" not in source:
        return record[_require(source, record)]
    text = ""
    for before, name in parse_template(source):
        value = ""
        if name is not None:
            value = record[_require(name, record)]
            if value is None:
                value = ""
            if not isinstance(value, str):
                raise ConfigError(f"{name} is {show(value)}, not text, in {source!r}")
        if value or name is None:
            text += before + value
    return text


def _require(name: str, record: Mapping[str, Any]) -> str:
    if name not in record:
        problem = f"has no {name}, only {', '.join(record) or 'nothing'}"
        raise ConfigError(f"{problem}; name another key (fields), or add it, with null if empty")
    return name


def get_text(record: Mapping[str, Any], key: str, setting: str) -> str:
    """Return the text in the field `key` of a record.

    Raises:
        ConfigError: there is no text. It says to change `setting`; the caller adds the place.
    """
    if key not in record:
        found = ", ".join(repr(name) for name in record) or "nothing"
        raise ConfigError(f"has no {key!r}, only {found}; set {setting} to one of them")
    return check_text(record[key], key)


def check_text(text: Any, key: str) -> str:
    """Return the text of a record's `key`, or raise ConfigError."""
    advice = "remove or correct the record"
    if not isinstance(text, str):
        raise ConfigError(f"{key!r} is {show(text)}, not text; {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{key!r} is not valid Unicode: character {error.start} is an unpaired surrogate"
        raise ConfigError(f"{problem}; {advice}") from None
    return text


def show(value: Any) -> str:
    """Return the start of what a record has, which in a dataset of the Hub need not be JSON's."""
    return json.dumps(value, default=str)[:60]
