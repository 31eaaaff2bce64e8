"""Train a language model with PyTorch FSDP through Determined's Core API.

    python fsdp.py --config FILE [key=value ...] [--dry-run]

The same file runs alone, under any launcher, and as a Determined trial. `execute` is the order of a run: `preflight`,
`build`, `resume`, `train`, `finish`. The loop in `train` shows every part of a step; what the parts do is in lm/.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from lm.launch.environment import Launch, announce, exit_code_of_stop, setup_environment
from lm.launch.spawn import run_and_exit

setup_environment()  # before torch is imported

import determined as det  # noqa: E402
import torch  # noqa: E402
from determined import core  # noqa: E402

from lm import config, lora, optim, parallelize, precision, sampling, seeds  # noqa: E402
from lm.checkpoint import resume as resuming  # noqa: E402
from lm.checkpoint.checkpointer import Checkpointer, State  # noqa: E402
from lm.checkpoint.manifest import Evaluation, TrainingProgress  # noqa: E402
from lm.checkpoint.object_storage import stored  # noqa: E402
from lm.data.loader import Loader  # noqa: E402
from lm.determined import master  # noqa: E402
from lm.determined.context import TorchDistributedContext  # noqa: E402
from lm.errors import RankError, RunError  # noqa: E402
from lm.hf import weights  # noqa: E402
from lm.metrics.accumulator import MetricsAccumulator  # noqa: E402
from lm.metrics.device import peak_flops  # noqa: E402
from lm.metrics.logger import MetricLogger  # noqa: E402
from lm.preflight import Setup, preflight  # noqa: E402
from lm.profiling import profiling  # noqa: E402
from lm.report import write_report  # noqa: E402
from lm.runtime.preemption import PreemptionHandler  # noqa: E402
from lm.runtime.rendezvous import join_world  # noqa: E402
from lm.runtime.run_dir import RunDir  # noqa: E402
from lm.runtime.watchdog import Watchdog  # noqa: E402
from lm.runtime.world import World  # noqa: E402
from model import IGNORE_INDEX, Transformer  # noqa: E402


@dataclass(frozen=True)
class Run:
    """What a run is started with."""

    hp: config.Hyperparameters
    world: World
    context: core.Context
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

    def state(self) -> State:
        """Return the live state that a checkpoint holds."""
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        return {"model": lora.trained(self.model), "optim": optimizer, "scaler": scaler}

    def is_due(self, step: int, rate: int | None) -> bool:
        return rate is not None and (step >= self.setup.max_steps or (step > 0 and step % rate == 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, join the other ranks, open the Core API context and run. Return the exit code."""
    args = config.parse(arguments)
    launch, info, watchdog, after_error = Launch(), None, None, ExitStack()
    try:
        launch, info = Launch.from_env(os.environ), master.trial_info()
        hp = config.load(args.config, args.overrides, weights.model_defaults, info and info.trial)
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
            stored(run_dir, context, world, after_error),
        ):
            return execute(Run(hp, world, context, info, run_dir, watchdog.on_step_start), args.dry_run)
    except RunError as error:
        # Until the ranks have joined, each machine prints its own errors.
        is_reporter = isinstance(error, RankError) or (launch.rank if watchdog else launch.local_rank) == 0
        with after_error:
            return master.exit_code(error, info, is_reporter, watchdog and watchdog.publish_error)


def execute(run: Run, dry_run: bool = False) -> int:
    """Run from the first check to the last message. Return the exit code."""
    setup, plan = preflight(run.hp, run.world, run.info, run.run_dir, run.context.checkpoint, dry_run)
    if resuming.is_complete(plan, setup.run_info, setup.max_steps, bool(setup.sample_rate), run.world) or dry_run:
        return 0
    directory, train_context = run.run_dir and run.run_dir.path, run.context.train
    with MetricLogger(run.world.rank, directory, train_context, setup.max_steps, run.info) as logger:
        t = build(run, setup, logger)
        start = resume(t, plan)
        traces = run.run_dir.traces if run.run_dir else train_context.get_tensorboard_path()
        left = setup.max_steps - start.step
        with profiling(run.hp, run.context.profiler, traces, run.world.rank, left, logger.info) as profiler_step:
            step, stopped = train(t, start, profiler_step)
        logger.set_status("stopped" if stopped else "completed")
    return finish(t, step, stopped)


