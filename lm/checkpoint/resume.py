"""Resume a run: find its checkpoint, compare it with the run, and load it.

plan_resume      on rank 0, before the model is built: the checkpoints to load, best first
start_date       on rank 0, before the data is opened: when the run first started
is_complete      on all ranks: whether the run is already complete
resume           on all ranks: load the first checkpoint of the plan that is intact
"""

from __future__ import annotations

import atexit
import datetime
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined as det
from pydantic import BaseModel

from lm.checkpoint import remote
from lm.checkpoint.bucket import Bucket, is_url
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer, State
from lm.checkpoint.manifest import (
    FILE_NAME,
    MANIFEST,
    CheckpointError,
    Manifest,
    RunInfo,
    TrainingProgress,
    read_manifest,
    verify,
)
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import CheckpointStore, LocalCheckpoints
from lm.errors import ConfigError, error_prefix, oserror_as_config_error, printable
from lm.fields import keys_that_are
from lm.metrics.device import peak_memory_gib
from lm.runtime.world import World
from lm.training.optim import OptimConfig, learning_rate
from model import ModelConfig


@dataclass(frozen=True)
class ResumePlan:
    """Checkpoints to load, best first: absolute paths, URLs, UUIDs on a cluster; of `init_candidates` only weights."""

    hyperparameters: type[BaseModel]
    """says of each key whether its change makes a different run"""
    resume_candidates: tuple[str, ...] = ()
    init_candidates: tuple[str, ...] = ()
    may_be_complete: bool = False
    fresh: bool = False
    """what the run has written before is moved aside"""


@oserror_as_config_error
def plan_resume(config: CheckpointConfig, store: CheckpointStore, restarted: bool) -> ResumePlan:
    """Find the checkpoints to resume from, or else the one to load weights from; print to stderr what is skipped.

    Args:
        config: all hyperparameters of the run.
        restarted: a launcher restarts the run, which resumes from its newest checkpoint if it has
            one.

    Raises:
        ConfigError: `resume` or `init_from` is not a checkpoint.
        CheckpointError: there are checkpoints, but none is complete.
    """
    keys = type(config)
    fresh = config.resume != "auto" and not restarted
    candidates = [] if fresh else store.resume_candidates()
    if not candidates and config.resume not in ("auto", "fresh"):
        candidates = [_locate("resume", config.resume, store)]
    if candidates:
        may_be_complete = config.resume == "auto" and store.shows_completion
        return ResumePlan(keys, tuple(candidates), (), may_be_complete, fresh)
    if config.init_from is None:
        return ResumePlan(keys, fresh=fresh)
    return ResumePlan(keys, (), (_locate("init_from", config.init_from, store),), fresh=fresh)


def _locate(key: str, where: str, store: CheckpointStore) -> str:
    """Return the location of the checkpoint that the hyperparameter `key` names."""
    if store.is_name(where):
        return where
    with error_prefix(key):
        return locate_checkpoint(where)


def start_date(plan: ResumePlan, store: CheckpointStore) -> datetime.date:
    """Return the date on which the run first started, for its chat template: the checkpoint's, or today."""
    for candidate in plan.resume_candidates:
        with suppress(CheckpointError, ValueError, TypeError):
            date = store.read_manifest(candidate).hyperparameters.get("chat_template_date")
            if date:
                return datetime.date.fromisoformat(date)
    return datetime.date.today()


@oserror_as_config_error
def find_checkpoint(where: Path | str) -> Path:
    """Return the directory of the checkpoint that `locate_checkpoint` finds; one at a URL is downloaded."""
    location = locate_checkpoint(where)
    if not is_url(location):
        return Path(location)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return remote.download(location, directory / Path(location).name)


@oserror_as_config_error
def locate_checkpoint(where: Path | str) -> str:
    """Return the absolute path or URL of the checkpoint at `where`, or of the newest complete one of the run there.

    Raises:
        ConfigError: `where` is neither, or the run has not saved a checkpoint.
        CheckpointError: the run has checkpoints, but none is complete.
    """
    candidates = store_at(where).resume_candidates()
    if candidates:
        return candidates[0]
    if is_url(where):
        location = str(where).rstrip("/")
        names = list(Bucket(location).sizes())
    else:
        location = str(Path(where).absolute())
        names = [path.name for path in Path(location).iterdir()]
    if not any(name == MANIFEST or FILE_NAME.fullmatch(name) for name in names):
        raise ConfigError(f"{location}: neither a checkpoint nor a run that has saved one")
    return location


def store_at(where: Path | str) -> CheckpointStore:
    """Return the checkpoints of the run at `where`, a path or URL, to read them."""
    return (
        BucketCheckpoints(str(where))
        if is_url(where)
        else LocalCheckpoints(Path(where) / "checkpoints")
    )


