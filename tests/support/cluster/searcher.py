"""Determined's searchers in version 0.38.1: which trials they create, and which they stop.

Asynchronous successive halving is that of adaptive ASHA in `mode: aggressive`, which has one
bracket.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any


class Searcher:
    """A searcher that stops no trial: single or random. It replaces every trial that ends.

    Attributes:
        points: hyperparameters of the trials that were created.
        n_trials: all trials that it wants to create.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._searcher = config["searcher"]
        self.n_trials = self._searcher.get("max_trials", 1)
        self.points: list[dict[str, Any]] = []

    def n_at_start(self) -> int:
        """Return how many trials are created at the start."""
        return min(self._searcher.get("max_concurrent_trials", 16), self.n_trials)

    def create(self) -> dict[str, Any]:
        """Return the hyperparameters of the next trial."""
        seed = self._config.get("reproducibility", {}).get("experiment_seed", 0)
        draw = random.Random(seed + len(self.points))
        hyperparameters = self._config["hyperparameters"]
        point = {key: sample(value, draw) for key, value in hyperparameters.items()}
        self.points.append(point)
        return point

    @property
    def wants_more(self) -> bool:
        return len(self.points) < self.n_trials

    def stops(self, trial: int, steps: int, loss: float) -> bool:  # noqa: ARG002
        """Return whether the trial is stopped after a validation."""
        return False

    def replaces(self, trial: int, state: str) -> bool:  # noqa: ARG002
        """Return whether another trial is created after this one has ended in `state`."""
        return self.wants_more


class Halving(Searcher):
    """Asynchronous successive halving: creates a trial when it stops one, or when one fails.

    A trial that completes by itself is not replaced, also if it has reported invalid
    hyperparameters: that report is lost. The state of a stopped trial changes, and nothing is
        signalled to it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        searcher = self._searcher
        length = searcher["max_time"]
        self._divisor = searcher.get("divisor", 4)
        largest = min(length, searcher["max_trials"])
        most = int(math.log(largest) / math.log(self._divisor)) + 1
        n_rungs = min(searcher.get("max_rungs", 5), most)
        lengths = [int(length / self._divisor**rung) for rung in range(n_rungs)]
        self.rungs = [max(each, 1) for each in reversed(lengths)]
        self._losses: list[list[float]] = [[] for _ in self.rungs]
        self._reached: Counter[int] = Counter()

    def n_at_start(self) -> int:
        concurrent = self._searcher.get("max_concurrent_trials")
        if not concurrent:
            concurrent = self._divisor ** (len(self.rungs) - 1)
        return min(int(concurrent), self.n_trials)

    def stops(self, trial: int, steps: int, loss: float) -> bool:
        """Return whether the trial is stopped: at the last rung, or not in the best 1/divisor."""
        for rung in range(self._reached[trial], len(self.rungs)):
            self._reached[trial] = rung
            if steps < self.rungs[rung]:
                return False
            place = self._insert(rung, loss)
            n_kept = max(int(len(self._losses[rung]) / self._divisor), 1)
            is_last = rung == len(self.rungs) - 1
            if is_last or place >= n_kept:
                return True
        return False

    def _insert(self, rung: int, loss: float) -> int:
        losses = self._losses[rung]
        place = bisect_left(losses, loss)
        losses.insert(place, loss)
        return place

    def replaces(self, trial: int, state: str) -> bool:
        if state != "STATE_ERROR":
            return False
        self._insert(self._reached[trial], math.inf)
        return self.wants_more


def make_searcher(config: Mapping[str, Any]) -> Searcher:
    if config["searcher"]["name"] == "adaptive_asha":
        return Halving(config)
    return Searcher(config)


def sample(value: Any, draw: random.Random) -> Any:
    """Draw from a range of an experiment's config; anything else is returned as it is."""
    match value:
        case {"type": "log", "base": base, "minval": low, "maxval": high}:
            return base ** draw.uniform(low, high)
        case {"type": "double", "minval": low, "maxval": high}:
            return draw.uniform(low, high)
        case {"type": "int", "minval": low, "maxval": high}:
            return draw.randrange(low, high)
        case {"type": "categorical", "vals": values}:
            return draw.choice(values)
    return value
