"""What a record is an example of: a text, or a chat; of preferences two, which share a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.data.messages import Message, MessageReader, Turn, read_tools
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
_OBJECTS = re.compile(r"\s*\[\s*\{")
"""starts a text that is a list of objects"""


def read_example(values: Mapping[str, Value], reader: MessageReader) -> Example:
    """Return the example of a record; the values that `RecordFields` selects tell what it is of.

    Raises:
        ConfigError: it has no text, or messages that are none.
    """
    if "text" in values:
        return Text(check_text(values["text"].content, values["text"].place))
    if "messages" in values:
        return _make_chat(values, [], reader.read(values, "messages"))
    return _read_exchange(values, "assistant" if "user" in values else "completion", reader)


def read_pair(values: Mapping[str, Value], reader: MessageReader) -> list[Example]:
    """Return the examples of the chosen and of the rejected reply of a record.

    Raises:
        ConfigError: they are no two replies to one prompt.
    """
    if values.keys() & {"prompt", "user"}:
        pair = [_read_exchange(values, reply, reader) for reply in _REPLIES]
    else:
        pair = _split_dialogs(values, reader)
    for reply, example in zip(_REPLIES, pair, strict=True):
        with error_prefix(values[reply].place):
            _check_reply(example)
    return pair


def _read_exchange(values: Mapping[str, Value], reply: str, reader: MessageReader) -> Example:
    """Return the example of a prompt, or what a user says, with the value that completes it."""
    if "user" in values:
        prompt = [_say("user", values["user"])]
    elif isinstance(values["prompt"].content, str):
        return _read_texts(values, values[reply])
    else:
        prompt = reader.read(values, "prompt")
    if isinstance(values[reply].content, str):
        return _make_chat(values, prompt, [_say("assistant", values[reply])])
    return _make_chat(values, prompt, reader.read(values, reply))


def _split_dialogs(values: Mapping[str, Value], reader: MessageReader) -> list[Example]:
    """Return two dialogs as the messages that they start with, and each as the rest."""
    dialogs = [reader.read(values, reply) for reply in _REPLIES]
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
    return [_make_chat(values, dialog[:n_common], dialog[n_common:]) for dialog in dialogs]


def _make_chat(
    values: Mapping[str, Value], prompt: Sequence[Turn], completion: Sequence[Turn]
) -> Chat:
    """Return the chat of a prompt, or of none, and what completes it, which is not one more reply.

    The record can have a system message and tools beside its messages.
    """
    tools = read_tools(values["tools"].content) if "tools" in values else None
    system: list[Turn] = []
    if "system" in values and values["system"].content:
        system = [_say("system", values["system"])]
        if [*prompt, *completion][0].message["role"] in ("system", "developer"):
            problem = "the messages start with a system message, too"
            raise ConfigError(f"{system[0].place}: {problem}; remove one")
    if not prompt:
        return Chat([], [*system, *completion], tools)
    if prompt[-1].message["role"] == completion[0].message["role"] == "assistant":
        problem = "the prompt ends with a reply, and what completes it starts with another"
        raise ConfigError(f"{prompt[-1].place}: {problem}; remove one")
    return Chat([*system, *prompt], completion, tools)


def _say(role: str, value: Value) -> Turn:
    return Turn({"role": role, "content": check_text(value.content, value.place)}, value.place)


def _read_texts(values: Mapping[str, Value], completion: Value) -> Text:
    """Return a prompt with what completes it, both texts."""
    prompt = values["prompt"]
    for what in ("system", "tools"):
        if what in values and values[what].content:
            problem = f"{values[what].place}: a prompt that is a text has no place for it"
            raise ConfigError(f"{problem}; name the prompt user (fields), or write it into it")
    text = check_text(prompt.content, prompt.place)
    if _OBJECTS.match(text) and not prompt.is_made:
        problem = "is a list of objects as JSON text, which would be learned as text"
        remedy = "write it as a list, or to learn the text, name the key in braces (fields)"
        raise ConfigError(f"{prompt.place}: {problem}; {remedy}")
    return Text(text + check_text(completion.content, completion.place), len(text))


def _check_reply(example: Example) -> None:
    """Raise ConfigError unless what is compared is of the assistant, and says something."""
    if isinstance(example, Text):
        says_something = len(example.text) != example.n_prompt
    else:
        messages = [turn.message for turn in example.completion]
        if messages[0]["role"] != "assistant":
            problem = (
                f"what differs starts with a message of role {json.dumps(messages[0]['role'])}"
            )
            remedy = (
                "write the prompt once, and the replies alone, or no prompt and complete dialogs"
            )
            raise ConfigError(f"{problem}; {remedy}")
        says_something = any(
            message.get("content") or message.get("tool_calls") for message in messages
        )
    if not says_something:
        raise ConfigError("the reply is empty; remove the line")
