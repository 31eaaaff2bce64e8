"""Parallelism and memory: float8, activation checkpointing, compilation, offloading, FSDP and initial weights.

All sharding strategies are `fully_shard` over a mesh of R replicas ("replicate") of S shards each
("shard"), W = R x S:

    full-shard          R = 1    S = W    parameters all-gathered in forward and again in backward (ZeRO-3)
    grad-shard          R = 1    S = W    all-gathered once per step and kept until its last backward (ZeRO-2)
    no-shard            R = W    S = 1    data parallelism without sharding (DDP)
    hybrid-full-shard   R = W/g  S = g    full-shard within groups of g ranks, replicated across groups (HSDP)
    hybrid-grad-shard   R = W/g  S = g    grad-shard within groups of g ranks
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch._functorch import config as partitioner  # until it has a public name
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lm import seeds
from lm.errors import ConfigError
from lm.fields import Logged
from lm.launch.console import announce
from lm.runtime.world import MeshShape
from lm.shards import local_rows
from lm.training import lora
from lm.training.float8 import compute_scales, convert_to_float8
from lm.training.offload import ActivationOffload
from model import Transformer


class ParallelConfig(BaseModel, frozen=True, extra="forbid"):
    """Sharding, recomputation, offload, compilation and determinism."""

    sharding: Logged[
        Literal["full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard"]
    ] = Field(
        "full-shard", description="sharding of parameters, gradients and optimizer state over ranks"
    )
    shard_group_size: Logged[int | None] = Field(
        None,
        gt=0,
        description="ranks per replica for hybrid strategies; null = the ranks of a node",
    )
    layer_wrap: Logged[bool] = Field(
        True, description="all-gather layer by layer; false = the model as one FSDP unit"
    )
    reduce_dtype: Logged[Literal["float32", "bfloat16"]] = Field(
        "float32",
        description="dtype in which ranks reduce gradients; with bfloat16 also of accumulated gradients",
    )
    cpu_offload: Logged[bool] = Field(
        False, description="keep parameters, gradients and optimizer state in host memory"
    )
    activation_checkpointing: Logged[Literal["none", "selective", "full"]] = Field(
        "none",
        description="recompute in backward: nothing, all but attention and matrix products, or full blocks",
        json_schema_extra={"aliases": ["gradient_checkpointing"]},
    )
    activation_offload: Logged[bool] = Field(
        False,
        description="keep what blocks save for backward in host memory, except for the last two blocks",
    )
    sync_each_micro_step: Logged[bool] = Field(
        False,
        description="reduce-scatter in every micro-step, so that a rank accumulates gradients of its shard only",
    )
    compile: Logged[Literal["auto"] | bool] = Field(
        "auto", description="compile the blocks and the loss; auto = on GPUs and for float8"
    )
    deterministic: Logged[bool] = Field(
        False,
        description="use only deterministic kernels, so that runs on GPUs are bit-identical; slower attention",
    )

    @property
    def reshard_after_forward(self) -> bool:
        """Whether parameters are resharded after forward and all-gathered again in backward."""
        return self.sharding.endswith("full-shard")

    def compiles(self, on_gpu: bool, float8: str | None) -> bool:
        """Return whether the blocks and the loss are compiled."""
        return self.compile is True or (self.compile == "auto" and (on_gpu or float8 is not None))


def mesh_shape(config: ParallelConfig, world_size: int, ranks_per_node: int) -> MeshShape:
    """Return the numbers of replicas and of shards; see the table above."""
    if config.sharding == "no-shard":
        return MeshShape(replicate=world_size, shard=1)
    if not config.sharding.startswith("hybrid"):
        return MeshShape(replicate=1, shard=world_size)
    group = config.shard_group_size or ranks_per_node
    if world_size % group:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        problem = (
            f"{world_size} ranks cannot be divided into groups of {group}; use one of {divisors}"
        )
        raise ConfigError(f"shard_group_size: {problem}")
    return MeshShape(replicate=world_size // group, shard=group)


def parallelize(
    model: Transformer,
    config: ParallelConfig,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    seed: int,
    float8: str | None = None,
) -> Transformer:
    """Transform `model`, on the meta device, in place, and initialize this rank's shard of the weights.

    Args:
        mesh: with the dimension "shard" and, if there are several replicas, "replicate"; see
            `World.device_mesh`.
        seed: of the initial weights, which depend neither on the world size nor on the strategy.
        float8: torchao's recipe for the blocks' matrix products.
    """
    on_gpu = mesh.device_type == "cuda"
    if config.deterministic:
        _use_deterministic_kernels()

    # Each transform wraps the one before. They replace `forward` and not the module, so that
    # parameter names stay those of model.py.
    # 1. Float8 matrix products: other modules with the same parameters.
    if float8:
        convert_to_float8(
            model.blocks, float8, on_gpu, 1 if config.cpu_offload else mesh["shard"].size()
        )
    for block in model.blocks:
        # 2. Activation checkpointing, inside the compiled region.
        if config.activation_checkpointing != "none":
            block.forward = partial(checkpointing(config.activation_checkpointing), block.forward)
    # 3. Compilation: all blocks share one graph, all chunks of the loss another. FSDP's hooks stay
    # eager.
    if config.compiles(on_gpu, float8):
        announce("compiling in the first step")
        # By default the partitioner saves a ReLU's mask in addition to its output, because of the
        # view between them.
        partitioner.recompute_views = True
        if float8 == "rowwise" and on_gpu:
            _emulate_precision_casts()
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
        model.head.chunk_cross_entropy = torch.compile(
            model.head.chunk_cross_entropy, fullgraph=True, dynamic=False
        )
    # 4. Activation offloading, outside the compiled region, to see the tensors that it saves.
    if config.activation_offload:
        ActivationOffload(list(model.blocks), mesh.device_type)
    # 5. FSDP, unit by unit, then the root with the remaining parameters. It does not cast inputs:
    # embeddings already have `dtype`, and the rotary angles have to stay float32.
    shard: Any = partial(
        fully_shard,
        mesh=mesh["replicate", "shard"]
        if "replicate" in (mesh.mesh_dim_names or ())
        else mesh["shard"],
        mp_policy=MixedPrecisionPolicy(
            dtype, getattr(torch, config.reduce_dtype), cast_forward_inputs=False
        ),
        reshard_after_forward=config.reshard_after_forward,
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu)
        if config.cpu_offload
        else OffloadPolicy(),
    )
    for unit in model.fsdp_units() if config.layer_wrap else []:
        shard(unit)
    shard(model)
    if (
        float8 == "tensorwise"
    ):  # before FSDP's hook, in which the streams of its all-gathers wait for the scales
        model.register_forward_pre_hook(compute_scales, prepend=True)
    for last in (model, model.head):  # backward starts with them
        if isinstance(last, FSDPModule):
            last.set_reshard_after_forward(False, recurse=False)
    if isinstance(model.embedding, FSDPModule):  # its backward needs no weights
        model.embedding.set_unshard_in_backward(False)
    # 6. Memory and initial values of this rank's shards.
    model.to_empty(device="cpu" if config.cpu_offload else mesh.device_type)
    initialize(model, seed)
    return model


def start_micro_step(model: nn.Module, config: ParallelConfig, is_last: bool) -> None:
    """Configure FSDP for the next backward: accumulate gradients locally, and reduce them in the last micro-step.

    With `sync_each_micro_step` every micro-step reduce-scatters, and only the last one all-reduces
    over replicas. Strategies that do not reshard after forward keep parameters unsharded until the
    last backward, which does not increase the peak memory: at the end of forward all are unsharded
    anyway.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last or config.sync_each_micro_step)
    model.set_requires_all_reduce(is_last)
    if not config.reshard_after_forward:
        model.set_reshard_after_backward(is_last)