def build(run: Run, setup: Setup, logger: MetricLogger) -> Training:
    """Build the sharded model, then the parts that work on it."""
    hp, world, device, context, run_dir = run.hp, run.world, run.world.device, run.context, run.run_dir
    announce("building the model")
    with torch.device("meta"):
        model = lora.add_adapters(Transformer(hp), hp, setup.dtype)
    model = parallelize.parallelize(model, hp, world.device_mesh(setup.layout.dims), setup.dtype, setup.seed, hp.float8)
    logger.info("\n".join([*setup.notes(hp), setup.summary(hp, world)]))
    optimizer = optim.Optimizer(hp, model.named_parameters())
    scaler = precision.LossScaler(setup.dtype, device)
    loader = Loader(hp, setup.data, setup.global_batch_size, setup.layout.dp_rank, setup.layout.dp_size, device)
    checkpoints, files = run_dir and run_dir.checkpoints, setup.data.tokenizer.files if setup.data.tokenizer else {}
    checkpointer = Checkpointer(hp, context.checkpoint, world, checkpoints, files)
    accumulator = MetricsAccumulator(device, world, lora.flops_per_token(hp, hp), peak_flops(device, setup.dtype))
    preemption = PreemptionHandler(world, lambda: logger.stopped_by_search or master.should_preempt(context, run.info))
    return Training(run, setup, model, optimizer, scaler, loader, checkpointer, accumulator, logger, preemption)


def resume(t: Training, plan: resuming.ResumePlan) -> TrainingProgress:
    """Load the checkpoint of `plan`, if any, and start the run's files. Return the progress so far."""
    hp, world, run_dir, setup, run_info = t.run.hp, t.run.world, t.run.run_dir, t.setup, t.setup.run_info
    if setup.max_steps:
        t.checkpointer.allocate(t.state(), t.logger.info)
    if hp.init_from is not None and (run_info.base or not (plan.resume_candidates or plan.init_candidates)):
        weights.load_into(t.model, run_info.base.source if run_info.base else hp.init_from, world, t.logger.info)
    progress = resuming.resume(plan, t.checkpointer, t.state(), run_info, t.run.info, t.logger.info)
    if note := t.loader.load_state_dict(progress.dataset_state):
        t.logger.info(note)
    if run_dir:
        world.on_rank0(lambda: run_dir.start(run_info.hyperparameters, setup.session(world, progress.step)))
    t.logger.start(progress.step, progress.missing_reports(), run_info.hyperparameters)
    t.accumulator.load_state_dict(progress.metric_sums)
    return progress


def train(t: Training, start: TrainingProgress, profiler_step: Callable[[], None]) -> tuple[int, bool]:
    """Train to the last step, or until asked to stop. Return the number of completed steps and whether asked."""
    hp, model, setup, layout = t.run.hp, t.model, t.setup, t.setup.layout
    batches, step = t.loader.training(start.step), start.step
    gc.freeze()  # collection is disabled but at reports, on all ranks at the same time
    t.preemption.install()  # before this, there is nothing to save
    stopping = complete_resumed_step(t, start)
    model.train()
    while step < setup.max_steps and not stopping:
        t.run.on_step_start(step)
        with t.accumulator.waiting_for_data():
            batch = next(batches)
        torch.manual_seed(seeds.derive_seed(setup.seed, "dropout", step, layout.dp_rank))
        loss_sum = torch.zeros((), device=t.run.world.device)
        for micro_batch in batch.micro_batches:
            parallelize.start_micro_step(model, hp, micro_batch is batch.micro_batches[-1])
            loss = model(*micro_batch)
            # FSDP averages gradients over data-parallel ranks; scaled like this, that is the mean over all targets.
            (loss * (t.scaler.scale * (layout.dp_size / batch.n_target_tokens))).backward()
            loss_sum += loss.detach()
        agreement = t.preemption.start_agreement(t.checkpointer.is_writing)
        grad_norm, skipped = t.optimizer.clip_grad_norm(t.scaler.scale)
        t.checkpointer.protect_copy()
        t.optimizer.step(optim.learning_rate(hp, step, setup.max_steps))
        t.optimizer.zero_grad()
        t.scaler.update(skipped)
        t.accumulator.add(loss_sum, batch.n_target_tokens, setup.tokens_per_step, grad_norm, skipped)
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
            save(t, step, evaluation, wait=stopping or step == setup.max_steps or not hp.async_checkpoint)
    return step, stopping


