"""Decide what a run is: its data, start, length, ranks and checkpoints, resolved once."""

from __future__ import annotations

import math
import os
import shlex
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import determined as det
import torch

from lm.checkpoint.manifest import RunInfo
from lm.checkpoint.store import CheckpointStore
from lm.config.hyperparameters import Hyperparameters
from lm.data.config import derive_global_batch_size
from lm.data.run_data import Data, open_data
from lm.data.sampler import SampledSource
from lm.determined import master
from lm.determined.search import Searcher
from lm.errors import ConfigError, RunError, error_prefix
from lm.flops import count_flops_per_token
from lm.initial_weights import InitialWeights, find_initial_weights
from lm.inputs import (
    RECORD_INPUTS,
    check_searcher,
    find_versions,
    fingerprint_inputs,
    resolve_seed,
)
from lm.launch.console import announce
from lm.launch.launch import exit_code_of_stop, launch_ids, restart_ids
from lm.launch.machine import usable_cores
from lm.memory import MemoryCheck, check_memory
from lm.metrics.device import peak_flops
from lm.resume import (
    ResumePlan,
    announce_if_complete,
    describe_lost_progress,
    plan_resume,
)
from lm.runtime.run_dir import RunDir
from lm.runtime.run_state import begin_run, forget_launch, record_early, write_state
from lm.runtime.world import MeshShape, World
from lm.training import four_bits, parallelize, profiling
from lm.transformers_config import TransformersConfig
from lm.units import format_number, format_parameters

if TYPE_CHECKING:
    from lm.tasks.packing import TokenizedTask


