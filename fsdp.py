"""Train a language model with PyTorch FSDP through Determined's Core API: the run, top to bottom.

    python fsdp.py --config FILE [key=value ...]

runs as it stands in one process, as one of many under a launcher, and as a trial on a cluster. Read `main`,
then `run`, then `train`; the parts that they introduce to each other are the files in lm/.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.launch import Launch, before_torch

before_torch()  # has its say in the environment first

import determined as det  # noqa: E402
import torch  # noqa: E402
from determined import core  # noqa: E402

from lm import checkpoint, config, metrics, optim, parallelize, precision, sampling, seeds  # noqa: E402
from lm.data import loader  # noqa: E402
from lm.errors import ConfigError, RankError, RunError  # noqa: E402
from lm.folder import RunFolder  # noqa: E402
from lm.manifest import Manifest, is_intact, read_manifest, whole_checkpoints  # noqa: E402
from lm.mesh import TorchDistributedContext, World, join_world  # noqa: E402
from lm.profiling import profiling  # noqa: E402
from lm.stop import StopRequest  # noqa: E402
from lm.watch import Watch  # noqa: E402
from model import IGNORE, ModelConfig, Transformer  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the configuration, meet the other ranks, open the Core API, run. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a language model with PyTorch FSDP.")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="experiment file (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameters to change")
    args = parser.parse_args(arguments)
    os.umask(0o077)  # what a run writes is its owner's alone
    launch = Launch()
    try:
        launch = Launch.from_env(os.environ)
        info = det.get_cluster_info()
        if info is None:
            hp = config.load(args.config, args.overrides)
            folder = RunFolder(hp.run_name or args.config.stem)
        else:
            hp = config.read({**info.trial._config, "hyperparameters": info.trial.hparams}, args.overrides, "trial")
            folder = None
        with (
            join_world(launch, hp.collective_timeout) as world,
            core.init(
                distributed=TorchDistributedContext(world),
                checkpoint_storage=str(folder.checkpoints.absolute()) if folder else None,
                preempt_mode=core.PreemptMode.ChiefOnly,
            ) as context,
            Watch(world.store, launch.rank, world.size, hp.collective_timeout) as watch,
        ):
            run(hp, world, context, info, folder, watch.reached)
        return 0
    except RunError as error:
        if launch.rank == 0 or isinstance(error, RankError):
            print(error, file=sys.stderr)
        return error.exit_code


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
    checkpointer: checkpoint.Checkpointer
    meter: metrics.Meter
    reporter: metrics.Reporter
    stop: StopRequest
    reached: Callable[[int], None]
    """told of every step that begins, so that a rank that hangs can be named"""
    seed: int
    total: int
    """sequences per step"""
    steps: int
    """length of the run"""
    about: dict[str, Any]
    """what checkpoints say of the run"""

    def state(self) -> dict[str, checkpoint.Stateful]:
        return {"model": self.model, "optim": self.optimizer, "scaler": self.scaler}


def run(
    hp: config.Hyperparameters,
    world: World,
    context: core.Context,
    info: det.ClusterInfo | None,
    folder: RunFolder | None,
    reached: Callable[[int], None] = lambda _: None,
) -> None:
    """Build everything, go on from the newest checkpoint, train, and end with a sample."""
    rank, device = world.rank, world.device
    distributed = context.distributed
    assert isinstance(distributed, TorchDistributedContext)
    stop = StopRequest(world.control, lambda: bool(info and rank == 0 and context.preempt.should_preempt(False)))
    stop.listen()
    say: Callable[[str], None] = print if rank == 0 else lambda _: None

    # What can be wrong is looked at before anything large is made.
    seed = hp.seed if hp.seed is not None else info.trial.trial_seed if info else config.DEFAULT_SEED
    total = loader.total_batch(hp, world.size)
    mesh_shape = parallelize.mesh_shape(hp, world.size, world.launch.local_size)
    dtype = precision.compute_dtype(hp, device)
    if folder:
        world.first(lambda: folder.acquire(fresh=hp.resume == "fresh"))
    data = world.together(lambda: loader.open_data(hp, hp.vocab_size, hp.max_seq_len, total, seed))
    if hp.prompt is not None and data.tokenizer is None:
        raise ConfigError(f"prompt: dataset {hp.dataset} has no tokenizer to read it with")
    steps = hp.run_length(len(data.train) / total)
    settings = hp.model_dump(mode="json") | {"seed": seed}
    about = {
        "sharding": hp.sharding,
        "total_batch_size": total,
        "hyperparameters": settings,
        "model": {key: settings[key] for key in ModelConfig.model_fields},
        "tokenizer": data.tokenizer.name if data.tokenizer else None,
        "data": data.fingerprint(),
        "loss_scaled": dtype == torch.float16,
        "trial_id": info.trial.trial_id if info else None,
    }
    earlier = world.first(lambda: find_checkpoints(hp, info, folder))
    if folder and hp.resume == "auto" and world.first(lambda: is_complete(earlier, about, steps)):
        say(f"{folder.path} is complete: {steps} steps. To extend it: max_steps={2 * steps}; anew: resume=fresh")
        return

    # The model is sharded before it has any memory; the rest is made around it.
    with torch.device("meta"):
        model = Transformer(hp)
    model = parallelize.parallelize(model, hp, world.mesh(*mesh_shape), precision.mixed_precision_policy(dtype), seed)
    training = Training(
        hp=hp,
        world=world,
        context=context,
        model=model,
        optimizer=optim.Optimizer(hp, model.named_parameters()),
        scaler=precision.LossScaler(dtype, device),
        loader=loader.Loader(hp, data, total, rank, world.size, seed, device),
        checkpointer=checkpoint.Checkpointer(
            hp, context.checkpoint, world, folder and folder.checkpoints, distributed.use_saver_group
        ),
        meter=metrics.Meter(
            device, world.gather, hp.flops_per_token(hp.max_seq_len), metrics.peak_flops(device, dtype)
        ),
        reporter=metrics.Reporter(rank, folder and folder.path, context.train, steps),
        stop=stop,
        reached=reached,
        seed=seed,
        total=total,
        steps=steps,
        about=about,
    )
    say = training.reporter.say  # beside the progress bar
    say(
        f"{hp.n_parameters / 1e6:,.1f}M parameters, {hp.sharding} over {world.size} x {device.type},"
        f" {str(dtype or torch.float32).removeprefix('torch.')}; {total} x {hp.max_seq_len} tokens a step,"
        f" {len(data.train) / total:,.0f} steps an epoch"
    )
    start = restore(training, earlier, info) if earlier else 0
    training.reporter.begin(start)
    if folder:
        world.first(lambda: folder.write_config({"hyperparameters": settings | {"max_steps": steps}}))

    traces = folder.tensorboard if folder else context.train.get_tensorboard_path()
    with closing(training.reporter), profiling(hp, context.profiler, traces, rank) as trace:
        done = train(training, start, trace)
    if done < steps:
        say(f"stopped behind step {done} of {steps} on request; the same command goes on from there")
    elif hp.prompt is not None and data.tokenizer is not None:
        tokens = data.tokenizer.encode(hp.prompt)
        drawn = sampling.generate(model, tokens, hp.num_tokens, device=device, seed=seed, temperature=0.8, top_k=50)
        say(f"\n{hp.prompt}{data.tokenizer.decode(drawn)}\n")
    if folder:
        say(f"files: {folder.path}/ (metrics.jsonl, checkpoints/, tensorboard/); curves and traces: make board")


def find_checkpoints(hp: config.Hyperparameters, info: det.ClusterInfo | None, folder: RunFolder | None) -> list[str]:
    """What to go on from, best first: uuids on the cluster, folders off it; nothing to start anew."""
    if hp.resume not in ("auto", "fresh"):
        if not info and not Path(hp.resume).is_dir():
            raise ConfigError(f"resume: {hp.resume}: no such folder; use auto, fresh or a checkpoint's folder")
        return [hp.resume if info else str(Path(hp.resume).absolute())]
    if folder is None:
        return [info.latest_checkpoint] if info and info.latest_checkpoint and hp.resume == "auto" else []
    whole = whole_checkpoints(folder.checkpoints, lambda line: print(line, file=sys.stderr))
    return [str(path.absolute()) for path in whole]


def is_complete(candidates: Sequence[str], about: Mapping[str, Any], steps: int) -> bool:
    """Whether the newest checkpoint of a run's folder is that of its last step, and of this run."""
    if not candidates or not steps:
        return False
    newest = Path(candidates[0])
    manifest = read_manifest(newest)
    config.refuse_another_run(manifest.model_dump(), about)
    return manifest.step >= steps and is_intact(newest, manifest)


