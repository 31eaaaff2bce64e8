"""Experts of classes of transformers in NF4 train as the dequantized ones of the class do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lm.config.hyperparameters import Hyperparameters
from lm.training import lora, nf4, parallelize
from lm.transformers_model import NETWORK, new_model
from tests.support.hf import read_with_model_defaults, save_model, train_reference
from tests.support.parallelism import train_each
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("shared_cache"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT reads it
        "ignore:Setting `save_embedding_layers`",
    ),
]

# ---- bytes and products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_bitsandbytes_for_the_matrix_of_each_expert(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    weight = torch.randn(3, 20, 192, generator=torch.Generator().manual_seed(0))
    weight[1] *= torch.logspace(-3, 3, 20)[:, None]
    weight = weight.to(dtype)
    packed = nf4.quantize(weight)
    assert packed.shape == (3, 20, 108)
    assert nf4.count_weights(packed) == weight.numel()
    for of_expert, matrix in zip(packed, weight, strict=True):
        expected, state = functional.quantize_4bit(
            matrix, blocksize=64, quant_type="nf4", compress_statistics=False
        )
        assert of_expert[:, :96].flatten().equal(expected.flatten())
        scales = of_expert[:, 96:].contiguous().view(torch.float32)
        assert scales.flatten().equal(state.absmax)
        dequantized = functional.dequantize_4bit(expected, state)
        assert nf4.dequantize(of_expert, dtype).equal(dequantized)


ENDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
"""of groups, of which two have no rows"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_are_those_of_dequantized_matrices(
    is_transposed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = nf4.quantize(torch.randn(4, 64, 128, generator=generator))
    dense = nf4.dequantize(packed.flatten(0, 1), dtype).view(4, 64, 128)
    matrices = dense if is_transposed else dense.mT
    x = torch.randn(20, matrices.shape[1], generator=generator).to(dtype).requires_grad_()
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = nf4.grouped_mm(x, packed, ENDS, is_transposed)
    starts = [0, *ENDS.tolist()]
    groups = [x[start:end] for start, end in zip(starts, ENDS.tolist(), strict=False)]
    expected = torch.cat([rows @ matrix for rows, matrix in zip(groups, matrices, strict=True)])
    assert y.equal(expected)
    direction = torch.randn(y.shape, generator=generator).to(dtype)
    (gradient,) = torch.autograd.grad(y, x, direction)
    assert gradient.equal(torch.autograd.grad(expected, x, direction)[0])
    assert sorted(saved) == sorted([packed.shape, ENDS.shape])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(nf4.grouped_mm, (x, packed, ENDS, is_transposed), test_utils=tests)


# ---- runs

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 3, "intermediate_size": 128},
    "granitemoe": {"num_local_experts": 3, "intermediate_size": 128},
    "mixtral": {"num_local_experts": 3, "intermediate_size": 128},
    "nemotron_h": {"n_routed_experts": 4, "moe_intermediate_size": 128},
    "olmoe": {"num_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 128},
    "qwen3_5_moe_text": {"num_experts": 3, "moe_intermediate_size": 128},
}
"""Sizes of small models: fewer experts than ranks, and but for OLMoE's second product all matrices
of complete blocks. gpt-oss has matrices from inputs to outputs, and biases, Nemotron-H no gate."""
TRAINING: dict[str, Any] = {
    "dataset": "synthetic",
    "lora_rank": 3,
    "lora_targets": ATTENTION,
    "base_dtype": "nf4",
    "max_steps": 6,
    "report_rate": 1,
    "validation_rate": 6,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "total_batch_size": 4,
    "max_seq_len": 24,
    "lr": 1e-3,
    "grad_clip": 1.0,
    "amp_dtype": None,
    "num_tokens": 5,
    "seed": 7,
}
STRATEGIES: dict[int, dict[str, Any]] = {
    1: {"batch_size": 4},
    2: {"batch_size": 1, "activation_checkpointing": "full"},
    4: {"batch_size": 1, "sharding": "grad-shard", "activation_checkpointing": "selective"},
}
"""by ranks"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind, sizes in KINDS.items():
        save_model(kind, folder / kind, sizes)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def losses(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, list[float]]]:
    """By ranks, and by kind of model."""
    found: dict[int, dict[str, list[float]]] = {}
    for ranks, options in STRATEGIES.items():
        runs = {kind: TRAINING | {"init_from": str(models[kind])} | options for kind in KINDS}
        folder = tmp_path_factory.mktemp("trained")
        found[ranks] = run_ranks(ranks, train_each, str(folder), runs, {})[0]
    return found


def build_adapted(hp: Hyperparameters) -> Any:
    """The model of a run, on the meta device."""
    with torch.device("meta"):
        return lora.add_adapters(new_model(hp.model), hp.lora, None)


def load_dequantized(folder: Path, hp: Hyperparameters) -> Any:
    """The model of the class whose values are those that a run has in NF4."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed = dict(build_adapted(hp).network.named_parameters())
    n_experts = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if packed[name].dtype == torch.uint8:
                rows = nf4.quantize(parameter).flatten(0, -2)
                parameter.copy_(nf4.dequantize(rows, torch.float32).view_as(parameter))
                n_experts += parameter.dim() == 3
    assert n_experts
    return model


def train_with_peft(folder: Path, hp: Hyperparameters) -> list[float]:
    """The losses of PEFT's adapters on dequantized matrices, from our initial values."""
    import peft  # imports torchao, which takes seconds: not in all ranks

    adapted = build_adapted(hp).to_empty(device="cpu")
    parallelize.initialize_parameters(adapted, 7)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=16, target_modules=hp.lora.lora_targets
    )
    model = peft.get_peft_model(load_dequantized(folder, hp), config).train()
    parameters = dict(model.named_parameters())
    for name, tensor in lora.trained_parameters(adapted).items():
        theirs = name.replace(NETWORK, "base_model.model").replace(".weight", ".default.weight")
        parameters[theirs].data.copy_(tensor)
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=hp.optim.lr, weight_decay=hp.optim.weight_decay)
    return train_reference(model, optimizer, hp, 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_experts_in_nf4_train_as_peft_on_dequantized_ones(
    kind: str, models: dict[str, Path], losses: dict[int, dict[str, list[float]]]
) -> None:
    hp = read_with_model_defaults(TRAINING | {"init_from": str(models[kind])})
    expected = train_with_peft(models[kind], hp)
    for ranks in STRATEGIES:
        assert losses[ranks][kind] == pytest.approx(expected, rel=1e-6), ranks
