"""What this package uses of Determined's private names, as there is no public way.

A trial's container has the version of its master: 0.35.0 or a later one. What only some of these
have is used here alone, and says since when; the other names are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from determined import core
from determined.common.api import Session, bindings
from determined.core._metrics import _Shipper


def let_reports_wait() -> None:
    """Let any number of reports wait for the master, instead of blocking rank 0 after 1,000."""
    _Shipper.METRICS_QUEUE_MAXSIZE = 0  # pyright: ignore[reportAttributeAccessIssue]


def replace_post_metrics(train: core.TrainContext, replacement: Callable[..., None]) -> None:
    """Call `replacement` where Core API's thread calls a function that sends a report.

    Its first argument is that function, the others are those of the call.

    Raises:
        AttributeError: this version sends reports in another way.
    """
    shipper = train._metrics._shipper
    shipper._post_metrics = partial(replacement, shipper._post_metrics)


def session_of(train: core.TrainContext) -> Session:
    """Return the session in which Core API calls the master for a trial, with its retries."""
    return train._session


def read_trial_state(train: core.TrainContext) -> bindings.trialv1State:
    """Ask the master for the state of this trial."""
    return bindings.get_GetTrial(train._session, trialId=train._trial_id).trial.state


def report_progress(train: core.TrainContext, progress: float) -> None:
    """Report the fraction of a run that is done; 0.35 and 0.36 have no way to."""
    if hasattr(train, "report_progress"):  # since 0.37.0
        train.report_progress(progress)


def join_profiler(profiler: core.ProfilerContext, timeout: float) -> None:
    """Wait until a profiler that is off has sent its last report.

    It is sent only if its thread, on rank 0 of a node, ends before the context closes.
    """
    collector = getattr(profiler, "_collector", None)
    if collector is not None:
        collector.join(timeout)