def is_complete(
    plan: ResumePlan,
    store: CheckpointStore,
    run_info: RunInfo,
    max_steps: int,
    samples: bool,
    world: World,
) -> bool:
    """Return whether the run's newest checkpoint completes the run and is intact; if so, print how to extend it.

    Raises:
        ConfigError: the checkpoint belongs to a different run.
    """
    step = world.on_rank0(lambda: completed_step(plan, store, run_info, max_steps, samples))
    if not step:
        return False
    newest = plan.resume_candidates[0]
    if not is_url(
        newest
    ):  # of which sizes were compared: the download of all files would take long
        try:
            world.all_or_none(
                lambda: verify(Path(newest), read_manifest(Path(newest)), world.rank, world.size)
            )
        except CheckpointError:
            return False
    if world.rank == 0:
        run = newest.rpartition("/checkpoints/")[0]
        run = run if is_url(run) else os.path.relpath(run)
        longer = extension(_optim_config(run_info.hyperparameters), step)
        print(f"{run} is complete: {step} steps; extend: {longer}; restart: resume=fresh")
    return True


def extension(config: OptimConfig, max_steps: int) -> str:
    """Return the overrides that make a complete run of `max_steps` longer, and what they do to the learning rate."""
    last, after = (
        learning_rate(config, max_steps - 1, max_steps),
        learning_rate(config, max_steps, 2 * max_steps),
    )
    longer = f"max_steps={2 * max_steps}"
    if math.isclose(last, after, rel_tol=0.02):
        return longer
    jump = f"(the learning rate jumps from {last:.2e} to {after:.2e})"
    if last < 0.05 * config.lr:  # too low to learn with
        return f"{longer} {jump}"
    return f"{longer} lr={last:.3g} lr_schedule=constant warmup_steps=0, or only {longer} {jump}"


def completed_step(
    plan: ResumePlan, store: CheckpointStore, run_info: RunInfo, max_steps: int, samples: bool
) -> int:
    """Return the step of the run's newest checkpoint if nothing is left to do, else 0.

    Args:
        samples: the run draws samples, so one is due after the last step.

    Raises:
        ConfigError: the checkpoint belongs to a different run.
    """
    if not (plan.may_be_complete and max_steps):
        return 0
    manifest = store.read_manifest(plan.resume_candidates[0])
    _compare_runs(manifest, run_info, plan.hyperparameters)
    _compare_bases(manifest, run_info)
    is_evaluated = manifest.validation_loss is not None and (manifest.sampled or not samples)
    return (
        manifest.step
        if manifest.step > max_steps or (manifest.step == max_steps and is_evaluated)
        else 0
    )


def resume(
    plan: ResumePlan,
    checkpointer: Checkpointer,
    state: State,
    run_info: RunInfo,
    cluster_info: det.ClusterInfo | None,
    log: Callable[[str], None],
) -> TrainingProgress:
    """Load the first intact checkpoint of `plan` into `state`, on all ranks together.

    Args:
        state: "model", "optim" and "scaler".
        log: receives what was loaded, what was skipped and which hyperparameters changed.

    Returns:
        The checkpoint's manifest. A start at step 0 if there is no candidate, or only weights were
        loaded, of `init_from` or, in a forked trial, of the original trial's checkpoint.

    Raises:
        CheckpointError: every candidate is damaged.
        ConfigError: the checkpoint belongs to a different run or model.
    """
    started = time.monotonic()

    def is_resumable(manifest: Manifest) -> bool:
        is_fork = cluster_info is not None and manifest.trial_id != cluster_info.trial.trial_id
        return bool(plan.resume_candidates) and not is_fork

    def select(manifest: Manifest) -> State:
        if is_resumable(manifest):
            changes = _compare_runs(manifest, run_info, plan.hyperparameters)
        else:
            changes = _compare_models(manifest, run_info)
        for change in changes:
            log(f"changed: {printable(change)}")
        _compare_bases(manifest, run_info)
        if not is_resumable(manifest):
            return {"model": state["model"]}
        return {
            name: part for name, part in state.items() if name != "scaler" or manifest.loss_scaled
        }

    problems: list[str] = []
    progress = TrainingProgress()
    for candidate in plan.resume_candidates or plan.init_candidates:
        try:
            manifest = checkpointer.load(candidate, select)
        except CheckpointError as error:
            log(f"skipping {error}")
            problems += error.problems
            continue
        if is_resumable(manifest):
            progress = manifest
            checkpointer.add_saved(candidate, manifest)
            log(f"resumed from checkpoint {Path(candidate).name}, step {manifest.step}")
            for line in _compare_learning_rates(manifest, run_info):
                log(line)
        else:
            peak = max(
                checkpointer.world.all_gather_object(peak_memory_gib(checkpointer.world.device))
            )
            seconds = time.monotonic() - started
            log(
                f"loaded the weights of checkpoint {candidate} in {seconds:.1f} s, peak memory {peak:.2f} GiB per rank"
            )
        break
    else:
        if problems:
            remedy = (
                "resume to another one or to fresh"
                if plan.resume_candidates
                else "init_from to another one"
            )
            raise CheckpointError(*problems, f"no intact checkpoint is left; set {remedy}")
    return progress


