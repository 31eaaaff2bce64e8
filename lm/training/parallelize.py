"""Parallelism and memory: float8, recomputation, compilation, offloading, FSDP and initial weights.

All sharding strategies are `fully_shard` over a mesh of R replicas ("replicate") of S shards each
("shard"), W = R x S:

    full-shard         R = 1    S = W  parameters all-gathered in forward and in backward (ZeRO-3)
    grad-shard         R = 1    S = W  all-gathered once, kept until the last backward (ZeRO-2)
    no-shard           R = W    S = 1  data parallelism without sharding (DDP)
    hybrid-full-shard  R = W/g  S = g  full-shard in groups of g ranks, replicated across (HSDP)
    hybrid-grad-shard  R = W/g  S = g  grad-shard in groups of g ranks

`build_model` in fsdp.py applies what stands here, in its order.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lm import seeds
from lm.any_model import AnyModel
from lm.attention import compiler_options
from lm.errors import ConfigError
from lm.launch.console import announce, warn
from lm.program import describe_program
from lm.runtime.world import MeshShape
from lm.shards import local_rows
from lm.training import lora
from lm.training.config import ParallelConfig, count_groups
from lm.training.float8 import convert_to_float8
from lm.training.offload import offload_activations
from lm.training.transfer import UNSCALED, Transfer

OFFLOADS_SELECTED = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether saved tensor hooks can see what selective recomputation saves in blocks that are not
compiled (PyTorch 2.14 and newer); in compiled blocks they always do."""


def check_offload(config: ParallelConfig) -> None:
    """Raise ConfigError if `activation_offload` cannot see what selective recomputation saves."""
    is_selective = config.activation_checkpointing == "selective"
    is_compiled = config.compile is not False  # auto compiles on GPUs, where offloading helps
    if not config.activation_offload or not is_selective or is_compiled or OFFLOADS_SELECTED:
        return
    problem = f"PyTorch {torch.__version__} copies nothing of what selective recomputation"
    problem = f"{problem} saves in blocks that are not compiled (compile: false)"
    remedy = "use compile: true, activation_checkpointing: full, or PyTorch 2.14 or newer"
    raise ConfigError(f"activation_offload: {problem}; {remedy}")


def mesh_shape(config: ParallelConfig, world_size: int, ranks_per_node: int) -> MeshShape:
    """Return the numbers of replicas and of shards; see the table above."""
    if config.sharding == "no-shard":
        return MeshShape(replicate=world_size, shard=1)
    if not config.sharding.startswith("hybrid"):
        return MeshShape(replicate=1, shard=world_size)
    group = config.shard_group_size or ranks_per_node
    n_replicas = count_groups("shard_group_size", group, world_size)
    return MeshShape(replicate=n_replicas, shard=group)


def apply_float8(
    model: AnyModel, float8: str | None, config: ParallelConfig, mesh: DeviceMesh
) -> None:
    """Let the matrix products of the blocks be computed in float8, by torchao's recipe `float8`."""
    if float8 is None:
        return
    shards = None if config.cpu_offload else mesh["shard"].size()
    note = convert_to_float8(model, float8, mesh.device_type == "cuda", shards)
    if note is not None:
        warn(note)


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
    torch.ops.lm.attend_to_spans.default,
    torch.ops.lm.grouped_mm.default,
    torch.ops.lm.four_bit_grouped_mm.default,
}
"""Operators whose outputs selective activation checkpointing saves.

They take most of the time, or, as the maxima for the scales of float8, little memory.
"""
CHOICES = {torch.ops.aten.topk.default}
"""Operators whose outputs blocks with experts save in any case: with other rounding, a token's
experts could be others in backward than in forward. Routers of transformers write into theirs."""


def apply_activation_checkpointing(
    model: AnyModel, mode: Literal["none", "selective", "full"]
) -> None:
    """Let each block recompute in backward what `mode` does not save: with none, it saves all."""
    if mode == "none":
        return
    has_experts = model.config.n_experts is not None
    for block in model.blocks:
        block.forward = partial(checkpoint_function(mode, has_experts), block.forward)


def checkpoint_function(
    mode: Literal["selective", "full"], has_experts: bool
) -> Callable[..., Any]:
    """Return `torch.utils.checkpoint.checkpoint` with the options of `mode`."""
    if mode == "full" and not has_experts:
        return partial(checkpoint, use_reentrant=False)
    saved: set[Any] = set()
    if mode == "selective":
        saved |= SAVE_OPS
        if hasattr(torch.ops.lm, "gated_delta_rule"):  # a class with it has been imported
            saved.add(torch.ops.lm.gated_delta_rule.default)
    if has_experts:
        saved |= CHOICES
    policy = partial(_save_policy, saved)
    options: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    if OFFLOADS_SELECTED:
        options["respect_saved_tensors_hooks"] = True
    return partial(checkpoint, use_reentrant=False, **options)


