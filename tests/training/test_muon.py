"""Muon orthogonalizes whole matrices, whatever the number of ranks that share them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import build_model
from lm.config.reading import read_hyperparameters
from lm.errors import ConfigError
from lm.hf import weights
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import muon, optim, parallelize
from lm.training.optim import OptimConfig
from tests.support.hf import read_with_model_defaults, save_model
from tests.support.hyperparameters import EXACT_RUN, TINY, named_keys
from tests.support.parallelism import STRATEGIES, sharding_of
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, run_fsdp

pytestmark = pytest.mark.usefixtures("shared_cache")

SHAPES = [(6, 6), (24, 8), (8, 24), (1, 5)]

UNEVEN = TINY | {"d_model": 36, "vocab_size": 61, "d_ff": 3, "optimizer": "muon"}
"""Four ranks have 9 rows each of most matrices, and 1, 1, 1 and 0 rows of the feed-forward's."""


def random_matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def polynomial_of_singular_values(matrix: Tensor) -> Tensor:
    """The iteration by its definition, on singular values, in float64."""
    a, b, c = muon.NEWTON_SCHULZ_COEFFICIENTS
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(muon.NEWTON_SCHULZ_STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ vt


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalize_maps_singular_values(shape: tuple[int, int]) -> None:
    matrix = random_matrix(shape)
    result = muon.orthogonalize(matrix)
    assert result.shape == shape
    torch.testing.assert_close(
        result.double(), polynomial_of_singular_values(matrix), atol=1e-4, rtol=1e-4
    )


MATRICES = [(out, inner) for out, inner in SHAPES if out > 1]
"""of a block: what has one output is a gate, which AdamW updates"""


class Blocks(nn.Module):
    """A block of a hidden matrix of each shape, an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        layers = [nn.Linear(inner, out, bias=False) for out, inner in MATRICES]
        self.blocks = nn.ModuleList([nn.ModuleList(layers)])
        self.norm = nn.LayerNorm(8)


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_step(optimizer: optim.Optimizer, lr: float = 0.01) -> Tensor:
    norm, skipped = optimizer.measure_gradients(1.0)
    optimizer.step(lr, optimizer.clipping_divisor(norm, 1.0), skipped)
    optimizer.zero_grad()
    return skipped


def make_optimizer(model: nn.Module, **settings: Any) -> optim.Optimizer:
    settings = {"optimizer": "muon", "beta2": 0.95} | settings
    return optim.Optimizer(OptimConfig.model_validate(settings), model)


def test_muon_equals_pytorchs() -> None:
    ours = Blocks()
    theirs = Blocks()
    optimizer = make_optimizer(ours, weight_decay=0.1, muon_momentum=0.9)
    reference = torch.optim.Muon(
        theirs.blocks.parameters(),
        weight_decay=0.1,
        momentum=0.9,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(4):
        lr = 0.01 * (step + 1)
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        take_step(optimizer, lr)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for mine, its in zip(ours.blocks.parameters(), theirs.blocks.parameters(), strict=True):
        # PyTorch's orthogonalizes in bfloat16: up to 1 % of the updates, which are 0.02 in sum.
        torch.testing.assert_close(mine, its, atol=2e-3, rtol=0)


def test_muon_leaves_other_parameters_to_adamw() -> None:
    both = Blocks()
    alone = Blocks()
    optimizers = [make_optimizer(both), make_optimizer(alone, optimizer="adamw")]
    for optimizer, model in zip(optimizers, (both, alone), strict=True):
        for step in range(3):
            fill_gradients(model, step)
            take_step(optimizer)
    assert torch.equal(both.embedding.weight, alone.embedding.weight)
    assert torch.equal(both.norm.bias, alone.norm.bias)
    keys = {name for name in optimizers[0].state_dict() if name.startswith("blocks.")}
    assert keys == {f"blocks.0.{index}.weight.momentum_buffer" for index in range(len(MATRICES))}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_muon_skips_a_nonfinite_gradient(value: float) -> None:
    model = Blocks()
    optimizer = make_optimizer(model, grad_clip=1.0)
    fill_gradients(model, 0)
    take_step(optimizer)
    tensors = model.state_dict() | optimizer.state_dict()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    fill_gradients(model, 1)
    gradient = model.get_parameter("blocks.0.1.weight").grad
    assert gradient is not None
    gradient[2, 3] = value
    assert take_step(optimizer) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_muon_momentum_in_bfloat16_is_close() -> None:
    results = []
    for dtype in ("float32", "bfloat16"):
        model = Blocks()
        optimizer = make_optimizer(model, optim_dtype=dtype)
        for step in range(5):
            fill_gradients(model, step)
            take_step(optimizer)
        results.append(model)
        momentum = optimizer.state_dict()["blocks.0.0.weight.momentum_buffer"]
        assert momentum.dtype == getattr(torch, dtype)
    for exact, rounded in zip(*(model.blocks.parameters() for model in results), strict=True):
        torch.testing.assert_close(exact, rounded, atol=5e-3, rtol=0)


# ---- on several ranks


def full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()


def train_on_equal_gradients(
    world: World, sharding: str, run: dict[str, Any] = UNEVEN
) -> dict[str, Tensor]:
    """Muon's weights and momentums after three steps whose gradients depend on their names only."""
    settings = run | sharding_of(sharding, world.size) | {"weight_decay": 0.1}
    hp = read_with_model_defaults(settings)
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.launch.local_size)
    model = build_model(hp, world.device_mesh(shape), None)
    parallelize.initialize_parameters(model, 7)
    if hp.checkpoint.init_from is not None:
        weights.read_directory(Path(hp.checkpoint.init_from), model)
    optimizer = optim.Optimizer(hp.optim, model)
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter)
            rows, start = local_rows(parameter.grad)
            rows.copy_(gradient[start : start + len(rows)])
        take_step(optimizer)
    found = {}
    for name, momentum in optimizer.state_dict().items():
        if name.endswith(".momentum_buffer"):
            parameter = name.removesuffix(".momentum_buffer")
            found[name] = full(momentum)
            found[parameter] = full(model.get_parameter(parameter))
    return found