# PyTorch documents these two options of its compiler, but has no public name for where they are set
# for all graphs. The import takes 1.5 s.


def _emulate_precision_casts() -> None:
    from torch._inductor import config as inductor

    inductor.emulate_precision_casts = (
        True  # otherwise RMSNorm before a rowwise layer can give NaN (pytorch#150859)
    )


def _use_deterministic_kernels() -> None:
    from torch._inductor import config as inductor

    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # which cuBLAS reads at its first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore  # nothing reads it
    inductor.deterministic = True  # does not choose among kernels by their speed, which varies


SAVE_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.max.default,
    torch.ops.aten.amax.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Operators whose outputs selective activation checkpointing saves: they take most of the time, or, as the maxima for
the scales of float8, little memory."""


def _save_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointing(mode: Literal["selective", "full"]) -> Callable[..., Tensor]:
    """Return a function that calls its first argument with the others and recomputes in backward what `mode` says."""
    if mode == "full":
        return partial(checkpoint, use_reentrant=False)
    context_fn = partial(create_selective_checkpoint_contexts, _save_policy)
    options: dict[str, Any] = {}
    if (
        torch.__version__ >= "2.15"
    ):  # before that, `activation_offload` does not see what `_save_policy` saves
        options["respect_saved_tensors_hooks"] = True
    return partial(checkpoint, use_reentrant=False, context_fn=context_fn, **options)


_CHUNK_SIZE = 1 << 20
"""Values per seed: little memory compared with a shard, and few enough calls to be fast."""


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill this rank's shard of every trained parameter according to `Transformer.init_rule` and `lora.init_rule`.

    A parameter is divided along its first dimension into chunks with a seed each. A rank draws the
    chunks that overlap its shard, so the values do not depend on the sharding.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue  # the base of adapters, which is read from `init_from`
        kind, value = lora.init_rule(name, parameter) or model.init_rule(name)
        local, offset = local_rows(parameter)
        if kind == "constant":
            local.fill_(value)
            continue
        end = offset + len(local)
        size = max(1, _CHUNK_SIZE // parameter.shape[1:].numel())
        generator = torch.Generator(local.device)
        for start in range(offset - offset % size, end, size):
            stop = min(start + size, len(parameter))
            generator.manual_seed(seeds.derive_seed("init", seed, name, start))
            shape = stop - start, *parameter.shape[1:]
            if kind == "normal":
                chunk = torch.randn(shape, device=local.device, generator=generator)
            else:
                chunk = 2 * torch.rand(shape, device=local.device, generator=generator) - 1
            chunk *= value
            low, high = max(start, offset), min(stop, end)
            local[low - offset : high - offset] = chunk[low - start : high - start]
