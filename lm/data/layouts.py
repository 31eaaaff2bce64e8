"""Layouts of records: a chat, a question with its reply, a prompt with its completion, or text.

A record is known by its keys. It becomes messages, or prompt and completion, or stays text. What it
has besides is added to the messages (a system prompt, tools), or is not read: ids, numbers and
labels are counted, and what may be content is refused. A record of preferences becomes two, of
which one has the chosen and the other the rejected reply.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from lm.data.chat_template import REASONING_KEYS
from lm.data.json_lines import load_json
from lm.data.signatures import advise_delimiter
from lm.errors import ConfigError, error_prefix, limit_problems
from lm.units import format_count

_CHATS = ("messages", "conversations", "conversation")
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "inputs")
_CONTEXTS = ("input", "context", "article", "document", "dialogue")
"""follow a question, or are one"""
_REPLIES = ("output", "response", "answer", "completion", "solution", "generation")
_REPLIES += ("target", "targets", "summary", "highlights")
_PAIR = ("chosen", "rejected")
_SYSTEM = ("system", "system_prompt")
_DEFAULT_TEXT_FIELD = "text"

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "chatbot"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool"), "tool"),
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_SPEAKERS = ("user", "assistant")
_EXCHANGES = (("input", "output"), ("human", "assistant"))
"""keys of a question with its reply, of which a chat can be a list"""
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING_KEYS}
_LEARNED = ("train", "training", "loss")
"""false in messages that are not learned"""
_TEXT_PARTS = ("text", "input_text", "output_text")

_MESSAGES = '{"messages": [{"role": "user", "content": "Q"}, ...]}'
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


@dataclass
class ReadingNotes:
    """How many records were read otherwise than they are in the data."""

    layouts: Counter[str] = field(default_factory=Counter)
    """of other layouts than messages, by their keys"""
    unread: Counter[str] = field(default_factory=Counter)
    """with a key that was not read"""
    others: Counter[str] = field(default_factory=Counter)
    """by what was done, after a noun in the singular"""

    def add(self, other: ReadingNotes) -> None:
        self.layouts.update(other.layouts)
        self.unread.update(other.unread)
        self.others.update(other.others)

    def take(self) -> ReadingNotes:
        """Return what was counted, and count from 0."""
        taken = copy.deepcopy(self)
        for counter in (self.layouts, self.unread, self.others):
            counter.clear()
        return taken

    def describe(self, *, has_template: bool) -> list[str]:
        """Return a line on each; `has_template` = of a tokenizer with a chat template."""
        how = "as chats with the chat template"
        if not has_template:
            how = "as prompt, newline and completion"
        notes = [
            f"{keys} of {format_count(n, 'record')} read {how}" for keys, n in self.layouts.items()
        ]
        if self.unread:
            *more, (last, n_last) = self.unread.most_common()
            counts = [f"{key} of {n:,}" for key, n in more]
            counts.append(f"{last} of {format_count(n_last, 'record')}")
            notes.append(f"not read: {', '.join(counts)}")
        others: list[str] = []
        for what, n in self.others.items():
            noun, _, rest = what.partition(" ")
            others.append(f"{format_count(n, noun)} {rest}")
        return notes + limit_problems(others)


@dataclass(frozen=True)
class LayoutReader:
    """Reads records of all layouts as messages, prompt and completion, or text.

    Args:
        template: the chat template; None = the tokenizer has none, so that questions and replies
            become prompts and completions.
        notes: to which it adds.
    """

    text_field: str
    template: str | None
    notes: ReadingNotes = field(default_factory=ReadingNotes)

    def read(self, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a record as messages, or as prompt and completion; None = it is text.

        Raises:
            ConfigError: it has none of the layouts, or content that its layout has no place for.
        """
        values = {key: value for key, value in record.items() if value is not None}
        keys = self._find_layout(values)
        if not keys and self.text_field not in record:
            raise ConfigError(self._explain(record))
        if not keys:
            self._count_unread(values, {self.text_field})
            return None
        if keys[0] in _CHATS:
            values[keys[0]] = _decode(values[keys[0]])
        converted = self._convert(values, keys)
        placed = _add_placed(converted, values)
        self._check_others(values, keys, {*keys, *placed})
        if keys not in (["messages"], ["prompt", "completion"]):
            self.notes.layouts[", ".join(keys)] += 1
        return converted

    def read_pair(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the chosen and the rejected reply of a record, each as `read` returns a record.

        Raises:
            ConfigError: it has no two replies to one prompt, or content that has no place.
        """
        values = {key: value for key, value in record.items() if value is not None}
        if not any(key in values for key in _PAIR):
            raise ConfigError(self._explain_no_pair(values))
        values |= {key: _read_reply(values, key) for key in _PAIR}
        replies = [values[key] for key in _PAIR]
        questions: list[str] = []
        parts = _split_dialogs(*replies)
        if parts is None:
            questions = self._find_prompt(values)
            if questions[0] in _CHATS:
                values[questions[0]] = _decode(values[questions[0]])
            parts = [{**values, "completion": reply} for reply in replies]
        pair: list[Mapping[str, Any]] = []
        placed = {*questions, *_PAIR}
        for key, part in zip(_PAIR, parts, strict=True):
            with error_prefix(key):
                converted = self._convert(part, [*(questions or ["prompt"]), "completion"])
                _check_reply(converted)
            placed |= _add_placed(converted, values)
            pair.append(converted)
        keys = [*questions, *_PAIR]
        self._check_others(values, keys, placed)
        if questions not in ([], ["prompt"]):
            self.notes.layouts[", ".join(keys)] += 1
        return pair

    def _explain(self, record: Mapping[str, Any]) -> str:
        """Return why a record has no layout, and what to do."""
        for key in record:
            reason = _find_reason(key, record[key])
            if reason is not None and not _is_empty(record[key]):
                return f"{key}: {reason}"
        keys = [key if value is not None else f"{key} (null)" for key, value in record.items()]
        problem = f"no {self.text_field} (text_field), no messages, no question with a reply"
        problem += f"; the line has the keys: {', '.join(keys) or 'none'}"
        remedy = "rename them to text, to messages, or to prompt and response"
        nested = _find_records(record, self._is_record)
        if nested is not None:
            remedy = _write_records(nested)
        elif len(record) == 1 and isinstance(record.get(keys[0]), str):
            remedy = f"set text_field: {keys[0]}"
        elif len(record) == 1:
            remedy += "; if it is a list of records, write each of them on a line"
        return f"{problem}; {remedy}"

    def _is_record(self, value: Mapping[str, Any]) -> bool:
        return self.text_field in value or bool(_find_exchange(value))

    def _explain_no_pair(self, values: Mapping[str, Any]) -> str:
        """Return why a record has neither a chosen nor a rejected reply, and what to do."""
        problem = "chosen: is missing, and so is rejected"
        problem += f"; the line has the keys: {', '.join(values)}"
        nested = _find_records(values, lambda each: all(key in each for key in _PAIR))
        if nested is not None:
            return f"{problem}; {_write_records(nested)}"
        for keys, code in _TO_PAIRS.items():
            if all(key in values for key in keys):
                return f"{problem}; write pairs, jq -c '{code}' OLD > NEW"
        if all(key in values for key in ("prompt", "completion", "label")):
            remedy = "write pairs of the prompts that have replies of both labels"
            return f"{problem}; {remedy}, {_GROUP_LABELS}"
        return f"{problem}; objective: dpo compares both; add them, or use objective: next-token"

    def _find_prompt(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that hold what the replies of preferences answer."""
        found = [key for key in _CHATS if key in values][:1] or _find_question(values)
        if not found:
            problem = f"no prompt; the line has the keys: {', '.join(values)}"
            remedy = "write what both replies answer as prompt, or at the start of both as messages"
            raise ConfigError(f"{problem}; {remedy}")
        return found

    def _find_layout(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that a chat, a question or a prompt is read by; [] = it is none."""
        if self.text_field in values and self.text_field != _DEFAULT_TEXT_FIELD:
            return []
        return _find_exchange(values)

    def _convert(self, values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """Return the messages of a record, or its prompt and completion."""
        *questions, reply = keys
        if not questions:
            turns = _split_exchanges(values[reply])
            if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
                turns = [_message(_SPEAKERS[i % 2], text) for i, text in enumerate(turns)]
            return {"messages": self._read_turns(turns, reply)}
        if isinstance(values[questions[0]], list) and len(questions) == 1:
            completion = values[reply]
            if isinstance(completion, str):
                completion = [_message("assistant", completion)]
            prompt = self._read_turns(values[questions[0]], questions[0])
            return {"prompt": prompt, "completion": self._read_turns(completion, reply)}
        if keys == ["prompt", "completion"]:  # of preferences, too
            return {key: values[key] for key in keys}
        question = "\n\n".join(filter(None, [get_text(values, key) for key in questions]))
        answer = get_text(values, reply)
        if self.template is None and not any(map(values.get, (*_SYSTEM, "tools"))):
            return {"prompt": question + "\n", "completion": answer}
        return {"messages": [_message("user", question), _message("assistant", answer)]}

    def _read_turns(self, turns: Any, place: str) -> list[dict[str, Any]]:
        if not isinstance(turns, list) or not turns:
            shown = json.dumps(turns)[:60]
            raise ConfigError(f"{place} is {shown}, not a list of objects with role and content")
        unread: set[str] = set()
        messages: list[dict[str, Any]] = []
        for i, turn in enumerate(turns):
            messages.append(self._read_turn(turn, f"{place}[{i}]", unread))
        self.notes.unread.update(f"{place}[].{key}" for key in sorted(unread))
        return messages

    def _read_turn(self, turn: Any, place: str, unread: set[str]) -> dict[str, Any]:
        """Return a message; add to `unread` what it and the template leave out."""
        if not _is_turn(turn):
            shown = f"{place} is {json.dumps(turn)[:60]}"
            raise ConfigError(f"{shown}, not an object with role and content, or from and value")
        message = {key: value for key, value in turn.items() if value is not None}
        if "role" not in message:
            message["role"] = message.pop("from", None)
        message["role"] = self._rename(message["role"], place, is_from="role" not in turn)
        for key in _LEARNED:
            if isinstance(message.get(key), bool) and not message.pop(key):
                message["weight"] = 0
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
        if "tool_calls" in message:
            message["tool_calls"] = _decode(message["tool_calls"])
        content = _join_parts(message.get("content"))
        if message["role"] == "function_call":
            message |= {"role": "assistant", "tool_calls": _read_calls(content, place)}
            content = ""
        message["content"] = content
        for key in message.keys() - _MESSAGE_KEYS:
            is_read = key != "id" and self._is_in_template(rf"\b{re.escape(key)}\b")
            if is_read or _is_content(key, message[key]):
                continue
            if not _is_empty(message.pop(key)):
                unread.add(key)
        return message

    def _rename(self, role: Any, place: str, *, is_from: bool) -> Any:
        """Return the usual name of a role, unless the template has it under its own."""
        usual = _usual_role(role)
        if usual == role or self._is_in_template(f"['\"]{re.escape(str(role))}['\"]"):
            return role
        if usual is not None:
            return usual
        shown = json.dumps(role)[:60]
        if is_from:
            raise ConfigError(f"{place}: from is {shown}, not one of {', '.join(_ROLES)}")
        if role != "developer":
            what = f"message of role {shown}, which the chat template does not name"
            self.notes.others[what] += 1
        return role

    def _is_in_template(self, pattern: str) -> bool:
        return re.search(pattern, self.template or "") is not None

    def _check_others(
        self, values: Mapping[str, Any], keys: Sequence[str], placed: Set[str]
    ) -> None:
        """Raise ConfigError if a key of a record that is not read holds content."""
        refused: list[str] = []
        for key in self._count_unread(values, placed):
            reason = _find_reason(key, values[key])
            if reason is not None:
                raise ConfigError(f"{key}: {reason}")
            if _is_content(key, values[key]) and not self._repeats(values, keys, key):
                refused.append(key)
        if refused:
            problem = f"not read, as the record is read by {', '.join(keys)}"
            remedy = f"to learn it, write the record as messages, {_MESSAGES}, else remove the key"
            if self.text_field in refused:
                remedy = f"remove what is not to be learned, {self.text_field} or the others"
            raise ConfigError(f"{', '.join(refused)}: {problem}; {remedy}")

    def _count_unread(self, values: Mapping[str, Any], placed: Set[str]) -> list[str]:
        """Return the keys of a record that are not read, and not empty, and count them."""
        others = [key for key in values if key not in placed and not _is_empty(values[key])]
        self.notes.unread.update(others)
        return others

    def _repeats(self, values: Mapping[str, Any], keys: Sequence[str], other: str) -> bool:
        """Whether the strings of `other` are those that are read, as they are or in one text."""
        strings = _strings([values[key] for key in keys])
        if other == self.text_field and isinstance(values[other], str):
            return bool(strings) and all(string in values[other] for string in strings)
        return _strings(values[other]) <= strings


def get_text(record: Mapping[str, Any], key: str, setting: str = "text_field") -> str:
    """Return the text in the field `key` of a record.

    Raises:
        ConfigError: there is no text. It says to change `setting`; the caller adds the place.
    """
    if key not in record:
        fields = ", ".join(repr(field) for field in record) or "nothing"
        problem = f"has no {key!r}, only {fields}"
        raise ConfigError(f"{problem}; {_advise_field(record, key, setting)}")
    text = record[key]
    advice = "remove or correct the record"
    if not isinstance(text, str):
        shown = json.dumps(text, default=str)[:60]
        raise ConfigError(f"{key!r} is {shown}, not text; {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{key!r} is not valid Unicode: character {error.start} is an unpaired surrogate"
        raise ConfigError(f"{problem}; {advice}") from None
    return text


def _advise_field(record: Mapping[str, Any], key: str, setting: str) -> str:
    """Return what to do with records without the field `key`."""
    keys = _find_exchange(record)
    nested = _find_records(record, lambda each: key in each)
    if keys and keys[0] in _CHATS:
        return "train on chats with dataset: jsonl"
    if keys:
        together = f"train on {' with '.join(keys)} with dataset: jsonl"
        return f"{together}, or on one of them alone with {setting}"
    if nested is not None:
        return _write_records(nested)
    return advise_delimiter(record) or f"set {setting} to one of them"


def _find_exchange(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a chat, or of a question or a prompt with its reply; [] = it is none."""
    chats = [key for key in _CHATS if key in values]
    if chats:
        return chats[:1]
    if "prompt" in values and "completion" in values:
        return ["prompt", "completion"]
    questions = _find_question(values)
    replies = [key for key in _REPLIES if key in values][:1]
    if questions and replies:
        return questions + replies
    return []


def _find_records(
    record: Mapping[str, Any], is_record: Callable[[Mapping[str, Any]], bool]
) -> str | None:
    """Return the key of a list of records in a record, which is then a whole file of them."""
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and is_record(value[0]):
            return key
    return None


def _write_records(key: str) -> str:
    """Return how to write the records in the list `key`, one a line."""
    path = f".{key}[]" if key.isidentifier() else f".[{json.dumps(key)}][]"
    return f"write the records of {key} one a line, jq -c {shlex.quote(path)} OLD > NEW"


def _find_question(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a question, or of what it is about."""
    question = [key for key in _QUESTIONS if key in values][:1]
    return question + [key for key in _CONTEXTS if key in values]


def _find_reason(key: str, value: Any) -> str | None:
    """Return why records with `key` are refused; None = they are not."""
    if _PREFERENCE_KEY.match(key) and _is_content(key, value):
        return _PREFERENCES
    return _REASONS.get(key)


def _read_reply(values: Mapping[str, Any], key: str) -> Any:
    """Return a reply of preferences: a text, or messages, which can be all of the dialog."""
    reply = values.get(key)
    messages = _decode(reply)
    if isinstance(messages, dict):  # one, as in ShareGPT
        messages = [messages]
    if not reply:
        problem = "is missing or empty, and objective: dpo compares chosen with rejected"
        raise ConfigError(f"{key}: {problem}; add the reply, or remove the line")
    if messages and isinstance(messages, list) and all(map(_is_turn, messages)):
        return messages
    if isinstance(reply, str):
        return reply
    shown = json.dumps(reply)[:60]
    raise ConfigError(f"{key}: {shown} is neither a text nor objects with role and content")


def _split_dialogs(chosen: Any, rejected: Any) -> list[dict[str, Any]] | None:
    """Return two dialogs as the messages that they start with, and each as the rest.

    None = they are replies only.
    """
    if not isinstance(chosen, list) or not isinstance(rejected, list) or _starts_reply(chosen[0]):
        return None
    n_common = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        n_common += 1
    if n_common in (0, len(chosen), len(rejected)):
        found = f"{n_common} of {len(chosen)} and {len(rejected)} messages are their common start"
        remedy = "both have to start with the same messages, and end with different replies to them"
        raise ConfigError(f"chosen and rejected: {found}; {remedy}")
    return [
        {"prompt": dialog[:n_common], "completion": dialog[n_common:]}
        for dialog in (chosen, rejected)
    ]


def _starts_reply(message: Mapping[str, Any]) -> bool:
    return _usual_role(message.get("role", message.get("from"))) in ("assistant", "function_call")


def _usual_role(role: Any) -> str | None:
    return _ROLES.get(str(role).lower().replace("-", "_"))


def _check_reply(converted: Mapping[str, Any]) -> None:
    """Raise ConfigError unless what is compared is of the assistant, and says something."""
    messages = converted.get("completion", converted.get("messages", [])[-1:])
    if isinstance(messages, str):
        return
    if not isinstance(converted.get("prompt", []), list):
        raise ConfigError("is messages, and prompt is text; write both in one way")
    if messages[0]["role"] in ("user", "system"):
        remedy = "both replies have to answer the same messages"
        raise ConfigError(f"the dialogs differ first in a message of the user; {remedy}")
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise ConfigError("the reply is empty; remove the line")


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and bool(turn.keys() & {"role", "from"})


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _split_exchanges(turns: Any) -> Any:
    """Return the texts of a list of questions with replies in turn, and other turns unchanged."""
    for keys in _EXCHANGES:
        if isinstance(turns, list) and all(
            isinstance(turn, dict) and turn.keys() == set(keys) for turn in turns
        ):
            return [turn[key] for turn in turns for key in keys]
    return turns


def _add_placed(converted: dict[str, Any], values: Mapping[str, Any]) -> set[str]:
    """Add to the messages of a record its system prompt and tools. Return their keys."""
    chat = converted.get("messages") or converted["prompt"]
    if not isinstance(chat, list):
        return set()
    for key in filter(values.get, _SYSTEM):
        _add_system(chat, key, _join_parts(values[key]))
    converted["tools"] = _decode(values.get("tools"))
    return {*_SYSTEM, "tools"}


def _add_system(messages: list[dict[str, Any]], key: str, system: Any) -> None:
    if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, _message("system", system))
    elif messages[0]["content"] != system:
        raise ConfigError(f"{key}: the messages start with another system message; remove one")


def _read_calls(content: Any, place: str) -> list[dict[str, Any]]:
    """Return the calls of tools that a turn holds as JSON text."""
    calls = _decode(content)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{place} is {json.dumps(content)[:60]}, not a call of a tool as JSON")
    return [{"type": "function", "function": call} for call in calls]


def _decode(value: Any) -> Any:
    """Return a list or an object that is JSON text, and other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        decoded = load_json(value)
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, list | dict) else value


def _join_parts(content: Any) -> Any:
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
    others = {key for key in part if not _is_empty(part[key])} - {"type", "text", "cache_control"}
    text = part.get("text")
    return text if isinstance(text, str) and not others else None


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _is_content(key: str, value: Any) -> bool:
    """Whether what a key holds may be content: by its name, or by a string that is no label."""
    strings = _strings(value)
    if _CONTENT_KEY.search(key):
        return bool(strings)
    is_long = "\n" in "".join(strings) or sum(map(len, strings)) > _MAX_LABEL_LENGTH
    return is_long or any(map(_SENTENCE.fullmatch, strings))


def _strings(value: Any) -> set[str]:
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
    return strings - _ROLES.keys() - {"", "on", "off"}