def _compare_runs(saved: RunInfo, run_info: RunInfo, hyperparameters: type[BaseModel]) -> list[str]:
    """Return the changes to log; raise ConfigError if they make a different run."""
    old, new = (
        info.hyperparameters
        | {"total_batch_size": info.total_batch_size, "tokenizer": info.tokenizer}
        | {"train_data": info.data["train"], "val_data": info.data["validation"]}
        for info in (saved, run_info)
    )
    changes = _changes(old, new, filter(old.__contains__, new))
    fixed = keys_that_are("fixed", hyperparameters)
    different = {key: change for key, change in changes.items() if key in fixed}
    if different:
        total = "total_batch_size"
        hint = (
            f" (with other ranks or batch_size: {total}={old[total]})" if total in different else ""
        )
        remedy = f"undo the change{hint}, or start it with another run_name or resume=fresh"
        raise ConfigError(*different.values(), f"this would be a different run: {remedy}")
    logged = keys_that_are("logged", hyperparameters)
    return [change for key, change in changes.items() if key in logged]


def _optim_config(hyperparameters: Mapping[str, Any]) -> OptimConfig:
    return OptimConfig.model_validate(
        {key: hyperparameters[key] for key in OptimConfig.model_fields}
    )


def _compare_learning_rates(saved: Manifest, run_info: RunInfo) -> list[str]:
    """Return the line to log if the learning rate of the next step is not the one that the saved run would have."""
    step, old, new = saved.step, saved.hyperparameters, run_info.hyperparameters
    if not (step and old.get("max_steps") and step < (new.get("max_steps") or 0)):
        return []

    def rate(hyperparameters: Mapping[str, Any], step: int) -> float:
        max_steps = hyperparameters["max_steps"]
        return learning_rate(_optim_config(hyperparameters), min(step, max_steps - 1), max_steps)

    if math.isclose(rate(old, step), rate(new, step), rel_tol=0.01):
        return []
    return [
        f"learning rate: {rate(old, step - 1):.2e} in step {step}, now {rate(new, step):.2e} in step {step + 1}"
    ]


def _compare_models(saved: RunInfo, run_info: RunInfo) -> list[str]:
    """Return the changes to log; raise ConfigError if the models differ in structure."""
    compare_structures(
        ModelConfig.model_validate(saved.model), ModelConfig.model_validate(run_info.model)
    )
    if None in (saved.tokenizer, run_info.tokenizer) or saved.tokenizer == run_info.tokenizer:
        return []
    return [
        f"tokenizer: {saved.tokenizer} in the checkpoint, now {run_info.tokenizer}: token IDs mean other text"
    ]


def compare_structures(saved: ModelConfig, now: ModelConfig) -> None:
    """Raise ConfigError if weights of the model `saved` do not have the same meaning in the model `now`."""
    if changes := _changes(saved.structure(), now.structure(), ModelConfig.model_fields):
        remedy = "the model differs from the checkpoint's: use the checkpoint's values"
        raise ConfigError(*changes.values(), remedy)


def refuse_adapters(saved: RunInfo, init_from: str | None) -> None:
    """Raise ConfigError if the checkpoint of `saved` holds adapters instead of a model's weights."""
    if saved.base:
        problem = f"{init_from or 'the checkpoint'} holds only LoRA adapters of {saved.base.source}"
        remedy = "merge them with `python -m lm.hf export CHECKPOINT DIRECTORY` and set init_from to the directory"
        raise ConfigError(f"init_from: {problem}; {remedy}")


def _compare_bases(saved: RunInfo, run_info: RunInfo) -> None:
    """Raise ConfigError unless both have all weights, or adapters of the same base."""
    old, new = saved.base, run_info.base
    if new is None:
        refuse_adapters(saved, run_info.hyperparameters.get("init_from"))
    if new and not old:
        problem = "lora_rank: the checkpoint holds all weights and no adapters; use lora_rank: null, or resume: fresh"
        raise ConfigError(problem)
    if old and new and old.files != new.files:
        problem = f"{new.source} differs from the weights that the adapters in the checkpoint belong to ({old.source})"
        remedy = "use these, or start a new run with resume=fresh or another run_name"
        raise ConfigError(f"init_from: {problem}; {remedy}")


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    return {
        key: f"{key}: {json.dumps(old.get(key))} in the checkpoint, now {json.dumps(new.get(key))}"
        for key in keys
        if old.get(key) != new.get(key)
    }
