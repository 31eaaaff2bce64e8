"""Train a language model with PyTorch FSDP through Determined's Core API.

    python fsdp.py --config FILE [key=value ...]

The same file runs alone, under any launcher, and as a Determined trial. `execute` is the order of a run: `preflight`,
`build`, `resume`, `train`, `finish`. The loop in `train` shows every part of a step; what the parts do is in lm/.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.launch.environment import Launch, is_restart, setup_environment
from lm.launch.spawn import run_and_exit

setup_environment()  # before torch is imported

import determined as det  # noqa: E402
import torch  # noqa: E402
from determined import core  # noqa: E402

from lm import config, optim, parallelize, precision, sampling, seeds  # noqa: E402
from lm.checkpoint import resume as resuming  # noqa: E402
from lm.checkpoint.checkpointer import Checkpointer, Stateful  # noqa: E402
from lm.checkpoint.manifest import TrainingProgress  # noqa: E402
from lm.data.loader import Loader  # noqa: E402
from lm.determined import master  # noqa: E402
from lm.determined.context import TorchDistributedContext  # noqa: E402
from lm.errors import RankError, RunError  # noqa: E402
from lm.hf import weights  # noqa: E402
from lm.metrics.accumulator import MetricsAccumulator, peak_flops  # noqa: E402
from lm.metrics.logger import MetricLogger  # noqa: E402
from lm.preflight import Setup, check  # noqa: E402
from lm.profiling import profiling  # noqa: E402
from lm.runtime.preemption import PreemptionHandler  # noqa: E402
from lm.runtime.run_dir import RunDir  # noqa: E402
from lm.runtime.watchdog import Watchdog  # noqa: E402
from lm.runtime.world import World, join_world  # noqa: E402
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

    def state(self) -> dict[str, Stateful]:  # of a checkpoint
        return {"model": self.model, "optim": self.optimizer, "scaler": self.scaler}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, join the other ranks, open the Core API context and run. Return the exit code."""
    parser = argparse.ArgumentParser(description="Train a language model with PyTorch FSDP.")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    args = parser.parse_args(arguments)
    os.umask(0o077)  # only the owner can read a run's files
    launch, info, run_dir, watchdog = Launch(), None, None, None
    try:
        launch, info = Launch.from_env(os.environ), det.get_cluster_info()
        if info is None:
            hp = config.load(args.config, args.overrides, weights.model_defaults)
            run_dir = RunDir(hp.run_name or args.config.stem)
        else:
            contents = {**info.trial._config, "hyperparameters": info.trial.hparams}
            hp = config.read(contents, args.overrides, "trial", defaults=weights.model_defaults)
        with (
            join_world(launch, hp.collective_timeout) as world,
            master.retrying(),
            core.init(
                distributed=TorchDistributedContext(launch, world.control, world.saver, world.node),
                checkpoint_storage=str(run_dir.checkpoints.absolute()) if run_dir else None,
                preempt_mode=core.PreemptMode.ChiefOnly,
            ) as context,
            Watchdog(world.store, launch.rank, world.size, hp.collective_timeout) as watchdog,
        ):
            execute(Run(hp, world, context, info, run_dir, watchdog.on_step_start))
        return 0
    except RunError as error:
        # Until the ranks have joined, each machine prints its own errors.
        is_reporter = isinstance(error, RankError) or (launch.rank if watchdog else launch.local_rank) == 0
        if is_reporter:
            print(error, file=sys.stderr)
        return master.exit_code(error, info, is_reporter, watchdog and watchdog.explain)


def execute(run: Run) -> None:
    """Run from the first check to the last message."""
    setup, plan = preflight(run)
    step = run.world.on_rank0(lambda: resuming.completed_step(plan, setup.run_info, setup.max_steps))
    if run.run_dir and step and resuming.is_intact(plan, run.world):
        if run.world.rank == 0:
            print(f"{run.run_dir.path} is complete: {step} steps; extend: max_steps={2 * step}, restart: resume=fresh")
        return
    t = build(run, setup)
    start = resume(t, plan)
    traces = run.run_dir.tensorboard if run.run_dir else run.context.train.get_tensorboard_path()
    rank, left = run.world.rank, setup.max_steps - start
    with t.logger, profiling(run.hp, run.context.profiler, traces, rank, left, t.logger.info) as profiler_step:
        step = train(t, start, profiler_step)
    finish(t, step)


