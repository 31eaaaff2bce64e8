"""Activations of a training step: what the modules of a model allocate on fake tensors, which have no memory."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from lm import lora, parallelize
from lm.config import Hyperparameters
from model import AttentionInputs, Transformer, chunk_cross_entropy, loss_chunk


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist while it is active, and their peak."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts:
            pytree.tree_map_only(Tensor, self.add, result)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of `tensor` until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._remove, key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@dataclass(frozen=True)
class Piece:
    """Bytes that a part of the model allocates, above those that exist before its forward pass."""

    held: int
    """after forward: its output, and what it saves for backward"""
    forward: int
    """peak in forward"""
    backward: int
    """peak in backward, with the gradients of its parameters"""
    after: int
    """after backward, without the gradients of its parameters"""


@dataclass(frozen=True)
class Trace:
    """Bytes of activations of a micro-step on one rank, by part of the model."""

    embedding: Piece
    block: Piece
    head: Piece


def trace(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str) -> Trace:
    """Measure a forward and a backward pass of the embedding, a block and the head, with unsharded parameters.

    A block is measured with one and two sequences: its bytes are linear in their number. On a GPU, attention is taken
    to be a fused kernel that saves no mask, and dropout to save none either.
    """
    ends = model_key(hp.model_copy(update={"activation_checkpointing": "none"}))
    run = dtype, device_type, hp.compiles(device_type == "cuda", hp.float8)
    embedding, head = _measure(ends, hp.batch_size, 0, *run)
    n_blocks = 3 if hp.lora_rank else 2  # after a frozen embedding, the first two differ from the others
    one, two = (_measure(model_key(hp), size, n_blocks, *run)[1:-1] for size in (1, 2))
    *first, block = (
        Piece(*(a + (hp.batch_size - 1) * (b - a) for a, b in zip(astuple(of_one), astuple(of_two), strict=True)))
        for of_one, of_two in zip(one, two, strict=True)
    )
    difference = sum(piece.held - block.held for piece in first)
    return Trace(replace(embedding, held=embedding.held + difference), block, head)


def model_key(hp: Hyperparameters) -> str:
    """Return as JSON the hyperparameters that `build_model` reads."""
    include = lora.BLOCK_KEYS | lora.LoraConfig.model_fields.keys() | {"activation_checkpointing"}
    return hp.model_dump_json(include=include)


def build_model(hp: Hyperparameters, n_layers: int, dtype: torch.dtype | None) -> Transformer:
    """Return the model as a rank computes with it, on the meta device, with `n_layers` blocks and not compiled."""
    with torch.device("meta"):
        model = lora.add_adapters(Transformer(hp.model_copy(update={"n_layers": n_layers})), hp, dtype)
        model.to(dtype or torch.float32)
    if hp.activation_checkpointing != "none":
        for block in model.blocks:
            block.forward = partial(parallelize.checkpointing(hp.activation_checkpointing), block.forward)
    return model


@functools.lru_cache(maxsize=256)
def _measure(
    key: str, batch_size: int, n_layers: int, dtype: torch.dtype | None, device_type: str, compiled: bool
) -> list[Piece]:
    """Return the pieces of a model in forward order; `key` is JSON of its hyperparameters."""
    hp, on_gpu = Hyperparameters.model_validate_json(key), device_type == "cuda"
    changes = {"dropout": 0.0, "sliding_window": None} if on_gpu else {}
    changes |= {"activation_checkpointing": "none"} if compiled else {}  # the partitioner decides what is recomputed
    model, live = build_model(hp.model_copy(update=changes), n_layers, dtype), LiveBytes()
    if compiled and n_layers:
        run = _compiled(copy.deepcopy(model.blocks[0]), hp.activation_checkpointing, live)
        for block in model.blocks:
            block.forward = partial(run, block)
    if on_gpu or compiled:
        model.head.chunk_cross_entropy = _fused_loss if compiled else partial(chunk_cross_entropy)
        model.head.loss_chunk = lambda _: loss_chunk(torch.device(device_type), 80 * 2**30)  # of a GPU of 80 GiB
    phases: list[list[int]] = []  # live bytes at the start, and the peak

    def mark(*_: Any) -> None:
        model.zero_grad()
        if phases:
            phases[-1][1] = live.peak
        live.peak = live.now
        phases.append([live.now, 0])

    def mark_forward(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        mark()
        if not (n_layers or output.requires_grad):  # of a frozen embedding: the head follows blocks
            output = output.detach().requires_grad_()
        if output.requires_grad:
            output.register_hook(mark)
        return output

    pieces = [model.embedding, *model.blocks, model.head]
    for piece in pieces:
        piece.register_forward_hook(mark_forward)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model.to_empty(device="cpu")
        live.now = 0  # parameters are not activations
        tokens = torch.zeros(batch_size, hp.max_seq_len, dtype=torch.int64)
        mark()
        model(tokens, tokens).backward()
        if len(phases) == 2 * len(pieces):  # the embedding is frozen, and has no backward pass
            mark()
        mark()
    starts, peaks = zip(*phases, strict=True)

    def measured(i: int) -> Piece:
        backward, before = 2 * len(pieces) - i, starts[i]
        ends = starts[i + 1], peaks[i], peaks[backward], starts[backward + 1]
        return Piece(*(end - before for end in ends))

    return [measured(i) for i in range(len(pieces))]


def _fused_loss(x: Tensor, weight: Tensor, _targets: Tensor, _needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what `chunk_cross_entropy` does when compiled: the logits and their gradients in the compute dtype."""
    logits = F.linear(x, weight)
    grad = torch.empty_like(logits)
    del logits
    return torch.zeros(()), grad @ weight, grad.T @ x if weight.requires_grad else x.new_empty(0)


