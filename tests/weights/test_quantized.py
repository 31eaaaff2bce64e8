"""Folders in MXFP4 and FP8 are read as transformers dequantizes them, and exported in 16 bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from lm.any_model import new_model
from lm.checkpoint.__main__ import main as checkpoint_command
from lm.errors import ConfigError, RunError
from lm.hf import weights
from lm.hf.base import load_trained_model
from lm.hf.class_export import export_directory
from lm.hf.class_weights import open_weights
from lm.hf.export import export_model
from lm.training import lora
from lm.training.four_bits import MXFP4
from tests.support.hf import LLAMA, read_with_model_defaults
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp
from tests.support.saved_models import (
    DEEPSEEK_V3,
    MISTRAL3,
    get_from,
    load_all,
    make_model,
    read_network,
    read_on_ranks,
)

pytestmark = pytest.mark.usefixtures("shared_cache")

BLOCK = 16
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "mxfp4": GPT_OSS,
    "fp8 of a family of ours": QWEN3,
    "fp8 of experts": DEEPSEEK_V3
    | {"moe_intermediate_size": BLOCK, "q_lora_rank": BLOCK, "kv_lora_rank": BLOCK}
    | {"qk_rope_head_dim": BLOCK},
    "fp8 with exponents as scales": QWEN3,
    "fp8 with bytes of exponents as scales": QWEN3,
    "fp8 in a wrapper": MISTRAL3,
}


def save_quantized(kind: str, directory: Path) -> None:
    """Save a model whose matrices are quantized, in files as they are published."""
    make_model(KINDS[kind]).to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    if kind == "mxfp4":
        describe_quantization(directory, {"quant_method": "mxfp4"})
        change_tensors(directory, quantize_mxfp4)
    elif "wrapper" in kind:
        describe_fp8(directory, activation_scheme="static", weight_block_size=None)
        change_tensors(directory, quantize_as_a_whole)
    else:
        describe_fp8(directory)
        change_tensors(directory, quantize_in_blocks)
    if "exponents" in kind:
        change_tensors(directory, keep_exponents)
    if "bytes" in kind:
        change_tensors(directory, view_as_bytes)


def describe_fp8(directory: Path, **changes: Any) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    describe_quantization(directory, settings | {"weight_block_size": [BLOCK, BLOCK]} | changes)


def describe_quantization(directory: Path, settings: Mapping[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def change_tensors(directory: Path, change: Callable[[str, Tensor], Mapping[str, Tensor]]) -> None:
    """Replace each tensor in the files of `directory` by those that `change` returns."""
    weight_map: dict[str, str] = {}
    for path in directory.glob("*.safetensors"):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            tensors |= {key: each.contiguous() for key, each in change(name, tensor).items()}
        save_file(tensors, path, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def quantize_mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Random bytes, of which all are values, and exponents that float32 and bfloat16 have."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    n_experts, n_in, n_out = tensor.shape
    blocks = torch.randint(0, 256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 126, blocks.shape[:-1], dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def is_matrix_of_a_block(name: str, tensor: Tensor) -> bool:
    is_in_block = ".layers." in name and "vision" not in name
    return is_in_block and tensor.dim() == 2 and not name.endswith("mlp.gate.weight")


def quantize_in_blocks(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not is_matrix_of_a_block(name, tensor):
        return {name: tensor}
    n_blocks = [-(-size // BLOCK) for size in tensor.shape]
    scales = torch.rand(n_blocks) + 0.5
    values = (8 * tensor.float()).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}


def keep_exponents(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("_scale_inv"):
        tensor = tensor.to(torch.float8_e8m0fnu)
    return {name: tensor}


def view_as_bytes(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As OCP's MX formats are stored where float8_e8m0fnu is unknown."""
    if name.endswith("_scale_inv"):
        tensor = tensor.view(torch.uint8)
    return {name: tensor}


def quantize_as_a_whole(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not is_matrix_of_a_block(name, tensor):
        return {name: tensor}
    return {
        name: (8 * tensor.float()).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.rand(()) + 0.5,
        f"{name.removesuffix('weight')}activation_scale": torch.ones(()),
    }


def load_with_transformers(directory: Path, dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        model_class = transformers.AutoModelForImageTextToText
    options: dict[str, Any] = {}
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        kinds = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
        options["quantization_config"] = kinds[quantization["quant_method"]](dequantize=True)
    loading: Any = model_class.from_pretrained(
        directory, dtype=dtype, output_loading_info=True, **options
    )
    model, report = loading
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys"))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_transformers_dequantizes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.hf.class_weights.SENT_BYTES", 1000)  # some rows at a time
    save_quantized(kind, tmp_path / "source")
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    expected = load_with_transformers(tmp_path / "source", torch.float32)
    of_text = {
        name.replace(".language_model", ""): tensor
        for name, tensor in expected.state_dict().items()
    }
    for name, tensor in network.state_dict().items():
        assert tensor.equal(of_text[name]), name
    assert not opened.unused
    assert any("are dequantized" in note for note in opened.notes(network))

    export_directory(opened, get_from(network), tmp_path / "out")
    exported = load_with_transformers(tmp_path / "out", torch.bfloat16)
    assert not hasattr(exported.config, "quantization_config")
    expected = expected.to(torch.bfloat16).state_dict()
    for name, tensor in exported.state_dict().items():
        assert tensor.equal(expected[name]), name


def test_smaller_last_blocks_which_transformers_takes_for_others_are_refused(
    tmp_path: Path,
) -> None:
    raw = QWEN3 | {"intermediate_size": 56}
    make_model(raw).save_pretrained(tmp_path)
    describe_fp8(tmp_path)
    change_tensors(tmp_path, quantize_in_blocks)
    stored = load_all(tmp_path)
    assert stored["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (4, 2)  # 4 * 14 == 56
    with pytest.raises(ConfigError, match=r"mlp.*weight: 56 rows or columns are no blocks of 16"):
        open_weights(tmp_path)


@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("fp8 of experts", marks=pytest.mark.slow)])
def test_ranks_dequantize_their_shards(kind: str, tmp_path: Path) -> None:
    save_quantized(kind, tmp_path)
    assert all(rank.are_equal for rank in run_ranks(2, read_on_ranks, tmp_path))