@dataclass(frozen=True)
class Job:
    """What was asked for, and the trial or the directory that the run belongs to."""

    hp: Hyperparameters
    trial: det.ClusterInfo | None
    """on a cluster"""
    run_dir: RunDir | None
    """off the cluster"""
    dry_run: bool = False
    searcher: Any = None
    """that section of the experiment"""


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that is decided before a run is built; each rank differs only in its data."""

    hp: Hyperparameters
    seed: int
    max_steps: int
    """optimizer steps; 0 = only validate and generate"""
    amp_dtype: torch.dtype | None
    """compute dtype; None = float32"""
    mesh: MeshShape
    data: Data
    prompt: list[int]
    """tokens that samples continue"""
    global_batch_size: int
    """sequences per step"""
    validation_rate: int
    """steps between validations"""
    tasks: Sequence[TokenizedTask]
    """that score the model in validations"""
    manifest_info: RunInfo
    """what a checkpoint says of the run"""
    initial_weights: InitialWeights
    resume_plan: ResumePlan
    trial: det.ClusterInfo | None
    """on a cluster"""
    searcher: Searcher | None
    """of the trial's experiment"""
    run_dir: RunDir | None
    """off the cluster"""
    memory: MemoryCheck

    @property
    def trains(self) -> bool:
        return self.max_steps > 0

    @contextmanager
    def recording_start(self, store: CheckpointStore, world: World) -> Iterator[None]:
        """Record in `state.json` what the run starts from, which is loaded in the block.

        Not if it resumes from a checkpoint of this run, nor on a cluster, where the platform knows.
        What an earlier run has left is moved aside after the block: if the block fails, it is where
        it was.
        """
        state = self.resume_plan.new_state
        fresh = self.resume_plan.fresh
        if state is None or not (self.trains or fresh):
            yield
            return
        with restoring_earlier(self.resume_plan, store, world):
            world.on_rank0(record_early, store.places, state)  # in case the block is killed
            yield
            world.run_in_thread_on_rank0(begin_run, store.places, state, fresh=fresh)

    @property
    def sample_rate(self) -> int | None:
        """Steps between samples; None = no samples."""
        if self.data.tokenizer is None or self.hp.run.num_tokens == 0:
            return None
        return self.hp.metrics.sample_rate or self.validation_rate

    @property
    def eval_rate(self) -> int | None:
        """Steps between validations that score tasks; None = no tasks."""
        if not self.tasks:
            return None
        return self.hp.tasks.eval_rate or self.validation_rate

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.hp.model.max_seq_len

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Files of the tokenizer by name, which every checkpoint holds."""
        if self.data.tokenizer is None:
            return {}
        return self.data.tokenizer.files

    def ideal_seconds_per_token(self, device: torch.device) -> float | None:
        """Return how long the FLOPs of a token take at the peak of `device`; None = unknown.

        Unknown also without packing, as the padding of separate samples is not computed.
        """
        peak = peak_flops(device, self.amp_dtype)
        if peak is None or not self.hp.data.packing:
            return None
        flops = count_flops_per_token(self.hp.lora, self.hp.model)
        if flops is None:
            return None
        return flops / peak

    def announce_if_complete(self, store: CheckpointStore, world: World) -> bool:
        """Return whether nothing is left to do; if so, print how to extend the run."""
        samples = self.sample_rate is not None
        return announce_if_complete(
            self.resume_plan, store, self.manifest_info, self.max_steps, samples, world
        )

    @property
    def stop_ids(self) -> Collection[int]:
        """Tokens that end a sample."""
        tokenizer = self.data.tokenizer
        if tokenizer is None:
            return ()
        if self.hp.data.dataset == "jsonl":  # whose chats the template has rendered
            return tokenizer.chat_stop_ids
        return tokenizer.stop_ids

    def how_to_resume(self, step: int) -> str:
        """Return what makes a run resume that was stopped after `step` steps."""
        if self.trial is None:
            return f"as requested; {self.hp.checkpoint.rerun} to resume"
        resumes = "when it is activated or has its slots again, unless it was canceled"
        return f"as requested; the trial resumes from step {step} {resumes}"

    def facts(self, world: World) -> dict[str, Any]:
        """Return what must be equal on all ranks, by name."""
        facts: dict[str, Any] = {
            "device": world.device.type,
            "mesh": self.mesh,
            "compute dtype": str(self.amp_dtype),
            "max_steps": self.max_steps,
        }
        # Figures of an examination differ between kinds of CPUs.
        info = self.manifest_info.model_dump(
            exclude={"model": {"examined": {"details", "versions"}}}
        )
        facts |= info.pop("hyperparameters")
        facts |= info.pop("data")
        return facts | info

    def inputs(self) -> dict[str, Any]:
        """Return what the run's results depend on, besides its hyperparameters."""
        return fingerprint_inputs(self.hp, self.data, self.manifest_info.tasks)

    def session(self, world: World, step: int) -> dict[str, Any]:
        """Return what the report says of a start after `step` steps: command, versions, machine."""
        inputs = None
        if RECORD_INPUTS in os.environ:
            inputs = world.run_in_thread_on_rank0(self.inputs)
        info = self.manifest_info
        device = f"CPU of {usable_cores()} cores"
        n_gpus = 0
        if world.device.type == "cuda":
            device = torch.cuda.get_device_name(world.device)
            n_gpus = world.size
        return {
            "step": step,
            "tokens_per_step": self.tokens_per_step,
            "ranks": world.size,
            "gpus": n_gpus,
            "device": device,
            "host": socket.gethostname(),
            "command": shlex.join(sys.argv),
            "versions": find_versions(),
            "validation_data": f"{info.data['validation']}; tokenizer {info.tokenizer}",
            "inputs": inputs,
        }

    def notes(self) -> list[str]:
        """Return, on rank 0, lines on what the user may not expect."""
        hp = self.hp
        notes = list(self.data.notes)
        if isinstance(hp.model, TransformersConfig):
            notes += hp.model.notes(dropout=not hp.objective.of_pairs)
        elif self.trains and hp.data.dataset != "synthetic":
            from lm.hf.config_json import describe_no_family  # on rank 0

            notes += describe_no_family(hp.model)
        for task in self.tasks:
            notes += task.notes()
        notes += self.memory.notes()
        if self.trains:
            metrics = None if self.run_dir is None else self.run_dir.metrics
            is_restart = len(restart_ids(os.environ)) > 0
            notes += describe_lost_progress(self.resume_plan, is_restart, metrics)
        return notes

    def summary(self, world: World) -> str:
        """Return one line about the model, how it is sharded, and the size of a step."""
        hp = self.hp
        parameters = hp.size_of_model
        if hp.lora.lora_rank:
            parameters += f" and {format_parameters(hp.n_trained_parameters)} in adapters"
        dtype = str(self.amp_dtype or torch.float32).removeprefix("torch.")
        if hp.precision.float8:
            dtype = f"float8 {hp.precision.float8}"
        if hp.lora.base_dtype:
            dtype += f", base in {hp.lora.base_dtype}"
        epoch = "streamed"
        samples_per_epoch = self.data.train.samples_per_epoch
        if samples_per_epoch:
            epoch = f"{format_number(samples_per_epoch / self.global_batch_size)} steps per epoch"
        if isinstance(hp.data.train_data, dict) and self.trains:  # each has its own epochs
            assert isinstance(self.data.train, SampledSource)
            passes = zip(hp.data.train_data, self.data.train.passes(self.max_steps), strict=True)
            read = [f"{name} {format_number(n)} times" for name, n in passes]
            epoch = f"{format_number(self.max_steps)} steps read {', '.join(read)}"
        ranks = f"{world.size} x {world.device.type}"
        if hp.parallel.context_parallel > 1:
            ranks += f", sequences over {hp.parallel.context_parallel}"
        step = f"{self.global_batch_size} x {hp.model.max_seq_len} tokens per step"
        return f"{parameters}, {hp.parallel.sharding} over {ranks}, {dtype}; {step}, {epoch}"