def train_with_each(world: World, shardings: tuple[str, ...]) -> list[dict[str, Tensor]]:
    return [train_on_equal_gradients(world, sharding) for sharding in shardings]


def train_from(world: World, init_from: str, shardings: tuple[str, ...]) -> list[dict[str, Tensor]]:
    run = {"dataset": "synthetic", "optimizer": "muon", "init_from": init_from}
    return [train_on_equal_gradients(world, sharding, run) for sharding in shardings]


@pytest.mark.slow
def test_muon_gives_equal_weights_of_a_model_of_transformers(tmp_path: Path) -> None:
    save_model("glm4_moe", tmp_path, {"hidden_size": 36})
    [[expected]] = run_ranks(1, train_from, str(tmp_path), STRATEGIES[:1])
    parameters = load_file(tmp_path / "model.safetensors")
    layers = {name for name in parameters if re.search(r"_proj\.weight", name)}
    layers = {f"network.{name}" for name in layers if ".experts." not in name}
    assert layers == {name for name in expected if not name.endswith(".momentum_buffer")}
    for n_ranks, shardings in ((2, STRATEGIES[:1]), (4, STRATEGIES[3:4])):
        for results in run_ranks(n_ranks, train_from, str(tmp_path), shardings):
            assert len(results) == len(shardings)
            for tensors in results:
                different = [n for n in expected if not torch.equal(tensors[n], expected[n])]
                assert not different


def train_with_exchanges_of(
    world: World, most_values: int, shardings: tuple[str, ...]
) -> list[dict[str, Tensor]]:
    muon.EXCHANGED_VALUES = most_values
    return train_with_each(world, shardings)


