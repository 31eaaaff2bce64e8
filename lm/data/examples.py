"""What a record is an example of: a text, or a chat; of preferences two, which share a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.data.messages import Message, MessageReader, Turn, decode, read_tools
from lm.data.record_fields import Value, check_text
from lm.errors import ConfigError, error_prefix


@dataclass(frozen=True)
class Text:
    """A text that no chat template renders."""

    text: str
    n_prompt: int | None = None
    """characters of the prompt; None = it has none"""


@dataclass(frozen=True)
class Chat:
    """Messages that the chat template renders."""

    prompt: Sequence[Turn]
    """[] = all replies are learned"""
    completion: Sequence[Turn]
    tools: Sequence[Any] | None

    @property
    def turns(self) -> list[Turn]:
        return [*self.prompt, *self.completion]

    @property
    def messages(self) -> list[Message]:
        return [turn.message for turn in self.turns]


Example = Text | Chat
_REPLIES = ("chosen", "rejected")


@dataclass(frozen=True)
class ExampleReader:
    """Reads examples; what they are of is told by the values that `RecordFields` selects."""

    messages: MessageReader

    def read(self, values: Mapping[str, Value]) -> Example:
        """Return the example of a record.

        Raises:
            ConfigError: it has no text, or messages that are none.
        """
        if "text" in values:
            return Text(check_text(values["text"].content, values["text"].place))
        if "messages" not in values:
            return self._read_exchange(values, "assistant" if "user" in values else "completion")
        tools = _read_tools(values)
        turns = self.messages.read(values, "messages", tools)
        return Chat([], [*_read_system(values, turns), *turns], tools)

    def read_pair(self, values: Mapping[str, Value]) -> list[Example]:
        """Return the examples of the chosen and of the rejected reply of a record.

        Raises:
            ConfigError: they are no two replies to one prompt.
        """
        for reply in _REPLIES:
            if not values[reply].content:
                raise ConfigError(f"{values[reply].place} is empty; remove the line")
        if values.keys() & {"prompt", "user"}:
            pair = [self._read_exchange(values, reply) for reply in _REPLIES]
        else:
            pair = self._split_dialogs(values)
        for reply, example in zip(_REPLIES, pair, strict=True):
            if isinstance(example, Chat):
                with error_prefix(values[reply].place):
                    _check_reply(example)
        return pair

    def _read_exchange(self, values: Mapping[str, Value], reply: str) -> Example:
        """Return the example of a prompt, or what a user says, with the value that completes it."""
        completion = values[reply]
        tools = _read_tools(values)
        if "user" in values:
            user = values["user"]
            said = {"role": "user", "content": check_text(user.content, user.place)}
            prompt = [Turn(said, user.place)]
        elif isinstance(values["prompt"].content, str):
            return _read_texts(values, completion)
        else:
            prompt = self.messages.read(values, "prompt", tools)
        if isinstance(completion.content, str):
            said = {
                "role": "assistant",
                "content": check_text(completion.content, completion.place),
            }
            turns = [Turn(said, completion.place)]
        else:
            turns = self.messages.read(values, reply, tools)
        return _make_chat(_read_system(values, prompt), prompt, turns, tools)

    def _split_dialogs(self, values: Mapping[str, Value]) -> list[Example]:
        """Return two dialogs as the messages that they start with, and each as the rest."""
        tools = _read_tools(values)
        dialogs: list[list[Turn]] = []
        for reply in _REPLIES:
            if isinstance(values[reply].content, str):
                problem = f"{values[reply].place} is a text, and the record names no prompt"
                raise ConfigError(f"{problem}; name what both replies answer, or complete dialogs")
            dialogs.append(self.messages.read(values, reply, tools))
        n_common = 0
        for chosen, rejected in zip(*dialogs, strict=False):
            if chosen.message != rejected.message:
                break
            n_common += 1
        lengths = [len(dialog) for dialog in dialogs]
        if n_common in (0, *lengths):
            found = f"{n_common} of {lengths[0]} and {lengths[1]} messages are their common start"
            remedy = "both have to start with the same messages, and end with different replies"
            places = " and ".join(values[reply].place for reply in _REPLIES)
            raise ConfigError(f"{places}: {found}; {remedy}")
        system = _read_system(values, dialogs[0])
        return [
            _make_chat(system, dialog[:n_common], dialog[n_common:], tools) for dialog in dialogs
        ]


def _make_chat(
    system: Sequence[Turn],
    prompt: Sequence[Turn],
    reply: Sequence[Turn],
    tools: Sequence[Any] | None,
) -> Chat:
    """Return the chat of a prompt and what completes it, which is not one more reply."""
    if prompt[-1].message["role"] == reply[0].message["role"] == "assistant":
        problem = "the prompt ends with a reply, and what completes it starts with another"
        raise ConfigError(f"{prompt[-1].place}: {problem}; remove one")
    return Chat([*system, *prompt], reply, tools)


def _read_tools(values: Mapping[str, Value]) -> list[Any] | None:
    return read_tools(values["tools"].content) if "tools" in values else None


def _read_system(values: Mapping[str, Value], turns: Sequence[Turn]) -> list[Turn]:
    """Return the system message that a record has beside its messages, or none."""
    if "system" not in values or not values["system"].content:
        return []
    system = values["system"]
    if turns[0].message["role"] in ("system", "developer"):
        problem = "the messages start with a system message, too"
        raise ConfigError(f"{system.place}: {problem}; remove one")
    return [
        Turn({"role": "system", "content": check_text(system.content, system.place)}, system.place)
    ]


def _read_texts(values: Mapping[str, Value], completion: Value) -> Text:
    """Return a prompt with what completes it, both texts."""
    prompt = values["prompt"]
    for what in ("system", "tools"):
        if what in values and values[what].content:
            problem = f"{values[what].place}: a prompt that is a text has no place for it"
            raise ConfigError(f"{problem}; name the prompt user (fields), or write it into it")
    if isinstance(completion.content, dict | list):
        problem = f"{completion.place}: is messages, and {prompt.place} is a text"
        raise ConfigError(f"{problem}; write both in one way")
    text = check_text(prompt.content, prompt.place)
    decoded = decode(text)
    are_objects = isinstance(decoded, list) and decoded and isinstance(decoded[0], dict)
    if are_objects and not prompt.is_made:
        problem = "is a list of objects as JSON text, which would be learned as text"
        remedy = "write it as a list, or to learn the text, name the key in braces (fields)"
        raise ConfigError(f"{prompt.place}: {problem}; {remedy}")
    return Text(text + check_text(completion.content, completion.place), len(text))


def _check_reply(chat: Chat) -> None:
    """Raise ConfigError unless what is compared is of the assistant, and says something."""
    messages = [turn.message for turn in chat.completion]
    if messages[0]["role"] != "assistant":
        problem = f"what differs starts with a message of role {json.dumps(messages[0]['role'])}"
        remedy = "write the prompt once, and the replies alone, or no prompt and complete dialogs"
        raise ConfigError(f"{problem}; {remedy}")
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise ConfigError("the reply is empty; remove the line")