def preflight(
    job: Job, amp_dtype: torch.dtype | None, world: World, store: CheckpointStore
) -> ResolvedRun:
    """Find everything that can be wrong, locally on every rank, and agree on it once.

    Locks the run directory and starts `store`, or in a dry run writes nothing and prints what the
    run needs.

    Raises:
        ConfigError: the hyperparameters, the data, the machines and the checkpoints do not fit
            together.
    """
    announce("reading the data")
    hp = job.hp
    trial = job.trial
    dry_run = job.dry_run
    _check_platform(hp, trial)
    if job.run_dir and not dry_run:
        job.run_dir.lock(world)
        store.start(world)
    initial_weights = find_initial_weights(hp, world, downloads=not dry_run)
    resume_plan = world.on_rank0(
        plan_resume,
        hp.checkpoint.resume,
        initial_weights.checkpoint,
        store,
        restart_ids(os.environ),
        hp.checkpoint.init_from,
        launch_ids(os.environ),
    )
    if dry_run and resume_plan.resume_candidates:
        initial_weights = find_initial_weights(hp, world)  # its base is compared with theirs
    if resume_plan.fresh and not dry_run:  # else an attempt after a kill would resume
        earlier_state = world.on_rank0(forget_launch, store.places, launch_ids(os.environ))
        resume_plan = replace(resume_plan, earlier_state=earlier_state)
    with restoring_earlier(resume_plan, store, world):
        run = _resolve(job, amp_dtype, world, initial_weights, resume_plan)
    if dry_run:
        notes = world.on_rank0(run.notes)
        if world.rank == 0:
            print("\n".join([run.summary(world), *notes]))
    return run


@contextmanager
def restoring_earlier(plan: ResumePlan, store: CheckpointStore, world: World) -> Iterator[None]:
    """Let later attempts resume the earlier start again if the block refuses this one."""
    try:
        yield
    except ConfigError as refusal:
        if plan.earlier_state is not None and world.rank == 0:
            try:
                write_state(store.places, plan.earlier_state)
            except (OSError, RunError) as error:
                problem = f"{store.places[0]}: the earlier start is not recorded again ({error})"
                remedy = "resume it with resume=auto"
                raise ConfigError(*refusal.problems, f"{problem}; {remedy}") from None
        raise


def _resolve(
    job: Job,
    amp_dtype: torch.dtype | None,
    world: World,
    initial_weights: InitialWeights,
    resume_plan: ResumePlan,
) -> ResolvedRun:
    """Return the run that `job` is; see `preflight`."""
    hp = job.hp
    trial = job.trial
    with world.all_or_none():
        parallelize.check_offload(hp.parallel)
        four_bits.check_base_dtype(hp.lora)
        profiling.check_memory_snapshot(hp.profiling)
        mesh = parallelize.mesh_shape(hp.parallel, world.size, world.launch.local_size)
        dp_size = hp.parallel.dp_size(world.size)
        batch_size = derive_global_batch_size(hp.data, dp_size)
    memory = check_memory(hp, amp_dtype, world)
    seed = resolve_seed(hp.run.seed, trial)
    model = hp.model
    open_run_data = partial(
        open_data,
        hp.data,
        model.vocab_size,
        model.max_seq_len,
        batch_size,
        seed,
        world.rank // hp.parallel.context_parallel,
        dp_size,
        pairs=hp.objective.of_pairs,
    )
    # The first to open data makes their token files, which can take hours.
    data = world.run_in_thread_on_each_node(open_run_data)
    with world.all_or_none():
        if data is None:
            data = open_run_data()
        max_steps = _find_length(hp, data, batch_size)
        validation_rate = hp.metrics.validation_rate or hp.metrics.report_rate
        tasks = _open_tasks(hp, validation_rate, data)
        searcher_of_trial = None
        if trial is not None:
            experiment = master.experiment_config(trial)
            searcher_of_trial = Searcher.from_config(experiment, max_steps, validation_rate)
        derived = {"seed": seed, "max_steps": max_steps or None}
        info = RunInfo(
            sharding=hp.parallel.sharding,
            total_batch_size=batch_size,
            hyperparameters=hp.to_flat() | derived,
            model=hp.model.model_dump(mode="json"),
            tasks="; ".join(task.fingerprint for task in tasks),
            loss_scaled=amp_dtype == torch.float16,
            trial_id=trial.trial.trial_id if trial else None,
            experiment_id=trial.trial.experiment_id if trial else None,
            base=initial_weights.base,
            **data.fingerprints(),
        )
        run = ResolvedRun(
            hp=hp,
            seed=seed,
            max_steps=max_steps,
            amp_dtype=amp_dtype,
            mesh=mesh,
            data=data,
            prompt=_prompt(hp, data),
            global_batch_size=batch_size,
            validation_rate=validation_rate,
            tasks=tasks,
            manifest_info=info,
            initial_weights=initial_weights,
            resume_plan=resume_plan,
            trial=trial,
            searcher=searcher_of_trial,
            run_dir=job.run_dir,
            memory=memory,
        )
        checked = searcher_of_trial or Searcher.of_file(job.searcher, max_steps, validation_rate)
        if checked is not None:
            check_searcher(checked, hp.tasks, [task.name for task in tasks], data)
    world.require_equal("ranks", run.facts(world))
    return run


