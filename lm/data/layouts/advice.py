"""Why records are not read, and what to do with them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from lm.data.layouts.keys import CHATS, PAIR, find_exchange
from lm.data.layouts.values import is_content, is_empty
from lm.data.signatures import advise_delimiter

_PREFERENCES = (
    "preferences are learned with objective: dpo, as prompt, chosen and rejected; to learn single"
    " replies, write them as messages"
)
_TO_PAIRS = {
    ("input", "preferred_output", "non_preferred_output"): (
        "{prompt: .input.messages, tools: .input.tools, chosen: .preferred_output,"
        " rejected: .non_preferred_output}"
    ),
    ("chosen_response", "rejected_response"): (
        ".chosen = .chosen_response | .rejected = .rejected_response"
        " | del(.chosen_response, .rejected_response)"
    ),
    ("messages", "rejected_response"): (
        "{messages: .messages[:-1], chosen: .messages[-1].content, rejected: .rejected_response}"
    ),
}
"""what jq makes pairs of, by the keys of other layouts"""
_GROUP_LABELS = (
    "jq -sc 'group_by(.prompt)[] | {prompt: .[0].prompt, chosen: map(select(.label))[0].completion,"
    " rejected: map(select(.label | not))[0].completion} | select(.chosen and .rejected)' OLD > NEW"
)
_PREFERENCE_KEY = re.compile(r"(chosen|rejected|preferred|non_preferred)_")
_LABELS = "labels are not trained; keep the records to be learned, without it"
_REASONS = {
    **dict.fromkeys(("chosen", "rejected", "preference", "winner"), _PREFERENCES),
    **dict.fromkeys(
        ("image", "images", "audio", "audios", "video", "videos"),
        "images, audio and video are not trained; choose data of text",
    ),
    **dict.fromkeys(
        ("label", "labels", "kto_tag", "desirable", "accepted", "preferred", "liked", "thumbs_up"),
        _LABELS,
    ),
    "chat_template_kwargs": "not read in records; set chat_template_kwargs for the run",
}
"""why records with these keys are refused"""


def explain_no_layout(record: Mapping[str, Any], text_field: str) -> str:
    """Return why a record has no layout, and what to do."""
    for key in record:
        reason = find_reason(key, record[key])
        if reason is not None and not is_empty(record[key]):
            return f"{key}: {reason}"
    keys = [key if value is not None else f"{key} (null)" for key, value in record.items()]
    problem = f"no {text_field} (text_field), no messages, no question with a reply"
    problem += f"; the line has the keys: {', '.join(keys) or 'none'}"
    remedy = "rename them to text, to messages, or to prompt and response"
    nested = find_records(record, lambda each: text_field in each or bool(find_exchange(each)))
    if nested is not None:
        remedy = write_records(nested)
    elif len(record) == 1 and isinstance(record.get(keys[0]), str):
        remedy = f"set text_field: {keys[0]}"
    elif len(record) == 1:
        remedy += "; if it is a list of records, write each of them on a line"
    return f"{problem}; {remedy}"


def explain_no_pair(values: Mapping[str, Any]) -> str:
    """Return why a record has neither a chosen nor a rejected reply, and what to do."""
    problem = "chosen: is missing, and so is rejected"
    problem += f"; the line has the keys: {', '.join(values)}"
    nested = find_records(values, lambda each: all(key in each for key in PAIR))
    if nested is not None:
        return f"{problem}; {write_records(nested)}"
    for keys, code in _TO_PAIRS.items():
        if all(key in values for key in keys):
            return f"{problem}; write pairs, jq -c '{code}' OLD > NEW"
    if all(key in values for key in ("prompt", "completion", "label")):
        remedy = "write pairs of the prompts that have replies of both labels"
        return f"{problem}; {remedy}, {_GROUP_LABELS}"
    return f"{problem}; objective: dpo compares both; add them, or use objective: next-token"


def find_reason(key: str, value: Any) -> str | None:
    """Return why records with `key` are refused; None = they are not."""
    if _PREFERENCE_KEY.match(key) and is_content(key, value):
        return _PREFERENCES
    return _REASONS.get(key)


def advise_field(record: Mapping[str, Any], key: str, setting: str) -> str:
    """Return what to do with records without the field `key`."""
    keys = find_exchange(record)
    nested = find_records(record, lambda each: key in each)
    if keys and keys[0] in CHATS:
        return "train on chats with dataset: jsonl"
    if keys:
        together = f"train on {' with '.join(keys)} with dataset: jsonl"
        return f"{together}, or on one of them alone with {setting}"
    if nested is not None:
        return write_records(nested)
    return advise_delimiter(record) or f"set {setting} to one of them"


def find_records(
    record: Mapping[str, Any], is_record: Callable[[Mapping[str, Any]], bool]
) -> str | None:
    """Return the key of a list of records in a record, which is then a whole file of them."""
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and is_record(value[0]):
            return key
    return None


def write_records(key: str) -> str:
    """Return how to write the records in the list `key`, one a line."""
    path = f".{key}[]" if key.isidentifier() else f".[{json.dumps(key)}][]"
    return f"write the records of {key} one a line, jq -c {shlex.quote(path)} OLD > NEW"
