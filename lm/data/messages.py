"""Messages of records with the roles and keys that chat templates read, and the tools they call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.data.json_lines import load_json
from lm.data.named_fields import OF_MESSAGES, as_yaml
from lm.data.record_fields import RecordFields, Value, show
from lm.errors import ConfigError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_MASKS = re.compile("loss|mask|train|weight|learn", re.IGNORECASE)
"""in keys by which other trainers say what is learned, some the opposite"""

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A message, as chat templates read it."""

    message: Message
    place: str
    """in the record, for errors"""


@dataclass(frozen=True)
class MessageReader:
    """Reads messages, and the tools that they call.

    Args:
        fields: names the keys of messages, or none.
        template: the chat template; None = the tokenizer has none.
    """

    fields: RecordFields
    template: str | None

    def read(self, values: Mapping[str, Value], what: str) -> list[Turn]:
        """Return the messages that a record has as `what`.

        Raises:
            ConfigError: they are none, or have keys that are not read.
        """
        value = values[what]
        turns = value.content
        if turns and isinstance(turns, dict):  # one
            turns = [turns]
        if not isinstance(turns, list) or not turns:
            shown = show(turns)
            raise ConfigError(f"{value.place} is {shown}, not a list of objects with role, content")
        read: list[Turn] = []
        for i, turn in enumerate(turns):
            place = f"{value.place}[{i}]"
            message = self._select(turn, place, values)
            message["role"] = self._read_role(message.get("role"), place)
            calls = message.pop("tool_calls", None) or []
            if not isinstance(calls, list):
                raise ConfigError(f"{place}: tool_calls is {show(calls)}, not a list of calls")
            if "content" in message or not calls:
                message["content"] = _read_content(message.get("content"), place)
            if calls:
                message["tool_calls"] = [_read_call(call, f"{place}.tool_calls") for call in calls]
            read.append(Turn(message, place))
        return read

    def _select(self, turn: Any, place: str, values: Mapping[str, Value]) -> Message:
        """Return what is read of a message, by the names that chat templates have for it."""
        if not isinstance(turn, dict):
            raise ConfigError(f"{place} is {show(turn)}, not an object with role, content")
        found: Message = {key: value for key, value in turn.items() if value is not None}
        named = self.fields.of_messages
        names = {key: what for what, key in named.items()}
        if not named and "role" not in found:
            names = _SHAREGPT_KEYS
        message: Message = {}
        unread: list[str] = []
        for key, value in found.items():
            what = names.get(key, key)
            if what in message and not named:
                unread.append(key)  # e.g. value next to content
            elif what in OF_MESSAGES and (not named or key in names):
                message[what] = value
            elif key == "weight":
                raise ConfigError(f"{place}: weight is not read; add weight: weight to fields")
            elif _MASKS.search(key):
                remedy = "write weight: 0 in messages that are not learned, and remove it"
                raise ConfigError(f"{place}: {key} is not read; {remedy}")
            elif not named and self._mentions(key):
                message[key] = value
            elif not named:
                unread.append(key)
        if unread:
            read = {what: value.place for what, value in values.items()}
            read |= {what: what for what in OF_MESSAGES}  # other messages may have them
            read |= {what: key for key, what in names.items()}
            problem = f"{place}: {', '.join(unread)}: not read, nor by the chat template"
            raise ConfigError(f"{problem}; to leave it out, name the rest, fields: {as_yaml(read)}")
        return message

    def _read_role(self, role: Any, place: str) -> str:
        if isinstance(role, str) and self._mentions(role):
            return role
        role = _SHAREGPT_ROLES.get(str(role), role)
        if role not in _ROLES:
            problem = f"role is {show(role)}, not one of {', '.join(_ROLES)}"
            remedy = "rename it; calls of tools are tool_calls of the assistant"
            raise ConfigError(f"{place}: {problem}, nor of the chat template; {remedy}")
        return role

    def _mentions(self, name: str) -> bool:
        """Whether the chat template mentions a key or a role of messages."""
        pattern = rf"\.{re.escape(name)}\b|['\"]{re.escape(name)}['\"]"
        return re.search(pattern, self.template or "") is not None


def _read_content(content: Any, place: str) -> str:
    """Return the text of a message, which can be a list of parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{place}: content is {show(content)}, not text")
    texts: list[str] = []
    for part in content:
        found = part
        if isinstance(part, dict):
            found = {key: value for key, value in part.items() if value is not None}
        match found:
            case {"type": "text", "text": str(text), **others} if not others:
                texts.append(text)
            case _:
                rule = 'only parts {"type": "text", "text": TEXT} are read'
                raise ConfigError(f"{place}: content has {show(part)}; {rule}")
    return "".join(texts)


# ---- tools


def read_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a record; None = it has none."""
    read = _read_json(tools, "tools")
    if not read:
        return None
    if not isinstance(read, list) or not all(map(_is_tool, read)):
        shape = "[{function: {name: NAME, parameters: JSON SCHEMA}}]"
        raise ConfigError(f"tools: {show(tools)} is not {shape}; correct or remove the line")
    return read


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_call(call: Any, place: str) -> Any:
    """Return the call of a tool, with its arguments as an object."""
    if not isinstance(call, dict):
        raise ConfigError(f"{place}: {show(call)} is not an object")
    read = {key: value for key, value in call.items() if value is not None}
    if "function" in read:
        read["function"] = _read_call(read["function"], place)
    if "arguments" in read:
        read["arguments"] = _read_json(read["arguments"], f"{place}: arguments")
        if not isinstance(read["arguments"], dict):
            problem = f"arguments are {show(call['arguments'])}, not a JSON object"
            raise ConfigError(f"{place}: {problem}; correct or remove the line")
    return read


def find_functions(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the functions of all calls that have arguments."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if "arguments" in function:
                yield function


def _read_json(value: Any, place: str) -> Any:
    """Return a value, or that of JSON text.

    A table has the keys of all objects in each, with null for those that it lacks: a null that is
    meant can only be in JSON text.
    """
    if isinstance(value, str):
        try:
            return load_json(value)
        except ValueError:
            return value
    if _has_null(value):
        remedy = "leave it out, or write all as JSON text, in which a null is meant"
        raise ConfigError(f"{place}: {show(value)} has a null, as tables add them; {remedy}")
    return value


def _has_null(value: Any) -> bool:
    """Whether a key of an object, or of one in it, is null."""
    if isinstance(value, list):
        return any(map(_has_null, value))
    if isinstance(value, dict):
        return None in value.values() or any(map(_has_null, value.values()))
    return False
