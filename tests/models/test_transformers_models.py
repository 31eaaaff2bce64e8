"""Models that transformers computes train as in transformers, resume, score and export exactly."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.core_model_loading import MergeModulelist
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lm import generate, sampling
from lm.any_model import new_model
from lm.checkpoint.manifest import read_manifest
from lm.config.reading import check_values
from lm.errors import ConfigError
from lm.flops import count_flops_per_token
from lm.hf import __main__ as hf_main
from lm.hf import config_json, examine, export
from lm.hf.base import load_trained_model, open_model, read_adapters
from lm.hf.weights import examined_config
from lm.launch.requirements import print_exception
from lm.model_config import ModelConfig
from lm.runtime.world import World
from lm.tasks.packing import tokenize
from lm.tasks.scoring import Scorer
from lm.tasks.task import Choice, Question, Task
from lm.training import lora, parallelize
from lm.training.config import LoraConfig
from lm.transformers_config import TransformersConfig
from lm.transformers_model import (
    TransformersModel,
    build_network,
    read_config,
    text_config,
)
from tests.support import REPOSITORY
from tests.support.checkpoints import forge_manifest
from tests.support.forked import start_python
from tests.support.hf import (
    add_tokenizer,
    complete_values,
    randomize,
    read_with_model_defaults,
    save_model,
    train_reference,
)
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.parallelism import train_each
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import (
    checkpoints_by_step,
    read_exact_metrics,
    read_reports,
    run_fsdp,
    train_in_world,
)
from tests.support.step_counts import OperatorCounts

pytestmark = [
    pytest.mark.usefixtures("shared_cache"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT reads it
        "ignore:Setting `save_embedding_layers`",
    ),
]

KINDS = ("lfm2", "gemma4_text", "ministral3", "glm4_moe", "qwen3_5_text")
"""convolutions, layers that share keys, scaled queries, latent experts, linear attention"""
MIXTURES = ("gpt_oss", "granitemoe", "mixtral")
"""a class of each layout of the weights of experts: matrices from inputs to outputs with biases,
modules that are not linear layers, and those that others share"""
DENSE = ("gemma3_text", "glm4", "granite", "olmo3", "phi3", "smollm3")
"""windows in some layers, half of a head rotated, multipliers, windows in some layers, matrices
that are several, layers without positions"""
LEAKY = "mamba2"
WRAPPERS = {
    "qwen3_5": "qwen3_5_text",
    "gemma4": "gemma4_text",
    "lfm2_vl": "lfm2",
    "mistral3": "ministral3",
}
"""-> the text model"""
SLOW_WRAPPERS = [kind for kind in WRAPPERS if kind != "qwen3_5"]
VISION = {
    "depth": 1,
    "head_dim": 16,
    "hidden_size": 32,
    "image_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
}
"""sizes of all kinds of encoders"""
TRAINING: dict[str, Any] = {
    "dataset": "synthetic",
    "max_steps": 4,
    "report_rate": 1,
    "validation_rate": 4,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "total_batch_size": 4,
    "batch_size": 2,
    "max_seq_len": 24,
    "lr": 3e-3,
    "adam_eps": 1e-5,
    "grad_clip": 1.0,
    "amp_dtype": None,
    "num_tokens": 5,
    "seed": 7,
}


def save_wrapper(kind: str, text_kind: str, folder: Path) -> None:
    """Save a text model in a wrapper with vision, and files of both."""
    text = complete_values(text_kind) | {"eos_token_id": [0, 7]}
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    config = config_class(text_config=text, vision_config=VISION)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomize(model)
    model.bfloat16().save_pretrained(folder)
    tokenizer = add_tokenizer(folder, 290)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 32}')


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of small models in transformers' format, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for kind in (*KINDS, LEAKY):
        save_model(kind, folder / kind)
    write_chats(folder / LEAKY / "chats.jsonl")
    for kind in MIXTURES:
        save_model(kind, folder / kind, {"num_local_experts": 3})
    for kind, text_kind in WRAPPERS.items():
        save_wrapper(kind, text_kind, folder / kind)
    return {path.name: path for path in folder.iterdir()}


def write_chats(path: Path) -> str:
    lines = []
    for number in range(40):
        answer = "ä" * (3 + 5 * (number % 4))
        lines.append(json.dumps({"prompt": f"{number}? ", "completion": answer}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def settings(source: Path, **changes: Any) -> dict[str, Any]:
    return TRAINING | {"init_from": str(source)} | changes


def settings_of(kind: str, models: dict[str, Path]) -> dict[str, Any]:
    """Hyperparameters of a run; of a class that trains unpacked, on chats, padded in each batch."""
    run = settings(models[kind])
    if kind == LEAKY:
        run |= {"dataset": "jsonl", "train_data": str(models[LEAKY] / "chats.jsonl")}
    return run


def load_reference(folder: Path, **options: Any) -> Any:
    options |= {"dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def reference_losses(folder: Path, hyperparameters: dict[str, Any]) -> list[float]:
    """The loss of each step when a plain loop trains the class of transformers."""
    hp = read_with_model_defaults(hyperparameters)
    model = load_reference(folder).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": hp.optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=hp.optim.lr, eps=hp.optim.adam_eps)
    return train_reference(model, optimizer, hp, 7)


# ---- training


class Trained(NamedTuple):
    """Runs on some ranks."""

    folder: Path
    losses: dict[str, list[float]]


KINDS_BY_RANKS = {1: ("gpt_oss",), 2: (*KINDS, LEAKY), 4: MIXTURES}
"""mixtures on more ranks than experts"""
ACCUMULATED = {"sharding": "grad-shard", "activation_checkpointing": "full", "batch_size": 1}
STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "glm4_moe": {
        "accumulated": ACCUMULATED,
        "one-unit": {"layer_wrap": False, "sharding": "no-shard"},
    },
    "qwen3_5_text": {"accumulated": ACCUMULATED},
}
"""with which kinds train, too"""
MUON = {"optimizer": "muon", "lr": 1e-2}


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<stop>"


def on_chats(source: Path, folder: Path) -> dict[str, Any]:
    """Hyperparameters of a run with another chat template than that of the model."""
    template = folder / "trained.jinja"
    template.write_text(TEMPLATE)
    chats = {"dataset": "jsonl", "train_data": write_chats(folder / "chats.jsonl")}
    chats |= {"chat_template": str(template)}
    return settings(source, validation_rate=2, checkpoint_rate=2, **chats)


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Trained]:
    """Runs by ranks."""
    runs: dict[int, Trained] = {}
    for ranks, kinds in KINDS_BY_RANKS.items():
        folder = tmp_path_factory.mktemp("trained")
        named: dict[str, dict[str, Any]] = {}
        for kind in kinds:
            named[kind] = settings_of(kind, models)
            if ranks == 4:
                named[kind] |= {"batch_size": 1}
        if ranks == 2:
            named["muon"] = named["glm4_moe"] | MUON
            for kind, strategies in STRATEGIES.items():
                for name, changes in strategies.items():
                    named[f"{kind}-{name}"] = named[kind] | changes
            named |= {kind: on_chats(models[kind], folder) for kind in SLOW_WRAPPERS}
        losses = run_ranks(ranks, train_each, str(folder), named, {})[0]
        runs[ranks] = Trained(folder, losses)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES, LEAKY])
def test_models_of_transformers_train_as_in_a_plain_loop(
    kind: str, models: dict[str, Path], trained: dict[int, Trained], tmp_path: Path
) -> None:
    """However they are sharded, and a mixture also on more ranks than experts."""
    run = settings_of(kind, models)
    expected = reference_losses(models[kind], run)
    untrained = reference_losses(models[kind], run | {"lr": 1e-12})
    assert abs(expected[-1] - untrained[-1]) > 1e-4
    ranks = [n for n, kinds in KINDS_BY_RANKS.items() if kind in kinds]
    for n in ranks:
        assert trained[n].losses[kind] == pytest.approx(expected, rel=1e-6), n
    for name in STRATEGIES.get(kind, ()):
        assert trained[2].losses[f"{kind}-{name}"] == pytest.approx(expected, rel=1e-6), name

    out = tmp_path / "out"
    (checkpoint,) = checkpoints_by_step(trained[ranks[-1]].folder, kind).values()
    export.export_model(checkpoint, out)
    exported = load_reference(out)
    ours = load_trained_model(checkpoint, torch.device("cpu"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(tokens), exported.eval()(tokens).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_wrapped_model_resumes_exactly_and_is_exported_as_a_whole(
    models: dict[str, Path], tmp_path: Path
) -> None:
    source = models["qwen3_5"]
    run = on_chats(source, tmp_path)
    done = run_fsdp(tmp_path / "at once", ranks=2, config=run, code=0)
    assert "packing: false" not in done.stderr
    assert "of its other parts are not trained, and are exported: model.visual\n" in done.stdout
    run_fsdp(tmp_path / "resumed", "stop_at_step=2", ranks=2, config=run, code=0)
    saved = checkpoints_by_step(tmp_path / "resumed")[2]
    model = read_manifest(saved).model
    examined: dict[str, Any] = model["examined"]
    assert examined["class_name"] == "Qwen3_5ForCausalLM"
    assert f"transformers {transformers.__version__}" in examined["versions"]
    for added in ("bfloat16", "class_name", "versions", "details"):
        del examined[added]
    forge_manifest(saved, model=model)  # as an earlier version wrote it
    run_fsdp(tmp_path / "resumed", ranks=2, config=run, code=0)
    assert read_exact_metrics(tmp_path / "resumed") == read_exact_metrics(tmp_path / "at once")
    check_export(tmp_path / "resumed" / "runs" / "test", source, tmp_path / "out")


@pytest.mark.slow
def test_trained_weights_are_exported_as_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor as a part of one, wherever the original has gone."""
    source = tmp_path / "source"
    save_model("llama", source)
    monkeypatch.chdir(tmp_path)
    run = settings(source, max_steps=1, validation_rate=1)
    in_world(lambda world: train_in_world(world, run))
    (checkpoint,) = checkpoints_by_step(tmp_path).values()
    config = json.loads((source / "config.json").read_text())
    n_layers = config["num_hidden_layers"]
    save_model("llama", tmp_path / "fewer", {"num_hidden_layers": n_layers - 1})
    save_model("llama", tmp_path / "more", {"num_hidden_layers": n_layers + 1})
    for name in ("fewer", "more"):
        with pytest.raises(ConfigError, match=rf"num_hidden_layers: {n_layers} in the checkpoint"):
            export.export_model(checkpoint, tmp_path / "out", base_dir=tmp_path / name)
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with pytest.raises(ConfigError, match=r"rms_norm_eps: .* now 0.25"):
        export.export_model(checkpoint, tmp_path / "out")
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    assert export.export_model(checkpoint, tmp_path / "out") > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_WRAPPERS)
def test_all_wrapped_models_are_exported_as_a_whole(
    kind: str, models: dict[str, Path], trained: dict[int, Trained], tmp_path: Path
) -> None:
    check_export(trained[2].folder / "runs" / kind, models[kind], tmp_path / "out")


