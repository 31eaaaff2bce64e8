"""Train a language model with PyTorch FSDP through Determined's Core API.

    python fsdp.py --config FILE [key=value ...] [--dry-run]

The same file runs alone, under any launcher, and as a Determined trial. `execute` is the order of a
run: `preflight`, `build`, `resume`, `train`, `finish`. The loop in `train` shows every part of a
    step; what the parts do is in lm/.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lm.launch.console import announce, record_error
from lm.launch.launch import Launch, exit_code_of_stop
from lm.launch.spawn import run_and_exit
from lm.launch.startup import setup_environment

setup_environment()  # before torch is imported

import determined as det  # noqa: E402
import torch  # noqa: E402
from determined import core  # noqa: E402

from lm import config, sampling, seeds  # noqa: E402
from lm.checkpoint import resume as resuming  # noqa: E402
from lm.checkpoint.checkpointer import Checkpointer, State  # noqa: E402
from lm.checkpoint.manifest import Evaluation, TrainingProgress  # noqa: E402
from lm.checkpoint.object_storage import BucketCheckpoints  # noqa: E402
from lm.checkpoint.store import CheckpointStore, ClusterCheckpoints, LocalCheckpoints  # noqa: E402
from lm.data.loader import Loader  # noqa: E402
from lm.determined import master  # noqa: E402
from lm.determined.context import TorchDistributedContext  # noqa: E402
from lm.determined.search import SearchStop, retry_warning  # noqa: E402
from lm.errors import ConfigError, RunError, error_prefix  # noqa: E402
from lm.hf import weights  # noqa: E402
from lm.metrics.accumulator import MetricsAccumulator  # noqa: E402
from lm.metrics.device import peak_flops  # noqa: E402
from lm.metrics.logger import MetricLogger  # noqa: E402
from lm.preflight import Setup, preflight  # noqa: E402
from lm.report import write_report  # noqa: E402
from lm.runtime.preemption import PreemptionHandler  # noqa: E402
from lm.runtime.rendezvous import join_world  # noqa: E402
from lm.runtime.run_dir import RunDir  # noqa: E402
from lm.runtime.watchdog import Watchdog  # noqa: E402
from lm.runtime.world import World  # noqa: E402
from lm.training import lora, optim, parallelize, precision  # noqa: E402
from lm.training.profiling import profiling  # noqa: E402
from model import IGNORE_INDEX, Transformer  # noqa: E402


@dataclass(frozen=True)
class Run:
    """What a run is started with."""

    hp: config.Hyperparameters
    world: World
    context: core.Context
    store: CheckpointStore
    info: det.ClusterInfo | None = None  # on a cluster
    run_dir: RunDir | None = None  # off the cluster
    on_step_start: Callable[[int], None] = lambda _: None


@dataclass(frozen=True)
class Training:
    """The parts of the training loop."""

    run: Run
    setup: Setup
    model: Transformer
    optimizer: optim.Optimizer
    scaler: precision.LossScaler
    loader: Loader
    checkpointer: Checkpointer
    accumulator: MetricsAccumulator
    logger: MetricLogger
    preemption: PreemptionHandler
    search_stop: SearchStop

    def state(self) -> State:
        """Return the live state that a checkpoint holds."""
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        return {"model": lora.trained(self.model), "optim": optimizer, "scaler": scaler}

    def is_due(self, step: int, rate: int | None) -> bool:
        return rate is not None and (
            step >= self.setup.max_steps or (step > 0 and step % rate == 0)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, join the other ranks, open the Core API context and run. Return the exit code."""
    args = config.parse(arguments)
    launch = Launch()
    info = None
    watchdog = None
    store = None
    try:
        launch, info = Launch.from_env(os.environ), master.trial_info()
        experiment = None
        if info:
            experiment = master.experiment_config(info)
            warning = retry_warning(experiment)
            if warning:
                announce(warning)
        hp = config.load(args.config, args.overrides, weights.model_defaults, experiment)
        run_dir = None if info else RunDir(hp.run_name or args.config.stem, hp.checkpoint_storage)
        with (
            join_world(launch, hp.collective_timeout, hp.cpu_offload) as world,
            master.retrying(),
            core.init(
                distributed=TorchDistributedContext(launch, world.control, world.saver, world.node),
                checkpoint_storage=str(run_dir.checkpoints.absolute()) if run_dir else None,
                preempt_mode=core.PreemptMode.ChiefOnly,
            ) as context,
            Watchdog(world.store, launch.rank, world.size, hp.collective_timeout) as watchdog,
        ):
            store = open_store(world, context, info, run_dir)
            code = execute(
                Run(hp, world, context, store, info, run_dir, watchdog.on_step_start), args.dry_run
            )
            store.close(world)
            return code
    except RunError as error:
        record_error(str(error))
        has_joined = watchdog is not None
        rank = (
            launch.rank if has_joined else launch.local_rank
        )  # before, each machine prints its own errors
        if error.rank_local or rank == 0:
            print(error, file=sys.stderr)
            if watchdog is not None:
                watchdog.publish_error(error)
        if store is not None:  # after the error has been printed, as this can take long
            store.close_after_error()
        return error.exit_code