def preflight(run: Run) -> tuple[Setup, resuming.ResumePlan]:
    """Find everything that can be wrong, locally on every rank, and agree on it once."""
    hp, world, run_dir = run.hp, run.world, run.run_dir
    setup = world.all_or_none(lambda: check(hp, world, run.info))
    world.require_equal("ranks", {"device": world.device.type} | setup.facts())
    if run_dir:
        run_dir.lock(world)
    checkpoints, restarted = run_dir and run_dir.checkpoints, is_restart(os.environ)
    if hp.init_from is not None and weights.is_model(hp.init_from):
        hp = hp.model_copy(update={"init_from": None})  # it is not a checkpoint
    return setup, world.on_rank0(lambda: resuming.plan_resume(hp, run.info, checkpoints, restarted))


def build(run: Run, setup: Setup) -> Training:
    """Build the sharded model, then the parts that work on it."""
    hp, world, context, layout, data = run.hp, run.world, run.context, setup.layout, setup.data
    device, run_dir, distributed = world.device, run.run_dir, context.distributed
    assert isinstance(distributed, TorchDistributedContext)
    with torch.device("meta"):
        model = Transformer(hp)
    mesh = world.device_mesh(layout.dims)
    model = parallelize.parallelize(model, hp, mesh, setup.dtype, setup.seed, hp.float8)
    logger = MetricLogger(world.rank, run_dir and run_dir.path, context.train, setup.max_steps)
    for line in (*data.notes, setup.summary(hp, world)):
        logger.info(line)
    optimizer = optim.Optimizer(hp, model.named_parameters())
    scaler = precision.LossScaler(setup.dtype, device)
    loader = Loader(hp, data, setup.global_batch_size, layout.dp_rank, layout.dp_size, device)
    directory, thread_init = run_dir and run_dir.checkpoints, distributed.use_saver_group
    checkpointer = Checkpointer(hp, context.checkpoint, world, directory, data.tokenizer_files(), thread_init)
    accumulator = MetricsAccumulator(device, world, hp.flops_per_token(hp.max_seq_len), peak_flops(device, setup.dtype))
    asks = run.info is not None and world.rank == 0  # off a cluster, the answer is a broadcast that other ranks miss
    preemption = PreemptionHandler(world, lambda: asks and context.preempt.should_preempt(auto_ack=False))
    return Training(run, setup, model, optimizer, scaler, loader, checkpointer, accumulator, logger, preemption)


def resume(t: Training, plan: resuming.ResumePlan) -> int:
    """Load the checkpoint of `plan`, if any, and start the run's files. Return the number of completed steps."""
    hp, setup, run_dir = t.run.hp, t.setup, t.run.run_dir
    saved = resuming.resume(plan, t.checkpointer, t.state(), setup.run_info, t.run.info, t.logger.info)
    if hp.init_from is not None and not plan.resume_candidates and not plan.init_candidates:
        weights.load_into(t.model, hp.init_from, t.run.world, t.logger.info)
    step = saved.step if saved else 0
    if saved and (note := t.loader.load_state_dict(saved.dataset_state)):
        t.logger.info(note)
    if run_dir:
        hyperparameters = setup.run_info.hyperparameters | {"max_steps": setup.max_steps or None}
        fresh = hp.resume == "fresh" and not is_restart(os.environ)
        t.run.world.on_rank0(lambda: run_dir.start(hyperparameters, fresh))
    t.logger.start(step)
    return step


def train(t: Training, start: int, profiler_step: Callable[[], None]) -> int:
    """Train from step `start` to the last one, or until asked to stop. Return the number of completed steps."""
    hp, model, setup, layout = t.run.hp, t.model, t.setup, t.setup.layout
    batches, step, stopping = t.loader.training(start), start, False
    gc.disable()  # it runs at reports, on all ranks at the same time
    gc.freeze()
    t.preemption.install()  # before this, there is nothing to save
    t.accumulator.restart()
    if step >= setup.max_steps:
        validate(t, step)
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
        lr = optim.learning_rate(hp, step, setup.max_steps)
        t.optimizer.step(lr)
        t.optimizer.zero_grad()
        t.scaler.update(skipped)
        t.accumulator.add(loss_sum, batch.n_target_tokens, setup.tokens_per_step, grad_norm, skipped)
        profiler_step()
        step += 1
        t.logger.on_step_end()

        stopping, is_writing = t.preemption.decision(agreement)
        if t.checkpointer.is_pending and not is_writing:
            commit(t)
        last = stopping or step == setup.max_steps
        saving = last or step % hp.checkpoint_rate == 0
        if last or step % hp.report_rate == 0:
            gc.collect()
            report(t, step, lr)
        if saving or step % (hp.validation_rate or hp.report_rate) == 0:
            with t.accumulator.paused(), t.logger.status("validating"):
                validation_loss = validate(t, step)
            if saving:
                with t.accumulator.saving(), t.logger.status("saving"):
                    save(t, step, validation_loss, wait=last or not hp.async_checkpoint)
    return step


