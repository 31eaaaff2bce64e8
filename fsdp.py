"""Train a language model with PyTorch FSDP through Determined's Core API.

    python fsdp.py --config FILE [key=value ...] [--dry-run]

The same file runs alone, under any launcher, and as a Determined trial. Read it from `main` on:

main            read the configuration, join the other ranks
train_together  open the Core API context; print an error once
execute         the order of a run: preflight, build, load, prepare, train, finish
build_model     the model, wrapped with `fully_shard`
Trainer         the parts of a run, and what is done with them; `train_steps` is the training loop

Words: a Job is what was asked for, a ResolvedRun what that means here, a World all ranks, a session
the time of a run in one process. A rate is a number of steps. A run that only validates and samples
has `max_steps` 0 (`run.trains` is False): its loop takes no step, and it saves nothing.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__":
    if sys.flags.safe_path:  # Python has left out the directory of this file
        sys.path.insert(0, str(Path(__file__).parent))
    from lm.start import start_run

    start_run()  # before torch is imported, which takes seconds

import torch
from determined import core
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lm import sampling, seeds
from lm.any_model import AnyModel, new_model
from lm.checkpoint.checkpointer import Checkpointer, State
from lm.checkpoint.cluster import open_store
from lm.checkpoint.manifest import TrainingProgress
from lm.checkpoint.store import CheckpointStore
from lm.command_line import parse_arguments
from lm.config.hyperparameters import Hyperparameters, distinguishing
from lm.config.reading import read_hyperparameters
from lm.data.loader import Batch, Loader
from lm.data.validation import ValidationSums
from lm.determined import master
from lm.determined.context import TorchDistributedContext
from lm.determined.experiment import check_fork, check_processes, unread_keys
from lm.determined.search import SearchStop
from lm.errors import ConfigError, RunError
from lm.initial_weights import model_defaults
from lm.launch.console import announce, print_error, record_error, warn
from lm.launch.launch import Launch, exit_code_of_stop
from lm.launch.process import run_and_exit
from lm.memory import count_micro_steps
from lm.metrics.accumulator import MetricsAccumulator
from lm.metrics.logger import MetricLogger
from lm.objectives.dpo import DPO
from lm.objectives.objective import Losses, NextToken, Objective
from lm.preflight import Job, ResolvedRun, preflight
from lm.report import write_report
from lm.resume import load_checkpoint
from lm.runtime.failures import explaining_out_of_memory
from lm.runtime.rendezvous import join_world
from lm.runtime.run_dir import RunDir
from lm.runtime.stop_signals import StopSignals
from lm.runtime.watchdog import Watchdog
from lm.runtime.world import Vote, World
from lm.training import lora, optim, parallelize, precision, profiling, skipping
from lm.training.balance import ExpertBalance
from lm.training.transfer import Transfer
from lm.units import format_bytes

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, join the other ranks, and train with them. Return the exit code."""
    try:
        args = parse_arguments(arguments)
        launch = Launch.from_env(os.environ)
        job = read_job(args, launch)
        world = join_world(launch, job.hp.run.collective_timeout, job.hp.parallel.cpu_offload)
    except RunError as error:
        print_error(error)
        return error.exit_code
    return train_together(job, world)


def read_job(args: Namespace, launch: Launch) -> Job:
    """Read the hyperparameters: the trial's on a cluster, else the file's and the arguments'."""
    trial = master.trial_info()
    run_dir: RunDir | None = None
    lines: Mapping[str, int] = {}
    if trial is not None:
        check_processes(trial, launch.world_size)
        name = "trial"
        experiment = master.experiment_config(trial)
    else:
        from lm import strict_yaml  # benchmarks.gpu runs without PyYAML

        name = str(args.config)
        experiment, lines = strict_yaml.load_experiment(args.config)
    for line in unread_keys(experiment):
        warn(line)
    hp = read_hyperparameters(experiment, args.overrides, name, lines, model_defaults)
    if trial is None:
        run_dir = RunDir(hp.run.run_name or args.config.stem, hp.checkpoint.checkpoint_storage)
    return Job(hp, trial, run_dir, args.dry_run, experiment.get("searcher"))


