"""Any causal model of transformers is read and written as transformers does, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from lm.errors import ConfigError, RunError
from lm.hf.class_export import export_directory
from lm.hf.class_weights import open_weights
from tests.support.hf import LLAMA
from tests.support.hf import save_model as save_small_model
from tests.support.ranks import run_ranks
from tests.support.saved_models import (
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA3_TEXT,
    HRM,
    MISTRAL3,
    QWEN3_5_MOE,
    QWEN3_MOE,
    get_from,
    load_all,
    make_model,
    read_network,
    read_on_ranks,
)

CAUSAL = {"llama": LLAMA, "experts": QWEN3_MOE, "fused": HRM, "latent": DEEPSEEK_V3}
WRAPPERS = {"gemma3": GEMMA3, "qwen3.5 experts": QWEN3_5_MOE, "mistral3, tied": MISTRAL3}
KINDS = CAUSAL | WRAPPERS
GROUPED = LLAMA | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
DENSE = {
    "gemma3_text": GEMMA3_TEXT | {"sliding_window": 4, "query_pre_attn_scalar": 7},
    "glm4": GROUPED | {"model_type": "glm4"},
    "granite": GROUPED | {"model_type": "granite", "residual_multiplier": 0.75},
    "olmo3": GROUPED | {"model_type": "olmo3", "sliding_window": 4},
    "phi3": GROUPED | {"model_type": "phi3"},
    "smollm3": GROUPED | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
}
"""Dense models with options that model.py does not have."""
OF_EXPERTS = GROUPED | {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
MIXTURES = {
    kind: OF_EXPERTS | {"model_type": kind}
    for kind in ("gpt_oss", "granitemoe", "mixtral", "olmoe")
}
"""Experts interleaved, fused, and one by one with two sets of names."""


def save_model(raw: Mapping[str, Any], directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save the model of a config in several files, with files that only its users know."""
    model = make_model(raw).to(dtype)
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "preprocessor_config.json").write_text('{"size":  16}')
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    (directory / "assets").mkdir()
    (directory / "assets" / "tokens.model").write_bytes(bytes(range(256)))
    return model


def text_logits(model: Any) -> Tensor:
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits


def contents(directory: Path) -> dict[str, Any]:
    """What the tensors in a directory are, by name, and the bytes of its other files."""
    found: dict[str, Any] = {}
    for name, tensor in load_all(directory).items():
        found[name] = (tensor.dtype, tensor.tolist())
    for path in directory.rglob("*"):
        if path.is_file() and ".safetensors" not in path.name:
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found


@pytest.mark.parametrize("kind", KINDS | DENSE | MIXTURES)
def test_read_equals_transformers_and_export_equals_the_source(kind: str, tmp_path: Path) -> None:
    model = save_model((KINDS | DENSE | MIXTURES)[kind], tmp_path / "source")
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    torch.testing.assert_close(text_logits(network), text_logits(model), rtol=0, atol=0)
    export_directory(opened, get_from(network), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "source")


def test_parts_of_unlike_size_are_read_and_not_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_small_model("olmo_hybrid", source, {"linear_value_head_dim": 32})
    tensors = load_all(source)
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        joined = torch.cat(
            [tensors[each] for each in names]
        )  # transformers wrote parts of one size
        tensors |= zip(names, joined.split((32, 32, 64)), strict=True)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    opened = open_weights(source)
    assert read_network(opened).state_dict().keys() >= opened.names.keys()
    with pytest.raises(ConfigError, match=r"conv1d.weight: \[.*\] in the files, \[.*\] if written"):
        opened.require_savable()


@pytest.mark.parametrize("kind", ["experts", "mistral3, tied"])
def test_ranks_read_their_shards_and_no_more_than_a_layer_at_a_time(
    kind: str, tmp_path: Path
) -> None:
    save_model(KINDS[kind], tmp_path / "source", torch.bfloat16)
    first, second = run_ranks(2, read_on_ranks, tmp_path / "source")
    assert first.are_equal
    assert second.are_equal
    assert 0 < max(first.peak_bytes, second.peak_bytes) < first.layer_bytes
    assert first.shapes.keys() == second.shapes.keys()
    if kind == "experts":
        experts = "model.layers.0.mlp.experts.gate_up_proj"
        assert first.shapes[experts][0] == 2
        assert second.shapes[experts][0] == 1


