"""Mixtures of experts train as a loop over tokens does, on any ranks, and are exported exactly."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lm.config.reading import load_hyperparameters, read_hyperparameters
from lm.errors import ConfigError
from lm.fileio import REPOSITORY
from lm.grouped_mm import grouped_mm
from lm.hf.base import load_trained_model
from lm.hf.config_json import describe_no_family, find_family
from lm.hf.export import export_model
from lm.hf.files import read_object
from lm.hf.weights import examined_config
from lm.runtime.world import World
from lm.training import parallelize
from lm.training.balance import ExpertBalance
from lm.training.muon import orthogonalize
from lm.training.optim import Optimizer
from model import (
    IGNORE_INDEX,
    ExpertLinear,
    Experts,
    ModelConfig,
    Routed,
    RoutedLoss,
    RouterInputs,
    Transformer,
)
from tests.support.hyperparameters import LLAMA_STYLE, TINY
from tests.support.parallelism import EQUIVALENT_OPTIONS, PARITY_RUN, sharding_of, train_each
from tests.support.ranks import in_world, run_ranks
from tests.support.runs import (
    checkpoints_by_step,
    read_exact_metrics,
    read_reports,
    run_fsdp,
    train_in_world,
)
from tests.support.step_counts import OperatorCounts

pytestmark = pytest.mark.usefixtures("shared_cache")

MIXTURE = LLAMA_STYLE | {"n_experts": 5, "experts_per_token": 2, "d_ff": 24}


def new_config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(TINY | MIXTURE | changes)


def new_mixture(**changes: Any) -> Transformer:
    """A mixture whose routers have scores that differ as much as trained ones."""
    model = Transformer(new_config(**changes))
    parallelize.initialize_parameters(model, seed=7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.mul_(50)
    return model


def random_tokens(seed: int = 0, n_rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], (n_rows, TINY["max_seq_len"] + 1), generator=generator)


# ---- the operator


def loop(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """What `grouped_mm` computes."""
    groups = list(zip([0, *ends.tolist()], ends.tolist(), strict=False))
    if b.dim() == 3:
        return torch.cat([a[start:end] @ b[i] for i, (start, end) in enumerate(groups)])
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("inner", "out"), [(16, 24), (10, 6), (16, 6)])
def test_grouped_mm_equals_a_loop(dtype: str, inner: int, out: int) -> None:
    """Also where PyTorch's has no kernel, and with groups without rows."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "requires_grad": True}
    ends = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    a = torch.randn(20, inner, generator=generator).to(options["dtype"]).requires_grad_()
    w = torch.randn(4, out, inner, generator=generator).to(options["dtype"]).requires_grad_()
    rtol = 1e-5 if options["dtype"].itemsize > 2 else 1e-2
    found = grouped_mm(a, w.mT, ends)
    expected = loop(a, w.mT, ends)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    gradients = torch.autograd.grad(found.sum(), (a, w))  # of which the first one is expanded
    expected_gradients = torch.autograd.grad(expected.sum(), (a, w))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=rtol)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(grouped_mm, (a, w.mT, ends), test_utils=tests)
    torch.library.opcheck(grouped_mm, (a.mT, loop(a, w.mT, ends), ends), test_utils=tests)


# ---- the layer


