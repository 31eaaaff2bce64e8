"""A decoder-only Transformer: the model alone, in plain PyTorch.

By default it is the architecture of Determined's FSDP example: learned positions, LayerNorm, a ReLU
feed-forward network, fused query-key-value. By configuration it is GPT-2 (GELU, tied embeddings,
dropout) or Llama / Mistral (RoPE, RMSNorm, SwiGLU, grouped queries, sliding window).

Reading order: `ModelConfig`, then `Transformer.forward`, then the parts above it. Nothing here knows of
devices, ranks or precision policies; what a trainer needs to know about the structure is said by three
methods: `Transformer.fsdp_units`, `Transformer.init_rule` and `ModelConfig.flops_per_token`.

Shapes: B batch, T positions of this call, S positions attended to (cached ones included), D d_model,
H query heads, G key-value heads, K head size, F d_ff, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

IGNORE_INDEX = -100
"""Target value of a position that does not count in the loss."""
LARGEST = 10**14
"""Most parameters of a model, and most activations of one layer for one sequence: far below what 64 bits can count."""


class RopeScaling(BaseModel):
    """Llama 3's stretching of the rotary frequencies to contexts longer than the pre-training one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    factor: float = Field(gt=0, description="stretch of the slow frequencies (a ratio)")
    low_freq_factor: float = Field(gt=0, description="wavelengths above the original context / this are stretched")
    high_freq_factor: float = Field(gt=0, description="wavelengths below the original context / this stay")
    original_max_position_embeddings: int = Field(gt=0, description="the pre-training context (tokens)")

    @model_validator(mode="after")
    def _factors_in_order(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} is not above low_freq_factor {self.low_freq_factor:g}"
            )
        return self


def _gpt2(d_model: int, n_layers: int, n_heads: int) -> dict[str, Any]:
    return {
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "vocab_size": 50257,
        "max_seq_len": 1024,
        "ffn": "gelu",
        "bias": "all",
        "tie_embeddings": True,
    }