def _save_policy(
    saved: Collection[Any], _context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op in saved and not _has_dropout(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator drops values at random.

    If its output were saved, recomputation would draw no random numbers for it, and so others than
    forward for what comes after it.
    """
    schema = getattr(op, "_schema", None)  # which flex_attention, without dropout, has not
    if schema is None:
        return False
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("dropout_p", 0.0) > 0


def apply_compile(
    model: AnyModel, config: ParallelConfig, float8: str | None, mesh: DeviceMesh
) -> None:
    """Compile the blocks, of which those of a kind share a graph, and the loss, for all chunks.

    FSDP's hooks are not compiled.
    """
    on_gpu = mesh.device_type == "cuda"
    if not config.compiles(on_gpu, float8):
        return
    if not model.config.examined.compilation:
        warn(f"{model.config.name}: not compiled, as its layers are no graphs")
        return
    options = compiler_options()
    if float8 == "rowwise" and on_gpu:
        # Otherwise RMSNorm before a rowwise layer can give NaN (pytorch#150859).
        options["emulate_precision_casts"] = True
    compile_model(model, options, needed=config.compile is True)


def compile_model(model: AnyModel, options: Mapping[str, Any], *, needed: bool) -> None:
    """Compile the blocks and the loss.

    Args:
        needed: whether a failure of the compiler ends the run.
    """
    announce("compiling in the first step")
    compile_graph = partial(torch.compile, fullgraph=True, options=dict(options))
    if not needed:
        compile_graph = _until_failure(compile_graph)
    compile_blocks(model, compile_graph)
    loss = model.loss
    loss.chunk_cross_entropy = compile_graph(loss.chunk_cross_entropy, dynamic=False)


def _until_failure(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compile_graph`, of whose functions none stays compiled once the compiler has failed.

    A machine may lack what it needs, as a C compiler, and a version of it may have no code for a
    layer on a device: PyTorch 2.11 has none for Mamba 2 on a GPU. A failure in the first backward
    pass, when autograd already runs, is not caught.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # imports the compiler

    failures: list[BackendCompilerFailed] = []

    def compile_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = compile_graph(function, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if failures:
                return function(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                failures.append(error)
                reason = str(error).partition("\n")[0]
                problem = f"PyTorch {torch.__version__} cannot compile this model: {reason}"
                warn(f"{problem}; the run continues without, as with compile: false")
                return function(*args, **kwargs)

        return call

    return compile_function


def compile_blocks(model: AnyModel, compile_graph: Callable[[Any], Any]) -> None:
    """Compile the blocks of `model`, in place."""
    # Blocks of a kind have several graphs: of the first one over frozen embeddings, of validation,
    # and of the lengths of separate samples.
    limit = 64 * len(model.blocks)
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, limit)
    # Graphs that are kept name our operators, whose code and derivatives they do not have.
    torch.compiler.config.cache_key_tag = json.dumps(describe_program(__name__, ()))
    for block in model.blocks:
        block.forward = compile_graph(block.forward)


def apply_activation_offload(model: AnyModel, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """Let host memory hold what the blocks save for backward."""
    if not config.activation_offload:
        return
    for block in model.blocks:
        offload_activations(block, mesh.device_type)


def offload_policy(config: ParallelConfig, mesh: DeviceMesh) -> OffloadPolicy:
    """Return whether FSDP keeps shards in host memory, as `fully_shard` takes it."""
    if config.cpu_offload:
        return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return OffloadPolicy()


@dataclass(frozen=True)
class FSDPUnit:
    """A module to shard, and those of its parameters that are gathered for a call of it."""

    module: nn.Module
    parameters: set[nn.Parameter]
    in_float32: bool = False
    """whether they are computed with in float32, whatever the compute dtype is"""


def divide_into_units(
    model: AnyModel, dtype: torch.dtype | None, layer_wrap: bool
) -> list[FSDPUnit]:
    """Return the units of FSDP from the outside in, of which each parameter is in one.

    1. the model, with the parameters that are in no other unit
    2. the module around all blocks, with those that a class of transformers keeps in float32: if
       blocks gathered them, it would be inside of what is compiled
    3. with `layer_wrap` the embedding, each block, and the head
    """
    in_float32 = model.kept_in_float32(dtype)
    in_model = set(model.parameters()) - in_float32
    inner: list[FSDPUnit] = []
    for module in model.fsdp_units() if layer_wrap else []:
        unit = FSDPUnit(module, set(module.parameters()) - in_float32)
        inner.append(unit)
        in_model -= unit.parameters
    units = [FSDPUnit(model, in_model)]
    if in_float32:
        around_blocks = cast(Any, model).network.base_model
        assert in_float32 <= set(around_blocks.parameters())
        units.append(FSDPUnit(around_blocks, in_float32, in_float32=True))
    return units + inner


def skip_needless_gathers(model: AnyModel) -> None:
    """Let a sharded model gather nothing again that backward has already, or does not need."""
    # Backward starts with the root and the head, so resharding them after forward is of no use.
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False, recurse=False)
    if isinstance(model.head, FSDPModule):
        model.head.set_reshard_after_forward(False, recurse=False)
    # The backward of an embedding needs no weights.
    if isinstance(model.embedding, FSDPModule):
        model.embedding.set_unshard_in_backward(False)


class ReduceInPlace:
    """The reduction of one rank, in the memory of its input: FSDP's interface `ReduceScatter`.

    FSDP allocates an input, into which it copies a unit's gradients, then an output, and copies the
    one to the other: with one rank it calls nothing else. On a GPU the output is allocated on the
    stream of reductions, whose freed memory no other stream can use, 4 bytes a parameter. Here the
    output is the input, of which the copy to itself returns at once.
    """

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._input is None:
            self._input = torch.empty(size, dtype=dtype, device=device)
            return self._input
        output = self._input
        self._input = None
        return output

    def __call__(self, *_args: Any, **_options: Any) -> None:
        raise AssertionError("one rank has nothing to reduce")


def reduce_in_place_on_one_rank(model: AnyModel, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """Let a single rank reduce its gradients in place."""
    # With `sync_each_micro_step`, FSDP adds the output to the gradients of the micro-steps before
    # after it has recorded that the input is free.
    if mesh.size() > 1 or config.sync_each_micro_step:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, ReduceInPlace()))


def start_micro_step(model: nn.Module, config: ParallelConfig, is_last: bool) -> None:
    """Configure FSDP for the next backward: reduce gradients in the last micro-step of a step.

    In the others each rank accumulates gradients locally. With `sync_each_micro_step` every
    micro-step reduce-scatters, and only the last one all-reduces over replicas. Strategies that do
    not reshard after forward keep parameters unsharded until the last backward, which does not
    increase the peak memory: at the end of forward all are unsharded anyway.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last or config.sync_each_micro_step)
    model.set_requires_all_reduce(is_last)
    if not config.reshard_after_forward:
        model.set_reshard_after_backward(is_last)


def set_cublas_workspace() -> None:
    """Let cuBLAS compute the same bits again. PyTorch reads this at the first product only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_deterministic_kernels() -> None:
    """Let the same step compute the same bits again, in this process from now on."""
    set_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    # Nothing reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore


_CHUNK_SIZE = 1 << 20
"""Values per seed: little memory compared with a shard, and few enough calls to be fast."""


@torch.no_grad()
def initialize_parameters(model: AnyModel, seed: int, transfer: Transfer = UNSCALED) -> None:
    """Fill this rank's shard of every trained parameter according to its `InitRule`.

    A parameter is divided along its first dimension into chunks with a seed each. A rank draws the
    chunks that overlap its shard, so the values do not depend on the sharding.
    """
    if model.router_bias is not None:
        model.router_bias.zero_()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue  # the base of adapters, which is read from `init_from`
        rule = lora.adapter_init_rule(name, parameter)
        if rule is None:
            rule = transfer.init_rule(model, name)
        if rule is None:
            continue  # of a class of transformers, which `init_from` or a checkpoint fills
        shard, shard_start = local_rows(parameter)
        if rule.kind == "constant":
            shard.fill_(rule.value)
            continue
        shard_end = shard_start + len(shard)
        row_shape = parameter.shape[1:]
        chunk_rows = max(1, _CHUNK_SIZE // row_shape.numel())
        first_chunk = shard_start - shard_start % chunk_rows
        generator = torch.Generator(shard.device)
        for start in range(first_chunk, shard_end, chunk_rows):
            end = min(start + chunk_rows, len(parameter))
            generator.manual_seed(seeds.derive_seed("init", seed, name, start))
            shape = (end - start, *row_shape)
            if rule.kind == "normal":
                chunk = torch.randn(shape, device=shard.device, generator=generator)
            else:  # uniform in -1 .. 1
                chunk = 2 * torch.rand(shape, device=shard.device, generator=generator) - 1
            chunk *= rule.value
            low = max(start, shard_start)
            high = min(end, shard_end)
            shard[low - shard_start : high - shard_start] = chunk[low - start : high - start]
