"""The sequences that a model reads to score a task: each choice after its context.

The sequences are divided into batches, which depend on the task, the tokenizer and the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.tokenizer.loading import Tokenizer
from lm.data.unwritten import find_unwritten
from lm.errors import ConfigError, error_prefix
from lm.tasks.task import Context, Norm, Question, Task
from lm.transformers_config import AnyModelConfig

Ids = NDArray[np.int64]
"""of tokens, `(n,)`"""

_PAD_MULTIPLE = 16
"""Batches are padded to a multiple of so many tokens, so that few shapes occur."""
_BATCH_TOKENS = 1 << 13
"""Enough to keep a device busy: a Hugging Face model can have a `max_seq_len` of 131,072."""


@dataclass(frozen=True)
class ScoredSequence:
    """A context, and consecutive tokens of a choice that follow it."""

    choice: int
    """number in the task"""
    context: Ids
    """at least one token"""
    targets: Ids
    """all tokens of the choice, unless it is longer than `max_seq_len`"""

    def __len__(self) -> int:
        """Return the tokens that the model reads, all but the last target."""
        return len(self.context) + len(self.targets) - 1


@dataclass(frozen=True)
class TokenizedQuestion:
    """A question whose choices have the numbers `first`, `first + 1` etc. in the task."""

    first: int
    gold: int
    n_tokens: Sequence[int]
    """of each choice"""
    n_chars: Sequence[int]
    """of each choice"""
    n_gold_bytes: int
    """of UTF-8"""


@dataclass(frozen=True)
class TokenizedTask:
    """A task for one tokenizer and one model."""

    name: str
    norm: Norm
    fingerprint: str
    """see `Task.fingerprint`"""
    questions: Sequence[TokenizedQuestion]
    batches: Sequence[Sequence[ScoredSequence]]
    """the longest sequences first"""
    n_choices: int
    n_cut: int
    """choices that are, with their context, longer than `max_seq_len`"""
    max_seq_len: int

    def notes(self) -> list[str]:
        """Return a line about choices that were cut, if any."""
        if self.n_cut == 0:
            return []
        cut = f"{self.n_cut} of {self.n_choices} choices are with their context longer than"
        return [f"{self.name}: {cut} max_seq_len {self.max_seq_len}, and cut from the left"]


def tokenize(task: Task, tokenizer: Tokenizer, config: AnyModelConfig) -> TokenizedTask:
    """Return the sequences that a model of `config` reads to score `task`.

    Raises:
        ConfigError: a choice has no tokens, or the tokenizer has no chat template, or one that
            rejects messages or leaves some out.
    """
    questions: list[TokenizedQuestion] = []
    sequences: list[ScoredSequence] = []
    n_choices = 0
    n_cut = 0
    for question in task.questions:
        with error_prefix(task.name):
            encoded = _encode(question, tokenizer)
        for choice, (ids, n_context) in zip(question.choices, encoded, strict=True):
            if len(ids) == n_context:
                problem = f"question {len(questions) + 1}: {choice.text[:60]!r} after its context"
                raise ConfigError(f"{task.name}: {problem} has no tokens in this tokenizer")
            if len(ids) - 1 > config.max_seq_len:
                n_cut += 1
        for number, (ids, n_context) in enumerate(encoded, n_choices):
            sequences += _cut(number, ids, n_context, config.max_seq_len)
        gold = question.choices[question.gold]
        questions.append(
            TokenizedQuestion(
                first=n_choices,
                gold=question.gold,
                n_tokens=[len(ids) - n_context for ids, n_context in encoded],
                n_chars=[len(choice.text) for choice in question.choices],
                n_gold_bytes=len(gold.text.encode()),
            )
        )
        n_choices += len(encoded)
    return TokenizedTask(
        name=task.name,
        norm=task.norm,
        fingerprint=task.fingerprint(),
        questions=questions,
        batches=_divide(sequences, config),
        n_choices=n_choices,
        n_cut=n_cut,
        max_seq_len=config.max_seq_len,
    )


class EncodedChoice(NamedTuple):
    """The ids of a context and of a choice that follows it."""

    ids: Ids
    n_context: int
    """how many of them are the context's"""


