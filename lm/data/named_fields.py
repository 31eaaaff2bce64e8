"""What the hyperparameter `fields` can say of records."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping

from lm.data.chat_template import REASONING_KEYS

_NAMED_KINDS = (("messages",), ("prompt", "completion"), ("user", "assistant"), ("text",))
_NAMED_PAIRS = (
    ("chosen", "rejected"),
    ("prompt", "chosen", "rejected"),
    ("user", "chosen", "rejected"),
)
"""what `fields` can say that the keys of a record hold"""
OF_CHATS = ("system", "tools")
OF_MESSAGES = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "weight",
    *sorted(REASONING_KEYS),
)
"""what `fields` can say that the keys of a message hold"""


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise ValueError unless `fields` says all that one kind of record needs, and no more."""
    kinds = [*_NAMED_KINDS, *_NAMED_PAIRS]
    of_record = fields.keys() - {*OF_CHATS, *OF_MESSAGES}
    if of_record not in [set(kind) for kind in kinds]:
        described = ", or ".join(" and ".join(kind) for kind in kinds)
        rest = ", ".join([*OF_CHATS, *OF_MESSAGES])
        problem = f"{as_yaml(fields)} is no kind of record"
        raise ValueError(f"{problem}; name {described}, and of chats what they have of {rest}")
    if of_record == {"text"} and len(fields) > 1:
        raise ValueError("text is not a chat; remove what else is named")
    of_messages = fields.keys() & {*OF_MESSAGES}
    if of_messages and not {"role", "content"} <= of_messages:
        raise ValueError("of messages, name role and content, and what else is read of them")
    for what, source in fields.items():
        try:
            parse_template(source)
        except ValueError as error:
            problem = f"{what}: {source!r} is no template: {error}"
            remedy = "write names in braces, and other braces twice: {{"
            raise ValueError(f"{problem}; {remedy}") from None
        if "{" in source and what in ("messages", "tools", *of_messages):
            raise ValueError(f"{what}: {source!r} makes a text; name a key")


def parse_template(source: str) -> list[tuple[str, str | None]]:
    """Return the texts of a template, each with the name that follows it, or None."""
    parts: list[tuple[str, str | None]] = []
    for before, name, spec, conversion in string.Formatter().parse(source):
        if name == "" or spec or conversion:
            raise ValueError("braces have names of keys alone")
        parts.append((before, name))
    return parts


def as_yaml(fields: Mapping[str, str]) -> str:
    """Return `fields` as it is typed in YAML."""
    import yaml  # which the machine of a benchmark may lack

    flow = yaml.safe_dump(
        dict(fields), default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return flow.strip()
