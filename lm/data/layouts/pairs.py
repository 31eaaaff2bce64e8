"""Records of preferences as two: one with the chosen reply, the other with the rejected one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.layouts.advice import explain_no_pair
from lm.data.layouts.keys import CHATS, PAIR, find_question
from lm.data.layouts.reader import LayoutReader, add_placed
from lm.data.layouts.turns import is_turn, usual_role
from lm.data.layouts.values import decode
from lm.errors import ConfigError, error_prefix


@dataclass(frozen=True)
class PairReader:
    """Reads records of preferences; each of the two is read by `layouts`."""

    layouts: LayoutReader

    def read(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the chosen and the rejected reply of a record, each as of `LayoutReader.read`.

        Raises:
            ConfigError: it has no two replies to one prompt, or content that has no place.
        """
        values = {key: value for key, value in record.items() if value is not None}
        if not any(key in values for key in PAIR):
            raise ConfigError(explain_no_pair(values))
        values |= {key: _read_reply(values, key) for key in PAIR}
        replies = [values[key] for key in PAIR]
        questions: list[str] = []
        parts = _split_dialogs(*replies)
        if parts is None:
            questions = _find_prompt(values)
            if questions[0] in CHATS:
                values[questions[0]] = decode(values[questions[0]])
            parts = [{**values, "completion": reply} for reply in replies]
        pair: list[Mapping[str, Any]] = []
        placed = {*questions, *PAIR}
        for key, part in zip(PAIR, parts, strict=True):
            with error_prefix(key):
                converted = self.layouts.convert(part, [*(questions or ["prompt"]), "completion"])
                _check_reply(converted)
            placed |= add_placed(converted, values)
            pair.append(converted)
        keys = [*questions, *PAIR]
        self.layouts.check_others(values, keys, placed)
        if questions not in ([], ["prompt"]):
            self.layouts.notes.layouts[", ".join(keys)] += 1
        return pair


def _find_prompt(values: Mapping[str, Any]) -> list[str]:
    """Return the keys that hold what the replies of preferences answer."""
    found = [key for key in CHATS if key in values][:1] or find_question(values)
    if not found:
        problem = f"no prompt; the line has the keys: {', '.join(values)}"
        remedy = "write what both replies answer as prompt, or at the start of both as messages"
        raise ConfigError(f"{problem}; {remedy}")
    return found


def _read_reply(values: Mapping[str, Any], key: str) -> Any:
    """Return a reply of preferences: a text, or messages, which can be all of the dialog."""
    reply = values.get(key)
    messages = decode(reply)
    if isinstance(messages, dict):  # one, as in ShareGPT
        messages = [messages]
    if not reply:
        problem = f"is {'empty' if key in values else 'missing'}"
        problem += ", and objective: dpo compares chosen with rejected"
        if key not in values:
            problem += f"; the line has the keys: {', '.join(values)}"
        raise ConfigError(f"{key}: {problem}; name or add the reply, or remove the line")
    if messages and isinstance(messages, list) and all(map(is_turn, messages)):
        return messages
    if isinstance(reply, str):
        return reply
    shown = json.dumps(reply)[:60]
    raise ConfigError(f"{key}: {shown} is neither a text nor objects with role and content")


def _split_dialogs(chosen: Any, rejected: Any) -> list[dict[str, Any]] | None:
    """Return two dialogs as the messages that they start with, and each as the rest.

    None = they are replies only.
    """
    if not isinstance(chosen, list) or not isinstance(rejected, list) or _starts_reply(chosen[0]):
        return None
    n_common = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        n_common += 1
    if n_common in (0, len(chosen), len(rejected)):
        found = f"{n_common} of {len(chosen)} and {len(rejected)} messages are their common start"
        remedy = "both have to start with the same messages, and end with different replies to them"
        raise ConfigError(f"chosen and rejected: {found}; {remedy}")
    return [
        {"prompt": dialog[:n_common], "completion": dialog[n_common:]}
        for dialog in (chosen, rejected)
    ]


def _starts_reply(message: Mapping[str, Any]) -> bool:
    return usual_role(message.get("role", message.get("from"))) in ("assistant", "function_call")


def _check_reply(converted: Mapping[str, Any]) -> None:
    """Raise ConfigError unless what is compared is of the assistant, and says something."""
    messages = converted.get("completion", converted.get("messages", [])[-1:])
    if isinstance(messages, str):
        return
    if not isinstance(converted.get("prompt", []), list):
        raise ConfigError("is messages, and prompt is text; write both in one way")
    if messages[0]["role"] in ("user", "system"):
        remedy = "both replies have to answer the same messages"
        raise ConfigError(f"the dialogs differ first in a message of the user; {remedy}")
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise ConfigError("the reply is empty; remove the line")
