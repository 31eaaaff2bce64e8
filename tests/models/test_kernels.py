"""Kernels of others compute a class as its own code does, or are refused by name."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lm import transformers_attention
from lm.config.reading import read_hyperparameters
from lm.delta_rule import gated_delta_rule
from lm.errors import ConfigError
from lm.hf.base import open_model
from lm.hf.examine import Computation
from lm.hf.examine import examine as examine_class
from lm.hf.weights import examined_config, model_defaults
from lm.runtime.world import World
from lm.training.lora import Adapters, LoraConfig
from lm.transformers_config import Examined, Kernels, TransformersConfig
from lm.transformers_linear import rule_by_fla
from lm.transformers_model import TransformersModel, text_config
from tests.support.forked import start_python
from tests.support.hf import complete_values, read_with_model_defaults, save_model
from tests.support.parallelism import train_each
from tests.support.ranks import run_ranks
from tests.support.runs import checkpoints_by_step

pytestmark = pytest.mark.usefixtures("shared_cache")

RUN: dict[str, Any] = {
    "dataset": "jsonl",
    "max_steps": 4,
    "report_rate": 1,
    "validation_rate": 4,
    "checkpoint_rate": 4,
    "total_batch_size": 4,
    "batch_size": 2,
    "max_seq_len": 48,
    "lr": 1e-3,
    "amp_dtype": None,
    "num_tokens": 5,
    "seed": 7,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a small Llama, and chats."""
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    lines = [
        f'{{"prompt": "{number}? ", "completion": "{"ab" * (2 + 3 * (number % 4))}"}}'
        for number in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    chats = {"init_from": str(folder), "train_data": str(folder / "chats.jsonl")}
    return RUN | chats | changes


def examine(kernels: Kernels) -> TransformersConfig:
    return examined_config(complete_values("llama"), kernels)


# ---- stand-ins for kernels of GPUs, which work on a CPU


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


def ignore_documents(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
) -> tuple[Tensor, None]:
    is_causal = query.shape[2] > 1
    return attend(query, key, value, is_causal=is_causal, scale=options["scaling"]), None


def look_ahead(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return attend(query, key, value, scale=options["scaling"]), None


def read_starts(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """As flash attention does: rows are one sequence, cut where documents start."""
    starts = options.get("cu_seq_lens_q")
    if starts is None:
        return ignore_documents(module, query, key, value, mask, **options)
    assert options["max_length_k"] == int(starts.diff().max())
    batch = len(query)
    one_row = [x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
    lengths = starts.diff().tolist()
    outputs: list[Tensor] = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in one_row), strict=True):
        outputs.append(attend(q, k, v, is_causal=True, scale=options["scaling"]))
    return torch.cat(outputs, dim=1).unflatten(1, (batch, -1))[0], None


def only_in_16_bits(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    assert query.dtype != torch.float32, "not in float32"
    return read_starts(module, query, key, value, mask, **options)


STAND_INS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "ignores-documents": ignore_documents,
    "looks-ahead": look_ahead,
    "reads-starts": read_starts,
    "in-16-bits": only_in_16_bits,
}
for name, stand_in in STAND_INS.items():
    AttentionInterface.register(name, stand_in)


# ---- what is found of them


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_kernels_that_ignore_documents_do_not_pack(dtype: str | None, llama: Path) -> None:
    examined = examine(Kernels("ignores-documents", dtype)).examined
    assert not examined.packing
    assert examined.hidden_states
    assert examined.full_recomputation
    assert examined.cache
    run = settings(llama, attn_implementation="ignores-documents", amp_dtype=dtype)
    hp = read_with_model_defaults(run)
    assert not hp.data.packing
    with pytest.raises(ConfigError, match=r"packing: .*attn_implementation: ignores-documents"):
        read_with_model_defaults(run | {"packing": True})
    assert read_with_model_defaults(settings(llama)).data.packing


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_kernels_that_look_ahead_are_refused_by_name(dtype: str | None) -> None:
    refused = r"^attn_implementation: looks-ahead: LlamaForCausalLM: a later token changes"
    with pytest.raises(ConfigError, match=refused):
        examine(Kernels("looks-ahead", dtype))


@pytest.mark.slow
def test_kernels_are_asked_in_the_dtype_of_the_run() -> None:
    refused = r"in-16-bits: LlamaForCausalLM: cannot be computed \(AssertionError: not in float32"
    with pytest.raises(ConfigError, match=refused):
        examine(Kernels("in-16-bits", None))
    assert examine(Kernels("in-16-bits", "bfloat16")).examined.packing


@pytest.mark.slow
def test_kernels_that_read_where_documents_start_pack_rows() -> None:
    examined = examine(Kernels("reads-starts", None)).examined
    assert examined.packing
    assert examined.packed_by == "cu_seq_lens"
    assert not examined.context_parallel  # it gathers no keys of other ranks


@pytest.mark.slow
def test_kernels_of_transformers_keep_documents_apart_by_positions() -> None:
    for name in ("eager", "sdpa"):
        examined = examine(Kernels(name, None)).examined
        assert (examined.attention, examined.packed_by) == (name, "position_ids")
        assert examined.packing
        assert examined.compilation
        assert not examined.context_parallel


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("sdpaa", "llama", "sdpaa: llama: transformers refuses it: ValueError"),
        ("flash_attention_2", "llama", "flash_attention_2: .*ImportError"),
        ("kernels-community/flash-attn2", "llama", "code of the Hub is never run"),
        ("class", "llama", "class: transformers has no kernels of this name"),
        ("documents", "llama", "documents: transformers has no kernels of this name"),
        ("lm", "llama", "lm: transformers has no kernels of this name"),
        ("sdpa", "gptj", "sdpa: gptj: transformers refuses it: ValueError"),
    ],
)
def test_kernels_that_are_not_there_are_refused_by_name(name: str, kind: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^attn_implementation: .*{problem}"):
        examined_config(complete_values(kind), Kernels(name, None))


def test_adapters_are_read_without_the_kernels_of_their_run() -> None:
    config = examined_config(complete_values("llama"))
    examined = config.examined.model_copy(update={"attention": "flash_attention_2"})
    of_run = config.model_copy(update={"examined": examined})
    lora_config = LoraConfig.model_validate({"lora_rank": 2})
    assert Adapters(lora_config, of_run).keys() == Adapters(lora_config, config).keys()


def test_kernels_are_for_models_of_transformers() -> None:
    with pytest.raises(ConfigError, match="attn_implementation: is for models of transformers"):
        read_hyperparameters({"hyperparameters": {"attn_implementation": "sdpa"}}, [], "test")


@pytest.mark.slow
def test_kernels_are_examined_once(capfd: pytest.CaptureFixture[str]) -> None:
    def is_examined(*kernels: str | None) -> bool:
        examine(Kernels(*kernels))
        return "examining llama" in capfd.readouterr().err

    is_examined("sdpa", None)
    assert not is_examined("sdpa", None)
    is_examined("sdpa", "bfloat16")
    assert not is_examined("sdpa", "bfloat16")


# ---- kernels of this project, as a run on a GPU computes with them


IN_BFLOAT16 = Computation(dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "gemma2",
        "gpt_oss",
        "lfm2",
        "llama",
        "minimax",
        "opt",
        "qwen3_next",
    ],
)
def test_what_holds_exactly_holds_as_a_run_computes(kind: str) -> None:
    values = complete_values(kind)
    exact = examine_class(values).examined(values)
    in_run = examine_class(values, IN_BFLOAT16).examined(values)
    assert in_run.model_copy(update={"details": {}}) == exact.model_copy(update={"details": {}})


