"""Activations of a training step: what a model's modules allocate on fake tensors without memory."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import Hyperparameters
from lm.training import lora, parallelize
from model import Transformer, chunk_cross_entropy, loss_chunk


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist while it is active, and their peak."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.counts = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled code run in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts:
            pytree.tree_map_only(Tensor, self.add, result)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of `tensor` until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
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

    def extrapolate(self, two: Piece, batch_size: int) -> Piece:
        """Return the bytes for `batch_size` sequences, from those for one and for `two`."""
        n_more = batch_size - 1
        return Piece(
            held=self.held + n_more * (two.held - self.held),
            forward=self.forward + n_more * (two.forward - self.forward),
            backward=self.backward + n_more * (two.backward - self.backward),
            after=self.after + n_more * (two.after - self.after),
        )


@dataclass(frozen=True)
class Trace:
    """Bytes of activations of a micro-step on one rank, by part of the model."""

    embedding: Piece
    block: Piece
    head: Piece


def trace(hp: Hyperparameters, dtype: torch.dtype | None, device_type: str) -> Trace:
    """Measure a forward and a backward pass of the embedding, a block and the head, unsharded.

    A block is measured with one and two sequences: its bytes are linear in their number. On a GPU,
    attention is taken to be a fused kernel that saves no mask, and dropout to save none either.
    """
    is_compiled = hp.compiles(device_type == "cuda", hp.float8)
    measure = partial(_measure, dtype=dtype, device_type=device_type, is_compiled=is_compiled)
    # The blocks' recomputation makes no other embedding and head.
    ends = _model_key(hp.model_copy(update={"activation_checkpointing": "none"}))
    embedding, head = measure(ends, hp.batch_size, 0)
    # The first block after a frozen embedding saves less than the others, as its input needs no
    # gradient.
    n_blocks = 3 if hp.lora_rank else 2
    one = measure(_model_key(hp), 1, n_blocks)[1:-1]
    two = one
    if hp.batch_size > 1:
        two = measure(_model_key(hp), 2, n_blocks)[1:-1]
    *first, block = (
        of_one.extrapolate(of_two, hp.batch_size) for of_one, of_two in zip(one, two, strict=True)
    )
    difference = sum(piece.held - block.held for piece in first)
    return Trace(replace(embedding, held=embedding.held + difference), block, head)


def _model_key(hp: Hyperparameters) -> str:
    """Return as JSON the hyperparameters that `_build_model` reads."""
    include = lora.BLOCK_KEYS | lora.LoraConfig.model_fields.keys() | {"activation_checkpointing"}
    return hp.model_dump_json(include=include)


def _build_model(hp: Hyperparameters, n_layers: int, dtype: torch.dtype | None) -> Transformer:
    """Return the model as a rank computes with it, on the meta device, not compiled."""
    with torch.device("meta"):
        model = Transformer(hp.model_copy(update={"n_layers": n_layers}))
        model = lora.add_adapters(model, hp, dtype)
        model.to(dtype or torch.float32)
    if hp.activation_checkpointing != "none":
        for block in model.blocks:
            block.forward = partial(
                parallelize.checkpoint_function(hp.activation_checkpointing), block.forward
            )
    return model


@dataclass
class _Phase:
    """Live bytes from the start of a module's forward or backward pass to the next."""

    start: int
    peak: int = 0


