"""Which trials a search creates, and which survive: a function of their losses alone.

Asynchronous successive halving that stops trials, as in Determined 0.38.1
(master/pkg/searcher/adaptive_asha.go, asha_stopping.go, tournament.go). Trial k survives a rung if
its loss is among the best 1/divisor of those that have reached the rung so far, so the order of
arrival counts. Here it is not that of the clock: it is the order in which workers of equal speed
would arrive, one for each of `max_concurrent_trials`. Thus the same losses keep the same trials,
with any number of real workers, and however often the search is killed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lm.determined.search import adaptive_asha_rungs, rungs_of_brackets
from lm.search.experiment import SearcherConfig

DROPPED = float("inf")
"""Loss of a trial that was refused or has failed: the worst."""


@dataclass
class Bracket:
    """A search with its own rungs. Random and grid searches have one bracket with one rung."""

    rungs: Sequence[int]
    """as indices into those of the bracket with the most rungs, of which it has the last ones"""
    max_trials: int
    n_at_start: int
    divisor: float
    n_created: int = 0
    losses: dict[int, list[float]] = field(default_factory=dict)
    """of the trials that have reached a rung, in ascending order"""

    def survives(self, rung: int, loss: float) -> bool:
        """Add a trial's loss at a rung, and return whether it continues to the next one."""
        losses = self.losses.setdefault(rung, [])
        place = bisect_left(losses, loss)
        losses.insert(place, loss)
        if rung == self.rungs[-1] or loss == DROPPED:
            return False
        n_kept = max(int(len(losses) / self.divisor), 1)
        return place < n_kept


def single_bracket(searcher: SearcherConfig, n_trials: int) -> Bracket:
    """Return the bracket of a search that stops no trial, whose only rung is a trial's end."""
    n_at_start = searcher.max_concurrent_trials or n_trials
    return Bracket([0], n_trials, min(n_at_start, n_trials), searcher.divisor)


def asha_brackets(searcher: SearcherConfig) -> list[Bracket]:
    """Return the brackets of adaptive ASHA, of which the first has the most rungs."""
    config = searcher.model_dump()
    steps = adaptive_asha_rungs(config)
    n_rungs = rungs_of_brackets(config)
    max_trials = _split_trials(searcher.max_trials or 1, searcher.divisor, n_rungs)
    at_start = _split_concurrent(searcher.max_concurrent_trials, searcher.divisor, max_trials)
    brackets: list[Bracket] = []
    for n, n_trials, n_at_start in zip(n_rungs, max_trials, at_start, strict=True):
        rungs = range(len(steps) - n, len(steps))
        brackets.append(Bracket(rungs, n_trials, min(n_at_start, n_trials), searcher.divisor))
    return brackets


def _split_trials(max_trials: int, divisor: float, n_rungs: Sequence[int]) -> list[int]:
    """Return the trials of each bracket, so that all brackets train about as many steps."""
    weights = [divisor ** (n - 1) / n for n in n_rungs]
    total = sum(weights)
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def _split_concurrent(concurrent: int, divisor: float, max_trials: Sequence[int]) -> list[int]:
    """Return how many trials of each bracket start at once; `concurrent` 0 = no limit is set."""
    n_brackets = len(max_trials)
    if concurrent == 0:
        return [max(max_trials[-1], int(divisor))] * n_brackets
    least, n_more = divmod(max(concurrent, n_brackets), n_brackets)
    return [least + (i < n_more) for i in range(n_brackets)]


@dataclass
class Standing:
    """Where a trial is in the search."""

    number: int
    """from 0, in the order of creation"""
    bracket: Bracket
    start: float
    """FLOPs that each worker had done when the trial was created"""
    rung: int
    """which it trains to, or has ended at"""
    state: Literal["active", "stopped", "completed", "dropped"] = "active"


@dataclass
class Replay:
    """The trials that have been created, as far as results are known.

    Args:
        result: loss of a trial at a rung, `DROPPED`, or None if it is not known yet.
        arrival: FLOPs from a trial's start to a rung.
    """

    brackets: Sequence[Bracket]
    result: Callable[[int, int], float | None]
    arrival: Callable[[int, int], float]
    standings: list[Standing] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """when the active trials arrive at their rungs, with their numbers; a heap"""

    def run(self) -> None:
        """Create trials and decide, until a result is missing."""
        for bracket in self.brackets:
            for _ in range(bracket.n_at_start):
                self._create(bracket, 0.0)
        while self.waiting:
            now, number = self.waiting[0]
            trial = self.standings[number]
            loss = self.result(number, trial.rung)
            if loss is None:
                return
            heapq.heappop(self.waiting)
            self._decide(trial, loss, now)

    def _decide(self, trial: Standing, loss: float, now: float) -> None:
        bracket = trial.bracket
        if bracket.survives(trial.rung, loss):
            trial.rung += 1
            self._wait(trial)
            return
        trial.state = "stopped"
        if loss == DROPPED:
            trial.state = "dropped"
        elif trial.rung == bracket.rungs[-1]:
            trial.state = "completed"
        if bracket.n_created < bracket.max_trials:
            self._create(bracket, now)

    def _create(self, bracket: Bracket, now: float) -> None:
        bracket.n_created += 1
        trial = Standing(len(self.standings), bracket, now, bracket.rungs[0])
        self.standings.append(trial)
        self._wait(trial)

    def _wait(self, trial: Standing) -> None:
        arrival = trial.start + self.arrival(trial.number, trial.rung)
        heapq.heappush(self.waiting, (arrival, trial.number))

    def active(self) -> list[Standing]:
        """Return the active trials, of which the first one's result is awaited first."""
        return [self.standings[number] for _, number in sorted(self.waiting)]
