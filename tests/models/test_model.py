"""The model equals the published ones in its counts, and plain references in its arithmetic."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lm.attention import can_compile, make_block_mask, needs_kv_repeat, skips_hidden_keys
from lm.presets import PRESETS
from lm.training import parallelize
from model import (
    IGNORE_INDEX,
    AttentionInputs,
    Block,
    BlockOutput,
    KVCache,
    LinearCrossEntropy,
    ModelConfig,
    TargetScores,
    Transformer,
    chunk_cross_entropy,
)
from tests.support import REPOSITORY

TINY: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 64,
    "max_seq_len": 24,
}
LLAMA: dict[str, Any] = TINY | {
    "norm": "rmsnorm",
    "positions": "rope",
    "ffn": "swiglu",
    "bias": "none",
    "n_kv_heads": 2,
    "d_ff": 48,
}
GPT2: dict[str, Any] = TINY | {"ffn": "gelu", "bias": "all", "tie_embeddings": True}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
STYLES = {
    "default": TINY,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 5},
    "windowed": TINY | {"sliding_window": 5},
    "llama3.2": LLAMA | {"tie_embeddings": True, "rope_scaling": LLAMA3_SCALING},
    "one key-value head": TINY | {"n_kv_heads": 1},
    "qwen2": LLAMA | {"bias": "qkv"},
    "qwen3": LLAMA | {"qk_norm": "head", "head_dim": 12},
    "olmo2": LLAMA | {"qk_norm": "projection", "norm_placement": "post"},
}
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


DOCUMENTS = [7, 1, 5, 11]
"""Lengths of documents that fill a sequence."""


def packed(seed: int = 3) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return documents, a sequence `(1, 24)` that packs them, and its document ids."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(64, (length,), generator=generator) for length in DOCUMENTS]
    numbers = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    return parts, torch.cat(parts)[None], numbers[None]


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def make(settings: dict[str, Any], seed: int = 0, spread: float = 0.3) -> Transformer:
    """Return a model in which every parameter differs from its initial value."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig.model_validate(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * spread)
    return model.eval()


def tokens_of(model: Transformer, batch: int = 2, length: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (batch, length or model.config.max_seq_len)
    return torch.randint(0, model.config.vocab_size, size, generator=generator)


# ---- counts

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "codellama-7b": 6_738_546_688,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "olmo2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"mistral"}))  # without sizes
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = ModelConfig.model_validate({"model": name})
    assert config.n_parameters == PUBLISHED[name]
    assert sum(p.numel() for p in on_meta(config).parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("bias", ["ffn", "none", "qkv", "attention", "all"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "projection"])
def test_number_of_parameters_is_that_of_the_modules(bias: str, norm: str, qk_norm: str) -> None:
    keys = {"bias": bias, "norm": norm, "qk_norm": qk_norm, "d_model": 24, "n_heads": 6}
    for options in (
        {"n_kv_heads": 2, "ffn": "swiglu", "tie_embeddings": True},
        {"n_positions": 4096, "d_ff": 7, "norm_placement": "post"},
        {"positions": "rope", "head_dim": 10, "ffn": "gelu", "n_layers": 3},
    ):
        config = ModelConfig.model_validate(keys | options)
        assert config.n_parameters == sum(p.numel() for p in on_meta(config).parameters())


def test_preset_that_is_unknown_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValidationError, match=r"model: .*'llama9'; the nearest are llama3-8b.* set init_from"
    ):
        ModelConfig.model_validate({"model": "llama9"})


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 24])
@every_style
def test_flops_per_token_are_those_that_pytorch_counts(style: dict[str, Any], length: int) -> None:
    config = ModelConfig.model_validate(style)
    model = on_meta(config)
    tokens = torch.zeros(3, length, dtype=torch.int64, device="meta")
    # On the meta device attention is two plain matrix products forward and four backward. The
    # counter does not know the CPU's fused kernel at all, and would count a fifth product in a GPU
    # kernel's backward: the recomputation of the scores, which is no useful work.
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    full = config.model_copy(update={"sliding_window": None})
    causal = full.flops_per_token(length)
    not_causal = 6 * config.n_layers * config.n_heads * config.head_width * length
    assert counter.get_total_flops() == (causal + not_causal) * tokens.numel()