def restore(t: Training, candidates: Sequence[str], info: det.ClusterInfo | None) -> int:
    """Read the first sound checkpoint into the run.

    Returns:
        The step to go on from: 0 for a fork (another trial's checkpoint), of which only the weights are taken.
    """

    def choose(manifest: Manifest) -> dict[str, checkpoint.Stateful]:
        if info and manifest.trial_id != info.trial.trial_id:
            return {"model": t.model}
        for change in config.refuse_another_run(manifest.model_dump(), t.about):
            t.reporter.say(f"changed: {change}")
        return {part: held for part, held in t.state().items() if part != "scaler" or manifest.loss_scaled}

    found, manifest = t.checkpointer.restore_first(candidates, choose, t.reporter.say)
    if info and manifest.trial_id != info.trial.trial_id:
        t.reporter.say(f"weights of checkpoint {found}")
        return 0
    t.reporter.say(f"going on from checkpoint {Path(found).name}, step {manifest.step}")
    return manifest.step


def train(t: Training, start: int, trace: Callable[[], None]) -> int:
    """The training loop, from step `start` to the end or until asked to stop. Returns the steps completed."""
    hp, world, model = t.hp, t.world, t.model
    batches = t.loader.training(start)
    done, stopping = start, False
    t.meter.restart()
    if done >= t.steps:
        validate(t, done)
    model.train()
    while done < t.steps and not stopping:
        t.reached(done)
        with t.meter.waiting_for_data():
            batch = next(batches)
        torch.manual_seed(seeds.derive(t.seed, "dropout", done, world.rank))
        nats = torch.zeros((), device=world.device)
        for micro in batch.micros:
            parallelize.sync_gradients(model, micro is batch.micros[-1])
            loss = model(micro.inputs, micro.targets)
            # FSDP averages gradients over ranks, so the sum over one rank's targets is scaled to the mean over all.
            (loss * (t.scaler.scale * (world.size / batch.targets))).backward()
            nats += loss.detach()
        question = t.stop.ask(t.checkpointer.writing)
        lr = optim.learning_rate(hp, done, t.steps)
        norm, skipped = t.optimizer.step(lr, t.scaler.scale)
        t.scaler.update(skipped)
        t.meter.add(nats, batch.targets, t.total * hp.max_seq_len, norm, skipped)
        trace()
        done += 1
        t.reporter.step()

        stopping, busy = t.stop.agreed(question)
        if t.checkpointer.pending and not busy:
            settle(t)
        last = stopping or done == t.steps
        saving = last or done % hp.checkpoint_rate == 0
        if last or done % hp.report_rate == 0:
            report(t, done, lr)
        if saving or done % (hp.validation_rate or hp.report_rate) == 0:
            with t.meter.paused():
                validation_loss = validate(t, done)
            if saving:
                with t.meter.saving():
                    save(t, done, validation_loss, wait=last or not hp.async_checkpoint)
    if done < t.steps and world.rank == 0:  # without it, exit code 0 means that the trial is complete
        t.context.preempt.acknowledge_preemption_signal()
    return done


