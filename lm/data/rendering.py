"""Records of JSON Lines as text, and which characters of it are targets.

A record of preferences is two texts: the prompt with the chosen reply, and with the rejected one.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm.data.chat_template import REASONING_KEYS, ChatTemplate, RenderedChat, Span
from lm.data.examples import Chat, Example, ExampleReader, Text
from lm.data.json_lines import Record
from lm.data.messages import (
    Message,
    MessageReader,
    Turn,
    as_objects,
    as_texts,
    find_arguments,
)
from lm.data.record_fields import RecordFields, check_text, show
from lm.data.tokenized import find_template_text
from lm.data.tokenizer.loading import Tokenizer
from lm.data.unwritten import find_unwritten
from lm.errors import ConfigError

_EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>\s*")
"""The opening tag may be in the prompt."""


# A chat with contents that no chat template writes itself.
_QUESTION = {"role": "user", "content": "q7x?"}
_REPLY = {"role": "assistant", "content": "x7q"}


class RenderedRecord(NamedTuple):
    """The text of a record."""

    text: str
    target_spans: Sequence[Span] | None
    """characters whose tokens are targets; None = all"""
    is_chat: bool
    """a chat template has written the start and end tokens"""
    place: str = ""
    """of the record, for errors"""


@dataclass(frozen=True)
class _RenderedChat:
    messages: Sequence[Message]
    """as the chat template reads them"""
    tools: Sequence[Any] | None
    text: str
    """of all messages"""
    reply_spans: Sequence[Span] | None
    """that the template marks; None = it marks none"""


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

    notes: Counter[str] = field(default_factory=Counter)
    """how many records were read otherwise than they are in the data, by a phrase that starts with
    a noun in the singular"""
    _problems: dict[ChatTemplate, str | None] = field(default_factory=dict)
    """of the chat templates that were used"""

    def render_lines(self, lines: Iterable[Record]) -> Iterator[RenderedRecord]:
        for line in lines:
            try:
                for rendered in self._render(line.fields):
                    yield rendered._replace(place=line.place)
            except ConfigError as error:
                raise ConfigError(f"{line.place}: {error}") from None
            except RecursionError:
                raise ConfigError(f"{line.place}: nested too deeply; remove the line") from None

    def _render(self, record: Mapping[str, Any]) -> list[RenderedRecord]:
        """Return the text of a record, or the two of one of preferences."""
        values = self.fields.select(record)
        if self.fields.pairs:
            return self._render_pair(self._reader.read_pair(values))
        example = self._reader.read(values)
        if isinstance(example, Chat):
            return [self._render_chat(example)]
        if example.n_prompt is not None:
            self._note_texts("record with prompt and completion")
        return [self._render_text(example)]

    @functools.cached_property
    def _reader(self) -> ExampleReader:
        template = find_template_text(self.tokenizer)
        return ExampleReader(MessageReader(self.fields, template, self.notes))

    def _note_texts(self, what: str) -> None:
        """Count texts that are no chats although the tokenizer has a chat template."""
        if find_template_text(self.tokenizer) is not None:
            problem = f"{what} as texts, trained without the chat template"
            remedy = "for chats, name what the user says user (fields)"
            self.notes[f"{problem} that lm.generate --chat uses ({remedy})"] += 1

    def _render_text(self, example: Text) -> RenderedRecord:
        text = example.text
        if example.n_prompt is None:
            if self.completion_only:
                problem = "loss_on: completion requires prompt and completion, or messages"
                remedy = "set loss_on: all, or split the text into both"
                raise ConfigError(f"{problem}, and the line is a text; {remedy}")
            return RenderedRecord(text, None, is_chat=False)
        if len(text) == example.n_prompt:
            self._note_empty_reply()
        spans = None
        if self.completion_only:
            spans = [Span(example.n_prompt, len(text))]
        return RenderedRecord(text, spans, is_chat=False)

    def _note_empty_reply(self) -> None:
        self.notes["record with an empty reply, of which only the end is learned"] += 1

    def _render_chat(self, chat: Chat) -> RenderedRecord:
        """Render a chat.

        The targets are the replies of its completion; a completion of nothing else is one target,
        as the template marks it or from its first character to its last.
        """
        turns = chat.turns
        n_prompt = len(chat.prompt)
        weights = [self._take_weight(turn, is_read=n_prompt == 0) for turn in turns]
        replies = [i for i, turn in enumerate(turns) if turn.message["role"] == "assistant"]
        learned = [i for i in replies if i >= n_prompt]
        if self.completion_only and not learned:
            raise ConfigError(_explain_no_reply(chat))
        if any(_is_empty_reply(turns[i].message) for i in learned):
            self._note_empty_reply()
        rendered = self._render_messages(chat)
        if not self.completion_only:
            return RenderedRecord(rendered.text, None, is_chat=True)
        self._check_end_of_turn(chat.tools)
        is_one_target = n_prompt > 0 and len(learned) == len(chat.completion)
        is_target = [weights[i] != 0 and i >= n_prompt for i in replies]
        if rendered.reply_spans is not None:
            spans = _select_replies(rendered.reply_spans, is_target)
        elif is_one_target:
            spans = [self._locate_messages(rendered, n_prompt, len(turns))]
        else:
            targets = itertools.compress(replies, is_target)
            spans = [self._locate_messages(rendered, i, i + 1) for i in targets]
        return RenderedRecord(rendered.text, spans, is_chat=True)

    def _render_pair(self, pair: Sequence[Example]) -> list[RenderedRecord]:
        """Render two replies to one prompt, each with it; the targets are the replies."""
        chats = [example for example in pair if isinstance(example, Chat)]
        if chats:
            both = self._render_replies(chats)
        else:
            texts = [example for example in pair if isinstance(example, Text)]
            both = [self._render_text(example) for example in texts]
            self._note_texts("pair")
        if both[0].text == both[1].text:
            problem = "the replies are equal, so that nothing is preferred"
            raise ConfigError(f"chosen and rejected: {problem}; remove the line")
        return both

    def _render_replies(self, chats: Sequence[Chat]) -> list[RenderedRecord]:
        """Render two chats of one prompt; a reply that follows it is one target, as in TRL.

        It starts where the prompt with the start of a reply ends, or differs from either text, e.g.
        by the start of a thinking that only one has.
        """
        rendered: list[_RenderedChat] = []
        for chat in chats:
            if any(turn.message["role"] != "assistant" for turn in chat.completion):
                return [self._render_chat(each) for each in chats]
            for turn in chat.turns:
                self._take_weight(turn, is_read=False)
            rendered.append(self._render_messages(chat))
        self._check_end_of_turn(chats[0].tools)
        starts: list[int] = []
        for chat, each in zip(chats, rendered, strict=True):
            prompt = each.messages[: len(chat.prompt)]
            before = self.tokenizer.render(
                prompt, tools=each.tools, add_generation_prompt=True
            ).text
            start = _common_length(before, each.text)
            if start < len(before):
                told = self.tokenizer.render(prompt, tools=each.tools).text
                if start < _common_length(before, told):
                    raise self._cannot_locate(each.tools)
            starts.append(start)
        start = min(starts)
        return [
            RenderedRecord(each.text, [Span(start, len(each.text))], is_chat=True)
            for each in rendered
        ]

    def _render_messages(self, chat: Chat) -> _RenderedChat:
        """Render all messages of a chat, or raise ConfigError if the template leaves out strings.

        Arguments of calls are objects, as transformers documents it; a template that demands text,
        or would write objects as Python does, gets JSON text.
        """
        messages = as_objects(chat.messages)
        try:
            rendered = self._render_objects(messages, chat.tools)
        except ConfigError as error:
            if not list(find_arguments(messages)):
                raise
            messages = as_texts(chat.messages)
            try:
                rendered = self.tokenizer.render(messages, tools=chat.tools)
            except ConfigError:
                raise error from None
        last = chat.turns[-1].place.partition("[")[0]
        text = check_text(rendered.text, last)
        self._check_written(messages, chat, text)
        return _RenderedChat(messages, chat.tools, text, rendered.reply_spans)

    def _render_objects(self, messages: Sequence[Message], tools: Any) -> RenderedChat:
        """Render messages, or raise ConfigError if the template writes objects as Python does."""
        rendered = self.tokenizer.render(messages, tools=tools)
        for arguments in find_arguments(messages):
            if arguments and str(arguments) in rendered.text:
                name = self.tokenizer.find_template(tools).name
                raise ConfigError(f"{name} writes arguments as Python does; remove the line")
        return rendered

    def _check_written(self, messages: Sequence[Message], chat: Chat, text: str) -> None:
        """Raise ConfigError if the chat template leaves out strings of a chat."""
        places = [turn.place for turn in chat.turns]
        unwritten = find_unwritten(messages, places, chat.tools, text)
        if unwritten.lost:
            template = self.tokenizer.find_template(chat.tools)
            problem = f"{template.name} leaves out {', '.join(unwritten.lost)}"
            remedy = "rename the role or the key, remove it, or set another chat_template"
            raise ConfigError(f"{problem}; {remedy}")
        if unwritten.thinking:
            what = "record without the thinking of earlier replies"
            self.notes[f"{what}, which the chat template leaves out"] += 1

    def _check_end_of_turn(self, tools: Any) -> None:
        """Raise ConfigError if no text after a reply is a target: the model would never stop."""
        template = self.tokenizer.find_template(tools)
        if template not in self._problems:
            self._problems[template] = self._find_problem(template, tools)
        problem = self._problems[template]
        if problem is not None:
            raise ConfigError(f"{template.name} {problem}")

    def _find_problem(self, template: ChatTemplate, tools: Any) -> str | None:
        """What its rendering of a chat shows; None = it trains replies with their end of turn."""
        chat = [_QUESTION, _REPLY]
        if template.marks_replies:  # maybe those before a question otherwise
            chat = [_QUESTION, _REPLY, _QUESTION, _REPLY]
        try:
            rendered = self.tokenizer.render(chat, tools=tools)
            spans = rendered.reply_spans
            if spans is None:
                spans = [
                    self._locate_messages(_RenderedChat(chat, tools, rendered.text, None), 1, 2)
                ]
        except ConfigError:
            return None  # it rejects such a chat, or the replies; those of the data say why
        for match in re.finditer(_REPLY["content"], rendered.text):
            end = match.end()
            stop = rendered.text.find(_QUESTION["content"], end)
            if stop < 0:
                stop = len(rendered.text)
            ends = [rendered.text[max(span.start, end) : min(span.stop, stop)] for span in spans]
            if not "".join(ends).strip():
                problem = "writes no end of turn that is a target, so that no reply would end"
                return f"{problem}; {template.advise_training()}"
        return None

    def _locate_messages(self, chat: _RenderedChat, first: int, stop: int) -> Span:
        """Return where the messages from `first` to before `stop` are in the text of a chat.

        They are between the text of the messages before them, with the start of a reply, and the
        end of the text of all messages before `stop`.
        """
        try:
            start = self.tokenizer.render(
                chat.messages[:first], tools=chat.tools, add_generation_prompt=True
            )
            before = start.text
        except ConfigError:  # the template rejects a chat without messages
            if first > 0:
                raise
            before = None
        through_text = chat.text
        if stop < len(chat.messages):
            through_text = self.tokenizer.render(chat.messages[:stop], tools=chat.tools).text
        is_prefix = chat.text.startswith(through_text)
        if is_prefix and before is not None and through_text.startswith(before):
            span = Span(len(before), len(through_text))
            return _skip_empty_thinking(chat, chat.messages[first], span)
        if first == 0:
            problem = "messages[0] is of the assistant, and the chat template starts otherwise"
            remedy = "start with a message of the user, or with weight: 0 in this one"
            raise ConfigError(f"{problem}, e.g. with a default system message; {remedy}")
        raise self._cannot_locate(chat.tools)

    def _cannot_locate(self, tools: Any) -> ConfigError:
        problem = "the chat template changes earlier messages, so replies cannot be located"
        advice = self.tokenizer.find_template(tools).advise_training()
        return ConfigError(f"{problem}; {advice}; or set loss_on: all")

    def _take_weight(self, turn: Turn, *, is_read: bool) -> Any:
        """Return the weight of a message, which the template does not read, and remove it."""
        message = turn.message
        weight = message.pop("weight", None)
        if weight is None:
            return None
        if not is_read:
            problem = "weight is read only in messages of which each reply is learned"
            raise ConfigError(f"{turn.place}: {problem}; remove it")
        allowed = (0, 1) if message["role"] == "assistant" else (0,)
        if weight not in allowed:
            rule = "it must be 0 or 1 in messages of the assistant, 0 in others"
            raise ConfigError(f"{turn.place}: weight is {show(weight)}; {rule}")
        if not self.completion_only:
            raise ConfigError(f"{turn.place}: weight requires loss_on: completion")
        return weight


def _explain_no_reply(chat: Chat) -> str:
    """Return why nothing of a chat is learned of which no message is the assistant's."""
    roles = sorted({turn.message["role"] for turn in chat.completion})
    problem = f"none of the assistant, only of {', '.join(roles)}"
    problem += ", and loss_on: completion learns only from the assistant's"
    place = chat.completion[-1].place.partition("[")[0]
    return f"{place}: {problem}; remove the line, or set loss_on: all"


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts start with in common."""
    if second.startswith(first):
        return len(first)
    length = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            break
        length += 1
    return length


def _is_empty_reply(message: Mapping[str, Any]) -> bool:
    said = (message.get(key) for key in ("content", "tool_calls", *REASONING_KEYS))
    return not any(said)


def _skip_empty_thinking(chat: _RenderedChat, message: Mapping[str, Any], span: Span) -> Span:
    """Return the span of a reply without the empty thinking that the template wrote before it.

    A template with `enable_thinking: false` writes the same before a reply that it asks for.
    """
    thinks = any(message.get(key) for key in REASONING_KEYS)
    if thinks or "</think>" in (message.get("content") or ""):
        return span
    empty = _EMPTY_THINKING.match(chat.text, span.start, span.stop)
    if empty is None:
        return span
    return Span(empty.end(), span.stop)


def _select_replies(spans: Sequence[Span], is_target: Sequence[bool]) -> list[Span]:
    """Return the spans of the replies that are targets; a template may mark others than replies."""
    if all(is_target):
        return list(spans)
    if len(spans) != len(is_target):  # some mark an end of text after the last reply
        spans = _join_touching(spans)
    if len(spans) != len(is_target):
        problem = f"the chat template marks {len(spans)} of {len(is_target)} replies"
        raise ConfigError(f"{problem}; use another one, or messages without weight")
    return list(itertools.compress(spans, is_target))


def _join_touching(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        elif span.start < span.stop:
            joined.append(span)
    return joined
