"""The hyperparameters of the architecture, and what follows from them, without PyTorch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    field_validator,
    model_validator,
)

from lm.examined import Examined
from lm.fields import Config, Fixed, Logged, Needs, Varied, elsewhere
from lm.presets import PRESETS

MAX_LAYERS = 2**12
MAX_SIZE = 2**24
"""of a width"""
MAX_SHARED_EXPERTS = 8
IGNORE_INDEX = -100
"""Target that is excluded from the loss."""


class RopeScaling(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Llama 3's scaling of rotary frequencies, for contexts longer than in pre-training."""

    rope_type: Literal["llama3"] = Field(
        "llama3",
        exclude=True,
        description="the only one; for others, set init_from to a model that has it",
    )
    factor: float = Field(gt=0, le=2**24, description="divisor of the low frequencies (a ratio)")
    low_freq_factor: float = Field(
        gt=0, description="wavelengths above the original context / this are scaled"
    )
    high_freq_factor: float = Field(
        gt=0, description="wavelengths below the original context / this are kept"
    )
    original_max_position_embeddings: int = Field(
        gt=0, le=2**24, description="context length in pre-training (tokens)"
    )

    @model_validator(mode="after")
    def _check_factors(self) -> RopeScaling:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high <= low:
            problem = f"high_freq_factor {high:g} must be greater than low_freq_factor {low:g}"
            raise ValueError(problem)
        return self


T = TypeVar("T")
OfRope = Annotated[T, Needs("positions", ("rope",))]
VocabSize = Annotated[int, Field(gt=1, le=2**24)]


class LinearLayers(BaseModel, frozen=True, extra="forbid"):
    """Linear layers of the blocks that have one name and one shape."""

    kind: str
    """the last part of their names, e.g. "q_proj\""""
    out: int = Field(gt=0)
    inner: int = Field(gt=0)
    count: int = Field(gt=0)


