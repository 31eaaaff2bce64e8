"""A task: questions with choices, of which one is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal, NamedTuple

Norm = Literal["none", "char", "token"]
"""What the log-likelihood of a choice is divided by before choices are compared."""


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    content: str


Context = str | tuple[Message, ...]
"""A text, or the messages of a chat, which the model's own chat template writes."""


@dataclass(frozen=True)
class Choice:
    """A text that may follow a context: continue a text, or reply to messages."""

    context: Context
    text: str
    """with the space before it, if any"""


@dataclass(frozen=True)
class Question:
    """Choices, of which one is right; a single one is right if greedy decoding finds it."""

    choices: Sequence[Choice]
    gold: int


@dataclass(frozen=True)
class Task:
    """Questions whose answers are scored together."""

    name: str
    norm: Norm
    questions: Sequence[Question]

    def fingerprint(self) -> str:
        """Return what identifies the questions by content."""
        digest = sha256(self.norm.encode())
        for question in self.questions:
            digest.update(repr(question).encode(errors="backslashreplace"))
        return f"{self.name}: {len(self.questions)} questions, sha256 {digest.hexdigest()}"

    def as_chat(self) -> Task:
        """Return the task with each text as a message of the user, which the choices reply to."""
        return replace(self, questions=[_as_chat(question) for question in self.questions])


def _as_chat(question: Question) -> Question:
    choices: list[Choice] = []
    for choice in question.choices:
        if isinstance(choice.context, str):
            message = Message("user", choice.context)
            choices.append(Choice((message,), choice.text.lstrip(" ")))
        else:
            choices.append(choice)
    return Question(choices, question.gold)
