"""Turns of a chat as messages with the roles and keys that chat templates read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from lm.data.chat_template import REASONING_KEYS
from lm.data.layouts.keys import ROLES
from lm.data.layouts.notes import ReadingNotes
from lm.data.layouts.values import decode, is_content, is_empty, join_parts
from lm.errors import ConfigError

_EXCHANGES = (("input", "output"), ("human", "assistant"))
"""keys of a question with its reply, of which a chat can be a list"""
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING_KEYS}
_LEARNED = ("train", "training", "loss")
"""false or 0 in messages that are not learned"""
_MASKS = ("mask", "loss_mask", "masked", "train_detail", "training_detail")
"""keys of messages that say in other ways what is learned, some the opposite in other trainers"""


@dataclass(frozen=True)
class TurnReader:
    """Reads turns as messages.

    Args:
        template: the chat template; None = the tokenizer has none.
        notes: to which it adds.
    """

    template: str | None
    notes: ReadingNotes

    def read(self, turns: Any, place: str) -> list[dict[str, Any]]:
        """Return the messages of a chat.

        Raises:
            ConfigError: what `place` names is no list of turns.
        """
        if not isinstance(turns, list) or not turns:
            shown = json.dumps(turns)[:60]
            raise ConfigError(f"{place} is {shown}, not a list of objects with role and content")
        unread: set[str] = set()
        messages: list[dict[str, Any]] = []
        for i, turn in enumerate(turns):
            messages.append(self._read_turn(turn, f"{place}[{i}]", unread))
        self.notes.unread.update(f"{place}[].{key}" for key in sorted(unread))
        return messages

    def _read_turn(self, turn: Any, place: str, unread: set[str]) -> dict[str, Any]:
        """Return a message; add to `unread` what it and the template leave out."""
        if not is_turn(turn):
            shown = f"{place} is {json.dumps(turn)[:60]}"
            raise ConfigError(f"{shown}, not an object with role and content, or from and value")
        message = {key: value for key, value in turn.items() if value is not None}
        if "role" not in message:
            message["role"] = message.pop("from", None)
        message["role"] = self._rename(message["role"], place, is_from="role" not in turn)
        _read_marks(message, place)
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
        if "tool_calls" in message:
            message["tool_calls"] = decode(message["tool_calls"])
        content = join_parts(message.get("content"))
        if message["role"] == "function_call":
            message |= {"role": "assistant", "tool_calls": _read_calls(content, place)}
            content = ""
        message["content"] = content
        for key in message.keys() - _MESSAGE_KEYS:
            is_read = key != "id" and self._is_in_template(rf"\b{re.escape(key)}\b")
            if is_read or is_content(key, message[key]):
                continue
            if not is_empty(message.pop(key)):
                unread.add(key)
        return message

    def _rename(self, role: Any, place: str, *, is_from: bool) -> Any:
        """Return the usual name of a role, unless the template has it under its own."""
        usual = usual_role(role)
        if usual == role or self._is_in_template(f"['\"]{re.escape(str(role))}['\"]"):
            return role
        if usual is not None:
            return usual
        shown = json.dumps(role)[:60]
        if is_from:
            raise ConfigError(f"{place}: from is {shown}, not one of {', '.join(ROLES)}")
        if role != "developer":
            what = f"message of role {shown}, which the chat template does not name"
            self.notes.others[what] += 1
        return role

    def _is_in_template(self, pattern: str) -> bool:
        return re.search(pattern, self.template or "") is not None


def _read_marks(message: dict[str, Any], place: str) -> None:
    """Give a message that is marked as not learned the weight 0; refuse marks that are not read."""
    for key in _LEARNED:
        is_learned = message.pop(key, True)
        if is_learned not in (True, False):  # also 1 and 0
            problem = f"{key} is {json.dumps(is_learned)[:60]}"
            raise ConfigError(f"{place}: {problem}; it must be true or false")
        if not is_learned:
            message["weight"] = 0
    for key in _MASKS:
        if not is_empty(message.get(key)):
            remedy = "write weight: 0 in messages that are not learned, and remove it"
            raise ConfigError(f"{place}: {key} is not read; {remedy}")


def is_turn(turn: Any) -> bool:
    """Whether this is what one speaker has said."""
    return isinstance(turn, dict) and bool(turn.keys() & {"role", "from"})


def usual_role(role: Any) -> str | None:
    """Return the name of a role in chat templates; None = it is none of `ROLES`."""
    return ROLES.get(str(role).lower().replace("-", "_"))


def make_message(role: str, content: Any) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    return {"role": role, "content": content}


def split_exchanges(turns: Any) -> Any:
    """Return the texts of a list of questions with replies in turn, and other turns unchanged."""
    for keys in _EXCHANGES:
        if isinstance(turns, list) and all(
            isinstance(turn, dict) and turn.keys() == set(keys) for turn in turns
        ):
            return [turn[key] for turn in turns for key in keys]
    return turns


def _read_calls(content: Any, place: str) -> list[dict[str, Any]]:
    """Return the calls of tools that a turn holds as JSON text."""
    calls = decode(content)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{place} is {json.dumps(content)[:60]}, not a call of a tool as JSON")
    return [{"type": "function", "function": call} for call in calls]