def open_store(
    world: World, context: core.Context, info: det.ClusterInfo | None, run_dir: RunDir | None
) -> CheckpointStore:
    """Return where the run's checkpoints are: in the cluster's storage, in a bucket, or on a disk."""
    if info is not None:
        in_place = master.storage_is_file_system(info)
        return ClusterCheckpoints(
            context.checkpoint, info.latest_checkpoint, writes_in_place=in_place
        )
    assert run_dir is not None
    if run_dir.url is None:
        return LocalCheckpoints(run_dir.checkpoints, context.checkpoint)
    url = run_dir.url
    with error_prefix("checkpoint_storage"):
        return world.all_or_none(lambda: BucketCheckpoints(url, run_dir.path))


def execute(run: Run, dry_run: bool = False) -> int:
    """Run from the first check to the last message. Return the exit code."""
    setup, plan = preflight(run.hp, run.world, run.info, run.run_dir, run.store, dry_run)
    samples = setup.sample_rate is not None
    is_complete = resuming.is_complete(
        plan, run.store, setup.run_info, setup.max_steps, samples, run.world
    )
    if is_complete or dry_run:
        return 0
    directory, train_context = run.run_dir and run.run_dir.path, run.context.train
    with MetricLogger(
        run.world.rank, directory, train_context, setup.max_steps, run.info
    ) as logger:
        t = build(run, setup, logger)
        start = resume(t, plan)
        traces = run.run_dir.traces if run.run_dir else train_context.get_tensorboard_path()
        left = setup.max_steps - start.step
        with profiling(
            run.hp, run.context.profiler, traces, run.world.rank, left, logger.info
        ) as profiler_step:
            step, stopped = train(t, start, profiler_step)
        logger.set_status("stopped" if stopped else "completed")
    return finish(t, step, stopped)


def build(run: Run, setup: Setup, logger: MetricLogger) -> Training:
    """Build the sharded model, then the parts that work on it."""
    hp, world, device, context = run.hp, run.world, run.world.device, run.context
    announce("building the model")
    with torch.device("meta"):
        model = lora.add_adapters(Transformer(hp), hp, setup.dtype)
    model = parallelize.parallelize(
        model, hp, world.device_mesh(setup.mesh), setup.dtype, setup.seed, hp.float8
    )
    logger.info("\n".join([*setup.notes(hp), setup.summary(hp, world)]))
    optimizer = optim.Optimizer(hp, model.named_parameters())
    scaler = precision.LossScaler(setup.dtype, device)
    loader = Loader(hp, setup.data, setup.global_batch_size, world.rank, world.size, device)
    files = setup.data.tokenizer.files if setup.data.tokenizer else {}
    checkpointer = Checkpointer(hp, run.store, world, files)
    accumulator = MetricsAccumulator(
        device, world, lora.flops_per_token(hp, hp), peak_flops(device, setup.dtype)
    )
    search_stop = SearchStop(
        setup.searcher,
        context.train,
        world.rank,
        setup.max_steps,
        setup.validation_rate,
        hp.collective_timeout,
    )
    preemption = PreemptionHandler(
        world, lambda: search_stop.reason is not None or master.should_preempt(context, run.info)
    )
    return Training(
        run,
        setup,
        model,
        optimizer,
        scaler,
        loader,
        checkpointer,
        accumulator,
        logger,
        preemption,
        search_stop,
    )


