"""Records of all layouts as messages, as prompt and completion, or as text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from lm.data.layouts.advice import explain_no_layout, find_reason
from lm.data.layouts.keys import CHATS, DEFAULT_TEXT_FIELD, SYSTEM, find_exchange
from lm.data.layouts.notes import ReadingNotes
from lm.data.layouts.text import get_text
from lm.data.layouts.turns import TurnReader, make_message, split_exchanges
from lm.data.layouts.values import decode, is_content, is_empty, join_parts, strings_in
from lm.errors import ConfigError

_SPEAKERS = ("user", "assistant")
_MESSAGES = '{"messages": [{"role": "user", "content": "Q"}, ...]}'


@dataclass(frozen=True)
class LayoutReader:
    """Reads records of all layouts as messages, prompt and completion, or text.

    Args:
        template: the chat template; None = the tokenizer has none, so that questions and replies
            become prompts and completions.
        notes: to which it adds.
    """

    text_field: str
    template: str | None
    notes: ReadingNotes = field(default_factory=ReadingNotes)

    def read(self, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a record as messages, or as prompt and completion; None = it is text.

        Raises:
            ConfigError: it has none of the layouts, or content that its layout has no place for.
        """
        values = {key: value for key, value in record.items() if value is not None}
        keys = self._find_layout(values)
        if not keys and self.text_field not in record:
            raise ConfigError(explain_no_layout(record, self.text_field))
        if not keys:
            self._count_unread(values, {self.text_field})
            return None
        if keys[0] in CHATS:
            values[keys[0]] = decode(values[keys[0]])
        converted = self.convert(values, keys)
        placed = add_placed(converted, values)
        self.check_others(values, keys, {*keys, *placed})
        if keys not in (["messages"], ["prompt", "completion"]):
            self.notes.layouts[", ".join(keys)] += 1
        return converted

    def convert(self, values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """Return the messages of a record, or its prompt and completion."""
        *questions, reply = keys
        if not questions:
            turns = split_exchanges(values[reply])
            if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
                turns = [make_message(_SPEAKERS[i % 2], text) for i, text in enumerate(turns)]
            return {"messages": self._turns.read(turns, reply)}
        if isinstance(values[questions[0]], list) and len(questions) == 1:
            completion = values[reply]
            if isinstance(completion, str):
                completion = [make_message("assistant", completion)]
            prompt = self._turns.read(values[questions[0]], questions[0])
            return {"prompt": prompt, "completion": self._turns.read(completion, reply)}
        if keys == ["prompt", "completion"]:  # of preferences, too
            return {key: values[key] for key in keys}
        question = "\n\n".join(filter(None, [get_text(values, key) for key in questions]))
        answer = get_text(values, reply)
        if self.template is None and not any(map(values.get, (*SYSTEM, "tools"))):
            return {"prompt": question + "\n", "completion": answer}
        return {"messages": [make_message("user", question), make_message("assistant", answer)]}

    def check_others(
        self, values: Mapping[str, Any], keys: Sequence[str], placed: Set[str]
    ) -> None:
        """Raise ConfigError if a key of a record that is not read holds content."""
        refused: list[str] = []
        for key in self._count_unread(values, placed):
            reason = find_reason(key, values[key])
            if reason is not None:
                raise ConfigError(f"{key}: {reason}")
            if is_content(key, values[key]) and not self._repeats(values, keys, key):
                refused.append(key)
        if refused:
            problem = f"not read, as the record is read by {', '.join(keys)}"
            remedy = f"to learn it, write the record as messages, {_MESSAGES}, else remove the key"
            if self.text_field in refused:
                remedy = f"remove what is not to be learned, {self.text_field} or the others"
            raise ConfigError(f"{', '.join(refused)}: {problem}; {remedy}")

    @functools.cached_property
    def _turns(self) -> TurnReader:
        return TurnReader(self.template, self.notes)

    def _find_layout(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that a chat, a question or a prompt is read by; [] = it is none."""
        if self.text_field in values and self.text_field != DEFAULT_TEXT_FIELD:
            return []
        return find_exchange(values)

    def _count_unread(self, values: Mapping[str, Any], placed: Set[str]) -> list[str]:
        """Return the keys of a record that are not read, and not empty, and count them."""
        others = [key for key in values if key not in placed and not is_empty(values[key])]
        self.notes.unread.update(others)
        return others

    def _repeats(self, values: Mapping[str, Any], keys: Sequence[str], other: str) -> bool:
        """Whether the strings of `other` are those that are read, as they are or in one text."""
        strings = strings_in([values[key] for key in keys])
        if other == self.text_field and isinstance(values[other], str):
            return bool(strings) and all(string in values[other] for string in strings)
        return strings_in(values[other]) <= strings


def add_placed(converted: dict[str, Any], values: Mapping[str, Any]) -> set[str]:
    """Add to the messages of a record its system prompt and tools. Return their keys."""
    chat = converted.get("messages") or converted["prompt"]
    if not isinstance(chat, list):
        return set()
    for key in filter(values.get, SYSTEM):
        _add_system(chat, key, join_parts(values[key]))
    converted["tools"] = decode(values.get("tools"))
    return {*SYSTEM, "tools"}


def _add_system(messages: list[dict[str, Any]], key: str, system: Any) -> None:
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, make_message("system", system))
    elif messages[0]["content"] != system:
        raise ConfigError(f"{key}: the messages start with another system message; remove one")