@functools.lru_cache(maxsize=256)
def _measure(
    key: str,
    batch_size: int,
    n_layers: int,
    dtype: torch.dtype | None,
    device_type: str,
    is_compiled: bool,
) -> list[Piece]:
    """Return the pieces of a model in forward order; `key` is JSON of its hyperparameters."""
    hp = Hyperparameters.model_validate_json(key)
    on_gpu = device_type == "cuda"
    if on_gpu:
        hp = hp.model_copy(update={"dropout": 0.0, "sliding_window": None})
    model = _build_model(hp, n_layers, dtype)
    live = LiveBytes()
    if is_compiled:
        torch.compiler.reset()  # it would refuse to compile more than eight models
        # It warns that selective checkpointing is experimental.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        backend = partial(_fuse, live)  # of all blocks, so that they share a graph
        for block in model.blocks:
            block.forward = torch.compile(
                block.forward, fullgraph=True, dynamic=False, backend=backend
            )
        model.head.chunk_cross_entropy = _fused_loss
    elif on_gpu:
        # The head computes the loss in chunks if this is another function.
        model.head.chunk_cross_entropy = partial(chunk_cross_entropy)
    if is_compiled or on_gpu:
        gpu_memory = 80 * 2**30
        model.head.loss_chunk = lambda _: loss_chunk(torch.device(device_type), gpu_memory)

    pieces = [model.embedding, *model.blocks, model.head]
    phases: list[_Phase] = []

    def start_phase(*_: Any) -> None:
        model.zero_grad()
        if phases:
            phases[-1].peak = live.peak
        live.peak = live.now
        phases.append(_Phase(live.now))

    def after_forward(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        start_phase()
        if n_layers == 0 and not output.requires_grad:
            # A frozen embedding's; the head's input needs a gradient, as trained blocks precede it.
            output = output.detach().requires_grad_()
        if output.requires_grad:
            output.register_hook(start_phase)
        return output

    for piece in pieces:
        piece.register_forward_hook(after_forward)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(batch_size, hp.max_seq_len, dtype=torch.int64)
        if is_compiled:  # in a first pass
            with warnings.catch_warnings():
                # Dynamo reads the gradients of the fake inputs, which are no leaves.
                warnings.simplefilter("ignore", UserWarning)
                model(tokens, tokens).backward()
            model.zero_grad()
            phases.clear()
        with live:
            for tensor in (*model.parameters(), tokens):
                live.add(tensor)
            live.now = 0  # they are not activations
            start_phase()
            model(tokens, tokens).backward()
            if len(phases) == 2 * len(pieces):  # the embedding is frozen, and has no backward pass
                start_phase()
            start_phase()

    found = []
    for index in range(len(pieces)):
        before = phases[index].start
        backward = 2 * len(pieces) - index
        found.append(
            Piece(
                held=phases[index + 1].start - before,
                forward=phases[index].peak - before,
                backward=phases[backward].peak - before,
                after=phases[backward + 1].start - before,
            )
        )
    return found


def _fused_loss(
    x: Tensor, weight: Tensor, _targets: Tensor, _needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate as compiled `chunk_cross_entropy`: the logits and gradients in the compute dtype."""
    logits = F.linear(x, weight)
    grad = torch.empty_like(logits)
    del logits
    weight_grad = x.new_empty(0)
    if weight.requires_grad:
        weight_grad = grad.T @ x
    return torch.zeros(()), grad @ weight, weight_grad


def _fuse(
    live: LiveBytes, module: fx.GraphModule, example_inputs: Sequence[Tensor]
) -> Callable[..., Any]:
    """Compile a graph that counts in `live` the tensors that PyTorch's compiler would materialize.

    As there, operators are decomposed, and the partitioner decides what is saved for backward and
    what is recomputed.
    """
    # These take a second to import.
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(
        graph: fx.GraphModule, _example_inputs: Sequence[Tensor]
    ) -> Callable[..., Any]:
        return make_boxed_func(lambda *arguments: _FusedGraph(graph, live).run(*arguments))

    backend = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return backend(module, example_inputs)


class _FusedGraph(fx.Interpreter):
    """Runs a graph and counts the tensors that a fusing compiler materializes.

    Not those whose every use is elementwise or a sum: their values are recomputed where they are
    used.
    """

    def __init__(self, graph: fx.GraphModule, live: LiveBytes) -> None:
        super().__init__(graph)
        self._live = live

    def run_node(self, n: fx.Node) -> Any:
        self._live.counts = False
        result = super().run_node(n)
        self._live.counts = True
        if n.op != "call_function":
            return result
        if not _is_elementwise(n) or not all(map(_fuses, n.users)):
            pytree.tree_map_only(Tensor, self._live.add, result)
        return result


def _is_elementwise(node: fx.Node) -> bool:
    if "convert_element_type" in str(node.target):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _fuses(node: fx.Node) -> bool:
    is_view = getattr(node.target, "is_view", False) and len(node.users) > 0
    if is_view:
        return all(map(_fuses, node.users))
    is_sum = str(node.target).startswith(("aten.sum", "aten.mean", "aten.var", "aten.amax"))
    return _is_elementwise(node) or is_sum