def check_export(run: Path, source: Path, out: Path) -> None:
    """What the run of a wrapper has not trained is exported as it is in its source."""
    assert hf_main.main(["export", str(run), str(out)]) == 0
    before = transformers.AutoModelForImageTextToText.from_pretrained(source)
    after = transformers.AutoModelForImageTextToText.from_pretrained(out)
    changed = [
        tensor_name
        for tensor_name, tensor in before.state_dict().items()
        if not tensor.equal(after.state_dict()[tensor_name])
    ]
    assert changed
    assert all("language_model" in each or "lm_head" in each for each in changed)
    config = "preprocessor_config.json"
    assert (out / config).read_bytes() == (source / config).read_bytes()
    check_16_bits(run, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    stops = [0, 7, tokenizer.convert_tokens_to_ids("<stop>")]
    assert after.config.text_config.eos_token_id == after.generation_config.eos_token_id == stops


def check_16_bits(run: Path, exported: Path) -> None:
    """What has to stay in float32 does: rotary frequencies, and what the class keeps in it."""
    ours, _ = open_model(run, dtype="bfloat16")
    assert isinstance(ours, TransformersModel)
    auto = transformers.AutoModelForImageTextToText
    theirs = auto.from_pretrained(exported, dtype=torch.bfloat16).eval()
    tokens = torch.arange(20, 44)[None]
    with torch.no_grad():
        for decay in ours.kept_in_float32(torch.bfloat16):
            decay.copy_(decay.bfloat16())  # as exported in the dtype of the source
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


TRACE = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""
"""Lines for `script` that let compiled graphs, forward and backward, run as they were traced."""


@pytest.mark.slow
def test_compiled_layers_of_transformers_train_as_others(
    models: dict[str, Path], trained: dict[int, Trained], tmp_path: Path
) -> None:
    run = settings(models["ministral3"], max_steps=2, validation_rate=2, compile=True)
    done = run_fsdp(tmp_path, config=run, script=TRACE, code=0)
    assert "compiling in the first step" in done.stdout
    losses = [report["loss"] for report in read_reports(tmp_path).values()]
    assert losses == pytest.approx(trained[2].losses["ministral3"][:2], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "torch.bfloat16"), ({"lora_rank": 2, "base_dtype": "nf4"}, "torch.uint8")],
    ids=str,
)
def test_what_transformers_keeps_in_float32_is_gathered_in_it(
    changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    save_model("ernie4_5_moe", tmp_path)
    expected = {"gate.weight": "torch.float32", "q_proj.weight": dtype}
    assert run_ranks(2, gather_dtypes, str(tmp_path), changes) == [expected, expected]


def gather_dtypes(world: World, folder: str, changes: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes in which a forward pass sees two of the weights of a model."""
    from fsdp import build_model

    hp = read_with_model_defaults(settings(Path(folder), amp_dtype="bfloat16", **changes))
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.size)
    model = build_model(hp, world.device_mesh(shape), torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01 if parameter.is_floating_point() else 0)
    seen: dict[str, str] = {}

    def see(module: nn.Module, *_: Any) -> None:
        seen.setdefault(names[module], str(module.weight.dtype))

    names = {}
    for path, module in model.named_modules():
        for name in ("gate", "q_proj"):
            if path.endswith(f".{name}") and isinstance(
                getattr(module, "weight", None), nn.Parameter
            ):
                names[module] = f"{name}.weight"
                module.register_forward_pre_hook(see)
    tokens = torch.ones(1, 8, dtype=torch.int64)
    assert model(tokens, tokens).isfinite()
    return seen


@pytest.mark.slow
def test_adapters_of_a_wrapper_on_nf4_resume_exactly_and_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_wrapper("mistral3", "ministral3", tmp_path / "base")
    run = settings(tmp_path / "base", lora_rank=2, base_dtype="nf4", lr=1e-2, max_steps=3)

    def train(world: World) -> dict[str, list[float]]:
        runs: dict[str, dict[str, Any]] = {"at-once": {}, "stopped": {"stop_at_step": 1}}
        losses = train_each(world, str(tmp_path), runs, run)
        stopped = checkpoints_by_step(tmp_path, "stopped")[1]
        resumed = {"resumed": {"resume": str(stopped)}}
        return losses | train_each(world, str(tmp_path), resumed, run)

    losses = in_world(train)
    assert losses["stopped"] + losses["resumed"] == losses["at-once"]
    checkpoint = checkpoints_by_step(tmp_path, "resumed")[3]
    quantized = load_trained_model(checkpoint, torch.device("cpu"))
    export.export_model(checkpoint, tmp_path / "out", "float32")
    auto = transformers.AutoModelForImageTextToText
    exported = auto.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        expected = quantized(tokens)
        torch.testing.assert_close(exported(tokens).logits, expected, atol=1e-5, rtol=1e-5)


class Together:
    """Optimizers that step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class OfPeft(NamedTuple):
    """A folder whose class PEFT adapts, and what is adapted."""

    kind: str
    text_kind: str | None = None
    """the text model of a wrapper"""
    targets: list[str] | None = None


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OF_PEFT = [
    OfPeft("mistral3", "ministral3"),
    OfPeft("gemma4", "gemma4_text"),
    OfPeft("idefics3", "llama"),
    OfPeft("lfm2_vl", "lfm2"),
    OfPeft("qwen3_5_moe", "qwen3_5_moe_text", targets=ATTENTION),
    OfPeft("phi3"),
    OfPeft("granitemoe"),
    OfPeft("qwen2_moe", targets=[*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
    OfPeft("deepseek_v3", targets=["q_a_proj", "kv_b_proj", "o_proj"]),
    OfPeft(LEAKY, targets=["in_proj"]),
]
"""wrappers whose vision has layers of the same names, and others; text models; mixtures; one whose
kernels read the weight of another layer"""


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PEFT, ids=lambda case: case.kind)
def test_peft_adapts_what_was_trained_of_the_class_that_loads_the_base(
    case: OfPeft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft  # imports torchao, which takes seconds

    base = tmp_path / "base"
    auto: Any = transformers.AutoModelForCausalLM
    if case.text_kind is None:
        save_model(case.kind, base)
    else:
        save_wrapper(case.kind, case.text_kind, base)
        auto = transformers.AutoModelForImageTextToText
    adapters = train_adapters(base, tmp_path, monkeypatch, lora_targets=case.targets)
    export.export_model(adapters.checkpoint, tmp_path / "adapter", adapters_only=True)
    export.export_model(adapters.checkpoint, tmp_path / "merged", "float32")

    tokens = torch.arange(24)[None]
    with torch.no_grad():
        original = auto.from_pretrained(base, dtype=torch.float32).eval()
        before = original(input_ids=tokens).logits
        adapted = peft.PeftModel.from_pretrained(original, str(tmp_path / "adapter")).eval()
        merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        expected = merged(input_ids=tokens).logits
        torch.testing.assert_close(adapted(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 1e-2
    n_adapted = sum(".lora_A." in name for name, _ in adapted.named_parameters())
    assert n_adapted == adapters.n_layers


class TrainedAdapters(NamedTuple):
    checkpoint: Path
    n_layers: int
    """that have adapters"""


def train_adapters(
    base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> TrainedAdapters:
    """Train adapters on `base` for two steps, in `folder`."""
    monkeypatch.chdir(folder)
    run = settings(base, lora_rank=3, lr=3e-2, max_steps=2, validation_rate=2, **changes)
    in_world(lambda world: train_in_world(world, run))
    (checkpoint,) = checkpoints_by_step(folder).values()
    found = read_adapters(checkpoint, read_manifest(checkpoint))
    return TrainedAdapters(checkpoint, sum(".lora_A." in name for name in found))


@pytest.mark.slow
def test_adapters_on_a_checkpoint_of_a_class_are_exported_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--base names the directory whose files are copied."""
    source = tmp_path / "source"
    save_model("llama", source)
    monkeypatch.chdir(tmp_path)
    first = settings(source, run_name="first", max_steps=1, validation_rate=1, lr=3e-2)
    in_world(lambda world: train_in_world(world, first))
    checkpoint, _ = train_adapters(Path("runs/first"), tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"no Hugging Face model.*--base"):
        export.export_model(checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^--adapter: .*runs/first/.*leave it out"):
        export.export_model(checkpoint, tmp_path / "out", base_dir=source, adapters_only=True)
    export.export_model(checkpoint, tmp_path / "out", base_dir=source)
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        ours = load_trained_model(checkpoint, torch.device("cpu"))(tokens)
        exported = load_reference(tmp_path / "out").eval()(tokens).logits
        before = load_reference(source).eval()(tokens).logits
    torch.testing.assert_close(exported, ours, rtol=1e-5, atol=1e-5)
    assert (exported - before).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("glm4_moe", r"mlp\.gate_proj.* in glm4_moe for those of experts"),
        ("laguna", r"renames model\.layers\.\*\.mlp\.shared_experts\.gate_proj"),
    ],
)
def test_adapters_that_peft_takes_for_others_are_exported_merged(
    kind: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(kind, tmp_path / "base")
    adapters = train_adapters(tmp_path / "base", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"^--adapter: .*{problem}"):
        export.export_model(adapters.checkpoint, tmp_path / "adapter", adapters_only=True)
    assert export.export_model(adapters.checkpoint, tmp_path / "merged") > 0


@pytest.mark.slow
def test_the_class_of_adapters_is_that_of_their_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.json says which, wherever it is."""
    save_wrapper("mistral3", "ministral3", tmp_path / "base")
    adapters = train_adapters(tmp_path / "base", tmp_path, monkeypatch)
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    command = ["export", str(adapters.checkpoint), "adapter", "--adapter"]
    assert hf_main.main(command) == 2
    assert "--base" in capsys.readouterr().err
    assert hf_main.main([*command, "--base", str(moved)]) == 0
    names = load_file("adapter/adapter_model.safetensors").keys()
    layer = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    assert f"{layer}.lora_A.weight" in names


@pytest.mark.slow
def test_muon_trains_a_model_of_transformers_as_in_a_plain_loop(
    models: dict[str, Path], trained: dict[int, Trained]
) -> None:
    folder = models["glm4_moe"]
    hp = read_with_model_defaults(settings(folder, **MUON))
    model = load_reference(folder).train()
    layers = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    matrices = [layer.weight for layer in layers]
    of_muon = set(matrices)
    rest = [parameter for parameter in model.parameters() if parameter not in of_muon]
    decay = hp.optim.weight_decay
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=decay, adjust_lr_fn="match_rms_adamw", nesterov=True
    )
    optimizer = Together(muon, torch.optim.AdamW(groups, lr=1e-2, eps=hp.optim.adam_eps))
    # PyTorch's orthogonalizes in bfloat16.
    expected = train_reference(model, optimizer, hp, 7)
    assert trained[2].losses["muon"] == pytest.approx(expected, rel=2e-3)


# ---- commands


@pytest.mark.parametrize(
    "kind",
    [LEAKY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt_oss", *KINDS))],
)
def test_generation_is_that_of_transformers(kind: str, models: dict[str, Path]) -> None:
    model, _ = open_model(models[kind])
    assert isinstance(model, TransformersModel)
    reference = load_reference(models[kind]).eval()
    prompt = [5, 17, 40]
    greedy = sampling.Sampling(temperature=0.0)
    found = list(
        sampling.generate(model, prompt, 40, seed=0, settings=greedy, device=torch.device("cpu"))
    )
    expected = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=model.config.examined.cache,
    )
    assert found == expected[0, 3:].tolist()


TASK = Task(
    "task",
    "char",
    [
        Question((Choice("ab ", "cd"), Choice("ab ", "efgh")), 1),
        Question((Choice("xyz", " 1"), Choice("xyz", " 2 3")), 0),
    ],
)


@pytest.mark.parametrize("kind", [pytest.param("lfm2", marks=pytest.mark.slow), LEAKY])
def test_scores_of_tasks_are_those_of_transformers(kind: str, models: dict[str, Path]) -> None:
    def score(world: World) -> list[float]:
        model, tokenizer = open_model(models[kind], world.device)
        scorer = Scorer(tokenize(TASK, tokenizer, model.config), model, world)
        assert len(list(scorer.score())) == scorer.n_steps
        return list(scorer.gather().log_likelihoods)

    reference = load_reference(models[kind]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[kind])
    expected: list[float] = []
    for question in TASK.questions:
        for choice in question.choices:
            assert isinstance(choice.context, str)
            n_context = len(tokenizer(choice.context).input_ids)
            ids = torch.tensor(tokenizer(choice.context + choice.text).input_ids)
            with torch.no_grad():
                log_probs = reference(ids[None, :-1]).logits[0].log_softmax(-1)
            chosen = log_probs.gather(-1, ids[1:, None])[n_context - 1 :]
            expected.append(chosen.sum().item())
    assert in_world(score) == pytest.approx(expected, abs=1e-4)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"d_model": 32}, "d_model"),
        ({"model": "gpt2"}, "remove model"),
        ({"vocab_size": 301}, "vocab_size"),
        ({"float8": "tensorwise"}, "float8: .*no linear layer of its blocks can be converted"),
        ({"dataset": "jsonl", "train_data": "x", "packing": True}, "packing"),
        ({"dataset": "text", "attend_across_documents": False}, "attend_across_documents"),
        ({"base_width": 32}, "base_width"),
        ({"n_experts": 4}, "whose config.json says it"),
        ({"num_experts": 4}, "num_experts: .* whose config.json says it"),
        ({"router_balance": "bias"}, "whose experts are balanced neither by a loss nor"),
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef: .* whose experts are balanced"),
    ],
)
def test_keys_that_a_model_of_transformers_does_not_have_are_refused(
    changes: dict[str, Any], part: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=part) as error:
        read_with_model_defaults(settings(models[LEAKY], **changes))
    assert "did you mean" not in str(error.value)
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(json.dumps({"hyperparameters": settings(models[LEAKY], **changes)}))
    check_values(experiment, [])


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"model_type": "t5"}, "encodes its input by another network"),
        ({"model_type": "vit"}, "no causal language model for vit"),
        (
            {"model_type": "qwen9", "transformers_version": "9.0.0"},
            "'qwen9' is unknown to transformers .*; config.json was written by transformers 9.0.0",
        ),
        ({"model_type": "x", "auto_map": {}}, "its own code .* is never run"),
        ({"model_type": "bert", "is_decoder": False}, "a later token changes earlier logits"),
        ({"model_type": "lfm2", "num_hidden_layers": "two"}, "transformers refuses it"),
        (
            {"model_type": "lfm2", "num_hidden_layers": 10**9},
            "num_hidden_layers: 1000000000 is more",
        ),
        (
            {"model_type": "granite", "max_position_embeddings": 0},
            "max_position_embeddings: 0 is not between 1 and 16777216",
        ),
        ({"model_type": "mpt", "max_seq_len": 10**9}, "max_seq_len: 1000000000 is not between"),
        ({"model_type": "granite", "hidden_size": 0}, "granite: cannot be examined"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 7},
            "num_experts_per_tok: 7 exceeds num_local_experts 4",
        ),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 5},
            "moe_k: 5 exceeds moe_num_experts 4",
        ),
        ({"model_type": "lfm2", "hidden_size": 10**12}, "hidden_size: 1000000000000 is more than"),
        (
            {"model_type": "gemma3", "text_config": {"head_dim": 2**40}},
            "head_dim: 1099511627776 is",
        ),
        (
            {"model_type": "llama", "hidden_act": "?", "vocab_size": 9},
            r"refuses it: KeyError: '\?'",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "gptq"}},
            r"quantized models \(gptq here\) are not supported",
        ),
    ],
)
def test_models_that_cannot_be_trained_exactly_are_refused_before_weights_are_read(
    raw: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=problem) as error:
        read_with_model_defaults(settings(tmp_path))
    start = f"test: init_from: {tmp_path / 'config.json'}: "
    assert all(line.startswith(start) for line in error.value.problems)