def test_mfu_factors_of_the_docs_follow_from_both_formulas() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    factors = re.search(
        r"by ([\d.]+) for llama3-8b at\s([\d,]+) tokens, ([\d.]+) at ([\d,]+)", page
    )
    assert factors is not None
    first, first_length, second, second_length = factors.groups()
    config = ModelConfig.model_validate({"model": "llama3-8b"})
    for documented, length in ((first, first_length), (second, second_length)):
        seq_len = int(length.replace(",", ""))
        ours = config.flops_per_token(seq_len)
        keys_after_the_query = 6 * config.n_layers * config.n_heads * config.head_width * seq_len
        torchtitans = ours + keys_after_the_query
        assert float(documented) == pytest.approx(torchtitans / ours, rel=6e-4)


def test_causal_flops_count_attended_positions() -> None:
    length, window = 4096, 100
    config = ModelConfig.model_validate({"model": "llama3.2-1b"})
    assert config.flops_per_token(length) == pytest.approx(8.2e9, rel=0.005)
    per_key = 12 * config.n_layers * config.d_model
    for sliding in (window, 2 * length):
        hidden = sum(max(0, t + 1 - sliding) for t in range(length)) / length
        narrow = config.model_copy(update={"sliding_window": sliding})
        expected = config.flops_per_token(length) - per_key * hidden
        assert narrow.flops_per_token(length) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_seq_len": 9, "n_positions": 8}, "max_seq_len: 9 exceeds n_positions 8"),
        ({"d_model": 32, "n_heads": 5}, r"n_heads: 5 .*\[1, 2, 4, 8\]"),
        ({"n_heads": 8, "n_kv_heads": 3}, r"n_kv_heads: 3 .*\[1, 2, 4, 8\]"),
        (
            {"d_model": 24, "n_heads": 8, "positions": "rope"},
            "n_heads: .*even d_model / n_heads, not 3",
        ),
        ({"head_dim": 7, "positions": "rope"}, "head_dim: .*even head_dim, not 7"),
        (
            {"positions": "rope", "rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}},
            "high_freq_factor 1 ",
        ),
    ],
)
def test_model_config_refuses_an_invalid_structure(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=rf"Value error, {key}"):
        ModelConfig.model_validate(settings)


def test_rope_scaling_is_saved_with_the_keys_that_are_set() -> None:
    settings = {"positions": "rope", "rope_scaling": LLAMA3_SCALING | {"rope_type": "llama3"}}
    config = ModelConfig.model_validate(settings)
    assert config.model_dump()["rope_scaling"] == LLAMA3_SCALING


