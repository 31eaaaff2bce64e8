"""Offloaded activations give the same gradients, also if copies run as late as on a GPU."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp import build_model
from lm.config.hyperparameters import Hyperparameters
from lm.errors import ConfigError
from lm.runtime.world import MeshShape, World
from lm.training import parallelize
from lm.training.config import ParallelConfig
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.ranks import in_world, run_ranks

LAYERS = 5
BASE: dict[str, Any] = TINY | {
    "n_layers": LAYERS,
    "max_seq_len": 64,
    "amp_dtype": None,
    "compile": False,
}
MODES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA_STYLE,
    "dropout": {"dropout": 0.2},
    "one unit": {"layer_wrap": False},
    "recompute": {"activation_checkpointing": "full"},
    "recompute some": LLAMA_STYLE | {"activation_checkpointing": "selective"},
    "recompute dropout": {"activation_checkpointing": "full", "dropout": 0.2},
    "adapters": LLAMA_STYLE | {"lora_rank": 4},
    "recompute adapters": LLAMA_STYLE | {"lora_rank": 4, "activation_checkpointing": "full"},
}


class LateCopies(TorchFunctionMode):
    """A module of streams, as torch.cuda, whose copies run only when another stream waits for them.

    A copy fails if its source was freed before. Reading its target before waiting reads other
    values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []
        self.n_done = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self.pending.append((weakref.ref(args[0]), weakref.ref(args[1])))
        return args[0]

    # ---- the module

    def Stream(self) -> LateCopies:  # noqa: N802
        return self

    def current_stream(self) -> LateCopies:
        return self

    @contextmanager
    def stream(self, _stream: LateCopies) -> Iterator[None]:
        with self:
            yield

    # ---- its streams

    def wait_stream(self, _stream: LateCopies) -> None:
        pass  # what the current stream computes runs at once

    def record_event(self) -> int:
        return self.n_done + len(self.pending)

    def wait_event(self, event: int) -> None:
        while self.n_done < event:
            target, source = (reference() for reference in self.pending.pop(0))
            assert target is not None, "freed before it was written"
            assert source is not None, "freed before it was copied"
            target.copy_(source)
            self.n_done += 1


def gradients(
    world: World, settings: dict[str, Any], backend: Any = torch.cpu, steps: int = 1
) -> tuple[list[Tensor], list[int]]:
    """The gradients of the last of several steps, and the host memory that each step allocates."""
    hp, allocated = Hyperparameters.from_flat(BASE | settings), list[int]()
    mesh = world.device_mesh(MeshShape(1, 1))
    empty_like: Callable[..., Tensor] = torch.empty_like

    def count(tensor: Tensor, **options: Any) -> Tensor:
        made = empty_like(tensor, **options)
        allocated[-1] += made.nbytes if "pin_memory" in options else 0
        return made

    with patch.object(torch, "get_device_module", lambda _: backend):
        model = build_model(hp, mesh, None)
        parallelize.initialize_parameters(model, 7)
    parameters = list(model.parameters())  # sharded
    with torch.no_grad():
        for seed, parameter in enumerate(
            parameters
        ):  # also of a frozen base, and of adapters that are 0
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    tokens = torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(1))
    document_ids = torch.arange(64).expand(2, -1) // 20
    for _ in range(steps):
        allocated.append(0)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(3)
        with patch.object(torch, "empty_like", count):
            model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document_ids).backward()
        with torch.no_grad():
            model(tokens[:, :-1].contiguous())
    return [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)], allocated


def check(world: World, settings: dict[str, Any], backend: Any) -> None:
    expected, _ = gradients(world, settings)
    found, allocated = gradients(world, settings | {"activation_offload": True}, backend, steps=3)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert allocated[0] > 0
    assert allocated[1:] == [0, 0]


def skip_if_refused(mode: str) -> None:
    if mode == "recompute some" and not parallelize.OFFLOADS_SELECTED:
        pytest.skip("needs PyTorch 2.14: older ones offload it in compiled blocks only")


@pytest.mark.parametrize("backend", [torch.cpu, LateCopies()], ids=["at once", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_activation_offload_gradients_and_host_memory(mode: str, backend: Any) -> None:
    skip_if_refused(mode)
    in_world(lambda world: check(world, MODES[mode], backend))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_activation_offload_of_compiled_blocks() -> None:
    run_ranks(1, check, {"compile": True, "activation_checkpointing": "selective"}, LateCopies())


def test_activation_offload_of_recomputed_blocks() -> None:
    """Of all but the last two blocks: (2, 64, 32) float32 values each."""
    settings = {"activation_checkpointing": "full", "activation_offload": True}
    _, allocated = in_world(lambda world: gradients(world, settings))
    assert allocated == [(LAYERS - 2) * 2 * 64 * 32 * 4]


def test_activation_offload_of_selected_outputs() -> None:
    """Of all but the last two blocks: inputs, attention's outputs, and those of the products."""
    skip_if_refused("recompute some")
    settings = {"activation_checkpointing": "selective", "activation_offload": True}
    _, allocated = in_world(lambda world: gradients(world, settings))
    n_tokens = 2 * 64
    # d_model values each: input, query, key, value, attention, o_proj, 4 of up_proj, down_proj
    assert allocated == [(LAYERS - 2) * n_tokens * 32 * 4 * 11]


def test_activation_offload_is_refused_where_it_would_copy_nothing() -> None:
    settings = {"activation_checkpointing": "selective", "activation_offload": True}
    not_compiled = settings | {"compile": False}
    with patch.object(parallelize, "OFFLOADS_SELECTED", new=False):
        parallelize.check_offload(ParallelConfig.model_validate(settings))
        parallelize.check_offload(ParallelConfig.model_validate(settings | {"compile": True}))
        with pytest.raises(ConfigError, match="activation_offload"):
            parallelize.check_offload(ParallelConfig.model_validate(not_compiled))
    with patch.object(parallelize, "OFFLOADS_SELECTED", new=True):
        parallelize.check_offload(ParallelConfig.model_validate(not_compiled))
