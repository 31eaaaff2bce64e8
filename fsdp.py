"""Train a language model with PyTorch FSDP through Determined's Core API: the run, top to bottom.

    python fsdp.py --config FILE [key=value ...]

runs as it stands in one process, as one of many under a launcher, and as a trial on a cluster. Read `main`,
then `run`, then `train`; the parts that they introduce to each other are the files in lm/.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.launch.environment import Launch, is_restart, setup_environment
from lm.launch.spawn import run_and_exit

setup_environment()  # has its say in the environment first

import determined as det  # noqa: E402
import torch  # noqa: E402
from determined import core  # noqa: E402

from lm import config, optim, parallelize, precision, sampling, seeds  # noqa: E402
from lm.checkpoint import checkpointer, resume  # noqa: E402
from lm.checkpoint.manifest import Manifest, is_intact  # noqa: E402
from lm.checkpoint.resume import find_initial  # noqa: E402
from lm.data import loader  # noqa: E402
from lm.determined import master  # noqa: E402
from lm.determined.context import TorchDistributedContext  # noqa: E402
from lm.errors import ConfigError, RankError, RunError  # noqa: E402
from lm.metrics import accumulator  # noqa: E402
from lm.metrics import logger as metric_logger  # noqa: E402
from lm.profiling import profiling  # noqa: E402
from lm.runtime.preemption import PreemptionHandler  # noqa: E402
from lm.runtime.run_dir import RunDir  # noqa: E402
from lm.runtime.watchdog import Watchdog  # noqa: E402
from lm.runtime.world import World, join_world  # noqa: E402
from model import IGNORE_INDEX, ModelConfig, Transformer  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, meet the other ranks, open the Core API, run. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a language model with PyTorch FSDP.")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    args = parser.parse_args(arguments)
    os.umask(0o077)  # what a run writes is its owner's alone
    launch, info, folder, watch = Launch(), None, None, None
    try:
        launch = Launch.from_env(os.environ)
        info = det.get_cluster_info()
        if info is None:
            hp = config.load(args.config, args.overrides)
            folder = RunDir(hp.run_name or args.config.stem)
        else:
            hp = config.read({**info.trial._config, "hyperparameters": info.trial.hparams}, args.overrides, "trial")
        with (
            join_world(launch, hp.collective_timeout) as world,
            master.retrying(),
            core.init(
                distributed=TorchDistributedContext(world.launch, world.control, world.saver, world.node),
                checkpoint_storage=str(folder.checkpoints.absolute()) if folder else None,
                preempt_mode=core.PreemptMode.ChiefOnly,
            ) as context,
            Watchdog(world.store, launch.rank, world.size, hp.collective_timeout) as watch,
        ):
            run(hp, world, context, info, folder, watch.on_step_start)
        return 0
    except RunError as error:
        # Until the ranks have met, what is wrong on another machine is known there alone.
        if speaks := isinstance(error, RankError) or (launch.rank if watch else launch.local_rank) == 0:
            print(error, file=sys.stderr)
        return master.exit_code(error, info, speaks, watch and watch.explain)


@dataclass(frozen=True)
class Training:
    """The parts that the loop works with, put together by `run`."""

    hp: config.Hyperparameters
    world: World
    context: core.Context
    model: Transformer
    optimizer: optim.Optimizer
    scaler: precision.LossScaler
    loader: loader.Loader
    checkpointer: checkpointer.Checkpointer
    meter: accumulator.MetricsAccumulator
    reporter: metric_logger.MetricLogger
    stop: PreemptionHandler
    reached: Callable[[int], None]
    """told of every step that begins, so that a rank that hangs can be named"""
    seed: int
    total: int
    """sequences per step"""
    steps: int
    """length of the run"""
    about: dict[str, Any]
    """what checkpoints say of the run"""

    def state(self) -> dict[str, checkpointer.Stateful]:
        return {"model": self.model, "optim": self.optimizer, "scaler": self.scaler}


def run(
    hp: config.Hyperparameters,
    world: World,
    context: core.Context,
    info: det.ClusterInfo | None,
    folder: RunDir | None,
    reached: Callable[[int], None] = lambda _: None,
) -> None:
    """Build everything, go on from the newest checkpoint, train, and end with a sample."""
    rank, device = world.rank, world.device
    distributed = context.distributed
    assert isinstance(distributed, TorchDistributedContext)
    stop = PreemptionHandler(world.control, lambda: bool(info and rank == 0 and context.preempt.should_preempt(False)))
    say: Callable[[str], None] = print if rank == 0 else lambda _: None

    # What can be wrong is looked at before anything large is made.
    seed = hp.seed if hp.seed is not None else info.trial.trial_seed if info else config.DEFAULT_SEED
    total = loader.derive_global_batch_size(hp, world.size)
    mesh_shape = world.all_or_none(lambda: parallelize.mesh_shape(hp, world.size, world.launch.local_size))
    dtype = world.all_or_none(lambda: precision.compute_dtype(hp, device))
    world.require_equal("devices", {"kind": device.type, "amp_dtype": str(dtype), "shards": mesh_shape[1]})
    restarted = is_restart(os.environ)
    if folder:
        folder.hold(world.on_rank0, world.all_or_none)
    earlier = world.on_rank0(lambda: resume.find_checkpoints(hp, info, folder and folder.checkpoints, restarted))
    initial = [] if earlier else world.on_rank0(lambda: find_initial(hp.init_from, info is not None))
    data = world.all_or_none(lambda: loader.open_data(hp, hp.vocab_size, hp.max_seq_len, total, seed, rank, world.size))
    if hp.prompt is not None and not (data.tokenizer and data.tokenizer.encode(hp.prompt)):
        raise ConfigError(f"prompt: dataset {hp.dataset} has no tokenizer that makes a token of {hp.prompt!r}")
    epoch = data.samples and data.samples / total
    steps = hp.run_length(epoch)
    settings = dict(world.require_equal("hyperparameters", hp.model_dump(mode="json") | {"seed": seed}))
    about = {
        "sharding": hp.sharding,
        "total_batch_size": total,
        "hyperparameters": settings,
        "model": {key: settings[key] for key in ModelConfig.model_fields},
        **world.require_equal("data", data.describe()),
        "loss_scaled": dtype == torch.float16,
        "trial_id": info.trial.trial_id if info else None,
    }
    finished = folder and hp.resume == "auto" and world.on_rank0(lambda: config.completed(earlier, about, steps))
    if folder and finished and all(world.all_gather_object(is_intact(Path(earlier[0]), rank, world.size))):
        say(f"{folder.path} is complete: {finished} steps. To extend it: max_steps={2 * finished}; anew: resume=fresh")
        return

    # The model is sharded before it has any memory; the rest is made around it.
    with torch.device("meta"):
        model = Transformer(hp)
    model = parallelize.parallelize(model, hp, world.mesh(*mesh_shape), dtype, seed, hp.float8)
    training = Training(
        hp=hp,
        world=world,
        context=context,
        model=model,
        optimizer=optim.Optimizer(hp, model.named_parameters()),
        scaler=precision.LossScaler(dtype, device),
        loader=loader.Loader(hp, data, total, rank, world.size, seed, device),
        checkpointer=checkpointer.Checkpointer(
            hp, context.checkpoint, world, folder and folder.checkpoints, data.files(), distributed.use_saver_group
        ),
        meter=accumulator.MetricsAccumulator(
            device, world.all_gather_object, hp.flops_per_token(hp.max_seq_len), accumulator.peak_flops(device, dtype)
        ),
        reporter=metric_logger.MetricLogger(rank, folder and folder.path, context.train, steps),
        stop=stop,
        reached=reached,
        seed=seed,
        total=total,
        steps=steps,
        about=about,
    )
    say = training.reporter.log  # beside the progress bar
    numbers = f"float8 {hp.float8}" if hp.float8 else str(dtype or torch.float32).removeprefix("torch.")
    attention = parallelize.attention_kernel(hp, data.validation[0].document_ids is not None, dtype, device)
    for note in data.notes:
        say(note)
    say(
        f"{hp.n_parameters / 1e6:,.1f}M parameters, {hp.sharding} over {world.size} x {device.type},"
        f" {numbers}, {attention}; {total} x {hp.max_seq_len} tokens a step, "
        + (f"{epoch:,.0f} steps an epoch" if epoch else "streamed")
    )
    start = restore(training, earlier, initial, info) if earlier or initial else 0
    if hp.torch_profiler and (unseen := sum(hp.torch_profiler_steps[:2])) >= steps - start:
        say(f"torch_profiler: no step is traced; torch_profiler_steps begins behind {unseen}, {steps - start} are left")
    if folder:
        fresh = hp.resume == "fresh" and not restarted
        world.on_rank0(lambda: folder.begin(settings | {"max_steps": steps or None}, fresh))
    training.reporter.begin(start)

    traces = folder.tensorboard if folder else context.train.get_tensorboard_path()
    with training.reporter, profiling(hp, context.profiler, traces, rank) as trace:
        done = train(training, start, trace)
    if done < steps:
        say(f"stopped behind step {done} of {steps} on request; the same command goes on from there")
    elif hp.prompt is not None and data.tokenizer is not None:
        tokens = data.tokenizer.encode(hp.prompt)
        drawn = sampling.generate(model, tokens, hp.num_tokens, device=device, seed=seed, temperature=0.8, top_k=50)
        say(f"\n{hp.prompt}{data.tokenizer.decode(drawn, after=tokens)}\n")
    if folder:
        say(f"files: {folder.path}/ (metrics.jsonl, checkpoints/, tensorboard/); curves and traces: make board")


def restore(t: Training, earlier: Sequence[str], initial: Sequence[str], info: det.ClusterInfo | None) -> int:
    """Read the first sound one of the checkpoints `earlier`, or without any the weights of `initial`, into the run.

    Returns:
        The step to go on from: 0 for weights alone, of `initial` or in a fork (another trial's checkpoint).
    """
    started = time.monotonic()

    def is_start(manifest: Manifest) -> bool:
        return not earlier or bool(info and manifest.trial_id != info.trial.trial_id)

    def choose(manifest: Manifest) -> dict[str, checkpointer.Stateful]:
        compare = config.refuse_another_model if is_start(manifest) else config.refuse_another_run
        for change in compare(manifest.model_dump(), t.about):
            t.reporter.log(f"changed: {change}")
        if is_start(manifest):
            return {"model": t.model}
        return {part: held for part, held in t.state().items() if part != "scaler" or manifest.loss_scaled}

    found, manifest = t.checkpointer.restore_first(earlier or initial, choose, t.reporter.log)
    if is_start(manifest):
        peak = max(t.world.all_gather_object(accumulator.peak_memory_gib(t.world.device)))
        t.reporter.log(f"weights of checkpoint {found} in {time.monotonic() - started:.1f} s, {peak:.2f} GiB a rank")
        return 0
    t.reporter.log(f"going on from checkpoint {Path(found).name}, step {manifest.step}")
    t.checkpointer.count(found, manifest)
    if note := t.loader.resume(manifest.source):
        t.reporter.log(note)
    return manifest.step


def train(t: Training, start: int, trace: Callable[[], None]) -> int:
    """The training loop, from step `start` to the end or until asked to stop. Returns the steps completed."""
    hp, world, model = t.hp, t.world, t.model
    batches = t.loader.training(start)
    done, stopping = start, False
    gc.freeze()
    t.stop.listen()  # before it, nothing can be lost
    t.meter.restart()
    if done >= t.steps:
        validate(t, done)
    model.train()
    while done < t.steps and not stopping:
        t.reached(done)
        with t.meter.waiting_for_data():
            batch = next(batches)
        torch.manual_seed(seeds.derive_seed(t.seed, "dropout", done, world.rank))
        loss_sum = torch.zeros((), device=world.device)
        for micro in batch.micro_batches:
            parallelize.begin_micro_step(model, hp, micro is batch.micro_batches[-1])
            loss = model(*micro)
            # FSDP averages gradients over ranks, so the sum over one rank's targets is scaled to the mean over all.
            (loss * (t.scaler.scale * (world.size / batch.targets))).backward()
            loss_sum += loss.detach()
        question = t.stop.start_agreement(t.checkpointer.writing)
        lr = optim.learning_rate(hp, done, t.steps)
        norm, skipped = t.optimizer.step(lr, t.scaler.scale)
        t.scaler.update(skipped)
        t.meter.add(loss_sum, batch.targets, t.total * hp.max_seq_len, norm, skipped)
        trace()
        done += 1
        t.reporter.step()

        stopping, busy = t.stop.decision(question)
        if t.checkpointer.pending and not busy:
            commit(t)
        last = stopping or done == t.steps
        saving = last or done % hp.checkpoint_rate == 0
        if last or done % hp.report_rate == 0:
            report(t, done, lr)
        if saving or done % (hp.validation_rate or hp.report_rate) == 0:
            with t.meter.paused(), t.reporter.status("validating"):
                validation_loss = validate(t, done)
            if saving:
                with t.meter.saving(), t.reporter.status("saving"):
                    save(t, done, validation_loss, wait=last or not hp.async_checkpoint)
    if done < t.steps and world.rank == 0:  # without it, exit code 0 means that the trial is complete
        t.context.preempt.acknowledge_preemption_signal()
    return done


def report(t: Training, done: int, lr: float) -> None:
    """Report what happened since the last report; stop a run whose gradients stay inf or NaN."""
    gc.collect()
    measured, longest = t.meter.report()
    position = {"lr": lr, "batches": done, "tokens": done * t.total * t.hp.max_seq_len}
    t.reporter.report("training", done, measured | position)
    if longest >= t.hp.skip_nonfinite:
        raise RunError(
            f"inf or NaN gradients in {longest} steps in a row, up to step {done} (skip_nonfinite:"
            f" {t.hp.skip_nonfinite}): lower lr, set grad_clip, or use amp_dtype: bfloat16 or null"
        )


def validate(t: Training, done: int) -> float:
    """Report and return the mean loss over the validation samples, in nats per token.

    Raises:
        RunError: it is inf or NaN.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=t.world.device)
    t.model.eval()
    with torch.no_grad():
        for micro in t.loader.validation():
            sums += torch.stack([t.model(*micro).double(), (micro.targets != IGNORE_INDEX).sum()])
    t.model.train()
    loss_sum, targets = (math.fsum(part) for part in zip(*t.world.all_gather_object(sums.tolist()), strict=True))
    loss = loss_sum / targets
    if not math.isfinite(loss):
        raise RunError(f"validation loss is {loss} at step {done}: lower lr, or set grad_clip")
    t.reporter.report("validation", done, {"loss": loss, "perplexity": math.exp(min(loss, 700)), "batches": done})
    return loss


def save(t: Training, done: int, validation_loss: float, wait: bool) -> None:
    """Begin to save, once an earlier checkpoint is on disk; `wait` until this one is, too."""
    if t.checkpointer.pending:
        commit(t)
    position = {"step": done, "tokens": done * t.total * t.hp.max_seq_len}
    position |= {"source": t.loader.state and t.world.all_gather_object(t.loader.state)}
    t.checkpointer.save(t.state(), t.about | position | {"validation_loss": validation_loss})
    if wait:
        commit(t)


def commit(t: Training) -> None:
    step, uuid = t.checkpointer.commit()
    t.reporter.log(f"checkpoint  step {step}  {uuid}")


if __name__ == "__main__":
    run_and_exit(main)
