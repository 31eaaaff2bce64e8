"""Activations of a training step: what modules allocate on fake tensors, without memory."""

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
from model import Transformer, find_logits_limit


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
class PartActivations:
    """Bytes that a part of the model allocates, above those that exist before its forward pass."""

    held: int
    """after forward: its output, and what it saves for backward"""
    forward: int
    """peak in forward"""
    backward: int
    """peak in backward, with the gradients of its parameters"""
    after: int
    """after backward, without the gradients of its parameters"""

    def extrapolate(self, of_two: PartActivations, batch_size: int) -> PartActivations:
        """Return the bytes for `batch_size` sequences, where `self` is for one.

        Each sequence adds as many bytes as the second one does.
        """
        n_more = batch_size - 1
        return PartActivations(
            held=self.held + n_more * (of_two.held - self.held),
            forward=self.forward + n_more * (of_two.forward - self.forward),
            backward=self.backward + n_more * (of_two.backward - self.backward),
            after=self.after + n_more * (of_two.after - self.after),
        )


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of a micro-step on one rank, by part of the model."""

    embedding: PartActivations
    block: PartActivations
    head: PartActivations


def measure_activations(
    hp: Hyperparameters, dtype: torch.dtype | None, device_type: str
) -> Activations:
    """Measure a forward and a backward pass of the embedding, a block and the head, unsharded.

    A block is measured with one and two sequences: its bytes are linear in their number. On a GPU,
    attention is taken to be a fused kernel that saves no mask, and dropout to save none either.
    """
    is_compiled = hp.compiles(device_type == "cuda", hp.float8)
    measure = partial(_measure, dtype=dtype, device_type=device_type, is_compiled=is_compiled)

    # The blocks' recomputation makes no other embedding and head.
    key_of_ends = _model_key(hp.model_copy(update={"activation_checkpointing": "none"}))
    embedding, head = measure(key_of_ends, hp.batch_size, 0)

    n_blocks = 2
    if hp.lora_rank:
        # The first block after a frozen embedding saves less than the others, as its input needs no
        # gradient.
        n_blocks = 3
    parts_of_one = measure(_model_key(hp), 1, n_blocks)
    parts_of_two = parts_of_one
    if hp.batch_size > 1:
        parts_of_two = measure(_model_key(hp), 2, n_blocks)
    blocks: list[PartActivations] = []
    for index in range(1, 1 + n_blocks):  # between the embedding and the head
        of_one, of_two = parts_of_one[index], parts_of_two[index]
        blocks.append(of_one.extrapolate(of_two, hp.batch_size))

    # The last block is like all others. What the first ones save more or less than it is counted
    # with the embedding.
    block = blocks[-1]
    difference = sum(first.held - block.held for first in blocks[:-1])
    embedding = replace(embedding, held=embedding.held + difference)
    return Activations(embedding, block, head)


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
        checkpoint = parallelize.checkpoint_function(hp.activation_checkpointing)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward)
    return model


def _alike_in_memory(hp: Hyperparameters, on_gpu: bool) -> Hyperparameters:
    """Return `hp` with layers that all take as much memory as those that take the most.

    These rotate queries and keys. On a GPU neither a window nor dropout needs a mask.
    """
    changes: dict[str, Any] = {}
    kind_changes: dict[str, Any] = {"rope": True}
    if on_gpu:
        changes = {"dropout": 0.0, "sliding_window": None}
        kind_changes["sliding_window"] = None
    if hp.layer_pattern is not None:
        kinds = [kind.model_copy(update=kind_changes) for kind in hp.layer_pattern]
        changes["layer_pattern"] = tuple(kinds)
    return hp.model_copy(update=changes)


@functools.lru_cache(maxsize=256)
def _measure(
    key: str,
    batch_size: int,
    n_layers: int,
    dtype: torch.dtype | None,
    device_type: str,
    is_compiled: bool,
) -> list[PartActivations]:
    """Return the activations of the embedding, of `n_layers` blocks and of the head.

    Args:
        key: JSON of the model's hyperparameters.
    """
    hp = Hyperparameters.model_validate_json(key)
    on_gpu = device_type == "cuda"
    hp = _alike_in_memory(hp, on_gpu)
    model = _build_model(hp, n_layers, dtype)
    live = LiveBytes()
    if is_compiled:
        _compile(model, live)
    model.head.logits_limit = find_logits_limit(torch.device(device_type), 80 * 2**30)

    phases = _Phases(model, live)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(batch_size, hp.max_seq_len, dtype=torch.int64)
        if is_compiled:  # in a first pass
            with warnings.catch_warnings():
                # Dynamo reads the gradients of the fake inputs, which are no leaves.
                warnings.simplefilter("ignore", UserWarning)
                model(tokens, tokens).backward()
            phases.clear()
        with live:
            for tensor in (*model.parameters(), tokens):
                live.add(tensor)
            live.now = 0  # they are not activations
            phases.start_next()
            model(tokens, tokens).backward()
            phases.end()
    return phases.list_activations()


@dataclass
class _Phase:
    """A forward or a backward pass of a part of the model."""

    start: int
    """live bytes"""
    peak: int = 0


class _Phases:
    """The passes of the embedding, the blocks and the head in a step, in their order.

    With n parts, phase i is the forward pass of part i, phase n is between forward and backward,
    and phase 2n - i is the backward pass of part i. Phase 2n + 1 starts after the step.
    """

    def __init__(self, model: Transformer, live: LiveBytes) -> None:
        self._model = model
        self._live = live
        self._parts = [model.embedding, *model.blocks, model.head]
        self._phases: list[_Phase] = []
        for part in self._parts:
            part.register_forward_hook(self._after_forward)

    def start_next(self) -> None:
        """End the current phase, and start the next one without gradients of parameters."""
        if self._phases:
            self._phases[-1].peak = self._live.peak
        self._model.zero_grad()
        self._live.peak = self._live.now
        self._phases.append(_Phase(self._live.now))

    def _after_forward(self, _part: nn.Module, _args: Any, output: Tensor) -> Tensor:
        self.start_next()
        has_blocks = len(self._parts) > 2
        if not has_blocks and not output.requires_grad:
            # A frozen embedding's; the head's input needs a gradient, as trained blocks precede it.
            output = output.detach().requires_grad_()
        if output.requires_grad:
            # When its gradient is there, the backward pass of the part starts.
            output.register_hook(lambda _gradient: self.start_next())
        return output

    def end(self) -> None:
        """End the last phase."""
        embedding_backward = 2 * len(self._parts)
        if len(self._phases) == embedding_backward:  # the embedding is frozen, and has none
            self.start_next()
        self.start_next()

    def clear(self) -> None:
        """Forget all phases and gradients."""
        self._model.zero_grad()
        self._phases.clear()

    def list_activations(self) -> list[PartActivations]:
        """Return what each part allocates."""
        n_parts = len(self._parts)
        measured: list[PartActivations] = []
        for part in range(n_parts):
            forward = self._phases[part]
            after_forward = self._phases[part + 1]
            backward = self._phases[2 * n_parts - part]
            after_backward = self._phases[2 * n_parts - part + 1]
            measured.append(
                PartActivations(
                    held=after_forward.start - forward.start,
                    forward=forward.peak - forward.start,
                    backward=backward.peak - forward.start,
                    after=after_backward.start - forward.start,
                )
            )
        return measured


def _compile(model: Transformer, live: LiveBytes) -> None:
    """Compile the blocks and the loss of `model` to code that counts in `live`."""
    torch.compiler.reset()  # it would refuse to compile more than eight models
    # They warn that selective checkpointing is experimental.
    for name in ("torch._dynamo", "torch._higher_order_ops.wrap"):
        logging.getLogger(name).setLevel(logging.ERROR)
    backend = partial(_compile_graph, live)  # one for all blocks, so that they share a graph
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
    model.head.chunk_cross_entropy = _fused_loss


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


def _compile_graph(
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

    def interpret(graph: fx.GraphModule, _example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        # An interpreter keeps its results alive: each call needs a new one.
        return make_boxed_func(lambda *arguments: _FusedGraph(graph, live).run(*arguments))

    backend = aot_autograd(
        fw_compiler=interpret,
        bw_compiler=interpret,
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
        is_fused = _is_elementwise(n) and all(_is_fused_with_input(user) for user in n.users)
        if not is_fused:
            pytree.tree_map_only(Tensor, self._live.add, result)
        return result


def _is_elementwise(node: fx.Node) -> bool:
    if "convert_element_type" in str(node.target):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_fused_with_input(node: fx.Node) -> bool:
    """Return whether the kernel of `node` can compute its elementwise inputs, too."""
    is_view = getattr(node.target, "is_view", False) and len(node.users) > 0
    if is_view:
        return all(_is_fused_with_input(user) for user in node.users)
    is_sum = str(node.target).startswith(("aten.sum", "aten.mean", "aten.var", "aten.amax"))
    return _is_elementwise(node) or is_sum