def shared_experts(layer: Experts) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The matrices of each of them, which `layer` computes as one network."""
    n, shared = layer.config.n_shared_experts, layer.shared
    if n is None or shared is None:
        return []
    gates, ups = (each.weight.chunk(n) for each in (shared.gate_proj, shared.up_proj))
    return list(zip(gates, ups, shared.down_proj.weight.chunk(n, dim=1), strict=True))


def feed_each_token(layer: Experts, x: Tensor, bias: Tensor | None) -> Tensor:
    """The output of `layer` for `x` `(B, T, D)`, a token at a time."""
    c = layer.config
    logits = F.linear(x.float(), layer.router.weight.float())
    scores = logits.softmax(-1) if c.router == "softmax" else logits.sigmoid()
    outputs: list[Tensor] = []
    for token, its_scores in zip(x.flatten(0, 1), scores.flatten(0, 1), strict=True):
        preferred = its_scores if bias is None else its_scores + bias
        chosen = preferred.argsort(descending=True)[: c.experts_per_token].tolist()
        total = sum(its_scores[e] for e in chosen) if c.norm_topk_prob else 1
        output = torch.zeros_like(token)
        for e in chosen:
            gate = layer.gate_proj.weight[e] @ token
            up = layer.up_proj.weight[e] @ token
            expert_output = layer.down_proj.weight[e] @ (F.silu(gate) * up)
            output = output + its_scores[e] / total * expert_output
        for gate, up, down in shared_experts(layer):
            output = output + down @ (F.silu(gate @ token) * (up @ token))
        outputs.append(output)
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("has_bias", "n_shared"), [(True, 2), (False, 1), (False, None)])
def test_layer_equals_a_loop_over_tokens(
    router: str, norm_topk_prob: bool, has_bias: bool, n_shared: int | None
) -> None:
    torch.manual_seed(0)
    options = {"router": router, "norm_topk_prob": norm_topk_prob, "n_shared_experts": n_shared}
    layer = Experts(new_config(**options)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 9, TINY["d_model"], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5) if has_bias else None
    found, routed = layer(x, RouterInputs(bias, None, None))
    assert routed is None
    expected = feed_each_token(layer, x, bias)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    inputs = (x, *layer.parameters())
    weights = torch.randn_like(x)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_balance_loss_is_that_of_each_document(router: str) -> None:
    """Equations 17 to 20 of DeepSeek-V3, over the tokens that have targets."""
    torch.manual_seed(0)
    c = new_config(router=router, router_balance_rate=0.3)
    layer = Experts(c)
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(3, 9, TINY["d_model"])
    is_counted = torch.ones(3, 9, dtype=torch.bool)
    is_counted[1, 4:] = False
    is_counted[2] = False
    starts = [0, 5, 9, 18]  # the first row is of two documents
    lengths = torch.tensor([5, 4, 9, 9])
    documents = torch.repeat_interleave(torch.tensor(starts), lengths).view(3, 9)
    _, routed = layer(x, RouterInputs(None, is_counted.flatten(), documents))
    assert routed is not None

    expected = torch.zeros(())
    counts = torch.zeros(5, dtype=torch.int64)
    for start, n_tokens in zip(starts, [5, 4, 4, 0], strict=True):
        logits = layer.router(x.flatten(0, 1)[start : start + n_tokens])
        scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
        chosen = scores.topk(2).indices
        counts += chosen.flatten().bincount(minlength=5)
        parts = scores / scores.sum(-1, keepdim=True)
        for e in range(5 if n_tokens else 0):
            f = 5 / (2 * n_tokens) * (chosen == e).sum()
            expected = expected + n_tokens * 0.3 * f * parts[:, e].mean()
    torch.testing.assert_close(routed.balance_loss, expected)
    assert torch.equal(routed.counts, counts)


def test_packed_documents_train_as_separate_ones() -> None:
    """The loss, its balance and their gradients."""
    rows = random_tokens()
    lengths = (6, 8, 2)
    documents = [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]
    packed = torch.cat([document[:-1] for document in documents])[None]
    targets = torch.cat([document[1:] for document in documents])[None]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    model = new_mixture(router_balance_rate=0.3)
    separate = [model(each[None, :-1], each[None, 1:]) for each in documents]
    output = model(packed, targets, ids)
    parameters = list(model.parameters())
    for part in ("loss_sum", "routed.balance_loss"):
        of = attrgetter(part)
        expected = torch.stack([of(each) for each in separate]).sum()
        torch.testing.assert_close(of(output), expected)
        gradients = torch.autograd.grad(
            of(output), parameters, retain_graph=True, materialize_grads=True
        )
        right = torch.autograd.grad(expected, parameters, retain_graph=True, materialize_grads=True)
        for gradient, expected_gradient in zip(gradients, right, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    counts = torch.stack([each.routed.counts for each in separate])
    assert torch.equal(output.routed.counts, counts.sum(0))


def test_only_training_counts() -> None:
    model = new_mixture()
    tokens = random_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = IGNORE_INDEX
    trained = model(inputs, targets)
    assert isinstance(trained, RoutedLoss)
    n_targets = targets.numel() - 5
    assert trained.routed.counts.sum(1).tolist() == [2 * n_targets] * 2
    validated = model.eval()(inputs, targets)
    assert torch.equal(validated, trained.loss_sum)


# ---- recomputation, compilation, generation


def gradients_of(model: Transformer) -> tuple[RoutedLoss, dict[str, Tensor]]:
    tokens = random_tokens()
    output = model(tokens[:, :-1], tokens[:, 1:])
    (output.loss_sum + output.routed.balance_loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output, gradients


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_routes_once(mode: Any) -> None:
    expected, expected_gradients = gradients_of(new_mixture())
    model = new_mixture()
    parallelize.apply_activation_checkpointing(model, mode)
    with OperatorCounts() as operators:
        output, gradients = gradients_of(model)
    assert torch.equal(output.routed.counts, expected.routed.counts)
    assert operators.calls[torch.ops.aten.topk.default] == model.config.n_layers
    assert operators.calls[torch.ops.aten.silu.default] == 2 * model.config.n_layers
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mode"), [("float32", "full"), ("bfloat16", "none")])
@pytest.mark.filterwarnings("ignore")  # of the compiler, which meets its own
def test_compiled_blocks_have_one_graph(dtype: str, mode: Any) -> None:
    """Traced, without the code of PyTorch's compiler, which test_parity.py runs."""
    model = new_mixture(router_balance="bias").to(getattr(torch, dtype))
    eager = new_mixture(router_balance="bias").to(getattr(torch, dtype))
    if mode == "full":
        parallelize.apply_activation_checkpointing(model, mode)
    torch._dynamo.reset()
    backend = "aot_eager_decomp_partition"
    compile_graph = partial(torch.compile, fullgraph=True, backend=backend)
    parallelize.compile_blocks(model, compile_graph)
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    for seed in range(3):
        tokens = random_tokens(seed)
        stance = "default" if seed == 0 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            output = model(tokens[:, :-1], tokens[:, 1:])
            output.loss_sum.backward()
        expected = eager(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(output.loss_sum, expected.loss_sum, rtol=tolerance, atol=0)
        assert model.router_bias is not None
        model.router_bias += 0.1 * torch.randn_like(model.router_bias)  # other routes
        assert eager.router_bias is not None
        eager.router_bias.copy_(model.router_bias)


def test_cached_generation_equals_the_full_forward_pass() -> None:
    model = new_mixture().eval()
    tokens = random_tokens(n_rows=2)[:, : TINY["max_seq_len"]]
    full = model(tokens)
    cache = model.new_cache(TINY["max_seq_len"])
    found = [model(tokens[:, :7], cache=cache)]
    found += [model(tokens[:, i : i + 1], cache=cache) for i in range(7, tokens.shape[1])]
    torch.testing.assert_close(torch.stack(found, dim=1), full[:, 6:], rtol=1e-4, atol=1e-5)


# ---- sizes


def test_flops_are_those_of_the_experts_of_a_token() -> None:
    c = new_config(router_balance="none", n_shared_experts=2)
    model = Transformer(c).eval()  # in training, the products that count tokens are counted, too
    parallelize.initialize_parameters(model, seed=7)
    tokens = random_tokens()[:, :-1]
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(tokens, tokens).backward()
    not_causal = 6 * c.n_layers * c.n_heads * c.head_width * tokens.shape[1]
    expected = c.flops_per_token(tokens.shape[1]) + not_causal
    assert counter.get_total_flops() == expected * tokens.numel()


def test_active_parameters_are_those_of_the_experts_of_a_token() -> None:
    c = new_config(n_shared_experts=2)
    assert c.n_parameters == sum(p.numel() for p in Transformer(c).parameters())
    as_dense = new_config(n_experts=2, n_shared_experts=2)
    n_router_rows = c.n_layers * (5 - 2) * c.d_model
    assert c.n_active_parameters == as_dense.n_parameters + n_router_rows
    assert as_dense.n_active_parameters == as_dense.n_parameters


# ---- runs

BALANCED = (
    PARITY_RUN | MIXTURE | {"n_experts": 3, "n_shared_experts": 1, "router_balance_rate": 0.1}
)
WHOLE = {"full-shard": EQUIVALENT_OPTIONS["full-shard"]}
GROUPS = {"groups": sharding_of("hybrid-full-shard", 4) | {"batch_size": 1}}
RUNS: dict[str, dict[int, dict[str, dict[str, Any]]]] = {
    "adamw": {
        1: WHOLE,
        2: {name: EQUIVALENT_OPTIONS[name] for name in ("no-shard", "1x4", "recompute", "offload")},
        4: WHOLE | GROUPS,
    },
    "muon": {1: WHOLE, 4: WHOLE | GROUPS},
}
"""by the optimizer, which shards change for Muon, and by ranks"""


def test_muon_orthogonalizes_the_matrices_of_each_expert() -> None:
    model = new_mixture()
    settings = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.0}
    hp = read_hyperparameters({"hyperparameters": TINY | MIXTURE | settings}, [], "test")
    optimizer = Optimizer(hp.optim, model)
    gradients_of(model)
    expected: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            gradient = module.weight.grad
            assert gradient is not None
            updates = torch.stack([orthogonalize(matrix) for matrix in gradient])
            rms = 0.2 * max(gradient.shape[1:]) ** 0.5
            expected[module.weight] = module.weight.detach() - 0.01 * rms * updates
    optimizer.step(0.01, None, torch.zeros(()))
    assert len(expected) == 3 * model.config.n_layers
    for weight, values in expected.items():
        torch.testing.assert_close(weight.detach(), values, rtol=0, atol=1e-5)
    state = optimizer.state_dict()
    assert "blocks.0.ffn.router.weight.exp_avg" in state  # by AdamW


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_balance_is_equal_on_any_ranks_and_micro_batches(optimizer: str, tmp_path: Path) -> None:
    """Also on more ranks than experts."""
    expected: dict[int, dict[str, Any]] = {}
    for n_ranks, runs in RUNS[optimizer].items():
        directory = tmp_path / str(n_ranks)
        directory.mkdir()
        run_ranks(n_ranks, train_each, str(directory), runs, BALANCED | {"optimizer": optimizer})
        for name in runs:
            reports = read_reports(directory, name=name)
            expected = expected or reports
            for step, report in reports.items():
                for key, rel in (("loss", 1e-6), ("grad_norm", 1e-5)):
                    assert report[key] == pytest.approx(expected[step][key], rel=rel), name
                for key in ("busiest_expert_percent", "idle_experts"):
                    assert report[key] == expected[step][key], name


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_bias_moves_up_for_experts_with_fewer_tokens_than_the_mean(skipped: float) -> None:
    model = new_mixture(n_layers=1, router_balance="bias", router_balance_rate=0.01)
    counts = torch.tensor([[2, 4, 6, 4, 4]])

    def move(world: World) -> None:
        balance = ExpertBalance(model, world)
        balance.start_step()
        balance.add(Routed(torch.zeros(()), counts))
        balance.end_step(torch.tensor(skipped))

    in_world(move)
    moved = torch.tensor([[0.01, 0.0, -0.01, 0.0, 0.0]])
    assert model.router_bias is not None
    assert torch.equal(model.router_bias, moved * (1 - skipped))


