"""One rank of a contender of `benchmarks.table`: works on command, and takes the time.

    python -m lm.launch benchmarks/contender.py NAME FILE [key=value ...]

Rank 0 reads a number of steps per line from standard input, and answers each with `MARK` and their
seconds. The end of the input ends all ranks. The first step needs no command. A step trains, or
loads a checkpoint, or generates a text.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

MARK = "#bench "

if __name__ == "__main__" and sys.argv[1].startswith(("ours", "load", "save")):
    import fsdp  # noqa: F401  # sets up the environment before torch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from lm.config.hyperparameters import Hyperparameters  # noqa: E402
from lm.config.reading import load_hyperparameters  # noqa: E402
from lm.data.config import derive_global_batch_size  # noqa: E402
from lm.hf import weights  # noqa: E402
from lm.launch.launch import Launch  # noqa: E402
from lm.runtime.rendezvous import join_world  # noqa: E402
from lm.runtime.world import MeshShape, World  # noqa: E402
from lm.training.precision import compute_dtype  # noqa: E402
from model import Block, Transformer  # noqa: E402


class Pacer:
    """Called before every step; waits for the next command after the steps of the last one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps_left = 1
        """of the command, not started"""
        self._start_time = time.perf_counter()

    def __call__(self, _step: int) -> None:
        if self._steps_left == 0:
            self._answer()
            self._steps_left = self._receive_command()
            self._start_time = time.perf_counter()
        self._steps_left -= 1

    def _answer(self) -> None:
        """Print the seconds since the last command."""
        device = self._world.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._world.all_gather_object(None)  # all ranks have taken the steps
        if self._world.rank == 0:
            print(f"{MARK}{time.perf_counter() - self._start_time}", flush=True)

    def _receive_command(self) -> int:
        """Return the number of steps that rank 0 reads; end the process at the end of its input."""
        line = ""
        if self._world.rank == 0:
            line = sys.stdin.readline()
        line = self._world.all_gather_object(line)[0]
        if not line:
            sys.stdout.flush()
            os._exit(0)
        return int(line)


