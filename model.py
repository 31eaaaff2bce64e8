"""Decoder-only Transformer in plain PyTorch.

The default is the architecture of Determined's FSDP example: learned positions, LayerNorm and a
ReLU feed-forward network. Other configurations are GPT-2 (GELU, tied embeddings, dropout), Llama,
Mistral and Phi-3 (RoPE, RMSNorm, SwiGLU, grouped-query attention, sliding window), Qwen2 and Qwen3
(biases on query, key and value; norms on query and key), OLMo 2 (norms after the sublayers), GLM-4
(norms on both sides, half of a head rotated), Granite (multipliers), SmolLM3 and OLMo 3 (layers of
two kinds) and Gemma 3 (GEGLU, scaled embeddings, norms and layers as these).

Reading order: `ModelConfig`, then `Transformer.forward` at the end, then what it uses, section by
section: inputs of attention, rotary embedding, masks, layers, head and loss. The module has no
ranks, meshes or precision policies. A trainer reads the structure from `Transformer.fsdp_units`,
`Transformer.init_rule` and `ModelConfig.flops_per_token`.

Shapes: B batch, T sequence length, S keys attended to (cached ones included), D d_model, H query
heads, G key-value heads, K head_width, R rotary_width, F d_ff, V vocab_size.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lm.fields import Config, Fixed, Logged, Varied
from lm.presets import PRESETS

MAX_LAYERS = 2**12
IGNORE_INDEX = -100
"""Target that is excluded from the loss."""


# ---- hyperparameters


_YARN_OPTIONS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ROPE_TYPES = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_OPTIONS),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
"""Types of `rope_scaling` -> the keys that they use."""


class _Mapping(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A hyperparameter that is a mapping, and is saved as one of the keys that are set."""

    @model_serializer(mode="wrap")
    def _omit_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        values = serialize(self)
        return {key: value for key, value in values.items() if value != fields[key].default}


class RopeScaling(_Mapping, frozen=True):
    """Scaling of rotary frequencies, for contexts longer than in pre-training."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn"] = Field(
        "llama3",
        description="linear divides all frequencies by factor, llama3 and yarn the low ones;"
        " dynamic none, and sequences longer than the original context are refused",
    )
    factor: float = Field(gt=0, le=2**24, description="divisor of the low frequencies (a ratio)")
    low_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths above the original context / this are scaled"
    )
    high_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths below the original context / this are kept"
    )
    original_max_position_embeddings: int | None = Field(
        None, gt=0, le=2**24, description="context length in pre-training (tokens); not for linear"
    )
    beta_fast: float | None = Field(
        None,
        ge=0.001,
        le=2**24,
        description="yarn: keep what turns more often in the original context; null = 32",
    )
    beta_slow: float | None = Field(
        None, ge=0.001, le=2**24, description="yarn: scale what turns less often in it; null = 1"
    )
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: factor of queries and keys; null = by factor and mscale"
    )
    mscale: float | None = Field(None, ge=0, description="yarn: see attention_factor")
    mscale_all_dim: float | None = Field(None, ge=0, description="yarn: see attention_factor")
    truncate: bool | None = Field(
        None, description="yarn: round the range between both betas to dimensions; null = true"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RopeScaling:
        used = ROPE_TYPES[self.rope_type]
        for key in RopeScaling.model_fields:
            if key == "rope_type":
                continue
            is_set = getattr(self, key) is not None
            if is_set and key not in used:
                raise ValueError(f"{key}: rope_type {self.rope_type} does not use it; remove it")
            if not is_set and key in used and key not in _YARN_OPTIONS:
                raise ValueError(f"{key} is missing; rope_type {self.rope_type} needs it")
        return self

    @model_validator(mode="after")
    def _check_factors(self) -> RopeScaling:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            problem = f"high_freq_factor {high:g} must be greater than low_freq_factor {low:g}"
            raise ValueError(problem)
        return self

    @property
    def attention_scaling(self) -> float:
        """Factor of the rotated queries and keys, with which yarn sharpens attention."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if not (self.mscale and self.mscale_all_dim):
            return self._mscale_of(1.0)
        return self._mscale_of(self.mscale) / self._mscale_of(self.mscale_all_dim)

    def _mscale_of(self, mscale: float) -> float:
        if self.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0


class LayerKind(_Mapping, frozen=True):
    """What the layers of one kind have instead of the model's values."""

    sliding_window: int | None = Field(
        None, gt=0, description="attend to the last N positions only (tokens); null = the model's"
    )
    rope: bool = Field(True, description="rotate queries and keys; false = they have no positions")
    rope_theta: float | None = Field(
        None, gt=0, description="base of the rotary wavelengths; null = the model's"
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="scaling of the rotary frequencies; null = the model's"
    )


class Rope(NamedTuple):
    """A rotary embedding."""

    theta: float
    scaling: RopeScaling | None


class AttentionKind(NamedTuple):
    """What distinguishes the attention of one layer from that of another."""

    sliding_window: int | None
    """tokens; None = full attention"""
    rope: Rope | None
    """None = queries and keys are not rotated"""


VocabSize = Annotated[int, Field(gt=1, le=2**24)]