@pytest.mark.parametrize(
    ("kind", "text_kind", "changes"),
    [
        ("aya_vision", "cohere2", {}),
        ("cohere2_vision", "cohere2", {}),
        ("llava_next", "granite", {"logits_scaling": 8.0}),
        ("llava_next", "granite", {"logits_scaling": 1.0}),
        ("paligemma", "gemma2", {"final_logit_softcapping": 0.5}),
        ("llava", "cohere", {"logit_scale": 0.5}),
        ("idefics3", "llama", {}),
        *((kind, text_kind, {}) for kind, text_kind in WRAPPERS.items()),
    ],
)
def test_a_whole_model_with_other_logits_than_its_language_model_is_refused(
    kind: str, text_kind: str, changes: dict[str, Any]
) -> None:
    text = complete_values(text_kind) | changes
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    raw = json.loads(config_class(text_config=text, vision_config=VISION).to_json_string())
    scales = (text.get("logit_scale", 1.0), text.get("logits_scaling", 1.0))
    finding = examine.examine_whole(raw)
    assert finding.holds is (scales == (1.0, 1.0)), finding


def test_a_refused_whole_model_is_named_with_its_language_model() -> None:
    raw = json.loads(transformers.Cohere2VisionConfig().to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match=r"model_type: cohere2_vision .* cohere2 \(logits differ"):
        examined_config(raw)


