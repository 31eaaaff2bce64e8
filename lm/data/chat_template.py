"""Chat templates: the text that one writes for messages, and what it cannot read.

A template is a Jinja program, which transformers runs in its sandbox. TRL's package contains the
templates of many models, and twins of them for training, which mark the assistant's replies.
"""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import ConfigError, error_text, nearest_file, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, home_path, read_bytes
from lm.launch.requirements import requires

REASONING_KEYS = {"reasoning_content", "thinking", "reasoning"}
"""of messages; transformers copies one to the others"""
_STRFTIME_NOW = re.compile(r"strftime_now\s*\(([^()]*)\)")
TODAY = datetime.date(2024, 7, 26)
"""what templates read as today's date, always: with the actual one, a resumed run would read other
data. It is the one that Llama 3.1's template writes if there is no clock."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TRAINING = "_training"
"""ends the name of a template for training in TRL"""


class Span(NamedTuple):
    """Characters of a text."""

    start: int
    stop: int


class RenderedChat(NamedTuple):
    """Messages as text, with their special tokens."""

    text: str
    reply_spans: list[Span] | None
    """of the assistant's messages; None = the template has no `{% generation %}` tags"""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template."""

    text: str
    name: str
    """in errors"""

    @property
    def marks_replies(self) -> bool:
        """Whether it has `{% generation %}` tags."""
        return _GENERATION_TAG.search(self.text) is not None

    def advise_training(self) -> str:
        """Return what to do if replies, or their ends, cannot be located in the text."""
        for name, path in _find_trl_templates().items():
            if path.read_text(encoding="utf-8").strip() == self.text.strip():
                twin = name + _TRAINING
                if twin in _find_trl_templates():
                    return f"set chat_template: {twin}, which TRL has for training with it"
        marked = "set chat_template to one that marks replies and their ends with {% generation %}"
        return f"{marked}; TRL has some (pip install trl), e.g. chat_template: qwen3{_TRAINING}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> RenderedChat:
        """Return the text that the template writes; see `FileTokenizer.render`.

        Args:
            variables: what it reads besides messages and tools.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        # As in transformers: templates write null as the text None.
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools,
                chat_template=_STRFTIME_NOW.sub(_write_date, self.text),
                return_assistant_tokens_mask=self.marks_replies,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateSyntaxError as error:
            cause = error_text(error).rstrip(".")
            problem = f"is not a valid Jinja template: line {error.lineno}: {cause}"
            raise ConfigError(f"{self.name} {problem}; correct it") from None
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{self.name} rejects the messages: {error_text(error)}") from None
        if not self.marks_replies:
            return RenderedChat(texts[0], None)
        marked: Any = spans
        return RenderedChat(texts[0], [Span(start, stop) for start, stop in marked[0]])


@oserror_as_config_error
def read_chat_template(name: str) -> ChatTemplate:
    """Read the chat template `name`: a file, or the name of one in TRL's package."""
    path = home_path(name)
    if not path.is_file():
        templates = _find_trl_templates()
        if name not in templates:
            known = ", ".join(templates) or f"a template of TRL {requires('trl')}"
            problem = f"no such file in {Path.cwd()}{nearest_file(path)}, and no template of TRL"
            raise ConfigError(f"chat_template: {name}: {problem} ({known})")
        path = templates[name]
    try:
        text = read_bytes(path.resolve(), MAX_JSON_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template: {path}: byte {error.start} is not UTF-8") from None
    return ChatTemplate(text, f"chat_template: {name}")


def _find_trl_templates() -> dict[str, Path]:
    """Return the chat templates in TRL's package by name, {} if it is not installed."""
    package = find_spec("trl")
    if package is None:
        return {}
    templates: dict[str, Path] = {}
    for directory in package.submodule_search_locations or ():
        for path in sorted(Path(directory, "chat_templates").glob("*.jinja")):
            templates[path.stem] = path
    return templates


def _write_date(call: re.Match[str]) -> str:
    """Return `TODAY` as a template's call of `strftime_now` asks for it.

    The function that transformers passes for these calls returns the current time.
    """
    return repr(TODAY.strftime(ast.literal_eval(call[1])))
