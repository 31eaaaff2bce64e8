"""Memory of a training step: the run's own step on fake tensors, and what exists at its peak.

Fake tensors have shapes, dtypes and storages of a size, but no values. One rank of N takes a step
of the run's model, sharded by `fully_shard` over a process group that does not communicate, while
`LiveBytes` counts. So everything that allocates is counted, and nothing about FSDP, recomputation
or an optimizer is said here again. Blocks are not compiled: compiled ones need less.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

# Until there is a public name for a process group that does not communicate.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp import build_model
from lm import delta_rule
from lm.any_model import AnyModel, new_model
from lm.config.hyperparameters import Hyperparameters
from lm.context import ContextGroup, new_context_group
from lm.data.loader import MicroBatch, PairBatch
from lm.errors import ConfigError
from lm.memory import Ranks, count_micro_steps
from lm.objectives.dpo import DPO
from lm.objectives.objective import NextToken, Objective
from lm.runtime.world import make_mesh
from lm.training import four_bits, optim, parallelize, precision
from lm.transformers_config import N_LAYERS, TransformersConfig
from lm.transformers_model import one_line, quiet
from model import ModelConfig, find_logits_limit

PARAMETERS = "parameters"
MOMENTS = "moments"
GRADIENTS = "gradients"
GATHERED = "gathered"
ACTIVATIONS = "activations"
HOST = "host"
"""the state that is offloaded, and takes no memory of a GPU"""
COPIES = "copies"
"""of activations, in host memory"""

FORWARD = "the forward pass"
BACKWARD_OF_LAST = "backward through the last layers"
BACKWARD_OF_FIRST = "backward through the first layers"
OPTIMIZER = "the step of the optimizer"
"""Phases of a step. Blocks in the middle add the same bytes each to what exists in any of them."""

Memory = Mapping[str, int]
"""bytes of a rank at one instant, by part"""


def device_bytes(memory: Memory) -> int:
    """Return the bytes on the device."""
    return sum(n_bytes for part, n_bytes in memory.items() if part not in (HOST, COPIES))


def host_bytes(peaks: Mapping[str, Memory]) -> int:
    """Return the bytes in host memory, of which its allocator keeps those of copies."""
    state = max(memory.get(HOST, 0) for memory in peaks.values())
    return state + max(memory.get(COPIES, 0) for memory in peaks.values())


_PARTS_OF_OPERANDS = {
    "fsdp.all_gather_copy_in.default": GATHERED,
    "c10d._allgather_base_.default": GATHERED,
    "fsdp.chunk_cat.default": GRADIENTS,
    "c10d.allreduce_.default": GRADIENTS,
}
"""What FSDP's operators and its collectives are called with."""
_COMPUTED_BY = {**delta_rule.COMPUTED_BY, **four_bits.COMPUTED_BY}
"""What our operators run, by operator."""


