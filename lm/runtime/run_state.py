"""What a run off the cluster started from, and whether it ever had a checkpoint: `state.json`.

It is written before a run's first step, and after its first checkpoint, so that a run that is
killed at any moment neither forgets its start nor starts again at step 0 after its checkpoints are
lost.

A run in a bucket has it there and in its directory on this machine: the functions get both places,
of which the first counts that has it. For a trial, whose start the platform knows, they get none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import BaseModel, Field, ValidationError

from lm.errors import MAX_LINE, ConfigError, RunError
from lm.fileio import describe_invalid, parse_json
from lm.storage.place import Place

STATE = "state.json"
"""File of a run's directory or URL."""
ASIDE = "before-%Y%m%d-%H%M%S"
"""Format of the names of directories to which a new start moves what earlier runs wrote."""

_STAYS = re.compile(rf"lock|lease|before-.*|{re.escape(STATE)}")
"""Files of a run's directory that are not moved."""


class RunState(BaseModel, frozen=True, extra="forbid"):
    """The content of `state.json`."""

    resume: str | None = Field(
        default=None,
        description="the hyperparameter, as it was when the run started; null = unknown",
    )
    launch: dict[str, str] = Field(
        default={}, description="what identifies the start to its later attempts: `launch_ids`"
    )
    resumed_from: str | None = Field(
        default=None,
        description="checkpoint that it resumed from, another run's or one in `before-*`",
    )
    init_from: str | None = Field(
        default=None, description="the hyperparameter: its initial weights"
    )
    has_saved: bool = Field(
        default=False, description="whether a checkpoint of it was ever complete"
    )
    moving_to: str | None = Field(
        default=None,
        pattern=r"^before-[0-9-]{15}(-again)*$",
        description="directory to which files of earlier runs are being moved",
    )

    def replace(self, **changes: str | bool | dict[str, str] | None) -> RunState:
        """Return a copy with `changes`."""
        return self.model_copy(update=changes)


def read_state(places: Sequence[Place]) -> RunState:
    """Return the state of a run: the default of one that has not started.

    Raises:
        ConfigError: the file is not a regular one, or damaged.
    """
    for place in places:
        try:
            return RunState.model_validate(parse_json(place.read(STATE, 10 * MAX_LINE)))
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except ValidationError as error:
            problem = f"damaged: {describe_invalid(error)}"
        except ValueError as error:
            problem = f"damaged: {error}"
        raise ConfigError(f"{place}/{STATE}: {problem}; move it out of the run's directory")
    return RunState()


def write_state(places: Sequence[Place], state: RunState) -> None:
    """Write the state of a run, durably, last where it counts."""
    content = f"{state.model_dump_json(indent=1)}\n".encode()
    for place in reversed(places):
        place.write(STATE, content)


def movable(place: Place) -> set[str]:
    """Return the names of what a run has written, which a new start moves aside."""
    return {name for name in place.names() if not _STAYS.fullmatch(name)}


def forget_launch(places: Sequence[Place], launch: Mapping[str, str]) -> RunState | None:
    """Let later attempts of `launch` not be those of an earlier start with the same IDs.

    Returns:
        The state before, to be written again if this start is refused; None = it had no such IDs.
    """
    state = read_state(places)
    others = dict(state.launch.items() - launch.items())
    if others == state.launch:
        return None
    write_state(places, state.replace(launch=others))
    return state


def record_early(places: Sequence[Place], state: RunState) -> None:
    """Record a start before its weights are loaded, if it has no files to move aside."""
    if not any(movable(place) for place in places):
        write_state(places, state)


def begin_run(places: Sequence[Place], state: RunState, *, fresh: bool) -> None:
    """Record a start that does not resume from a checkpoint of this run.

    Args:
        fresh: move all files of earlier runs aside, their checkpoints included. The state says
            where one of these is now, if it is the one to resume from.

    Raises:
        ConfigError: the bucket cannot move files.
        RunError: a file cannot be moved.
    """
    if fresh and any(movable(place) for place in places):
        run = str(places[0])
        if run.startswith("az:") and movable(places[0]):  # it copies after it has answered
            raise ConfigError(
                f"run_name: {run} has files of an earlier run; choose another run_name"
            )
        aside = time.strftime(ASIDE)
        while any(aside in place.names() for place in places):  # two starts within one second
            aside += "-again"
        with suppress(FileNotFoundError):
            places[0].write(f"{aside}/{STATE}", places[0].read(STATE))
        source, _, name = (state.resumed_from or "").rpartition("/checkpoints/")
        if source and places[0].is_at(source):
            state = state.replace(resumed_from=f"{source}/{aside}/checkpoints/{name}")
        state = state.replace(moving_to=aside)
    write_state(places, state)
    finish_move(places)


def finish_move(places: Sequence[Place]) -> None:
    """Move aside what the state says, also after a kill of the process that has begun it.

    Raises:
        RunError: a file cannot be moved.
    """
    state = read_state(places)
    if state.moving_to is None:
        return
    try:
        for place in places:
            place.move(movable(place), state.moving_to)
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be moved ({error.strerror})") from None
    write_state(places, state.replace(moving_to=None))
