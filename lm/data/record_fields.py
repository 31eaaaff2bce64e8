"""What the keys of a record hold: by the hyperparameter `fields`, or by their own names."""

from __future__ import annotations

import json
import re
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
_PLAIN = re.compile(r"(?!(yes|no|on|off|true|false|null)$)[a-z_][\w.-]*", re.IGNORECASE)
"""a text that YAML reads as it is"""


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
        if self.named is None:
            return self._select_known(record)
        values: dict[str, Value] = {}
        for what, source in self.named.items():
            if what in OF_MESSAGES:
                continue
            content = fill(source, record)
            if content is not None:
                values[what] = Value(content, source)
            elif what not in _OF_CHATS:
                raise ConfigError(f"{source} is null, and fields reads it; remove the line")
        return values

    def _select_known(self, record: Mapping[str, Any]) -> dict[str, Value]:
        keys = [key for key in record if record[key] is not None]
        kind = self._find_kind(record, keys)
        is_text = kind == ("text",)
        read = kind if is_text else (*kind, "tools")
        unread = [key for key in keys if key not in read]
        if unread:
            named = {_known_as(key): key for key in read if key in keys}
            remedy = "to leave it out, name the rest"
            if "system" in unread and not is_text:
                named["system"] = "system"
                remedy = "name what is read"
            problem = f"{', '.join(unread)}: not read"
            raise ConfigError(f"{problem}; {remedy}, fields: {as_yaml(named)}")
        return {_known_as(key): Value(record[key], key) for key in read if key in keys}

    def _find_kind(self, record: Mapping[str, Any], keys: list[str]) -> tuple[str, ...]:
        """Return the keys by which a record is known."""
        kinds = _KINDS
        if self.pairs:
            are_replies = "prompt" in keys or isinstance(record.get("chosen"), str)
            kinds = (("prompt", "chosen", "rejected") if are_replies else ("chosen", "rejected"),)
        for kind in kinds:
            if all(key in keys for key in kind):
                return kind
        example = "{user: KEY, assistant: KEY}, {prompt: KEY, completion: KEY} or {text: KEY}"
        if self.pairs:
            example = "{user: KEY, chosen: KEY, rejected: KEY}"
        elif len(keys) == 1:
            example = as_yaml({"text": keys[0]})
        problem = f"the line has the keys: {', '.join(keys) or 'none'}"
        remedy = f"say what they hold, fields: {example} (docs/data.md has examples)"
        if "chosen" in keys and not self.pairs:
            remedy = f"preferences are learned with objective: dpo; or {remedy}"
        raise ConfigError(f"{problem}; {remedy}")


def _known_as(key: str) -> str:
    return "messages" if key == "conversations" else key


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise ValueError unless `fields` says all that one kind of record needs, and no more."""
    kinds = [*_NAMED_KINDS, *_NAMED_PAIRS]
    known = {what for kind in kinds for what in kind} | {*_OF_CHATS, *OF_MESSAGES}
    unknown = fields.keys() - known
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is not one of {', '.join(sorted(known))}")
    of_record = fields.keys() - {*_OF_CHATS, *OF_MESSAGES}
    if of_record not in [set(kind) for kind in kinds]:
        described = ", or ".join(" and ".join(kind) for kind in kinds)
        raise ValueError(f"{as_yaml(fields)} is no kind of record; name {described}")
    if of_record == {"text"} and len(fields) > 1:
        raise ValueError("text is not a chat; remove what else is named")
    of_messages = fields.keys() & {*OF_MESSAGES}
    if of_messages and not {"role", "content"} <= of_messages:
        raise ValueError("of messages, name role and content, and what else is read of them")
    for what, source in fields.items():
        names = _find_names(source)
        if names is None or not all(names):
            problem = f"{what}: {source!r} is no template"
            raise ValueError(f"{problem}; write names in braces, and other braces twice: {{{{")
        if "{" in source and what in ("messages", "tools", *of_messages):
            raise ValueError(f"{what}: {source!r} makes a text; name a key")


def _find_names(source: str) -> list[str] | None:
    """Return the names in a template; None = it is not valid."""
    try:
        parsed = list(string.Formatter().parse(source))
    except ValueError:
        return None
    if any(spec or conversion for _, _, spec, conversion in parsed):
        return None
    return [name for _, name, _, _ in parsed if name is not None]


def fill(source: str, record: Mapping[str, Any]) -> Any:
    """Return what `fields` names in a record: the value of a key, or the text of a template.

    What precedes an empty value in a template is left out with it: of "{question} {context}", the
    space.
    """
    if "{" not in source:
        return record[_require(source, record)]
    text = ""
    for before, name, _, _ in string.Formatter().parse(source):
        value = ""
        if name is not None:
            value = record[_require(name, record)] or ""
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
    return f"{{{', '.join(f'{what}: {_quote(name)}' for what, name in fields.items())}}}"


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