def train_together(job: Job, world: World) -> int:
    """Open the Core API context and the run's checkpoints, and run. Return the exit code.

    ConfigError     exit code 2: something that the user has set is wrong
    other RunError  exit code 1; errors of PyTorch, e.g. a lost rank or no memory, become one that
                    says what to do: by `world`, `watchdog` and `explaining_out_of_memory`
    anything else   a bug: ends the process with a traceback

    If a rank fails, the others end with its error as soon as they wait for it. If a rank hangs,
    each that waits for it longer than `collective_timeout` prints an error that names it, and ends;
    the one that hangs prints the stacks of its threads. An error is rank-local, and printed by its
    rank, until all ranks know it; then rank 0 prints it. An error saves nothing: the next start
    resumes from the newest complete checkpoint.
    """
    watchdog = Watchdog(
        world.rendezvous_store, world.rank, world.size, job.hp.run.collective_timeout
    )
    checkpoint_storage = None
    if job.run_dir is not None:
        checkpoint_storage = str(job.run_dir.checkpoints.absolute())
    store: CheckpointStore | None = None
    try:
        with (
            world,
            master.retrying(),
            core.init(
                distributed=TorchDistributedContext(world.launch, world.saver, world.node),
                checkpoint_storage=checkpoint_storage,
                preempt_mode=core.PreemptMode.ChiefOnly,
            ) as core_context,
            watchdog,
        ):
            store = open_store(core_context.checkpoint, job.trial, job.run_dir, world)
            code = execute(job, world, core_context, store, watchdog)
            store.close(world)
            return code
    except RunError as error:
        # Collectives have ended; the key-value store by which the ranks met still answers.
        record_error(error)
        if error.rank_local or world.rank == 0:
            print(error, file=sys.stderr)
            watchdog.publish_error(error)  # for ranks that lose the connection to this one
        if store is not None:
            store.close_after_error()  # after the error has been printed, as this can take long
        if job.run_dir is not None:
            job.run_dir.remove_unused()
        if not error.rank_local:
            world.wait_for_rank0()
        return error.exit_code


def execute(
    job: Job, world: World, core_context: core.Context, store: CheckpointStore, watchdog: Watchdog
) -> int:
    """Run from the first check to the last message. Return the exit code."""
    with world.all_or_none():
        # hp.precision.amp_dtype, where "auto" is the best dtype of the device
        amp_dtype = precision.compute_dtype(job.hp.precision, world.device)
    if job.trial is not None:
        world.run_in_thread_on_rank0(check_fork, core_context.train, job.trial, job.hp.to_flat())
    run = preflight(job, amp_dtype, world, store)
    if run.announce_if_complete(store, world):  # with how to extend it; it refuses another run
        return 0
    if job.dry_run:
        world.on_rank0(run.memory.print_plan)
        return 0
    directory = None if run.run_dir is None else run.run_dir.path
    with (
        explaining_out_of_memory(world.rank, run.memory.describe()),
        MetricLogger(world.rank, directory, core_context.train, run.max_steps, run.trial) as logger,
    ):
        trainer = Trainer(run, world, core_context, store, watchdog, logger)
        trainer.open_session(trainer.load_state())
        trainer.prepare_objective()
        trainer.train()
        logger.set_status("stopped" if trainer.stopping else "completed")
    return trainer.finish()