class LiveBytes(TorchDispatchMode):
    """Counts by part the bytes of tensors that exist while it is active, at each phase's peak."""

    def __init__(self, *, offloads_state: bool) -> None:
        super().__init__()
        self.peaks: dict[str, Memory] = {}
        """what exists at the peak of each phase"""
        self._now: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, str] = {}
        self._phase: str | None = None
        self._part_of_shards = HOST if offloads_state else GRADIENTS
        """of reduced gradients"""

    def start_phase(self, name: str) -> None:
        """Count what follows as phase `name`, which can be entered again."""
        self._phase = name
        self._see_peak()

    def add(self, tensor: Tensor, part: str = ACTIVATIONS) -> None:
        """Count the storage of `tensor` as `part` until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._remove, key)
            self._sizes[key] = 0
            self._parts[key] = part
        self._resize(key, storage.nbytes())

    def move_rest(self, part: str) -> None:
        """Count as `part` all activations that exist now."""
        for key in self._sizes:
            self._move_storage(key, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = _COMPUTED_BY.get(func)
        if inside is None:
            result = func(*args, **kwargs)
        else:
            with self:  # this counts what exists meanwhile
                result = inside(*args, **kwargs)
        part = ACTIVATIONS
        if func is torch.ops.aten.empty_like.default and "device" in kwargs:
            part = COPIES  # only the offloading of activations says on which device
        if func is torch.ops.aten._to_copy.default and self._part_of(args[0]) == PARAMETERS:
            part = GATHERED  # converted for the gather
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf, part)
        self._sort_by_use(func, args, kwargs)
        return result

    def _sort_by_use(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count the operands of FSDP's operators as the part that they belong to."""
        if func is torch.ops.aten.copy_.default:
            self._follow_copy(*args[:2])
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self._move(args[0], self._part_of_shards)
        elif str(func) in _PARTS_OF_OPERANDS:
            for operand in tree_leaves((args, kwargs)):
                if isinstance(operand, Tensor):
                    self._move(operand, _PARTS_OF_OPERANDS[str(func)])

    def _part_of(self, tensor: Tensor) -> str | None:
        """Return the part that `tensor` belongs to; of what the optimizer computes with, None."""
        if self._phase == OPTIMIZER:
            return None
        return self._parts.get(tensor.untyped_storage()._cdata)

    def _follow_copy(self, target: Tensor, source: Tensor) -> None:
        """Sort what FSDP copies to, where there are no other ranks to gather from or scatter to."""
        part = self._part_of(source)
        if part == GRADIENTS:
            self._move(target, self._part_of_shards)
        elif part in (PARAMETERS, GATHERED):
            self._move(target, GATHERED)

    def _move(self, tensor: Tensor, part: str) -> None:
        self._move_storage(tensor.untyped_storage()._cdata, part)

    def _move_storage(self, key: int, part: str) -> None:
        """Count a storage as `part` from now on, if it is counted as an activation: the rest."""
        if self._parts[key] == ACTIVATIONS:
            self._parts[key] = part
            self._now[ACTIVATIONS] -= self._sizes[key]
            self._now[part] += self._sizes[key]
            self._see_peak()

    def _resize(self, key: int, size: int) -> None:
        change = size - self._sizes[key]
        self._sizes[key] = size
        self._now[self._parts[key]] += change
        if change > 0:
            self._see_peak()

    def _remove(self, key: int) -> None:
        self._now[self._parts.pop(key)] -= self._sizes.pop(key)

    def _see_peak(self) -> None:
        if self._phase is None:
            return
        peak = self.peaks.get(self._phase, {})
        copies = max(self._now[COPIES], peak.get(COPIES, 0))
        if device_bytes(self._now) >= device_bytes(peak):
            peak = dict(self._now)
        self.peaks[self._phase] = {**peak, COPIES: copies}

    @contextmanager
    def seeing_resized(self) -> Iterator[None]:
        """Count what FSDP frees and allocates in place: the unsharded parameters."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._move_storage(storage._cdata, GATHERED)
                self._resize(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize


def measure_step(hp: Hyperparameters, ranks: Ranks) -> dict[str, Memory]:
    """Return what exists on rank 0 at the peaks of the phases of a step.

    Takes steps of models of a few blocks, if their kinds repeat: the peak of a phase is linear in
    their number. Needs a process without a process group.

    Raises:
        ConfigError: the ranks cannot be divided into shard groups, or the global batch into
            micro-batches.
        NotPlannedError: the class of transformers computes with values that fake tensors lack.
    """
    if isinstance(hp.model, ModelConfig):
        return _measure_few_blocks(hp, ranks, [()] * hp.model.n_layers)
    try:
        with quiet(logging.ERROR):  # PyTorch's own, of operators without a fake kernel
            return _measure_few_blocks(hp, ranks, _find_kinds(hp.model))
    except ConfigError:
        raise
    except Exception as error:  # of foreign code
        problem = f"{hp.model.model_type} takes no step on fake tensors ({one_line(error)})"
        raise NotPlannedError(f"{problem}: what it needs is not known before it runs") from None


def _measure_few_blocks(
    hp: Hyperparameters, ranks: Ranks, kinds: Sequence[Any]
) -> dict[str, Memory]:
    """Return what `measure_step` does.

    Args:
        kinds: of the blocks, in forward order.
    """
    n_blocks = len(kinds)
    period = _find_period(kinds)
    # Of three, what is in use at both ends overlaps. The last block is of the same kind as of all.
    few = 4 + (n_blocks - 4) % period
    more = few + period
    if n_blocks <= more:
        return take_step(hp, ranks)
    of_few = take_step(replace(hp, model=hp.model.with_layers(few)), ranks)
    of_more = take_step(replace(hp, model=hp.model.with_layers(more)), ranks)
    times = (n_blocks - few) // period
    peaks: dict[str, Memory] = {}
    for phase, memory in of_few.items():
        peak = dict(memory)
        for part, n_bytes in of_more[phase].items():
            base = memory.get(part, 0)
            peak[part] = base + times * (n_bytes - base)
            if phase == OPTIMIZER and part == ACTIVATIONS:  # it copies a few matrices at a time
                peak[part] = max(base, n_bytes)
        peaks[phase] = peak
    return peaks


def _find_period(kinds: Sequence[Any]) -> int:
    """Return after how many blocks their kinds repeat."""
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return period
    return len(kinds)


class NotPlannedError(ConfigError):
    """A class of transformers takes no step on fake tensors."""


def _find_kinds(model: TransformersConfig) -> list[Any]:
    """Return what tells the blocks of a class apart: their parameters, and values of its config.

    They are all different if the config says in another way how many there are.
    """
    with torch.device("meta"):
        blocks = new_model(model).blocks
    if model.transformers_config.get(N_LAYERS) != len(blocks):
        return list(range(len(blocks)))
    lists = model.lists_of_layers.values()
    kinds: list[Any] = []
    for number, block in enumerate(blocks):
        shapes = {name: parameter.shape for name, parameter in block.named_parameters()}
        kinds.append((shapes, [of_layers[number] for of_layers in lists]))
    return kinds


def take_step(hp: Hyperparameters, ranks: Ranks) -> dict[str, Memory]:
    """Return what `measure_step` does, from a step of all blocks."""
    hp = _without_masks(hp, ranks)
    shape = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node)
    n_micro_batches = count_micro_steps(hp, ranks.size)
    offloads_state = ranks.on_gpu and hp.parallel.cpu_offload
    live = LiveBytes(offloads_state=offloads_state)
    dist.init_process_group("fake", rank=0, world_size=ranks.size, store=FakeStore())
    try:
        mesh = make_mesh("cpu", shape)
        context_group = new_context_group(hp.parallel.context_parallel, 0, ranks.size)
        with FakeTensorMode(allow_non_fake_inputs=True), live.seeing_resized():
            model = build_model(hp, mesh, ranks.dtype)
            model.loss.logits_limit = find_logits_limit(
                torch.device(ranks.device_type), int(ranks.memory)
            )
            optimizer = optim.Optimizer(hp.optim, model, compute_dtype=ranks.dtype)
            for parameter in model.parameters():
                live.add(parameter, HOST if offloads_state else PARAMETERS)
            for moment in optimizer.state_dict().values():
                live.add(moment, HOST if offloads_state else MOMENTS)
            with live:
                # The first, the last and one between them stand for all micro-batches.
                _step(model, optimizer, hp, ranks, context_group, live, min(n_micro_batches, 3))
    finally:
        dist.destroy_process_group()
    return live.peaks


def find_peak(peaks: Mapping[str, Memory]) -> str:
    """Return the phase with the most bytes on the device."""
    return max(peaks, key=lambda phase: device_bytes(peaks[phase]))


def _without_masks(hp: Hyperparameters, ranks: Ranks) -> Hyperparameters:
    """Return `hp` uncompiled, on a GPU also without the masks of windows and dropout.

    Kernels of GPUs need none, those of CPUs do.
    """
    changes: dict[str, Any] = {"compile": False, "float8": None}
    if ranks.on_gpu:
        changes |= {"dropout": 0.0, "sliding_window": None}
    return hp.replace(**changes)


def _step(
    model: AnyModel,
    optimizer: optim.Optimizer,
    hp: Hyperparameters,
    ranks: Ranks,
    context_group: ContextGroup,
    live: LiveBytes,
    n_micro_batches: int,
) -> None:
    """Take a step as `Trainer` does."""
    _watch_backward(model, live)
    scaler = precision.LossScaler(ranks.dtype, torch.device("cpu"))
    micro_batch: MicroBatch | PairBatch = new_micro_batch(hp, context_group)
    objective: Objective = NextToken()
    if hp.objective.of_pairs:
        objective = DPO(hp.objective, 2, micro_batch.inputs.device)
        micro_batch = _pair_of(micro_batch)
    for number in range(n_micro_batches):
        is_last = number == n_micro_batches - 1
        parallelize.start_micro_step(model, hp.parallel, is_last)
        live.start_phase(FORWARD)
        loss = objective.losses(model, micro_batch).minimized_sum
        live.start_phase(BACKWARD_OF_LAST)
        (loss * scaler.scale).backward()
        del loss
        live.move_rest(GRADIENTS)  # of this rank, not reduced yet
    live.start_phase(OPTIMIZER)
    norm, nonfinite = optimizer.measure_gradients(scaler.scale)
    optimizer.step(1e-3, optimizer.clipping_divisor(norm, scaler.scale), nonfinite)


def new_micro_batch(hp: Hyperparameters, context_group: ContextGroup) -> MicroBatch:
    """Return sequences of which all tokens are targets, or this rank's part of them."""
    own_length = hp.parallel.own_length(hp.model.max_seq_len)
    tokens = torch.zeros(hp.data.batch_size, own_length, dtype=torch.int64)
    if context_group.size == 1:
        return MicroBatch(tokens, tokens)
    document_ids = tokens.repeat(1, context_group.size)
    return MicroBatch(tokens, tokens, document_ids, context_group.part(tokens))


def _pair_of(sequences: MicroBatch) -> PairBatch:
    """Return a pair of replies that fill `sequences`, all of their tokens targets."""
    tokens = sequences.inputs
    numbers = torch.arange(tokens.numel())
    half = tokens.numel() // 2
    lengths = [half, tokens.numel() - half]
    return PairBatch(
        tokens,
        sequences.document_ids,
        numbers,
        tokens.flatten(),
        lengths,
        torch.tensor(lengths),
        torch.arange(2),
        sequences.part,
    )


def _watch_backward(model: AnyModel, live: LiveBytes) -> None:
    """Let the phases of `live` change where the gradients of blocks exist."""

    def watch(_block: nn.Module, _inputs: Any, output: Any) -> None:
        x = tree_leaves(output)[0]  # of model.py the first one of several
        x.register_hook(lambda _gradient: live.start_phase(BACKWARD_OF_FIRST))

    if len(model.blocks) > 1:
        model.blocks[1].register_forward_hook(watch)
