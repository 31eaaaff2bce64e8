"""The keys by which records are known, and the roles of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "inputs")
CONTEXTS = ("input", "context", "article", "document", "dialogue")
"""follow a question, or are one"""
REPLIES = ("output", "response", "answer", "completion", "solution", "generation")
REPLIES += ("target", "targets", "summary", "highlights")
PAIR = ("chosen", "rejected")
SYSTEM = ("system", "system_prompt")
DEFAULT_TEXT_FIELD = "text"

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "chatbot"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool"), "tool"),
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}


def find_exchange(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a chat, or of a question or a prompt with its reply; [] = it is none."""
    chats = [key for key in CHATS if key in values]
    if chats:
        return chats[:1]
    if "prompt" in values and "completion" in values:
        return ["prompt", "completion"]
    questions = find_question(values)
    replies = [key for key in REPLIES if key in values][:1]
    if questions and replies:
        return questions + replies
    return []


def find_question(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a question, or of what it is about."""
    question = [key for key in QUESTIONS if key in values][:1]
    return question + [key for key in CONTEXTS if key in values]
