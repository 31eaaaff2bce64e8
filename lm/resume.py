"""Resume a run: find its checkpoints, and load the first that is intact.

plan_resume           on rank 0, before the model is built: the checkpoints to load, best first
announce_if_complete  on all ranks: whether the run is already complete
load_checkpoint       on all ranks: load the first checkpoint of the plan that is intact
require_same_run      what must be equal in a checkpoint and in the run that resumes from it
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from lm.checkpoint.checkpointer import Checkpointer, SavedState, State
from lm.checkpoint.compare import find_changes, require_same_base, require_same_model
from lm.checkpoint.contents import verify
from lm.checkpoint.layout import hyperparameters_of
from lm.checkpoint.locate import locate_checkpoint
from lm.checkpoint.location import Location, parse_location
from lm.checkpoint.manifest import (
    PARTS,
    WEIGHTS,
    CheckpointError,
    Manifest,
    RunInfo,
    TrainingProgress,
)
from lm.checkpoint.store import CheckpointStore
from lm.config.hyperparameters import FIELDS
from lm.data.config import DataConfig
from lm.errors import (
    ConfigError,
    error_prefix,
    make_printable,
    nearest_file,
    oserror_as_config_error,
)
from lm.fields import keys_that_are
from lm.fileio import read_records
from lm.metrics.device import GIB, peak_memory_gib
from lm.metrics.records import Report
from lm.runtime.run_state import RunState, read_state
from lm.runtime.world import World
from lm.training.config import OptimConfig, SkipConfig
from lm.training.optim import learning_rate
from lm.units import format_bytes

FIXED = keys_that_are("fixed", FIELDS)
UNLOGGED = keys_that_are("unlogged", FIELDS)
DATA = {"dataset", "train_data", "fields", "chat_template", "attend_across_documents", "shuffle"}
"""Keys that decide which samples are read, in which a branch can differ."""
ORDER = {"train_data", "shuffle"}
"""Those of them that say other samples, or another order: a branch then starts at the first one."""


@dataclass(frozen=True)
class ResumePlan:
    """Checkpoints to load, best first."""

    resume_candidates: tuple[Location, ...] = ()
    init_candidates: tuple[Location, ...] = ()
    """only their weights are loaded"""
    branches: bool = False
    """the checkpoint to resume from is the one that `resume` named: the data may change"""
    may_be_complete: bool = False
    fresh: bool = False
    """what the run has written before is moved aside"""
    new_state: RunState | None = None
    """what is recorded of a start that resumes from no checkpoint of this run, off the cluster"""
    earlier_state: RunState | None = None
    """what is recorded again if this start is refused; see `forget_launch`"""


@oserror_as_config_error
def plan_resume(
    resume: str,
    init_checkpoint: str | None,
    store: CheckpointStore,
    restarted: Mapping[str, str],
    init_from: str | None = None,
    launch: Mapping[str, str] | None = None,
) -> ResumePlan:
    """Find the checkpoints to resume from, or else the one to load weights from.

    Until a run has a checkpoint, it resumes from the one that it started from: its `RunState` names
    it. Prints to stderr what is skipped.

    Args:
        resume: the hyperparameter.
        init_checkpoint: the value of `init_from`, if it names a checkpoint.
        restarted: the `restart_ids` of this start. A launcher's restart resumes from the newest
            checkpoint of the run if it has one.
        init_from: the hyperparameter.
        launch: the `launch_ids` of this start.

    Raises:
        ConfigError: `resume` or `init_from` is not a checkpoint, or `init_from` is not that of the
            run's start, of which there is no checkpoint yet.
        CheckpointError: there are checkpoints, but none is complete.
    """
    state = read_state(store.places)
    new_state = RunState(resume=resume, init_from=init_from, launch=dict(launch or {}))
    # A restart whose first attempt failed before it recorded its start is a first start, too.
    is_same_start = resume == state.resume and not restarted.items().isdisjoint(
        state.launch.items()
    )
    is_later_attempt = len(restarted) > 0 and (state.resume is None or is_same_start)
    fresh = resume != "auto" and not is_later_attempt
    if not fresh:
        candidates = store.find_candidates(PARTS, "resume=fresh starts at step 0")
        if candidates:
            may_be_complete = resume == "auto" and store.shows_completion
            return ResumePlan(tuple(candidates), may_be_complete=may_be_complete)
        if state.resumed_from is not None:
            return ResumePlan((_locate_start(state.resumed_from, store),), branches=True)
    if resume not in ("auto", "fresh"):
        candidate = _locate_named(resume, state, store)
        new_state = new_state.replace(resumed_from=str(candidate))
        return ResumePlan((candidate,), branches=True, fresh=fresh, new_state=new_state)
    if not fresh and state.init_from not in (None, init_from):
        started = f"{store}: no checkpoint yet of the run, which started from {state.init_from}"
        same_start = f"init_from={shlex.quote(state.init_from)}"
        remedy = f"use {same_start}, or resume=fresh for another start"
        raise ConfigError(f"init_from: {init_from or 'null'}, but {started}; {remedy}")
    plan = ResumePlan(fresh=fresh, new_state=new_state)
    if init_checkpoint is None:
        return plan
    return replace(plan, init_candidates=(_locate("init_from", init_checkpoint, store),))


def _locate_named(resume: str, state: RunState, store: CheckpointStore) -> Location:
    """Return the location of the checkpoint that the hyperparameter `resume` names."""
    try:
        return _locate("resume", resume, store)
    except ConfigError:
        if resume != state.resume or state.resumed_from is None:
            raise
        return _locate_start(state.resumed_from, store)  # this run has moved it aside


def _locate_start(where: str, store: CheckpointStore) -> Location:
    """Return the location of the checkpoint that the run of `store` resumed from at its start."""
    with error_prefix(f"{store}: no checkpoint yet of the run, which resumed from"):
        return locate_checkpoint(where, PARTS)


def _locate(key: str, where: str, store: CheckpointStore) -> Location:
    """Return the location of the checkpoint that the hyperparameter `key` names."""
    if store.is_name(where):
        return store.locate(where)
    named = parse_location(where)
    if named.path is not None and not named.path.exists():
        shown = where
        choices = "auto (its newest), fresh (step 0), or the directory or URL of a checkpoint"
        if key == "init_from":
            shown = str(named.path.absolute())
            choices = "OWNER/MODEL on the Hugging Face Hub, or the directory of a model or a run"
        problem = f"no such directory; use {choices}{nearest_file(named.path)}"
        raise ConfigError(f"{key}: {shown}: {problem}")
    with error_prefix(key):
        return locate_checkpoint(where, WEIGHTS if key == "init_from" else PARTS)


def announce_if_complete(
    plan: ResumePlan,
    store: CheckpointStore,
    run_info: RunInfo,
    max_steps: int,
    samples: bool,
    world: World,
) -> bool:
    """Return whether the newest checkpoint completes the run and is intact.

    If so, prints how to train on.

    Args:
        samples: the run draws samples, so one is due after the last step.

    Raises:
        ConfigError: the checkpoint belongs to a different run.
    """
    manifest = world.on_rank0(find_complete, plan, store, run_info, max_steps, samples)
    if manifest is None:
        return False
    newest = plan.resume_candidates[0]
    run = str(store).removesuffix("/checkpoints")
    try:
        # Of a URL, sizes were compared: to download all files would take long.
        if newest.path is not None:
            with world.all_or_none():
                verify(newest.path, manifest, world.rank, world.size)
        lines = world.on_rank0(describe_complete_run, run, newest, manifest, run_info)
    except CheckpointError:  # `load_checkpoint` names it, and loads the one before it
        return False
    if world.rank == 0:
        print("\n".join(lines))
    return True


def find_complete(
    plan: ResumePlan, store: CheckpointStore, run_info: RunInfo, max_steps: int, samples: bool
) -> Manifest | None:
    """Return the manifest of the newest checkpoint if nothing is left to do, else None."""
    if not plan.may_be_complete or max_steps == 0:
        return None
    manifest = store.read_manifest(plan.resume_candidates[0])
    changes = require_same_run(manifest, run_info)
    is_validated = manifest.validation_loss is not None and "val_data" not in changes
    is_evaluated = is_validated and (manifest.sampled or not samples)
    if manifest.step > max_steps or (manifest.step == max_steps and is_evaluated):
        return manifest
    return None


def describe_complete_run(
    run: str, location: Location, saved: Manifest, run_info: RunInfo
) -> list[str]:
    """Return lines that say that the run at `run` has no step left, and how to train on.

    Raises:
        CheckpointError: the hyperparameters of the checkpoint at `location` are not a run's.
    """
    step = saved.step
    longer = {**run_info.hyperparameters, "max_steps": 2 * step}
    longer_run = run_info.model_copy(update={"hyperparameters": longer})
    remedy = "raise max_steps, or max_epochs, to train on, or restart with resume=fresh"
    lines = [f"{run} is complete: {step} steps; {remedy}"]
    jump = compare_learning_rates(location, saved, longer_run)
    if jump is not None:
        lines.append(f"with max_steps={2 * step}: {jump}")
    return lines


def load_checkpoint(
    plan: ResumePlan,
    checkpointer: Checkpointer,
    state: State,
    run_info: RunInfo,
    log: Callable[[str], None],
) -> TrainingProgress:
    """Load the first intact checkpoint of `plan` into `state`, on all ranks together.

    Args:
        state: "model", "optim", "scaler", "spikes" and "reference".
        log: receives what was loaded, what was skipped and which hyperparameters changed.

    Returns:
        The checkpoint's manifest. A start at step 0 if there is no candidate, or only weights were
        loaded, of `init_from` or, in a forked trial, of the original trial's checkpoint.

    Raises:
        CheckpointError: every candidate is damaged.
        ConfigError: the checkpoint belongs to a different run or model.
    """
    candidates = plan.resume_candidates
    parts = PARTS
    remedy = "set resume to another one or to fresh"
    if not candidates:
        candidates = plan.init_candidates
        parts = WEIGHTS
        remedy = "set init_from to another one"
    problems: list[str] = []
    started = time.monotonic()
    for candidate in candidates:
        try:
            with checkpointer.open(candidate, parts) as saved:
                is_others = saved.manifest.trial_id != run_info.trial_id
                is_fork = run_info.trial_id is not None and is_others and not plan.branches
                if plan.resume_candidates and not is_fork:
                    return _resume_from(
                        candidate, saved, checkpointer, state, run_info, plan.branches, log
                    )
                _load_weights(saved, state, run_info, log)
                seconds = time.monotonic() - started
                peak = GIB * max(saved.world.all_gather_object(peak_memory_gib(saved.world.device)))
                memory = f"peak memory {format_bytes(peak)} per rank"
                log(f"loaded the weights of checkpoint {candidate} in {seconds:.1f} s, {memory}")
                if plan.resume_candidates:
                    log(describe_fork(saved.manifest, run_info))
                return TrainingProgress()
        except CheckpointError as error:
            log(f"skipping {error}")
            problems += error.problems
    if problems:
        raise CheckpointError(*problems, f"no intact checkpoint is left; {remedy}")
    return TrainingProgress()


def describe_fork(saved: Manifest, run_info: RunInfo) -> str:
    """Return a line that says what a forked trial starts with, and how to resume the original."""
    alone = "the weights alone, a new optimizer and a new schedule"
    start = f"trial {run_info.trial_id} starts at step 0 with {alone}"
    if saved.trial_id is None:
        return f"{start}: the checkpoint is of no trial"
    original = f"trial {saved.trial_id}"
    command = f"det experiment continue {saved.experiment_id or 'EXPERIMENT'}"
    return (
        f"{start}: it is a fork of {original}; to resume {original} after step {saved.step}"
        f" instead: {command}"
    )


@oserror_as_config_error
def describe_lost_progress(plan: ResumePlan, restarted: bool, metrics: Path | None) -> list[str]:
    """Return a line if a run starts at step 0 that has been started before.

    Args:
        restarted: a launcher restarts it.
        metrics: the run's reports; None on a cluster.
    """
    if plan.resume_candidates or plan.fresh:
        return []
    if metrics is None:
        if not restarted:
            return []
        problem = "the trial was started before, but Determined passes no checkpoint of it"
        return [f"{problem} (none was completed, or all were deleted): starts at step 0"]
    last = max((report.step for report in read_records(metrics, Report)), default=0)
    if last == 0:
        return []
    return [f"{metrics}: reports of {last} steps, but no checkpoint of the run: starts at step 0"]


def _resume_from(
    location: Location,
    saved: SavedState,
    checkpointer: Checkpointer,
    state: State,
    run_info: RunInfo,
    branches: bool,
    log: Callable[[str], None],
) -> Manifest:
    manifest = saved.manifest
    changes = require_same_run(manifest, run_info, branches)
    for change in changes.values():
        log(f"changed: {make_printable(change)}")
    jump = compare_learning_rates(location, manifest, run_info)
    late = too_late_to_skip(location, manifest, run_info)
    progress = manifest
    if "val_data" in changes:  # the loss is of other data
        progress = progress.model_copy(update={"validation_loss": None})
    if not changes.keys().isdisjoint(ORDER):  # sums and place are of other data
        other = {"dataset_state": None, "metric_sums": None, "data_start": manifest.step}
        progress = progress.model_copy(update=other)
    if progress.data_start > 0 and run_info.hyperparameters.get("max_epochs") is not None:
        problem = "counts passes over one dataset, and the run has read another one"
        raise ConfigError(f"max_epochs: {problem} up to step {progress.data_start}; use max_steps")
    parts = dict(state)
    if not manifest.loss_scaled:
        del parts["scaler"]
    has_window = manifest.hyperparameters.get("skip_spikes") is not None
    if len(parts["spikes"]) > 0 and not has_window:  # `skip_spikes` is new
        del parts["spikes"]
    saved.read_into(parts)
    if not branches:  # else it is another run's, and not to be deleted by this one
        checkpointer.add_saved(location, manifest)
    log(f"resumed from checkpoint {location.name}, step {manifest.step}")
    if jump is not None:
        log(jump)
    for first, last in late:
        remedy = f"to skip all of it, resume from a checkpoint before step {first}"
        log(f"skip_steps: [{first}, {last}] starts too late; {remedy} (resume=CHECKPOINT)")
    return progress


def too_late_to_skip(
    location: Location, saved: Manifest, run_info: RunInfo
) -> list[tuple[int, int]]:
    """Return the ranges of `skip_steps` that are new and start in a step that is saved.

    Raises:
        CheckpointError: the hyperparameters of the checkpoint at `location` are not a run's.
    """
    old = hyperparameters_of(str(location), saved, SkipConfig).skip_steps or ()
    new = run_info.hyperparameters.get("skip_steps") or ()
    return [
        (first, last) for first, last in new if first <= saved.step and (first, last) not in old
    ]


def _load_weights(
    saved: SavedState, state: State, run_info: RunInfo, log: Callable[[str], None]
) -> None:
    for change in require_same_model(saved.manifest, run_info):
        log(f"changed: {make_printable(change)}")
    saved.read_into({"model": state["model"]})


def require_same_run(saved: RunInfo, run_info: RunInfo, branches: bool = False) -> dict[str, str]:
    """Raise ConfigError if the hyperparameters, the data or the base of adapters make another run.

    Args:
        branches: whether the data may change.

    Returns:
        Other changes, by key.
    """
    old = _what_is_compared(saved)
    new = _what_is_compared(run_info)
    changes = find_changes(old, new, [key for key in new if key in old])
    fixed = FIXED
    if new.get("objective") == "dpo":  # as the checkpoint's log-probabilities depend on these
        fixed = FIXED | {"val_data", "amp_dtype"}
    elif branches:
        fixed = FIXED - DATA
    different = {key: change for key, change in changes.items() if key in fixed}
    old_class = saved.model.get("transformers_config", {})  # of another version of transformers,
    new_class = run_info.model.get("transformers_config", {})  # it can have other keys
    different |= find_changes(old_class, new_class, old_class.keys() & new_class.keys())
    if different:
        hint = ""
        if "total_batch_size" in different:
            hint = f" (with other ranks or batch_size: total_batch_size={old['total_batch_size']})"
        remedy = f"undo the change{hint}, or start it with another run_name or resume=fresh"
        causes: list[str] = []
        if "train_data" in different:
            remedy += "; on other data, another run_name can start with this run's weights"
            remedy += " (init_from=RUN), or also with its moments and schedule (resume=RUN)"
            keys = [key for key in DataConfig.model_fields if key in changes.keys() - different]
            causes = [changes[key] for key in keys if key != "val_data"]
        raise ConfigError(*causes, *different.values(), f"this would be a different run: {remedy}")
    require_same_base(saved, run_info)
    return {key: change for key, change in changes.items() if key not in UNLOGGED}


def _what_is_compared(info: RunInfo) -> dict[str, Any]:
    """Return the hyperparameters, those of the data by content: fingerprints instead of paths."""
    return info.hyperparameters | {
        "total_batch_size": info.total_batch_size,
        "tokenizer": info.tokenizer,
        "train_data": info.data["train"],
        "val_data": info.data["validation"],
        "eval_tasks": info.tasks,
    }


class _Schedule(OptimConfig, frozen=True, extra="ignore", allow_inf_nan=False):
    """What the learning rate depends on, among the hyperparameters of a manifest."""

    max_steps: int | None = Field(None, ge=0, lt=2**63)


def compare_learning_rates(location: Location, saved: Manifest, run_info: RunInfo) -> str | None:
    """Return a line if the next step's learning rate is not what the saved run would have.

    Raises:
        CheckpointError: the hyperparameters of the checkpoint at `location` are not a run's.
    """
    step = saved.step
    old = hyperparameters_of(str(location), saved, _Schedule)
    new = _Schedule.model_validate(run_info.hyperparameters)
    old_length = old.max_steps or 0
    new_length = new.max_steps or 0
    if step == 0 or old_length == 0 or step >= new_length:
        return None
    expected = learning_rate(old, min(step, old_length - 1), old_length)
    now = learning_rate(new, step, new_length)
    if math.isclose(expected, now, rel_tol=0.01):
        return None
    last = learning_rate(old, min(step - 1, old_length - 1), old_length)
    return f"learning rate: {last:.2e} in step {step}, now {now:.2e} in step {step + 1}"
