"""JSON Lines for fine-tuning, packed into sequences or one sample per sequence.

A line is an object with `text`; with `prompt` and `completion`, both text or both lists of
messages; or with `messages`, a chat. The tokenizer's chat template renders messages and the line's
`tools`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Dataset, Sample
from lm.data.files import JsonLine, get_text, name_files, raise_together, read_json_lines
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError
from model import IGNORE_INDEX

_BATCH = 1024
"""Samples tokenized in one call."""

_CONVERSIONS = {
    "conversations": (
        "ShareGPT",
        '{messages: [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), content: .value}]}',
    ),
    "instruction": (
        "Alpaca",
        '{prompt: (.instruction + "\\n" + (.input // "") + "\\n"), completion: .output}',
    ),
}
"""other formats by one of their keys: their name, and the jq program that converts a line"""


class _Example(NamedTuple):
    text: str
    target_spans: tuple[tuple[int, int], ...] | None
    """characters whose tokens are targets: start and end of each span; None = all"""
    is_chat: bool
    """a chat template has written the start and end tokens"""


def _render(
    record: Mapping[str, Any], text_field: str, completion_only: bool, tokenizer: Tokenizer
) -> _Example:
    if "messages" in record:
        return _render_chat(record, ("messages",), completion_only, tokenizer)
    if {"prompt", "completion"} <= record.keys():
        if isinstance(record["prompt"], list):
            return _render_chat(record, ("prompt", "completion"), completion_only, tokenizer)
        prompt, completion = get_text(record, "prompt"), get_text(record, "completion")
        span = len(prompt), len(prompt) + len(completion)
        return _Example(prompt + completion, (span,) if completion_only else None, is_chat=False)
    if text_field not in record:
        for key, (name, program) in _CONVERSIONS.items():
            if key in record:
                problem = f"{key}: {name} records are not read; convert them: jq -c '{program}' OLD.jsonl > NEW.jsonl"
                raise ConfigError(problem)
        keys = ", ".join(record) or "none"
        problem = f"no {text_field} (text_field), no prompt and completion, no messages; the line has the keys: {keys}"
        raise ConfigError(problem)
    if completion_only:
        problem = f"loss_on: completion requires prompt and completion, or messages; the line has {text_field}"
        raise ConfigError(problem)
    return _Example(get_text(record, text_field), None, is_chat=False)


def _render_chat(
    record: Mapping[str, Any], keys: tuple[str, ...], completion_only: bool, tokenizer: Tokenizer
) -> _Example:
    """Render the messages in `keys` of a record: targets are the replies in `messages`, or all of a `completion`."""
    if unread := [key for key in record if key not in (*keys, "tools")]:
        program = f"del({', '.join('.' + json.dumps(key) for key in unread)})"
        problem = f"{', '.join(unread)}: not read in a chat; remove: jq -c '{program}' OLD.jsonl > NEW.jsonl"
        raise ConfigError(problem)
    tools = _get_tools(record)
    given = [
        message for key in keys for message in _check_messages(record[key], key, completion_only)
    ]
    messages = [
        {name: value for name, value in message.items() if name != "weight"} for message in given
    ]
    replies = [i for i, message in enumerate(given) if message["role"] == "assistant"]
    if completion_only and keys == ("messages",) and not replies:
        problem = "messages: none of the assistant, and loss_on: completion learns only from these"
        raise ConfigError(f"{problem}; remove the line, or set loss_on: all")
    rendered, tagged = tokenizer.render(messages, add_generation_prompt=False, tools=tools)
    text = get_text({keys[-1]: rendered}, keys[-1])
    if not completion_only:
        return _Example(text, None, is_chat=True)
    is_target = [given[i].get("weight", 1) == 1 for i in replies]
    if keys != ("messages",):
        targets = [(len(record["prompt"]), len(messages))]
    elif tagged is None:
        targets = [(i, i + 1) for i in itertools.compress(replies, is_target)]
    elif all(is_target) or len(replies) == len(tagged):
        return _Example(
            text,
            tuple(tagged if all(is_target) else itertools.compress(tagged, is_target)),
            is_chat=True,
        )
    else:
        problem = f"weight: the chat template marks {len(tagged)} of {len(replies)} replies; remove the weights"
        raise ConfigError(problem)
    spans = []
    for first, last in targets:
        prompt, _ = tokenizer.render(messages[:first], add_generation_prompt=True, tools=tools)
        with_reply = text
        if last < len(messages):
            with_reply, _ = tokenizer.render(
                messages[:last], add_generation_prompt=False, tools=tools
            )
        if not (text.startswith(with_reply) and with_reply.startswith(prompt)):
            problem = "the chat template changes earlier messages, so replies cannot be located; use one that"
            advice = (
                "marks them with {% generation %}, as TRL has for most models, or set loss_on: all"
            )
            raise ConfigError(f"{problem} {advice}")
        spans.append((len(prompt), len(with_reply)))
    return _Example(text, tuple(spans), is_chat=True)


def _get_tools(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.get("tools") or None
    for tool in tools if isinstance(tools, list) else [tools] if tools else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        match function:
            case {"name": str(), **rest} if isinstance(rest.get("parameters") or {}, dict):
                continue
        problem = f"tools: {json.dumps(tool)[:60]} is not {{function: {{name: NAME, parameters: JSON SCHEMA}}}}"
        raise ConfigError(
            f"{problem}; if tools is text: jq -c '.tools |= fromjson' OLD.jsonl > NEW.jsonl"
        )
    return tools


def _check_messages(messages: Any, key: str, completion_only: bool) -> list[dict[str, Any]]:
    """Return the messages with content as one text, or raise ConfigError."""
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        raise ConfigError(
            f"{key} is {json.dumps(messages)[:60]}, not a list of objects with role and content"
        )
    messages = [
        m | {"content": _join_parts(m["content"])} if "content" in m else m for m in messages
    ]
    for i, message in enumerate(messages):
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ConfigError(f"{key}[{i}]: content is not text: {json.dumps(message)[:60]}")
        if "weight" in message:
            if key != "messages":
                raise ConfigError(
                    f"{key}: weight is not read in prompt and completion; use messages"
                )
            if message["weight"] not in (0, 1) or message["role"] != "assistant":
                shown = json.dumps(message["weight"])[:60]
                raise ConfigError(
                    f"{key}[{i}]: weight is {shown}; it must be 0 or 1, in messages of the assistant"
                )
            if not completion_only:
                raise ConfigError(f"{key}[{i}]: weight requires loss_on: completion")
    return messages


def _join_parts(content: Any) -> Any:
    """Return content that is a list of parts of text as one text, and other content unchanged."""
    match content:
        case [*parts] if all(
            isinstance(p, dict) and p == {"type": "text", "text": str(p.get("text"))} for p in parts
        ):
            return "".join(part["text"] for part in parts)
    return content


class JsonlDataset(Dataset):
    """Samples of JSON Lines files.

    Packed, a sequence holds several samples, each in one piece, and attention stays inside each;
    otherwise one sample. The rest of a sequence is padding. Samples longer than a sequence are
    truncated, those without targets dropped.

    Args:
        held_out: True = only every 20th line, for validation; False = only the others; None = all.

    Raises:
        ConfigError: invalid lines (the first of each file), or no targets at all.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        seq_len: int,
        text_field: str = "text",
        completion_only: bool = False,
        packing: bool = True,
        held_out: bool | None = None,
    ) -> None:
        inputs: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        lengths: list[int] = []  # before truncation
        dropped: list[
            int
        ] = []  # samples without targets: the length up to the first one that is cut off, or 0
        numbers = itertools.count()

        def read(file: Path) -> None:
            lines = (
                x for x in read_json_lines(file) if held_out in (None, next(numbers) % 20 == 0)
            )
            for ids, is_target in _encode(
                _examples(lines, text_field, completion_only, tokenizer), tokenizer
            ):
                if is_target[1 : seq_len + 1].any():
                    lengths.append(len(ids) - 1)
                    inputs.append(ids[:-1][:seq_len].astype(np.int32))
                    labels = np.where(
                        is_target[1:], ids[1:].astype(np.int32), np.int32(IGNORE_INDEX)
                    )
                    targets.append(labels[:seq_len])
                else:
                    dropped.append(int(is_target[1:].argmax()) + 1 if is_target[1:].any() else 0)

        errors: list[ConfigError] = []
        for file in files:
            try:
                read(file)
            except ConfigError as error:
                errors.append(error)
        raise_together(errors)
        if not inputs and any(dropped):
            problem = f"max_seq_len {seq_len} cuts off all targets; use {max(dropped)} or more"
            raise ConfigError(f"{name_files(files)}: {problem}")
        if not (inputs or dropped):
            advice = (
                ""
                if held_out is None
                else ", or set val_data: without it, every 20th line is held out"
            )
            raise ConfigError(f"{name_files(files)}: no samples; add lines{advice}")
        if not inputs:
            problem = (
                f"{name_files(files)}: no line has targets; add completions, or set loss_on: all"
            )
            raise ConfigError(problem)
        sizes = np.minimum(lengths, seq_len)
        first = _best_fit(sizes, seq_len) if packing else np.arange(len(sizes))
        order = np.argsort(first, kind="stable")
        self.seq_len = seq_len
        self._packing = packing
        self._inputs = np.concatenate([inputs[i] for i in order.tolist()])
        self._targets = np.concatenate([targets[i] for i in order.tolist()])
        self._document_starts = np.cumsum(np.append(0, sizes[order]))
        self._starts = self._document_starts[np.append(np.diff(first[order], prepend=-1) > 0, True)]
        self._counts = np.add.reduceat(
            self._targets != IGNORE_INDEX, self._starts[:-1], dtype=np.int64
        )
        padding = 1 - len(self._inputs) / (len(self) * seq_len)
        self.note = (
            f"{len(lengths)} samples in {len(self)} sequences, {100 * padding:.1f} % padding"
        )
        if n_truncated := sum(length > seq_len for length in lengths):
            lost = 100 * (1 - len(self._inputs) / sum(lengths))
            self.note += f"; {n_truncated} truncated to max_seq_len {seq_len}, {lost:.1f} % of the tokens dropped"
        if dropped:
            self.note += (
                f"; {len(dropped)} more dropped, without targets within max_seq_len {seq_len}"
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._starts[index], self._starts[index + 1]
        inputs = np.zeros(self.seq_len, np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        inputs[: stop - start] = self._inputs[start:stop]
        targets[: stop - start] = self._targets[start:stop]
        if not self._packing:
            return Sample(inputs, targets)
        positions = np.minimum(
            np.arange(start, start + self.seq_len), stop
        )  # padding is one document
        document_ids = np.searchsorted(self._document_starts, positions, side="right")
        return Sample(inputs, targets, document_ids - document_ids[0])

    def n_target_tokens(self, index: int) -> int:
        return int(self._counts[index])

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in (self._inputs, self._targets, self._document_starts, self._starts):
            digest.update(part.tobytes())
        return f"{len(self._document_starts) - 1} samples in {len(self)} sequences, sha256 {digest.hexdigest()}"


def _best_fit(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return the first sample of each sample's sequence: longest first, each in the fullest with space for it."""
    sequences = np.empty(len(lengths), np.int64)  # by their longest sample
    by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces: list[int] = []  # those that sequences have left, sorted
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        sequence, space = i, seq_len
        if (at := bisect_left(spaces, length)) < len(spaces):
            space = spaces[at]
            sequence = by_space[space].pop()
            if not by_space[space]:
                del spaces[at]
        sequences[i] = sequence
        left = by_space[space - length]
        if not left:
            insort(spaces, space - length)
        left.append(sequence)
    _, first, sequences = np.unique(sequences, return_index=True, return_inverse=True)
    return first[sequences]


def _examples(
    lines: Iterable[JsonLine],
    text_field: str,
    completion_only: bool,
    tokenizer: Tokenizer,
) -> Iterator[_Example]:
    for place, record, _ in lines:
        try:
            yield _render(record, text_field, completion_only, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None


def _encode(
    examples: Iterator[_Example], tokenizer: Tokenizer
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Yield the ids of each example, and which of them are targets."""
    end = np.array([tokenizer.eos_id], np.uint32)
    while batch := list(itertools.islice(examples, _BATCH)):
        for is_chat in (False, True):
            chosen = [example for example in batch if example.is_chat == is_chat]
            texts = [example.text for example in chosen]
            encodings = tokenizer.encode_with_ends(texts, add_special_tokens=not is_chat)
            for example, (ids, ends) in zip(chosen, encodings, strict=True):
                is_target = np.full(len(ids), example.target_spans is None)
                for start, stop in example.target_spans or ():
                    is_target |= (ends > start) & (ends <= stop)
                yield (
                    (ids, is_target)
                    if is_chat
                    else (np.append(ids, end), np.append(is_target, True))
                )
