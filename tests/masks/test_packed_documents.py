"""Documents in one row of a model of transformers are computed as its class computes each alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lm.hf.base import open_model
from lm.hf.weights import examined_config
from lm.runtime.world import World
from lm.training import parallelize
from lm.transformers_model import NETWORK, TransformersModel
from model import IGNORE_INDEX
from tests.support.hf import VOCABULARY, complete_values, read_with_model_defaults, save_model
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("shared_cache")

DOCUMENTS = (37, 51, 40, 70, 2, 56)
"""tokens"""
KINDS = {
    "gpt_oss": "attention_mask",
    "qwen3_5_text": "seq_idx",
    "granitemoe": "position_ids",
    "qwen3_next": "seq_idx",
    "olmo_hybrid": "seq_idx",
    "lfm2_moe": "seq_idx",
}
"""how documents are kept apart"""
QUICK = ("gpt_oss", "qwen3_5_text")
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}
}


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in DOCUMENTS]


def pack() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and document ids of one row with all documents."""
    row = torch.cat(documents())
    ends = torch.tensor(DOCUMENTS).cumsum(0)
    targets = row.roll(-1)
    targets[ends - 1] = IGNORE_INDEX
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    return row[None], targets[None], ids[None]


def gradients(network: nn.Module) -> dict[str, Tensor]:
    named = network.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in KINDS]
)
def test_packed_documents_are_computed_as_separate_ones(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path, **CONVOLUTIONS.get(kind, {}))
    ours, _ = open_model(tmp_path)
    assert isinstance(ours, TransformersModel)
    assert ours.config.examined.packing
    assert ours.config.examined.packed_by == KINDS[kind]
    assert ours.config.examined.attention == "documents"
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    tokens, targets, ids = pack()
    expected: list[Tensor] = []
    loss = torch.zeros(())
    for document in documents():
        logits = reference(document[None]).logits[0]
        loss = loss + F.cross_entropy(logits[:-1], document[1:], reduction="sum")
        expected.append(logits.detach())
    loss.backward()
    with torch.no_grad():
        found = ours(tokens, document_ids=ids)[0]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)

    ours(tokens, targets, ids).backward()
    compare_gradients(ours.network, reference)


@pytest.mark.slow
def test_a_class_that_multiplies_by_its_masks_keeps_its_attention_and_says_so() -> None:
    config = examined_config(complete_values("gptj"))
    assert config.examined.packing
    assert config.examined.attention == "class"
    assert [note for note in config.notes(dropout=True) if "different documents" in note]


def compare_gradients(network: nn.Module, reference: nn.Module) -> None:
    right = gradients(reference)
    largest = max(gradient.abs().max() for gradient in right.values())
    assert gradients(network).keys() == right.keys()
    for name, gradient in gradients(network).items():
        difference = (gradient - right[name]).abs().max()
        assert difference <= 1e-5 * largest, name


@pytest.mark.parametrize("length", [1, 65])
def test_a_row_of_one_document_is_computed_as_by_transformers(length: int, tmp_path: Path) -> None:
    save_model("qwen3_5_text", tmp_path)
    ours, _ = open_model(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.cat(documents())[None, : length + 1]
    expected = reference(tokens[:, :-1]).logits
    F.cross_entropy(expected[0], tokens[0, 1:], reduction="sum").backward()
    with torch.no_grad():
        found = ours(tokens[:, :-1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    compare_gradients(ours.get_submodule(NETWORK), reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text"])
def test_packed_documents_are_kept_apart_in_bfloat16(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    [(packed, alone)] = run_ranks(1, compute_losses, str(tmp_path))
    assert packed == pytest.approx(alone, rel=5e-3)
    converted, _ = open_model(tmp_path, dtype="bfloat16")  # as an examination computes
    tokens, targets, ids = pack()
    assert converted(tokens, targets, ids).item() == packed


def build(world: World, folder: str) -> TransformersModel:
    """Return the model of a run in bfloat16, with the weights of a directory."""
    from fsdp import build_model
    from lm.hf import weights

    settings = {"init_from": folder, "amp_dtype": "bfloat16", "max_seq_len": sum(DOCUMENTS)}
    hp = read_with_model_defaults(settings)
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
    model = build_model(hp, world.device_mesh(shape), torch.bfloat16)
    weights.read_directory(Path(folder), model)
    assert isinstance(model, TransformersModel)
    return model


def compute_losses(world: World, folder: str) -> tuple[float, float]:
    """Return the loss of all documents in one row, and that of each alone, as a run computes."""
    model = build(world, folder)
    tokens, targets, ids = pack()
    with torch.no_grad():
        packed = model(tokens, targets, ids).item()
        alone = 0.0
        for document in documents():
            rows = document[None]
            alone += model(rows[:, :-1], rows[:, 1:]).item()
    return packed, alone


@pytest.mark.slow
def test_decays_are_float32_in_layers_that_are_compiled(tmp_path: Path) -> None:
    save_model("qwen3_5_text", tmp_path)
    for plain, compiled, dtypes in run_ranks(2, compute_compiled, str(tmp_path)):
        assert compiled == pytest.approx(plain, rel=1e-3)
        assert dtypes == {"A_log": "float32", "dt_bias": "float32"}


def compute_compiled(world: World, folder: str) -> tuple[float, float, dict[str, str]]:
    """Return losses of layers as they are, and traced, and dtypes that they see parameters in."""
    tokens, targets, ids = pack()
    seen: dict[str, str] = {}

    def see(module: nn.Module, *_: Any) -> None:
        for name in ("A_log", "dt_bias"):
            seen[name] = str(getattr(module, name).dtype).removeprefix("torch.")

    model = build(world, folder)
    for path, module in model.named_modules():
        if path.endswith("linear_attn"):
            module.register_forward_pre_hook(see)
    plain = model(tokens, targets, ids).item()
    model = build(world, folder)
    parallelize.compile_blocks(model, partial(torch.compile, fullgraph=True, backend="eager"))
    loss = model(tokens, targets, ids)
    loss.backward()
    return plain, loss.item(), seen
