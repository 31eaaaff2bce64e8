"""Messages of records with the roles and keys that chat templates read, and the tools they call."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lm.data.json_lines import load_json
from lm.data.record_fields import OF_MESSAGES, RecordFields, Value, as_yaml, show
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
        notes: to which it adds what was read otherwise than it is in the data.
    """

    fields: RecordFields
    template: str | None
    notes: Counter[str]

    def read(
        self, values: Mapping[str, Value], what: str, tools: Sequence[Any] | None
    ) -> list[Turn]:
        """Return the messages that a record has as `what`, of a chat with `tools`.

        Raises:
            ConfigError: they are none, or have keys that are not read.
        """
        value = values[what]
        turns = decode(value.content) if what == "messages" else value.content
        if turns and isinstance(turns, dict):  # one
            turns = [turns]
        if not isinstance(turns, list) or not turns:
            shown = show(turns)
            raise ConfigError(f"{value.place} is {shown}, not a list of objects with role, content")
        nullable = _find_nullable_arguments(tools)
        read: list[Turn] = []
        for i, turn in enumerate(turns):
            place = f"{value.place}[{i}]"
            message = self._select(turn, place, values)
            message["role"] = self._read_role(message.get("role"), place)
            calls = decode(message.pop("tool_calls", None)) or []
            if not isinstance(calls, list):
                raise ConfigError(f"{place}: tool_calls is {show(calls)}, not a list of calls")
            if "content" in message or not calls:
                message["content"] = _read_content(message.get("content"), place)
            if calls:
                calls_place = f"{place}.tool_calls"
                message["tool_calls"] = [
                    self._read_call(call, calls_place, nullable) for call in calls
                ]
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
            if what in OF_MESSAGES and (not named or key in names):
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

    def _read_call(self, call: Any, place: str, nullable: Mapping[str, Set[str]]) -> Any:
        """Return the call of a tool without the nulls that a table adds.

        A table has the arguments of all functions in each call.
        """
        if not isinstance(call, dict):
            raise ConfigError(f"{place}: {show(call)} is not an object")
        read = {key: value for key, value in call.items() if value is not None}
        if "function" in read:
            read["function"] = self._read_call(read["function"], place, nullable)
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            _parse_arguments(arguments, place)
        elif arguments is not None:
            kept = nullable.get(str(call.get("name")), frozenset())
            read["arguments"] = _drop_nulls(arguments, kept)
            if read["arguments"] != arguments:
                what = "call of a tool without nulls of arguments, which tables add"
                self.notes[what] += 1
        return read


def _read_content(content: Any, place: str) -> str:
    """Return the text of a message, which can be a list of parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{place}: content is {show(content)}, not text")
    texts: list[str] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text), **others} if not _drop_nulls(others, set()):
                texts.append(text)
            case _:
                rule = 'only parts {"type": "text", "text": TEXT} are read'
                raise ConfigError(f"{place}: content has {show(part)}; {rule}")
    return "".join(texts)


def decode(value: Any) -> Any:
    """Return a list or an object that is JSON text, and other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        decoded = load_json(value)
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, list | dict) else value


# ---- arguments of calls


def as_objects(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the arguments of all calls as objects."""

    def parse(arguments: Any) -> Any:
        return load_json(arguments) if isinstance(arguments, str) else arguments

    return [_convert_arguments(message, parse) for message in messages]


def as_texts(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the arguments of all calls as JSON text, as in OpenAI's format."""

    def write(arguments: Any) -> str:
        if isinstance(arguments, str):
            return arguments
        return json.dumps(arguments, ensure_ascii=False)

    return [_convert_arguments(message, write) for message in messages]


def _convert_arguments(value: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message, or a call in it, with other arguments."""
    converted = dict(value)
    calls = value.get("tool_calls")
    if isinstance(calls, list):
        converted["tool_calls"] = [_convert_arguments(call, convert) for call in calls]
    if "function" in value:
        converted["function"] = _convert_arguments(value["function"], convert)
    if "arguments" in value:
        converted["arguments"] = convert(value["arguments"])
    return converted


def find_arguments(messages: Sequence[Message]) -> Iterator[Any]:
    """Yield the arguments of all calls."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call.get("function", call).get("arguments")


def _parse_arguments(arguments: str, place: str) -> None:
    try:
        decoded = load_json(arguments)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        problem = f"arguments are {show(arguments)}, not a JSON object"
        raise ConfigError(f"{place}: {problem}; correct or remove the line")


# ---- tools


def read_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a record as a list without the nulls that tables add; None = no tools."""
    tools = decode(tools)
    if not tools:
        return None
    listed = tools if isinstance(tools, list) else [tools]
    for tool in listed:
        if not _is_tool(tool):
            shape = "{function: {name: NAME, parameters: JSON SCHEMA}}"
            problem = f"tools: {show(tool)} is not {shape}"
            raise ConfigError(f"{problem}; correct or remove the line")
    return _drop_nulls(listed, {"const", "default"})


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    match function:
        case {"name": str()}:
            return isinstance(function.get("parameters") or {}, dict)
        case _:
            return False


def _find_nullable_arguments(tools: Sequence[Any] | None) -> dict[str, Set[str]]:
    """Return the arguments, nested ones too, that can be null by the schema of each function."""
    nullable: dict[str, Set[str]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        nullable[function["name"]] = _find_nullable(function.get("parameters"))
    return nullable


def _find_nullable(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_find_nullable, schema))
    if not isinstance(schema, dict):
        return set()
    found = _find_nullable(list(schema.values()))
    properties = schema.get("properties")
    if isinstance(properties, dict):
        found |= {name for name, each in properties.items() if _allows_null(each)}
    return found


def _allows_null(schema: Any) -> bool:
    """Whether null is valid by a JSON schema, as far as types say."""
    if not isinstance(schema, dict):
        return True
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(map(_allows_null, options))
    if schema.get("nullable") or "type" not in schema:
        return True
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return "null" in kinds


def _drop_nulls(value: Any, kept: Set[str]) -> Any:
    """Return a value without the nulls whose key is not in `kept`."""
    if isinstance(value, list):
        return [_drop_nulls(each, kept) for each in value]
    if not isinstance(value, dict):
        return value
    items = value.items()
    return {key: _drop_nulls(each, kept) for key, each in items if each is not None or key in kept}