def read_bias(folder: Path, step: int) -> Tensor:
    """The bias of the routers in a run's checkpoint."""
    for path in checkpoints_by_step(folder)[step].glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            if "router_bias" in tensors.keys():  # noqa: SIM118
                return tensors.get_tensor("router_bias")
    raise AssertionError(folder)


@pytest.mark.slow
def test_bias_is_equal_on_any_ranks_and_after_a_resume(tmp_path: Path) -> None:
    run = BALANCED | {"router_balance": "bias", "router_balance_rate": 0.01, "max_steps": 5}
    for n_ranks in (1, 2):
        run_fsdp(tmp_path / str(n_ranks), ranks=n_ranks, config=run, code=0)
    bias = read_bias(tmp_path / "1", 5)
    assert 0 < bias.abs().max() < 0.051  # 5 steps of 0.01, up or down
    assert torch.equal(read_bias(tmp_path / "2", 5), bias)
    resumed = tmp_path / "resumed"
    run_fsdp(resumed, "max_steps=3", ranks=2, config=run, code=0)
    run_fsdp(resumed, ranks=2, config=run, code=0)
    assert read_exact_metrics(resumed) == read_exact_metrics(tmp_path / "2")
    assert torch.equal(read_bias(resumed, 5), bias)


# ---- exports


