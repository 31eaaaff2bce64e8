"""A GPU computes the loss and gradients of the CPU, with its own kernels and compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from lm import config, parallelize
from lm.runtime.world import World
from model import Transformer
from tests.support import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SHAPE: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "max_seq_len": 256}
LLAMA = SHAPE | {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none", "n_kv_heads": 2}
MODELS = {
    "example": SHAPE,
    "llama": LLAMA,
    "windowed": SHAPE | {"sliding_window": 40},
    "mistral": LLAMA | {"sliding_window": 40},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "compiled": {"compile": True},
    "recompute-some": {"activation_checkpointing": "selective"},
    "recompute": {"activation_checkpointing": "full"},
    "offload": {"cpu_offload": True},
    "activation-offload": {"activation_offload": True},
    "recompute-and-offload": {"activation_offload": True, "activation_checkpointing": "selective"},
}


def gradients(world: World | None, settings: dict[str, Any], has_documents: bool) -> dict[str, np.ndarray]:
    """The loss of a batch and the gradients of all parameters, on the GPU of `world` or on the CPU."""
    hp = config.read({"hyperparameters": settings}, [], "test")
    plain = Transformer(hp)
    parallelize.initialize(plain, 7)
    model, device = plain, torch.device("cpu")
    if world is not None:
        with torch.device("meta"):
            model = Transformer(hp)
        device = world.device
        model = parallelize.parallelize(model, hp, world.device_mesh({"replicate": 1, "shard": 1}), None, 7)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
                assert isinstance(parameter, DTensor)
                parameter.to_local().copy_(value)
    tokens = torch.randint(512, (2, 257), generator=torch.Generator().manual_seed(1)).to(device)
    document_ids = torch.arange(256, device=device).expand(2, -1) // 60 if has_documents else None
    loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document_ids)
    loss.backward()
    found = {"loss": loss.detach().cpu().numpy()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu().numpy()
    return found


@pytest.mark.parametrize("has_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_loss_and_gradients_equal_those_of_the_cpu(model: str, option: str, has_documents: bool) -> None:
    expected = gradients(None, MODELS[model], has_documents)
    (found,) = run_ranks(1, gradients, MODELS[model] | OPTIONS[option], has_documents)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.linalg.norm(found[name] - value)
        assert difference <= 1e-2 * np.linalg.norm(value), name  # TF32 may be in use
