"""What a chat template leaves out of its text, asked of it with markers in place of the strings.

Chats of the same roles and keys have the same probe, which the template renders once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm.data.chat_template import REASONING_KEYS
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError

_SELECTING = frozenset({"role", "type", "index"})
"""keys of messages and calls whose values select what a template writes"""
_IDS = frozenset({"id", "tool_call_id"})
_MARKER = re.compile(r"x\d+q7")
_TAG = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z][A-Z _]*\]")
"""what templates look for in content, such as </think>"""
_MAX_PROBES = 1024
"""that are remembered"""


class Place(NamedTuple):
    """Where a string of a chat is."""

    key: str
    text: str
    """the string; empty = it is in arguments"""
    is_earlier_thinking: bool
    """of a reply before the last message of the user: templates mean to leave it out"""


class TemplateProbe:
    """Finds the strings of chats that the chat template of a tokenizer does not write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tags = set(_TAG.findall(tokenizer.all_templates.text))
        tags |= {"<" + tag.removeprefix("</") for tag in tags if tag.startswith("</")}
        self._tags = re.compile(f"({'|'.join(map(re.escape, sorted(tags)))})" if tags else "((?!))")
        self._find_written = functools.lru_cache(_MAX_PROBES)(self._ask)

    def find_unwritten(
        self, messages: Sequence[Mapping[str, Any]], places: Sequence[str], tools: Any, text: str
    ) -> list[Place]:
        """Return the strings of a chat that are not in its text.

        Args:
            places: of the messages in the record, e.g. messages[0].
            text: what the template writes for the chat.
        """
        chat = _MarkedChat(self._tags)
        marked_tools = chat.mark_tools(tools)
        probe = json.dumps([chat.mark_messages(messages, places), marked_tools])
        written = self._find_written(probe)
        if written is None:
            return [place for place in chat.places.values() if place.text not in text]
        return [place for marker, place in chat.places.items() if marker not in written]

    def _ask(self, probe: str) -> frozenset[str] | None:
        """Return the markers that the template writes; None = it demands other strings."""
        messages, tools = json.loads(probe)
        try:
            rendered = self._tokenizer.render(messages, tools=tools)
        except ConfigError:
            return None
        return frozenset(_MARKER.findall(rendered.text))


class _MarkedChat:
    """Puts markers in place of the strings of a chat.

    Arguments of calls become one value of each kind, and tools one tool, so that few probes differ.
    """

    def __init__(self, tags: re.Pattern[str]) -> None:
        self.places: dict[str, Place] = {}
        """of the markers"""
        self._tags = tags
        self._ids: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        """the markers of tools and of called functions by name, which results repeat"""

    def _mark(self, place: str, text: str = "", is_earlier_thinking: bool = False) -> str:
        marker = f"x{len(self.places)}q7"
        self.places[marker] = Place(place, text, is_earlier_thinking)
        return marker

    def mark_tools(self, tools: Any) -> Any:
        if tools is None:
            return None
        functions = [tool.get("function", tool) for tool in tools]
        marked: dict[str, Any] = {"name": self._mark("tools", functions[0]["name"])}
        self._functions = {function["name"]: marked["name"] for function in functions}
        if any(function.get("description") for function in functions):
            marked["description"] = self._mark("tools")
        schemas = [function.get("parameters") or {} for function in functions]
        if any(schemas):
            arguments = [schema["properties"] for schema in schemas if schema.get("properties")]
            properties: dict[str, Any] = {}
            if arguments:
                argument = properties[self._mark("tools")] = {"type": "string"}
                if '"description"' in json.dumps(arguments):
                    argument["description"] = self._mark("tools")
            marked["parameters"] = {"type": "object", "properties": properties}
        if all("function" in tool for tool in tools):
            return [{"type": "function", "function": marked}]
        return [marked]

    def mark_messages(
        self, messages: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> list[dict[str, Any]]:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        marked: list[dict[str, Any]] = []
        for i, (message, place) in enumerate(zip(messages, places, strict=True)):
            is_earlier = message["role"] == "assistant" and i < max(users, default=0)
            marked.append(self._mark_message(message, place, is_earlier))
        return marked

    def _mark_message(
        self, message: Mapping[str, Any], place: str, is_earlier: bool
    ) -> dict[str, Any]:
        marked: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                content_place = f"{place}.content of role {json.dumps(message['role'])}"
                marked[key] = self._mark_content(value, content_place, is_earlier)
            elif key == "tool_calls" and isinstance(value, list):
                calls = enumerate(value)
                marked[key] = [self._mark_call(call, f"{place}.{key}[{i}]") for i, call in calls]
            elif key == "name" and isinstance(value, str) and value in self._functions:
                marked[key] = self._functions[value]
            elif value is not None:
                thinks = is_earlier and key in REASONING_KEYS
                marked[key] = self._mark_value(key, value, f"{place}.{key}", thinks)
        return marked

    def _mark_content(self, content: str, place: str, is_earlier: bool) -> str:
        pieces = self._tags.split(content.strip())
        for i in range(0, len(pieces), 2):  # the others are tags
            text = pieces[i].strip()
            if text:
                thinks = is_earlier and i < len(pieces) - 1
                pieces[i] = pieces[i].replace(text, self._mark(place, text, thinks))
        return "".join(pieces)

    def _mark_call(self, call: Any, place: str) -> Any:
        if not isinstance(call, dict):
            return self._mark_value("", call, place)
        marked: dict[str, Any] = {}
        for key, value in call.items():
            if key == "function":
                marked[key] = self._mark_call(value, f"{place}.{key}")
            else:
                marked[key] = self._mark_value(key, value, f"{place}.{key}")
        if isinstance(call.get("name"), str):
            self._functions[call["name"]] = marked["name"]
        return marked

    def _mark_value(self, key: str, value: Any, place: str, thinks: bool = False) -> Any:
        if key in _SELECTING or value == "":
            return value
        if key in _IDS and isinstance(value, str):  # of the same length, which some templates check
            return self._ids.setdefault(value, str(len(self._ids)).zfill(len(value)))
        if isinstance(value, str):
            return self._mark(place, value.strip(), thinks)
        return self._mark_leaves(_one_of_each_kind(value), place, thinks)

    def _mark_leaves(self, value: Any, place: str, thinks: bool) -> Any:
        if isinstance(value, dict):
            values = [self._mark_leaves(each, place, thinks) for each in value.values()]
            return {self._mark(place, "", thinks): each for each in values}
        if isinstance(value, list):
            return [self._mark_leaves(each, place, thinks) for each in value]
        return self._mark(place, "", thinks)


def _one_of_each_kind(value: Any) -> Any:
    """Return a value of the same structure with one member of each kind, and without strings."""
    if isinstance(value, dict):
        return dict(enumerate(_one_of_each_kind(list(value.values()))))
    if isinstance(value, list):
        return list({json.dumps(kind): kind for kind in map(_one_of_each_kind, value)}.values())
    return None
