"""The estimate of GPU memory equals what model and optimizer hold, and docs/finetuning.md shows what fits."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lm import lora
from lm.parallelize import memory_bytes
from model import ModelConfig, Transformer
from tests.support import ROOT

GPU = 72 * 2**30
"""Memory of an 80 GiB GPU without the CUDA context and fragmentation."""

LLAMA = {"positions": "rope", "norm": "rmsnorm", "ffn": "swiglu", "bias": "none"}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"d_model": 256, "n_layers": 2, "vocab_size": 16, "max_seq_len": 128} | changes)


def test_the_state_is_that_of_adamw() -> None:
    model = Transformer(config())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *moments]
    assert memory_bytes(model.config, 1, 1, 4)["state"] == sum(tensor.nbytes for tensor in tensors)


def saved_bytes(shape: ModelConfig) -> int:
    """Bytes that the forward pass of two sequences saves for backward, without parameters."""
    model = Transformer(shape).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, shape.max_seq_len, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in weights)


QWEN3 = LLAMA | {"n_kv_heads": 2, "head_dim": 48, "qk_norm": "head"}
OLMO2 = LLAMA | {"norm_placement": "post", "qk_norm": "projection"}


@pytest.mark.parametrize(
    "changes", [{}, {"ffn": "gelu", "bias": "all"}, LLAMA, LLAMA | {"n_kv_heads": 2}, QWEN3, OLMO2], ids=str
)
def test_the_activations_are_what_a_block_saves(changes: dict[str, Any]) -> None:
    shape = config(**changes)
    block = saved_bytes(shape) - saved_bytes(shape.model_copy(update={"n_layers": 1}))
    inputs = shape.n_layers * 2 * shape.max_seq_len * shape.d_model * 2
    assert memory_bytes(shape, 1, 2, shape.max_seq_len)["activations"] - inputs == pytest.approx(block, rel=0.03)


def test_the_documentation_shows_the_memory_of_lora() -> None:
    text = (ROOT / "docs" / "finetuning.md").read_text()
    columns = []
    for name in ("codellama-7b", "llama3-8b"):
        model = ModelConfig.model_validate({"model": name})
        adapters = lora.n_trained(lora.LoraConfig.model_validate({"lora_rank": 16}), model)
        found = memory_bytes(model, 1, 8, 1024, adapters=adapters)
        base = 2 * model.n_parameters
        column = [base, found["state"] - base, found["gathered"], found["activations"], sum(found.values())]
        columns.append([f"{size / 2**30:.1f}" for size in column])
    for values in zip(*columns, strict=True):
        assert f"| {' | '.join(values)} |\n" in text


def test_the_documentation_shows_what_fits() -> None:
    model = ModelConfig.model_validate({"model": "codellama-7b"})
    one_gpu = memory_bytes(model, 1, 1, 1)
    text = " ".join((ROOT / "docs" / "finetuning.md").read_text().split())
    assert f"{one_gpu['state'] / 2**30:.1f} GiB of state" in text
    assert f"{one_gpu['gathered'] / 2**30:.1f} GiB of 16-bit" in text
    assert sum(one_gpu.values()) > GPU
    for length in (16384, 4096, 2048):

        def needed(size: int, shards: int, length: int = length) -> int:
            return sum(memory_bytes(model, shards, size, length).values())

        largest = [bisect_right(range(1000), GPU, key=partial(needed, shards=shards)) - 1 for shards in (2, 4, 8, 16)]
        assert f"| {length} | {' | '.join(map(str, largest))} |" in text