def complete_resumed_step(t: Training, start: TrainingProgress) -> bool:
    """Make the report and the evaluation of the resumed step that a stop prevented. Return whether asked to stop."""
    step, max_steps = start.step, t.setup.max_steps
    if t.accumulator.n_steps and step <= max_steps and t.is_due(step, t.run.hp.report_rate):
        report(t, step)
    known = Evaluation(start.validation_loss, start.sampled) if max_steps else Evaluation()
    evaluation, stopping = evaluate(t, step, known)
    if max_steps and evaluation != known and not stopping and t.is_due(step, t.run.hp.checkpoint_rate):
        save(t, step, evaluation, wait=True)
    return stopping


def report(t: Training, step: int) -> None:
    """Log the training metrics since the last report; raise RunError after too many consecutive skipped steps."""
    gc.collect()
    metrics, n_skipped = t.accumulator.report()
    t.logger.log("training", step, metrics | {"lr": optim.learning_rate(t.run.hp, step - 1, t.setup.max_steps)})
    optim.check_skipped(t.run.hp, step, n_skipped)


def evaluate(t: Training, step: int, known: Evaluation) -> tuple[Evaluation, bool]:
    """Validate and sample where due and not yet `known`. Return the results and whether asked to stop."""
    loss, sampled = known
    if loss is None and t.is_due(step, t.setup.validation_rate) and (loss := validate(t, step)) is None:
        return known, True
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
        loss_sum, n_targets = map(math.fsum, zip(*t.run.world.all_gather(sums).tolist(), strict=True))
    loss = loss_sum / n_targets
    if not math.isfinite(loss):
        raise RunError(f"validation loss is {loss} at step {step}: lower lr or set grad_clip", keys=("lr", "grad_clip"))
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "batches": step} | t.loader.bits_per_byte(loss_sum)
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
            tokens.append(token)  # past its end, as ranks that disagreed on the end would wait for each other
        t.model.train()
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.stop_ids), None)
    t.logger.log_sample(step, tokenizer.decode(prompt), tokenizer.decode(tokens[:end], after=prompt))
    return True


def save(t: Training, step: int, evaluation: Evaluation, wait: bool) -> None:
    """Start to save a checkpoint once the one before it is committed; `wait` commits this one too."""
    state = t.loader.state_dict(), t.accumulator.state_dict()
    with t.accumulator.saving(), t.logger.status("saving"):
        if t.checkpointer.is_pending:
            t.logger.log_checkpoint(*t.checkpointer.commit())
        dataset, sums = map(list, zip(*t.run.world.all_gather_object(state), strict=True))
        progress = {"step": step, "tokens": step * t.setup.tokens_per_step, "metric_sums": sums} | evaluation._asdict()
        progress = TrainingProgress(dataset_state=None if None in dataset else dataset, **progress)
        t.checkpointer.save(t.state(), t.setup.run_info, progress)
        if wait:
            t.logger.log_checkpoint(*t.checkpointer.commit())


def finish(t: Training, step: int, stopped: bool) -> int:
    """Acknowledge a preemption, and write the report. Return the exit code."""
    if stopped:
        if t.run.world.rank == 0 and not t.logger.stopped_by_search:  # otherwise exit code 0 means: trial complete
            t.run.context.preempt.acknowledge_preemption_signal()
        t.logger.info(f"stopped after step {step}/{t.setup.max_steps} as requested; {t.run.hp.rerun} to resume")
    if run_dir := t.run.run_dir:  # no rank ends before rank 0: Slurm would kill it
        report = t.run.world.on_rank0(lambda: write_report(run_dir.path))
        t.logger.info(f"curves and traces: make board; report: {report}")
    return exit_code_of_stop(os.environ) if stopped else 0


if __name__ == "__main__":
    run_and_exit(main)