def test_what_is_refused_exactly_is_not_asked_on_the_device_of_a_run() -> None:
    values = text_config({"model_type": "bert", "is_decoder": False})
    of_run = Computation(torch.device("meta"))  # on which nothing could be asked
    (refusal,) = examine_class(values, of_run).refusals()
    assert refusal.startswith("BertLMHeadModel: a later token changes earlier logits ")


def cannot_be_computed(*_inputs: Any, **_options: Any) -> tuple[Tensor, None]:
    raise NotImplementedError("no kernel")


def ignore_documents_or_fail() -> Callable[..., tuple[Tensor, None]]:
    """Return a stand-in that ignores documents in the first packed rows, and raises for others."""
    first_queries: list[Tensor] = []

    def stand_in(module: Any, query: Tensor, *inputs: Any, **options: Any) -> Any:
        if module.layer_idx == 0 and query.shape[::2] == (2, 42):
            first_queries.append(query.detach())
            if not torch.equal(query, first_queries[0]):
                raise NotImplementedError("no kernel")
        return ignore_documents(module, query, *inputs, **options)

    return stand_in


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stand_in", "lost"),
    [
        (ignore_documents, {"packing", "context_parallel"}),
        (ignore_documents_or_fail(), {"packing", "context_parallel"}),
        (look_ahead, {"causality"}),
        (cannot_be_computed, set()),
    ],
)
def test_our_kernels_are_asked_as_a_run_computes(
    stand_in: Callable[..., tuple[Tensor, None]],
    lost: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By stand-ins, which compute otherwise in 16 bits. What raises is named at every start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    transformers_attention.register()
    ours = AttentionInterface()[transformers_attention.NAME]

    def attend_otherwise(module: nn.Module, query: Tensor, *inputs: Any, **options: Any) -> Any:
        function = ours if query.dtype == torch.float32 else stand_in
        return function(module, query, *inputs, **options)

    values = complete_values("llama")
    exact = examine_class(values)
    AttentionInterface.register(transformers_attention.NAME, attend_otherwise)
    try:
        in_run = examine_class(values, IN_BFLOAT16)
        named = re.findall("^.*: cannot be asked on cpu", capfd.readouterr().err, re.M)
        assert examine_class(values, IN_BFLOAT16) == in_run
        again = re.findall("^.*: cannot be asked on cpu", capfd.readouterr().err, re.M)
    finally:
        AttentionInterface.register(transformers_attention.NAME, ours)
    found: set[str] = set()
    for name, finding in exact.findings.items():
        if finding.holds and not in_run.findings[name].holds:
            found.add(name)
    assert found == lost
    assert bool(in_run.refusals()) == ("causality" in lost)
    assert named == again
    assert bool(named) == (stand_in is cannot_be_computed)


@pytest.mark.parametrize("lengths", [(5, 70), (75,)])
def test_flash_linear_attention_is_called_with_all_rows_in_one(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for its function, which computes each document alone."""

    def stand_in(*inputs: Tensor, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool) -> Any:
        assert use_qk_l2norm_in_kernel
        assert {len(x) for x in inputs} == {1}
        parts = [x.split(cu_seqlens.diff().tolist(), dim=1) for x in inputs]
        outputs: list[Tensor] = []
        for document in zip(*parts, strict=True):
            ids = torch.zeros(document[0].shape[:2], dtype=torch.int64)
            outputs.append(gated_delta_rule(*document, ids))
        return torch.cat(outputs, dim=1), None

    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", package)

    n_tokens = sum(lengths)
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, n_tokens, 2, 16, dtype=torch.float64)
    value = torch.randn(2, n_tokens, 4, 8, dtype=torch.float64)
    decay, beta = torch.rand(2, 2, n_tokens, 4, dtype=torch.float64)
    inputs = (query, key, value, -decay, beta)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = torch.tensor([0, *lengths, *lengths]).cumsum(0)
    expected = gated_delta_rule(*inputs, ids.expand(2, -1))
    torch.testing.assert_close(rule_by_fla(*inputs, starts), expected)


# ---- runs


def train_all(world: World, folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return the losses of runs, on ranks that know the stand-ins."""
    return train_each(world, folder, runs, {})


@pytest.mark.slow
def test_runs_with_other_kernels_have_the_losses_of_ours(llama: Path, tmp_path: Path) -> None:
    """Packed; what is generated, exported or started from them needs no kernels of others."""
    kernels = {"ours": None, "sdpa": "sdpa", "starts": "reads-starts"}
    runs = {name: settings(llama, attn_implementation=each) for name, each in kernels.items()}
    for run in runs.values():
        assert read_with_model_defaults(run).data.packing
    losses = run_ranks(2, train_all, str(tmp_path), runs)[0]
    assert losses["ours"][0] - losses["ours"][-1] > 1e-3
    for name in runs:
        assert losses[name] == pytest.approx(losses["ours"], rel=1e-6), name

    saved = checkpoints_by_step(tmp_path, "starts")[4]
    ours, _ = open_model(saved)
    assert isinstance(ours, TransformersModel)
    assert ours.config.examined.attention == "documents"
    for name, attention in {"eager": "eager", None: "documents"}.items():
        values = model_defaults(str(saved), Kernels(name, None))
        assert Examined.model_validate(values["examined"]).attention == attention
    command = ["-m", "lm.hf.__main__", "export", str(saved), str(tmp_path / "exported")]
    process = start_python(command, os.environ)  # without the stand-ins
    assert process.wait() == 0
