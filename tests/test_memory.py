"""What a GPU needs is estimated from what model and optimizer hold, and docs/finetuning.md says what fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lm.parallelize import memory_bytes
from model import Block, ModelConfig, Transformer
from tests.support import ROOT

GPU = 72 * 2**30
"""Of a GPU of 80 GiB, what is left beside CUDA's own and what fragmentation takes."""

LLAMA = {"positions": "rope", "norm": "rmsnorm", "ffn": "swiglu", "bias": "none"}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"d_model": 256, "n_layers": 2, "vocab_size": 16, "max_seq_len": 128} | changes)


def test_the_state_is_what_adamw_holds() -> None:
    model = Transformer(config())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *moments]
    assert memory_bytes(model.config, 1, 1, 4)["state"] == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("changes", [{}, {"ffn": "gelu", "bias": "all"}, LLAMA, LLAMA | {"n_kv_heads": 2}], ids=str)
def test_the_activations_are_what_a_block_saves(changes: dict[str, Any]) -> None:
    shape = config(**changes)
    with torch.device("meta"):
        positions = Transformer(shape)._positions
    block = Block(shape, 0).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, positions(torch.arange(128), 128))
    measured = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in weights)
    inputs = shape.n_layers * x.nbytes
    assert memory_bytes(shape, 1, 2, 128)["activations"] - inputs == pytest.approx(measured, rel=0.03)


def test_the_documentation_says_what_fits() -> None:
    model = ModelConfig.model_validate({"model": "codellama-7b"})
    alone = memory_bytes(model, 1, 1, 1)
    text = " ".join((ROOT / "docs" / "finetuning.md").read_text().split())
    assert f"{alone['state'] / 2**30:.1f} GiB of state" in text
    assert f"{alone['gathered'] / 2**30:.1f} GiB of 16-bit" in text
    assert sum(alone.values()) > GPU
    for length in (16384, 4096, 2048):
        fitting = [
            max(b for b in range(1000) if sum(memory_bytes(model, shards, b, length).values()) <= GPU)
            for shards in (2, 4, 8, 16)
        ]
        assert f"| {length} | {' | '.join(map(str, fitting))} |" in text
