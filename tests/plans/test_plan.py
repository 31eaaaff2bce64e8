"""A plan's memory is that of the run's own step; a run says first what its state takes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from huggingface_hub import constants
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp import build_model
from lm.config.hyperparameters import Hyperparameters
from lm.context import new_context_group
from lm.errors import ConfigError
from lm.hf.sizes import measure_sizes
from lm.hf.small_config import small_configs
from lm.memory import USABLE, MemoryCheck, Ranks, count_copied_bytes, count_state
from lm.metrics.device import GIB
from lm.objectives.objective import NextToken
from lm.plan import fit, step
from lm.plan.__main__ import main, parse_plan_arguments
from lm.plan.describe import (
    advise_gpus,
    change_settings,
    describe_ranks,
    load_hyperparameters,
)
from lm.runtime.world import make_mesh
from lm.training import parallelize, precision
from lm.transformers_model import build_network, read_config, text_config
from tests.support import REPOSITORY
from tests.support.hf import complete_values, read_with_model_defaults
from tests.support.hyperparameters import OF_TRANSFORMERS, TINY
from tests.support.runs import run_fsdp

pytestmark = pytest.mark.usefixtures("shared_cache")


def track_backward(hp: Hyperparameters, ranks: Ranks) -> dict[str, int]:
    """Return the parts of the peak of forward and backward by PyTorch's tracker.

    It would count the global shapes of DTensors in the optimizer's step.
    """
    shape = parallelize.mesh_shape(hp.parallel, ranks.size, ranks.per_node)
    n_micro_batches = (hp.data.total_batch_size or hp.data.batch_size * ranks.size) // (
        hp.data.batch_size * ranks.size
    )
    dist.init_process_group("fake", rank=0, world_size=ranks.size, store=FakeStore())
    try:
        mesh = make_mesh("cpu", shape)
        context_group = new_context_group(hp.parallel.context_parallel, 0, ranks.size)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build_model(hp, mesh, ranks.dtype)
            scale = precision.LossScaler(ranks.dtype, torch.device("cpu")).scale
            sequences = step.new_micro_batch(hp, context_group)
            with FSDPMemTracker(model) as tracker:
                for micro_batch in range(n_micro_batches):
                    is_last = micro_batch == n_micro_batches - 1
                    parallelize.start_micro_step(model, hp.parallel, is_last)
                    loss = NextToken().losses(model, sequences).minimized_sum
                    (loss * scale).backward()
                    del loss
        (parts,) = tracker.get_tracker_snapshot("peak").values()
        return {str(part).rpartition(".")[2]: n_bytes for part, n_bytes in parts.items()}
    finally:
        dist.destroy_process_group()


LLAMA = {
    "model": "mistral",
    "d_model": 512,
    "n_layers": 3,
    "n_heads": 8,
    "vocab_size": 2048,
    "max_seq_len": 256,
}
MIXTURE = LLAMA | {"n_experts": 8, "d_ff": 256}
GPT2 = {
    "model": "gpt2",
    "d_model": 512,
    "n_layers": 3,
    "n_heads": 8,
    "vocab_size": 2048,
    "max_seq_len": 256,
}
DEFAULT = {"d_model": 512, "n_layers": 3, "n_heads": 8, "vocab_size": 4096, "max_seq_len": 256}
LORA = LLAMA | {"lora_rank": 8, "init_from": "base"}
NF4 = LORA | {"base_dtype": "nf4"}
ACCUMULATED = {"total_batch_size": 24, "n_layers": 2}
"""three micro-batches"""

ONE_OF_EACH_KIND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"sharding": "grad-shard", "activation_checkpointing": "selective"}),
    (DEFAULT, {"sharding": "hybrid-full-shard"} | ACCUMULATED),
    (GPT2, {"sharding": "grad-shard", "layer_wrap": False}),
    (LLAMA, {"sharding": "full-shard", "layer_wrap": False, "cpu_offload": True}),
    (NF4, {"sharding": "grad-shard"}),
    (LLAMA, {"sharding": "full-shard", "optimizer": "muon"}),
    (MIXTURE, {"sharding": "grad-shard", "activation_checkpointing": "full", "amp_dtype": None}),
]
"""of recomputation, mesh with accumulation, wrapping, offload, base and optimizer, and of
experts"""
STEPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *ONE_OF_EACH_KIND,
    (LLAMA, {"sharding": "no-shard"}),
    (LLAMA, {"sharding": "full-shard", "amp_dtype": None} | ACCUMULATED),
    (LLAMA, {"sharding": "grad-shard", "sync_each_micro_step": True} | ACCUMULATED),
    (
        DEFAULT,
        {"sharding": "hybrid-grad-shard", "activation_checkpointing": "full", "batch_size": 5},
    ),
    (LORA, {"sharding": "grad-shard", "activation_checkpointing": "full"} | ACCUMULATED),
]
NF4_OF_A_CLASS = {"lora_rank": 4, "init_from": "base", "base_dtype": "nf4"}
CLASSES: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {"sharding": "full-shard", "amp_dtype": None}),
    ("qwen3_5_text", {"sharding": "full-shard"}),
    ("gemma2", {"sharding": "full-shard"}),  # complete logits
    ("ministral3", {"sharding": "full-shard", "lora_rank": 4, "init_from": "base"}),
    ("gpt_oss", NF4_OF_A_CLASS | {"sharding": "full-shard", "base_dtype": "mxfp4"}),
    ("qwen3_moe", NF4_OF_A_CLASS | {"sharding": "grad-shard", "activation_checkpointing": "full"}),
]


def model_of_transformers(kind: str, **layers: Any) -> dict[str, Any]:
    """Return the hyperparameters of a small model that transformers computes, not examined."""
    values = next(small_configs(text_config({"model_type": kind}), derived=())) | layers
    values |= {"vocab_size": 2048, "hidden_size": 128, "max_position_embeddings": 256}
    for key in {"n_routed_experts", "num_experts", "num_local_experts"} & values.keys():
        values[key] = 8  # as many as ranks: each holds as much
    sizes = measure_sizes(build_network(read_config(values)))._asdict()
    known = {"transformers_config": values, "vocab_size": 2048, "max_seq_len": 256} | sizes
    known["examined"] = OF_TRANSFORMERS.examined.model_copy(
        update={"hidden_states": kind != "gemma2", "nf4": True, "experts": True}
    )
    return OF_TRANSFORMERS.model_copy(update=known).model_dump(mode="json")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), CLASSES, ids=str)
def test_memory_of_a_class_of_transformers_is_that_of_pytorchs_tracker(
    kind: str, changes: dict[str, Any]
) -> None:
    assert_memory_is_that_of_pytorchs_tracker(model_of_transformers(kind), changes)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changes"), STEPS, ids=str)
def test_memory_of_a_step_is_that_of_pytorchs_tracker(
    model: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert_memory_is_that_of_pytorchs_tracker(model, changes)


def assert_memory_is_that_of_pytorchs_tracker(
    model: dict[str, Any], changes: dict[str, Any]
) -> None:
    hp = Hyperparameters.from_flat({"amp_dtype": "bfloat16", "compile": False} | model | changes)
    ranks = Ranks(
        precision.choose_dtype(hp.precision.amp_dtype, torch.bfloat16), "cpu", 8, 4, 80 * GIB
    )
    peaks = dict(step.take_step(hp, ranks))
    del peaks[step.OPTIMIZER]
    memory = peaks[step.find_peak(peaks)]
    tracked = track_backward(hp, ranks)["Total"] + memory[step.MOMENTS]
    assert step.device_bytes(memory) == pytest.approx(tracked, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_two_ranks_that_divide_sequences_have_half_of_the_activations(mode: str) -> None:
    keys = LLAMA | {"n_kv_heads": 2, "max_seq_len": 2048, "activation_checkpointing": mode}
    keys |= {"amp_dtype": "bfloat16", "compile": False}
    ranks = Ranks(torch.bfloat16, "cpu", 8, 8, 80 * GIB)
    tracked: list[int] = []
    for context_parallel in (1, 2):
        hp = Hyperparameters.from_flat(keys | {"context_parallel": context_parallel})
        parts = track_backward(hp, ranks)
        tracked.append(parts["ACT"] + parts["TEMP"])
        peaks = dict(step.take_step(hp, ranks))
        del peaks[step.OPTIMIZER]
        planned = peaks[step.find_peak(peaks)][step.ACTIVATIONS]
        assert planned == pytest.approx(tracked[-1], rel=0.05)
    complete, divided = tracked
    assert divided <= 0.55 * complete


@pytest.mark.slow
@pytest.mark.parametrize(  # of recomputation, wrapping, base, and of experts
    ("model", "changes"), ONE_OF_EACH_KIND[::2], ids=str
)
def test_a_few_blocks_tell_the_memory_of_all(
    model: dict[str, Any], changes: dict[str, Any]
) -> None:
    hp = Hyperparameters.from_flat(
        {"amp_dtype": "bfloat16", "compile": False} | model | changes | {"n_layers": 8}
    )
    ranks = Ranks(
        precision.choose_dtype(hp.precision.amp_dtype, torch.bfloat16), "cuda", 8, 4, 80 * GIB
    )
    measured = step.measure_step(hp, ranks)
    taken = step.take_step(hp, ranks)
    for phase, memory in taken.items():
        n_bytes = step.device_bytes(memory)
        assert step.device_bytes(measured[phase]) == pytest.approx(n_bytes, rel=0.02, abs=2**20), (
            phase
        )


def model_of_kinds(kind: str, layer_types: list[str]) -> Hyperparameters:
    layers = {"num_hidden_layers": len(layer_types), "layer_types": layer_types}
    model = model_of_transformers(kind, **layers)
    return Hyperparameters.from_flat({"amp_dtype": "bfloat16", "compile": False} | model)


@pytest.mark.slow
def test_a_few_blocks_of_a_class_tell_the_memory_of_all_if_their_kinds_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    types = ["sliding_attention", "full_attention"]
    hp = model_of_kinds("gpt_oss", (5 * types)[:9])
    ranks = Ranks(torch.bfloat16, "cuda", 8, 4, 80 * GIB)
    take_step = step.take_step
    all_blocks = take_step(hp, ranks)
    taken: list[int] = []

    def take_step_and_count(hp: Hyperparameters, ranks: Ranks) -> Any:
        taken.append(hp.model.structure()["num_hidden_layers"])
        return take_step(hp, ranks)

    monkeypatch.setattr(step, "take_step", take_step_and_count)
    measured = step.measure_step(hp, ranks)
    assert taken == [5, 7]
    for phase, memory in all_blocks.items():
        n_bytes = step.device_bytes(memory)
        assert step.device_bytes(measured[phase]) == pytest.approx(n_bytes, rel=0.02, abs=2**20), (
            phase
        )
    # All blocks, if no kind repeats.
    step.measure_step(model_of_kinds("lfm2", [*["conv"] * 6, "full_attention"]), ranks)
    assert taken == [5, 7, 7]


def test_optimizer_with_muon_needs_copies_of_a_matrix() -> None:
    hp = Hyperparameters.from_flat(LLAMA | {"optimizer": "muon", "compile": False})
    ranks = Ranks(None, "cpu", 8, 8, 80 * GIB)
    peaks = step.take_step(hp, ranks)
    state = count_state(hp, None).total // 8
    largest_matrix = 4 * hp.own_model.d_model * hp.own_model.ffn_width
    assert step.device_bytes(peaks[step.OPTIMIZER]) >= state + largest_matrix


CODELLAMA = {"model": "codellama-7b", "max_seq_len": 1024, "activation_checkpointing": "full"}


def on_gpus(n: int = 8, gib: float = 80) -> Ranks:
    return Ranks(torch.bfloat16, "cuda", n, min(n, 8), gib * GIB)


@pytest.mark.parametrize(
    ("gpus", "sharding"), [(1, "full-shard"), (1, "no-shard"), (2, "no-shard")]
)
def test_gradients_that_are_not_scattered_are_no_activations(gpus: int, sharding: str) -> None:
    changes = {"max_seq_len": 8, "compile": False, "sharding": sharding}
    hp = Hyperparameters.from_flat(LLAMA | changes)
    memory = fit.measure(hp, on_gpus(gpus)).memory
    assert memory[step.GRADIENTS] > memory[step.PARAMETERS] / 2
    assert memory.get(step.ACTIVATIONS, 0) < memory[step.PARAMETERS] / 10


@pytest.mark.parametrize(("dtype", "n_bytes"), [(torch.bfloat16, 2), (None, 4)])
def test_copies_of_parameters_on_one_gpu_are_gathered(dtype: Any, n_bytes: int) -> None:
    hp = Hyperparameters.from_flat(TINY | {"sharding": "grad-shard", "compile": False})
    memory = step.take_step(hp, replace(on_gpus(1), dtype=dtype))[step.FORWARD]
    assert memory[step.GATHERED] == n_bytes * hp.model.n_parameters


@pytest.mark.slow
def test_offloading_moves_bytes_to_host_memory() -> None:
    hp = Hyperparameters.from_flat(CODELLAMA)
    kept = fit.measure(hp, on_gpus())
    moved = fit.measure(hp.replace(cpu_offload=True, activation_offload=True), on_gpus())
    assert step.PARAMETERS not in moved.memory
    assert step.MOMENTS not in moved.memory
    assert moved.peak < kept.peak
    block_inputs = 8 * 32 * 2 * 1024 * 4096  # in bfloat16
    state = 16 * hp.model.n_parameters
    assert moved.host - kept.host == pytest.approx(state + block_inputs, rel=1e-3)


@pytest.mark.parametrize(
    ("sharding", "n_micro_steps", "per_parameter"),
    [
        ("grad-shard", 8, 94),  # converts all parameters once
        ("grad-shard", 2, 34),
        ("grad-shard", 1, 16),
        ("full-shard", 2, 64),  # in every forward and backward
        ("full-shard", 1, 26),
    ],
)
def test_copies_of_a_step_depend_on_its_micro_steps(
    sharding: str, n_micro_steps: int, per_parameter: int
) -> None:
    hp = Hyperparameters.from_flat(TINY | {"sharding": sharding})
    assert count_copied_bytes(hp, n_micro_steps) == per_parameter * hp.model.n_parameters


ACCUMULATED = TINY | {"max_seq_len": 512, "batch_size": 1, "total_batch_size": 12}


@pytest.mark.slow
@pytest.mark.parametrize("larger", [12, 4])
def test_advice_is_the_largest_batch_size_that_fits(larger: int) -> None:
    hp = Hyperparameters.from_flat(ACCUMULATED)
    peak = fit.measure(hp.replace(batch_size=larger), on_gpus(1)).peak
    given = fit.measure(hp, replace(on_gpus(1), memory=peak / USABLE))
    advice = fit.advise_batch_size(hp, given)
    assert advice is not None
    assert advice.startswith(f"batch_size={larger} ")
    assert f" {12 // larger} micro-step" in advice


def test_run_on_a_gpu_says_what_its_micro_steps_copy() -> None:
    hp = Hyperparameters.from_flat(ACCUMULATED | {"sharding": "grad-shard"})
    (_, copies) = MemoryCheck(hp, on_gpus(1), 0, GIB, []).notes()
    assert "12 micro-steps with 134 bytes" in copies
    assert "1 micro-step with 16 bytes" in copies
    assert len(MemoryCheck(hp.replace(batch_size=12), on_gpus(1), 0, GIB, []).notes()) == 1


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"total_batch_size": None}, {}),
        ({"max_seq_len": 2**16, "batch_size": 3}, {}),  # products take more than 99 % of the time
        ({}, {"device_type": "cpu"}),
        ({}, {"dtype": None}),
        ({}, {"memory": 1}),  # in which the run itself does not fit
    ],
    ids=str,
)
def test_nothing_is_advised_that_saves_no_time(
    changes: dict[str, Any], ranks: dict[str, Any]
) -> None:
    hp = Hyperparameters.from_flat(ACCUMULATED | changes)
    given = fit.Need(replace(on_gpus(1), **ranks), step.FORWARD, {step.PARAMETERS: 2}, 0)
    assert fit.advise_batch_size(hp, given) is None


@pytest.mark.parametrize(
    ("changes", "host_gib"),
    [
        ({}, math.inf),
        pytest.param(
            {"total_batch_size": 64, "activation_offload": True}, 12, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_largest_batch_size_fits_and_one_more_does_not(
    changes: dict[str, Any], host_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = Hyperparameters.from_flat(CODELLAMA | {"n_layers": 3} | changes)
    ranks = replace(on_gpus(gib=8), host_memory=host_gib * GIB)
    given = fit.measure(hp, ranks)
    needs: dict[int, fit.Need] = {}

    def measure(hp: Hyperparameters, ranks: Ranks) -> fit.Need:
        needs[hp.data.batch_size] = step_of(hp, ranks)
        return needs[hp.data.batch_size]

    step_of = fit.measure
    monkeypatch.setattr(fit, "measure", measure)
    largest = fit.find_largest_batch_size(hp, given)
    assert largest > 1
    assert needs[largest].fits
    assert not needs[largest + 1].fits
    assert len(needs) <= 4


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu", "h110"], "--gpu: .*'h110' .*h100"),
        (["--gpus", "0"], "--gpus: 0 must be 1 or more"),
        (["--gpus", "x"], "--gpus: invalid int value: 'x'"),
        (["--nodes", "0"], "--nodes: 0 "),
        (["--memory", "0"], "--memory: 0 must be from 0.1"),
        (["--host-memory", "nan"], "--host-memory: nan "),
        (["--gpus", "7", "--nodes", "2"], "--nodes: 2 .*7 GPUs"),
        (["n_heads=7"], r"argument n_heads: 7 .*\[1, 2, 4, 8\]"),
        (
            ["--gpus", "8", "sharding=hybrid-full-shard", "shard_group_size=3"],
            r"shard_group_size: 8 ranks .*\[1, 2, 4, 8\]",
        ),
    ],
    ids=str,
)
def test_plan_command_refuses_wrong_arguments(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(REPOSITORY / "config.yaml"), *arguments]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert re.match(part, problem)


SMALL = ["--config", str(REPOSITORY / "config.yaml"), "max_seq_len=256", "n_layers=2"]


def test_settings_are_planned_with_the_batch_of_the_run() -> None:
    sizes = ["batch_size=2", "total_batch_size=8", "context_parallel=2", "--gpus", "8"]
    given = load_hyperparameters(parse_plan_arguments([*SMALL, *sizes]))
    changed = change_settings(given, 8, {"sharding": "full-shard"})
    assert changed.parallel.sharding == "full-shard"
    assert changed.data.total_batch_size == 8  # 2 on each of 4 groups


@pytest.mark.slow
def test_full_shard_is_proposed_to_groups_of_hybrid_sharding_as_it_is_typed() -> None:
    arguments = [*SMALL, "sharding=hybrid-full-shard", "shard_group_size=2"]
    args = parse_plan_arguments([*arguments, "--gpus", "8", "--memory", "0.1"])
    given = load_hyperparameters(args)
    need = fit.measure(given, describe_ranks(args, given))
    proposals = fit.propose(need, partial(change_settings, given, 8))
    proposal = next(each for each in proposals if "sharding" in each.settings)
    assert proposal.hp.parallel.sharding == "full-shard"
    (typed,) = re.findall("^with (.+): peak", proposal.describe())
    typed_args = parse_plan_arguments([*arguments, *typed.split()])
    assert load_hyperparameters(typed_args) == proposal.hp


def test_only_settings_that_do_not_fit_together_are_left_out_of_proposals() -> None:
    given = load_hyperparameters(parse_plan_arguments(SMALL))
    with pytest.raises(ConfigError, match="d_model"):
        change_settings(given, 1, {"d_model": -1})

    def has_a_bug(_settings: Mapping[str, Any]) -> Hyperparameters:
        raise ValueError("a bug")

    ranks = describe_ranks(parse_plan_arguments(SMALL), given)
    need = fit.Need(ranks, "forward", {}, 0)
    with pytest.raises(ValueError, match="a bug"):
        list(fit.propose(need, has_a_bug))


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_plan_needs_no_file_but_config_json(kind: str, tmp_path: Path) -> None:
    """Neither weights nor a tokenizer nor the data; a run is refused."""
    values = complete_values(kind)
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = {"init_from": str(tmp_path), "dataset": "jsonl", "train_data": "chat.jsonl"}
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump({"hyperparameters": settings}))
    arguments = ["--config", str(tmp_path / "chat.yaml"), "lora_rank=2"]
    hp = load_hyperparameters(parse_plan_arguments(arguments))
    network = build_network(read_config(values))
    assert hp.model.n_parameters == sum(p.numel() for p in network.parameters())
    with pytest.raises(ConfigError, match=rf"^test: init_from: {tmp_path}: has no "):
        read_with_model_defaults(settings)


def test_plan_of_a_model_that_is_not_here_says_what_suffices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    arguments = ["--config", str(REPOSITORY / "recipes" / "chat.yaml")]
    with pytest.raises(
        ConfigError, match=r"hf download .*\n.*needs a directory with its config\.json$"
    ):
        load_hyperparameters(parse_plan_arguments(arguments))
    with pytest.raises(
        ConfigError, match=r"^argument init_from: .*nowhere does not exist\n.*needs a directory"
    ):
        load_hyperparameters(parse_plan_arguments([*arguments, f"init_from={tmp_path}/nowhere"]))
    with pytest.raises(ConfigError, match=r"has no config\.json.*\n.*needs a directory"):
        load_hyperparameters(parse_plan_arguments([*arguments, f"init_from={tmp_path}"]))


@pytest.mark.slow
def test_plan_that_does_not_fit_proposes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "batch_size=2", "total_batch_size=20", "--gpus", "4", "--memory", "0.35"]
    assert main(arguments) == 2
    out = capsys.readouterr().out
    assert re.match("total_batch_size: 20 .* 2 x 4 .* 24\n", out)
    assert "does not fit into 90% of the memory of one GPU" in out
    proposals = re.findall(r"^with (.+): peak ([\d.]+ [MG]iB), (.*)$", out, re.M)
    settings, peak, result = proposals[-1]  # that fit, all before do not
    assert {each for *_, each in proposals[:-1]} == {"does not fit"}
    alone = [each for each, *_ in proposals if " " not in each]
    assert set(alone) >= {"activation_checkpointing=full", "sync_each_micro_step=true"}
    assert set(settings.split()) > {"sync_each_micro_step=true", "optim_dtype=bfloat16"}
    assert "cpu_offload=true" not in settings  # slow, and not needed
    typed = [*arguments, "total_batch_size=24", *settings.split()]
    assert main(typed) == 0
    planned = capsys.readouterr().out
    assert re.search(rf"^peak +{peak} ", planned, re.M)
    largest = planned.splitlines()[-1].rpartition(" ")[2]
    assert f"largest batch_size {largest}" in result


@pytest.mark.slow
def test_fewest_gpus_on_which_a_step_fits() -> None:
    given = load_hyperparameters(
        parse_plan_arguments([*SMALL, "batch_size=2", "total_batch_size=20"])
    )
    advice = advise_gpus(given, on_gpus(4, 0.45))
    assert advice is not None
    assert advice.endswith("8 GPUs in 1 node")
    assert advise_gpus(given, on_gpus(4, 0.3)) is None


@pytest.mark.slow
def test_run_that_cannot_fit_is_refused_with_what_fits(tmp_path: Path) -> None:
    config = {"d_model": 32768, "n_layers": 80, "n_heads": 8}
    done = run_fsdp(tmp_path, config=config, code=2)
    assert "parameters, moments and gradients take 15,392.6" in done.stderr
    assert re.search(r"sharding: full-shard over [\d,]+ or more ranks", done.stderr)


@pytest.mark.slow
def test_dry_run_compares_the_run_with_its_checkpoints(tmp_path: Path) -> None:
    run_fsdp(tmp_path, code=0)
    complete = run_fsdp(tmp_path, "--dry-run", code=0)
    assert "is complete" in complete.stdout
    other = run_fsdp(tmp_path, "--dry-run", "seed=43", code=2)
    assert "seed: 42 in the checkpoint, now 43" in other.stderr


def test_dry_run_says_what_a_run_needs(tmp_path: Path) -> None:
    config = {"d_model": 64, "n_layers": 1, "vocab_size": 30000, "max_seq_len": 16, "max_steps": 1}
    done = run_fsdp(tmp_path, "--dry-run", config=config, code=0, TMPDIR=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["test.yaml"]
    parts = re.findall(r"^(\w+) +([\d.]+) MiB  ", done.stdout, re.M)
    assert dict(parts).items() >= {"parameters": "14.8", "moments": "29.7"}.items()


def test_run_says_what_its_state_takes(tmp_path: Path) -> None:
    config = {"d_model": 256, "n_layers": 1, "vocab_size": 34000, "max_seq_len": 16, "max_steps": 1}
    done = run_fsdp(tmp_path, config=config, code=0)
    assert len(re.findall(r"gradients take [\d.]+ MiB of .* GiB per rank", done.stdout)) == 1
