"""What a chat template leaves out of its text: the strings of a chat that are not in it.

Templates may write a string next to letters, so that "use" is also found in their "user". The
longer strings of the same key are not.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_NOT_WRITTEN = frozenset({"role", "type", "index", "id", "tool_call_id"})
"""keys of messages and calls whose values select what a template writes, or are no text"""
_TAG = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z][A-Z _]*\]")
"""what templates look for in content, such as </think>, and may cut off"""
_ESCAPES = re.compile(r"\\[nrt]|\\|\s")
"""what strings of JSON, of Python and of texts differ in"""


def find_unwritten(
    messages: Sequence[Mapping[str, Any]], places: Sequence[str], tools: Any, text: str
) -> list[str]:
    """Return the keys whose strings are not in the `text` of a chat, which its template wrote.

    Args:
        places: of the messages in the record, e.g. messages[0].
    """
    unwritten: list[str] = []
    for message, place in zip(messages, places, strict=True):
        for key, value in message.items():
            if key in _NOT_WRITTEN or _has_all(text, _strings_of(key, value)):
                continue
            where = f"{place}.{key}"
            if key == "content":
                where += f" of role {json.dumps(message['role'])}"
            unwritten.append(where)
    if not _has_all(text, _strings_of_tools(tools)):
        unwritten.append("tools")
    return unwritten


def _has_all(text: str, strings: Iterable[str]) -> bool:
    """Whether strings are in a text, without space around them, or encoded as in JSON."""
    for string in strings:
        plain = string.strip()
        if plain in text:
            continue
        bare = _ESCAPES.sub("", plain)
        if bare == plain and plain.isascii():
            return False
        in_ascii = _ESCAPES.sub("", json.dumps(plain)[1:-1])
        if bare not in _remove_escapes(text) and in_ascii not in _remove_escapes(text):
            return False
    return True


@functools.lru_cache(maxsize=1)
def _remove_escapes(text: str) -> str:
    return _ESCAPES.sub("", text)


def _strings_of(key: str, value: Any) -> Iterator[str]:
    """Yield the strings of what a message has under a key."""
    if key == "content":
        yield from _TAG.split(value)  # may cut off the tags
    elif key == "tool_calls":
        for call in value:
            yield from _strings_of_call(call)
    else:
        yield from find_strings(value)


def _strings_of_call(call: Mapping[str, Any]) -> Iterator[str]:
    for key, value in call.items():
        if key == "function":
            yield from _strings_of_call(value)
        elif key not in _NOT_WRITTEN:
            yield from find_strings(value)


def _strings_of_tools(tools: Any) -> Iterator[str]:
    """Yield names and descriptions of tools and their parameters; the details can be left out."""
    for tool in tools or ():
        function = tool.get("function", tool)
        described = [(function["name"], function)]
        match function.get("parameters"):
            case {"properties": dict(properties)}:
                described += properties.items()
        for name, each in described:
            yield name
            match each:
                case {"description": str(description)}:
                    yield description


def find_strings(value: Any) -> Iterator[str]:
    """Yield the strings in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from find_strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_strings(each)