@pytest.mark.slow
def test_layers_that_are_left_out_at_random_are_refused(tmp_path: Path) -> None:
    save_model("opt", tmp_path, {"layerdrop": 0.5})
    with pytest.raises(ConfigError, match=r"init_from: layerdrop 0\.5 in its config\.json"):
        read_with_model_defaults(settings(tmp_path))


@pytest.mark.slow
def test_a_layout_that_transformers_only_reads_is_refused_before_it_is_trained(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(MergeModulelist, "reverse_op")  # as of operations of which it has none

    def start(name: str, **changes: Any) -> None:
        run = settings(models["glm4_moe"], run_name=name, max_seq_len=8, **changes)
        in_world(lambda world: train_in_world(world, run))

    start("validated", max_epochs=-1, max_steps=None)
    start("adapters", max_steps=1, lora_rank=2)
    with pytest.raises(ConfigError, match="cannot write what it reads"):
        start("trained")


def test_the_config_of_transformers_is_no_hyperparameter(models: dict[str, Path]) -> None:
    for hyperparameters in (settings(models[LEAKY]), TRAINING):
        with pytest.raises(ConfigError, match="transformers_config: no hyperparameter"):
            read_with_model_defaults(hyperparameters | {"transformers_config": {}})


@pytest.mark.slow
def test_a_dry_run_says_what_is_not_known(models: dict[str, Path], tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, "--dry-run", config=settings(models["glm4_moe"]), code=0)
    assert "parameters, moments and gradients take" in done.stdout
    assert "glm4_moe takes no step on fake tensors" in done.stdout  # of float32 experts


# ---- FLOPs


LLAMA = TINY | LLAMA_STYLE | {"head_dim": 12, "max_seq_len": 64}


@pytest.mark.parametrize(
    ("model", "adapters"),
    [
        (LLAMA, {}),
        (LLAMA, {"lora_rank": 4, "lora_targets": ["o_proj", "up_proj"]}),
        pytest.param(
            LLAMA | {"n_experts": 5, "experts_per_token": 2, "d_ff": 24, "qk_norm": "head"},
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all weights", "adapters", "mixture"],
)
def test_flops_counted_of_a_class_are_those_of_model_py(
    model: dict[str, Any], adapters: dict[str, Any]
) -> None:
    ours = ModelConfig.model_validate(model)
    lora_config = LoraConfig.model_validate(adapters)
    theirs = examined_config(config_json.write_config(ours, "float32"))
    expected = count_flops_per_token(lora_config, ours)
    assert count_flops_per_token(lora_config, theirs) == expected


def test_flops_are_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each rank and for each length, whatever the scale of the adapters is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted: list[float] = []

    def count_again(*_: Any) -> float:
        counted.append(len(counted))
        return counted[-1]

    monkeypatch.setattr("lm.flops._count", count_again)

    def count(length: int, **adapters: Any) -> float | None:
        model = ModelConfig.model_validate(LLAMA | {"max_seq_len": length})
        return count_flops_per_token(LoraConfig.model_validate(adapters), model)

    assert count(32, lora_rank=4) == 0
    assert count(32, lora_rank=4, lora_alpha=8, lora_dropout=0.5) == 0
    others = [count(32, lora_rank=5), count(32, lora_rank=4, lora_targets=["o_proj"])]
    assert [*others, count(64, lora_rank=4)] == [1, 2, 3]
    assert counted == [0, 1, 2, 3]


@pytest.mark.slow
def test_flops_of_a_hybrid_are_those_of_its_products() -> None:
    values = complete_values("qwen3_5_text")
    config = examined_config(values).model_copy(update={"max_seq_len": 256})
    network = build_network(read_config(values))
    n_weights = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear))
    per_key = 12 * values["num_attention_heads"] * values["head_dim"]
    assert values["linear_key_head_dim"] == values["linear_value_head_dim"] == 16
    of_rule = (5 * 64 * 16 + 3 * 16**2) * 2 * values["linear_num_value_heads"]
    n_attentions = values["layer_types"].count("full_attention")
    n_rules = values["layer_types"].count("linear_attention")
    expected = 6 * n_weights + n_attentions * per_key * 128 + n_rules * 3 * of_rule
    found = count_flops_per_token(LoraConfig.model_validate({}), config)
    assert found == expected


# ---- the examination


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        ("llama", set()),
        ("mamba2", {"packing", "context_parallel", "cache", "float8"}),
        pytest.param("gemma2", {"hidden_states"}, marks=pytest.mark.slow),
        *(
            pytest.param(kind, set(), marks=pytest.mark.slow)
            for kind in (
                "gpt_oss",  # makes its masks without positions
                "qwen3_5_text",  # linear attention
                *DENSE,
                "lfm3",  # convolutions
                "gemma4_text",
                "deepseek_v3",
                "granitemoe",  # does not say that it accepts use_cache
                "opt",  # gradients of the biases of keys are sums of 0
                "hrm_text",  # a parameter that its class freezes
                "phimoe",  # a router that returns what it chooses
            )
        ),
        *(
            pytest.param(kind, {"context_parallel"}, marks=pytest.mark.slow)
            for kind in (
                "mpt",  # rates of dropout are integers
                "deepseek_v32",  # ReLU before a selection
            )
        ),
    ],
)
def test_examinations_find_what_does_not_hold(kind: str, fails: set[str]) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    raw = json.loads(config.to_json_string()) | {"model_type": kind}
    found = examine.examine(text_config(raw))
    assert {question for question, each in found.findings.items() if not each.holds} == fails, found
    assert found.refusals() == []


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 40}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "key", "longest"),
    [
        ("phi3", {"rope_parameters": LONGROPE, **ORIGINAL}, tuple(ORIGINAL), 40),
        (
            "llama",
            {"rope_parameters": LONGROPE | ORIGINAL},
            ("rope_parameters", *ORIGINAL),
            40,
        ),
        ("stablelm", {"rope_parameters": DYNAMIC}, ("max_position_embeddings",), 256),
        ("llama4_text", {}, ("floor_scale",), 8191),
    ],
)
def test_rows_are_limited_to_lengths_beyond_which_a_class_depends_on_them(
    kind: str, changes: dict[str, Any], key: tuple[str, ...], longest: int
) -> None:
    config = examined_config(with_positions(kind, changes))
    assert config.examined.longest_row is not None
    assert config.examined.longest_row.key == ".".join(key)
    assert config.examined.longest_row.n_tokens == longest
    assert config.max_seq_len == min(longest, 256)
    assert config.examined.packing


