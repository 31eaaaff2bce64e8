"""Layouts of instruction data other than messages: ShareGPT, Alpaca, prompt and response.

Their records become messages or, where the tokenizer has no chat template, prompts and completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.files import get_text
from lm.errors import ConfigError

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class Layout:
    """A layout, known by the keys of its records."""

    name: str
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


_SHAREGPT = Layout("ShareGPT", frozenset({"conversations"}), frozenset({"system", "tools"}))
_ALPACA = Layout("Alpaca", frozenset({"instruction", "output"}), frozenset({"input", "system"}))
_RESPONSE = Layout("prompt and response", frozenset({"prompt", "response"}), frozenset({"system"}))
_LAYOUTS = (_SHAREGPT, _ALPACA, _RESPONSE)
_NOT_READ = frozenset({"id"})
"""of records, which some layouts number"""
_READ_ELSEWHERE = frozenset({"messages", "completion"})
"""keys of the formats that are read as they are"""


def find_layout(record: Mapping[str, Any], text_field: str) -> Layout | None:
    """Return the layout of a record; None = it has none of these, or one of its keys is the text.

    Raises:
        ConfigError: it could be read in two ways, or has keys that its layout lacks.
    """
    layout = next((each for each in _LAYOUTS if record.keys() >= each.required), None)
    if layout is None or text_field in layout.required | layout.optional:
        return None
    known = layout.required | layout.optional | _NOT_READ
    others = [key for key in record if key not in known]
    if not others:
        return layout
    keys = ", ".join(others)
    found = f"{layout.name} ({', '.join(sorted(layout.required))})"
    read = _READ_ELSEWHERE.union({text_field}, *(each.required for each in _LAYOUTS))
    if not read.isdisjoint(others):
        problem = f"{keys}: the record can be read by these keys or as {found}"
        raise ConfigError(f"{problem}; remove what is not to be learned")
    paths = ", ".join("." + json.dumps(key) for key in others)
    raise ConfigError(f"{keys}: not read in {found}; remove: {jq_command(f'del({paths})')}")


def jq_command(program: str) -> str:
    """Return a command that changes each record of a file, for errors."""
    return f"jq -c '{program}' OLD.jsonl > NEW.jsonl"


def as_messages(record: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a record of `layout` as one with `messages`."""
    messages: list[dict[str, Any]] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    if layout is _SHAREGPT:
        messages += _read_turns(record["conversations"])
    else:
        prompt, reply = _read_pair(record, layout)
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": reply})
    converted: dict[str, Any] = {"messages": messages}
    if "tools" in record:
        converted["tools"] = record["tools"]
    return converted


def as_completion(record: Mapping[str, Any], layout: Layout) -> dict[str, Any] | None:
    """Return a record of `layout` as one with `prompt` and `completion`; None = it is a chat."""
    if layout is _SHAREGPT or record.get("system"):
        return None
    prompt, reply = _read_pair(record, layout)
    return {"prompt": prompt + "\n", "completion": reply}


def _read_pair(record: Mapping[str, Any], layout: Layout) -> tuple[str, str]:
    if layout is _RESPONSE:
        return get_text(record, "prompt"), get_text(record, "response")
    prompt = get_text(record, "instruction")
    if record.get("input"):
        prompt += "\n\n" + get_text(record, "input")
    return prompt, get_text(record, "output")


def _read_turns(turns: Any) -> list[dict[str, Any]]:
    """Return the turns of ShareGPT as messages; those with role and content are messages already.

    Raises:
        ConfigError: one is neither, or of an unknown role.
    """
    if not isinstance(turns, list):
        raise ConfigError(f"conversations is {json.dumps(turns)[:60]}, not a list of turns")
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        place = f"conversations[{i}]"
        if not isinstance(turn, dict):
            raise ConfigError(f"{place} is {json.dumps(turn)[:60]}, not an object")
        if "role" in turn:
            messages.append(turn)
            continue
        others = sorted(turn.keys() - {"from", "value", "weight"})
        if others or "value" not in turn:
            shown = json.dumps(turn)[:60]
            raise ConfigError(f"{place} is {shown}, not an object with from and value")
        role = turn.get("from")
        if role not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            problem = f"{place}: from is {json.dumps(role)[:60]}, not one of {known}"
            raise ConfigError(f"{problem}; convert the file to messages")
        message = {"role": _SHAREGPT_ROLES[role], "content": turn["value"]}
        if "weight" in turn:
            message["weight"] = turn["weight"]
        messages.append(message)
    return messages
