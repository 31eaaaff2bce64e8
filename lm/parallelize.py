"""From a model on the meta device to a sharded, initialised one: every transform, in one function, in order.

The five sharding strategies are one path: `fully_shard` over a mesh of R replicas of S shards each.

    full-shard          R = 1    S = W    parameters gathered for forward and again for backward (ZeRO-3)
    grad-shard          R = 1    S = W    gathered once a step, kept until its last backward (ZeRO-2)
    no-shard            R = W    S = 1    plain data parallelism (DDP)
    hybrid-full-shard   R = W/g  S = g    full-shard inside groups of g ranks, replicas across them (HSDP)
    hybrid-grad-shard   R = W/g  S = g    grad-shard inside the groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch._functorch import config as partitioner
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lm import seeds
from lm.errors import ConfigError
from lm.precision import mixed_precision_policy
from model import LOSS_CHUNK, ModelConfig, Transformer


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
    sync_each_micro_step: bool = Field(
        False, description="reduce over shards in every micro-step, so that each rank accumulates its shard alone"
    )
    compile: Literal["auto"] | bool = Field(
        "auto", description="compile each block and the loss; auto = on GPUs, where it pays early, and for float8"
    )

    @property
    def reshard_after_forward(self) -> bool:
        """Whether what is gathered for forward is freed behind it, and gathered again for backward."""
        return self.sharding.endswith("full-shard")


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


def memory_bytes(model: ModelConfig, shards: int, batch_size: int, seq_len: int) -> dict[str, int]:
    """Estimate what a GPU needs to train in a 16-bit dtype with activation_checkpointing: full, in bytes by part.

    state: parameters, gradients and AdamW's two moments in float32, 16 bytes a parameter over all `shards`.
    gathered: 16-bit copies, of all where there is one shard, else of two units, the one in use and the next;
        and a unit's gradients, in 16 bits and on their way to other ranks in float32.
    activations: every block's input, and the larger of what one block saves while it is recomputed and a chunk
        of the logits with their loss (16 bits, and twice float32).
    """
    counts = model.parameter_counts()
    unit = max(counts["blocks"] // model.n_layers, counts["embedding"] + counts["positions"], counts["head"])
    copies = model.n_parameters if shards == 1 else 2 * unit
    d, f, kv = model.d_model, model.ffn_width, model.kv_heads * model.head_dim
    block = 2 * (4 * d + 2 * kv + {"swiglu": 4, "gelu": 2, "relu": 1}[model.ffn] * f)
    block += (16 if model.norm == "rmsnorm" else 4) * d  # PyTorch's RMSNorm keeps its input and output in float32
    block += 2 * (2 * d + kv) if model.positions == "rope" else 0
    tokens = batch_size * seq_len
    logits = 10 * min(tokens * model.vocab_size, LOSS_CHUNK["cuda"])
    return {
        "state": 16 * model.n_parameters // shards,
        "gathered": 2 * copies + 6 * unit,
        "activations": 2 * d * model.n_layers * tokens + max(block * tokens, logits),
    }


def attention_kernel(model: ModelConfig, document_ids: bool, dtype: torch.dtype | None, device: torch.device) -> str:
    """What computes attention in training: "FlexAttention", or the one that PyTorch chooses for these shapes, e.g.
    "cudnn attention", "flash attention", "math".

    Args:
        documents: whether rows hold several, which must not see each other.
    """
    length = model.max_seq_len
    masked = document_ids or (model.sliding_window or length) < length
    if masked and model.can_use_flex(device, training=True):
        return "FlexAttention"
    repeated = model.needs_kv_repeat(device, dtype or torch.float32, masked)
    kv_heads = model.n_heads if repeated else model.kv_heads
    q, k = (
        torch.empty(1, heads, length, model.head_dim, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.n_heads, kv_heads)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=device) if masked else None
    grouped = kv_heads != model.n_heads
    choice = torch._fused_sdp_choice(q, k, k, mask, model.dropout, not masked, enable_gqa=grouped)
    return SDPBackend(choice).name.lower().replace("_", " ")


def parallelize(
    model: Transformer,
    config: ParallelConfig,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    seed: int,
    float8: str | None = None,
) -> Transformer:
    """Transform `model` (on the meta device) in place, and give every rank its shard of the initial weights.

    Args:
        float8: torchao's recipe for the blocks' matrix products, "tensorwise" or "rowwise"; None = none.
        mesh: dimensions "replicate" and "shard", as `mesh_shape` says.
        dtype: of the compute; None = float32.
        seed: of the initial weights, which depend on neither the world size nor the strategy.
    """
    on_gpu = mesh.device_type == "cuda"
    units = model.fsdp_units() if config.layer_wrap else []

    # Each transform wraps what the one before it made, inside out. They replace `forward` and not the
    # module, so that parameter names stay as they are in model.py.
    # 1. Matrix products in 8 bits: other modules with the same parameters.
    if float8:
        _use_float8(model.blocks, float8)
    for block in model.blocks:
        # 2. Recomputation, innermost: what is compiled must contain it.
        if config.activation_checkpointing != "none":
            block.forward = partial(_recompute(config.activation_checkpointing), block.forward)
    # 3. Compilation: one block's code serves all, one chunk's the whole loss. FSDP's hooks stay outside of it.
    if config.compile is True or (config.compile == "auto" and (on_gpu or float8)):
        # Left alone, the partitioner keeps a ReLU's mask beside the output it follows from, for the view in between.
        partitioner.recompute_views = True
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
        model.head.chunk_cross_entropy = torch.compile(model.head.chunk_cross_entropy, fullgraph=True, dynamic=False)
    # 4. Offloading, around what is compiled: it sees what that saves.
    if config.activation_offload:
        for block in model.blocks:
            block.forward = _offload_saved(block)
    # 5. Sharding, unit by unit, then the root with what is left.
    replicas = mesh.size(0)
    shard: Any = partial(
        fully_shard,
        mesh=mesh if replicas > 1 else mesh["shard"],
        mp_policy=mixed_precision_policy(dtype),
        reshard_after_forward=config.reshard_after_forward,
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if config.cpu_offload else OffloadPolicy(),
    )
    for unit in units:
        shard(unit)
    shard(model)
    for last in (model, model.head):  # backward begins where forward ends: with the head, and what the root holds
        if isinstance(last, FSDPModule):
            last.set_reshard_after_forward(False, recurse=False)
    if isinstance(model.embedding, FSDPModule):  # its backward looks at ids, not at weights
        model.embedding.set_unshard_in_backward(False)
    # 6. Memory and initial values, for this rank's shards alone.
    model.to_empty(device="cpu" if config.cpu_offload else mesh.device_type)
    initialize(model, seed)
    return model


def begin_micro_step(model: nn.Module, config: ParallelConfig, last: bool) -> None:
    """Tell FSDP what the next backward does: the last micro-step reduces gradients over ranks, others add them up.

    With `sync_each_micro_step` each reduces them over shards, and the last one over replicas, too. Strategies that do
    not reshard after forward keep parameters gathered until the last backward: that takes no more at once, since
    all are gathered where a forward ends anyway.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or config.sync_each_micro_step)
    model.set_requires_all_reduce(last)
    if not config.reshard_after_forward:
        model.set_reshard_after_backward(last)