def _llama(d_model: int, n_layers: int, n_heads: int, **changes: Any) -> dict[str, Any]:
    shape = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "vocab_size": 32000, "max_seq_len": 4096}
    style = {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none"}
    return shape | style | changes


_LLAMA3 = {"n_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 8192, "rope_theta": 500000.0}
_LLAMA32 = _LLAMA3 | {
    "d_ff": 8192,
    "tie_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama2-7b": _llama(4096, 32, 32),
    "llama2-13b": _llama(5120, 40, 40),
    "llama2-70b": _llama(8192, 80, 64, n_kv_heads=8, d_ff=28672),
    "llama3-8b": _llama(4096, 32, 32, d_ff=14336, **_LLAMA3),
    "llama3-70b": _llama(8192, 80, 64, d_ff=28672, **_LLAMA3),
    "llama3.2-1b": _llama(2048, 16, 32, **_LLAMA32),
    "llama3.2-3b": _llama(3072, 28, 24, **_LLAMA32),
    "codellama-7b": _llama(4096, 32, 32, vocab_size=32016, max_seq_len=16384, rope_theta=1000000.0),
    "mistral-7b": _llama(4096, 32, 32, n_kv_heads=8, d_ff=14336, max_seq_len=32768, sliding_window=4096),
}


class ModelConfig(BaseModel):
    """The structure of the model. `model` names a preset whose keys fill in for those left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(None, description="preset that supplies the keys below that are not given")
    d_model: int = Field(512, gt=0, description="width of the residual stream")
    n_heads: int = Field(8, gt=0, description="query heads per layer; divides d_model")
    n_layers: int = Field(4, gt=0, description="Transformer blocks")
    vocab_size: int = Field(32000, gt=1, description="token ids, 0 to vocab_size - 1")
    max_seq_len: int = Field(2048, gt=0, description="longest sequence, and the length trained on (tokens)")
    n_kv_heads: int | None = Field(None, gt=0, description="key-value heads; divides n_heads; null = n_heads")
    d_ff: int | None = Field(
        None, gt=0, description="inner width of the feed-forward network; null = 4 d_model, or Llama's rule for swiglu"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="normalisation before each sublayer")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in each norm")
    positions: Literal["learned", "rope"] = Field("learned", description="learned table, or rotary embedding")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary wavelengths")
    rope_scaling: RopeScaling | None = Field(None, description="Llama 3's frequency stretching, a mapping")
    ffn: Literal["relu", "gelu", "swiglu"] = Field(
        "relu", description="feed-forward network; gelu is GPT-2's tanh form"
    )
    bias: Literal["ffn", "none", "all"] = Field(
        "ffn", description="which linear layers add a bias (the head never does)"
    )
    tie_embeddings: bool = Field(False, description="use the token embedding as the output matrix")
    sliding_window: int | None = Field(None, gt=0, description="attend to this many latest positions (tokens)")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropping an activation in training")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("model"), str):
            return values  # none, or refused as no text
        if values["model"] not in PRESETS:
            raise ValueError(f"model: no preset {values['model']!r}; there are {', '.join(PRESETS)}")
        return PRESETS[values["model"]] | values

    @model_validator(mode="after")
    def _fit_together(self) -> ModelConfig:
        problems = []
        if self.d_model % self.n_heads:
            fits = [n for n in range(1, min(self.d_model, 1024) + 1) if self.d_model % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - self.n_heads))[:4])
            problems.append(f"n_heads: {self.n_heads} does not divide d_model {self.d_model}; nearest: {near}")
        elif self.positions == "rope" and self.head_dim % 2:
            problems.append(f"n_heads: rope needs an even head size, d_model / n_heads is {self.head_dim}")
        if self.n_heads % self.kv_heads:
            fits = [n for n in range(1, min(self.n_heads, 1024) + 1) if self.n_heads % n == 0]
            problems.append(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}; choose from {fits}")
        if self.rope_scaling and self.positions != "rope":
            problems.append("rope_scaling: needs positions: rope")
        if max(self.n_parameters, self.max_seq_len * self.d_model) > LARGEST:
            problems.append(
                f"d_model: {self.d_model}, with {self.n_layers} layers, {self.vocab_size} tokens and sequences of"
                f" {self.max_seq_len}, makes {self.n_parameters:.1e} parameters; {LARGEST:.0e} can be counted with"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ffn_width(self) -> int:
        """Inner width: `d_ff`, else 4 d_model, else two thirds of that rounded up to 256 (Llama, swiglu)."""
        if self.d_ff:
            return self.d_ff
        return 256 * math.ceil(8 * self.d_model / 3 / 256) if self.ffn == "swiglu" else 4 * self.d_model

    def can_use_flex(self, device: torch.device, training: bool) -> bool:
        """Whether FlexAttention attends under a mask; it supports neither dropout nor heads below 16."""
        return device.type == "cuda" and self.head_dim >= 16 and not (training and self.dropout)

    def needs_kv_repeat(self, device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
        """Whether a fused kernel needs every key-value head repeated for its group of queries: on CUDA, FlashAttention
        alone takes groups, and it takes neither masks nor float32 nor GPUs before Ampere."""
        if device.type != "cuda" or self.kv_heads == self.n_heads:
            return False
        return masked or dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0)

    def structure(self) -> dict[str, Any]:
        """What weights mean something in: every key spelled out, but for `dropout`, the preset's name, and the longest
        sequence where positions are rotary."""
        left_out = {"model", "dropout"} | ({"max_seq_len"} if self.positions == "rope" else set())
        return self.model_dump(mode="json", exclude=left_out) | {"d_ff": self.ffn_width, "n_kv_heads": self.kv_heads}

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters by part: `embedding`, `positions`, `blocks`, `norm`, `head` (0 if tied)."""
        d, f, kv = self.d_model, self.ffn_width, self.kv_heads * self.head_dim
        norm = d if self.norm == "rmsnorm" or self.bias == "none" else 2 * d
        attention = d * (d + 2 * kv) + d * d
        feed_forward = (3 if self.ffn == "swiglu" else 2) * d * f
        if self.bias == "all":
            attention += (d + 2 * kv) + d
        if self.bias != "none":
            feed_forward += (2 * f if self.ffn == "swiglu" else f) + d
        return {
            "embedding": self.vocab_size * d,
            "positions": self.max_seq_len * d if self.positions == "learned" else 0,
            "blocks": self.n_layers * (attention + feed_forward + 2 * norm),
            "norm": norm,
            "head": 0 if self.tie_embeddings else self.vocab_size * d,
        }

    @property
    def n_parameters(self) -> int:
        return sum(self.parameter_counts().values())

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """FLOPs of one forward and backward pass per token, at sequences of `seq_len` tokens.

        Six per weight of a matrix product (two forward, four backward; the head counts, looking up an
        embedding does not) plus attention's two products over S positions, 12 S H K a layer. Causal
        attention reads half of the S positions on average, and with a sliding window never more than it.
        Recomputation is not counted. Source: Chowdhery et al., PaLM, appendix B.
        """
        d, kv = self.d_model, self.kv_heads * self.head_dim
        weights = self.n_layers * (d * (2 * d + 2 * kv) + (3 if self.ffn == "swiglu" else 2) * d * self.ffn_width)
        weights += self.vocab_size * d
        attended = float(seq_len)
        if causal:
            w = min(self.sliding_window or seq_len, seq_len)
            attended = w - (w * w) / (2 * seq_len)
        return 6 * weights + 12 * self.n_layers * d * attended


class KVCache:
    """Keys and values of the positions seen so far, for generation: per layer `(B, G, capacity, K)`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k` and `v` `(B, G, T, K)` to `layer`; return all `(B, G, length + T, K)`.

        `length` itself moves on once all layers are done (`Transformer.forward`).
        """
        if layer == len(self.layers):
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.layers.append((k.new_empty(shape), v.new_empty(shape)))
        end = self.length + k.shape[2]
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class AttentionInputs(NamedTuple):
    """What attention has to know about where tokens stand; the same for every layer."""

    rope: tuple[Tensor, Tensor] | None  # cos and sin, (T, K/2) or (B, 1, T, K/2) float32
    mask: Tensor | BlockMask | None  # (T, S) or (B, 1, T, T), true where a query may look; None = all of S, or causal
    causal: bool
    repeat_kv: bool = False  # as `ModelConfig.repeats_heads` says


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Rotary angles per position step, `(K/2,)` float32 in radians.

    Su et al., RoFormer (2021), equation 15; the scaling as published with Llama 3.1: wavelengths longer
    than the original context / low_freq_factor are divided by `factor`, those shorter than the original
    context / high_freq_factor stay, and in between the two are blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) of `x` `(B, heads, T, K)` by its position's angle, in float32."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias != "none")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled once: FlexAttention's functions otherwise hold a value for every pair of positions."""
    return torch.compile(function)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., 2023), on PyTorch's fused kernels."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.qkv = nn.Linear(d, d + 2 * kv, bias=config.bias == "all")
        self.output = nn.Linear(d, d, bias=config.bias == "all")

    def forward(self, x: Tensor, positions: AttentionInputs, cache: KVCache | None) -> Tensor:  # (B, T, D) -> (B, T, D)
        c = self.config
        batch, length, _ = x.shape
        kv = c.kv_heads * c.head_dim
        q, k, v = self.qkv(x).split([c.d_model, kv, kv], dim=-1)
        q = q.view(batch, length, c.n_heads, c.head_dim).transpose(1, 2)  # B H T K
        k = k.view(batch, length, c.kv_heads, c.head_dim).transpose(1, 2)  # B G T K
        v = v.view(batch, length, c.kv_heads, c.head_dim).transpose(1, 2)
        if positions.rope is not None:
            q, k = rotate(q, positions.rope), rotate(k, positions.rope)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        grouped = c.kv_heads != c.n_heads
        if isinstance(positions.mask, BlockMask):
            in_graph = torch.compiler.is_compiling() or not x.is_cuda
            attend = flex_attention if in_graph else compiled(flex_attention)
            y = attend(q, k, v, block_mask=positions.mask, enable_gqa=grouped)
        else:
            if positions.repeat_kv:
                k, v = (heads.repeat_interleave(c.n_heads // c.kv_heads, dim=1) for heads in (k, v))
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=positions.mask,
                is_causal=positions.causal,
                dropout_p=c.dropout if self.training else 0.0,
                enable_gqa=grouped and not positions.repeat_kv,
            )
        return self.output(y.transpose(1, 2).reshape(batch, length, c.d_model))


class FeedForward(nn.Module):
    """Two layers around ReLU or GELU, or SwiGLU's gated pair (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.ffn
        bias = config.bias != "none"
        gated = 2 if config.ffn == "swiglu" else 1
        self.up = nn.Linear(config.d_model, gated * config.ffn_width, bias=bias)  # swiglu: gate, then up
        self.down = nn.Linear(config.ffn_width, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        x = self.up(x)
        if self.kind == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.relu(x) if self.kind == "relu" else F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    """Attention, then the feed-forward network, each normalised before and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.ffn_norm = make_norm(config)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, positions: AttentionInputs, cache: KVCache | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), positions, cache)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.ffn(self.ffn_norm(x)), self.dropout, self.training)


class Embedding(nn.Module):
    """Token vectors, plus position vectors when positions are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_seq_len, config.d_model) if learned else None

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:  # (B, T), (T,) or (B, T) -> (B, T, D)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        return F.dropout(x, self.dropout, self.training)


LOSS_CHUNK = {"cpu": 2**24, "cuda": 2**29}
"""Most logits that are there at once, by device: on a CPU they stay in its cache, a GPU needs large products."""


ChunkCrossEntropy = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def chunk_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, learning: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of -log p(target) of the logits `x @ weight.T` (nats, float32), and its gradients for `x` and `weight`.

    Args:
        x, weight, targets: `(N, D)`, `(V, D)`, `(N,)`.
        learning: false: nobody wants gradients, and what stands for them is empty.
    """
    logits = F.linear(x, weight).float()
    counts = targets != IGNORE_INDEX
    target = torch.where(counts, targets, 0)[:, None]
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    loss_sum = torch.where(counts, (log_sum - logits.gather(-1, target)).squeeze(-1), 0).sum()
    if not learning:
        return loss_sum, x.new_empty(0), x.new_empty(0)
    hit = torch.arange(len(weight), device=x.device) == target
    grad = torch.where(counts[:, None], (logits - log_sum).exp() - hit.float(), 0).to(x.dtype)
    return loss_sum, grad @ weight, grad.T @ x


def even_chunks(rows: int, most: int) -> int:
    """How many rows to take at a time, `most` or fewer, and where that is near by equally many each time."""
    least = math.ceil(rows / most)
    count = next((count for count in range(least, 2 * least) if rows % count == 0), least)
    return math.ceil(rows / count)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target) of the logits `x @ weight.T`, which are there for a chunk of rows at a time.

    The result is a number, so the gradients of a chunk follow while its logits are there; backward scales them with
    what the number's own gradient is. Source: Hsu et al., Liger Kernel (2024), section 3.2.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, learning: bool, chunk: ChunkCrossEntropy
    ) -> Tensor:
        """`x` `(N, D)`, `weight` `(V, D)`, `targets` `(N,)`; `rows` of N at a time; `learning`: backward will follow.

        Returns nats, a float32 scalar.
        """
        loss_sum, x_grad, weight_grad = torch.zeros((), device=x.device), [], None
        for part, wanted in zip(x.split(rows), targets.split(rows), strict=True):
            term, part_grad, weight_term = chunk(part, weight, wanted, learning)
            loss_sum += term
            x_grad.append(part_grad)
            if weight_grad is None:
                weight_grad = weight_term if rows >= len(x) else weight_term.float()
            else:
                weight_grad += weight_term
        if learning:
            ctx.save_for_backward(torch.cat(x_grad), weight_grad)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, (weight_grad * grad).to(x_grad.dtype), None, None, None, None


class Head(nn.Module):
    """Final norm and output matrix; with targets, the loss, so that the logits never leave this module.

    The output matrix is the module's own, or handed in when it is tied to the token embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.output = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.chunk_cross_entropy: ChunkCrossEntropy = chunk_cross_entropy
        """to be replaced by what it is compiled to"""

    def forward(self, x: Tensor, targets: Tensor | None, tied: Tensor | None) -> Tensor:
        weight = tied if self.output is None else self.output.weight
        assert weight is not None
        x = self.norm(x)
        if targets is None:
            return F.linear(x, weight)
        x, targets = x.flatten(0, 1), targets.flatten()
        # float16's gradients would leave its range before the loss scale reaches them.
        if (x.is_cuda or self.chunk_cross_entropy is not chunk_cross_entropy) and x.dtype != torch.float16:
            rows = even_chunks(len(x), max(1, LOSS_CHUNK["cuda" if x.is_cuda else "cpu"] // len(weight)))
            learning = torch.is_grad_enabled()
            return cast(Tensor, LinearCrossEntropy.apply(x, weight, targets, rows, learning, self.chunk_cross_entropy))
        logits = F.linear(x, weight).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


class Transformer(nn.Module):
    """The language model.

    Raises:
        ValueError: from `forward`, where the tokens (with those cached) are longer than `max_seq_len`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.head = Head(config)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Score `tokens` `(B, T)` of ids.

        Args:
            documents: `(B, T)`, numbers that change where a document of its own begins: positions start anew
                there, and attention stays inside each. None = a row is one document.

        Returns one of:
            with `targets` `(B, T)`: the sum of -log p(target) in nats over all targets that are not
                `IGNORE`, a float32 scalar (a sum, so that ranks and micro-steps can be averaged exactly);
            with `cache`: the logits that follow the last token, `(B, V)`; the cache grows by T;
            else: all logits, `(B, T, V)`.
        """
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        if end > self.config.max_seq_len:
            raise ValueError(f"{end} tokens are more than max_seq_len {self.config.max_seq_len}")
        position_ids = torch.arange(start, end, device=tokens.device)
        use_flex = cache is None and self.config.can_use_flex(tokens.device, self.training)
        if document_ids is None and use_flex and end > (self.config.sliding_window or end):
            document_ids = torch.zeros_like(tokens)  # one a row, of which a query sees the latest positions
        if document_ids is not None:
            positions, position_ids = self._positions_inside(document_ids, position_ids, use_flex)
        else:
            positions = self._positions(position_ids, end)
        x = self.embedding(tokens, position_ids)  # B T D
        repeats = self.config.needs_kv_repeat(x.device, x.dtype, positions.mask is not None)
        positions = positions._replace(repeat_kv=repeats)
        for block in self.blocks:
            x = block(x, positions, cache)
        if cache is not None:
            cache.length = end
            x = x[:, -1]  # B D
        return self.head(x, targets, self.embedding.tokens.weight if self.config.tie_embeddings else None)

    def _positions(self, position_ids: Tensor, end: int) -> AttentionInputs:
        c = self.config
        rope = self._rope(position_ids)
        if c.sliding_window is not None and end > c.sliding_window:
            distance = position_ids[:, None] - torch.arange(end, device=position_ids.device)  # T S
            return AttentionInputs(rope, (distance >= 0) & (distance < c.sliding_window), causal=False)
        if len(position_ids) not in (1, end):  # a chunk behind cached positions: causal, but not a square
            return AttentionInputs(
                rope, position_ids[:, None] >= torch.arange(end, device=position_ids.device), causal=False
            )
        return AttentionInputs(rope, None, causal=len(position_ids) > 1)

    def _positions_inside(self, document_ids: Tensor, row: Tensor, use_flex: bool) -> tuple[AttentionInputs, Tensor]:
        """As `_positions`, for rows of several documents; also each token's place in its document, `(B, T)`.

        Args:
            row: `(T,)`, 0 to T - 1.
            in_blocks: for FlexAttention, which skips what is masked, rather than a mask of every pair.
        """
        begins = torch.ones_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        begin = torch.where(begins, row, 0).cummax(dim=1).values  # B T: where in the row the document began
        oldest = begin  # that a query sees
        if self.config.sliding_window is not None:
            oldest = torch.maximum(begin, row - self.config.sliding_window + 1)

        def mask_mod(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= oldest[b, query])

        rope = self._rope(row - begin)
        if use_flex:
            make = compiled(create_block_mask) if row.is_cuda else create_block_mask
            mask = make(mask_mod, len(document_ids), None, len(row), len(row), device=row.device)
            return AttentionInputs(rope, mask, causal=False), row - begin
        b = torch.arange(len(document_ids), device=row.device)[:, None, None, None]
        mask = mask_mod(b, b, row[:, None], row)  # B 1 T T
        return AttentionInputs(rope, mask, causal=False), row - begin

    def _rope(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:  # (T,) or (B, T)
        if self.config.positions != "rope":
            return None
        angles = position_ids.float()[..., None] * rope_frequencies(self.config, position_ids.device)
        if position_ids.dim() == 2:
            angles = angles[:, None]  # every head's
        return angles.cos(), angles.sin()

    def fsdp_units(self) -> list[nn.Module]:
        """Modules to shard one by one, in the order of the forward pass; the rest goes to the root.

        A tied output matrix is used at both ends of the pass, so embedding and head stay with the root.
        """
        if self.config.tie_embeddings:
            return list(self.blocks)
        return [self.embedding, *self.blocks, self.head]

    def init_rule(self, name: str) -> tuple[Literal["constant", "normal"], float]:
        """How the parameter `name` starts: a constant, or a normal distribution of that deviation.

        Matrices have deviation 0.02, and those that write to the residual stream 0.02 / sqrt(2 n_layers),
        so that its variance does not grow with depth (GPT-2 and Llama). The FSDP example's model, which has
        learned positions and an output matrix of its own, starts with the variances of PyTorch's modules, as
        it did there.
        """
        c = self.config
        *_, module, parameter = name.split(".")
        if parameter == "bias":
            return "constant", 0.0
        if module.endswith("norm"):
            return "constant", 1.0
        to_stream = name.endswith(("attention.output.weight", "ffn.down.weight"))
        if c.positions == "learned" and not c.tie_embeddings:
            if module == "positions":
                return "constant", 0.0
            inputs = c.ffn_width if name.endswith("ffn.down.weight") else c.d_model
            return "normal", 1.0 if module == "tokens" else 1 / math.sqrt(3 * inputs)
        return "normal", 0.02 / math.sqrt(2 * c.n_layers) if to_stream else 0.02