@pytest.mark.slow
def test_muon_gives_equal_weights_on_any_ranks() -> None:
    [[expected]] = run_ranks(1, train_with_each, STRATEGIES[:1])
    results = []
    for n_ranks, shardings in ((2, STRATEGIES[:3]), (3, STRATEGIES[:1]), (4, STRATEGIES)):
        for result in run_ranks(n_ranks, train_with_each, shardings):
            results += result
    assert len(results) == 2 * 3 + 3 * 1 + 4 * 5
    # Each round alone, of which the last has fewer matrices than ranks, and some together.
    for most_values in (0, 6000):
        for result in run_ranks(5, train_with_exchanges_of, most_values, STRATEGIES[:1]):
            results += result
    for tensors in results:
        different = [name for name in expected if not torch.equal(tensors[name], expected[name])]
        assert not different


@pytest.mark.parametrize("n_ranks", [1, 3, 4, 100])
def test_muon_owners_share_the_work(n_ranks: int) -> None:
    shapes = 12 * [(64, 64), (64, 64), (16, 64), (16, 64), (256, 64), (64, 256)]
    rounds = muon.plan_exchanges(shapes, n_ranks, 0)
    assert len(rounds) == math.ceil(len(shapes) / n_ranks)
    assert max(len(matrices) for owned in rounds for matrices in owned) == 1
    found: list[int] = []
    flops = [0] * n_ranks
    for owned in rounds:
        for rank, matrices in enumerate(owned):
            found += matrices
            flops[rank] += sum(muon.orthogonalization_flops(shapes[matrix]) for matrix in matrices)
    assert sorted(found) == list(range(len(shapes)))
    largest = max(muon.orthogonalization_flops(shape) for shape in shapes)
    assert max(flops) <= sum(flops) / n_ranks + largest


def test_muon_exchanges_rounds_of_small_matrices_together() -> None:
    shapes = [(4, 4), (8, 8), (8, 8), (4, 4), (2, 2)]
    assert muon.plan_exchanges(shapes, 2, 0) == [[[1], [2]], [[0], [3]], [[4], []]]
    assert muon.plan_exchanges(shapes, 2, 36) == [[[1], [2]], [[0, 4], [3]]]
    assert muon.plan_exchanges(shapes, 2, 160) == [[[1, 0], [2, 3]], [[4], []]]
    assert muon.plan_exchanges(shapes, 2, 164) == [[[1, 0, 4], [2, 3]]]


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"cpu_offload": True}, "cpu_offload"), ({"lora_rank": 2, "init_from": "x"}, "lora_rank")],
)
def test_muon_is_refused_with(changes: dict[str, Any], key: str) -> None:
    settings = {"hyperparameters": TINY | {"optimizer": "muon"} | changes}
    with pytest.raises(ConfigError) as caught:
        read_hyperparameters(settings, [], "test")
    assert named_keys(caught.value) >= {"optimizer", key}


@pytest.mark.slow
def test_muon_resumes_bit_for_bit_and_on_more_ranks(tmp_path: Path) -> None:
    run = EXACT_RUN | {
        "optimizer": "muon",
        "dropout": 0.0,
        "total_batch_size": 4,
        "checkpoint_rate": 3,
        "max_steps": 6,
    }
    run_fsdp(tmp_path / "2", "keep_checkpoints=null", ranks=2, config=run, code=0)
    expected = read_exact_metrics(tmp_path / "2")
    source = checkpoints_by_step(tmp_path / "2")[3]
    for n_ranks in (2, 4):
        folder = tmp_path / f"resumed-{n_ranks}"
        run_fsdp(folder, f"resume={source}", ranks=n_ranks, config=run, code=0)
        found = read_exact_metrics(folder)
        assert sorted(found) == [4, 5, 6]
        for step, metrics in found.items():
            if n_ranks == 2:
                assert metrics == expected[step]
            else:
                assert metrics["loss"] == pytest.approx(expected[step]["loss"], rel=1e-6)