@pytest.mark.parametrize(
    "kind",
    ["gemma3_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama3", "yarn"))],
)
def test_rows_are_not_limited_by_other_lengths(kind: str) -> None:
    """Windows, and rope types that are the same for all lengths."""
    rope = {"rope_type": kind, "factor": 4.0, **ORIGINAL}
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    values = with_positions("gemma3_text", {})
    if kind != "gemma3_text":
        values = with_positions("granite", {"rope_parameters": rope | llama3})
    config = examined_config(values)
    assert config.examined.longest_row is None
    assert config.max_seq_len == 256


def with_positions(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a small model with options of its rotary embedding."""
    values = complete_values(kind)
    rope = values.get("rope_parameters") or {}
    return values | changes | {"rope_parameters": rope | changes.get("rope_parameters", {})}


def test_rows_that_are_too_long_for_a_class_are_refused_by_name(tmp_path: Path) -> None:
    save_model("phi3", tmp_path, with_positions("phi3", {"rope_parameters": LONGROPE, **ORIGINAL}))
    run = TRAINING | {"init_from": str(tmp_path), "max_seq_len": 40}
    assert read_with_model_defaults(run).model.max_seq_len == 40
    with pytest.raises(ConfigError, match=r"^test: max_seq_len: 41 .*original_max_.*: 40 .* 40$"):
        read_with_model_defaults(run | {"max_seq_len": 41})


def test_rows_up_to_the_limit_are_computed_as_documents_alone() -> None:
    """Packed, padded and from the cache; and longer ones are not, without the limit."""
    values = with_positions("phi3", {"rope_parameters": LONGROPE, **ORIGINAL})
    config = examined_config(values)
    long = torch.arange(30)[None] % 20
    short = torch.arange(10)[None]
    document_ids = torch.tensor([0] * 30 + [1] * 10)[None]

    def differs(config: TransformersConfig, first: Tensor, document_ids: Tensor) -> bool:
        model = TransformersModel(config).to_empty(device="cpu").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
            randomize(model)
            alone = model(short)
            packed = model(torch.cat([first, short], 1), document_ids=document_ids)
        return not torch.allclose(packed[:, -10:], alone, atol=1e-5)

    assert not differs(config, long, document_ids)
    longer = torch.cat([long, long], 1)
    ids_of_longer = torch.tensor([0] * 60 + [1] * 10)[None]
    assert differs(config.model_copy(update={"max_seq_len": 100}), longer, ids_of_longer)
    with pytest.raises(ValueError, match=r"^max_seq_len: 70 "):
        differs(config, longer, ids_of_longer)


def test_a_class_is_examined_once_for_all_sizes(capfd: pytest.CaptureFixture[str]) -> None:
    def is_examined(**changes: Any) -> bool:
        examine.examine(text_config({"model_type": "llama"} | changes))
        return "examining llama" in capfd.readouterr().err

    is_examined()
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64}
    assert not is_examined(hidden_size=8192, num_hidden_layers=80, vocab_size=128256, **heads)
    assert is_examined(attention_bias=True)


@pytest.mark.slow
def test_run_names_what_it_does_otherwise_for_a_class() -> None:
    def notes(kind: str, **values: Any) -> list[str]:
        return examined_config(complete_values(kind) | values).notes(dropout=True)

    assert notes("llama") == []
    assert notes("gemma2") == [
        "gemma2: the loss computes all logits at once, as its class changes them"
    ]
    (note,) = notes("mamba2")
    assert note.startswith("mamba2: samples compute all tokens again for each new one")
    (note,) = notes("olmoe", output_router_logits=True)
    assert note.startswith("olmoe: the loss of output_router_logits")
    (note,) = notes("llama", attention_dropout=0.1)
    assert note.endswith("attention_dropout 0.1")


class NoisyLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs)
        return output + 0.1 * torch.rand_like(output)


class ForgetfulLayer(LlamaDecoderLayer):
    """Draws other dropout when it is recomputed."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rate = config.attention_dropout
        self.generator = torch.Generator().manual_seed(layer_idx)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs)
        return output * (torch.rand(output.shape, generator=self.generator) >= self.rate)


