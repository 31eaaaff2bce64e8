"""Records of JSON Lines as text, and which characters of it are targets.

A record of preferences is two texts: the prompt with the chosen reply, and with the rejected one.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm.data.chat_template import REASONING_KEYS, ChatTemplate, Span
from lm.data.json_lines import Record, load_json
from lm.data.layouts.notes import ReadingNotes
from lm.data.layouts.pairs import PairReader
from lm.data.layouts.reader import LayoutReader
from lm.data.layouts.text import get_text
from lm.data.probe import TemplateProbe
from lm.data.tokenizer.loading import Tokenizer
from lm.errors import ConfigError

_OTHER_ROLES = frozenset({"system", "developer", "user", "tool"})
"""roles next to the assistant's that chat templates know"""
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


class _Chat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: Any
    text: str
    """of all messages, rendered"""


@dataclass(frozen=True)
class RecordRenderer:
    """Reads records as text, prompts with completions, or chats.

    Args:
        completion_only: only completions and the assistant's messages are targets.
        pairs: records are preferences, each with a chosen and a rejected reply.
    """

    tokenizer: Tokenizer
    text_field: str
    completion_only: bool
    pairs: bool = False

    notes: ReadingNotes = field(default_factory=ReadingNotes)
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
        if not self.pairs:
            converted = self.layouts.read(record)
            if converted is None:
                return [self._render_text(record)]
            self._note_texts(
                converted, "record with prompt and completion", "completion to response"
            )
            return [self._render_converted(converted)]
        replies = PairReader(self.layouts).read(record)
        self._note_texts(replies[0], "pair", "prompt to question")
        chosen, rejected = map(self._render_converted, replies)
        if chosen.text == rejected.text:
            problem = "the replies are equal, so that nothing is preferred"
            raise ConfigError(f"chosen and rejected: {problem}; remove the line")
        return [chosen, rejected]

    def _note_texts(self, converted: Mapping[str, Any], what: str, renamed: str) -> None:
        """Count texts that are no chats although the tokenizer has a chat template."""
        if self.layouts.template is not None and isinstance(converted.get("prompt"), str):
            problem = f"{what} as texts, trained without the chat template"
            remedy = f"for chats, rename {renamed}"
            self.notes.others[f"{problem} that lm.generate --chat uses ({remedy})"] += 1

    def _note_empty_reply(self) -> None:
        self.notes.others["record with an empty reply, of which only the end is learned"] += 1

    def _render_converted(self, converted: Mapping[str, Any]) -> RenderedRecord:
        if "messages" in converted:
            return self._render_chat(converted, ("messages",))
        if isinstance(converted["prompt"], list):
            return self._render_chat(converted, ("prompt", "completion"))
        return self._render_completion(converted)

    @functools.cached_property
    def layouts(self) -> LayoutReader:
        return LayoutReader(self.text_field, find_template_text(self.tokenizer), self.notes)

    def _render_completion(self, record: Mapping[str, Any]) -> RenderedRecord:
        prompt = get_text(record, "prompt")
        text = prompt + get_text(record, "completion")
        if len(text) == len(prompt):
            self._note_empty_reply()
        spans = None
        if self.completion_only:
            spans = [Span(len(prompt), len(text))]
        return RenderedRecord(text, spans, is_chat=False)

    def _render_text(self, record: Mapping[str, Any]) -> RenderedRecord:
        if self.completion_only:
            problem = "loss_on: completion requires prompt and completion, or messages"
            remedy = "set loss_on: all, or split the text into both"
            raise ConfigError(f"{problem}, and the line has {self.text_field}; {remedy}")
        return RenderedRecord(get_text(record, self.text_field), None, is_chat=False)

    def _render_chat(self, record: Mapping[str, Any], keys: Sequence[str]) -> RenderedRecord:
        """Render the messages in `keys` of a record.

        The targets are the replies in `messages` or `completion`; a `completion` of nothing else is
        one target, as the template marks it or from its first character to its last.
        """
        tools = _read_tools(record.get("tools"))
        arguments = _list_arguments(tools)
        messages: list[dict[str, Any]] = []
        places: list[str] = []
        for key in keys:
            for i, message in enumerate(record[key]):
                places.append(f"{key}[{i}]")
                messages.append(self._read_message(message, places[-1], arguments))
        weights = [message.pop("weight", None) for message in messages]
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        n_prompt = len(messages) - len(record[keys[-1]])
        learned = [i for i in replies if i >= n_prompt]
        if self.completion_only and not learned:
            raise ConfigError(f"{keys[-1]}: {_explain_no_reply(messages[n_prompt:])}")
        if any(_is_empty_reply(messages[i]) for i in learned):
            self._note_empty_reply()
        rendered = self.tokenizer.render(messages, tools=tools)
        chat = _Chat(messages, tools, get_text({keys[-1]: rendered.text}, keys[-1]))
        self._check_written(chat, places)
        if not self.completion_only:
            return RenderedRecord(chat.text, None, is_chat=True)
        self._check_end_of_turn(tools)
        is_one_target = "completion" in keys and len(learned) == len(record["completion"])
        is_target = [weights[i] != 0 and i >= n_prompt for i in replies]
        if rendered.reply_spans is not None:
            spans = _select_replies(rendered.reply_spans, is_target)
        elif is_one_target:
            spans = [self._locate_messages(chat, n_prompt, len(messages))]
        else:
            targets = itertools.compress(replies, is_target)
            spans = [self._locate_messages(chat, i, i + 1) for i in targets]
        return RenderedRecord(chat.text, spans, is_chat=True)

    def _check_written(self, chat: _Chat, places: Sequence[str]) -> None:
        """Raise ConfigError if the chat template leaves out strings of a chat."""
        unwritten = self._probe.find_unwritten(chat.messages, places, chat.tools, chat.text)
        if not unwritten:
            return
        lost = dict.fromkeys(place.key for place in unwritten if not place.is_earlier_thinking)
        if lost:
            template = self.tokenizer.find_template(chat.tools)
            problem = f"{template.name} leaves out {', '.join(lost)}"
            remedy = (
                "rename the role or the key, remove it, or set chat_template to one that writes it"
            )
            raise ConfigError(f"{problem}; {remedy}")
        what = "record without the thinking of earlier replies, which the chat template leaves out"
        self.notes.others[what] += 1

    @functools.cached_property
    def _probe(self) -> TemplateProbe:
        return TemplateProbe(self.tokenizer)

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
                spans = [self._locate_messages(_Chat(chat, tools, rendered.text), 1, 2)]
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

    def _locate_messages(self, chat: _Chat, first: int, stop: int) -> Span:
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
        problem = "the chat template changes earlier messages, so replies cannot be located"
        advice = self.tokenizer.find_template(chat.tools).advise_training()
        raise ConfigError(f"{problem}; {advice}; or set loss_on: all")

    def _read_message(
        self, original: Mapping[str, Any], place: str, arguments: Mapping[str, Set[str]]
    ) -> dict[str, Any]:
        """Return a message as the template reads it, or raise ConfigError.

        Args:
            arguments: see `_list_arguments`.
        """
        message = dict(original)
        calls = message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not calls:
            raise ConfigError(f"{place}: content is not text: {json.dumps(message)[:60]}")
        if isinstance(calls, list):
            read = [self._read_call(call, f"{place}.tool_calls", arguments) for call in calls]
            message["tool_calls"] = read
        if message.get("weight") is not None:
            self._check_weight(message, place)
        return message

    def _read_call(self, call: Any, place: str, arguments: Mapping[str, Set[str]]) -> Any:
        """Return the call of a tool with its arguments as an object.

        In OpenAI's format they are JSON text, which many chat templates would encode a second time.
        An object that was in a table has the arguments of all functions there, as nulls.
        """
        if not isinstance(call, dict):
            return call
        read = {key: value for key, value in call.items() if value is not None}
        if isinstance(call.get("function"), dict):
            read["function"] = self._read_call(call["function"], place, arguments)
        if isinstance(call.get("arguments"), str):
            read["arguments"] = _parse_arguments(call["arguments"], place)
        elif "arguments" in call:
            listed = arguments.get(str(call.get("name")), frozenset())
            read["arguments"] = _drop_nulls(call["arguments"], listed)
            if read["arguments"] != call["arguments"]:
                self.notes.others[
                    "call of a tool without nulls of arguments, which tables add"
                ] += 1
        return read

    def _check_weight(self, message: Mapping[str, Any], place: str) -> None:
        if not place.startswith("messages"):
            raise ConfigError(f"{place}: weight is not read in prompt and completion; use messages")
        allowed = (0, 1) if message["role"] == "assistant" else (0,)
        if message["weight"] not in allowed:
            shown = json.dumps(message["weight"])[:60]
            rule = "it must be 0 or 1 in messages of the assistant, 0 in others"
            raise ConfigError(f"{place}: weight is {shown}; {rule}")
        if not self.completion_only:
            raise ConfigError(f"{place}: weight requires loss_on: completion")


