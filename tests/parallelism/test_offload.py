"""Offloaded activations give the same gradients; of what blocks save, weights are not copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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


def gradients(world: World, settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The gradients of a step, and the bytes that it copies to the host."""
    hp, copied = Hyperparameters.from_flat(BASE | settings), 0
    mesh = world.device_mesh(MeshShape(1, 1))
    empty_like: Callable[..., Tensor] = torch.empty_like

    def count(tensor: Tensor, **options: Any) -> Tensor:
        nonlocal copied
        made = empty_like(tensor, **options)
        copied += made.nbytes if "pin_memory" in options else 0
        return made

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
    torch.manual_seed(3)
    with patch.object(torch, "empty_like", count):
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document_ids).backward()
    return [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)], copied


def check(world: World, settings: dict[str, Any]) -> None:
    expected, _ = gradients(world, settings)
    found, copied = gradients(world, settings | {"activation_offload": True})
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert copied > 0


def skip_if_refused(mode: str) -> None:
    if mode == "recompute some" and not parallelize.OFFLOADS_SELECTED:
        pytest.skip("needs PyTorch 2.14: older ones offload it in compiled blocks only")


@pytest.mark.parametrize("mode", MODES)
def test_activation_offload_gives_the_same_gradients(mode: str) -> None:
    skip_if_refused(mode)
    in_world(lambda world: check(world, MODES[mode]))


def check_traced(world: World, settings: dict[str, Any]) -> None:
    """Check what the compiler saves for backward, without its code for it."""
    backend = "aot_eager_decomp_partition"
    torch.compile = partial(torch.compile, backend=backend)  # type: ignore[assignment]
    check(world, settings)


@pytest.mark.slow
def test_activation_offload_of_compiled_blocks() -> None:
    run_ranks(1, check_traced, {"compile": True, "activation_checkpointing": "selective"})


def test_activation_offload_copies_no_weights() -> None:
    """Of each block 17 values of d_model per token."""
    _, copied = in_world(lambda world: gradients(world, {"activation_offload": True}))
    assert copied == LAYERS * 2 * 64 * 32 * 4 * 17


def test_activation_offload_of_recomputed_blocks() -> None:
    """Of each block its input: (2, 64, 32) float32 values."""
    settings = {"activation_checkpointing": "full", "activation_offload": True}
    _, copied = in_world(lambda world: gradients(world, settings))
    assert copied == LAYERS * 2 * 64 * 32 * 4


def test_activation_offload_of_selected_outputs() -> None:
    """Of each block: its input, attention's outputs, and those of the products."""
    skip_if_refused("recompute some")
    settings = {"activation_checkpointing": "selective", "activation_offload": True}
    _, copied = in_world(lambda world: gradients(world, settings))
    n_tokens = 2 * 64
    # d_model values each: input, query, key, value, attention, o_proj, 4 of up_proj, down_proj
    assert copied == LAYERS * n_tokens * 32 * 4 * 11


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
