"""Manners towards a Determined master: patience where it is away, one line where it refuses, and the one thing that a
search wants to hear.

Metrics and checkpoints are reported by the library, from threads of its own. Progress and status, which only people
look at, would hold up the training loop; the `Courier` brings them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

import determined as det
from determined import core
from determined.common.api.bindings import APIHttpError
from determined.common.api.errors import BadRequestException

from lm.errors import RankError, RunError

MASTER_TIMEOUT = 1800
"""seconds of a master's absence that a run sits out"""
FAREWELL = 30.0
"""longest wait for the last word of progress to arrive (seconds)"""

_PAUSE = 2
_RANGES = {"int", "double", "log", "categorical"}
_REFUSALS = (BadRequestException, APIHttpError)


@contextmanager
def retrying() -> Iterator[None]:
    """Ask an absent master again every two seconds, for half an hour; end the run in one line where it refuses.

    The library's own pauses grow to two minutes, and a proxy's word that the master is away counts as a refusal.
    To be entered before `core.init`. `DET_RETRY_CONFIG`, where set, stays.

    Raises:
        RankError: the master refused what it was told, or did not come back.
    """
    retries = {"total": MASTER_TIMEOUT // _PAUSE, "backoff_factor": 0.5, "backoff_max": _PAUSE}
    retries |= {"allowed_methods": False, "status_forcelist": [502, 503]}
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(retries))
    try:
        yield
    except _REFUSALS as error:
        what = " ".join(str(error).split())
        raise RankError(f"the master does not take what it is told: {what}; the last checkpoint is kept") from error


def exit_code(
    error: RunError,
    info: det.ClusterInfo | None,
    speaks: bool,
    explain: Callable[[RunError], None] | None = None,
) -> int:
    """How a run that failed with `error` ends; a search is told where the point that it chose cannot work.

    It then drops the point, without restarts, and goes on. That is so where every line of `error` names a
    hyperparameter that the search varies; other mistakes would be the next point's, too.

    Args:
        speaks: whether this process is the one to tell.
        explain: leaves the error to the ranks that lose this one, so that they end alike.

    Returns:
        The error's own exit code, or 0 for a point that is dropped.
    """
    if speaks and explain is not None:
        explain(error)
    if info is None or not blames(error, varied(info.trial._config)):
        return error.exit_code
    if speaks:
        with suppress(*_REFUSALS):  # it knows already, or will see the trial fail
            manual = core.TensorboardMode.MANUAL
            with core.init(distributed=core.DummyDistributedContext(), tensorboard_mode=manual) as context:
                context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
    return 0


def varied(experiment: Mapping[str, Any]) -> set[str]:
    """The hyperparameters for which an experiment's config gives a range and not a value."""
    given = experiment.get("hyperparameters") or {}
    return {key for key, value in given.items() if isinstance(value, dict) and value.get("type") in _RANGES}


def blames(error: RunError, keys: set[str]) -> bool:
    """Whether every line of `error` names one of `keys`; what a misspelt key should have been does not count."""
    named = (re.findall(r"\w+", line.partition("; did you mean")[0]) for line in error.problems)
    return all(keys & set(words) for words in named)


class BackgroundReporter:
    """Brings a person's news to the master in the background: the newest of each kind, late where it has to be.

    Training waits for none, and goes on where one is refused.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "courier")
        self._news: dict[str, tuple[Callable[[Any], None], Any]] = {}
        self._last: Future[None] | None = None

    def tell(self, deliver: Callable[[Any], None], news: Any) -> None:
        """Call `deliver(news)` soon, unless there is newer for the same function by then."""
        self._news[deliver.__name__] = deliver, news
        self._last = self._pool.submit(self._deliver, deliver.__name__)

    def _deliver(self, kind: str) -> None:
        deliver, news = self._news.pop(kind, (None, None))
        if deliver is not None:
            with suppress(*_REFUSALS):
                deliver(news)

    def close(self) -> None:
        """Let the last word arrive, within `FAREWELL`."""
        if self._last is not None:
            wait([self._last], FAREWELL)
        self._pool.shutdown(wait=False, cancel_futures=True)