class ConfusedLayer(LlamaDecoderLayer):
    """Computes a row of several documents otherwise when it is recomputed."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        n_documents = int((kwargs["position_ids"] == 0).sum(dim=1).max())
        if n_documents > 1 and torch._C._current_graph_task_id() != -1:
            hidden_states = 2 * hidden_states
        return super().forward(hidden_states, *args, **kwargs)


class CoarseLayer(LlamaDecoderLayer):
    """Rounds to float8 in bfloat16, unless its buffer is in bfloat16, too."""

    scale: Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs)
        if output.dtype == self.scale.dtype:
            return output * self.scale
        return output.to(torch.float8_e4m3fn).to(output.dtype)


def register(name: str, layer: type[nn.Module]) -> None:
    """Let transformers know Llama with other layers by a model_type."""

    class LayersConfig(transformers.LlamaConfig):
        model_type = name

    class LayersForCausalLM(transformers.LlamaForCausalLM):
        config_class = LayersConfig
        _no_split_modules = (layer.__name__,)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            layers = [layer(config, i) for i in range(config.num_hidden_layers)]
            self.model.layers = nn.ModuleList(layers)

    transformers.AutoConfig.register(name, LayersConfig)
    transformers.AutoModelForCausalLM.register(LayersConfig, LayersForCausalLM)


def test_a_class_whose_forward_pass_is_random_is_refused() -> None:
    register("noisy", NoisyLayer)
    found = examine.examine(text_config({"model_type": "noisy"}))
    assert "its forward pass is random without dropout" in found.refusals()[0]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [ForgetfulLayer, ConfusedLayer])
def test_layers_that_are_otherwise_recomputed_are_found(layer: type[nn.Module]) -> None:
    """With dropout, or of a row of several documents."""
    register(layer.__name__, layer)
    found = examine.examine(text_config({"model_type": layer.__name__})).findings
    fails = {question for question, each in found.items() if not each.holds}
    assert fails - {"compilation"} == {"full_recomputation", "selective_recomputation"}, found


@pytest.mark.slow
def test_a_class_that_is_coarse_in_bfloat16_is_computed_in_float32(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    register("coarse", CoarseLayer)
    save_model("coarse", tmp_path)
    run = settings(tmp_path)
    hp = read_with_model_defaults(run | {"amp_dtype": "auto"})
    assert hp.precision.amp_dtype is None
    figures = r"logits 0\.\d+ \(class 0\.\d+\), gradients 0\.\d+ \(class 0\.\d+\)"
    assert re.search(f"amp_dtype: null, as coarse .*{figures}", capfd.readouterr().err)
    assert isinstance(hp.model, TransformersConfig)
    assert hp.model.examined.details.keys() == {"bfloat16"}
    with pytest.raises(ConfigError, match=f"amp_dtype: bfloat16: coarse .*{figures}"):
        read_with_model_defaults(run | {"amp_dtype": "bfloat16"})


@pytest.mark.slow
def test_the_command_prints_an_examination(capsys: pytest.CaptureFixture[str]) -> None:
    assert hf_main.main(["examine", "gpt_oss"]) == 0
    assert "packing                  holds, by attention_mask" in capsys.readouterr().out
    assert hf_main.main(["examine", "mamba2"]) == 0
    printed = capsys.readouterr().out
    assert "Mamba2ForCausalLM, examined in" in printed
    assert "packing                  does not hold: logits differ by" in printed
    assert hf_main.main(["examine", "bert"]) == 2
    assert "refused: " in capsys.readouterr().out


@pytest.mark.parametrize("module", ["transformers.core_model_loading", "transformers.gone"])
def test_a_version_without_what_is_private_in_it_is_named_with_one_that_works(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ImportError) as missing:
        exec(f"from {module} import was_renamed")
    assert print_exception(missing.value) == 2
    line = capsys.readouterr().err
    assert "not installed" not in line
    assert "pip install -r requirements.txt -c constraints.txt" in line


@pytest.mark.slow
def test_buffers_stay_where_fsdp_has_moved_them(models: dict[str, Path]) -> None:
    """To a GPU, for which the meta device stands, also if parameters are offloaded to the CPU."""
    model, _ = open_model(models["lfm2"])
    model.to("meta")
    model.to_empty(device="cpu")
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("kind", [*KINDS, *DENSE, "gpt_oss", LEAKY])
def test_networks_without_values_draw_none_and_have_the_buffers_of_others(kind: str) -> None:
    config = read_config(complete_values(kind))
    drawn = build_network(config, on_meta=False)
    with OperatorCounts() as operators:
        network = build_network(config)
    embeddings = [each for each in network.modules() if isinstance(each, nn.Embedding)]
    # Which PyTorch itself draws.
    assert operators.calls[torch.ops.aten.normal_.default] == len(embeddings)
    buffers = dict(network.named_buffers())
    assert buffers.keys() == dict(drawn.named_buffers()).keys()
    for name, buffer in drawn.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)


def test_layers_that_a_class_multiplies_by_itself_have_no_adapters(tmp_path: Path) -> None:
    """Mamba 2's kernels read a weight that its code on a CPU calls: an adapter would be ignored."""
    save_model("mamba2", tmp_path)
    source = {"init_from": str(tmp_path), "dataset": "synthetic", "lora_rank": 2}
    hp = read_with_model_defaults(source)
    with torch.device("meta"):
        model = lora.add_adapters(new_model(hp.model), hp.lora, None)
    adapted = {name.split(".")[-3] for name in lora.trained_parameters(model)}
    assert adapted == {"in_proj"}
    with pytest.raises(ConfigError, match=r"lora_targets.*out_proj.*in_proj"):
        read_with_model_defaults(source | {"lora_targets": ["out_proj"]})