def resume(t: Training, plan: resuming.ResumePlan) -> TrainingProgress:
    """Load the checkpoint of `plan`, if any, and start the run's files. Return the progress so far."""
    hp, world, run_dir, setup, run_info = (
        t.run.hp,
        t.run.world,
        t.run.run_dir,
        t.setup,
        t.setup.run_info,
    )
    if setup.max_steps:
        host_bytes = t.checkpointer.allocate(t.state())
        if host_bytes:
            t.logger.info(
                f"asynchronous checkpoints: {host_bytes / 2**30:.2f} GiB of host memory per node"
            )
    if hp.init_from is not None and (
        run_info.base or not (plan.resume_candidates or plan.init_candidates)
    ):
        weights.load_into(
            t.model, run_info.base.source if run_info.base else hp.init_from, world, t.logger.info
        )
    progress = resuming.resume(plan, t.checkpointer, t.state(), run_info, t.run.info, t.logger.info)
    if plan.fresh:
        world.run_in_thread(lambda: t.run.store.move_aside() if world.rank == 0 else None)
    if note := t.loader.load_state_dict(progress.dataset_state):
        t.logger.info(note)
    if run_dir:
        world.on_rank0(
            lambda: run_dir.start(run_info.hyperparameters, setup.session(world, progress.step))
        )
    t.logger.start(progress.step, progress.missing_reports(), run_info.hyperparameters)
    t.accumulator.load_state_dict(progress.metric_sums)
    return progress


def train(
    t: Training, start: TrainingProgress, profiler_step: Callable[[], None]
) -> tuple[int, bool]:
    """Train to the last step, or until asked to stop. Return the number of completed steps and whether asked."""
    hp, model, setup, world = t.run.hp, t.model, t.setup, t.run.world
    batches, step = t.loader.training(start.step), start.step
    gc.freeze()  # collection is disabled but at reports, on all ranks at the same time
    t.preemption.install()  # before this, there is nothing to save
    stopping = complete_resumed_step(t, start)
    model.train()
    while step < setup.max_steps and not stopping:
        t.run.on_step_start(step)
        with t.accumulator.waiting_for_data():
            batch = next(batches)
        torch.manual_seed(seeds.derive_seed(setup.seed, "dropout", step, world.rank))
        loss_sum = torch.zeros((), device=world.device)
        for micro_batch in batch.micro_batches:
            parallelize.start_micro_step(model, hp, micro_batch is batch.micro_batches[-1])
            loss = model(*micro_batch)
            # FSDP averages gradients over ranks; scaled like this, that is the mean over all
            # targets.
            (loss * (t.scaler.scale * (world.size / batch.n_target_tokens))).backward()
            loss_sum += loss.detach()
        agreement = t.preemption.start_agreement(t.checkpointer.is_writing)
        grad_norm, skipped = t.optimizer.clip_grad_norm(t.scaler.scale)
        t.checkpointer.protect_copy()
        t.optimizer.step(optim.learning_rate(hp, step, setup.max_steps))
        t.optimizer.zero_grad()
        t.scaler.update(skipped)
        t.accumulator.add(
            loss_sum, batch.n_target_tokens, setup.tokens_per_step, grad_norm, skipped
        )
        profiler_step()
        step += 1
        t.logger.on_step_end()
        stopping, is_writing = t.preemption.decision(agreement)
        if t.checkpointer.is_pending and not is_writing:
            t.logger.log_checkpoint(*t.checkpointer.commit())
        if not stopping and t.is_due(step, hp.report_rate):
            report(t, step)
        evaluation, stopping = (Evaluation(), True) if stopping else evaluate(t, step, Evaluation())
        if stopping or t.is_due(step, hp.checkpoint_rate):
            save(
                t,
                step,
                evaluation,
                wait=stopping or step == setup.max_steps or not hp.async_checkpoint,
            )
    return step, stopping


def complete_resumed_step(t: Training, start: TrainingProgress) -> bool:
    """Make the report and the evaluation of the resumed step that a stop prevented. Return whether asked to stop."""
    step, max_steps = start.step, t.setup.max_steps
    if t.accumulator.n_steps and step <= max_steps and t.is_due(step, t.run.hp.report_rate):
        report(t, step)
    known = Evaluation(start.validation_loss, start.sampled) if max_steps else Evaluation()
    evaluation, stopping = evaluate(t, step, known)
    if (
        max_steps
        and evaluation != known
        and not stopping
        and t.is_due(step, t.run.hp.checkpoint_rate)
    ):
        save(t, step, evaluation, wait=True)
    return stopping


def report(t: Training, step: int) -> None:
    """Log the training metrics since the last report; raise ConfigError after too many consecutive skipped steps."""
    gc.collect()
    metrics, n_skipped = t.accumulator.report()
    t.logger.log(
        "training",
        step,
        metrics | {"lr": optim.learning_rate(t.run.hp, step - 1, t.setup.max_steps)},
    )
    optim.check_skipped(t.run.hp, step, n_skipped)