def build_model(hp: Hyperparameters, mesh: DeviceMesh, amp_dtype: torch.dtype | None) -> AnyModel:
    """Build the model on the meta device, shard it with FSDP2, and allocate this rank's shards.

    Args:
        mesh: of the dimensions "replicate", if there are several replicas, and "shard".
        amp_dtype: of the parameters that are gathered, of forward and of backward; None = float32.
            The shards, which the optimizer updates, are float32; the frozen base of adapters has
            shards of this dtype, too.
    """
    if hp.parallel.deterministic:
        parallelize.use_deterministic_kernels()
    with torch.device("meta"):
        model = new_model(hp.model, dropout=not hp.objective.of_pairs)
        model = lora.add_adapters(model, hp.lora, amp_dtype)
    # In this order: what is compiled contains the float8 products and what is recomputed, and what
    # is offloaded is what compiled blocks save. Each replaces the `forward` of modules, not the
    # modules, so parameters keep their names. FSDP gathers the weights of a block before all of it.
    parallelize.apply_float8(model, hp.precision.float8, hp.parallel, mesh)
    parallelize.apply_activation_checkpointing(model, hp.parallel.activation_checkpointing)
    parallelize.apply_compile(model, hp.parallel, hp.precision.float8, mesh)
    parallelize.apply_activation_offload(model, hp.parallel, mesh)
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=amp_dtype,
        # The dtype in which a rank adds the gradients of its micro-batches, and all ranks theirs:
        # by default float32. Reduced gradients (sync_each_micro_step) are added in float32.
        reduce_dtype=getattr(torch, hp.parallel.reduce_dtype),
        # Embeddings already have the dtype of forward, and rotary angles have to stay float32.
        cast_forward_inputs=False,
    )
    full_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    # The model comes first, then what is inside of it: FSDP does not look into modules that are
    # units already, and some parameters of a block belong to a unit around all blocks.
    for unit in parallelize.divide_into_units(model, amp_dtype, hp.parallel.layer_wrap):
        fully_shard(
            unit.module,
            mesh=mesh,
            # True with full-shard and hybrid-full-shard, which gather again for backward.
            reshard_after_forward=hp.parallel.reshard_after_forward,
            mp_policy=full_precision if unit.in_float32 else mixed_precision,
            offload_policy=parallelize.offload_policy(hp.parallel, mesh),
            ignored_params=set(unit.module.parameters()) - unit.parameters,
        )
    parallelize.skip_needless_gathers(model)
    parallelize.reduce_in_place_on_one_rank(model, hp.parallel, mesh)
    model.to_empty(device="cpu" if hp.parallel.cpu_offload else mesh.device_type)
    return model