@pytest.mark.parametrize("kind", ["experts", "qwen3.5 experts"])
def test_trained_weights_are_written_and_other_parts_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.hf.class_export.FILE_SIZE", "30KB")
    save_model(KINDS[kind], tmp_path / "source")
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    export_directory(opened, get_from(network), tmp_path / "out")
    source = load_all(tmp_path / "source")
    out = load_all(tmp_path / "out")
    assert source.keys() == out.keys()
    others = [name for name in source if source[name].equal(out[name])]
    assert len(others) == len(opened.other_parts)
    assert all(".visual." in name for name in others)
    model_class = transformers.AutoModelForCausalLM
    if opened.other_parts:
        model_class = transformers.AutoModelForImageTextToText
    loading: Any = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    loaded, report = loading
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys"))
    torch.testing.assert_close(text_logits(loaded), text_logits(network), rtol=0, atol=0)


def save_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Let `directory` have one file of weights, with `tensors`."""
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    save_file(dict(tensors), directory / "model.safetensors")


def test_other_dtype_keeps_other_parts_and_what_transformers_keeps_in_float32(
    tmp_path: Path,
) -> None:
    save_model(DEEPSEEK_V3, tmp_path / "source")
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    export_directory(opened, get_from(network), tmp_path / "out", "bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    source = load_all(tmp_path / "source")
    for name, tensor in load_all(tmp_path / "out").items():
        is_kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_kept else torch.bfloat16), name
        assert tensor.equal(source[name].to(tensor.dtype)), name

    save_model(GEMMA3, tmp_path / "wrapper")
    opened = open_weights(tmp_path / "wrapper")
    network = read_network(opened)
    export_directory(opened, get_from(network), tmp_path / "half", "bfloat16")
    for name, tensor in load_all(tmp_path / "half").items():
        is_other = "vision_tower" in name or "multi_modal" in name
        assert tensor.dtype == (torch.float32 if is_other else torch.bfloat16), name


def test_tensors_of_a_wider_dtype_than_most_are_exact(tmp_path: Path) -> None:
    save_model(LLAMA, tmp_path / "source", torch.bfloat16)
    tensors = load_all(tmp_path / "source")
    norm = "model.layers.1.input_layernorm.weight"
    tensors[norm] = tensors[norm].float() + 1e-5
    assert not tensors[norm].bfloat16().float().equal(tensors[norm])
    save_tensors(tmp_path / "source", tensors)
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    assert network.state_dict()[norm].equal(tensors[norm])
    export_directory(opened, get_from(network), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "source")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    save_model(LLAMA, tmp_path / "source")
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    with torch.no_grad():
        network.lm_head.weight[5, 3] = 1e5
    with pytest.raises(RunError, match=r"lm_head.weight: has values above 65504"):
        export_directory(opened, get_from(network), tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()


def test_files_are_replaced_and_other_formats_left_out(tmp_path: Path) -> None:
    save_model(LLAMA, tmp_path / "source")
    shutil.copytree(tmp_path / "source" / "assets", tmp_path / "source" / ".cache")
    (tmp_path / "source" / "original.pth").write_bytes(b"weights")
    opened = open_weights(tmp_path / "source")
    export_directory(
        opened,
        get_from(read_network(opened)),
        tmp_path / "out",
        files={"chat_template.jinja": b"new", "more.json": b"{}"},
    )
    changed = {"chat_template.jinja": b"new", "more.json": b"{}"}
    kept = {
        name: content
        for name, content in contents(tmp_path / "source").items()
        if name != "original.pth" and not name.startswith(".cache")
    }
    assert contents(tmp_path / "out") == kept | changed
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert modes == {(tmp_path / "source" / "config.json").stat().st_mode}


def test_read_of_the_bare_model_with_a_tied_head(tmp_path: Path) -> None:
    raw = LLAMA | {"tie_word_embeddings": True}
    model = make_model(raw)
    model.model.save_pretrained(tmp_path / "bare")
    assert "embed_tokens.weight" in load_all(tmp_path / "bare")
    opened = open_weights(tmp_path / "bare")
    network = read_network(opened)
    torch.testing.assert_close(text_logits(network), text_logits(model), rtol=0, atol=0)
    export_directory(opened, get_from(network), tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(text_logits(exported), text_logits(model), rtol=0, atol=0)


def test_copies_of_tied_weights_must_be_equal(tmp_path: Path) -> None:
    raw = LLAMA | {"tie_word_embeddings": True}
    save_model(raw, tmp_path / "source")
    tensors = load_all(tmp_path / "source")
    embedding = tensors["model.embed_tokens.weight"]
    save_tensors(tmp_path / "source", tensors | {"lm_head.weight": embedding.clone()})
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    export_directory(opened, get_from(network), tmp_path / "out")
    assert contents(tmp_path / "source").items() >= contents(tmp_path / "out").items()
    assert read_network(open_weights(tmp_path / "out")).lm_head.weight.equal(embedding)

    save_tensors(tmp_path / "source", tensors | {"lm_head.weight": embedding + 1})
    opened = open_weights(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"ties lm_head.weight to model.embed_tokens.weight, but"):
        read_network(opened)

    head_only = {name: value for name, value in tensors.items() if value is not embedding}
    save_tensors(tmp_path / "source", head_only | {"lm_head.weight": embedding})
    network = read_network(open_weights(tmp_path / "source"))
    assert network.model.embed_tokens.weight.equal(embedding)


def test_unused_tensors_are_named_and_left_out(tmp_path: Path) -> None:
    save_model(QWEN3_5_MOE, tmp_path / "source")
    tensors = load_all(tmp_path / "source")
    tensors |= {"mtp.fc.weight": torch.ones(2, 3), "speech.norm.weight": torch.ones(2)}
    save_tensors(tmp_path / "source", tensors)
    opened = open_weights(tmp_path / "source")
    network = read_network(opened)
    parts, unused = opened.notes(network)
    assert parts.startswith(f"{len(opened.other_parts)} tensors of its other parts are not trained")
    assert parts.endswith(": model.visual")
    assert unused.endswith(": mtp.fc.weight, speech.norm.weight")
    export_directory(opened, get_from(network), tmp_path / "out")
    left_out = contents(tmp_path / "source").keys() - contents(tmp_path / "out").keys()
    assert left_out == {"mtp.fc.weight", "speech.norm.weight"}


Change = Callable[[dict[str, Tensor]], None]


def drop_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_bias(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(32)


def drop_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.1.up_proj.weight"]


def cut_expert(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name][:5].contiguous()


def widen_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = torch.ones(97, 32)


def repeat_norm(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()


def quantize_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_norm, r"model.norm.weight: missing"),
        (add_bias, r"model.layers.1.self_attn.q_proj.bias: unexpected tensor"),
        (drop_expert, r"model.layers.1.mlp.experts.gate_up_proj: .* do not fit together"),
        (cut_expert, r"model.layers.1.mlp.experts.gate_up_proj: .* do not fit together"),
        (widen_head, r"lm_head.weight: \[97, 32\] in the file, \[96, 32\] in config.json"),
        (repeat_norm, r"model.norm.weight: in the files twice, also as one of norm.weight"),
        (quantize_head, r"lm_head.weight: float8_e4m3fn is a quantized dtype"),
    ],
)
def test_tensors_that_do_not_fill_the_network_once_are_refused(
    change: Change, problem: str, tmp_path: Path
) -> None:
    save_model(QWEN3_MOE, tmp_path)
    tensors = load_all(tmp_path)
    change(tensors)
    save_tensors(tmp_path, tensors)
    with pytest.raises(ConfigError, match=problem) as caught:
        open_weights(tmp_path)
    assert len(caught.value.problems) <= 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": None}, "model_type: None"),
        ({"model_type": ["llama"]}, "model_type: "),
        ({"hidden_size": "wide"}, "config.json: .*hidden_size"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(
    changes: Mapping[str, Any], problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_model(LLAMA, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | {"transformers_version": "9.1.0"}
    path.write_text(json.dumps(raw | dict(changes)))
    capfd.readouterr()
    with pytest.raises(ConfigError, match=problem) as caught:
        open_weights(tmp_path)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": None}, {"text_config": GEMMA3_TEXT | {"model_type": []}}]
)
def test_configs_of_wrappers_that_cannot_be_used_are_refused(
    changes: Mapping[str, Any], tmp_path: Path
) -> None:
    save_model(GEMMA3, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    with pytest.raises(ConfigError, match=r"config.json: .*gemma3|model_type"):
        open_weights(tmp_path)


def test_unknown_architectures_are_those_of_the_config(tmp_path: Path) -> None:
    model = save_model(GEMMA3, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [5]}))
    network = read_network(open_weights(tmp_path))
    torch.testing.assert_close(text_logits(network), text_logits(model), rtol=0, atol=0)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    save_model(LLAMA, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name}: missing"):
        open_weights(tmp_path)


def test_export_of_links_writes_files(tmp_path: Path) -> None:
    """As in the Hub's cache, which consists of links."""
    save_model(LLAMA, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        if path.is_file():
            (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    opened = open_weights(tmp_path / "snapshot")
    export_directory(opened, get_from(read_network(opened)), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "snapshot")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
