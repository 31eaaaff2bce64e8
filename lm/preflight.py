"""What follows from the hyperparameters, the data, the machine and the checkpoints, before the model is built."""

from __future__ import annotations

import math
import os
import platform
import shlex
import socket
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined as det
import torch

from lm.checkpoint.manifest import Base, RunInfo
from lm.checkpoint.resume import ResumePlan, plan_resume, start_date
from lm.checkpoint.store import CheckpointStore
from lm.config import DEFAULT_SEED, Hyperparameters
from lm.data.loader import derive_global_batch_size
from lm.data.run_data import Data, open_data
from lm.data.tokens import check_files
from lm.determined import master
from lm.determined.search import Searcher
from lm.errors import ConfigError, oserror_as_config_error
from lm.hf import weights
from lm.hf.base import find_base
from lm.launch.console import announce
from lm.launch.launch import exit_code_of_stop, is_restart
from lm.launch.machine import usable_cores
from lm.plan.refusal import check_memory
from lm.runtime.run_dir import RunDir
from lm.runtime.world import MeshShape, World
from lm.training import lora, parallelize, precision
from model import ModelConfig


@dataclass(frozen=True)
class Setup:
    """Derived settings of a run, the same on every rank except this rank's data."""

    seed: int
    mesh: MeshShape
    dtype: torch.dtype | None
    """compute dtype; None = float32"""
    data: Data
    global_batch_size: int
    """sequences per step"""
    tokens_per_step: int
    max_steps: int
    validation_rate: int
    """steps between validations"""
    sample_rate: int | None
    """steps between samples; None = no samples"""
    prompt: list[int]
    """tokens that samples continue"""
    run_info: RunInfo
    searcher: Searcher | None
    """None = not a trial"""
    memory: str | None
    """what the run needs, in a dry run by part; None = not worth a line"""

    def facts(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, by name."""
        info = self.run_info.model_dump()
        same = {"mesh": self.mesh, "compute dtype": str(self.dtype), "max_steps": self.max_steps}
        return same | info.pop("hyperparameters") | info.pop("data") | info

    def session(self, world: World, step: int) -> dict[str, Any]:
        """Return what the report says about a start after `step` steps: command, versions and hardware."""
        n_gpus = world.size if world.device.type == "cuda" else 0
        device = (
            torch.cuda.get_device_name(world.device) if n_gpus else f"CPU of {usable_cores()} cores"
        )
        versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, Determined {det.__version__}"
        hardware = {
            "ranks": world.size,
            "gpus": n_gpus,
            "device": device,
            "host": socket.gethostname(),
        }
        command = {"command": shlex.join(sys.argv), "versions": versions}
        return {"step": step, "tokens_per_step": self.tokens_per_step} | hardware | command

    def notes(self, hp: Hyperparameters) -> list[str]:
        """Return lines on what the user may not expect of the data and the rates."""
        notes = [*self.data.notes, *([self.memory] if self.memory else [])]
        if hp.warmup_steps > self.max_steps > 0:
            lasts = f"warmup_steps {hp.warmup_steps:g} is more than max_steps {self.max_steps}"
            notes.append(f"{lasts}: the learning rate never reaches lr")
        if (
            hp.checkpoint_rate
            < self.max_steps
            <= math.lcm(hp.checkpoint_rate, self.validation_rate)
        ):
            rates = (
                f"checkpoint_rate {hp.checkpoint_rate} and validation_rate {self.validation_rate}"
            )
            notes.append(
                f"{rates} meet at no step: only the last checkpoint has a validation loss and can be the best"
            )
        if self.searcher:
            note = self.searcher.note(self.max_steps, self.validation_rate)
            if note:
                notes.append(note)
        return notes

    def summary(self, hp: Hyperparameters, world: World) -> str:
        """Return one line about the model, how it is sharded, and the size of a step."""
        dtype = (
            f"float8 {hp.float8}"
            if hp.float8
            else str(self.dtype or torch.float32).removeprefix("torch.")
        )
        samples = self.data.train.samples_per_epoch
        epoch = (
            f"{samples / self.global_batch_size:,.0f} steps per epoch" if samples else "streamed"
        )
        adapters = f" and {lora.n_trained(hp, hp) / 1e6:,.1f}M in adapters" if hp.lora_rank else ""
        return (
            f"{hp.n_parameters / 1e6:,.1f}M parameters{adapters}, {hp.sharding} over {world.size} x"
            f" {world.device.type}, {dtype}; {self.global_batch_size} x {hp.max_seq_len} tokens per step,"
            f" {epoch}"
        )


def preflight(
    hp: Hyperparameters,
    world: World,
    info: det.ClusterInfo | None,
    run_dir: RunDir | None,
    store: CheckpointStore,
    dry_run: bool = False,
) -> tuple[Setup, ResumePlan]:
    """Find everything that can be wrong, locally on every rank, and agree on it once.

    Locks the run directory and starts `store`, or in a dry run writes nothing and prints what the
    run needs.

    Raises:
        ConfigError: the hyperparameters, the data, the machines and the checkpoints do not fit
            together.
    """
    announce("reading the data")
    if info and hp.checkpoint_storage:
        problem = "not a hyperparameter of trials; set checkpoint_storage at the top level of the experiment config"
        raise ConfigError(f"checkpoint_storage: {problem}")
    if exit_code_of_stop(os.environ) and hp.resume != "auto":
        problem = f"resume: {hp.resume} would discard all progress at every restart"
        cause = "for which RESTART_WHEN_STOPPED is set"
        raise ConfigError(f"{problem}, {cause}; use auto with another run_name, or init_from")
    if run_dir and not dry_run:
        run_dir.lock(world)
        store.start(world)
    checkpoint_config = hp
    if hp.init_from is not None and (
        hp.lora_rank or weights.is_model(hp.init_from)
    ):  # a base of adapters, or a model
        checkpoint_config = hp.model_copy(update={"init_from": None})
    plan = world.on_rank0(lambda: plan_resume(checkpoint_config, store, is_restart(os.environ)))
    if hp.dataset == "jsonl" and hp.chat_template_date is None:
        date = world.on_rank0(lambda: start_date(plan, store))
        hp = hp.model_copy(update={"chat_template_date": date})
    base = find_base(hp.init_from, world) if hp.lora_rank and hp.init_from else None
    world.all_or_none(lambda: choose_cache(dry_run))
    memory = check_memory(hp, world, dry_run)
    setup = world.all_or_none(lambda: _check(hp, world, info, base, memory))
    world.require_equal("ranks", {"device": world.device.type} | setup.facts())
    if dry_run and world.rank == 0:
        print("\n".join([setup.summary(hp, world), *setup.notes(hp)]))
    return setup, plan


@oserror_as_config_error
def choose_cache(dry_run: bool = False) -> None:
    """Let PyTorch cache compiled code, which it executes, where no other user can write; its default is in /tmp.

    A dry run compiles nothing, but imports the compiler, which creates the directory: it gets one
    that exists.
    """
    if dry_run:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.sep
    elif "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        cache.mkdir(mode=0o700, exist_ok=True)
        status = cache.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o022
        ):
            problem = "a link, or other users can write to it; set TORCHINDUCTOR_CACHE_DIR to a directory of yours"
            raise ConfigError(f"{cache}: {problem}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


def _check(
    hp: Hyperparameters,
    world: World,
    info: det.ClusterInfo | None,
    base: Base | None,
    memory: str | None,
) -> Setup:
    seed = hp.seed if hp.seed is not None else info.trial.trial_seed if info else DEFAULT_SEED
    mesh = parallelize.mesh_shape(hp, world.size, world.launch.local_size)
    dtype = precision.compute_dtype(hp, world.device)
    batch_size = derive_global_batch_size(hp, world.size)
    data = open_data(hp, hp.vocab_size, hp.max_seq_len, batch_size, seed, world.rank, world.size)
    check_files(data.datasets, world.launch.local_rank, world.launch.local_size)
    if hp.prompt is not None and not (data.tokenizer and data.tokenizer.encode(hp.prompt)):
        raise ConfigError(f"prompt: {hp.prompt!r} has no token in dataset {hp.dataset}'s tokenizer")
    if hp.sample_rate and not data.tokenizer:
        problem = f"sample_rate: {hp.sample_rate}, but dataset {hp.dataset} has no tokenizer; remove sample_rate"
        raise ConfigError(problem)
    if info and "determined" in (hp.tracker or ()):
        problem = "tracker: determined is for runs outside Determined, and this is a trial; remove determined"
        raise ConfigError(problem)
    max_steps = hp.run_length(
        data.train.samples_per_epoch and data.train.samples_per_epoch / batch_size
    )
    hyperparameters = hp.model_dump(mode="json") | {"seed": seed, "max_steps": max_steps or None}
    run_info = RunInfo(
        sharding=hp.sharding,
        total_batch_size=batch_size,
        hyperparameters=hyperparameters,
        model={key: hyperparameters[key] for key in ModelConfig.model_fields},
        loss_scaled=dtype == torch.float16,
        trial_id=info.trial.trial_id if info else None,
        base=base,
        **data.fingerprints(),
    )
    validation_rate = hp.validation_rate or hp.report_rate
    searcher = None
    if info:
        searcher = Searcher.from_config(master.experiment_config(info))
        metrics = ["loss", "perplexity"]
        if data.tokenizer:
            metrics.append("bits_per_byte")
        searcher.check(metrics, max_steps, validation_rate)
    return Setup(
        seed=seed,
        mesh=mesh,
        dtype=dtype,
        data=data,
        global_batch_size=batch_size,
        tokens_per_step=batch_size * hp.max_seq_len,
        max_steps=max_steps,
        validation_rate=validation_rate,
        sample_rate=(hp.sample_rate or validation_rate)
        if data.tokenizer and hp.num_tokens
        else None,
        prompt=data.tokenizer.encode(hp.prompt)
        if data.tokenizer and hp.prompt is not None
        else data.prompt(),
        run_info=run_info,
        searcher=searcher,
        memory=memory,
    )
