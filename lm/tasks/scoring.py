"""Log-likelihoods of the choices of a task, computed by all ranks together, and their grades.

Each rank scores every n-th batch of the task. A batch is the same computation on any number of
ranks, with any `batch_size` and with any sharding strategy, and so has the same results, bit for
bit, on the same hardware.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.any_model import AnyModel
from lm.errors import ConfigError
from lm.runtime.world import World
from lm.sampling import varying_lengths
from lm.tasks.config import metric_names
from lm.tasks.packing import ScoredSequence, TokenizedTask, make_inputs
from lm.tasks.task import Norm


class BatchScores(NamedTuple):
    """Scores of the sequences of a batch, in their order."""

    log_likelihoods: NDArray[np.float64]
    """in nats"""
    is_greedy: NDArray[np.bool_]
    """whether no token is more likely than each target"""


@dataclass(frozen=True)
class ChoiceScores:
    """Scores of all choices of a task, by number."""

    log_likelihoods: Sequence[float]
    """in nats"""
    is_greedy: Sequence[bool]
    """whether greedy decoding finds the choice"""


class Scorer:
    """Scores one task with all ranks together."""

    def __init__(self, task: TokenizedTask, model: AnyModel, world: World) -> None:
        self.task = task
        self.n_steps = math.ceil(len(task.batches) / world.size)
        self._model = model
        self._world = world
        self._scored: dict[int, Tensor] = {}
        """of the batches of this rank, by number: what the model returned"""

    def score(self) -> Iterator[None]:
        """Score this rank's share of the batches. Yields after each, `n_steps` times on every rank.

        Leaves the model in eval mode.
        """
        self._model.eval()
        for step in range(self.n_steps):
            number = step * self._world.size + self._world.rank
            # FSDP's ranks gather shards together: one that has no batch left repeats the last one.
            number = min(number, len(self.task.batches) - 1)
            self._scored[number] = self._score_batch(self.task.batches[number])
            yield

    @torch.no_grad()
    def _score_batch(self, batch: Sequence[ScoredSequence]) -> Tensor:
        inputs = make_inputs(batch, self._model.config, self._world.device)
        with varying_lengths():
            return self._model(inputs.tokens, inputs.targets, queries=inputs.queries)

    def gather(self) -> ChoiceScores:
        """Return the scores of all choices, on every rank.

        Raises:
            ConfigError: some are inf or NaN.
        """
        own = {number: self._sum_targets(number) for number in self._scored}
        scores: dict[int, BatchScores] = {}
        for of_rank in self._world.all_gather_object(own):
            scores |= of_rank  # a batch that was repeated has the same scores
        # A choice that is longer than `max_seq_len` has several sequences.
        log_likelihoods: list[list[float]] = [[] for _ in range(self.task.n_choices)]
        is_greedy = [True] * self.task.n_choices
        for number, of_batch in scores.items():
            for sequence, log_likelihood, is_most_likely in zip(
                self.task.batches[number], *of_batch, strict=True
            ):
                log_likelihoods[sequence.choice].append(float(log_likelihood))
                is_greedy[sequence.choice] &= bool(is_most_likely)
        sums = [math.fsum(of_choice) for of_choice in log_likelihoods]
        if not all(map(math.isfinite, sums)):
            problem = "the model computes inf or NaN"
            raise ConfigError(
                f"{self.task.name}: {problem}; use another checkpoint, or in a run a lower lr"
            )
        return ChoiceScores(sums, is_greedy)

    def _sum_targets(self, number: int) -> BatchScores:
        """Return the scores of the sequences of a batch, from those of their targets."""
        lengths = [len(sequence.targets) for sequence in self.task.batches[number]]
        starts = np.cumsum([0, *lengths[:-1]])
        log_probs, is_greedy = self._scored[number].double().cpu().numpy()
        return BatchScores(
            log_likelihoods=np.add.reduceat(log_probs, starts),
            is_greedy=np.minimum.reduceat(is_greedy, starts) > 0,
        )


class Mean(NamedTuple):
    """A mean over questions, with its standard error."""

    value: float
    stderr: float | None
    """None = of one question, which has none"""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of `values`."""
        if len(values) == 1:
            return cls(values[0], None)
        stderr = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), stderr)


@dataclass(frozen=True)
class TaskResult:
    """How well a model answers a task."""

    task: TokenizedTask
    acc: Mean
    """questions answered right"""
    bpb: Mean
    """bits per byte of the right choice"""
    acc_by_norm: Mapping[Norm, float]
    """`acc` if log-likelihoods were divided by nothing, characters or tokens"""
    chosen: Sequence[int]
    """choice of each question"""

    def metrics(self) -> dict[str, float]:
        """Return what a run reports of the task."""
        names = metric_names(self.task.name)
        return {names.acc: self.acc.value, names.bpb: self.bpb.value}


def grade(task: TokenizedTask, scores: ChoiceScores) -> TaskResult:
    """Return the result of the scores of a task.

    The choice with the largest log-likelihood is chosen, divided as the task defines.
    """
    chosen: list[int] = []
    bits_per_byte: list[float] = []
    is_right: dict[Norm, list[float]] = {"none": [], "char": [], "token": []}
    for question in task.questions:
        n_choices = len(question.n_tokens)
        choices = slice(question.first, question.first + n_choices)
        log_likelihoods = np.array(scores.log_likelihoods[choices])
        normalized: dict[Norm, NDArray[np.float64]] = {
            "none": log_likelihoods,
            "char": log_likelihoods / question.n_chars,
            "token": log_likelihoods / question.n_tokens,
        }
        for norm, values in normalized.items():
            choice = int(values.argmax())
            if norm == task.norm:
                chosen.append(choice)
            right = choice == question.gold
            if n_choices == 1:
                right = scores.is_greedy[question.first]
            is_right[norm].append(float(right))
        bits = -log_likelihoods[question.gold] / math.log(2)
        bits_per_byte.append(float(bits / question.n_gold_bytes))
    return TaskResult(
        task=task,
        acc=Mean.of(is_right[task.norm]),
        bpb=Mean.of(bits_per_byte),
        acc_by_norm={norm: statistics.fmean(values) for norm, values in is_right.items()},
        chosen=chosen,
    )