class ModelConfig(Config, frozen=True):
    """Hyperparameters of the architecture. `model` names a preset for the keys that are not set."""

    model: Logged[str | None] = Field(
        None,
        description="preset that supplies the keys below that are not set",
        json_schema_extra=elsewhere("model.name model.flavor"),
    )
    # The limits keep the number of elements of every tensor within int64, and a model on the meta
    # device small.
    d_model: Varied[Fixed[int]] = Field(
        512,
        gt=0,
        le=2**20,
        description="width of the residual stream",
        json_schema_extra=elsewhere("hidden_size n_embd dim"),
    )
    n_heads: Varied[Fixed[int]] = Field(
        8,
        gt=0,
        le=2**14,
        description="query heads per layer; divides d_model if head_dim is null",
        json_schema_extra=elsewhere("num_attention_heads num_heads"),
    )
    n_layers: Varied[Fixed[int]] = Field(
        4,
        gt=0,
        le=MAX_LAYERS,
        description="Transformer blocks",
        json_schema_extra=elsewhere("num_layers num_hidden_layers depth"),
    )
    vocab_size: Fixed[VocabSize] = Field(
        None,
        validate_default=True,
        description="token ids; null = the tokenizer's, rounded up to a multiple of 64; 32000 for"
        " synthetic data",
        json_schema_extra=elsewhere("padded_vocab_size"),
    )
    max_seq_len: Varied[Fixed[int]] = Field(
        2048,
        gt=0,
        le=2**24,
        description="longest sequence; the length in training (tokens)",
        json_schema_extra=elsewhere(
            "block_size context_length cutoff_len max_length max_position_embeddings"
            " max_seq_length n_ctx seq_len sequence_len"
        ),
    )
    n_kv_heads: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**14,
        description="key-value heads; divides n_heads; null = n_heads",
        json_schema_extra=elsewhere("num_key_value_heads n_query_groups"),
    )
    head_dim: Fixed[int | None] = Field(
        None, gt=0, le=2**14, description="width of a head; null = d_model / n_heads"
    )
    d_ff: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**24,
        description="feed-forward width, of each expert with n_experts; null = 4 d_model, or"
        " Llama's rule with a gate",
        json_schema_extra=elsewhere("intermediate_size moe_intermediate_size expert_ff"),
    )
    norm: Fixed[Literal["layernorm", "rmsnorm"]] = Field(
        "layernorm",
        description="normalization of sublayers and output",
        json_schema_extra=elsewhere("", {"rms": "did you mean rmsnorm?"}),
    )
    norm_eps: Fixed[float] = Field(
        1e-5,
        gt=0,
        description="added to the variance in each norm",
        json_schema_extra=elsewhere("rms_norm_eps layer_norm_eps layer_norm_epsilon"),
    )
    norm_placement: Fixed[Literal["pre", "post"]] = Field(
        "pre",
        description="normalize a sublayer's input (GPT, Llama), or its output before it is added"
        " (OLMo 2)",
    )
    qk_norm: Fixed[Literal["none", "head", "projection"]] = Field(
        "none",
        description="RMSNorm of queries and keys: of each head (Qwen3), or of all heads together"
        " (OLMo 2)",
    )
    positions: Fixed[Literal["learned", "rope"]] = Field(
        "learned",
        description="learned table, or rotary embedding",
        json_schema_extra=elsewhere("", {"rotary": "did you mean rope?"}),
    )
    n_positions: Fixed[int | None] = Field(
        None,
        gt=0,
        le=2**24,
        description="positions that a pretrained model was made for, which an export states: with"
        " positions: learned the rows of its table; null = max_seq_len",
    )
    rope_theta: OfRope[Fixed[float]] = Field(
        10000.0,
        gt=0,
        description="base of the rotary wavelengths",
        json_schema_extra=elsewhere("rope_base"),
    )
    rope_scaling: OfRope[Fixed[RopeScaling | None]] = Field(
        None, description="scaling of the rotary frequencies (a mapping)"
    )
    ffn: Fixed[Literal["relu", "gelu", "swiglu"]] = Field(
        "relu",
        description="feed-forward network; gelu is GPT-2's tanh form; swiglu has a gate",
        json_schema_extra=elsewhere(
            "hidden_act",
            {"gelunew gelupytorchtanh": "did you mean gelu?", "silu": "did you mean swiglu?"},
        ),
    )
    bias: Fixed[Literal["ffn", "none", "qkv", "attention", "all"]] = Field(
        "ffn",
        description="linear layers with a bias (the head has none); qkv = query, key and value"
        " (Qwen2), attention = these and the output of attention",
    )
    n_experts: Fixed[int | None] = Field(
        None,
        gt=1,
        le=2**14,
        description="feed-forward networks per layer, of which a router chooses some for each"
        " token; null = one, without a router",
        json_schema_extra=elsewhere("num_experts num_local_experts n_routed_experts"),
    )
    experts_per_token: Annotated[Fixed[int], Needs("n_experts")] = Field(
        2,
        gt=0,
        description="experts that process a token",
        json_schema_extra=elsewhere("num_experts_per_tok moe_top_k"),
    )
    n_shared_experts: Annotated[Fixed[int | None], Needs("n_experts")] = Field(
        None,
        gt=0,
        le=MAX_SHARED_EXPERTS,
        description="experts that process every token, next to those that a router chooses"
        " (DeepSeek-V3: 1); null = none",
        json_schema_extra=elsewhere("num_shared_experts"),
    )
    router: Annotated[Fixed[Literal["softmax", "sigmoid"]], Needs("n_experts")] = Field(
        "softmax",
        description="how scores follow from the router's logits: softmax (OLMoE, Qwen3), or sigmoid"
        " (DeepSeek-V3)",
        json_schema_extra=elsewhere("scoring_func"),
    )
    norm_topk_prob: Annotated[Fixed[bool], Needs("n_experts")] = Field(
        True,
        description="divide the scores of a token's experts by their sum; OLMoE does not",
    )
    router_balance: Annotated[Fixed[Literal["none", "sequence", "bias"]], Needs("n_experts")] = (
        Field(
            "sequence",
            description="what lets experts process as many tokens each: sequence = a loss of each"
            " sequence, or of each document that is kept apart in it, bias = a bias of the scores"
            " by which experts are chosen, moved after each step (DeepSeek-V3)",
        )
    )
    router_balance_rate: Annotated[Logged[float | None], Needs("n_experts")] = Field(
        None,
        gt=0,
        description="factor of the loss of router_balance, null = 0.01; or step of its bias, null ="
        " 0.001",
        json_schema_extra=elsewhere("router_aux_loss_coef aux_loss_alpha aux_loss_coef"),
    )
    tie_embeddings: Fixed[bool] = Field(
        False,
        description="use the token embedding as the output matrix",
        json_schema_extra=elsewhere("tie_word_embeddings weight_tying"),
    )
    sliding_window: Fixed[int | None] = Field(
        None, gt=0, description="attend to the last N positions only (tokens)"
    )
    dropout: Fixed[float] = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability of zeroing an activation in training",
        json_schema_extra=elsewhere("attention_dropout dropout_rate"),
    )

    name: ClassVar[str] = "model.py"
    computed_by: ClassVar[str] = "model.py"
    examined: ClassVar[Examined] = Examined(
        hidden_states=True,
        packing=True,
        cache=True,
        full_recomputation=True,
        selective_recomputation=True,
        lora=True,
        nf4=True,
        float8=True,
        context_parallel=True,
        compilation=True,
    )
    quantized_as: ClassVar[None] = None
    experts: ClassVar[Sequence[LinearLayers]] = ()
    """with adapters: none, as `n_experts` are pretrained only"""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("model"), str):
            return values  # no preset, or a value that pydantic rejects
        if values["model"] not in PRESETS:
            hint = "python -m lm.config --presets lists all"
            nearest = difflib.get_close_matches(values["model"], PRESETS)
            if nearest:
                hint = f"the nearest are {', '.join(nearest)}; {hint}"
            remedy = "set init_from to a Hugging Face directory or name for models of transformers"
            raise ValueError(f"model: unknown preset {values['model']!r}; {hint}; {remedy}")
        return PRESETS[values["model"]] | values

    @field_validator("vocab_size", mode="before", json_schema_input_type=VocabSize | None)
    @classmethod
    def _default_vocab_size(cls, size: Any) -> Any:
        return 32000 if size is None else size

    @model_validator(mode="after")
    def _check_structure(self) -> ModelConfig:
        problems = [
            *self._find_problems_of_heads(),
            *self._find_problems_of_positions(),
            *self._find_problems_of_experts(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _find_problems_of_heads(self) -> Iterator[str]:
        if self.head_dim is None and self.d_model % self.n_heads:
            fits = sorted(_divisors(self.d_model), key=lambda n: abs(n - self.n_heads))
            problem = f"{self.n_heads} does not divide d_model {self.d_model}"
            yield f"n_heads: {problem}; nearest: {sorted(fits[:4])}"
        elif self.positions == "rope" and self.head_width % 2:
            needs = "positions: rope needs an even"
            if self.head_dim is not None:
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
        if self.rope_scaling is None or self.positions != "rope":
            return
        if self.rope_theta <= 1:
            yield "rope_theta: rope_scaling needs a base above 1"
        elif self.head_width < 4:
            yield f"rope_scaling: needs 4 or more dimensions per head, not {self.head_width}"

    def _find_problems_of_experts(self) -> Iterator[str]:
        if self.n_experts is None:
            return
        if self.experts_per_token > self.n_experts:
            yield f"experts_per_token: {self.experts_per_token} exceeds n_experts {self.n_experts}"
        if self.ffn != "swiglu":
            yield f"ffn: {self.ffn} has no experts (n_experts: {self.n_experts}); use swiglu"
        if self.has_bias("up_proj"):
            yield f"bias: {self.bias}: experts have none; use none, qkv or attention"
        if self.router_balance == "none" and self.router_balance_rate is not None:
            yield "router_balance_rate: not used (router_balance: none); remove it"

    @property
    def head_width(self) -> int:
        """`head_dim`, else d_model / n_heads."""
        if self.head_dim is not None:
            return self.head_dim
        return self.d_model // self.n_heads

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
        """Inner width of the feed-forward network, or of an expert: `d_ff`, else 4 d_model.

        With a gate Llama takes two thirds of it, rounded up to a multiple of 256: three matrices
        then have as many weights as two of the full width.
        """
        if self.d_ff is not None:
            return self.d_ff
        if self.ffn == "swiglu":
            return 256 * math.ceil(8 * self.d_model / 3 / 256)
        return 4 * self.d_model

    def with_layers(self, n_layers: int) -> ModelConfig:
        """Return the config of the first `n_layers` blocks."""
        return self.model_copy(update={"n_layers": n_layers})

    def structure(self) -> dict[str, Any]:
        """Return the hyperparameters that weights depend on, with defaults filled in.

        Excludes `model`, `dropout`, `max_seq_len` and `router_balance_rate`, and `n_positions`
        without a learned table.
        """
        excluded = {"model", "dropout", "max_seq_len", "router_balance_rate", "n_positions"}
        derived = {"d_ff": self.ffn_width, "n_kv_heads": self.kv_heads, "head_dim": self.head_width}
        if self.positions == "learned":
            derived["n_positions"] = self.context_length
        return self.model_dump(mode="json", exclude=excluded) | derived

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block by name, each with the shape of its weight, `(out, in)`."""
        d = self.d_model
        q = self.n_heads * self.head_width
        kv = self.kv_heads * self.head_width
        shapes = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        if self.n_experts is None:
            return shapes | self.ffn_shapes
        shapes["router"] = (self.n_experts, d)
        if self.n_shared_experts is not None:  # one network, as wide as all of them
            width = self.n_shared_experts * self.ffn_width
            shapes |= {"shared_gate_proj": (width, d), "shared_up_proj": (width, d)}
            shapes["shared_down_proj"] = (d, width)
        return shapes

    @property
    def linear_layers(self) -> list[LinearLayers]:
        """The linear layers of all blocks, without those of experts."""
        layers: list[LinearLayers] = []
        for kind, (out, inner) in self.layer_shapes.items():
            layers.append(LinearLayers(kind=kind, out=out, inner=inner, count=self.n_layers))
        return layers

    @property
    def ffn_shapes(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a feed-forward network, or of each expert, as `layer_shapes`."""
        shapes: dict[str, tuple[int, int]] = {}
        if self.ffn == "swiglu":
            shapes["gate_proj"] = (self.ffn_width, self.d_model)
        shapes["up_proj"] = (self.ffn_width, self.d_model)
        shapes["down_proj"] = (self.d_model, self.ffn_width)
        return shapes

    @property
    def expert_size(self) -> int:
        """Number of weights of an expert."""
        return sum(out * inner for out, inner in self.ffn_shapes.values())

    def has_bias(self, layer: str) -> bool:
        """Return whether the linear layer of this name has a bias."""
        if layer in ("q_proj", "k_proj", "v_proj"):
            return self.bias in ("qkv", "attention", "all")
        if layer == "o_proj":
            return self.bias in ("attention", "all")
        if layer == "router":
            return False
        return self.bias in ("ffn", "all")

    @property
    def n_parameters(self) -> int:
        """Number of parameters: of the embedding, the blocks, and the head."""
        d = self.d_model
        embedding = self.vocab_size * d
        if self.positions == "learned":
            embedding += self.context_length * d
        norm = d
        if self.norm == "layernorm" and self.bias != "none":
            norm = 2 * d
        head = norm
        if not self.tie_embeddings:
            head += self.vocab_size * d

        block = 0
        if self.n_experts is not None:
            block = self.n_experts * self.expert_size
        block += 2 * norm
        for layer, (out, inner) in self.layer_shapes.items():
            block += out * inner
            if self.has_bias(layer):
                block += out
        if self.qk_norm == "head":
            block += 2 * self.head_width
        elif self.qk_norm == "projection":
            block += (self.n_heads + self.kv_heads) * self.head_width
        return embedding + self.n_layers * block + head

    @property
    def n_active_parameters(self) -> int:
        """Number of parameters that process a token: all but those of other experts."""
        n_others = 0
        if self.n_experts is not None:
            n_others = self.n_experts - self.experts_per_token
        return self.n_parameters - self.n_layers * n_others * self.expert_size

    @property
    def balance_rate(self) -> float:
        """`router_balance_rate`: that of Switch Transformers, or of DeepSeek-V3's bias."""
        if self.router_balance_rate is not None:
            return self.router_balance_rate
        if self.router_balance == "bias":
            return 0.001
        return 0.01

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token of forward and backward over sequences of `seq_len` tokens.

        A product of an activation and a weight is two FLOPs in forward (multiply and add) and twice
        that in backward (for the gradients of both): six FLOPs per weight. The head is a product,
        the embedding a lookup. Attention has two more products per key that a query attends to, for
        its score and for its value, with K numbers in each of H heads: 12 H K FLOPs per key.
        Of a mixture, a token's weights are those of its experts. Recomputation is not counted.
        Source: Chowdhery et al., PaLM (2022), appendix B.
        """
        in_block = sum(out * inner for out, inner in self.layer_shapes.values())
        if self.n_experts is not None:
            in_block += self.experts_per_token * self.expert_size
        weights = self.n_layers * in_block + self.vocab_size * self.d_model
        per_key = 12 * self.n_layers * self.n_heads * self.head_width
        return 6 * weights + per_key * self.mean_keys(seq_len)

    def mean_keys(self, seq_len: int) -> float:
        """Return to how many keys a query attends, on average over `seq_len` tokens."""
        # Query t attends to min(t, window) keys. Over a sequence these are the triangle of the
        # first `window` queries, window^2 / 2, and a rectangle of (seq_len - window) x window;
        # the mean per query is their sum / seq_len.
        window = seq_len
        if self.sliding_window is not None:
            window = min(self.sliding_window, seq_len)
        return window - window**2 / (2 * seq_len)


def _divisors(number: int) -> list[int]:
    """Return the divisors of `number` up to 1024."""
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]