def report(t: Training, step: int, lr: float) -> None:
    """Log the training metrics since the last report; raise RunError after too many consecutive skipped steps."""
    hp = t.run.hp
    metrics, n_skipped = t.accumulator.report()
    t.logger.log("training", step, metrics | {"lr": lr, "batches": step, "tokens": step * t.setup.tokens_per_step})
    if n_skipped >= hp.skip_nonfinite:
        raise RunError(
            f"inf or NaN gradients in {n_skipped} consecutive steps up to step {step} (skip_nonfinite:"
            f" {hp.skip_nonfinite}): lower lr, set grad_clip, or use amp_dtype: bfloat16 or null",
            keys=("lr", "grad_clip", "amp_dtype", "skip_nonfinite"),
        )


def validate(t: Training, step: int) -> float:
    """Log and return the mean loss over the validation samples (nats per token); raise RunError if it is not finite."""
    sums = torch.zeros(2, dtype=torch.float64, device=t.run.world.device)
    t.model.eval()
    with torch.no_grad():
        for batch in t.loader.validation():
            sums += torch.stack([t.model(*batch).double(), (batch.targets != IGNORE_INDEX).sum()])
    t.model.train()
    loss_sum, n_targets = map(math.fsum, zip(*t.run.world.all_gather_object(sums.tolist()), strict=True))
    loss = loss_sum / n_targets
    if not math.isfinite(loss):
        raise RunError(f"validation loss is {loss} at step {step}: lower lr or set grad_clip", keys=("lr", "grad_clip"))
    t.logger.log("validation", step, {"loss": loss, "perplexity": math.exp(min(loss, 700)), "batches": step})
    return loss


def save(t: Training, step: int, validation_loss: float, wait: bool) -> None:
    """Start to save a checkpoint once the one before it is committed; `wait` commits this one too."""
    if t.checkpointer.is_pending:
        commit(t)
    state, tokens = t.loader.state_dict(), step * t.setup.tokens_per_step
    states = t.run.world.all_gather_object(state) if state else None
    progress = TrainingProgress(step=step, tokens=tokens, validation_loss=validation_loss, dataset_state=states)
    t.checkpointer.save(t.state(), t.setup.run_info, progress)
    if wait:
        commit(t)


def commit(t: Training) -> None:
    """Wait until the checkpoint that is being written is complete on all ranks."""
    step, uuid = t.checkpointer.commit()
    t.logger.info(f"checkpoint  step {step}  {uuid}")


def finish(t: Training, step: int) -> None:
    """Acknowledge a preemption, or generate from `prompt`; print where the files are."""
    hp, setup, world, tokenizer = t.run.hp, t.setup, t.run.world, t.setup.data.tokenizer
    if step < setup.max_steps:
        if world.rank == 0:  # otherwise exit code 0 means that the trial is complete
            t.run.context.preempt.acknowledge_preemption_signal()
        t.logger.info(f"stopped after step {step}/{setup.max_steps} as requested; rerun the same command to resume")
    elif hp.prompt is not None and tokenizer is not None:
        prompt, options = tokenizer.encode(hp.prompt), {"temperature": 0.8, "top_k": 50}
        tokens = sampling.generate(t.model, prompt, hp.num_tokens, device=world.device, seed=setup.seed, **options)
        t.logger.info(f"\n{hp.prompt}{tokenizer.decode(tokens, after=prompt)}\n")
    if t.run.run_dir:
        t.logger.info(f"files: {t.run.run_dir.path}/; curves and traces: make board")


if __name__ == "__main__":
    run_and_exit(main)