# ---- architecture; tests/weights/test_families.py compares the other families with transformers


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by its definition on `(B, heads, T, K)`, with mask and softmax written out."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = torch.tril(scores.exp())
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def original_logits(weights: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """Determined's FSDP example: learned positions, LayerNorm, fused QKV, ReLU with biases."""
    w = weights
    d = w["embedding.tokens.weight"].shape[1]
    x = w["embedding.tokens.weight"][tokens] + w["embedding.positions.weight"][: tokens.shape[1]]
    for i in range(layers):
        b = f"blocks.{i}."
        h = F.layer_norm(x, (d,), w[b + "attention_norm.weight"], w[b + "attention_norm.bias"])
        q, k, v = (by_head(h @ w[f"{b}attention.{part}_proj.weight"].T, heads) for part in "qkv")
        x = (
            x
            + plain_attention(q, k, v).transpose(1, 2).flatten(2)
            @ w[b + "attention.o_proj.weight"].T
        )
        h = F.layer_norm(x, (d,), w[b + "ffn_norm.weight"], w[b + "ffn_norm.bias"])
        h = torch.relu(h @ w[b + "ffn.up_proj.weight"].T + w[b + "ffn.up_proj.bias"])
        x = x + h @ w[b + "ffn.down_proj.weight"].T + w[b + "ffn.down_proj.bias"]
    h = F.layer_norm(x, (d,), w["head.norm.weight"], w["head.norm.bias"])
    return h @ w["head.output.weight"].T


def test_default_is_the_original_examples_architecture() -> None:
    model = make(TINY)
    tokens = tokens_of(model)
    torch.testing.assert_close(
        model(tokens), original_logits(model.state_dict(), tokens, 2, 4), rtol=1e-5, atol=1e-5
    )


def test_tie_embeddings_trains_one_parameter_from_both_ends() -> None:
    model = make(GPT2)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head.output")]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens).backward()
    gradient = model.embedding.tokens.weight.grad
    assert gradient is not None
    assert gradient[1:].abs().sum() > 0  # ids that were never an input: through the output matrix


@every_style
def test_attention_is_causal(style: dict[str, Any]) -> None:
    model = make(style)
    tokens = tokens_of(model)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 10], after[:, 10], atol=1e-3)


def test_sliding_window_hides_older_tokens() -> None:
    one_layer = make(LLAMA | {"n_layers": 1, "sliding_window": 5})
    tokens = tokens_of(one_layer)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 64
    differs = (one_layer(tokens) - one_layer(changed)).abs().amax(dim=(0, 2)) > 1e-4
    assert differs.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


# ---- the key-value cache