def train_ours(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Train with `fsdp.execute`, including data and reports."""
    from determined import core

    from lm.launch.startup import setup_environment

    setup_environment()
    import fsdp
    from benchmarks.observer import StepObserver
    from lm.checkpoint.cluster import open_store
    from lm.determined.context import TorchDistributedContext
    from lm.runtime.run_dir import RunDir

    run_dir = RunDir("bench")
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    storage = str(run_dir.checkpoints.absolute())
    with core.init(distributed=distributed, checkpoint_storage=storage) as context:
        job = fsdp.Job(hp, None, run_dir)
        store = open_store(context.checkpoint, None, run_dir, world)
        fsdp.execute(job, world, context, store, StepObserver(world, pacer))


def train_fsdp1(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Train our model with FSDP1, transformer_auto_wrap_policy and AdamW."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Transformer(hp.own_model).to(world.device),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=world.device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.optim.lr)
    for inputs, targets in _batches(world, hp, pacer):
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def shard_fully(world: World, hp: Hyperparameters, model: Transformer) -> nn.Module:
    """Shard our model with FSDP2, as its tutorial does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = world.device_mesh(MeshShape(1, world.size))
    dtype = compute_dtype(hp.precision, world.device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def replicate(world: World, hp: Hyperparameters, model: Transformer) -> nn.Module:  # noqa: ARG001
    """Replicate our model with DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    device_ids = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)


def train_loop(
    world: World,
    hp: Hyperparameters,
    pacer: Pacer,
    distribute: Callable[[World, Hyperparameters, Transformer], nn.Module],
) -> None:
    """Train our model in the loop of PyTorch's tutorials: clipped gradients, fused AdamW."""
    torch.manual_seed(0)
    model = distribute(world, hp, Transformer(hp.own_model).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.optim.lr, fused=True)
    for inputs, targets in _batches(world, hp, pacer):
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def build_of_transformers(hp: Hyperparameters) -> Any:
    """Return Hugging Face's model of the same shape, or of the closest one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lm.hf import config_json

    near = hp
    if hp.own_model.positions != "rope":  # the closest family is GPT-2
        near = hp.replace(norm="layernorm", ffn="gelu", bias="all")
    shape = config_json.write_config(near.own_model, "float32")
    if hp.own_model.ffn == "relu":
        shape["activation_function"] = "relu"
    torch.manual_seed(0)
    built = AutoConfig.for_model(**shape)
    return AutoModelForCausalLM.from_config(built, attn_implementation="sdpa")


def train_transformers(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Train Hugging Face's model of the same shape with FSDP2 and the dtype of `hp`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_of_transformers(hp).to(world.device)
    mesh = world.device_mesh(MeshShape(1, world.size))
    dtype = compute_dtype(hp.precision, world.device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    blocks = model.model.layers if hp.own_model.positions == "rope" else model.transformer.h
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.optim.lr)
    for inputs, targets in _batches(world, hp, pacer):
        model(input_ids=inputs, labels=targets, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _batches(
    world: World, hp: Hyperparameters, pacer: Pacer
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's inputs and targets of every step, random tokens."""
    batch_size = derive_global_batch_size(hp.data, world.size) // world.size
    shape = (batch_size, hp.model.max_seq_len + 1)
    generator = torch.Generator().manual_seed(world.rank)
    step = 0
    while True:
        pacer(step)
        tokens = torch.randint(hp.model.vocab_size, shape, generator=generator).to(world.device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        step += 1


def fine_tune_with_trl(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Train adapters with TRL in one process; a step is `batch_size` records, padded alike."""
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import TrainerCallback

    class Paced(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pacer(0)

    datasets.disable_progress_bars()
    arguments = trl.SFTConfig(
        output_dir="trl",
        max_length=hp.model.max_seq_len,
        per_device_train_batch_size=hp.data.batch_size,
        learning_rate=hp.optim.lr,
        max_steps=10**9,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        bf16=compute_dtype(hp.precision, world.device) is torch.bfloat16,
        use_cpu=world.device.type == "cpu",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        str(hp.checkpoint.init_from),
        arguments,
        train_dataset=datasets.Dataset.from_json(str(hp.data.train_data)),
        peft_config=LoraConfig(r=hp.lora.lora_rank or 1, target_modules="all-linear"),
        callbacks=[Paced()],
    )
    trainer.train()


def use_checkpoints(
    world: World, hp: Hyperparameters, pacer: Pacer, *, saves: bool, with_dcp: bool
) -> None:
    """Save or load weights and moments: as a run does, with checksums, or with PyTorch's DCP."""
    import torch.distributed.checkpoint as dcp

    import fsdp
    from lm.checkpoint.manifest import PARTS

    class Using(fsdp.Trainer):
        """Saves the initial state, and saves or loads it again and again."""

        def train(self) -> None:
            self.save_initial_state()
            while True:
                pacer(0)
                if saves:
                    self.save_initial_state()
                else:
                    self.load_newest()

        def save_initial_state(self) -> None:
            if with_dcp:
                dcp.save(dict[str, Any](self.state()), checkpoint_id="dcp")
            else:
                self.save(wait=True)

        def load_newest(self) -> None:
            if with_dcp:
                dcp.load(dict[str, Any](self.state()), checkpoint_id="dcp")
                return
            newest, *_ = self.store.find_candidates(PARTS, remedy="")
            with self.checkpointer.open(newest) as saved:
                saved.read_into(self.state())

    fsdp.Trainer = Using
    train_ours(world, hp, pacer)


def generate(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Continue a prompt by `num_tokens` greedy tokens."""
    from lm import sampling

    torch.manual_seed(0)
    model = Transformer(hp.own_model).to(world.device)
    prompt = _make_prompt(hp)
    while True:
        pacer(0)
        tokens = sampling.generate(
            model,
            prompt.tolist(),
            hp.run.num_tokens,
            device=world.device,
            seed=0,
            settings=sampling.Sampling(temperature=0),
        )
        for _ in tokens:
            pass


def generate_with_transformers(world: World, hp: Hyperparameters, pacer: Pacer) -> None:
    """Continue the prompt by as many greedy tokens with transformers."""
    model = build_of_transformers(hp).to(world.device).eval()
    prompts = _make_prompt(hp)[None].to(world.device)
    while True:
        pacer(0)
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=hp.run.num_tokens,
            max_new_tokens=hp.run.num_tokens,
            pad_token_id=0,
        )


def _make_prompt(hp: Hyperparameters) -> torch.Tensor:
    """Return 32 random tokens, `(32,)`."""
    return torch.randint(hp.model.vocab_size, (32,))


TRAINERS: dict[str, Callable[[World, Hyperparameters, Pacer], None]] = {
    "ours": train_ours,
    "fsdp1": train_fsdp1,
    "loop-fsdp2": partial(train_loop, distribute=shard_fully),
    "loop-ddp": partial(train_loop, distribute=replicate),
    "transformers": train_transformers,
    "trl": fine_tune_with_trl,
    "load": partial(use_checkpoints, saves=False, with_dcp=False),
    "load-dcp": partial(use_checkpoints, saves=False, with_dcp=True),
    "save": partial(use_checkpoints, saves=True, with_dcp=False),
    "save-dcp": partial(use_checkpoints, saves=True, with_dcp=True),
    "generate": generate,
    "generate-transformers": generate_with_transformers,
}


def main() -> None:
    name, file, *overrides = sys.argv[1:]
    launch = Launch.from_env(os.environ)
    week = 604800.0  # seconds, as a contender waits while others train
    hp = load_hyperparameters(Path(file), overrides, weights.model_defaults)
    hp = hp.replace(collective_timeout=week)
    with join_world(launch, week) as world:
        TRAINERS[name](world, hp, Pacer(world))


if __name__ == "__main__":
    main()
