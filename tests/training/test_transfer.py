"""Rates and initial weights of one size carry over to another without a change of the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import build_model
from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.errors import ConfigError
from lm.hf import export
from lm.memory import count_state
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import optim, parallelize
from lm.training.transfer import Transfer
from model import Block, BlockOutput, ModelConfig, Transformer
from tests.support.checkpoints import RUN_INFO, open_checkpointer, save_state, state_of
from tests.support.hyperparameters import EXACT_RUN, LLAMA_STYLE, TINY, named_keys
from tests.support.parallelism import STRATEGIES
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, run_fsdp

STYLES: dict[str, dict[str, Any]] = {
    "original": {},
    "llama": LLAMA_STYLE,
    "tied": LLAMA_STYLE | {"tie_embeddings": True},
    "gpt2": {"ffn": "gelu", "bias": "all", "tie_embeddings": True},
    "olmo2": LLAMA_STYLE | {"norm_placement": "post", "qk_norm": "projection"},
}
every_style = pytest.mark.parametrize("style", STYLES)
FROM_SMALL: dict[str, Any] = {"d_model": 32, "n_layers": 3, "base_width": 8, "base_depth": 1}
"""4 times as wide and 3 times as deep as the base."""


def hyperparameters(**changes: Any) -> Hyperparameters:
    settings = TINY | {"lr": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5} | changes
    return read_hyperparameters({"hyperparameters": settings}, [], "test")


def build(hp: Hyperparameters) -> tuple[Transformer, optim.Optimizer]:
    """The initial model and the optimizer, in one process."""
    transfer = Transfer.of(hp.transfer, hp.model, hp.optim.optimizer)
    model = Transformer(hp.own_model)
    parallelize.initialize_parameters(model, 7, transfer)
    return model, optim.Optimizer(hp.optim, model, transfer)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    model: Transformer, optimizer: optim.Optimizer, n_steps: int = 5
) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step."""
    found = []
    for step in range(n_steps):
        inputs, targets = batch(step)
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        grad_norm, skipped = optimizer.measure_gradients(1.0)
        optimizer.step(0.01 / (step + 1), optimizer.clipping_divisor(grad_norm, 1.0), skipped)
        optimizer.zero_grad()
        found.append((loss.item(), grad_norm.item()))
    return found


# ---- the table


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # init, lr, weight_decay, eps, multiplier at 4 times the width and 3 times the depth
        ("embedding.tokens.weight", (1, 1, 1, 1 / 4, 1)),
        ("embedding.positions.weight", (1, 1, 1, 1 / 4, 1)),
        ("blocks.1.attention.q_proj.weight", (1 / 2, 1 / 4, 4, 1 / 12, 1)),
        ("blocks.1.ffn.up_proj.weight", (1 / 2, 1 / 4, 4, 1 / 12, 1)),
        ("blocks.1.attention.o_proj.weight", (1 / 6, 1 / 12, 12, 1 / 4, 1 / 3)),
        ("blocks.1.ffn.down_proj.weight", (1 / 6, 1 / 12, 12, 1 / 4, 1 / 3)),
        ("blocks.1.ffn.down_proj.bias", (1 / 3, 1 / 3, 3, 1 / 4, 1 / 3)),
        ("blocks.1.ffn.up_proj.bias", (1, 1, 1, 1 / 12, 1)),
        ("blocks.1.attention_norm.weight", (1, 1, 1, 1 / 12, 1)),
        ("head.norm.weight", (1, 1, 1, 1 / 4, 1)),
        ("head.output.weight", (1 / 4, 1 / 4, 4, 1, 1 / 4)),
    ],
)
def test_scale_at_4_times_the_width_and_3_the_depth(name: str, expected: tuple[float, ...]) -> None:
    hp = hyperparameters(**FROM_SMALL)
    assert Transfer.of(hp.transfer, hp.model, "adamw").scale(name) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.1.attention.q_proj.weight", (1 / 2, 1 / 2, 2, 1, 1)),
        ("blocks.1.ffn.down_proj.weight", (1 / 6, 1 / 6, 6, 3, 1 / 3)),
        ("blocks.1.ffn.up_proj.bias", (1, 1, 1, 1 / 12, 1)),
        ("head.output.weight", (1 / 4, 1 / 4, 4, 1, 1 / 4)),
    ],
)
def test_scale_with_muon(name: str, expected: tuple[float, ...]) -> None:
    hp = hyperparameters(**FROM_SMALL)
    assert Transfer.of(hp.transfer, hp.model, "muon").scale(name) == pytest.approx(expected)