def _compiled(twin: nn.Module, recompute: str, live: LiveBytes) -> Callable[..., Tensor]:
    """Return a function `(block, x, inputs, cache)` that allocates what the compiled block does.

    PyTorch's partitioner decides what is saved, as in `torch.compile`; see `_FusedGraph` for the rest.

    Args:
        twin: a block to trace.
        recompute: `activation_checkpointing`.
    """
    # These take a second to import.
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    names = [name for name, _ in twin.named_parameters()]

    def forward(x: Tensor, rope: Any, mask: Any, *parameters: Tensor) -> Tensor:
        inputs = AttentionInputs(rope, mask, mask is None and x.shape[1] > 1, False)
        return functional_call(twin, dict(zip(names, parameters, strict=True)), (x, inputs))

    def partition(joint: fx.GraphModule, arguments: Any, **options: Any) -> Any:
        in_backward: set[fx.Node] = set()
        for node in joint.graph.nodes:
            if "tangents" in str(node.target) or in_backward & set(node.all_input_nodes):
                in_backward.add(node)
            elif node.op == "call_function" and recompute != "none":
                source = node.all_input_nodes[0] if node.target is operator.getitem else node
                saves = recompute == "selective" and source.target in parallelize.SAVE_OPS
                policy = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
                node.meta |= {"recompute": policy, "ac_graph_id": 1}
        return min_cut_rematerialization_partition(joint, arguments, **options)

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG001 called by name
        def run(*arguments: Any) -> Any:
            return _FusedGraph(gm, live).run(*arguments)

        return make_boxed_func(run)

    table = select_decomp_table()
    functions: dict[bool, Callable[..., Tensor]] = {}  # by whether x needs a gradient

    def run(block: nn.Module, x: Tensor, inputs: AttentionInputs, _cache: Any) -> Tensor:
        arguments = x, inputs.rope, inputs.mask, *block.parameters()
        if x.requires_grad not in functions:
            function = aot_function(forward, compiler, compiler, partition_fn=partition, decompositions=table)
            live.counts = False
            function(*arguments)  # is compiled in the first call
            live.counts = True
            functions[x.requires_grad] = function
        return functions[x.requires_grad](*arguments)

    return run


class _FusedGraph(fx.Interpreter):
    """Runs a graph and counts the tensors that a fusing compiler materializes.

    Not those whose every use is elementwise or a sum: their values are recomputed where they are used.
    """

    def __init__(self, graph: fx.GraphModule, live: LiveBytes) -> None:
        super().__init__(graph)
        self._live = live

    def run_node(self, n: fx.Node) -> Any:
        counts, self._live.counts = self._live.counts, False
        result = super().run_node(n)
        self._live.counts = counts
        if counts and n.op == "call_function" and not (_is_elementwise(n) and all(map(_fuses, n.users))):
            pytree.tree_map_only(Tensor, self._live.add, result)
        return result


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or "convert_element_type" in str(node.target)


def _fuses(node: fx.Node) -> bool:
    is_view = getattr(node.target, "is_view", False) and bool(node.users)
    is_sum = str(node.target).startswith(("aten.sum", "aten.mean", "aten.var", "aten.amax"))
    return _is_elementwise(node) or is_sum or (is_view and all(map(_fuses, node.users)))
