"""What a chat template leaves out of its text: the strings of a chat that are not in it.

Templates may write a string next to letters, so that "use" is also found in their "user". The
longer strings of the same key are not.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.data.chat_template import REASONING_KEYS

_NOT_WRITTEN = frozenset({"role", "type", "index", "id", "tool_call_id"})
"""keys of messages and calls whose values select what a template writes, or are no text"""
_TAG = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z][A-Z _]*\]")
"""what templates look for in content, such as </think>, and may cut off"""
_ESCAPES = re.compile(r"\\[nrt]|\\|\s")
"""what strings of JSON, of Python and of texts differ in"""


@dataclass(frozen=True)
class Unwritten:
    """Strings that are not in the text of a chat."""

    lost: list[str]
    """their keys"""
    thinking: list[str]
    """of replies before the last message of the user, which templates mean to leave out"""


def find_unwritten(
    messages: Sequence[Mapping[str, Any]], places: Sequence[str], tools: Any, text: str
) -> Unwritten:
    """Return the strings of a chat that are not in its `text`, which its template wrote.

    Args:
        places: of the messages in the record, e.g. messages[0].
    """
    written = _Written(text)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    unwritten = Unwritten([], [])
    for i, (message, place) in enumerate(zip(messages, places, strict=True)):
        is_earlier_reply = message["role"] == "assistant" and i < max(users, default=0)
        for key, value in message.items():
            if key in _NOT_WRITTEN or written.has_all(_strings_of(key, value)):
                continue
            where = f"{place}.{key}"
            if key == "content":
                where += f" of role {json.dumps(message['role'])}"
            is_thinking = key in REASONING_KEYS
            if key == "content":  # before the last tag
                is_thinking = written.has_all(_TAG.split(value)[-1:])
            if is_earlier_reply and is_thinking:
                unwritten.thinking.append(where)
            else:
                unwritten.lost.append(where)
    if not written.has_all(_strings_of_tools(tools)):
        unwritten.lost.append("tools")
    return unwritten


class _Written:
    """The text of a chat."""

    def __init__(self, text: str) -> None:
        self._text = text

    def has_all(self, strings: Iterable[str]) -> bool:
        return all(map(self._has, strings))

    def _has(self, string: str) -> bool:
        """Whether a string is in the text, without space around it, or encoded as in JSON."""
        plain = string.strip()
        if plain in self._text:
            return True
        bare = _ESCAPES.sub("", plain)
        if bare == plain and plain.isascii():
            return False
        in_ascii = _ESCAPES.sub("", json.dumps(plain)[1:-1])
        return bare in self._bare_text or in_ascii in self._bare_text

    @functools.cached_property
    def _bare_text(self) -> str:
        return _ESCAPES.sub("", self._text)


def _strings_of(key: str, value: Any) -> Iterator[str]:
    """Yield the strings of what a message has under a key."""
    if key == "content":
        yield from _TAG.split(value)  # may cut off the tags
    elif key == "tool_calls":
        for call in value:
            yield from _strings_of_call(call)
    else:
        yield from _leaves(value)


def _strings_of_call(call: Mapping[str, Any]) -> Iterator[str]:
    for key, value in call.items():
        if key == "function":
            yield from _strings_of_call(value)
        elif key not in _NOT_WRITTEN:
            yield from _leaves(value)


def _strings_of_tools(tools: Any) -> Iterator[str]:
    """Yield names and descriptions of tools and their parameters; the details can be left out."""
    for tool in tools or ():
        function = tool.get("function", tool)
        yield from _named(function["name"], function)
        properties = (function.get("parameters") or {}).get("properties") or {}
        for name, schema in properties.items():
            yield from _named(name, schema)


def _named(name: str, described: Any) -> Iterator[str]:
    yield name
    description = described.get("description") if isinstance(described, dict) else None
    if isinstance(description, str):
        yield description


def _leaves(value: Any) -> Iterator[str]:
    """Yield the strings in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