def report(t: Training, done: int, lr: float) -> None:
    """Report what happened since the last report; stop a run whose gradients stay inf or NaN."""
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
            sums += torch.stack([t.model(micro.inputs, micro.targets).double(), (micro.targets != IGNORE).sum()])
    t.model.train()
    nats, targets = (math.fsum(part) for part in zip(*t.world.gather(sums.tolist()), strict=True))
    loss = nats / targets
    if not math.isfinite(loss):
        raise RunError(f"validation loss is {loss} at step {done}: lower lr, or set grad_clip")
    t.reporter.report("validation", done, {"loss": loss, "perplexity": math.exp(min(loss, 700)), "batches": done})
    return loss


def save(t: Training, done: int, validation_loss: float, wait: bool) -> None:
    """Begin to save, once an earlier checkpoint is on disk; `wait` until this one is, too."""
    if t.checkpointer.pending:
        settle(t)
    tokens = done * t.total * t.hp.max_seq_len
    t.checkpointer.save(t.state(), t.about | {"step": done, "tokens": tokens, "validation_loss": validation_loss})
    if wait:
        settle(t)


def settle(t: Training) -> None:
    step, uuid = t.checkpointer.settle()
    t.reporter.say(f"checkpoint  step {step}  {uuid}")


if __name__ == "__main__":
    if code := main():
        sys.stdout.flush()
        os._exit(code)  # at once: a thread may be in the middle of writing a checkpoint
