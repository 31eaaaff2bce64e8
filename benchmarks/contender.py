"""One contender of `benchmarks.throughput`, as one of its ranks: trains when it is told to, and says how long it took.

    python -m lm.launch benchmarks/contender.py NAME FILE [key=value ...]

Rank 0 reads commands from its standard input, a line each, and answers each with a line of JSON behind `MARK`:
`run N` trains N steps, `profile N FILE` measures the machine's peak and does so under the profiler, the end of input
ends all ranks. The first step is made unasked.
"""

# torchtitan is not among what the project needs:
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

MARK = "#bench "

if __name__ == "__main__" and sys.argv[1] == "ours":
    import fsdp  # noqa: F401  # first: it settles what has to be settled before torch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from lm import config  # noqa: E402
from lm.data.loader import derive_global_batch_size  # noqa: E402
from lm.launch.environment import Launch  # noqa: E402
from lm.metrics import accumulator  # noqa: E402
from lm.runtime.world import World, join_world  # noqa: E402
from model import Block, Transformer  # noqa: E402


class Pacer:
    """Told of every step before it begins; lets the steps of one command through, and then waits for the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = self._left = 1
        self._began = time.perf_counter()
        self._profiler: torch.profiler.profile | None = None
        self._trace = ""
        self._peak_flops: float | None = None

    def __call__(self, _step: int) -> None:
        if self._left:
            self._left -= 1
            return
        device = self._world.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - self._began, "steps": self._steps}
        answer["peak_flops"] = self._peak_flops
        if self._profiler is not None:
            self._profiler.stop()
            if self._world.rank == 0:
                self._profiler.export_chrome_trace(self._trace)
            self._profiler = None
        answer["peak_gib"] = max(self._world.all_gather_object(accumulator.peak_memory_gib(device)))
        if self._world.rank == 0:
            print(MARK + json.dumps(answer), flush=True)
        command = self._world.all_gather_object(sys.stdin.readline().split() if self._world.rank == 0 else [])[0]
        if not command:
            sys.stdout.flush()
            os._exit(0)
        self._steps = int(command[1])
        self._left = self._steps - 1
        if command[0] == "profile":
            self._trace = command[2]
            self._peak_flops = _peak_flops(self._world)
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        self._began = time.perf_counter()


def _peak_flops(world: World) -> float | None:
    """Of all ranks for bfloat16 matrix products: of the data sheet (GPUs), or what they reach here together (CPU)."""
    if world.device.type == "cuda":
        peak = accumulator.peak_flops(world.device, torch.bfloat16)
        return peak and peak * world.size
    size = 2048
    a, b = (torch.randn(size, size).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(20):
        world.all_gather_object(None)
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return sum(world.all_gather_object(2 * size**3 / min(seconds)))


def ours(world: World, hp: config.Hyperparameters, pacer: Pacer) -> None:
    """The product, as a run off the cluster makes it: data, reports and all."""
    from determined import core

    import fsdp
    from lm.determined.context import TorchDistributedContext
    from lm.runtime.run_dir import RunDir

    folder = RunDir("bench")
    storage = str(folder.checkpoints.absolute())
    with core.init(
        distributed=TorchDistributedContext(world.launch, world.control, world.saver, world.node),
        checkpoint_storage=storage,
    ) as context:
        fsdp.run(hp, world, context, None, folder, pacer)


def fsdp1(world: World, hp: config.Hyperparameters, pacer: Pacer, dtype: torch.dtype | None) -> None:
    """The textbook loop: FullyShardedDataParallel, transformer_auto_wrap_policy, autocast, AdamW, on our model."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Transformer(hp).to(world.device),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=world.device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.lr)
    for inputs, targets in _batches(world, hp, pacer):
        with torch.autocast(world.device.type, dtype=dtype, enabled=dtype is not None):
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def transformers(world: World, hp: config.Hyperparameters, pacer: Pacer) -> None:
    """Hugging Face's model of the same shape, with FSDP2 and bfloat16 and no tricks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from lm.hf import families

    # Where no family has the structure, GPT-2 with its activation is nearest.
    near = hp if hp.positions == "rope" else hp.model_copy(update={"norm": "layernorm", "ffn": "gelu", "bias": "all"})
    shape: dict[str, Any] = families.write_config(near, "float32", None) | {"use_cache": False}
    if hp.ffn == "relu":
        shape["activation_function"] = "relu"
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), attn_implementation="sdpa")
    model = made.to(world.device)
    mesh = world.mesh(1, world.size)["shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.model.layers if hp.positions == "rope" else model.transformer.h
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.lr)
    for inputs, targets in _batches(world, hp, pacer):
        model(input_ids=inputs, labels=targets, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def as_llama(hp: config.Hyperparameters) -> config.Hyperparameters:
    """The same width, depth and vocabulary, with the rest as Llama has it."""
    if hp.positions == "rope":
        return hp
    return hp.model_copy(update={"positions": "rope", "norm": "rmsnorm", "ffn": "swiglu", "bias": "none"})


def torchtitan(world: World, hp: config.Hyperparameters, pacer: Pacer) -> None:
    """torchtitan's Llama in bfloat16, `as_llama`; compiled, sharded and clipped by its own code."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.llama3 import Transformer as Llama
    from torchtitan.models.llama3 import TransformerModelArgs, parallelize_llama

    if hp.tie_embeddings or hp.sliding_window or hp.dropout:
        sys.exit("its Llama has neither tied embeddings nor sliding_window nor dropout")
    width = as_llama(hp).ffn_width
    shape = TransformerModelArgs(
        dim=hp.d_model,
        n_layers=hp.n_layers,
        n_heads=hp.n_heads,
        n_kv_heads=hp.kv_heads,
        vocab_size=hp.vocab_size,
        multiple_of=width,  # two thirds of what comes next, rounded up to this
        ffn_dim_multiplier=width / (4 * hp.d_model),
        max_seq_len=hp.max_seq_len,
    )
    job = JobConfig()
    job.compile.enable = True
    job.activation_checkpoint.mode = "none"
    job.training.seq_len = hp.max_seq_len
    parallel_dims.device_type = world.device.type  # else CUDA, also where there is none
    dims = ParallelDims(dp_replicate=1, dp_shard=world.size, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world.size)
    with torch.device("meta"):
        model = Llama(shape)
    parallelize_llama(model, dims, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply while it reduces
            module.set_force_sum_reduction_for_comms(world.device.type == "cpu")
    model.to_empty(device=world.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    measure = build_cross_entropy_loss(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    precision = utils.maybe_enable_amp(dims, job.training.mixed_precision_param, world.device.type)
    for inputs, targets in _batches(world, hp, pacer):
        with precision:
            loss = measure(model(inputs), targets) / targets.numel()
        loss.backward()
        utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


def _batches(world: World, hp: config.Hyperparameters, pacer: Pacer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens, a batch a step, of this rank's share of the whole."""
    share = derive_global_batch_size(hp, world.size) // world.size
    generator = torch.Generator().manual_seed(world.rank)
    step = 0
    while True:
        pacer(step)
        row = torch.randint(hp.vocab_size, (share, hp.max_seq_len + 1), generator=generator).to(world.device)
        yield row[:, :-1].contiguous(), row[:, 1:].contiguous()
        step += 1


CONTENDERS: dict[str, Callable[[World, config.Hyperparameters, Pacer], None]] = {
    "ours": ours,
    "fsdp1-float32": partial(fsdp1, dtype=None),
    "fsdp1-bfloat16": partial(fsdp1, dtype=torch.bfloat16),
    "transformers": transformers,
    "torchtitan": torchtitan,
}


def main() -> None:
    name, file, *overrides = sys.argv[1:]
    launch = Launch.from_env(os.environ)
    hp = config.load(Path(file), overrides)
    week = 604800.0  # an idle contender waits for its turn
    with join_world(launch, week) as world:
        CONTENDERS[name](world, hp.model_copy(update={"collective_timeout": week}), Pacer(world))


if __name__ == "__main__":
    main()
