"""From a model on the meta device to a sharded, initialised one: every transform, in one function, in order.

The five sharding strategies are one path: `fully_shard` over a mesh of R replicas of S shards each.

    full-shard          R = 1    S = W    parameters gathered for forward and again for backward (ZeRO-3)
    grad-shard          R = 1    S = W    gathered once, kept until backward is done (ZeRO-2)
    no-shard            R = W    S = 1    plain data parallelism (DDP)
    hybrid-full-shard   R = W/g  S = g    full-shard inside groups of g ranks, replicas across them (HSDP)
    hybrid-grad-shard   R = W/g  S = g    grad-shard inside the groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lm import seeds
from lm.errors import ConfigError
from model import Transformer


class ParallelConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Literal["full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard"] = Field(
        "full-shard", description="what is split over ranks, and when it is gathered"
    )
    shard_group_size: int | None = Field(
        None, gt=0, description="ranks that share one copy of the model, for hybrid; null = the ranks of a node"
    )
    layer_wrap: bool = Field(True, description="gather layer by layer; false = the whole model at once")
    cpu_offload: bool = Field(False, description="keep parameters and optimizer in host memory")
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none", description="recompute in backward: nothing, all but attention and matrix products, or whole blocks"
    )
    activation_offload: bool = Field(False, description="keep activations saved for backward in host memory")
    compile: Literal["auto"] | bool = Field(
        "auto", description="compile each block and the head; auto = on GPUs, where it pays from the first minute"
    )


def mesh_shape(config: ParallelConfig, ranks: int, ranks_per_node: int) -> tuple[int, int]:
    """(replicas, shards) for `ranks` processes; see the table above.

    Raises:
        ConfigError: groups of `shard_group_size` do not divide the ranks.
    """
    if config.sharding == "no-shard":
        return ranks, 1
    if not config.sharding.startswith("hybrid"):
        return 1, ranks
    group = config.shard_group_size or ranks_per_node
    if ranks % group:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ConfigError(f"shard_group_size: groups of {group} do not divide {ranks} ranks; choose from {fits}")
    return ranks // group, group


def parallelize(
    model: Transformer, config: ParallelConfig, mesh: DeviceMesh, precision: MixedPrecisionPolicy, seed: int
) -> Transformer:
    """Transform `model` (on the meta device) in place, and give every rank its shard of the initial weights.

    Args:
        mesh: dimensions "replicate" and "shard", as `mesh_shape` says.
        seed: of the initial weights, which depend on neither the world size nor the strategy.
    """
    on_gpu = mesh.device_type == "cuda"
    units = model.fsdp_units() if config.layer_wrap else []

    # Each transform wraps what the one before it made, inside out. They replace `forward` and not the
    # module, so that parameter names stay as they are in model.py.
    for block in model.blocks:
        # 1. Recomputation, innermost: what is compiled must contain it.
        if config.activation_checkpointing != "none":
            block.forward = partial(_recompute(config.activation_checkpointing), block.forward)
        if config.activation_offload:
            block.forward = _offload_saved(block)
    # 2. Compilation, per block: one block's code serves all. FSDP's hooks stay outside of it.
    if config.compile is True or (config.compile == "auto" and on_gpu):
        for part in (*model.blocks, model.head):
            part.forward = torch.compile(part.forward, fullgraph=not config.activation_offload)
    # 3. Sharding, unit by unit, then the root with what is left.
    replicas = mesh.size(0)
    shard: Any = partial(
        fully_shard,
        mesh=mesh if replicas > 1 else mesh["shard"],
        mp_policy=precision,
        reshard_after_forward=config.sharding.endswith("full-shard"),
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if config.cpu_offload else OffloadPolicy(),
    )
    for unit in units:
        shard(unit)
    shard(model)
    # 4. Memory and initial values, for this rank's shards alone.
    model.to_empty(device="cpu" if config.cpu_offload else mesh.device_type)
    initialize(model, seed)
    return model


def sync_gradients(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks (the last micro-step) or keeps adding them up."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sync)


# ---- activation checkpointing -------------------------------------------------------------------------


_KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""What selective checkpointing keeps: the operations that take the time. Hopper's attention is the cuDNN one."""


def _keep_expensive(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(mode: Literal["selective", "full"]) -> Callable[..., Tensor]:
    if mode == "full":
        return partial(checkpoint, use_reentrant=False)
    keep = partial(create_selective_checkpoint_contexts, _keep_expensive)
    return partial(checkpoint, use_reentrant=False, context_fn=keep)


def _offload_saved(block: nn.Module) -> Callable[..., Tensor]:
    """`block.forward` with what it saves for backward moved to host memory, its parameters excepted."""
    forward = block.forward

    def offloading(*args: Any, **kwargs: Any) -> Tensor:
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

        def pack(saved: Tensor) -> tuple[torch.device | None, Tensor]:
            if saved.untyped_storage().data_ptr() in weights:  # FSDP frees and refills these itself
                return None, saved
            host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
            return saved.device, host.copy_(saved, non_blocking=True)

        def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
            device, kept = packed
            return kept if device is None else kept.to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return offloading


# ---- initial weights ----------------------------------------------------------------------------------

_CHUNK = 1 << 20
"""Values drawn from one seed: small enough to hold beside a shard, large enough to be fast."""


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill every parameter as `Transformer.init_rule` says, each rank its own rows.

    A parameter is cut into chunks of whole rows, and each chunk drawn from a seed of its own: a rank
    draws the chunks that its rows touch, so the values are the same however they are sharded.
    """
    for name, parameter in model.named_parameters():
        kind, value = model.init_rule(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if kind == "constant":
            local.fill_(value)
            continue
        first = 0
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            first = offset[0]
        for rows, chunk in _chunks(parameter.shape, first, first + len(local), local.device, (seed, name)):
            chunk *= value
            local[rows.start - first : rows.stop - first] = chunk


def _chunks(
    shape: torch.Size, first: int, last: int, device: torch.device, key: tuple[object, ...]
) -> Iterator[tuple[range, Tensor]]:
    """Standard normal values for rows `first` to `last` of a parameter of `shape`, piece by piece."""
    step = max(1, _CHUNK // shape[1:].numel())
    generator = torch.Generator(device)
    for start in range(first - first % step, last, step):
        stop = min(start + step, shape[0])
        generator.manual_seed(seeds.derive("init", *key, start))
        values = torch.randn((stop - start, *shape[1:]), device=device, generator=generator)
        rows = range(max(start, first), min(stop, last))
        yield rows, values[rows.start - start : rows.stop - start]
