"""JSON lines: samples to fine-tune on, packed into sequences or one by one.

A line is an object with `text`; or with `prompt` and `completion`; or with `messages`, a chat that the
tokenizer's own template makes text of.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.dataset import Sample
from lm.data.files import read_jsonl
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError
from model import IGNORE_INDEX

_TOGETHER = 1024
"""Samples that are tokenised at once."""


class RenderedExample(NamedTuple):
    text: str
    learned: tuple[tuple[int, int], ...] | None
    """the spans (characters) whose tokens count in the loss; None = all"""
    rendered: bool
    """the text comes from a chat template, which writes beginnings and ends itself"""


def render_example(
    record: Mapping[str, Any], text_field: str, completion_only: bool, tokenizer: Tokenizer
) -> RenderedExample:
    """What a line says.

    Raises:
        ValueError: it lacks what is needed, or that is no text; says which keys are there.
        ConfigError: the tokenizer cannot write chats.
    """
    if "messages" in record:
        return _chat(record["messages"], completion_only, tokenizer)
    if {"prompt", "completion"} <= record.keys():
        prompt, completion = _text(record, "prompt"), _text(record, "completion")
        whole = len(prompt) + len(completion)
        return RenderedExample(prompt + completion, ((len(prompt), whole),) if completion_only else None, False)
    if text_field not in record:
        keys = ", ".join(record) or "none"
        raise ValueError(f"has neither {text_field}, nor prompt and completion, nor messages; its keys: {keys}")
    if completion_only:
        raise ValueError(f"loss_on: completion needs prompt and completion, or messages; this line has {text_field}")
    return RenderedExample(_text(record, text_field), None, False)


def _text(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{key} is {json.dumps(record[key])[:60]}, not text")
    return _unicode(record[key])


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half a surrogate pair, which no text holds") from None
    return text


def _chat(messages: Any, completion_only: bool, tokenizer: Tokenizer) -> RenderedExample:
    sound = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not sound:
        raise ValueError(f"messages is {json.dumps(messages)[:60]}, not a list of objects with role and content")
    for at, message in enumerate(messages):
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"messages[{at}]: its content is no text: {json.dumps(message)[:60]}")
    text = _unicode(tokenizer.render(messages, add_generation_prompt=False))
    if not completion_only:
        return RenderedExample(text, None, True)
    spans = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.render(messages[:at], add_generation_prompt=True)
            upto = tokenizer.render(messages[: at + 1], add_generation_prompt=False)
            if not (text.startswith(upto) and upto.startswith(before)):
                raise ValueError("the chat template changes earlier messages, so replies cannot be told; loss_on: all")
            spans.append((len(before), len(upto)))
    return RenderedExample(text, tuple(spans), True)


class JsonlDataset:
    """All samples of some files as a source of rows.

    Packed, they stand one behind the other and are cut into full rows: attention stays inside each sample, and
    only the very last row has an unused end. Otherwise each has a row of its own, cut or filled to the length.

    Raises:
        ConfigError: lines that cannot be used, the first of each file; or nothing to learn in any.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        text_field: str = "text",
        completion_only: bool = False,
        packing: bool = True,
    ) -> None:
        inputs: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        problems: list[str] = []
        for file in files:
            try:
                for encoded, learned in _encode(file, tokenizer, text_field, completion_only):
                    wanted = np.where(learned[1:], encoded[1:].astype(np.int32), np.int32(IGNORE_INDEX))
                    if (wanted != IGNORE_INDEX).any():
                        inputs.append(encoded[:-1].astype(np.int32))
                        targets.append(wanted)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)
        if not inputs:
            raise ConfigError(f"{files[0]}{' and others' if files[1:] else ''}: no line has anything to learn")
        lengths = [len(part) for part in inputs]
        self._seq_len = seq_len
        self._inputs = np.concatenate(inputs)
        self._targets = np.concatenate(targets)
        self._starts = np.cumsum([0, *lengths])
        self._packing = packing
        self.documents = len(lengths)
        self.overlong = sum(length > seq_len for length in lengths)
        begins = np.arange(0, len(self._inputs), seq_len) if packing else self._starts[:-1]
        stops = np.minimum(np.append(begins[1:], len(self._inputs)), begins + seq_len)
        before = np.cumsum(np.append(0, self._targets != IGNORE_INDEX))
        counts = before[stops] - before[begins]
        kept = counts > 0  # a row that has nothing to learn would only take time
        self._begins, self._stops, self._counts = begins[kept], stops[kept], counts[kept]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._begins[index], self._stops[index]
        inputs = np.zeros(self._seq_len, np.int64)
        targets = np.full(self._seq_len, IGNORE_INDEX, np.int64)
        inputs[: stop - start] = self._inputs[start:stop]
        targets[: stop - start] = self._targets[start:stop]
        if not self._packing:
            return Sample(inputs, targets)
        document_ids = np.searchsorted(self._starts, np.arange(start, start + self._seq_len), side="right")
        return Sample(inputs, targets, document_ids - document_ids[0])

    def targets(self, index: int) -> int:
        return int(self._counts[index])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._inputs.tobytes())
        for part in (self._targets, self._begins):
            digest.update(part.tobytes())
        return f"{self.documents} samples in {len(self)} rows, sha256 {digest.hexdigest()}"


def _encode(
    file: Path, tokenizer: Tokenizer, text_field: str, completion_only: bool
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Each sample's ids, and which of them are to be learned."""
    end = np.array([tokenizer.eos_id], np.uint32)
    samples = _samples(file, tokenizer, text_field, completion_only)
    for together in iter(lambda: list(itertools.islice(samples, _TOGETHER)), []):
        for rendered in (False, True):
            chosen = [sample for sample in together if sample.rendered == rendered]
            texts = [sample.text for sample in chosen]
            encoded = tokenizer.encode_with_offsets(texts, add_special_tokens=not rendered)
            for sample, (ids, offsets) in zip(chosen, encoded, strict=True):
                ends, learned = offsets[:, 1], np.full(len(ids), sample.learned is None)
                for start, stop in sample.learned or ():
                    learned |= (ends > start) & (ends <= stop)
                yield (ids, learned) if rendered else (np.append(ids, end), np.append(learned, True))


def _samples(file: Path, tokenizer: Tokenizer, text_field: str, completion_only: bool) -> Iterator[RenderedExample]:
    for number, record in read_jsonl(file):
        try:
            yield render_example(record, text_field, completion_only, tokenizer)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {error}") from None
        except ConfigError as error:
            raise ConfigError(*(f"{file}:{number}: {problem}" for problem in error.problems)) from None