class Trainer:
    """The parts of one run, and what is done with them, on all ranks together."""

    def __init__(
        self,
        run: ResolvedRun,
        world: World,
        core_context: core.Context,
        store: CheckpointStore,
        watchdog: Watchdog,
        logger: MetricLogger,
    ) -> None:
        announce("building the model")
        hp = run.hp
        self.run = run
        self.hp = hp
        self.world = world
        self.core_context = core_context
        self.store = store
        self.watchdog = watchdog
        self.logger = logger
        self.step = 0
        """completed steps"""
        self.data_start = 0
        """completed steps before a branch, which reads other data from their first sample"""
        self.stopping = False
        """whether the ranks have agreed to stop: in the preparation, a step or an evaluation"""
        self.at_stop_step = False
        """whether they stop as `stop_at_step` says, and nobody has asked for it"""
        self.validation_loss: float | None = None
        """at this step, in nats per token; None = not validated"""
        self.sampled = False
        """whether the sample of this step was logged"""

        transfer = Transfer.of(hp.transfer, hp.model, hp.optim.optimizer)
        self.model = build_model(hp, world.device_mesh(run.mesh), run.amp_dtype)
        parallelize.initialize_parameters(self.model, run.seed, transfer)
        for line in [*world.on_rank0(run.notes), run.summary(world)]:
            logger.info(line)
        self.optimizer = optim.Optimizer(hp.optim, self.model, transfer, run.amp_dtype)
        self.balance = ExpertBalance(self.model, world)
        self.scaler = precision.LossScaler(run.amp_dtype, world.device)
        self.spikes = skipping.SpikeFilter(hp.skipping, world.device)
        # The ranks that compute the same sequences, each a part of their tokens.
        context_group = world.context_group(hp.parallel.context_parallel)
        # Global batch k holds the same samples on any number of ranks, each of which reads its
        # slice. Only streams (`dataset: hf`) are divided otherwise on another number of ranks:
        # each data worker resumes after its share of the documents that were read.
        self.loader = Loader(
            hp.data,
            run.data,
            run.global_batch_size,
            dp_rank=world.rank // context_group.size,
            dp_size=world.size // context_group.size,
            device=world.device,
            context_group=context_group,
        )
        self.objective: Objective = NextToken()
        if hp.objective.of_pairs:
            self.objective = DPO(hp.objective, run.data.n_replies, world.device)
        self.checkpointer = Checkpointer(hp.checkpoint, store, world, run.tokenizer_files)
        if run.trains:
            host_bytes = self.checkpointer.allocate(self.state())
            if host_bytes > 0:
                size = format_bytes(host_bytes)
                logger.info(f"asynchronous checkpoints: {size} of host memory per node")
        ideal_seconds_per_token = run.ideal_seconds_per_token(world.device)  # for the MFU
        self.accumulator = MetricsAccumulator(
            world.device, world, ideal_seconds_per_token, self.objective.statistics
        )
        self.stop_signals = StopSignals(world.rank)  # SIGTERM, SIGINT, SIGUSR2, SIGHUP
        self.search_stop = SearchStop(
            run.searcher, core_context.train, world.rank, hp.run.collective_timeout
        )

    def state(self) -> State:
        """Return the live tensors that a checkpoint holds: DTensors, of which a rank has shards."""
        return {
            "model": lora.trained_parameters(self.model),
            "optim": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "spikes": self.spikes.state_dict(),
            "reference": self.objective.state_dict(),
        }

    def load_state(self) -> TrainingProgress:
        """Load what the session continues from: a checkpoint, pretrained weights, both, or neither.

        A run that a launcher restarts takes its newest checkpoint, if it has one. Else, `resume` is

        auto           the newest of this run, or none if it has none
        fresh          none: the run starts at step 0
        a path or URL  that one, also of another run: weights, optimizer, step, place in the data

        `preflight` has listed the candidates, newest first. One whose files do not match their
        checksums is skipped, and the next one is loaded; if all are damaged, the run is refused.
        What an earlier run has left in the run directory is moved aside after all is loaded. A
        checkpoint of which only a part was saved is deleted by the next save.
        """
        run = self.run
        log = self.logger.info
        with run.recording_start(self.store, self.world):
            self.load_pretrained()
            progress = load_checkpoint(
                run.resume_plan, self.checkpointer, self.state(), run.manifest_info, log
            )
            self.loader.load_state(progress.dataset_state, log)
        return progress

    def load_pretrained(self) -> None:
        """Load the weights of the Hugging Face model that `init_from` names, if it names one.

        A checkpoint replaces them, so they are loaded only where there is none, or where they are
        the frozen base of adapters, which checkpoints do not hold. No rank holds the whole model,
        except rank 0 for a class of the library transformers while it sends the weights.
        """
        initial_weights = self.run.initial_weights
        is_base = initial_weights.base is not None
        if self.run.resume_plan.resume_candidates and not is_base:
            return
        initial_weights.load_model(
            self.model,
            self.world,
            self.logger.info,
            to_be_exported=self.run.trains and not is_base,  # adapters are exported alone, too
        )

    def open_session(self, progress: TrainingProgress) -> None:
        """Continue from `progress`: record the session, open the logs, and let signals stop it."""
        run = self.run
        values = run.manifest_info.hyperparameters
        self.step = progress.step
        self.data_start = progress.data_start
        missing: list[str] = []  # of a run that only evaluates, all that was logged stays
        if run.trains:
            self.validation_loss = progress.validation_loss
            self.sampled = progress.sampled
            missing = progress.missing_reports()
        if run.run_dir is not None:
            session = run.session(self.world, self.step)
            self.world.on_rank0(run.run_dir.add_session, values, session)
        self.stop_signals.install()  # before this, there is nothing to save
        self.logger.open(self.step, missing, values, distinguishing(values))
        self.accumulator.reset(progress.metric_sums)  # last, as it starts the clock

    def prepare_objective(self) -> None:
        """Compute what the objective needs of the initial weights: for DPO, its reference.

        Only before step 1, as checkpoints of later steps hold it. This takes a pass over the data.
        Every `checkpoint_rate` global batches, and if the run is asked to stop, what is there is
        saved, and the next start resumes from it.
        """
        is_missing = self.objective.begin_session(self.step, has_updated=self.optimizer.has_updated)
        if not is_missing:
            return
        micro_steps = count_micro_steps(self.hp, self.world.size)
        batches_per_save = self.hp.checkpoint.checkpoint_rate * micro_steps
        self.model.train()  # for the kernels of a step
        with self.logger.status("preparing the objective"):
            batches = self.objective.prepare(self.model, self.loader, self.world, self.logger.info)
            n_batches = 0
            for n_batches in self.stoppable(batches):
                if n_batches % batches_per_save == 0:
                    self.save_prepared()
            if self.stopping and n_batches % batches_per_save > 0:  # else it has just been saved
                self.save_prepared()
        self.accumulator.reset()  # its time is not that of a step

    def save_prepared(self) -> None:
        """Save what the objective has prepared so far, with the initial weights."""
        self.objective.exchange(self.world)
        self.accumulator.reset()  # its time is not that of a step
        self.save(wait=True)

    def train(self) -> None:
        """Train to the last step, or until asked to stop, under the profilers that are on."""
        switches = self.hp.profiling
        traces = self.core_context.train.get_tensorboard_path()
        if self.run.run_dir is not None:
            traces = self.run.run_dir.traces
        log = self.logger.info
        with ExitStack() as profilers:
            profiler_step = None
            if switches.core_api_profiler:
                profilers.enter_context(
                    profiling.run_core_api_profiler(self.core_context.profiler, log)
                )
            if switches.memory_snapshot:
                snapshot = traces / f"rank{self.world.rank}.memory.pickle"
                profilers.enter_context(profiling.record_memory(snapshot))
            if switches.torch_profiler:
                torch_profiler = profiling.torch_profiler(
                    # to wait, to warm up and to trace: once, from the resumed step on
                    switches.torch_profiler_steps,
                    traces,
                    self.world.rank,
                    steps_left=self.run.max_steps - self.step,  # too few: a warning
                    log=log,
                )
                profiler_step = profilers.enter_context(torch_profiler).step
            self.train_steps(profiler_step)

    def train_steps(self, profiler_step: Callable[[], None] | None) -> None:
        """The training loop. `profiler_step` tells PyTorch's profiler that a step has ended."""
        batches = self.loader.training(self.step - self.data_start)
        # Automatic collection is off since the start, as it would stop the ranks at different
        # times. `log_training` collects; what exists now is excluded, as it stays to the end.
        gc.freeze()
        self.evaluate_at_start()
        self.stop_where_configured()
        self.model.train()
        while self.step < self.run.max_steps and not self.stopping:
            self.watchdog.on_step_start(self.step)
            with self.accumulator.waiting_for_data():
                batch = next(batches)
            if self.hp.skipping.lists_step(self.step + 1):  # in skip_steps: no update
                vote = self.start_vote()
                self.accumulator.add_listed_step()
            else:
                losses = self.forward_backward(batch)
                vote = self.start_vote()  # the update hides its time; a later signal: next step
                self.update_weights(batch, losses)
            if profiler_step is not None:
                profiler_step()
            self.step += 1
            self.validation_loss = None
            self.sampled = False
            self.logger.on_step_end()
            self.stopping, is_writing = vote.wait()  # so that all ranks stop after this step
            if self.checkpointer.is_pending and not is_writing:
                self.commit()
            if self.is_due_or_last(self.hp.metrics.report_rate):
                self.log_training()
            self.evaluate()
            self.stop_where_configured()
            if self.is_save_due():
                ends_here = self.stopping or self.step == self.run.max_steps
                self.save(wait=ends_here or not self.hp.checkpoint.async_checkpoint)

    def forward_backward(self, batch: Batch) -> Losses:
        """Accumulate the gradients of all micro-batches. Return the sums of this rank's terms."""
        torch.manual_seed(seeds.derive_seed(self.run.seed, "dropout", self.step, self.world.rank))
        # FSDP averages gradients over the ranks. With this factor, the result is the gradient of
        # the mean over all terms of the global batch: targets that are not ignored, or pairs of
        # replies.
        sums_to_mean = self.world.size / batch.n_global_terms
        loss_sum = torch.zeros((), device=self.world.device)
        n_statistics = len(self.objective.statistics)
        statistics = torch.zeros(n_statistics, dtype=torch.float64, device=self.world.device)
        self.balance.start_step()
        for micro_batch in batch.micro_batches:
            is_last = micro_batch is batch.micro_batches[-1]
            # FSDP reduces gradients after the last one, or after each with sync_each_micro_step.
            parallelize.start_micro_step(self.model, self.hp.parallel, is_last)
            losses = self.objective.losses(self.model, micro_batch)
            # With the balance loss of a mixture of experts, which the reported loss is without.
            (losses.minimized_sum * (self.scaler.scale * sums_to_mean)).backward()
            loss_sum += losses.loss_sum.detach()
            statistics += losses.statistics
            self.balance.add(losses.routed)
        return Losses(loss_sum, statistics)

    def update_weights(self, batch: Batch, losses: Losses) -> None:
        """Clip the gradients, take the optimizer step, and count it, all on the device.

        If a gradient of any rank is inf or NaN, or the loss or the norm a spike (`skip_spikes`),
        weights and moments stay, and in float16 an inf or NaN halves the scale of the loss. The
        step still counts for `max_steps` and the learning rate, but not in the reported loss and
        norm. `log_training` ends the run if `skip_nonfinite` consecutive steps were skipped.
        """
        # DPO: before the first update, the model is its own reference, so all rewards are 0.
        self.objective.check_before_update(
            losses, batch.n_global_terms, self.world, self.run.amp_dtype, self.logger.info
        )
        lr = optim.learning_rate(self.hp.optim, self.step, self.run.max_steps)
        # The norm of the gradients of all ranks' parameters, without the scale of the loss.
        grad_norm, nonfinite = self.optimizer.measure_gradients(self.scaler.scale)
        # Divided by this in `step`, gradients lose that scale, and their norm is at most grad_clip.
        divisor = self.optimizer.clipping_divisor(grad_norm, self.scaler.scale)
        skipped = self.spikes.find_skipped(
            self.world, losses.loss_sum, batch.n_global_terms, grad_norm, nonfinite
        )
        self.checkpointer.wait_for_copy()  # as the optimizer changes what it copies
        self.optimizer.step(lr, divisor, skipped)
        self.balance.end_step(skipped)
        self.optimizer.zero_grad()
        self.scaler.update(nonfinite)
        self.accumulator.add(
            losses.loss_sum,
            batch.n_global_terms,
            self.run.tokens_per_step,
            grad_norm,
            skipped,
            losses.statistics,
        )

    def start_vote(self) -> Vote:
        """Start to find out whether any rank was asked to stop, and whether any is writing."""
        return self.world.start_any(self.asked_to_stop(), self.checkpointer.is_writing)

    def asked_to_stop(self) -> bool:
        """Return whether this rank was asked to stop: by a signal, the search, or Determined."""
        if self.stop_signals.received or self.search_stop.reason is not None:
            return True
        return master.should_preempt(self.core_context, self.run.trial)

    def stop_where_configured(self) -> None:
        """Set `stopping` if `stop_at_step` is reached."""
        stop = self.hp.run.stop_at_step
        if stop is not None and stop <= self.step < self.run.max_steps and not self.stopping:
            self.stopping = True
            self.at_stop_step = True

    def stop_if_asked(self) -> None:
        """Set `stopping` if any rank was asked to stop, on all ranks together."""
        self.stopping = self.world.any_rank(self.asked_to_stop())

    def stoppable(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, as many on every rank, and after each of them `stop_if_asked`."""
        for item in items:
            yield item
            self.stop_if_asked()
            if self.stopping:
                return

    def is_due_or_last(self, rate: int | None) -> bool:
        """Return whether this step is a multiple of `rate` or the last one. None = never."""
        if rate is None:
            return False
        if self.step >= self.run.max_steps:
            return True
        return self.step > 0 and self.step % rate == 0

    def is_save_due(self) -> bool:
        """Return whether this step is to be saved: by `checkpoint_rate`, or as the run ends."""
        return self.stopping or self.is_due_or_last(self.hp.checkpoint.checkpoint_rate)

    def evaluate_at_start(self) -> None:
        """Evaluate, before the first step of the session, what is due and was not done before.

        That is the case after a stop in an evaluation, with rates that have changed, and in a run
        that only evaluates (`max_steps: 0`). If a checkpoint of this step is due, too, or the run
        is stopping, it is saved again, with the results: later starts do not evaluate again.
        """
        before = self.validation_loss, self.sampled
        self.evaluate()
        has_evaluated = (self.validation_loss, self.sampled) != before
        if has_evaluated and self.is_save_due():
            self.save(wait=True)

    def log_training(self) -> None:
        """Log the metrics since the last time; refuse too many consecutive skipped steps."""
        gc.collect()
        metrics, most_consecutive_skipped = self.accumulator.report()
        metrics |= self.balance.metrics()
        lr = optim.learning_rate(self.hp.optim, self.step - 1, self.run.max_steps)
        self.log_metrics("training", metrics | {"lr": lr})
        skipping.check_skipped(self.hp.skipping, self.step, most_consecutive_skipped)

    def log_metrics(self, group: str, metrics: Mapping[str, float]) -> None:
        """Log metrics of this step, and report them to Determined: the Web UI and the search."""
        self.logger.log(group, self.step, metrics)
        if self.world.rank == 0:
            self.core_context.train.report_metrics(group, self.step, dict(metrics))

    def evaluate(self) -> None:
        """Validate and sample where that is due and not yet done, unless the run is stopping."""
        is_validated = self.validation_loss is not None
        if self.is_due_or_last(self.run.validation_rate) and not (is_validated or self.stopping):
            self.validate()
        if self.is_due_or_last(self.run.sample_rate) and not (self.sampled or self.stopping):
            self.sample()

    def validate(self) -> None:
        """Log the mean validation loss and what goes with it, and the scores of tasks.

        Refuses inf and NaN.
        """
        sums = ValidationSums(
            self.run.data.validation,
            self.loader.validation_bytes,
            self.world,
            self.objective.statistics,
        )
        with self.accumulator.paused(), self.logger.status("validating"), torch.no_grad():
            self.model.eval()
            for number, micro_batch in self.stoppable(self.loader.validation()):
                losses = self.objective.losses(self.model, micro_batch)
                sums.add(number, losses.loss_sum, micro_batch.n_terms, losses.statistics)
            if self.stopping:
                return
            metrics = sums.metrics()
        loss = metrics["loss"]
        if not math.isfinite(loss):
            problem = f"validation loss is {loss} at step {self.step}"
            raise ConfigError(f"{problem}: lower lr or set grad_clip")
        metrics["batches"] = self.step  # of training: the time metric of a search
        if self.is_due_or_last(self.run.eval_rate):
            metrics |= self.score_tasks()
            if self.stopping:
                return
        self.model.train()
        self.log_metrics("validation", metrics)
        self.validation_loss = loss
        with self.accumulator.paused():
            if self.search_stop.decides_after(self.step):  # waits until the search has decided
                self.stop_if_asked()

    def score_tasks(self) -> dict[str, float]:
        """Return the accuracy and the bits per byte of each task; less if asked to stop."""
        from lm.tasks.scoring import Scorer, grade  # which runs without tasks do not import

        metrics: dict[str, float] = {}
        with self.accumulator.paused(), self.logger.status("scoring tasks"):
            for task in self.run.tasks:
                scorer = Scorer(task, self.model, self.world)
                for _ in self.stoppable(scorer.score()):  # in eval mode, without gradients
                    pass
                if self.stopping:
                    break
                metrics |= grade(task, scorer.gather()).metrics()
        return metrics

    def sample(self) -> None:
        """Log a continuation of the prompt."""
        tokenizer = self.run.data.tokenizer
        assert tokenizer is not None
        with self.accumulator.paused(), self.logger.status("sampling"):
            # The ranks gather shards together, so all sample as many tokens. What follows the end
            # of the text is cut below.
            continuation = sampling.generate(  # in eval mode, without gradients
                self.model,
                self.run.prompt,
                self.hp.run.num_tokens,
                device=self.world.device,
                seed=self.run.seed,
                settings=sampling.SAMPLES,
            )
            tokens = list(self.stoppable(continuation))
            if self.stopping:
                return
            self.model.train()
        tokens = sampling.before_stop(tokens, self.run.stop_ids)
        text = tokenizer.decode(tokens, after=self.run.prompt)
        self.logger.log_sample(self.step, tokenizer.decode(self.run.prompt), text)
        self.sampled = True

    def save(self, wait: bool) -> None:
        """Commit the pending checkpoint, if any, and start to save; `wait` commits this one, too.

        Every rank copies its shards and starts a thread, which writes them to a file; the store
        saves the files through Core API's checkpoint context. When all are complete, rank 0 deletes
        old checkpoints in its thread, except the newest `keep_checkpoints` and the best by
        validation loss. The checkpoint is pending until `commit`, by which all ranks know that it
        is complete.
        """
        if not self.run.trains:  # nothing to resume
            return
        metric_sums = self.accumulator.state_dict()  # without the time of this save
        with self.accumulator.saving(), self.logger.status("saving"):
            if self.checkpointer.is_pending:
                self.commit()
            progress = TrainingProgress(
                step=self.step,
                tokens=self.step * self.run.tokens_per_step,
                validation_loss=self.validation_loss,
                sampled=self.sampled,
                data_start=self.data_start,
                dataset_state=self.loader.gather_state(self.world),
                metric_sums=self.world.all_gather_object(metric_sums),
            )
            self.checkpointer.save(self.state(), self.run.manifest_info, progress)
            if wait:
                self.commit()

    def commit(self) -> None:
        """Wait until the pending checkpoint is complete on all ranks, and log it."""
        step, uuid = self.checkpointer.commit()
        self.logger.log_checkpoint(step, uuid)

    def finish(self) -> int:
        """Log why the run has stopped, if it has, and write the report. Return the exit code."""
        code = 0
        if self.stopping:
            if self.at_stop_step:
                stop = self.hp.run.stop_at_step
                reason = f"as stop_at_step is {stop}; rerun without it to resume"
            elif self.search_stop.reason is not None:
                reason = self.search_stop.reason
            else:  # a signal or Determined has asked for it
                reason = self.run.how_to_resume(self.step)
                code = self.acknowledge_request()
            self.logger.info(f"stopped after step {self.step}/{self.run.max_steps} {reason}")
        if self.run.run_dir is not None:  # off the cluster
            # The others wait: when a rank has ended, Slurm may kill rank 0 meanwhile.
            report = self.world.on_rank0(write_report, self.run.run_dir.path)
            # `execute` has closed the logger's files, so the report is complete; it still prints.
            self.logger.info(f"curves and traces: make board; report: {report}")
        return code

    def acknowledge_request(self) -> int:
        """Tell Determined that the trial stops as it was asked to. Return the exit code.

        Without this call, Determined takes exit code 0 for the end of the trial; with it, the trial
        resumes later.
        """
        if self.world.rank == 0:
            self.core_context.preempt.acknowledge_preemption_signal()  # does nothing elsewhere
        if self.run.trial is None:
            return exit_code_of_stop(os.environ)  # 0, or 75 with RESTART_WHEN_STOPPED
        return 0


if __name__ == "__main__":
    run_and_exit(main)