EXPORTED: dict[str, dict[str, Any]] = {
    "olmoe": {"qk_norm": "projection", "norm_topk_prob": False},
    "qwen3_moe": {"qk_norm": "head", "norm_topk_prob": True},
    "minimax_m2": {"qk_norm": "projection", "router": "sigmoid", "router_balance": "bias"},
    "dots1": {
        "qk_norm": "head",
        "router": "sigmoid",
        "router_balance": "bias",
        "n_shared_experts": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXPORTED)
def test_export_computes_in_transformers_what_was_trained(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    run = TINY | MIXTURE | {"router_balance_rate": 0.01, "max_steps": 3, "amp_dtype": None}
    run |= EXPORTED[model_type] | {"lr": 0.05, "num_tokens": 0}
    monkeypatch.chdir(tmp_path)
    in_world(partial(train_in_world, hyperparameters=run))
    checkpoint = checkpoints_by_step(tmp_path)[3]
    export_model(checkpoint, tmp_path / "exported")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert network.config.model_type == model_type
    model = load_trained_model(checkpoint, torch.device("cpu")).eval()
    inputs = random_tokens()[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(network(inputs).logits, model(inputs), rtol=1e-5, atol=1e-5)
    raw = read_object(tmp_path / "exported" / "config.json")
    examined = examined_config(raw).examined  # to be fine-tuned
    assert examined.full_recomputation
    assert examined.selective_recomputation
    if run.get("router_balance") == "bias":
        buffers = dict(network.named_buffers())
        biases = [buffers[name] for name in buffers if name.endswith("e_score_correction_bias")]
        assert torch.equal(torch.stack(biases), read_bias(tmp_path, 3))


def test_mixture_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^router_balance: bias .* qwen3_moe;"):
        find_family(new_config(qk_norm="head", router_balance="bias"))


@pytest.mark.slow
def test_start_says_that_a_model_cannot_be_exported(tmp_path: Path) -> None:
    """That of the first command in the page of mixtures can be, but not without its qk_norm."""
    lines = (REPOSITORY / "docs" / "mixtures.md").read_text().splitlines()
    command = next(line for line in lines if line.startswith("python fsdp.py --config "))
    config, *overrides = command.split()[3:]
    hp = load_hyperparameters(REPOSITORY / config, overrides)
    assert describe_no_family(hp.own_model) == []
    (tmp_path / "text.txt").write_text("some words " * 2000)
    settings = hp.to_flat() | {"train_data": "../text.txt", "run_name": None, "qk_norm": "none"}
    started = run_fsdp(tmp_path / "run", "--dry-run", config=settings, code=0)
    assert "will refuse this model: qk_norm: none has no counterpart" in started.stdout


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"experts_per_token": 6}, "experts_per_token"),
        ({"ffn": "gelu"}, "ffn"),
        ({"bias": "all"}, "bias"),
        ({"router_balance": "none", "router_balance_rate": 0.1}, "router_balance_rate"),
        ({"n_experts": None, "experts_per_token": 3}, "experts_per_token"),
        ({"n_experts": None, "n_shared_experts": 1}, "n_shared_experts"),
        ({"float8": "tensorwise"}, "float8"),
        ({"base_width": 16}, "base_width"),
        ({"base_depth": 1}, "base_depth"),
        ({"lora_rank": 4, "init_from": "runs/a"}, "lora_rank"),
        ({"objective": "dpo", "dataset": "jsonl", "init_from": "runs/a"}, "objective"),
    ],
)
def test_bad_combinations_are_refused_in_one_line(changes: dict[str, Any], key: str) -> None:
    values = TINY | MIXTURE | {"train_data": "a.jsonl", "tokenizer": "bytes"} | changes
    if "dataset" not in changes:
        del values["train_data"], values["tokenizer"]
    with pytest.raises(ConfigError) as caught:
        read_hyperparameters({"hyperparameters": values}, [], "test")
    assert [problem for problem in caught.value.problems if f" {key}: " in f" {problem}"]
    assert all("\n" not in problem for problem in caught.value.problems)