@pytest.mark.parametrize("pieces", [[10] + [1] * 14, [7, 9, 8], [2, 20, 1, 1]], ids=str)
@every_style
def test_kv_cache_in_pieces_equals_reading_at_once(
    style: dict[str, Any], pieces: list[int]
) -> None:
    model = make(style)
    tokens = tokens_of(model)
    expected = model(tokens)
    cache, read = KVCache(24), 0
    for size in pieces:
        logits = model(tokens[:, read : read + size], cache=cache)
        read += size
        assert cache.length == read
        torch.testing.assert_close(logits, expected[:, read - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cached", [0, 20])
def test_max_seq_len_refuses_more_tokens(cached: int) -> None:
    model = make(TINY)
    cache = KVCache(24) if cached else None
    if cached:
        model(tokens_of(model, length=cached), cache=cache)
    with pytest.raises(ValueError, match=r"max_seq_len: 25 .* 24"):
        model(tokens_of(model, length=25 - cached), cache=cache)


# ---- loss and initial state


@every_style
def test_loss_is_the_sum_in_nats_over_targets(
    style: dict[str, Any],
) -> None:
    model = make(style)
    tokens = tokens_of(model)
    targets = tokens.roll(-1, dims=1)
    targets[0, 3:9] = IGNORE_INDEX
    log_p = model(tokens).log_softmax(dim=-1)
    counted = [(b, t) for b in range(2) for t in range(24) if targets[b, t] != IGNORE_INDEX]
    expected = -torch.stack([log_p[b, t, targets[b, t]] for b, t in counted]).sum()
    torch.testing.assert_close(model(tokens, targets), expected, rtol=1e-5, atol=1e-5)


def test_loss_of_ignored_targets_has_no_gradient() -> None:
    model = make(LLAMA)
    tokens = tokens_of(model)
    loss = model(tokens, torch.full_like(tokens, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, which meets its own
@pytest.mark.parametrize(
    ("size", "compiled"), [(1, False), (3, False), (10, False), (64, False), (3, True)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_loss_in_chunks_equals_the_loss(
    dtype: torch.dtype, tolerance: float, size: int, compiled: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(10, 16, dtype=dtype), torch.randn(50, 16, dtype=dtype)
    targets = torch.randint(50, (10,))
    targets[[2, 7]] = IGNORE_INDEX

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(
            (x @ weight.T).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )

    chunk = chunk_cross_entropy
    if compiled:  # the operators of a graph do not depend on the backend
        chunk = torch.compile(chunk, fullgraph=True, dynamic=False, backend="aot_eager")

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return cast(
            Tensor,
            LinearCrossEntropy.apply(x, weight, targets, size, torch.is_grad_enabled(), chunk),
        )

    results = []
    for loss_of in (plain, chunked):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = loss_of(*inputs)
        (0.3 * loss).backward()
        results.append((loss.detach(), *(value.grad for value in inputs)))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert torch.linalg.vector_norm(found - expected) <= tolerance * torch.linalg.vector_norm(
            expected
        )
    with torch.no_grad():
        assert chunked(x, weight).item() == pytest.approx(results[1][0].item(), rel=1e-5)


def test_loss_in_chunks_never_holds_all_logits() -> None:
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 2 and out.shape[-1] == 1000:
                self.size = max(self.size, len(out))
            return out

    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest() as largest:
        cast(
            Tensor,
            LinearCrossEntropy.apply(
                x, weight, torch.randint(1000, (64,)), 16, True, chunk_cross_entropy
            ),
        ).backward()
        scores = cast(Tensor, TargetScores.apply(x, weight, torch.randint(1000, (64,)), 16))
        scores[0].sum().backward()
    assert largest.size == 16


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [5, 64])
def test_gradients_of_scores_are_those_of_separate_log_probabilities(
    size: int, frozen: bool
) -> None:
    targets = torch.randint(90, (17,))
    factors = torch.randn(17)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.log_softmax(x @ weight.T, dim=-1).gather(-1, targets[:, None]).squeeze(-1)

    def scored(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, TargetScores.apply(x, weight, targets, size))[0]

    x, weight = torch.randn(17, 8), torch.randn(90, 8)
    results = []
    for log_probs_of in (plain, scored):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        log_probs = log_probs_of(*inputs)
        (log_probs * factors).sum().backward()
        results.append((log_probs.detach(), inputs[0].grad, inputs[1].grad))
    torch.testing.assert_close(*results)


def test_dropout_acts_in_training_and_follows_the_seed() -> None:
    model = make(GPT2 | {"dropout": 0.3})
    tokens = tokens_of(model)
    plain = make(GPT2)(tokens)
    assert torch.equal(model(tokens), plain)
    model.train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], plain)


def test_all_that_holds_of_a_class_holds_here_but_adapters_of_experts() -> None:
    found = ModelConfig.examined.model_dump()
    assert {name for name, holds in found.items() if holds is False} == {"experts"}


def initialized(settings: dict[str, Any]) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig.model_validate(settings))
    for name, parameter in model.named_parameters():
        kind, value = model.init_rule(name)
        if kind == "constant":
            nn.init.constant_(parameter, value)
        else:
            nn.init.normal_(parameter, std=value)
    return model


@every_style
def test_init_of_norms_and_biases(style: dict[str, Any]) -> None:
    model = on_meta(ModelConfig.model_validate(style))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            is_bias = name.endswith("bias")
            assert model.init_rule(name) == ("constant", 0.0 if is_bias else 1.0), name


@pytest.mark.parametrize("style", ["gpt2", "llama", "llama3.2", "qwen3", "olmo2"])
def test_init_scales_down_residual_projections(style: str) -> None:
    model = on_meta(ModelConfig.model_validate(STYLES[style]))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            writes = name.endswith(("attention.o_proj.weight", "ffn.down_proj.weight"))
            assert model.init_rule(name) == (
                "normal",
                0.02 / math.sqrt(2 * 2) if writes else 0.02,
            ), name


def test_init_of_the_original_example_is_pytorchs() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig.model_validate(TINY))  # PyTorch has filled it
    for name, parameter in model.named_parameters():
        if name == "embedding.positions.weight":
            assert model.init_rule(name) == ("constant", 0.0)
        elif parameter.ndim == 2:
            assert model.init_rule(name) == (
                "normal",
                pytest.approx(parameter.std().item(), rel=0.05),
            ), name


@every_style
def test_init_gives_the_loss_of_guessing(style: dict[str, Any]) -> None:
    model = initialized(style)
    tokens = tokens_of(model, batch=8)
    loss = model(tokens, tokens.roll(-1, dims=1)).item() / tokens.numel()
    assert math.log(64) - 0.05 < loss < math.log(64) + 0.2


# ---- several documents in a sequence


@every_style
def test_document_ids_separate_packed_documents(style: dict[str, Any]) -> None:
    model = make(style)
    documents, sequence, ids = packed()
    found = model(sequence, document_ids=ids)[0]
    alone = torch.cat([model(document[None])[0] for document in documents])
    assert torch.allclose(found, alone, atol=1e-4, rtol=1e-4)
    both = model(sequence.expand(2, -1), document_ids=torch.cat([ids, torch.zeros_like(ids)]))
    assert torch.allclose(both[0], alone, atol=1e-4, rtol=1e-4)
    assert torch.allclose(both[1], model(sequence)[0], atol=1e-4, rtol=1e-4)


@pytest.fixture
def flex_masks(monkeypatch: pytest.MonkeyPatch) -> list[AttentionInputs]:
    """Force FlexAttention on the CPU, and return the inputs that the first block then receives."""
    received: list[AttentionInputs] = []
    forward = Block.forward

    def record(block: Block, x: Tensor, inputs: AttentionInputs, *others: Any) -> BlockOutput:
        received.append(inputs)
        return forward(block, x, inputs, *others)

    monkeypatch.setattr(Block, "forward", record)
    return received


@pytest.mark.parametrize(
    ("style", "packed_documents"),
    [*((style, True) for style in STYLES), ("mistral", False), ("windowed", False)],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_attention_with_a_mask(
    style: str,
    packed_documents: bool,
    flex_masks: list[AttentionInputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(STYLES[style])
    _, sequence, ids = packed()
    tokens, document_ids = sequence.expand(2, -1), ids.expand(2, -1) if packed_documents else None
    with torch.no_grad():  # FlexAttention has no backward pass on the CPU
        expected = model(tokens, document_ids=document_ids)
        monkeypatch.setattr("model.make_mask", make_block_mask)
        found = model(tokens, document_ids=document_ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not isinstance(flex_masks[0].mask, BlockMask)
    assert isinstance(flex_masks[-1].mask, BlockMask)


def test_kernels_of_a_gpu_get_heads_of_widths_that_they_support() -> None:
    gpu = torch.device("cuda")
    for width, is_supported in ((8, False), (16, True), (256, True), (512, False)):
        assert skips_hidden_keys(gpu, width, dropout=0.0) is is_supported
    assert needs_kv_repeat(gpu, torch.bfloat16, 512, masked=False)


@pytest.mark.slow
@pytest.mark.parametrize("needed", [False, True])
def test_model_that_cannot_be_compiled_computes_without(
    needed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make(LLAMA)
    tokens = tokens_of(model)
    expected = model(tokens, tokens)
    parallelize.compile_model(model, {}, needed=needed)
    no_compiler = {"cpp.cxx": ("/bin/false",), "force_disable_caches": True}
    ends_run = pytest.raises(BackendCompilerFailed) if needed else nullcontext()
    with inductor.patch(no_compiler), ends_run, warnings.catch_warnings(action="ignore"):
        assert model(tokens, tokens) == expected
        assert not can_compile(tokens.device)
    torch.compiler.reset()
    can_compile.cache_clear()
    if not needed:
        assert capfd.readouterr().err.count("cannot compile this model: InvalidCxxCompiler") == 1
