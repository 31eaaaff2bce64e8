"""Records of JSON Lines as text, and which characters of it are targets.

A record of preferences is two texts: the prompt with the chosen reply, and with the rejected one.
"""

from __future__ import annotations

import functools
import itertools
import json
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm.data.chat_template import RenderedChat, Span
from lm.data.examples import Chat, Example, Text, read_example, read_pair
from lm.data.json_lines import Record
from lm.data.messages import MessageReader, Turn, find_functions
from lm.data.record_fields import RecordFields, check_text, show
from lm.data.tokenizer.loading import Tokenizer
from lm.data.unwritten import find_strings, find_unwritten
from lm.errors import ConfigError, error_prefix


class RenderedRecord(NamedTuple):
    """The text of a record."""

    text: str
    target_spans: Sequence[Span] | None
    """characters whose tokens are targets; None = all"""
    is_chat: bool
    """a chat template has written the start and end tokens"""


@dataclass(frozen=True)
class RecordRenderer:
    """Reads records as text, prompts with completions, or chats.

    Args:
        fields: what the keys of records hold.
        completion_only: only completions and the assistant's messages are targets.
    """

    tokenizer: Tokenizer
    fields: RecordFields
    completion_only: bool

    def render(self, line: Record) -> list[RenderedRecord]:
        """Return the text of a record, or the two of one of preferences."""
        with error_prefix(line.place):
            try:
                values = self.fields.select(line.fields)
                if self.fields.pairs:
                    return self._render_pair(read_pair(values, self._reader))
                example = read_example(values, self._reader)
                if isinstance(example, Chat):
                    return [self._render_chat(example)]
                return [self._render_text(example)]
            except RecursionError:
                raise ConfigError("nested too deeply; remove the line") from None

    @functools.cached_property
    def _reader(self) -> MessageReader:
        return MessageReader(self.fields, self.tokenizer.template_text)

    def _render_text(self, example: Text) -> RenderedRecord:
        text = example.text
        if not self.completion_only:
            return RenderedRecord(text, None, is_chat=False)
        if example.n_prompt is None:
            problem = "loss_on: completion requires prompt and completion, or messages"
            remedy = "set loss_on: all, or split the text into both"
            raise ConfigError(f"{problem}, and the line is a text; {remedy}")
        return RenderedRecord(text, [Span(example.n_prompt, len(text))], is_chat=False)

    def _render_chat(self, chat: Chat) -> RenderedRecord:
        """Render a chat, whose targets are the replies of its completion."""
        turns = chat.turns
        n_prompt = len(chat.prompt)
        weights = [self._take_weight(turn, is_read=n_prompt == 0) for turn in turns]
        replies = [i for i, turn in enumerate(turns) if turn.message["role"] == "assistant"]
        if self.completion_only and not any(i >= n_prompt for i in replies):
            problem = (
                "none of the assistant, and loss_on: completion learns only from the assistant's"
            )
            place = turns[-1].place.partition("[")[0]
            raise ConfigError(f"{place}: {problem}; remove the line, or set loss_on: all")
        rendered = self._render_messages(chat)
        if not self.completion_only:
            return RenderedRecord(rendered.text, None, is_chat=True)
        learned = [i for i in replies if i >= n_prompt and weights[i] != 0]
        if rendered.reply_spans is None:
            spans = [self._locate_reply(chat, rendered.text, i) for i in learned]
        else:
            spans = _select_replies(rendered.reply_spans, [i in learned for i in replies])
        self._check_end_of_turn(chat, rendered.text, spans)
        return RenderedRecord(rendered.text, spans, is_chat=True)

    def _render_pair(self, pair: Sequence[Example]) -> list[RenderedRecord]:
        """Render two replies to one prompt, each with it; the targets are the replies."""
        chats = [example for example in pair if isinstance(example, Chat)]
        if chats:
            both = self._render_replies(chats)
        else:
            both = [self._render_text(example) for example in pair if isinstance(example, Text)]
        if both[0].text == both[1].text:
            problem = "the replies are equal, so that nothing is preferred"
            raise ConfigError(f"chosen and rejected: {problem}; remove the line")
        return both

    def _render_replies(self, chats: Sequence[Chat]) -> list[RenderedRecord]:
        """Render two chats of one prompt; a reply that follows it is one target, as in TRL.

        It starts where the prompt with the start of a reply ends, or differs from either text, e.g.
        by the start of a thinking that only one has.
        """
        texts: list[str] = []
        for chat in chats:
            if any(turn.message["role"] != "assistant" for turn in chat.completion):
                return [self._render_chat(each) for each in chats]
            for turn in chat.turns:
                self._take_weight(turn, is_read=False)
            texts.append(self._render_messages(chat).text)
        prompt = chats[0].messages[: len(chats[0].prompt)]
        tools = chats[0].tools
        before = self.tokenizer.render(prompt, tools=tools, add_generation_prompt=True).text
        start = _common_length(before, *texts)
        if start < len(before):
            told = self.tokenizer.render(prompt, tools=tools).text
            if start < _common_length(before, told):
                raise self._cannot_locate(chats[0].completion[0], tools)
        both: list[RenderedRecord] = []
        for chat, text in zip(chats, texts, strict=True):
            spans = [Span(start, len(text))]
            self._check_end_of_turn(chat, text, spans)
            both.append(RenderedRecord(text, spans, is_chat=True))
        return both

    def _render_messages(self, chat: Chat) -> RenderedChat:
        """Render all messages of a chat, or raise ConfigError if the template leaves out strings.

        Arguments of calls are objects, as transformers documents it; a template that demands text,
        or would write objects as Python does, gets JSON text.
        """
        try:
            rendered = self._render_objects(chat)
        except ConfigError as error:
            for function in find_functions(chat.messages):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            try:
                rendered = self.tokenizer.render(chat.messages, tools=chat.tools)
            except ConfigError:
                raise error from None
        check_text(rendered.text, chat.turns[-1].place.partition("[")[0])
        places = [turn.place for turn in chat.turns]
        unwritten = find_unwritten(chat.messages, places, chat.tools, rendered.text)
        if unwritten:
            template = self.tokenizer.find_template(chat.tools)
            problem = f"{template.name} leaves out {', '.join(unwritten)}"
            remedy = f"rename the role or the key, remove it, or {template.advise_training()}"
            raise ConfigError(f"{problem}; {remedy}")
        return rendered

    def _render_objects(self, chat: Chat) -> RenderedChat:
        """Render a chat, or raise ConfigError if the template writes objects as Python does."""
        rendered = self.tokenizer.render(chat.messages, tools=chat.tools)
        for function in find_functions(chat.messages):
            written = str(function["arguments"])
            if not function["arguments"] or written not in rendered.text:
                continue
            strings = find_strings([chat.messages, chat.tools])
            n_quoted = sum(string.count(written) for string in strings)
            if rendered.text.count(written) > n_quoted:
                name = self.tokenizer.find_template(chat.tools).name
                raise ConfigError(f"{name} writes arguments as Python does; remove the line")
        return rendered

    def _check_end_of_turn(self, chat: Chat, text: str, spans: Sequence[Span]) -> None:
        """Raise ConfigError if a target ends with what a reply says: the model would never stop."""
        replies: list[str] = []
        for turn in chat.completion:
            if turn.message["role"] == "assistant" and "tool_calls" not in turn.message:
                _, _, said = turn.message["content"].rpartition("</think>")  # it may be cut off
                replies.append(said.strip())
        for span in spans:
            target = text[span.start : span.stop]
            in_target = [reply for reply in replies if reply in target]
            # A short one, such as ">", can also be in the end of turn of another.
            reply = max(in_target, key=len, default="")
            if reply and not target.partition(reply)[2].strip():
                template = self.tokenizer.find_template(chat.tools)
                problem = "writes no end of turn that is a target, so that no reply would end"
                raise ConfigError(f"{template.name} {problem}; {template.advise_training()}")

    def _locate_reply(self, chat: Chat, text: str, number: int) -> Span:
        """Return where a message is in the text of a chat.

        It is between the text of the messages before it, with the start of a reply, and the end of
        the text of all messages up to it.
        """
        try:
            before = self.tokenizer.render(
                chat.messages[:number], tools=chat.tools, add_generation_prompt=True
            ).text
        except ConfigError:  # e.g. it rejects a chat without messages
            raise self._cannot_locate(chat.turns[number], chat.tools) from None
        through = text
        if number + 1 < len(chat.turns):
            through = self.tokenizer.render(chat.messages[: number + 1], tools=chat.tools).text
        if not text.startswith(through) or not through.startswith(before):
            raise self._cannot_locate(chat.turns[number], chat.tools)
        return Span(len(before), len(through))

    def _cannot_locate(self, turn: Turn, tools: Any) -> ConfigError:
        problem = "the chat template writes what precedes it otherwise, or not at all, without it"
        advice = self.tokenizer.find_template(tools).advise_training()
        return ConfigError(
            f"{turn.place}: cannot be located, as {problem}; {advice}; or set loss_on: all"
        )

    def _take_weight(self, turn: Turn, *, is_read: bool) -> Any:
        """Return the weight of a message, which the template does not read, and remove it."""
        weight = turn.message.pop("weight", None)
        if weight is None:
            return None
        allowed = (0, 1) if turn.message["role"] == "assistant" else (0,)
        if weight not in allowed:
            rule = "it must be 0 or 1 in messages of the assistant, 0 in others"
            raise ConfigError(f"{turn.place}: weight is {show(weight)}; {rule}")
        if not is_read or not self.completion_only:
            where = "in messages of which each reply is learned, with loss_on: completion"
            raise ConfigError(f"{turn.place}: weight is read only {where}; remove it")
        return weight


def _common_length(*texts: str) -> int:
    """Return how many characters texts start with in common."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071 - not of paths


def _select_replies(spans: Sequence[Span], is_target: Sequence[bool]) -> list[Span]:
    """Return the spans of the replies that are targets; a template may mark others than replies."""
    joined: list[Span] = []  # some mark an end of text after the last reply
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        elif span.start < span.stop:
            joined.append(span)
    if all(is_target):
        return joined
    if len(joined) != len(is_target):
        problem = f"the chat template marks {len(joined)} of {len(is_target)} replies"
        raise ConfigError(f"{problem}; use another one, or messages without weight")
    return list(itertools.compress(joined, is_target))
