"""Experts of classes of transformers, in NF4 and with adapters, train as those of PEFT do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lm.any_model import new_model
from lm.config.hyperparameters import Hyperparameters
from lm.errors import ConfigError
from lm.hf import export, weights
from lm.hf.base import load_trained_model
from lm.training import four_bits, lora, parallelize
from lm.training.four_bits import FORMATS, NF4, Format, quantize_nf4
from lm.transformers_config import TransformersConfig
from lm.transformers_model import NETWORK
from tests.support.hf import complete_values, read_with_model_defaults, save_model, train_reference
from tests.support.parallelism import train_each
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, run_fsdp

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
    packed = quantize_nf4(weight)
    assert packed.shape == (3, 20, 108)
    assert NF4.count_weights(packed) == weight.numel()
    for of_expert, matrix in zip(packed, weight, strict=True):
        expected, state = functional.quantize_4bit(
            matrix, blocksize=64, quant_type="nf4", compress_statistics=False
        )
        assert of_expert[:, :96].flatten().equal(expected.flatten())
        scales = of_expert[:, 96:].contiguous().view(torch.float32)
        assert scales.flatten().equal(state.absmax)
        dequantized = functional.dequantize_4bit(expected, state)
        assert NF4.dequantize(of_expert, dtype).equal(dequantized)


ENDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
"""of groups, of which two have no rows"""


def random_bytes(form: Format, generator: torch.Generator) -> Tensor:
    """Bytes of `(4, 64, 128)` weights."""
    if form is NF4:
        return quantize_nf4(torch.randn(4, 64, 128, generator=generator))
    pairs = torch.randint(256, (4, 64, 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 128, (4, 64, 4), generator=generator, dtype=torch.uint8)
    return torch.cat([pairs, scales], dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_products_are_those_of_dequantized_matrices(
    form: Format, is_transposed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = random_bytes(form, generator)
    dense = form.dequantize(packed.flatten(0, 1), dtype).view(4, 64, 128)
    matrices = dense if is_transposed else dense.mT
    x = torch.randn(20, matrices.shape[1], generator=generator).to(dtype).requires_grad_()
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = four_bits.grouped_mm(x, packed, ENDS, form.name, is_transposed)
    starts = [0, *ENDS.tolist()]
    groups = [x[start:end] for start, end in zip(starts, ENDS.tolist(), strict=False)]
    expected = torch.cat([rows @ matrix for rows, matrix in zip(groups, matrices, strict=True)])
    assert y.equal(expected)
    direction = torch.randn(y.shape, generator=generator).to(dtype)
    (gradient,) = torch.autograd.grad(y, x, direction)
    assert gradient.equal(torch.autograd.grad(expected, x, direction)[0])
    assert sorted(saved) == sorted([packed.shape, ENDS.shape])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x, packed, ENDS, form.name, is_transposed)
    torch.library.opcheck(four_bits.grouped_mm, arguments, test_utils=tests)


# ---- runs

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = (
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "nemotron_h",
    "olmoe",
    "qwen3_moe",
)
"""gpt-oss has matrices from inputs to outputs, and biases, Nemotron-H no gate."""
NUMBERS = {"num_experts": 3, "num_local_experts": 3}
"""of experts, fewer than ranks; DeepSeek V3 and Nemotron-H have four"""
WIDTHS = {"intermediate_size": 128, "moe_intermediate_size": 128}
"""of which all matrices are complete blocks; OLMoE keeps another one, of which some are not"""
TRAINING: dict[str, Any] = {
    "dataset": "synthetic",
    "lora_rank": 3,
    "base_dtype": "nf4",
    "max_steps": 4,
    "report_rate": 1,
    "validation_rate": 4,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "total_batch_size": 4,
    "max_seq_len": 24,
    "lr": 1e-3,
    "grad_clip": 1.0,
    "adam_eps": 1e-3,
    "amp_dtype": None,
    "num_tokens": 5,
    "seed": 7,
}
"""With an epsilon that keeps AdamW from dividing what is rounding by itself."""
STRATEGIES: dict[int, dict[str, Any]] = {
    1: {"batch_size": 4, "base_dtype": None},
    2: {"batch_size": 1, "activation_checkpointing": "full"},
    4: {"batch_size": 1, "sharding": "grad-shard", "activation_checkpointing": "selective"},
}
"""by ranks"""
KINDS_BY_RANKS = {1: ("gpt_oss", "nemotron_h", "qwen3_moe"), 2: KINDS, 4: ("gpt_oss", "qwen3_moe")}
"""one of each layout on one rank, without NF4; fewer experts than ranks on four"""


def targets_in(kind: str) -> list[str]:
    if kind == "nemotron_h":
        return [*ATTENTION, "experts.up_proj", "experts.down_proj"]
    if kind == "deepseek_v3":
        return ["q_b_proj", "o_proj", *EXPERTS]
    return [*ATTENTION, *EXPERTS]


def settings(kind: str, models: dict[str, Path], **changes: Any) -> dict[str, Any]:
    return TRAINING | {"init_from": str(models[kind]), "lora_targets": targets_in(kind)} | changes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        values = complete_values(kind)
        sizes = NUMBERS if kind == "olmoe" else NUMBERS | WIDTHS
        save_model(kind, folder / kind, {key: sizes[key] for key in sizes if key in values})
    return {path.name: path for path in folder.iterdir()}


class Trained(NamedTuple):
    """Runs of all kinds on some ranks."""

    folder: Path
    losses: dict[str, list[float]]


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Trained]:
    """By ranks; one of two stops half-way, and resumes."""
    found: dict[int, Trained] = {}
    for ranks, options in STRATEGIES.items():
        folder = tmp_path_factory.mktemp("trained")
        kinds = KINDS_BY_RANKS[ranks]
        runs = {kind: settings(kind, models, **options) for kind in kinds}
        if ranks == 2:
            stopped = runs["gpt_oss"] | {"stop_at_step": 2}
            run_ranks(ranks, train_each, str(folder), {"resumed": stopped}, {})
            runs["resumed"] = runs["gpt_oss"]
        found[ranks] = Trained(folder, run_ranks(ranks, train_each, str(folder), runs, {})[0])
    return found


def build_adapted(hp: Hyperparameters) -> Any:
    """The model of a run, on the meta device."""
    assert isinstance(hp.model, TransformersConfig)
    n_experts = 4 if hp.model.model_type in ("deepseek_v3", "nemotron_h") else 3
    assert {matrices.n_experts for matrices in hp.model.experts} == {n_experts}
    with torch.device("meta"):
        return lora.add_adapters(new_model(hp.model), hp.lora, None)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_dequantized(folder: Path, hp: Hyperparameters) -> Any:
    """The model of the class whose values are those that a run has in NF4."""
    model = load(folder)
    packed = dict(build_adapted(hp).network.named_parameters())
    n_experts = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if packed[name].dtype == torch.uint8:
                rows = quantize_nf4(parameter).flatten(0, -2)
                parameter.copy_(NF4.dequantize(rows, torch.float32).view_as(parameter))
                n_experts += parameter.dim() == 3
    assert (n_experts > 0) is (hp.lora.base_dtype == "nf4")
    return model


def in_peft(name: str, tensor: Tensor, targets: list[str]) -> tuple[str, Tensor]:
    """The name and the layout of an adapter in a model of PEFT."""
    name = name.replace(NETWORK, "base_model.model")
    if tensor.dim() == 2:
        return name.replace(".weight", ".default.weight"), tensor
    module, part, matrix = name.rsplit(".", 2)
    if matrix != targets[-1].rpartition(".")[2]:
        module += ".base_layer"
    if part == "lora_A":
        tensor = torch.cat(list(tensor))
    else:  # the column of expert e and rank r is r E + e
        columns = [of_expert[:, rank] for rank in range(3) for of_expert in tensor]
        tensor = torch.stack(columns, dim=1)
    return f"{module}.{part}.default.weight", tensor


class Reference(NamedTuple):
    """What PEFT trains from our initial values, in a plain loop."""

    losses: list[float]
    adapters: dict[str, Tensor]
    """as PEFT saves them"""


def train_with_peft(folder: Path, hp: Hyperparameters) -> Reference:
    import peft  # imports torchao, which takes seconds: not in all ranks

    adapted = build_adapted(hp).to_empty(device="cpu")
    parallelize.initialize_parameters(adapted, 7)
    targets = hp.lora.lora_targets
    assert isinstance(targets, list)
    of_layers = [target for target in targets if "." not in target]
    of_experts = [target for target in targets if "." in target]
    options: dict[str, Any] = {"target_modules": of_layers, "target_parameters": of_experts}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=16, **options)
    model = peft.get_peft_model(load_dequantized(folder, hp), config).train()
    parameters = dict(model.named_parameters())
    initial = lora.trained_parameters(adapted)
    for name, tensor in initial.items():
        theirs, values = in_peft(name, tensor, targets)
        parameters[theirs].data.copy_(values)
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    assert len(trained) == len(initial)
    assert sum(parameter.numel() for parameter in trained) == hp.n_trained_parameters
    optimizer = torch.optim.AdamW(
        trained, lr=hp.optim.lr, eps=hp.optim.adam_eps, weight_decay=hp.optim.weight_decay
    )
    losses = train_reference(model, optimizer, hp, 7)
    return Reference(losses, peft.get_peft_model_state_dict(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_experts_train_as_in_peft_and_are_exported_for_it(
    kind: str, models: dict[str, Path], trained: dict[int, Trained], tmp_path: Path
) -> None:
    import peft

    hp = read_with_model_defaults(settings(kind, models))
    expected = train_with_peft(models[kind], hp)
    assert trained[2].losses[kind] == pytest.approx(expected.losses, rel=1e-6)
    if kind in KINDS_BY_RANKS[4]:
        assert trained[4].losses[kind] == pytest.approx(expected.losses, rel=1e-6)
    if kind in KINDS_BY_RANKS[1]:
        dense = read_with_model_defaults(settings(kind, models, base_dtype=None))
        of_dense = train_with_peft(models[kind], dense).losses
        assert trained[1].losses[kind] == pytest.approx(of_dense, rel=1e-6)
        assert of_dense != pytest.approx(expected.losses, rel=1e-6)

    (checkpoint,) = checkpoints_by_step(trained[2].folder, kind).values()
    export.export_model(checkpoint, tmp_path / "adapter", adapters_only=True)
    export.export_model(checkpoint, tmp_path / "merged")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == expected.adapters.keys()
    for name, tensor in expected.adapters.items():
        torch.testing.assert_close(stored[name], tensor, atol=1e-5, rtol=0)
    dequantized = load_dequantized(models[kind], hp)
    loaded = peft.PeftModel.from_pretrained(dequantized, str(tmp_path / "adapter"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        logits = loaded(tokens).logits
        merged = load(tmp_path / "merged")(tokens).logits
        torch.testing.assert_close(logits, merged, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(load(models[kind])(tokens).logits, merged, atol=1e-3)


@pytest.mark.slow
def test_runs_with_adapters_on_experts_resume_exactly(trained: dict[int, Trained]) -> None:
    folder = trained[2].folder
    assert len(trained[2].losses["resumed"]) == 4
    assert read_exact_metrics(folder, name="resumed") == read_exact_metrics(folder, name="gpt_oss")


@pytest.mark.slow
def test_experts_of_a_checkpoint_are_quantized_as_a_base(
    models: dict[str, Path], tmp_path: Path
) -> None:
    complete = settings("qwen3_moe", models, max_steps=1, checkpoint_rate=1, batch_size=4)
    complete |= {"lora_rank": None, "lora_targets": None, "base_dtype": None}
    run_fsdp(tmp_path, config=complete, code=0)
    checkpoint = checkpoints_by_step(tmp_path)[1]
    hp = read_with_model_defaults(settings("qwen3_moe", models) | {"init_from": str(checkpoint)})
    model = build_adapted(hp).to_empty(device="cpu")
    weights.read_directory(checkpoint, model)
    dense = load_trained_model(checkpoint, torch.device("cpu"))
    packed = dict(model.named_parameters())
    for name, weight in dense.named_parameters():
        if "experts" in name:
            assert packed[name].equal(quantize_nf4(weight)), name


# ---- what has adapters


@pytest.mark.slow
def test_default_adapts_no_experts_and_says_so(models: dict[str, Path]) -> None:
    hp = read_with_model_defaults(settings("qwen3_moe", models, lora_targets=None))
    model = build_adapted(hp)
    assert not [name for name in lora.trained_parameters(model) if "experts" in name]
    (note,) = lora.notes(hp.lora, model)
    assert re.search(r"adapters change .* stay .*experts\.gate_up_proj \(", note)


def test_all_targets_are_those_as_wide_as_the_rank(models: dict[str, Path]) -> None:
    hp = read_with_model_defaults(settings("qwen3_moe", models, lora_targets="all"))
    model = build_adapted(hp)
    trained = lora.trained_parameters(model)
    assert trained["network.model.layers.0.mlp.experts.lora_A.down_proj"].shape == (3, 3, 128)
    assert trained["network.model.layers.0.mlp.experts.lora_B.down_proj"].shape == (3, 64, 3)
    assert sum(tensor.numel() for tensor in trained.values()) == hp.n_trained_parameters
    assert lora.notes(hp.lora, model) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 65}, r"lora_rank: 65 exceeds .* experts\.gate_up_proj \(256 x 64\)"),
        ({"lora_targets": ["experts.w1"]}, r"no layer experts\.w1 .*experts\.down_proj"),
        ({"lora_dropout": 0.1}, r"lora_dropout: 0\.1 .* experts\.gate_up_proj, as in PEFT; use 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_experts_is_refused(
    changes: dict[str, Any], message: str, models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_with_model_defaults(settings("qwen3_moe", models, lora_targets=EXPERTS) | changes)


@pytest.mark.slow
def test_experts_of_another_form_are_refused_by_name(tmp_path: Path) -> None:
    save_model("jetmoe", tmp_path)
    run = TRAINING | {"init_from": str(tmp_path), "lora_targets": ["experts.down_proj"]}
    with pytest.raises(ConfigError, match=r"experts\.down_proj that can be adapted; choose from"):
        read_with_model_defaults(run)
