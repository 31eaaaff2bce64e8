"""What the keys of a record hold: by the hyperparameter `fields`, or by their own names."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.chat_template import REASONING_KEYS
from lm.errors import ConfigError

_KINDS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
"""keys of records that are read without `fields`, each by itself"""
_NAMED_KINDS = (("messages",), ("prompt", "completion"), ("user", "assistant"), ("text",))
_NAMED_PAIRS = (
    ("chosen", "rejected"),
    ("prompt", "chosen", "rejected"),
    ("user", "chosen", "rejected"),
)
"""what `fields` can say that the keys of a record hold"""
_OF_CHATS = ("system", "tools")
OF_MESSAGES = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "weight",
    *sorted(REASONING_KEYS),
)
"""what `fields` can say that the keys of a message hold"""
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
            elif what not in _OF_CHATS:
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
        read = kind if kind == ("text",) else (*kind, *_OF_CHATS)
        named = {"messages" if key == "conversations" else key: key for key in read if key in keys}
        unread = [key for key in keys if key not in read]
        if unread:
            remedy = f"to leave it out, name the rest, fields: {as_yaml(named)}"
            raise ConfigError(f"{', '.join(unread)}: not read; {remedy}")
        return named


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise ValueError unless `fields` says all that one kind of record needs, and no more."""
    kinds = [*_NAMED_KINDS, *_NAMED_PAIRS]
    of_record = fields.keys() - {*_OF_CHATS, *OF_MESSAGES}
    if of_record not in [set(kind) for kind in kinds]:
        described = ", or ".join(" and ".join(kind) for kind in kinds)
        rest = ", ".join([*_OF_CHATS, *OF_MESSAGES])
        problem = f"{as_yaml(fields)} is no kind of record"
        raise ValueError(f"{problem}; name {described}, and of chats what they have of {rest}")
    if of_record == {"text"} and len(fields) > 1:
        raise ValueError("text is not a chat; remove what else is named")
    of_messages = fields.keys() & {*OF_MESSAGES}
    if of_messages and not {"role", "content"} <= of_messages:
        raise ValueError("of messages, name role and content, and what else is read of them")
    for what, source in fields.items():
        try:
            _parse(source)
        except ValueError as error:
            problem = f"{what}: {source!r} is no template: {error}"
            remedy = "write names in braces, and other braces twice: {{"
            raise ValueError(f"{problem}; {remedy}") from None
        if "{" in source and what in ("messages", "tools", *of_messages):
            raise ValueError(f"{what}: {source!r} makes a text; name a key")


def _parse(source: str) -> list[tuple[str, str | None]]:
    """Return the texts of a template, each with the name that follows it, or None."""
    parts: list[tuple[str, str | None]] = []
    for before, name, spec, conversion in string.Formatter().parse(source):
        if name == "" or spec or conversion:
            raise ValueError("braces have names of keys alone")
        parts.append((before, name))
    return parts


def fill(source: str, record: Mapping[str, Any]) -> Any:
    """Return what `fields` names in a record: the value of a key, or the text of a template.

    What precedes an empty value in a template is left out with it: of "{question} {context}", the
    space.
    """
    if "{" not in source:
        return record[_require(source, record)]
    text = ""
    for before, name in _parse(source):
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


def as_yaml(fields: Mapping[str, str]) -> str:
    """Return `fields` as it is typed in YAML."""
    import yaml  # which the machine of a benchmark may lack

    flow = yaml.safe_dump(
        dict(fields), default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return flow.strip()
