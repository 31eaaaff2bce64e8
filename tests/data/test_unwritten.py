"""Strings of a chat that its text lacks are found, however the template encodes the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lm.data.unwritten import find_unwritten


def lost(text: str, tools: Any = None, **message: Any) -> list[str]:
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""} | message]
    return find_unwritten(messages, ["m[0]", "m[1]"], tools, text)


CONTENT = 'm[1].content of role "assistant"'
HARD = 'He\'s "in" C:\\new\n\tétang \u2028 🙂'


@pytest.mark.parametrize(
    "text",
    [
        HARD,
        json.dumps(HARD),
        json.dumps(HARD, ensure_ascii=False),
        json.dumps(json.dumps({"x": HARD})),
        HARD.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n"),
        HARD.replace("\n", "\n    "),
    ],
)
def test_a_string_that_is_encoded_is_found(text: str) -> None:
    assert lost(f"[user] [assistant] {text}</s>", content=f"  {HARD}\n") == []
    cut = text.replace("tang", "")
    assert lost(f"[user] [assistant] {cut}</s>", content=HARD) == [CONTENT]


@pytest.mark.parametrize("content", ["ok", "7", "é", "yes\n"])
def test_a_short_string_next_to_letters_is_found(content: str) -> None:
    """Templates may write roles and replies with nothing between them."""
    calls = [{"function": {"name": "get", "arguments": {"n": content}}}]
    text = f"assistant{content.strip()}haven getn{content.strip()}7"
    assert lost(text, content=content, tool_calls=calls) == []
    assert lost("assistant haven getn", content=content) == [CONTENT]


def test_pieces_of_content_between_tags_are_found() -> None:
    content = "<think>\nbecause of it\n</think>\n\nHello"
    assert lost("<think>because of it</think>Hello", content=content) == []
    assert lost("Hello", content=content) == [CONTENT]


def test_names_and_arguments_of_calls_are_found() -> None:
    function = {
        "name": "get_weather",
        "arguments": {"city": "Rome", "days": [1, {"room": "suite"}]},
    }
    calls = [{"type": "function", "id": "0", "function": function}]
    assert lost(json.dumps(function), tool_calls=calls) == []
    for word in ("get_weather", "city", "Rome", "days", "room", "suite"):
        text = json.dumps(function).replace(f'"{word}"', "")
        assert lost(text, tool_calls=calls) == ["m[1].tool_calls"]


def test_names_and_descriptions_of_tools_are_found() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "Where?"}}}
    tool = {"name": "get_weather", "description": 'The "weather".', "parameters": schema}
    assert lost('get_weather(city) # Where? The \\"weather\\".', [tool]) == []
    for missing in ("get_weather", "city", "Where?", "weather"):
        text = json.dumps(tool).replace(missing, "")
        assert lost(text, [{"type": "function", "function": tool}]) == ["tools"]