def _check_platform(hp: Hyperparameters, trial: det.ClusterInfo | None) -> None:
    """Raise ConfigError if a hyperparameter contradicts where the run was started."""
    if trial and hp.checkpoint.checkpoint_storage:
        problem = "checkpoint_storage: not a hyperparameter of trials"
        remedy = "set checkpoint_storage at the top level of the experiment config"
        raise ConfigError(f"{problem}; {remedy}")
    if trial and "determined" in (hp.metrics.tracker or ()):
        problem = "tracker: determined is for runs outside Determined, and this is a trial"
        raise ConfigError(f"{problem}; remove determined")
    if exit_code_of_stop(os.environ) and hp.checkpoint.resume != "auto":
        problem = f"resume: {hp.checkpoint.resume} would discard all progress at every restart"
        cause = "for which RESTART_WHEN_STOPPED is set"
        remedy = "use auto with another run_name, or init_from"
        raise ConfigError(f"{problem}, {cause}; {remedy}")


def _find_length(hp: Hyperparameters, data: Data, batch_size: int) -> int:
    """Return the number of steps, 0 to only validate and generate."""
    steps_per_epoch = None
    if data.train.samples_per_epoch is not None:
        steps_per_epoch = data.train.samples_per_epoch / batch_size
    max_steps = hp.run.run_length(steps_per_epoch)
    if max_steps > 0:
        hp.skipping.check_last_step(max_steps)
    return max_steps


def _open_tasks(hp: Hyperparameters, validation_rate: int, data: Data) -> list[TokenizedTask]:
    """Return the tasks of `eval_tasks`. Without any, a run does not import how they are read.

    Raises:
        ConfigError: one does not exist or is invalid, they are scored at no validation, or the
            data have no tokenizer, or one that does not fit them.
    """
    config = hp.tasks
    if not config.eval_tasks:
        return []
    if config.eval_rate is not None and config.eval_rate % validation_rate:
        nearest = validation_rate * math.ceil(config.eval_rate / validation_rate)
        problem = f"{config.eval_rate} is not a multiple of validation_rate {validation_rate}"
        raise ConfigError(f"eval_rate: {problem}; tasks are scored in validations: use {nearest}")
    if data.tokenizer is None:
        problem = "the data have no tokenizer, and tasks are text"
        raise ConfigError(f"eval_tasks: {problem}; remove eval_tasks")
    # What scores, too: a file that is edited before the first validation is not to be imported.
    from lm.tasks import scoring  # noqa: F401
    from lm.tasks.packing import tokenize
    from lm.tasks.questions import read_tasks

    with error_prefix("eval_tasks"):
        tasks = read_tasks(config.eval_tasks, config.eval_limit)
        return [tokenize(task, data.tokenizer, hp.model) for task in tasks]


def _prompt(hp: Hyperparameters, data: Data) -> list[int]:
    if hp.metrics.sample_rate and data.tokenizer is None:
        problem = (
            f"sample_rate: {hp.metrics.sample_rate}, but dataset {hp.data.dataset} has no tokenizer"
        )
        raise ConfigError(f"{problem}; remove sample_rate")
    if hp.run.prompt is None:
        return data.prompt()
    prompt: list[int] = []
    if data.tokenizer is not None:
        prompt = data.tokenizer.encode(hp.run.prompt)
    if not prompt:
        problem = f"{hp.run.prompt!r} has no token in dataset {hp.data.dataset}'s tokenizer"
        raise ConfigError(f"prompt: {problem}")
    if len(prompt) > hp.model.max_seq_len:
        problem = f"{len(prompt):,} tokens exceed max_seq_len {hp.model.max_seq_len:,}"
        raise ConfigError(f"prompt: {problem}; use a shorter text")
    return prompt