RUN: dict[str, Any] = {
    "dataset": "synthetic",
    "lora_rank": 2,
    "max_steps": 3,
    "report_rate": 1,
    "validation_rate": 3,
    "checkpoint_rate": 3,
    "batch_size": 1,
    "max_seq_len": 16,
    "lr": 1e-2,
    "amp_dtype": None,
}


# ---- MXFP4 that stays


def extend_range(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Exponents from the smallest to the largest one whose values are all in float32."""
    if name.endswith("_scales"):
        numbers = torch.arange(tensor.numel()) % 253
        tensor = numbers.to(torch.uint8).view(tensor.shape)
    return {name: tensor}


def build_in_mxfp4(directory: Path, dtype: torch.dtype | None = None) -> Any:
    """The model of a run on a folder, with `base_dtype: mxfp4`, without values."""
    run = RUN | {"init_from": str(directory), "base_dtype": "mxfp4"}
    hp = read_with_model_defaults(run)
    with torch.device("meta"):
        return lora.add_adapters(new_model(hp.model), hp.lora, dtype)


def test_weights_that_stay_in_mxfp4_have_the_bytes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.hf.class_weights.SENT_BYTES", 1000)  # an expert at a time
    save_quantized("mxfp4", tmp_path)
    change_tensors(tmp_path, extend_range)
    model = build_in_mxfp4(tmp_path)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    model.to_empty(device="cpu")
    weights.read_directory(tmp_path, model)
    assert open_weights(tmp_path).notes(model.network) == []
    expected = load_with_transformers(tmp_path, torch.float32).state_dict()
    n_packed = 0
    for name, parameter in model.network.named_parameters():
        if parameter.dtype == torch.uint8:
            n_packed += 1
            assert sizes[f"network.{name}"] == 17 / 32 * expected[name].numel()
            for packed, matrix in zip(parameter, expected[name], strict=True):
                assert MXFP4.dequantize(packed, torch.float32).T.equal(matrix), name
        elif "lora" not in name:
            assert parameter.equal(expected[name.replace(".base_layer", "")]), name
    assert n_packed == 4


def test_weights_that_stay_in_mxfp4_are_not_dequantized_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import mxfp4

    monkeypatch.setattr(mxfp4, "convert_moe_packed_tensors", None)
    monkeypatch.setattr(mxfp4, "dequantize_convertops", None)
    save_quantized("mxfp4", tmp_path)
    model = build_in_mxfp4(tmp_path).to_empty(device="cpu")
    weights.read_directory(tmp_path, model)


@pytest.mark.slow
def test_mxfp4_is_refused_where_the_files_have_other_weights(tmp_path: Path) -> None:
    run = RUN | {"init_from": str(tmp_path), "base_dtype": "mxfp4"}
    save_quantized("fp8 of experts", tmp_path)
    with pytest.raises(ConfigError, match=r"base_dtype: mxfp4: .* not in MXFP4 .*; use nf4"):
        read_with_model_defaults(run)
    save_quantized("mxfp4", tmp_path)
    model = build_in_mxfp4(tmp_path).to_empty(device="cpu")
    change_tensors(tmp_path, dequantize_up_projections)
    with pytest.raises(ConfigError, match=r"gate_up_proj is not in MXFP4; use base_dtype: nf4"):
        weights.read_directory(tmp_path, model)


def dequantize_up_projections(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("gate_up_proj_scales"):
        return {}
    if name.endswith("gate_up_proj_blocks"):
        return {name.removesuffix("_blocks"): torch.zeros(3, 64, 64, dtype=torch.bfloat16)}
    return {name: tensor}


def test_exponents_beyond_float32_are_refused_in_weights_that_stay_in_mxfp4(
    tmp_path: Path,
) -> None:
    save_quantized("mxfp4", tmp_path)
    model = build_in_mxfp4(tmp_path).to_empty(device="cpu")
    change_tensors(tmp_path, DAMAGES["products beyond bfloat16"][1])
    with pytest.raises(RunError, match=r"_proj: contains inf or NaN"):
        weights.read_directory(tmp_path, model)


# ---- runs


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", [None, "mxfp4"])
def test_a_run_on_a_quantized_folder_is_one_on_its_weights(
    base_dtype: str | None, tmp_path: Path
) -> None:
    source, dense = tmp_path / "source", tmp_path / "dense"
    save_quantized("mxfp4", source)
    opened = open_weights(source)
    export_directory(opened, get_from(read_network(opened)), dense, "float32")
    run = RUN | {"base_dtype": base_dtype, "lora_targets": "all"}
    is_kept = base_dtype == "mxfp4"
    losses: list[list[float]] = []
    tokens = torch.arange(16)[None]
    for base in (source, dense):
        folder = tmp_path / f"of {base.name}"
        config = run | {"init_from": str(base)}
        if is_kept and base == dense:
            config |= {"base_dtype": None}
        done = run_fsdp(folder, ranks=2, config=config, code=0)
        assert ("dequantized" in done.stdout) is (base == source and not is_kept)
        reports = read_reports(folder)
        losses.append([report["loss"] for report in reports.values()])
        checkpoint = checkpoints_by_step(folder)[3]
        assert checkpoint_command(["verify", str(checkpoint)]) == 0
        of_run = load_trained_model(checkpoint, torch.device("cpu"))
        export_model(checkpoint, tmp_path / f"{base.name} trained", "float32")
        exported = load_with_transformers(tmp_path / f"{base.name} trained", torch.float32)
        with torch.no_grad():
            logits = exported(tokens).logits
            bound = 1e-6 * logits.abs().max().item()
            torch.testing.assert_close(logits, of_run(tokens), atol=bound, rtol=0)
        export_model(checkpoint, tmp_path / f"{base.name} adapter", adapters_only=True)
    # Their products are computed in another order.
    allowed = 1e-6 if is_kept else 0
    assert losses[0] == pytest.approx(losses[1], rel=allowed, abs=0)
    for kind in ("trained", "adapter"):
        of_source = load_all(tmp_path / f"{source.name} {kind}")
        assert of_source.keys() == load_all(tmp_path / f"{dense.name} {kind}").keys()
        for name, tensor in load_all(tmp_path / f"{dense.name} {kind}").items():
            torch.testing.assert_close(of_source[name], tensor, atol=100 * allowed, rtol=0)
    resumed = run | {"init_from": str(source), "max_steps": 4}
    done = run_fsdp(tmp_path / "of source", ranks=2, config=resumed, code=0)
    assert "resumed" in done.stdout


DAMAGES: dict[str, tuple[str, Callable[[str, Tensor], dict[str, Tensor]], str]] = {
    "no scales": (
        "fp8 of a family of ours",
        lambda name, tensor: {} if name.endswith("_scale_inv") else {name: tensor},
        r"_proj.weight: its scales are missing",
    ),
    "other blocks": (
        "fp8 of a family of ours",
        lambda name, tensor: {name: tensor[:1] if name.endswith("_scale_inv") else tensor},
        r"_proj.weight: its scales do not fit: torch.float8_e4m3fn \[.*\] and torch.float32 \[1",
    ),
    "no exponents": (
        "mxfp4",
        lambda name, tensor: {} if name.endswith("_scales") else {name: tensor},
        r"_proj_blocks: its scales are missing",
    ),
    "other exponents": (
        "mxfp4",
        lambda name, tensor: {name: tensor[:, :1] if name.endswith("_scales") else tensor},
        r"gate_up_proj_blocks: its scales do not fit",
    ),
    "scales of integers": (
        "fp8 of a family of ours",
        lambda name, tensor: {name: tensor.int() if name.endswith("_scale_inv") else tensor},
        r"_proj.weight: its scales do not fit: torch.float8_e4m3fn \[.*\] and torch.int32",
    ),
    "products beyond bfloat16": (
        "mxfp4",
        lambda name, tensor: {name: tensor.fill_(254) if name.endswith("_scales") else tensor},
        r"_proj(.weight)?: contains inf or NaN",
    ),
    "a value that is none": (
        "fp8 of a family of ours",
        lambda name, tensor: {name: tensor.fill_(torch.nan) if "q_proj.weight" in name else tensor},
        r"_proj(.weight)?: contains inf or NaN",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_dequantized_is_refused(name: str, tmp_path: Path) -> None:
    kind, damage, message = DAMAGES[name]
    save_quantized(kind, tmp_path)
    change_tensors(tmp_path, damage)
    with pytest.raises((ConfigError, RunError), match=message):
        read_network(open_weights(tmp_path))


@pytest.mark.parametrize("method", ["awq", None])
def test_other_quantized_folders_are_refused_with_the_16_bit_one(
    method: str | None, tmp_path: Path
) -> None:
    make_model(QWEN3).save_pretrained(tmp_path)
    describe_quantization(tmp_path, {"quant_method": method})
    with pytest.raises(ConfigError, match=f"{method} .*original .*base_dtype: nf4"):
        weights.read_structure(tmp_path)
