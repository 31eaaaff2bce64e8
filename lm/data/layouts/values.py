"""The values of a record: JSON in text, parts of text, and what may be content."""

from __future__ import annotations

import re
from typing import Any

from lm.data.json_lines import load_json
from lm.data.layouts.keys import ROLES

_TEXT_PARTS = ("text", "input_text", "output_text")
_CONTENT_KEY = re.compile(
    r"(answer|article|audio|body|call|caption|chat|choice|chosen|completion|content|context"
    r"|conversation|cot|demonstration|description|dialog|dialogue|document|example|explanation"
    r"|function|generation|highlight|hint|history|image|input|instruction|message|note|observation"
    r"|option|output|paragraph|part|passage|problem|prompt|quer(y|ie)|question|rationale|reasoning"
    r"|refusal|rejected|reply|replies|response|sentence|solution|stor(y|ie)|summar(y|ie)|system"
    r"|target|text|thinking|thought|tool|trajector(y|ie)|translation|turn|value|video"
    r")s?[^a-z]*$",
    re.IGNORECASE,
)
"""ends keys whose strings are content"""
_SENTENCE = re.compile(r".+\s[a-z]+\s.+[.!?]")
_MAX_LABEL_LENGTH = 200
"""characters of the strings of a value that is not content"""


def decode(value: Any) -> Any:
    """Return a list or an object that is JSON text, and other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        decoded = load_json(value)
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, list | dict) else value


def join_parts(content: Any) -> Any:
    """Return content that is a list of parts of text as one text, and other content unchanged."""
    if not isinstance(content, list):
        return content
    texts = [_text_of(part) for part in content]
    return content if None in texts else "".join(filter(None, texts))


def _text_of(part: Any) -> str | None:
    """Return the text of a part of content; None = it has more than that, or none."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type", "text") not in _TEXT_PARTS:
        return None
    others = {key for key in part if not is_empty(part[key])} - {"type", "text", "cache_control"}
    text = part.get("text")
    return text if isinstance(text, str) and not others else None


def is_empty(value: Any) -> bool:
    """Whether a value holds nothing."""
    return value is None or value in ("", [], {})


def is_content(key: str, value: Any) -> bool:
    """Whether what a key holds may be content: by its name, or by a string that is no label."""
    strings = strings_in(value)
    if _CONTENT_KEY.search(key):
        return bool(strings)
    is_long = "\n" in "".join(strings) or sum(map(len, strings)) > _MAX_LABEL_LENGTH
    return is_long or any(map(_SENTENCE.fullmatch, strings))


def strings_in(value: Any) -> set[str]:
    """Return the strings in a value, without roles and switches."""
    strings: set[str] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            strings.add(each.strip())
        elif isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list):
            stack += each
    return strings - ROLES.keys() - {"", "on", "off"}
