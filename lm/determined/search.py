"""What the searcher of a Determined experiment expects of a trial, and whether it stopped this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import determined as det
from determined import core
from determined.common.api import bindings

from lm.determined import private
from lm.determined.master import MALFORMED, REFUSALS
from lm.errors import ConfigError

TIME_METRIC = "batches"
"""Metric of a validation report that counts steps."""
DECISION_TIMEOUT = 10.0
"""Longest wait for a searcher's decision before training continues without it (seconds)."""


@dataclass(frozen=True)
class Searcher:
    """The searcher of an experiment's config, and the steps at which this trial is validated."""

    name: str
    metric: str
    smaller_is_better: bool
    time_metric: str | None
    """what `max_time` counts"""
    max_time: int
    """0 = not set"""
    max_steps: int
    """the last step, which is validated too"""
    validation_rate: int
    """steps between validations"""

    @classmethod
    def from_config(
        cls, experiment: Mapping[str, Any], max_steps: int, validation_rate: int
    ) -> Searcher:
        """Read the searcher from the config of a trial's experiment."""
        searcher = experiment["searcher"]
        return cls(
            name=searcher["name"],
            metric=searcher["metric"],
            smaller_is_better=searcher.get("smaller_is_better", True),
            time_metric=searcher.get("time_metric"),
            max_time=searcher.get("max_time") or 0,
            max_steps=max_steps,
            validation_rate=validation_rate,
        )

    @classmethod
    def of_file(cls, section: Any, max_steps: int, validation_rate: int) -> Searcher | None:
        """Read the metric in the section of an experiment file; None = it has none.

        The rest is for the master, or `lm.search`, to judge.
        """
        if not isinstance(section, dict) or not isinstance(section.get("metric"), str):
            return None
        smaller_is_better = section.get("smaller_is_better") is not False
        return cls(
            "single", section["metric"], smaller_is_better, None, 0, max_steps, validation_rate
        )

    @property
    def stops_trials(self) -> bool:
        """Whether the searcher can stop a trial before its last step."""
        return self.name not in ("single", "random", "grid")

    def check(self, smaller: Sequence[str], larger: Sequence[str] = ()) -> None:
        """Raise ConfigError if the searcher cannot work with this trial.

        Args:
            smaller: metrics of every validation report of which the smallest is the best.
            larger: those of which the largest is.
        """
        problems = []
        metrics = [*smaller, *larger]
        if self.metric not in metrics:
            problem = f"{self.metric!r} is not in the validation reports"
            problems.append(f"searcher.metric: {problem}; use {' or '.join(metrics)}")
        elif self.smaller_is_better != (self.metric in smaller):
            needed = str(not self.smaller_is_better).lower()
            problems.append(f"searcher.smaller_is_better: for {self.metric} it has to be {needed}")
        if self.stops_trials:
            problem = self._problem_of_stops()
            if problem is not None:
                problems.append(problem)
        if problems:
            raise ConfigError(*problems)

    def _problem_of_stops(self) -> str | None:
        """Return a line if the searcher cannot stop this trial where it should."""
        if self.max_time == 0:
            return (
                f"searcher.name: {self.name} without max_time is a search by operations, as before"
                " Determined 0.38, and could not stop this trial; use random or grid, or"
                " python -m lm.search FILE"
            )
        if self.time_metric != TIME_METRIC:
            return (
                f"searcher.time_metric: {self.time_metric!r} does not count the steps in the"
                f" validation reports; use {TIME_METRIC}"
            )
        if self.max_time > self.max_steps:
            return (
                f"searcher.max_time: {self.max_time} is above max_steps {self.max_steps}: trials"
                " would end before the last rung, and the search would start no others in their"
                f" place; use max_time {self.max_steps}, or max_steps {self.max_time}"
            )
        return None


class SearchStop:
    """Whether the search of a cluster has stopped this trial.

    Determined 0.38 marks the trial and signals nothing. The searcher decides inside of the call
    that reports a validation. Core API makes that call in a separate thread, which then asks for
    the trial's state. On ranks other than 0, the answer is not known.

    Args:
        searcher: None outside of trials.
        collective_timeout: seconds after which the other ranks, which wait for rank 0, fail.
    """

    def __init__(
        self,
        searcher: Searcher | None,
        train: core.TrainContext,
        rank: int,
        collective_timeout: float,
    ) -> None:
        self.reason: str | None = None
        """who stopped the trial, and why; None = not stopped"""
        self._searcher = searcher
        self._train = train
        self._rank = rank
        self._timeout = min(DECISION_TIMEOUT, collective_timeout / 2)
        self._question: str | None = None
        """the validation after which the search's decision is not known yet"""
        self._answered_step = 0
        self._answered = threading.Condition()
        if rank == 0 and searcher is not None and searcher.stops_trials:
            # There is no public way to know when a report has been sent.
            try:
                private.replace_post_metrics(train, self._report_and_ask)
            except AttributeError:
                problem = f"version {det.__version__} reports in another way than known ones"
                remedy = "a search could not stop this trial; use searcher.name random or grid"
                raise ConfigError(f"determined: {problem}, and {remedy}", rank_local=True) from None

    def _report_and_ask(
        self,
        send_report: Callable[..., None],
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        *rest: Any,
        **others: Any,
    ) -> None:
        """Send a report; after one of a validation, ask what the search has decided by it.

        If the master refuses the question, it is asked again after the next report.
        """
        assert self._searcher is not None
        is_validation = group == "validation" and steps_completed < self._searcher.max_steps
        try:
            send_report(group, steps_completed, metrics, *rest, **others)
            if is_validation:
                value = metrics[self._searcher.metric]
                self._question = f"{self._searcher.metric} {value:.4f} at step {steps_completed}"
            if self._question is not None:
                self._ask(self._question)
        finally:
            if is_validation:
                with self._answered:
                    self._answered_step = steps_completed
                    self._answered.notify()

    def _ask(self, cause: str) -> None:
        state: bindings.trialv1State | None = None
        with suppress(*REFUSALS, *MALFORMED):
            state = private.read_trial_state(self._train)
        if state is None:
            return
        self._question = None
        # The states of trials that are canceled or killed start with STOPPING, too.
        if state == bindings.trialv1State.STOPPING_COMPLETED:
            self.reason = f"by the search of this experiment, for good: {cause}"

    def decides_after(self, step: int) -> bool:
        """Return on every rank whether the search may stop the trial by the validation at `step`.

        If so, rank 0 waits until the decision is known, at most `DECISION_TIMEOUT`.
        """
        if self._searcher is None or not self._searcher.stops_trials:
            return False
        if step >= self._searcher.max_steps:
            return False
        if self._rank == 0:
            with self._answered:
                self._answered.wait_for(lambda: self._answered_step >= step, self._timeout)
        return True