@pytest.mark.slow
def test_kernels_of_other_packages_are_not_called(tmp_path: Path) -> None:
    """What is installed for GPUs, and fails on the CPU of an examination, changes nothing."""
    fails = "def {}(*_, **__):\n    raise RuntimeError('needs a GPU')\n"
    functions = {
        "fla": (),
        "fla/ops": (),
        "fla/ops/gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
        "kernels": (),
    }
    version = tmp_path / "kernels-0.18.2.dist-info" / "METADATA"
    version.parent.mkdir()
    version.write_text("Name: kernels\nVersion: 0.18.2\n")
    for package, names in functions.items():
        file = tmp_path / package / "__init__.py"
        file.parent.mkdir()
        file.write_text("".join(fails.format(name) for name in names))
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-m", "lm.hf", "examine", "qwen3_5_text"],
        env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "examining qwen3_5_text: " in done.stderr
    answers = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[1:]}
    failed = [question for question, answer in answers.items() if not answer.startswith("holds")]
    assert failed == []  # as without these packages


def run_python(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run Python as a line of a page does, without the imports of an interpreter.

    Return the output of a launcher; the commands print to that of the test.
    """
    words = shlex.split(command, comments=True)
    if words[0] == "echo":
        typed = io.BytesIO(f"{words[1]}\n".encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed))
        words = words[3:]
    match words[1:]:
        case ["-m", "lm.launch", *_]:
            variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
            process = start_python(
                words[1:], variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            output, errors = process.communicate()
            assert process.returncode == 0, errors
            return output
        case ["-m", "lm.generate", *arguments]:
            assert generate.main(arguments) == 0
        case ["-m", "lm.hf", *arguments]:
            assert hf_main.main(arguments) == 0
        case [script]:
            runpy.run_path(script, run_name="__main__")
    return ""


def walk(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run what the last section of a page types in `folder`; yield what each command prints."""
    text = (REPOSITORY / page).read_text()
    section = text[text.index("## A walk without a download") :]
    program = re.compile(r"`(\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)
    for name, content in program.findall(section):
        (folder / name).write_text(content)
    for name in ("fsdp.py", "recipes"):
        (folder / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(folder)
    commands = re.findall(r"```\n(.*?)```", program.sub("", section), re.DOTALL)
    lines = "".join(commands).replace("\\\n", "")
    *parts, rest = re.split(r"^(.*\bpython .*)\n", lines, flags=re.MULTILINE)
    assert not rest
    for shell, command in zip(parts[::2], parts[1::2], strict=True):
        subprocess.run(["bash", "-euo", "pipefail", "-c", shell], check=True)
        yield run_python(command, monkeypatch)


@pytest.mark.slow
def test_walk_in_the_docs_works_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ""
    for printed in walk("docs/transformers.md", tmp_path, monkeypatch):
        output += printed + capsys.readouterr().out
    assert "95 samples in 32 sequences" in output  # packed
    assert "\nI am Ada.\nexported: " in output
    assert "\nI am Bob.\nmerged: " in output
    for exported in ("exported", "merged"):
        transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / exported)


@pytest.mark.slow
def test_walk_on_experts_in_mxfp4_works_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ""
    for printed in walk("docs/qlora.md", tmp_path, monkeypatch):
        output += printed + capsys.readouterr().out
    assert ", base in mxfp4; " in output
    assert "dequantized" not in output
    assert "\nI am Ada.\nadapter: " in output
    found = re.search(r"logits up to (.+) differ by (.+)\n", output)
    assert found is not None
    assert float(found[2]) < 1e-4 * float(found[1])