class ModelConfig(Config, frozen=True):
    """Hyperparameters of the architecture. `model` names a preset for the keys that are not set."""

    model: Logged[str | None] = Field(
        None, description="preset that supplies the keys below that are not set"
    )
    # The limits keep the number of elements of every tensor within int64, and a model on the meta
    # device small.
    d_model: Varied[Fixed[int]] = Field(
        512,
        gt=0,
        le=2**20,
        description="width of the residual stream",
        json_schema_extra={"aliases": ["hidden_size", "n_embd"]},
    )
    n_heads: Varied[Fixed[int]] = Field(
        8,
        gt=0,
        le=2**14,
        description="query heads per layer; divides d_model if head_dim is null",
        json_schema_extra={"aliases": ["num_attention_heads"]},
    )
    n_layers: Varied[Fixed[int]] = Field(
        4,
        gt=0,
        le=MAX_LAYERS,
        description="Transformer blocks",
        json_schema_extra={"aliases": ["num_layers", "num_hidden_layers"]},
    )
    vocab_size: Fixed[VocabSize] = Field(
        None,
        validate_default=True,
        description="token ids; null = the tokenizer's, rounded up to a multiple of 64; 32000 for"
        " synthetic data",
    )
    max_seq_len: Varied[Fixed[int]] = Field(
        2048,
        gt=0,
        le=2**24,
        description="longest sequence; the length in training (tokens)",
        json_schema_extra={"aliases": ["seq_len", "block_size"]},
    )
    n_kv_heads: Fixed[int | None] = Field(
        None, gt=0, le=2**14, description="key-value heads; divides n_heads; null = n_heads"
    )
    head_dim: Fixed[int | None] = Field(
        None, gt=0, le=2**14, description="width of a head; null = d_model / n_heads"
    )
    d_ff: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**24,
        description="feed-forward width; null = 4 d_model, or Llama's rule with a gate",
    )
    norm: Fixed[Literal["layernorm", "rmsnorm", "rmsnorm-centered"]] = Field(
        "layernorm",
        description="normalization of sublayers and output; rmsnorm-centered multiplies by"
        " 1 + weight (Gemma)",
    )
    norm_eps: Fixed[float] = Field(1e-5, gt=0, description="added to the variance in each norm")
    norm_placement: Fixed[Literal["pre", "post", "both"]] = Field(
        "pre",
        description="normalize a sublayer's input (GPT, Llama), or its output before it is added"
        " (OLMo 2), or both (GLM-4)",
    )
    qk_norm: Fixed[Literal["none", "head", "projection"]] = Field(
        "none",
        description="RMSNorm of queries and keys: of each head (Qwen3), or of all heads together"
        " (OLMo 2)",
    )
    positions: Fixed[Literal["learned", "rope"]] = Field(
        "learned", description="learned table, or rotary embedding"
    )
    n_positions: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**24,
        description="positions that a pretrained model was made for, which an export states: with"
        " positions: learned the rows of its table; null = max_seq_len",
    )
    rope_theta: Fixed[float] = Field(10000.0, gt=0, description="base of the rotary wavelengths")
    rope_scaling: Fixed[RopeScaling | None] = Field(
        None, description="scaling of the rotary frequencies (a mapping)"
    )
    partial_rotary_factor: Fixed[float] = Field(
        1.0, gt=0, le=1, description="fraction of a head that is rotated: its first dimensions"
    )
    rope_interleave: Fixed[bool] = Field(
        False, description="rotate pairs of neighbors, not of the halves of a head"
    )
    ffn: Fixed[Literal["relu", "gelu", "swiglu", "geglu"]] = Field(
        "relu",
        description="feed-forward network; gelu is GPT-2's tanh form; swiglu and geglu have a gate",
    )
    bias: Fixed[Literal["ffn", "none", "qkv", "attention", "all"]] = Field(
        "ffn",
        description="linear layers with a bias (the head has none); qkv = query, key and value"
        " (Qwen2), attention = these and the output of attention",
    )
    tie_embeddings: Fixed[bool] = Field(
        False, description="use the token embedding as the output matrix"
    )
    sliding_window: Fixed[int | None] = Field(
        None, gt=0, description="attend to the last N positions only (tokens)"
    )
    layer_pattern: Fixed[tuple[LayerKind, ...] | None] = Field(
        None,
        min_length=1,
        max_length=MAX_LAYERS,
        description="kinds of layers, repeated in turn; null = all layers are alike",
    )
    embedding_multiplier: Fixed[float] = Field(
        1.0, gt=0, description="factor of the token embeddings"
    )
    attention_multiplier: Fixed[float | None] = Field(
        None, gt=0, description="factor of the attention scores; null = 1 / sqrt(width of a head)"
    )
    residual_multiplier: Fixed[float] = Field(
        1.0, gt=0, description="factor of a sublayer's output before it is added"
    )
    logits_scaling: Fixed[float] = Field(1.0, gt=0, description="divisor of the logits")
    dropout: Fixed[float] = Field(
        0.0, ge=0, lt=1, description="probability of zeroing an activation in training"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("model"), str):
            return values  # no preset, or a value that pydantic rejects
        if values["model"] not in PRESETS:
            available = ", ".join(PRESETS)
            raise ValueError(f"model: unknown preset {values['model']!r}; available: {available}")
        return PRESETS[values["model"]] | values

    @field_validator("vocab_size", mode="before", json_schema_input_type=VocabSize | None)
    @classmethod
    def _default_vocab_size(cls, size: Any) -> Any:
        return 32000 if size is None else size

    @model_validator(mode="after")
    def _check_structure(self) -> ModelConfig:
        problems = [*self._find_problems_of_heads(), *self._find_problems_of_positions()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _find_problems_of_heads(self) -> Iterator[str]:
        if self.head_dim is None and self.d_model % self.n_heads:
            fits = sorted(_divisors(self.d_model), key=lambda n: abs(n - self.n_heads))
            problem = f"{self.n_heads} does not divide d_model {self.d_model}"
            yield f"n_heads: {problem}; nearest: {sorted(fits[:4])}"
        elif self.positions == "rope" and (self.rotary_width % 2 or self.rotary_width == 0):
            needs = "positions: rope needs an even"
            if self.partial_rotary_factor != 1:
                problem = f"{needs} number of rotated dimensions, not {self.rotary_width}"
                yield f"partial_rotary_factor: {problem} of {self.head_width}"
            elif self.head_dim is not None:
                yield f"head_dim: {needs} head_dim, not {self.head_width}"
            else:
                yield f"n_heads: {needs} d_model / n_heads, not {self.head_width}"
        if self.n_heads % self.kv_heads:
            problem = f"{self.n_kv_heads} does not divide n_heads {self.n_heads}"
            yield f"n_kv_heads: {problem}; choose from {_divisors(self.n_heads)}"

    def _find_problems_of_positions(self) -> Iterator[str]:
        n_rows = self.n_positions
        if self.positions == "learned" and n_rows is not None and self.max_seq_len > n_rows:
            problem = f"{self.max_seq_len} exceeds n_positions {n_rows}"
            yield f"max_seq_len: {problem}, the rows of the learned table"
        if self.rope_scaling and self.positions != "rope":
            yield "rope_scaling: needs positions: rope"
        if self.layer_pattern and self.positions != "rope":
            yield "layer_pattern: needs positions: rope"
        for kind in set(self.attention_kinds):
            if kind.rope is None or kind.rope.scaling is None:
                continue
            if kind.rope.theta <= 1:
                yield "rope_theta: rope_scaling needs a base above 1"
            elif self.rotary_width < 4:
                problem = f"needs 4 or more rotated dimensions per head, not {self.rotary_width}"
                yield f"rope_scaling: {problem}"
            original = kind.rope.scaling.original_max_position_embeddings
            if kind.rope.scaling.rope_type == "dynamic" and self.max_seq_len > (original or 0):
                # All positions would be rotated by the length of the sequence: a text would depend
                # on what it is packed, padded or generated with.
                problem = f"{self.max_seq_len} exceeds the original context of {original}"
                remedy = f"use {original} or less, or set rope_scaling to linear or yarn"
                yield f"max_seq_len: {problem}, as far as dynamic is supported; {remedy}"

    @property
    def head_width(self) -> int:
        """`head_dim`, else d_model / n_heads."""
        if self.head_dim is not None:
            return self.head_dim
        return self.d_model // self.n_heads

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        """The kind of each layer's attention: `layer_pattern`, or the model's values."""
        pattern: list[AttentionKind] = []
        for kind in self.layer_pattern or [LayerKind.model_validate({})]:
            rope = None
            if self.positions == "rope" and kind.rope:
                theta = kind.rope_theta or self.rope_theta
                rope = Rope(theta, kind.rope_scaling or self.rope_scaling)
            window = kind.sliding_window or self.sliding_window
            pattern.append(AttentionKind(window, rope))
        return [pattern[layer % len(pattern)] for layer in range(self.n_layers)]

    @property
    def rotary_width(self) -> int:
        """The first dimensions of a head, which are rotated: `partial_rotary_factor` of them."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def kv_heads(self) -> int:
        """`n_kv_heads`, else n_heads."""
        if self.n_kv_heads is not None:
            return self.n_kv_heads
        return self.n_heads

    @property
    def context_length(self) -> int:
        """Positions that an export states: `n_positions`, but at least max_seq_len."""
        return max(self.n_positions or 0, self.max_seq_len)

    @property
    def ffn_width(self) -> int:
        """Inner width of the feed-forward network: `d_ff`, else 4 d_model.

        With a gate Llama takes two thirds of it, rounded up to a multiple of 256: three matrices
        then have as many weights as two of the full width.
        """
        if self.d_ff is not None:
            return self.d_ff
        if self.has_gate:
            return 256 * math.ceil(8 * self.d_model / 3 / 256)
        return 4 * self.d_model

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward network has a third matrix, for its gate."""
        return self.ffn in ("swiglu", "geglu")

    def can_use_flex(self, device: torch.device, training: bool) -> bool:
        """Return whether masked attention can use FlexAttention on `device`.

        It needs CUDA, head_width >= 16 and no dropout.
        """
        has_dropout = training and self.dropout > 0
        return device.type == "cuda" and self.head_width >= 16 and not has_dropout

    def needs_kv_repeat(self, device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
        """Return whether the fused kernel needs key-value heads repeated for each query head.

        On CUDA only FlashAttention supports grouped queries, and it supports neither masks nor
        float32 nor GPUs older than Ampere.
        """
        if device.type != "cuda" or self.kv_heads == self.n_heads:
            return False
        if masked or dtype == torch.float32:
            return True
        return torch.cuda.get_device_capability(device) < (8, 0)

    def structure(self) -> dict[str, Any]:
        """Return the hyperparameters that weights depend on, with defaults filled in.

        Excludes `model`, `dropout` and `max_seq_len`, and `n_positions` without a learned table.
        """
        excluded = {"model", "dropout", "max_seq_len", "n_positions"}
        derived = {"d_ff": self.ffn_width, "n_kv_heads": self.kv_heads, "head_dim": self.head_width}
        if self.positions == "learned":
            derived["n_positions"] = self.context_length
        return self.model_dump(mode="json", exclude=excluded) | derived

    @property
    def n_parameters(self) -> int:
        """Number of parameters, from a model with one block, which is like all others."""
        with torch.device("meta"):
            model = Transformer(self.model_copy(update={"n_layers": 1}))
        n_total = sum(p.numel() for p in model.parameters())
        n_block = sum(p.numel() for p in model.blocks.parameters())
        return n_total + (self.n_layers - 1) * n_block

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token of forward and backward over sequences of `seq_len` tokens.

        A product of an activation and a weight is two FLOPs in forward (multiply and add) and twice
        that in backward (for the gradients of both): six FLOPs per weight. The head is a product,
        the embedding a lookup. Attention has two more products per key that a query attends to, for
        its score and for its value, with K numbers in each of H heads: 12 H K FLOPs per key.
        Recomputation is not counted. Source: Chowdhery et al., PaLM (2022), appendix B.
        """
        d = self.d_model
        q = self.n_heads * self.head_width
        kv = self.kv_heads * self.head_width
        attention_weights = d * (2 * q + 2 * kv)  # q_proj and o_proj, k_proj and v_proj
        n_matrices = 3 if self.has_gate else 2
        ffn_weights = n_matrices * d * self.ffn_width
        weights = self.n_layers * (attention_weights + ffn_weights) + self.vocab_size * d

        return 6 * weights + self.attention_flops_per_token(seq_len)

    def attention_flops_per_token(self, seq_len: int) -> float:
        """Return the part of `flops_per_token` that is not products with weights."""
        q = self.n_heads * self.head_width
        windows = Counter(kind.sliding_window for kind in self.attention_kinds)
        flops = 0.0
        for sliding_window, n_layers in windows.items():
            # Query t attends to min(t, window) keys. Over a sequence these are the triangle of the
            # first `window` queries, window^2 / 2, and a rectangle of (seq_len - window) x window;
            # the mean per query is their sum / seq_len.
            window = seq_len
            if sliding_window is not None:
                window = min(sliding_window, seq_len)
            keys = window - window**2 / (2 * seq_len)
            flops += 12 * n_layers * q * keys
        return flops


def _divisors(number: int) -> list[int]:
    """Return the divisors of `number` up to 1024."""
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]


# ---- inputs of attention


class KVCache:
    """Keys and values of the tokens processed so far, for generation.

    They are `(B, G, capacity, K)` per layer, of which the first `length` positions are in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k` and `v` `(B, G, T, K)` to `layer`.

        `Transformer.forward` advances `length` after the last layer.

        Returns:
            All keys and values of the layer, `(B, G, length + T, K)`.
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
    """Inputs of attention that layers of a kind share."""

    rope: tuple[Tensor, Tensor] | None
    """cosine and sine of each position's angles, `(T, 1, R/2)` or `(B, T, 1, R/2)`, float32"""
    mask: Tensor | BlockMask | None
    """`(T, S)` or `(B, 1, T, T)`, true = attend; None = as `is_causal` says"""
    is_causal: bool
    """without a mask: attend to the keys up to the query's position, else to all"""
    repeat_kv: bool
    """see `ModelConfig.needs_kv_repeat`"""


# ---- rotary embedding


def rope_frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """Return the rotary frequencies `(R/2,)`, float32, in radians per position.

    Sources: Su et al., RoFormer (2021), equation 15. Of the scalings: Chen et al., Position
    Interpolation (2023), for linear; Peng et al., YaRN (2023), section 3.2; Llama 3.1. Dynamic
    scaling starts after the original context, to which it is limited here.

    Args:
        width: R.
    """
    dims = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    theta, scaling = rope
    periods = theta ** (dims / width)
    frequencies = 1.0 / periods
    if scaling is None:
        return frequencies
    match scaling.rope_type:
        case "dynamic":
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "yarn":
            kept = _yarn_kept_fraction(scaling, theta, width, device)
            scaled = 1.0 / (scaling.factor * periods)
            return scaled * (1 - kept) + frequencies * kept
        case "llama3":
            kept = _llama3_kept_fraction(scaling, frequencies)
            return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_angles(rope: Rope, width: int, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the angles, see `AttentionInputs.rope`.

    Args:
        width: see `rope_frequencies`.
        position_ids: `(T,)` or `(B, T)`.
    """
    frequencies = rope_frequencies(rope, width, position_ids.device)
    angles = position_ids.float()[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.scaling is not None and rope.scaling.attention_scaling != 1:
        cos = cos * rope.scaling.attention_scaling
        sin = sin * rope.scaling.attention_scaling
    return cos, sin


def _yarn_kept_fraction(
    scaling: RopeScaling, theta: float, width: int, device: torch.device
) -> Tensor:
    """Return the fraction `(R/2,)` of each frequency that is not scaled.

    It is 1 for those that turn at least beta_fast times in the original context, 0 for those that
    turn at most beta_slow times, and linear in the dimension between them.
    """
    original = scaling.original_max_position_embeddings
    assert original is not None

    def find_dimension(n_turns: float) -> float:
        """Solve original x theta^(-2 dimension / width) = 2 pi n_turns."""
        return width * math.log(original / (n_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = find_dimension(scaling.beta_fast or 32)
    last = find_dimension(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    if first == last:
        last += 0.001
    dims = torch.arange(width // 2, dtype=torch.float32, device=device)
    return 1 - ((dims - first) / (last - first)).clamp(0, 1)


def _llama3_kept_fraction(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Return the fraction `(R/2,)` of each frequency that is not scaled.

    It is 0 for wavelengths longer than the original context / low_freq_factor, 1 for those shorter
    than the original context / high_freq_factor, and interpolated between them.
    """
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    # Turns within the original context: few mean a long wavelength.
    turns = original * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor], interleave: bool) -> Tensor:
    """Rotate pairs of the first R dimensions of `x` by their position's angles, in float32.

    The pairs are (x[i], x[i + R/2]), with `interleave` (x[2i], x[2i + 1]).

    Args:
        x: `(B, T, heads, K)`.
        rope: see `AttentionInputs`.
    """
    cos, sin = rope
    width = 2 * cos.shape[-1]
    rotated, rest = x[..., :width].float(), x[..., width:]
    if interleave:
        a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    rotated = rotated.to(x.dtype)
    if rest.shape[-1] == 0:
        return rotated
    return torch.cat([rotated, rest], dim=-1)


# ---- masks


def find_document_starts(document_ids: Tensor, indices: Tensor) -> Tensor:
    """Return the index in the sequence of the first token of each token's document, `(B, T)`."""
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(is_first, indices, 0).cummax(dim=1).values


def make_mask(
    window: int | None,
    batch_size: int,
    indices: Tensor,
    document_start: Tensor | None,
    end: int,
    use_flex: bool,
) -> Tensor | BlockMask | None:
    """Return `AttentionInputs.mask`.

    Args:
        window: of sliding-window attention; None = full attention.
        batch_size: B.
        indices: of the tokens in the sequence, `(T,)`.
        document_start: see `find_document_starts`; None = each sequence is one document.
        end: S, the length of the sequence.
        use_flex: whether masks of documents and of a window that hides tokens are FlexAttention's.
    """
    is_windowed = window is not None and end > window
    if document_start is None and use_flex and is_windowed:
        # FlexAttention skips the blocks outside the window; other kernels only mask them.
        document_start = indices.new_zeros(batch_size, len(indices))
    if document_start is not None:
        return _document_mask(window, indices, document_start, use_flex)

    is_one_token = len(indices) == 1
    has_no_cache = len(indices) == end
    if not is_windowed and (is_one_token or has_no_cache):
        return None
    distance = indices[:, None] - torch.arange(end, device=indices.device)
    mask = distance >= 0
    if window is not None and is_windowed:
        mask = mask & (distance < window)
    return mask


def _document_mask(
    window: int | None, indices: Tensor, document_start: Tensor, use_flex: bool
) -> Tensor | BlockMask:
    """Return the mask of sequences of several documents.

    With `use_flex` it is FlexAttention's, which skips masked blocks, otherwise `(B, 1, T, T)`.
    """
    oldest_key = document_start
    if window is not None:
        oldest_key = torch.maximum(document_start, indices - window + 1)

    def mask_mod(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= oldest_key[b, query])

    batch, length = document_start.shape
    if use_flex:
        create = compile_once(create_block_mask) if indices.is_cuda else create_block_mask
        return create(mask_mod, batch, None, length, length, device=indices.device)
    b = torch.arange(batch, device=indices.device)[:, None, None, None]
    return mask_mod(b, b, indices[:, None], indices)


def limit_mask(mask: Tensor, window: int | None, position_ids: Tensor) -> Tensor:
    """Return `mask` `(B, 1, T, T)` without keys that are `window` or more positions back."""
    if window is None:
        return mask
    distance = position_ids[:, :, None] - position_ids[:, None, :]  # B T T
    return mask & (distance < window)[:, None]


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled; else FlexAttention would materialize the scores of all pairs."""
    return torch.compile(function, options=compiler_options())


def compiler_options() -> dict[str, Any]:
    """Return the options of `torch.compile` for the algorithms that PyTorch is set to use."""
    if torch.are_deterministic_algorithms_enabled():
        # The compiler does not choose among kernels by their speed, which varies.
        return {"deterministic": True}
    return {}


# ---- layers


class CenteredRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight is the difference from 1, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_rms_norm(config: ModelConfig, width: int) -> nn.Module:
    """Return the RMSNorm that `config` selects."""
    if config.norm == "rmsnorm-centered":
        return CenteredRMSNorm(width, eps=config.norm_eps)
    return nn.RMSNorm(width, eps=config.norm_eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of sublayers and output that `config` selects."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias != "none")
    return make_rms_norm(config, config.d_model)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., 2023), with fused kernels."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        d = config.d_model
        q = config.n_heads * config.head_width
        kv = config.kv_heads * config.head_width
        bias = config.bias in ("qkv", "attention", "all")
        self.q_proj = nn.Linear(d, q, bias=bias)
        self.k_proj = nn.Linear(d, kv, bias=bias)
        self.v_proj = nn.Linear(d, kv, bias=bias)
        self.o_proj = nn.Linear(q, d, bias=config.bias in ("attention", "all"))
        if config.qk_norm == "projection":
            self.q_norm = make_rms_norm(config, q)
            self.k_norm = make_rms_norm(config, kv)
        elif config.qk_norm == "head":
            self.q_norm = make_rms_norm(config, config.head_width)
            self.k_norm = make_rms_norm(config, config.head_width)

    def forward(
        self, x: Tensor, inputs: AttentionInputs, cache: KVCache | None
    ) -> Tensor:  # (B, T, D) -> (B, T, D)
        c = self.config
        batch, length, _ = x.shape
        q = self.q_proj(x)
        k = self.k_proj(x)
        if c.qk_norm == "projection":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.view(batch, length, c.n_heads, c.head_width)  # B T H K
        k = k.view(batch, length, c.kv_heads, c.head_width)  # B T G K
        v = self.v_proj(x).view(batch, length, c.kv_heads, c.head_width)
        if c.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        # Rotated before the transposition: the kernel's output has the layout of q, and in this one
        # it needs no copy.
        if inputs.rope is not None:
            q = rotate(q, inputs.rope, c.rope_interleave)
            k = rotate(k, inputs.rope, c.rope_interleave)
        q = q.transpose(1, 2)  # B H T K
        k = k.transpose(1, 2)  # B G T K
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # B G S K
        y = self._attend(q, k, v, inputs)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, c.n_heads * c.head_width))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the mean of the values, weighted by each query's attention, `(B, H, T, K)`."""
        c = self.config
        is_grouped = c.kv_heads != c.n_heads
        if isinstance(inputs.mask, BlockMask):
            # A compiled block compiles it, too; on a CPU only tests use it, on few tokens.
            in_graph = torch.compiler.is_compiling() or not q.is_cuda
            attend = flex_attention if in_graph else compile_once(flex_attention)
            return attend(
                q,
                k,
                v,
                block_mask=inputs.mask,
                scale=c.attention_multiplier,
                enable_gqa=is_grouped,
            )
        if inputs.repeat_kv:
            n_repeats = c.n_heads // c.kv_heads
            k = k.repeat_interleave(n_repeats, dim=1)
            v = v.repeat_interleave(n_repeats, dim=1)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=inputs.mask,
            dropout_p=c.dropout if self.training else 0.0,
            is_causal=inputs.is_causal,
            scale=c.attention_multiplier,
            enable_gqa=is_grouped and not inputs.repeat_kv,
        )


class FeedForward(nn.Module):
    """Two linear layers with ReLU or GELU between them, or SwiGLU or GEGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.ffn
        d = config.d_model
        f = config.ffn_width
        bias = config.bias in ("ffn", "all")
        if config.has_gate:
            self.gate_proj = nn.Linear(d, f, bias=bias)
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        if self.kind == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.kind == "geglu":
            gate = F.gelu(self.gate_proj(x), approximate="tanh")
            return self.down_proj(gate * self.up_proj(x))
        x = self.up_proj(x)  # B T F
        if self.kind == "relu":
            return self.down_proj(F.relu(x))
        return self.down_proj(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    """Transformer block: attention, then a feed-forward network.

    Each has a norm, of its input or of its output or both, and is added to the residual stream.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.multiplier = config.residual_multiplier
        self.placement = config.norm_placement
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        if config.norm_placement == "both":
            self.attention_output_norm = make_norm(config)
        self.ffn_norm = make_norm(config)
        self.ffn = FeedForward(config)
        if config.norm_placement == "both":
            self.ffn_output_norm = make_norm(config)

    def forward(self, x: Tensor, inputs: AttentionInputs, cache: KVCache | None = None) -> Tensor:
        if self.placement == "post":
            attended = self.attention_norm(self.attention(x, inputs, cache))
        else:
            attended = self.attention(self.attention_norm(x), inputs, cache)
        if self.placement == "both":
            attended = self.attention_output_norm(attended)
        x = self._add(x, attended)
        if self.placement == "post":
            fed = self.ffn_norm(self.ffn(x))
        else:
            fed = self.ffn(self.ffn_norm(x))
        if self.placement == "both":
            fed = self.ffn_output_norm(fed)
        return self._add(x, fed)

    def _add(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the residual stream `x` with the output of a sublayer."""
        if self.multiplier != 1:
            output = output * self.multiplier
        return x + F.dropout(output, self.dropout, self.training)


class Embedding(nn.Module):
    """Token embeddings, plus position embeddings if positions are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.multiplier = config.embedding_multiplier
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)

    def forward(
        self, tokens: Tensor, position_ids: Tensor
    ) -> Tensor:  # (B, T), (T,) or (B, T) -> (B, T, D)
        x = self.tokens(tokens)
        if self.multiplier != 1:  # rounded to the dtype of the embeddings, as Gemma's is
            x = x * torch.full((), self.multiplier, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        return F.dropout(x, self.dropout, self.training)


# ---- head and loss


LOGITS_LIMITS = {"cpu": 2**24, "cuda": 2**31 - 1}
"""Most logits in memory at once by device type.

Few enough for a CPU's cache, or for 32-bit indices on a GPU.
"""


def find_logits_limit(device: torch.device, memory: int | None = None) -> int:
    """Return the most logits in memory at once.

    On a GPU they take, with their gradients, up to 4 bytes each, and at most a sixteenth of its
    memory.

    Args:
        memory: of the GPU (bytes); None = of `device`.
    """
    if device.type != "cuda":
        return LOGITS_LIMITS["cpu"]
    total: int = memory or torch.cuda.get_device_properties(device).total_memory
    return min(LOGITS_LIMITS["cuda"], total // (16 * 4))


ChunkCrossEntropy = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def chunk_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p(target) for the logits `x @ weight.T`, and its gradients.

    With p the probabilities of the tokens, the gradient with respect to the logits is
    p - one_hot(target).

    Args:
        x: `(N, D)`.
        weight: `(V, D)`.
        targets: `(N,)`.
        needs_grad: if false, the gradients are empty tensors; the one for `weight` also is if
            `weight` is frozen.

    Returns:
        The sum in nats, a float32 scalar, and the gradients of `x` and `weight`.
    """
    log_probs = F.log_softmax(F.linear(x, weight).float(), dim=-1)
    counts = (targets != IGNORE_INDEX)[:, None]
    target = torch.where(counts, targets[:, None], 0)
    loss_sum = -log_probs.gather(-1, target).masked_fill(~counts, 0).sum()
    if not needs_grad:
        return loss_sum, x.new_empty(0), x.new_empty(0)
    grad = log_probs.exp_()
    del log_probs  # so that `grad` alone holds the memory
    if torch.compiler.is_compiling():  # fused with what is before and after
        one_hot = torch.arange(len(weight), device=x.device) == target
        grad = grad - one_hot.float()
    else:
        grad.scatter_add_(-1, target, grad.new_full(target.shape, -1))
    grad = grad.masked_fill_(~counts, 0).to(x.dtype)
    x_grad = grad @ weight
    if not weight.requires_grad:
        return loss_sum, x_grad, x.new_empty(0)
    return loss_sum, x_grad, grad.T @ x


def even_chunk_size(total: int, limit: int) -> int:
    """Return a chunk size of at most `limit` that divides `total` evenly, if one near it does."""
    least = math.ceil(total / limit)
    for n_chunks in range(least, 2 * least):
        if total % n_chunks == 0:
            return total // n_chunks
    return math.ceil(total / least)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target) for the logits `x @ weight.T`, in chunks, to hold few logits at once.

    The gradients of a chunk are computed in the forward pass, while its logits exist; the backward
    pass scales them by the gradient of the sum. Source: Hsu et al., Liger Kernel (2024), section
    3.2.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        size: int,
        needs_grad: bool,
        function: ChunkCrossEntropy,
    ) -> Tensor:
        """Return the sum in nats, a float32 scalar, over chunks of `size` targets.

        Args:
            x, weight, targets, needs_grad: see `chunk_cross_entropy`.
            function: `chunk_cross_entropy`, or its compiled form.
        """
        loss_sum = torch.zeros((), device=x.device)
        x_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for x_chunk, target_chunk in zip(x.split(size), targets.split(size), strict=True):
            chunk_sum, x_grad, weight_term = function(x_chunk, weight, target_chunk, needs_grad)
            loss_sum += chunk_sum
            x_grads.append(x_grad)
            if weight_grad is not None:
                weight_grad += weight_term
            elif size >= len(x):  # the only chunk
                weight_grad = weight_term
            else:  # a sum of many terms, in float32
                weight_grad = weight_term.float()
        if needs_grad:
            ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, (weight_grad * grad).to(x_grad.dtype), None, None, None, None


class Head(nn.Module):
    """Final norm and output matrix, and the loss, so that the logits never leave this module."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.logits_scaling = config.logits_scaling
        self.output = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.chunk_cross_entropy: ChunkCrossEntropy = chunk_cross_entropy
        """or its compiled form"""
        self.logits_limit: int | None = None
        """most logits in memory at once; None = `find_logits_limit`"""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None,
        tied: Tensor | None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or with `targets` the loss, or with `queries` the targets' scores.

        Args:
            x: `(B, T, D)`, or `(B, D)` without targets.
            targets: `(B, T)`, or `(N,)` with queries.
            tied: the output matrix `(V, D)` if embeddings are tied.
            queries: `(N,)`, see `Transformer.forward`.
        """
        weight = tied
        if self.output is not None:
            weight = self.output.weight
        assert weight is not None
        if queries is not None:
            x = x.flatten(0, 1)[queries]
        x = self.norm(x)
        if self.logits_scaling != 1:
            x = x / self.logits_scaling  # fewer numbers than the logits
        if targets is None:
            return F.linear(x, weight)
        if queries is not None:
            size = max(1, self._max_rows(weight) // 16)  # no slower without gradients
            return score_targets(x, weight, targets, size)
        return self._loss_sum(x.flatten(0, 1), weight, targets.flatten())

    def _max_rows(self, weight: Tensor) -> int:
        """Return how many tokens' logits can be in memory at once."""
        limit = self.logits_limit
        if limit is None:
            limit = find_logits_limit(weight.device)
        return max(1, limit // len(weight))

    def _loss_sum(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of -log p(target) in nats, a float32 scalar; see `chunk_cross_entropy`."""
        if x.dtype == torch.float16:
            # It cannot hold a chunk's gradients before the loss scale is applied to them.
            logits = F.linear(x, weight).float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        size = even_chunk_size(len(x), self._max_rows(weight))
        needs_grad = torch.is_grad_enabled()
        loss_sum = LinearCrossEntropy.apply(
            x, weight, targets, size, needs_grad, self.chunk_cross_entropy
        )
        return cast(Tensor, loss_sum)


def score_targets(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    """Return each target's log-probability, and whether no token is more likely, `(2, N)` float32.

    Args:
        x: `(N, D)`.
        weight: `(V, D)`; the logits are `x @ weight.T`.
        targets: `(N,)`.
        size: rows whose logits are in memory at once.
    """
    scores: list[Tensor] = []
    for x_chunk, target_chunk in zip(x.split(size), targets.split(size), strict=True):
        logits = F.linear(x_chunk, weight).float()
        target_logits = logits.gather(-1, target_chunk[:, None]).squeeze(-1)
        log_probs = target_logits - logits.logsumexp(dim=-1)
        is_greedy = target_logits >= logits.amax(dim=-1)
        scores.append(torch.stack([log_probs, is_greedy.float()]))
    return torch.cat(scores, dim=1)


# ---- the model


class InitRule(NamedTuple):
    """How to initialize a parameter."""

    kind: Literal["constant", "normal", "uniform"]
    value: float
    """the constant, the standard deviation, or the bound of -bound .. bound"""


class Transformer(nn.Module):
    """Decoder-only language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_kinds = config.attention_kinds
        """of each layer"""
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.head = Head(config)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, the scores of targets, the next token's logits, or all logits.

        Args:
            tokens: `(B, T)` token ids.
            targets: `(B, T)` token ids, or `IGNORE_INDEX` for tokens that are excluded from the
                loss.
            document_ids: `(B, T)`, equal for adjacent tokens of one document. Attention stays
                within a document. None = one document per sequence.
            cache: keys and values of the tokens before `tokens`; is extended by T.
            position_ids: `(T,)` or `(B, T)`, positions for the rotary or learned embedding; without
                `mask` they do not affect which tokens are attended to. None = consecutive,
                restarting in each document.
            mask: `(B, 1, T, T)`, true = attend, instead of causal attention. Sliding windows limit
                it by the distance in `position_ids`, then `(B, T)`.
            queries: `(N,)`, the tokens that `targets`, then `(N,)`, come after, as indices into
                the flattened `tokens`.

        Returns:
            With `queries`: of each target its log-probability in nats, and 1.0 if no token is more
            likely, else 0.0, `(2, N)` float32. With `targets` alone: the sum of -log p(target) in
            nats, a float32 scalar. It is a sum, so that ranks and micro-steps can be averaged
            exactly. With `cache`: the logits after the last token, `(B, V)`. Otherwise all logits,
            `(B, T, V)`.

        Raises:
            ValueError: the tokens, with those cached, are longer than `max_seq_len`.
        """
        c = self.config
        start = 0
        if cache is not None:
            start = cache.length
        end = start + tokens.shape[1]
        if end > c.max_seq_len:
            raise ValueError(f"max_seq_len: {end} tokens exceed {c.max_seq_len}")
        indices = torch.arange(start, end, device=tokens.device)  # T, in the sequence
        document_start = None
        default_position_ids = indices
        if document_ids is not None:
            document_start = find_document_starts(document_ids, indices)  # B T
            default_position_ids = indices - document_start
        if position_ids is None:
            position_ids = default_position_ids
        x = self.embedding(tokens, position_ids)  # B T D

        use_flex = cache is None and c.can_use_flex(tokens.device, self.training)
        masks: dict[int | None, Tensor | BlockMask | None] = {}  # by sliding window
        for window in dict.fromkeys(kind.sliding_window for kind in self.attention_kinds):
            if mask is not None:
                masks[window] = limit_mask(mask, window, position_ids)
            else:
                masks[window] = make_mask(
                    window, len(tokens), indices, document_start, end, use_flex
                )

        inputs: dict[AttentionKind, AttentionInputs] = {}
        for kind in dict.fromkeys(self.attention_kinds):
            mask_of_kind = masks[kind.sliding_window]
            inputs[kind] = self._attention_inputs(kind, x, position_ids, mask_of_kind)
        for block, kind in zip(self.blocks, self.attention_kinds, strict=True):
            x = block(x, inputs[kind], cache)
        if cache is not None:
            cache.length = end
            x = x[:, -1]  # B D
        tied = None
        if c.tie_embeddings:
            tied = self.embedding.tokens.weight
        return self.head(x, targets, tied, queries)

    def _attention_inputs(
        self,
        kind: AttentionKind,
        x: Tensor,
        position_ids: Tensor,
        mask: Tensor | BlockMask | None,
    ) -> AttentionInputs:
        """Return the inputs of attention that all layers of a kind share.

        Args:
            x: `(B, T, D)`, the input of the first layer.
            mask: see `AttentionInputs`.
        """
        c = self.config
        rope = None
        if kind.rope is not None:
            rope = rope_angles(kind.rope, c.rotary_width, position_ids)
        return AttentionInputs(
            rope=rope,
            mask=mask,
            is_causal=mask is None and x.shape[1] > 1,
            repeat_kv=c.needs_kv_repeat(x.device, x.dtype, mask is not None),
        )

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules to shard separately, in forward order; the root holds the rest.

        A tied output matrix is used at both ends of the model, so embedding and head belong to the
        root.
        """
        if self.config.tie_embeddings:
            return list(self.blocks)
        return [self.embedding, *self.blocks, self.head]

    def init_rule(self, name: str, width_ratio: float = 1.0, depth_ratio: float = 1.0) -> InitRule:
        """Return how to initialize the parameter `name`.

        Matrices have deviation 0.02, those that write to the residual stream 0.02 / sqrt(2
        n_layers), so that its variance does not grow with depth (GPT-2 and Llama). The FSDP
        example's model, with learned positions and untied embeddings, keeps the variances of
        PyTorch's modules.

        Args:
            width_ratio, depth_ratio: how many times wider and deeper this model is than the one
                whose rule is returned.
        """
        c = self.config
        *_, module, parameter = name.split(".")
        if parameter == "bias":
            return InitRule("constant", 0.0)
        if module.endswith("norm"):
            identity = 1.0
            if c.norm == "rmsnorm-centered":
                identity = 0.0
            return InitRule("constant", identity)
        if c.positions == "learned" and not c.tie_embeddings:
            return self._pytorch_init_rule(module, width_ratio)
        if module in ("o_proj", "down_proj"):  # they write to the residual stream
            return InitRule("normal", 0.02 / math.sqrt(2 * c.n_layers / depth_ratio))
        return InitRule("normal", 0.02)

    def _pytorch_init_rule(self, module: str, width_ratio: float) -> InitRule:
        """Return the rule of a matrix with the variance that PyTorch's modules start with.

        `nn.Linear` draws uniformly in -b .. b with b = 1 / sqrt(inputs), whose variance is b^2 / 3.
        """
        c = self.config
        if module == "positions":
            return InitRule("constant", 0.0)
        if module == "tokens":
            return InitRule("normal", 1.0)
        if module == "down_proj":
            inputs = c.ffn_width
        elif module == "o_proj":
            inputs = c.n_heads * c.head_width
        else:
            inputs = c.d_model
        return InitRule("normal", 1 / math.sqrt(3 * inputs / width_ratio))