def _encode(question: Question, tokenizer: Tokenizer) -> list[EncodedChoice]:
    """Return each choice with its context, encoded as one text, as they are in training."""
    start_id = tokenizer.bos_id
    if start_id is None:
        start_id = tokenizer.eos_id
    different = dict.fromkeys(choice.context for choice in question.choices)
    written = {context: _write(context, tokenizer) for context in different}
    texts = [written[choice.context] + choice.text for choice in question.choices]
    distinct = list(dict.fromkeys([*written.values(), *texts]))
    if isinstance(question.choices[0].context, str):
        encoded = tokenizer.encode_batch(distinct)
    else:  # a chat, whose template has written the tokens at its start
        encoded = [tokenizer.encode_piece(text) for text in distinct]
    ids_of = {text: ids.astype(np.int64) for text, ids in zip(distinct, encoded, strict=True)}
    choices: list[EncodedChoice] = []
    for choice, text in zip(question.choices, texts, strict=True):
        context_ids = ids_of[written[choice.context]]
        choices.append(_find_context(ids_of[text], context_ids, start_id))
    return choices


def _write(context: Context, tokenizer: Tokenizer) -> str:
    """Return the text of a context, of messages by the chat template, with the start of a reply."""
    if isinstance(context, str):
        return context
    messages = [message._asdict() for message in context]
    rendered = tokenizer.render(messages, add_generation_prompt=True)
    places = [f"messages[{i}]" for i in range(len(messages))]
    unwritten = find_unwritten(messages, places, None, rendered.text)
    if unwritten:
        problem = f"{tokenizer.find_template().name} leaves out {', '.join(unwritten)}"
        raise ConfigError(f"{problem}; use roles that it writes, e.g. user")
    return rendered.text


def _find_context(ids: Ids, context_ids: Ids, start_id: int) -> EncodedChoice:
    """Return `ids` and how many of them do not change with the choice: the context's.

    Without any, `start_id` is the context: the first token of a choice needs one that it follows.
    """
    n_context = min(len(ids), len(context_ids))
    differs = np.flatnonzero(ids[:n_context] != context_ids[:n_context])
    if len(differs) > 0:
        n_context = int(differs[0])
    if n_context == 0:
        return EncodedChoice(np.append(start_id, ids), 1)
    return EncodedChoice(ids, n_context)


def _cut(choice: int, ids: Ids, n_context: int, max_seq_len: int) -> Iterator[ScoredSequence]:
    """Yield the sequences that a choice needs, which is one if it fits.

    What does not fit into `max_seq_len` is cut from the left of the context. A choice that is
    longer itself is scored in several sequences.
    """
    first = n_context
    while first < len(ids):
        end = min(first + max_seq_len, len(ids))
        start = max(0, end - 1 - max_seq_len)
        yield ScoredSequence(choice, ids[start:first], ids[first:end])
        first = end


def _divide(
    sequences: Sequence[ScoredSequence], config: AnyModelConfig
) -> list[list[ScoredSequence]]:
    """Divide sequences, the longest first, into batches.

    A batch has, with padding, at most `max_seq_len` tokens, and if that is more, `_BATCH_TOKENS`,
    unless one sequence has more.
    """
    longest_first = sorted(sequences, key=len, reverse=True)
    batches: list[list[ScoredSequence]] = []
    size = 0  # of the last batch
    for sequence in longest_first:
        is_full = len(batches) == 0 or len(batches[-1]) == size
        if is_full:
            length = _padded_length(len(sequence), config)
            size = max(1, min(config.max_seq_len, _BATCH_TOKENS) // length)
            batches.append([])
        batches[-1].append(sequence)
    return batches


def _padded_length(length: int, config: AnyModelConfig) -> int:
    return min(_PAD_MULTIPLE * math.ceil(length / _PAD_MULTIPLE), config.max_seq_len)


class ModelInputs(NamedTuple):
    """A batch as arguments of the model: B sequences of T tokens, with N targets."""

    tokens: Tensor
    """(B, T)"""
    targets: Tensor
    """(N,), those of a sequence after those of the sequence before"""
    queries: Tensor
    """(N,)"""


def make_inputs(
    batch: Sequence[ScoredSequence], config: AnyModelConfig, device: torch.device
) -> ModelInputs:
    """Return `batch` as tensors on `device`, padded on the right."""
    length = _padded_length(max(map(len, batch)), config)
    tokens = np.zeros((len(batch), length), np.int64)
    queries: list[Ids] = []
    for i, sequence in enumerate(batch):
        end = len(sequence)
        tokens[i, :end] = np.append(sequence.context, sequence.targets[:-1])
        first = len(sequence.context) - 1  # the first target follows the context's last token
        queries.append(i * length + np.arange(first, end))
    targets = [sequence.targets for sequence in batch]

    def to_device(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ModelInputs(
        to_device(tokens), to_device(np.concatenate(targets)), to_device(np.concatenate(queries))
    )
