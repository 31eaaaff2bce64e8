"""Models of model.py are exported unchanged, and give the results of transformers.

transformers is the reference: it loads every export.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lm import generate, sampling
from lm.checkpoint import tensor_files
from lm.data.run_data import open_data
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from lm.hf import __main__ as hf_main
from lm.hf import class_export, config_json, export, families, weights
from lm.hf.base import find_base, load_model, load_trained_model
from lm.hf.files import list_weight_files
from lm.prepare import main as prepare
from lm.presets import PRESETS
from lm.runtime.world import World
from lm.training import lora
from lm.transformers_model import build_network, read_config
from model import ModelConfig, Transformer
from tests.support.checkpoints import RUN_INFO, open_checkpointer, save_state, state_of
from tests.support.hf import LLAMA as LLAMA_CLASS
from tests.support.hf import (
    TEXTS,
    add_tokenizer,
    make_reference,
    read_with_model_defaults,
)
from tests.support.hyperparameters import TINY, named_keys
from tests.support.ranks import in_world
from tests.support.runs import checkpoints_by_step, run_fsdp
from tests.support.tokenizer_files import CHAT_TEMPLATE, llama2_tokenizer

pytestmark = pytest.mark.usefixtures("shared_cache")

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""With theta 100 and heads of 8, wavelengths are 6 (kept), 20, 63 (interpolated), 199 (scaled)."""
SHAPE: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 96,
    "d_ff": 48,
    "max_seq_len": 64,
}
LLAMA = SHAPE | {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none"}
GPT2 = SHAPE | {"ffn": "gelu", "bias": "all", "d_ff": None, "tie_embeddings": True}
MISTRAL = LLAMA | {"model": "mistral", "n_kv_heads": 2}
QWEN2 = LLAMA | {"bias": "qkv", "n_kv_heads": 2}
QWEN3 = LLAMA | {"qk_norm": "head", "n_kv_heads": 2, "head_dim": 12}
OLMO2 = LLAMA | {"norm_placement": "post", "qk_norm": "projection", "n_kv_heads": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama 1": LLAMA,
    "llama 2, 4 heads on 2": LLAMA | {"n_kv_heads": 2, "norm_eps": 1e-6},
    "llama 3.1, rope scaling": LLAMA
    | {"n_kv_heads": 1, "rope_theta": 1e2, "rope_scaling": LLAMA3_ROPE},
    "llama 3.2, tied": LLAMA
    | {"tie_embeddings": True, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "llama, ffn biases": LLAMA | {"bias": "ffn"},
    "llama, attention biases": LLAMA | {"bias": "attention"},
    "llama, all biases": LLAMA | {"bias": "all", "n_kv_heads": 2},
    "mistral, window 8": MISTRAL | {"sliding_window": 8},
    "mistral, no window": MISTRAL | {"sliding_window": None},
    "mistral nemo, head_dim 16": MISTRAL | {"sliding_window": None, "head_dim": 16},
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"tie_embeddings": False},
    "gpt2, d_ff 48": GPT2 | {"d_ff": 48, "norm_eps": 1e-6},
}


def make_ours(keys: dict[str, Any], seed: int = 0) -> Transformer:
    """Return our model of `keys`, with weights that are large enough to all affect the logits."""
    model = Transformer(ModelConfig.model_validate(keys)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
                parameter += 1
    return model


def save_checkpoint(model: Transformer, folder: Path, **changes: Any) -> Path:
    """Save a checkpoint of `model` in `folder`, with a changed manifest; return its directory."""
    changes["model"] = model.config.model_dump(mode="json")
    info = RUN_INFO.model_copy(update=changes)

    def save(world: World) -> Path:
        with open_checkpointer(world, folder) as checkpointer:
            return folder / save_state(checkpointer, state_of(model), 1, info=info)

    return in_world(save)


def exported_of(model: Transformer, folder: Path, dtype: str = "float32") -> Path:
    """Save a checkpoint of `model`, and return the directory of its export."""
    export.export_model(save_checkpoint(model, folder), folder / "out", dtype)
    return folder / "out"


def load(directory: Path) -> Any:
    """Return what transformers loads."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


# ---- parity


@dataclass(frozen=True)
class Pair:
    """A model of ours, and what transformers loads of its export."""

    name: str
    theirs: Any
    ours: Transformer
    directory: Path

    def generate_theirs(self, prompt: Tensor, **options: Any) -> list[int]:
        generated = self.theirs.generate(
            prompt[None], do_sample=False, max_new_tokens=40, pad_token_id=0, **options
        )
        return generated[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    ours = make_ours(MODELS[request.param])
    directory = exported_of(ours, tmp_path_factory.mktemp("model"))
    return Pair(request.param, load(directory), ours, directory)


TOKENS = torch.randint(0, 96, (3, 33), generator=torch.Generator().manual_seed(1))
PROMPTS = [TOKENS[0, :7], TOKENS[1, :3], TOKENS[2, :5]]
GREEDY: Any = {
    "device": torch.device("cpu"),
    "settings": sampling.Sampling(temperature=0),
}


def test_gradients_equal_transformers(pair: Pair) -> None:
    inputs = TOKENS[:, :-1]
    targets = TOKENS[:, 1:].contiguous()
    logits = pair.theirs(inputs).logits
    assert logits.std() > 0.3
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    (pair.ours(inputs, targets) / targets.numel()).backward()
    expected = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    parameters = dict(pair.ours.named_parameters())
    family = config_json.find_family(pair.ours.config)
    assert family.model_type == pair.name.partition(",")[0].partition(" ")[0]
    places = families.map_parameters(family, pair.ours.config)
    assert places.keys() == expected.keys()
    for place, names in places.items():
        gradients: list[Tensor] = []
        for name in names:
            gradient = parameters[name].grad
            assert gradient is not None
            gradients.append(gradient)
        error = families.join(family, place, gradients) - expected[place]
        assert error.norm() < 1e-5 * expected[place].norm(), place


@pytest.mark.slow
def test_generation_equals_transformers(pair: Pair) -> None:
    theirs = pair.generate_theirs(PROMPTS[0])
    ours = list(sampling.generate(pair.ours, PROMPTS[0].tolist(), 40, seed=0, **GREEDY))
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["qwen2"], indirect=True)
def test_generation_ends_where_that_of_transformers_does(pair: Pair) -> None:
    stop_ids = set(pair.generate_theirs(PROMPTS[0])[10:12])
    for prompt in PROMPTS:
        expected = pair.generate_theirs(prompt, eos_token_id=list(stop_ids))
        if expected[-1] in stop_ids:
            expected.pop()
        options = GREEDY | {"stop_ids": stop_ids}
        ours = list(sampling.generate(pair.ours, prompt.tolist(), 40, seed=0, **options))
        assert ours == expected


ONE_OF_EACH_FAMILY = (
    "llama 3.1, rope scaling",
    "mistral, window 8",
    "qwen2",
    "qwen3",
    "olmo2",
    "gpt2",
)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ONE_OF_EACH_FAMILY, indirect=True)
def test_a_run_reads_its_own_export_as_a_class_of_transformers(pair: Pair) -> None:
    config = weights.read_structure(pair.directory)
    read = weights.load_model(pair.directory, config, torch.device("cpu"), torch.float32)
    inputs = TOKENS[:, :-1]
    assert (read(inputs) - pair.ours(inputs)).abs().max() < 1e-5
    assert config.max_seq_len == 64


def test_training_equals_transformers(pair: Pair) -> None:
    """With the same kernel of attention, logits are equal to the bit."""
    theirs = copy.deepcopy(pair.theirs)
    theirs.set_attn_implementation("sdpa")
    ours = copy.deepcopy(pair.ours)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:].contiguous()
    difference = (ours(inputs) - theirs(inputs).logits).abs().max()
    if pair.name.startswith("gpt2"):  # transformers multiplies some matrices as one
        assert difference < 1e-5
    else:
        assert difference == 0
    losses: list[list[float]] = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(4):
            logits = model(inputs)
            if model is theirs:
                logits = logits.logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][-1] < 0.99 * losses[0][0]


@pytest.mark.parametrize("keys", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_export_states_the_positions_that_the_model_was_made_for(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    ours = make_ours(keys | {"max_seq_len": 16, "n_positions": 64})
    with pytest.raises(ValueError, match="max_seq_len"):
        ours(TOKENS[:, :17])
    assert load(exported_of(ours, tmp_path)).config.max_position_embeddings == 64


@pytest.mark.parametrize("base_dtype", [None, "nf4"])
def test_exported_adapters_are_merged(base_dtype: str | None, tmp_path: Path) -> None:
    """PEFT cannot load their base, which is a checkpoint."""
    ours = make_ours(MODELS["llama, attention biases"] | {"d_model": 64})
    source = save_checkpoint(ours, tmp_path)
    values = {"lora_rank": 3, "lora_alpha": 5.0, "base_dtype": base_dtype}
    adapters = lora.LoraConfig.model_validate(values)
    adapted = lora.add_adapters(copy.deepcopy(ours), adapters, None)
    for adapter in lora.trained_parameters(adapted).values():
        adapter.normal_(std=0.2)
    base = in_world(partial(find_base, str(source)))
    hyperparameters = RUN_INFO.hyperparameters | adapters.model_dump()
    saved = save_checkpoint(
        adapted, tmp_path / "adapted", hyperparameters=hyperparameters, base=base
    )
    export.export_model(saved, tmp_path / "merged")
    inputs = TOKENS[:, :-1]
    merged = load(tmp_path / "merged")(inputs).logits
    of_run = load_trained_model(saved, torch.device("cpu"))
    torch.testing.assert_close(of_run(inputs), merged, atol=2e-5, rtol=0)
    assert (merged - ours(inputs)).abs().max() > 0.1
    with pytest.raises(ConfigError, match=r"^--adapter: .*leave it out"):
        export.export_model(saved, tmp_path / "adapter", adapters_only=True)


# ---- files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama 3.2, tied", "gpt2"])
def test_export_in_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = make_ours(MODELS[name])
    directory = exported_of(ours, tmp_path / "half", str(dtype).removeprefix("torch."))
    assert load(directory).dtype == dtype
    complete = tensors_of(exported_of(ours, tmp_path / "complete"))
    for key, tensor in tensors_of(directory).items():
        assert tensor.equal(complete[key].to(dtype))


@pytest.mark.parametrize("name", ["llama 2, 4 heads on 2", "gpt2"])
def test_export_of_many_files(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(class_export, "FILE_SIZE", "30KB")
    monkeypatch.setattr(tensor_files, "READ_BYTES", 1000)
    ours = make_ours(MODELS[name])
    directory = exported_of(ours, tmp_path)
    files = list(directory.glob("*.safetensors"))
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 32_000
    torch.testing.assert_close(load(directory)(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_config_json_of_presets_is_of_their_size(preset: str) -> None:
    config = ModelConfig.model_validate({"model": preset})
    theirs = read_config(config_json.write_config(config, "bfloat16"))
    network = build_network(theirs)
    assert sum(each.numel() for each in network.parameters()) == config.n_parameters
    is_llama = preset.startswith("smollm2-")
    assert theirs.model_type[:3] in ("llama" if is_llama else preset)


def test_one_of_two_sets_of_weights_is_refused(tmp_path: Path) -> None:
    make_reference(LLAMA_CLASS).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    for other in ("consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / other).write_bytes(b"of another format")
    assert list_weight_files(tmp_path) == shards
    single = tmp_path / "model.safetensors"
    save_file(make_reference(LLAMA_CLASS, seed=1).state_dict(), single)
    with pytest.raises(ConfigError, match=r"two sets of weights, model.safetensors and those of"):
        list_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert list_weight_files(tmp_path) == [single]


@pytest.mark.slow
def test_init_from_can_be_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    make_reference(LLAMA_CLASS | {"vocab_size": 300}).save_pretrained(source)
    add_tokenizer(source, 280)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"dataset": "text", "train_data": "text"}
    hp = read_with_model_defaults(data | {"init_from": "~/in"})
    assert hp.model.vocab_size == 300
    assert hp.data.tokenizer == hp.checkpoint.init_from == str(source)
    assert load_tokenizer("~/in").identity == load_tokenizer(str(source)).identity


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["jsonl", "text", "hf", "tokens"])
def test_tokenizer_may_have_a_token_that_the_model_does_not(dataset: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    reference = make_reference(LLAMA_CLASS | {"vocab_size": 280})
    reference.save_pretrained(source)
    tokenizer = add_tokenizer(source, 280)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(source)
    assert tokenizer.convert_tokens_to_ids("<image>") == 280
    assert weights.model_defaults(str(source))["tokenizer"] == str(source)

    for text in ("<image", "<image>"):
        data = tmp_path / ("text.txt" if dataset in ("text", "tokens") else "text.jsonl")
        content = f"{text} {TEXTS[0]}" * 40
        if dataset in ("jsonl", "hf"):
            content = json.dumps({"text": "Hi"}) + "\n" + json.dumps({"text": content}) + "\n"
        data.write_text(content)
        keys: dict[str, Any] = {"dataset": dataset, "train_data": str(data)}
        if dataset == "tokens":
            keys["train_data"] = str(tmp_path / f"tokens{len(text)}")
            arguments = ["--tokenizer", source, "--out", keys["train_data"], data]
            assert prepare([str(each) for each in arguments]) == 0
        if dataset in ("tokens", "jsonl", "hf"):
            keys["val_data"] = keys["train_data"]
        hp = read_with_model_defaults(keys | {"init_from": str(source), "max_seq_len": 8})
        assert hp.model.vocab_size == 280
        if text == "<image":
            open_data(hp.data, hp.model.vocab_size, 8, 1, 0)
            continue
        with pytest.raises(ConfigError, match="id 280") as refused:
            open_data(hp.data, hp.model.vocab_size, 8, 1, 0)
        place = {"jsonl": f"{data}:2: ", "text": f"{data}: "}.get(dataset, "")
        assert place in str(refused.value)


# ---- errors


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, ["ffn"]),
        ({"ffn": "gelu", "norm_placement": "post", "head_dim": 32}, ["norm_placement", "head_dim"]),
        (
            {"bias": "all", "ffn": "gelu", "norm": "rmsnorm", "sliding_window": 4},
            ["norm", "sliding_window"],
        ),
        ({"bias": "all", "ffn": "gelu", "n_kv_heads": 1}, ["n_kv_heads"]),
        ({"positions": "rope"}, ["positions", "ffn"]),
        ({"positions": "rope", "norm": "rmsnorm", "ffn": "swiglu", "sliding_window": 4}, ["bias"]),
        ({"model": "qwen2.5-0.5b", "qk_norm": "head"}, ["bias"]),
    ],
)
def test_write_config_refuses_a_model_without_counterpart(
    changes: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_json.write_config(ModelConfig.model_validate(changes), "float32")
    assert [problem.partition(":")[0] for problem in refused.value.problems] == keys
    assert named_keys(refused.value) >= set(keys)


def exported(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    """Return the error message of an export, which must not leave files."""
    out = Path(str(arguments[1]))
    before = set(out.parent.iterdir())
    assert hf_main.main(["export", *map(str, arguments)]) == code
    output, errors = capsys.readouterr()
    assert output == ""
    assert set(out.parent.iterdir()) == before
    return errors.strip()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(make_ours(LLAMA), tmp_path / "checkpoints")


def test_export_overwrites_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert "already exists" in exported(capsys, checkpoint, tmp_path / "out", code=2)


def test_export_reads_no_base_where_there_are_no_adapters(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (checkpoint, tmp_path / "out", "--base", tmp_path)
    assert exported(capsys, *arguments, code=2).startswith("--base: ")


def test_export_has_the_modes_of_the_umask(checkpoint: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export.export_model(checkpoint, tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_export_on_a_full_disk_leaves_no_files(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        error = exported(capsys, checkpoint, tmp_path / "there" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "cannot be written: " in error
    assert "File too large" in error


def test_export_names_a_value_above_float16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = make_ours(LLAMA)
    dict(ours.named_parameters())["head.norm.weight"].data.fill_(1e5)
    checkpoint = save_checkpoint(ours, tmp_path / "checkpoints")
    message = exported(capsys, checkpoint, tmp_path / "out", "--dtype", "float16")
    assert message.startswith("model.norm.weight: has values above 65504")
    export.export_model(checkpoint, tmp_path / "out", "bfloat16")


def test_export_refuses_a_damaged_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = checkpoint.glob("model-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert exported(capsys, checkpoint, tmp_path / "out").startswith(f"{shard}: damaged")


def test_export_of_gpt2_without_biases_writes_zeros(tmp_path: Path) -> None:
    shape = {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 96,
        "max_seq_len": 64,
        "ffn": "gelu",
    }
    tokens = torch.randint(0, 96, (1, 40))
    for bias in ("none", "ffn", "qkv"):
        torch.manual_seed(0)
        ours = Transformer(ModelConfig.model_validate(shape | {"bias": bias})).eval()
        export.export_model(save_checkpoint(ours, tmp_path / bias), tmp_path / f"{bias}-out")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{bias}-out")
        torch.testing.assert_close(loaded(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"modules": {**families.LLAMA.modules, "head.norm": "model.last_norm"}},
            "its class has no model.last_norm.weight",
        ),
        ({"model_type": "qwen3"}, "its class also has model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_export_to_a_class_with_other_tensors_is_refused(
    changes: dict[str, Any],
    problem: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As classes of another version of transformers may be: none of theirs would be zeros."""
    family = replace(families.LLAMA, **changes)
    monkeypatch.setitem(families.FAMILIES, "llama", family)
    assert problem in exported(capsys, checkpoint, tmp_path / "out", code=2)


# ---- tokenizers


def started(folder: Path, source: Path, **changes: Any) -> Path:
    """Train a step without a change from the weights in `source`; return the run's directory."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    (folder / "text" / "a.txt").write_text("".join(TEXTS) * 100)
    training = {
        "lr": 1e-30,
        "max_steps": 1,
        "validation_batches": 1,
        "amp_dtype": None,
        "max_seq_len": 16,
    }
    data = {"dataset": "text", "train_data": "text", "init_from": str(source)}
    run_fsdp(folder, config=training | data | changes, code=0)
    return folder / "runs" / "test"


@pytest.mark.slow
def test_tokenizer_and_generated_text_equal_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = make_reference(LLAMA_CLASS | {"vocab_size": 300})
    reference.save_pretrained(tmp_path / "in")
    theirs = add_tokenizer(tmp_path / "in", 280)
    run = started(tmp_path, tmp_path / "in", max_seq_len=64)

    how = ["--prompt", TEXTS[0], "--max-new-tokens", "20", "--temperature", "0"]
    assert generate.main([str(run), *how]) == 0
    ids = theirs(TEXTS[0], return_tensors="pt")
    greedy: Any = {
        "do_sample": False,
        "max_new_tokens": 20,
        "pad_token_id": 0,
        "eos_token_id": theirs.eos_token_id,
    }
    drawn = reference.generate(**ids, **greedy)[0, ids.input_ids.shape[1] :]
    expected = theirs.decode(drawn, skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == (TEXTS[0] + expected).strip()

    export.export_model(run, tmp_path / "out")
    assert all(
        tensor.equal(tensors_of(tmp_path / "in")[key])
        for key, tensor in tensors_of(tmp_path / "out").items()
    )
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(again(text).input_ids == theirs(text).input_ids for text in TEXTS)
    assert again.eos_token == "<end>"
    assert (
        transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
        == theirs.eos_token_id
    )


@pytest.mark.slow
def test_export_has_special_tokens_and_chat_template(tmp_path: Path) -> None:
    make_reference(LLAMA_CLASS | {"vocab_size": 384}).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_bytes(llama2_tokenizer())
    (tmp_path / "in" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "in" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "top_p": 0.9})
    )
    for named in ("<s>", None):
        settings = json.dumps({"bos_token": named, "eos_token": "</s>"})
        (tmp_path / "in" / "tokenizer_config.json").write_text(settings)
        export.export_model(
            started(tmp_path / str(named), tmp_path / "in"), tmp_path / f"{named}-out"
        )
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{named}-out")
        assert (loaded.generation_config.eos_token_id, loaded.generation_config.top_p) == (
            [2, 7],
            0.9,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / f"{named}-out")
        assert tokenizer.chat_template == CHAT_TEMPLATE


TURNS = """\
{% for message in messages %}<start>{{ message.role }}
{{ message.content }}<stop>
{% endfor %}{% if add_generation_prompt %}<start>assistant
{% endif %}"""


COPIED_FILES = {
    "special_tokens_map.json": b'{"eos_token": "<end>"}',
    "added_tokens.json": b"{}",
    "tokenizer.model": b"\0" * (9 << 20),
    "vocab.json": b"{ }",
    "merges.txt": b"#version: 0.2\n",
    "tekken.json": b'{"vocab": []}',
    "spiece.model": b"\1",
}


@pytest.fixture(scope="module")
def source_of_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose model stops at 0 and 7, with a chat template that writes <stop>."""
    folder = tmp_path_factory.mktemp("chat") / "in"
    make_reference(LLAMA_CLASS | {"vocab_size": 300}).save_pretrained(folder)
    tokenizer = add_tokenizer(folder, 280)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>"]})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 7]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "turns.jinja").write_text(TURNS)
    for name, content in COPIED_FILES.items():
        (folder / name).write_bytes(content)
    return folder


def train_on_chats(folder: Path, source: Path, **changes: Any) -> Path:
    """Train a model to answer "hi" by "ho"; return the run's directory."""
    turns = {"user": "hi", "assistant": "ho"}
    messages = [{"role": role, "content": content} for role, content in turns.items()]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 40)
    data = {"dataset": "jsonl", "train_data": "chats.jsonl", "loss_on": "completion"}
    data |= {"chat_template": str(source / "turns.jinja"), "max_seq_len": 32}
    return started(folder, source, **data | changes)


@pytest.mark.slow
def test_export_stops_where_training_stopped(source_of_chats: Path, tmp_path: Path) -> None:
    source = shutil.copytree(source_of_chats, tmp_path / "in")
    run = train_on_chats(tmp_path, source, lr=0.02, max_steps=40)
    export.export_model(run, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [0, 7, stop]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    generated = model.generate(prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    assert tokenizer.decode(generated[0, prompt.shape[1] :]) == "ho<stop>"
    assert load_tokenizer(str(tmp_path / "out")).stop_ids == {0, 7, stop}
    copies = {name: (tmp_path / "out" / name).read_bytes() for name in COPIED_FILES}
    assert copies == COPIED_FILES


@pytest.mark.slow
def test_export_of_adapters_has_the_tokenizer_and_its_stops(
    source_of_chats: Path, tmp_path: Path
) -> None:
    run = train_on_chats(tmp_path, source_of_chats, lora_rank=2)
    export.export_model(run, tmp_path / "merged")
    export.export_model(run, tmp_path / "adapter", adapters_only=True)
    for out in (tmp_path / "merged", tmp_path / "adapter"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        generation = transformers.GenerationConfig.from_pretrained(out)
        assert tokenizer.chat_template == TURNS
        assert generation.eos_token_id == [0, 7, tokenizer.convert_tokens_to_ids("<stop>")]
        assert {name: (out / name).read_bytes() for name in COPIED_FILES} == COPIED_FILES


# ---- a trained run


@pytest.mark.slow
def test_export_of_a_run_of_two_ranks_on_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(TEXTS) * 40)
    shape = {
        "vocab_size": 264,
        "positions": "rope",
        "norm": "rmsnorm",
        "ffn": "swiglu",
        "bias": "none",
        "n_kv_heads": 2,
    }
    data = {"dataset": "text", "train_data": "text", "max_steps": 3, "report_rate": 3}
    run_fsdp(tmp_path, ranks=2, config=TINY | shape | data, code=0)
    export.export_model(tmp_path / "runs" / "test", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == loaded.config.eos_token_id == 256
    model, ours = load_model(checkpoints_by_step(tmp_path)[3], torch.device("cpu"))
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == ours.encode(text)
        assert tokenizer.decode(ids) == text
        torch.testing.assert_close(
            loaded(torch.tensor([ids[:16]])).logits, model(torch.tensor([ids[:16]]))
        )