def evaluate(t: Training, step: int, known: Evaluation) -> tuple[Evaluation, bool]:
    """Validate and sample where due and not yet `known`. Return the results and whether asked to stop."""
    loss, sampled = known
    if loss is None and t.is_due(step, t.setup.validation_rate):
        loss = validate(t, step)
        if loss is None:
            return known, True
        if t.search_stop.decides_after(step) and t.preemption.is_requested():
            return Evaluation(loss), True
    if not sampled and t.is_due(step, t.setup.sample_rate) and not (sampled := sample(t, step)):
        return Evaluation(loss), True
    return Evaluation(loss, sampled), False


def validate(t: Training, step: int) -> float | None:
    """Log and return the mean validation loss (nats per token), or None if asked to stop; refuse inf and NaN."""
    sums = torch.zeros(2, dtype=torch.float64, device=t.run.world.device)
    with t.accumulator.paused(), t.logger.status("validating"), torch.no_grad():
        t.model.eval()
        for batch in t.loader.validation():
            sums += torch.stack([t.model(*batch).double(), (batch.targets != IGNORE_INDEX).sum()])
            if t.preemption.is_requested():
                return None
        t.model.train()
        loss_sum, n_targets = map(
            math.fsum, zip(*t.run.world.all_gather(sums).tolist(), strict=True)
        )
    loss = loss_sum / n_targets
    if not math.isfinite(loss):
        raise ConfigError(f"validation loss is {loss} at step {step}: lower lr or set grad_clip")
    metrics = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "batches": step,
    } | t.loader.bits_per_byte(loss_sum)
    t.logger.log("validation", step, metrics)
    return loss


def sample(t: Training, step: int) -> bool:
    """Log a continuation of the prompt. Return False if asked to stop before its end."""
    tokenizer, prompt, tokens = t.setup.data.tokenizer, t.setup.prompt, list[int]()
    assert tokenizer is not None
    options = {"device": t.run.world.device, "seed": t.setup.seed, "temperature": 0.8, "top_k": 50}
    with t.accumulator.paused(), t.logger.status("sampling"):
        for token in sampling.generate(t.model, prompt, t.run.hp.num_tokens, **options):
            if t.preemption.is_requested():
                return False
            tokens.append(
                token
            )  # past its end, as ranks that disagreed on the end would wait for each other
        t.model.train()
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.stop_ids), None)
    t.logger.log_sample(
        step, tokenizer.decode(prompt), tokenizer.decode(tokens[:end], after=prompt)
    )
    return True


def save(t: Training, step: int, evaluation: Evaluation, wait: bool) -> None:
    """Start to save a checkpoint once the one before it is committed; `wait` commits this one too."""
    state = t.loader.state_dict(), t.accumulator.state_dict()
    with t.accumulator.saving(), t.logger.status("saving"):
        if t.checkpointer.is_pending:
            t.logger.log_checkpoint(*t.checkpointer.commit())
        dataset, sums = map(list, zip(*t.run.world.all_gather_object(state), strict=True))
        progress = {
            "step": step,
            "tokens": step * t.setup.tokens_per_step,
            "metric_sums": sums,
        } | evaluation._asdict()
        progress = TrainingProgress(dataset_state=None if None in dataset else dataset, **progress)
        t.checkpointer.save(t.state(), t.setup.run_info, progress)
        if wait:
            t.logger.log_checkpoint(*t.checkpointer.commit())


def finish(t: Training, step: int, stopped: bool) -> int:
    """Acknowledge a preemption, and write the report. Return the exit code."""
    if stopped:
        if (
            t.run.world.rank == 0 and t.search_stop.reason is None
        ):  # otherwise exit code 0 means: trial complete
            t.run.context.preempt.acknowledge_preemption_signal()
        t.logger.info(f"stopped after step {step}/{t.setup.max_steps} {why_stopped(t, step)}")
    if run_dir := t.run.run_dir:  # no rank ends before rank 0: Slurm would kill it
        report = t.run.world.on_rank0(lambda: write_report(run_dir.path))
        t.logger.info(f"curves and traces: make board; report: {report}")
    return exit_code_of_stop(os.environ) if stopped else 0


def why_stopped(t: Training, step: int) -> str:
    """Return on rank 0 who stopped the run, and what makes it resume."""
    if t.search_stop.reason is not None:
        return f"by the search of this experiment, for good: {t.search_stop.reason}"
    if t.run.info:
        resumes = "when it is activated or has its slots again"
        return f"as requested; the trial resumes from step {step} {resumes}"
    return f"as requested; {t.run.hp.rerun} to resume"


if __name__ == "__main__":
    run_and_exit(main)