def find_template_text(tokenizer: Tokenizer) -> str | None:
    """Return the chat templates of a tokenizer as one text; None = it has none."""
    try:
        return tokenizer.all_templates.text
    except ConfigError:
        return None


def describe_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the text of a chat depends on besides the tokenizer's files, as JSON."""
    described: dict[str, Any] = {"kwargs": tokenizer.template_kwargs}
    template = find_template_text(tokenizer)
    if template is not None and "strftime_now" in template:
        date = tokenizer.date or datetime.date.today()
        described["date"] = date.isoformat()
    return described


def _explain_no_reply(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return why nothing of messages is learned of which none is the assistant's."""
    roles = {str(message["role"]) for message in messages}
    problem = f"none of the assistant, only of {', '.join(sorted(roles))}"
    problem += ", and loss_on: completion learns only from the assistant's"
    remedy = "remove the line, or set loss_on: all"
    if not roles <= _OTHER_ROLES:
        remedy = "rename the roles to system, user and assistant"
    return f"{problem}; {remedy}"


def _is_empty_reply(message: Mapping[str, Any]) -> bool:
    said = (message.get(key) for key in ("content", "tool_calls", *REASONING_KEYS))
    return not any(said)


def _skip_empty_thinking(chat: _Chat, message: Mapping[str, Any], span: Span) -> Span:
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


def _read_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a record as a list without the nulls that tables add; None = no tools."""
    if not tools:
        return None
    listed = tools if isinstance(tools, list) else [tools]
    for tool in listed:
        if not _is_tool(tool):
            shape = "{function: {name: NAME, parameters: JSON SCHEMA}}"
            problem = f"tools: {json.dumps(tool)[:60]} is not {shape}"
            raise ConfigError(f"{problem}; correct or remove the line")
    return _drop_nulls(listed, {"const", "default"})


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    match function:
        case {"name": str()}:
            return isinstance(function.get("parameters") or {}, dict)
        case _:
            return False


def _list_arguments(tools: Any) -> dict[str, Set[str]]:
    """Return the arguments, nested ones too, that the schema of each function lists."""
    listed: dict[str, Set[str]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        listed[function["name"]] = _find_properties(schema) or schema.keys()
    return listed


def _find_properties(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_find_properties, schema))
    if not isinstance(schema, dict):
        return set()
    found = _find_properties(list(schema.values()))
    if isinstance(schema.get("properties"), dict):
        found |= schema["properties"].keys()
    return found


def _drop_nulls(value: Any, kept: Set[str]) -> Any:
    """Return a value without the nulls whose key is not in `kept`."""
    if isinstance(value, list):
        return [_drop_nulls(each, kept) for each in value]
    if not isinstance(value, dict):
        return value
    items = value.items()
    return {key: _drop_nulls(each, kept) for key, each in items if each is not None or key in kept}


def _parse_arguments(arguments: str, place: str) -> dict[str, Any]:
    try:
        decoded = load_json(arguments)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        problem = f"arguments are {json.dumps(arguments)[:60]}, not a JSON object"
        raise ConfigError(f"{place}: {problem}; correct or remove the line")
    return decoded