def _use_float8(blocks: nn.Module, recipe: str) -> None:
    """Let the linear layers in `blocks` multiply in 8 bits, where both widths are the multiples of 16 that it takes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, _name: str) -> bool:
        return isinstance(module, nn.Linear) and module.in_features % 16 == 0 == module.out_features % 16

    convert_to_float8_training(blocks, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=fits)


# ---- activation checkpointing -------------------------------------------------------------------------


_SAVE_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""What selective checkpointing keeps: the operations that take the time. Hopper's attention is the cuDNN one."""


def _save_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(mode: Literal["selective", "full"]) -> Callable[..., Tensor]:
    keep = {"context_fn": partial(create_selective_checkpoint_contexts, _save_policy)} if mode == "selective" else {}
    return partial(checkpoint, use_reentrant=False, **keep)


class Packed(NamedTuple):
    """A saved tensor: itself, or its copy in host memory and what it takes to have it back."""

    kept: Tensor
    device: torch.device | None
    strides: tuple[int, ...]


def _offload_saved(block: nn.Module) -> Callable[..., Tensor]:
    """`block.forward` with what it saves for backward moved to host memory, its parameters excepted."""
    forward = block.forward

    def offloading(*args: Any, **kwargs: Any) -> Tensor:
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

        def pack(saved: Tensor) -> Packed:
            # FSDP frees and refills weights itself; what is expanded is small.
            if saved.untyped_storage().data_ptr() in weights or 0 in saved.stride():
                return Packed(saved, None, ())
            host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
            return Packed(host.copy_(saved, non_blocking=True), saved.device, saved.stride())

        def unpack(packed: Packed) -> Tensor:
            kept, device, strides = packed
            if device is None:
                return kept
            # Compiled code asserts the strides of what it saved; a view's have gaps, which the host does without.
            back = torch.empty_strided(kept.shape, strides, dtype=kept.dtype, device=device)
            return back.copy_(kept, non_blocking=True)

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
        generator.manual_seed(seeds.derive_seed("init", *key, start))
        values = torch.randn((stop - start, *shape[1:]), device=device, generator=generator)
        rows = range(max(start, first), min(stop, last))
        yield rows, values[rows.start - start : rows.stop - start]