@every_style
def test_initial_deviations_are_those_of_the_base_scaled(style: str) -> None:
    hp = hyperparameters(**FROM_SMALL, **STYLES[style])
    base = hyperparameters(**STYLES[style], d_model=8, n_layers=1, d_ff=hp.own_model.ffn_width // 4)
    transfer = Transfer.of(hp.transfer, hp.model, "adamw")
    model = Transformer(hp.own_model)
    base_model = Transformer(base.own_model)
    for name, _ in base_model.named_parameters():
        kind, value = base_model.init_rule(name)
        if kind == "normal":
            expected = transfer.scale(name).init * value
            assert transfer.init_rule(model, name) == ("normal", pytest.approx(expected)), name


# ---- nothing changes without it, or at the base size


@every_style
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_base_of_the_models_size_changes_no_loss(style: str, optimizer: str) -> None:
    changes = STYLES[style] | {"optimizer": optimizer}
    plain = train(*build(hyperparameters(**changes)))
    assert train(*build(hyperparameters(**changes, base_width=32, base_depth=2))) == plain
    assert train(*build(hyperparameters(**changes, base_width=16))) != plain


# ---- multipliers are folded


def multiply_results(module: nn.Module, factor: float) -> None:
    """Let `module` return `factor` times what it computes."""

    def multiply(_module: nn.Module, _inputs: Any, result: Tensor) -> Tensor:
        return factor * result

    module.register_forward_hook(multiply)


def multiplying(config: ModelConfig) -> Transformer:
    """A model that multiplies logits by 1 / 4 and the branches of its blocks by 1 / 3."""
    model = Transformer(config)
    multiply_results(model.head.norm, 1 / 4)
    for block in model.blocks:
        assert isinstance(block, Block)
        branches: list[nn.Module] = [block.attention, block.ffn]
        if config.norm_placement == "post":
            branches = [block.attention_norm, block.ffn_norm]
        for branch in branches:
            multiply_results(branch, 1 / 3)
    return model


def groups_with_multipliers(model: nn.Module, eps: float) -> list[dict[str, Any]]:
    """AdamW's groups by table 8 of Tensor Programs V and table 1 of CompleteP, m = 4, l = 3."""
    groups = []
    for name, p in model.named_parameters():
        group: dict[str, Any] = {"params": [p], "factor": 1.0, "eps": eps / 4}
        group["weight_decay"] = 0.1 if p.ndim == 2 else 0.0
        if name.startswith("blocks."):
            group["eps"] = eps / 12
            if p.ndim == 2:
                group["factor"] = 1 / 4
                group["weight_decay"] = 0.1 * 4
        groups.append(group)
    return groups


@every_style
def test_folded_model_learns_as_one_with_multipliers(style: str) -> None:
    eps = 1e-3  # about as large as gradients, so that it matters
    hp = hyperparameters(**FROM_SMALL, **STYLES[style], adam_eps=eps)
    model, optimizer = build(hp)
    transfer = Transfer.of(hp.transfer, hp.model, "adamw")
    reference = multiplying(hp.own_model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter / transfer.scale(name).multiplier
            reference.get_parameter(name).copy_(values)
    adamw = torch.optim.AdamW(groups_with_multipliers(reference, eps), betas=(0.9, 0.999))
    for step, (loss, grad_norm) in enumerate(train(model, optimizer)):
        inputs, targets = batch(step)
        expected_loss = reference(inputs, targets) / targets.numel()
        expected_loss.backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = group["factor"] * 0.01 / (step + 1)
        adamw.step()
        adamw.zero_grad()
        assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
        assert grad_norm == pytest.approx(expected_norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        values = parameter.detach() / transfer.scale(name).multiplier
        torch.testing.assert_close(values, reference.get_parameter(name), atol=2e-5, rtol=1e-3)


# ---- what it is for


def final_activations(width: int, **changes: Any) -> float:
    """The mean absolute output of the last block after 5 steps."""
    hp = hyperparameters(d_model=width, n_heads=width // 8, **LLAMA_STYLE, **changes)
    model, optimizer = build(hp)
    train(model, optimizer)
    found: list[float] = []

    def record(_module: nn.Module, _inputs: Any, output: BlockOutput) -> None:
        found.append(output.x.abs().mean().item())

    model.blocks[-1].register_forward_hook(record)
    model(batch(9)[0])
    return found[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_do_not_grow_with_the_width(optimizer: str) -> None:
    narrow = final_activations(32, optimizer=optimizer)
    wide = final_activations(256, optimizer=optimizer)
    scaled = final_activations(256, optimizer=optimizer, base_width=32)
    assert wide > 2 * narrow
    assert narrow / 1.3 < scaled < 1.3 * narrow


# ---- with the other parts


@pytest.mark.parametrize("key", ["base_width", "base_depth"])
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_base_is_refused_with_weights_that_exist(key: str, changes: dict[str, Any]) -> None:
    settings = {"hyperparameters": TINY | changes | {"init_from": "x", key: 16}}
    with pytest.raises(ConfigError) as caught:
        read_hyperparameters(settings, [], "test")
    assert named_keys(caught.value) == {key, "init_from"}


def test_plan_of_a_scaled_model_is_that_of_another() -> None:
    states = [
        count_state(hyperparameters(optimizer="muon", **changes), None)
        for changes in ({}, {"base_width": 8, "base_depth": 1})
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize("style", ["llama", "tied"])
def test_export_of_a_scaled_model_is_an_ordinary_one(style: str, tmp_path: Path) -> None:
    hp = hyperparameters(**FROM_SMALL, **STYLES[style])
    keys = hp.model.model_dump(mode="json")
    model, optimizer = build(hp)
    train(model, optimizer)

    def save(world: World) -> Path:
        info = RUN_INFO.model_copy(update={"model": keys})
        with open_checkpointer(world, tmp_path) as checkpointer:
            return tmp_path / save_state(checkpointer, state_of(model), 1, info=info)

    out = tmp_path / "out"
    export.export_model(in_world(save), out)
    tokens = batch(9)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-6, rtol=1e-5)


def full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()


def train_on_equal_gradients(world: World, sharding: str) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms, and weights after three steps whose gradients depend on their names only."""
    hp = hyperparameters(**FROM_SMALL, vocab_size=61, optimizer="muon", sharding=sharding)
    transfer = Transfer.of(hp.transfer, hp.model, hp.optim.optimizer)
    shape = parallelize.mesh_shape(hp.parallel, world.size, 1)
    model = build_model(hp, world.device_mesh(shape), None)
    parallelize.initialize_parameters(model, 7, transfer)
    optimizer = optim.Optimizer(hp.optim, model, transfer)
    norms = []
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter)
            rows, start = local_rows(parameter.grad)
            rows.copy_(gradient[start : start + len(rows)])
        norm, skipped = optimizer.measure_gradients(1.0)
        optimizer.step(0.01, optimizer.clipping_divisor(norm, 1.0), skipped)
        norms.append(norm.item())
    return norms, {name: full(parameter) for name, parameter in model.named_parameters()}


def train_with_each(world: World, shardings: tuple[str, ...]) -> list[Any]:
    return [train_on_equal_gradients(world, sharding) for sharding in shardings]


@pytest.mark.slow
def test_transfer_is_the_same_on_any_ranks() -> None:
    [[(expected_norms, expected)]] = run_ranks(1, train_with_each, STRATEGIES[:1])
    assert math.isfinite(sum(expected_norms))
    for results in run_ranks(2, train_with_each, STRATEGIES[:3]):
        for norms, found in results:
            assert norms == pytest.approx(expected_norms, rel=1e-6)
            for name, values in found.items():
                torch.testing.assert_close(values, expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_transfer_resumes_and_a_change_of_it_is_refused(tmp_path: Path) -> None:
    run = EXACT_RUN | FROM_SMALL | {"checkpoint_rate": 2, "max_steps": 4, "grad_clip": 0.5}
    run_fsdp(tmp_path / "a", "keep_checkpoints=null", config=run, code=0)
    expected = read_exact_metrics(tmp_path / "a")
    source = checkpoints_by_step(tmp_path / "a")[2]
    run_fsdp(tmp_path / "b", f"resume={source}", config=run, code=0)
    found = read_exact_metrics(tmp_path / "b")
    assert found == {step: expected[step] for step in (3, 4)}
    for change in ("base_width=16", "base_depth=null"):
        refused = run_fsdp(tmp_path / "c", f"resume={source}", change, config=run, code=2)
        assert change.partition("=")[0] in refused.stderr
