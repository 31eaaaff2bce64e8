"""Decoder-only Transformer in plain PyTorch.

The default is the architecture of Determined's FSDP example: learned positions, LayerNorm and a
ReLU feed-forward network. Other configurations are GPT-2 (GELU, tied embeddings, dropout), Llama
and Mistral (RoPE, RMSNorm, SwiGLU, grouped-query attention, sliding window), Qwen2 and Qwen3
(biases on query, key and value; norms on query and key), OLMo 2 (norms after the sublayers), and
OLMoE, Qwen3-MoE and MiniMax-M2 (mixtures of experts).

Reading order: `ModelConfig` in lm/model_config.py, then `Transformer.forward` at the end, then what
it uses, section by section: inputs of attention, rotary embedding, masks, layers, head and loss.
Attention itself is in lm/attention.py.
The module has no ranks, meshes or precision policies. A trainer reads the structure from
`Transformer.fsdp_units`, `Transformer.init_rule` and `ModelConfig.flops_per_token`.

Shapes: B batch, T sequence length, S keys attended to (cached ones included), D d_model, H query
heads, G key-value heads, K head_width, F d_ff, V vocab_size. In mixtures of experts N = B T tokens,
E n_experts, and k experts_per_token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import (
    Mask,
    SequencePart,
    attend,
    find_document_starts,
    find_key_bounds,
    make_dense,
    make_mask,
    skips_hidden_keys,
)
from lm.grouped_mm import grouped_mm, sort_by_expert
from lm.model_config import IGNORE_INDEX, ModelConfig, RopeScaling

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
    """Inputs of attention that all layers share."""

    rope: tuple[Tensor, Tensor] | None
    """cosine and sine of each position's angles, `(T, 1, K/2)` or `(B, T, 1, K/2)`, float32; None =
    positions are learned"""
    mask: Mask | None
    """None = as `is_causal` says"""
    is_causal: bool
    """without a mask: attend to the keys up to the query's position, else to all"""
    part: SequencePart | None = None
    """None = the sequences are complete"""


# ---- rotary embedding


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the rotary frequencies `(K/2,)`, float32, in radians per position.

    Sources: Su et al., RoFormer (2021), equation 15; of the scaling Llama 3.1.
    """
    width = config.head_width
    dims = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rope_theta ** (dims / width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    kept = _kept_fraction(scaling, frequencies)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_angles(config: ModelConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the angles, see `AttentionInputs.rope`.

    Args:
        position_ids: `(T,)` or `(B, T)`.
    """
    frequencies = rope_frequencies(config, position_ids.device)
    angles = position_ids.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def _kept_fraction(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Return the fraction `(K/2,)` of each frequency that is not scaled.

    It is 0 for wavelengths longer than the original context / low_freq_factor, 1 for those shorter
    than the original context / high_freq_factor, and interpolated between them.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Turns within the original context: few mean a long wavelength.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x[i], x[i + K/2]) of `x` by their position's angles, in float32.

    Args:
        x: `(B, T, heads, K)`.
        rope: see `AttentionInputs`.
    """
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return rotated.to(x.dtype)


# ---- masks


def mask_cached(window: int | None, indices: Tensor, end: int) -> Tensor | None:
    """Return the mask of `indices`, `(T,)`, to `end` keys, of which some are cached, `(T, S)`.

    Args:
        window: of sliding-window attention; None = full attention.
    """
    is_windowed = window is not None and end > window
    if not is_windowed and (len(indices) == 1 or len(indices) == end):
        return None
    distance = indices[:, None] - torch.arange(end, device=indices.device)
    mask = distance >= 0
    if window is not None and is_windowed:
        mask = mask & (distance < window)
    return mask


# ---- layers


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of sublayers and output that `config` selects."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias != "none")
    return nn.RMSNorm(config.d_model, eps=config.norm_eps)


def make_linear(config: ModelConfig, name: str) -> nn.Linear:
    """Return the linear layer of a block that `config` calls `name`."""
    out, inner = config.layer_shapes[name]
    return nn.Linear(inner, out, bias=config.has_bias(name))


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., 2023), with fused kernels."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.q_proj = make_linear(config, "q_proj")
        self.k_proj = make_linear(config, "k_proj")
        self.v_proj = make_linear(config, "v_proj")
        self.o_proj = make_linear(config, "o_proj")
        if config.qk_norm == "projection":
            self.q_norm = nn.RMSNorm(self.q_proj.out_features, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(self.k_proj.out_features, eps=config.norm_eps)
        elif config.qk_norm == "head":
            self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)

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
            q = rotate(q, inputs.rope)
            k = rotate(k, inputs.rope)
        q = q.transpose(1, 2)  # B H T K
        k = k.transpose(1, 2)  # B G T K
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # B G S K
        gather = None
        if inputs.part is not None:
            gather = inputs.part.gather
        y = attend(
            q,
            k,
            v,
            inputs.mask,
            is_causal=inputs.is_causal,
            dropout=c.dropout if self.training else 0.0,
            gather=gather,
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, c.n_heads * c.head_width))


class FeedForward(nn.Module):
    """Two linear layers with ReLU or GELU between them, or SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, prefix: Literal["", "shared_"] = "") -> None:
        super().__init__()
        self.kind = config.ffn
        if config.ffn == "swiglu":
            self.gate_proj = make_linear(config, f"{prefix}gate_proj")
        self.up_proj = make_linear(config, f"{prefix}up_proj")
        self.down_proj = make_linear(config, f"{prefix}down_proj")

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        if self.kind == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        x = self.up_proj(x)  # B T F
        if self.kind == "relu":
            return self.down_proj(F.relu(x))
        return self.down_proj(F.gelu(x, approximate="tanh"))


class RouterInputs(NamedTuple):
    """Inputs of a layer's router besides the tokens."""

    bias: Tensor | None
    """`(E,)` float32, of the scores by which experts are chosen; None = 0"""
    is_counted: Tensor | None
    """`(N,)`, the tokens that are counted; None = none are, outside of training"""
    documents: Tensor | None
    """`(B, S)` of complete sequences, for each token the index of the first one of its document
    among their B S; None with `is_counted`"""
    part: SequencePart | None = None
    """None = the sequences are complete"""


class Routed(NamedTuple):
    """What the router of a layer did, or in `Transformer` those of all."""

    balance_loss: Tensor
    """scalar, a sum like the loss of targets, float32; 0 without `router_balance: sequence`"""
    counts: Tensor
    """`(E,)` int64, or of all layers `(n_layers, E)`: how many of the tokens each expert has
    processed"""


class ExpertLinear(nn.Module):
    """A linear layer without bias of each expert."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        assert config.n_experts is not None
        self.weight = nn.Parameter(torch.empty(config.n_experts, *config.ffn_shapes[name]))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the product of each row, `(N k, out)`.

        Args:
            x: `(N k, in)`, ordered by expert.
            ends: `(E,)`, where the rows of each expert end.
        """
        return grouped_mm(x, self.weight.mT, ends)


class Experts(nn.Module):
    """SwiGLU networks, of which a router chooses k for each token (Shazeer et al., 2017).

    Shared experts process every token next to these (Dai et al., DeepSeekMoE, 2024).
    No token is dropped, whatever the router chooses. That experts process as many tokens each is
    the aim of one of two methods of DeepSeek-V3 (2024), section 2.1.2. Both give the same result
    on any number of ranks and with any micro-batches, which a loss of the tokens of a micro-batch,
    as Switch Transformers' or Hugging Face's, does not: it is not a sum over tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = make_linear(config, "router")
        self.gate_proj = ExpertLinear(config, "gate_proj")
        self.up_proj = ExpertLinear(config, "up_proj")
        self.down_proj = ExpertLinear(config, "down_proj")
        self.shared = None
        if config.n_shared_experts is not None:
            self.shared = FeedForward(config, "shared_")

    def forward(self, x: Tensor, inputs: RouterInputs) -> tuple[Tensor, Routed | None]:
        """Return the sum of the outputs of each token's experts, `(B, T, D)`."""
        c = self.config
        tokens = x.flatten(0, 1)  # N D
        # In float32: rounded to bfloat16, the scores of many experts would be equal.
        logits = F.linear(tokens.float(), self.router.weight.float())  # N E
        scores = logits.softmax(dim=-1) if c.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach(), inputs.bias)  # N k
        weights = scores.gather(-1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        y = self._feed(tokens, weights, chosen).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        if inputs.is_counted is None:
            return y, None
        return y, self._count(scores, chosen, inputs)

    def _choose(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Return the experts of each token, `(N, k)`."""
        if bias is not None:
            scores = scores + bias
        return scores.topk(self.config.experts_per_token).indices

    def _feed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of the outputs of the `chosen` experts times their `weights`, `(N, D)`."""
        routes = sort_by_expert(chosen, len(self.router.weight))
        ends = routes.ends
        x = routes.copy_to_experts(tokens)  # N k, D
        hidden = F.silu(self.gate_proj(x, ends)) * self.up_proj(x, ends)  # N k, F
        # Here they multiply fewer numbers than in the output.
        hidden = hidden * routes.sort(weights).to(x.dtype)
        return routes.sum_over_experts(self.down_proj(hidden, ends))

    def _count(self, scores: Tensor, chosen: Tensor, inputs: RouterInputs) -> Routed:
        """Return how many tokens each expert has processed, and the balance loss.

        The loss of a document of n tokens is the sum over experts of f P, equations 17 to 20. f is
        the fraction of tokens that an expert processes, over k / E, which is even; P is the mean of
        its part of the scores. Times n, they are summed over documents: every token adds its parts
        times the f of its document, which are sums of integers, exact in any order.
        """
        c = self.config
        assert inputs.is_counted is not None
        assert inputs.documents is not None
        is_counted = inputs.is_counted[:, None].float()  # N 1
        is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * is_counted  # N E
        loss = scores.new_zeros(())
        if c.router_balance == "sequence":
            n_experts = scores.shape[-1]
            complete = is_chosen  # B S, E
            own_documents = inputs.documents
            if inputs.part is not None:
                batch = len(inputs.documents)
                own = is_chosen.view(batch, 1, -1, n_experts)
                complete = inputs.part.gather(own).view(-1, n_experts)
                own_documents = inputs.part.take(inputs.documents)
            counts = torch.zeros_like(complete).index_add(0, inputs.documents.flatten(), complete)
            even = counts.sum(dim=-1, keepdim=True).clamp(min=1) / n_experts
            f = (counts / even)[own_documents.flatten()]  # N E
            parts = scores / scores.sum(dim=-1, keepdim=True) * is_counted  # N E
            loss = c.balance_rate * (f * parts).sum()
        return Routed(loss, is_chosen.sum(dim=0).long())


class BlockOutput(NamedTuple):
    """What a block computes."""

    x: Tensor
    """`(B, T, D)`, the residual stream"""
    routed: Routed | None
    """None = without experts, or outside of training"""


class Block(nn.Module):
    """Transformer block: attention, then a feed-forward network, or a mixture of them.

    Each has a norm, of its input or of its output, and is added to the residual stream.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.normalizes_output = config.norm_placement == "post"
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.ffn_norm = make_norm(config)
        if config.n_experts is None:
            self.ffn = FeedForward(config)
        else:
            self.ffn = Experts(config)

    def forward(
        self,
        x: Tensor,
        inputs: AttentionInputs,
        cache: KVCache | None = None,
        router_inputs: RouterInputs | None = None,
    ) -> BlockOutput:
        if self.normalizes_output:
            attended = self.attention_norm(self.attention(x, inputs, cache))
        else:
            attended = self.attention(self.attention_norm(x), inputs, cache)
        x = x + F.dropout(attended, self.dropout, self.training)
        ffn_input = x
        if not self.normalizes_output:
            ffn_input = self.ffn_norm(x)
        routed = None
        if isinstance(self.ffn, Experts):
            assert router_inputs is not None
            fed, routed = self.ffn(ffn_input, router_inputs)
        else:
            fed = self.ffn(ffn_input)
        if self.normalizes_output:
            fed = self.ffn_norm(fed)
        x = x + F.dropout(fed, self.dropout, self.training)
        return BlockOutput(x, routed)


class Embedding(nn.Module):
    """Token embeddings, plus position embeddings if positions are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)

    def forward(
        self, tokens: Tensor, position_ids: Tensor
    ) -> Tensor:  # (B, T), (T,) or (B, T) -> (B, T, D)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        return F.dropout(x, self.dropout, self.training)


# ---- head and loss


def find_logits_limit(device: torch.device, memory: int | None = None) -> int:
    """Return the most logits in memory at once.

    A CPU's cache holds so few. On a GPU they take, with their gradients, up to 4 bytes each, and at
    most a sixteenth of its memory; and they have 32-bit indices.

    Args:
        memory: of the GPU (bytes); None = of `device`.
    """
    if device.type != "cuda":
        return 2**24
    total: int = memory or torch.cuda.get_device_properties(device).total_memory
    return min(2**31 - 1, total // (16 * 4))


ChunkCrossEntropy = Callable[
    [Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor, Tensor]
]
"""`chunk_cross_entropy`, or its compiled form"""


def chunk_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    needs_grad: bool,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p(target) for the logits `x @ weight.T`, and gradients of it.

    With p the probabilities of the tokens, the gradient of the logits is p - one_hot(target).

    Args:
        x: `(N, D)`.
        weight: `(V, D)`.
        targets: `(N,)`.
        needs_grad: if false, the gradients are empty tensors; that of the logits also is if
            `weight` is frozen.
        factors: `(N,)`, of the terms in the sum whose gradients are returned; None = 1.

    Returns:
        The sum in nats, a float32 scalar, and the gradients of `x` and of the logits, `(N, V)`,
        whose product with `x` is that of `weight`.
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
    grad = grad.masked_fill_(~counts, 0)
    if factors is not None:
        grad = grad.mul_(factors[:, None])
    grad = grad.to(x.dtype)
    x_grad = grad @ weight
    if not weight.requires_grad:
        return loss_sum, x_grad, x.new_empty(0)
    return loss_sum, x_grad, grad


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total + a @ b` in float32, in the memory of `total`; None = 0.

    A GPU adds 16-bit products to `total` without rounding them.
    """
    if a.is_cuda and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = a @ b
    if total is None:
        return product.float()
    return total.add_(product)


def even_chunk_size(total: int, limit: int) -> int:
    """Return a chunk size of at most `limit` that divides `total` evenly, if one near it does."""
    least = math.ceil(total / limit)
    for n_chunks in range(least, 2 * least):
        if total % n_chunks == 0:
            return total // n_chunks
    return math.ceil(total / least)


def cross_entropy_by_chunks(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    size: int,
    needs_grad: bool,
    function: ChunkCrossEntropy,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p(target), and its gradients of `x` and `weight`.

    Of chunks of `size` targets, to hold few logits at once. The gradient of `weight` is float32 if
    there are several.

    Args:
        function: `chunk_cross_entropy`, which also describes all other arguments.
    """
    loss_sum = torch.zeros((), device=x.device)
    x_grads: list[Tensor] = []
    weight_grad: Tensor | None = None
    for start in range(0, len(x), size):
        chunk = slice(start, start + size)
        chunk_factors = None
        if factors is not None:
            chunk_factors = factors[chunk]
        chunk_sum, x_grad, logits_grad = function(
            x[chunk], weight, targets[chunk], needs_grad, chunk_factors
        )
        loss_sum += chunk_sum
        x_grads.append(x_grad)
        if len(logits_grad) == 0:
            continue
        if size >= len(x):  # the only chunk
            weight_grad = logits_grad.T @ x
        else:  # a sum of many terms
            weight_grad = add_product(weight_grad, logits_grad.T, x[chunk])
        del logits_grad  # before there are those of the next chunk
    if weight_grad is None:
        weight_grad = x.new_empty(0)
    return loss_sum, torch.cat(x_grads), weight_grad


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
        """Return the sum in nats, a float32 scalar; see `cross_entropy_by_chunks`."""
        loss_sum, x_grad, weight_grad = cross_entropy_by_chunks(
            x, weight, targets, size, needs_grad, function
        )
        if needs_grad:
            ctx.save_for_backward(x_grad, weight_grad)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        scaled = torch.empty_like(weight_grad, dtype=x_grad.dtype)
        torch.mul(weight_grad, grad, out=scaled)  # rounds what it writes, in one pass
        return x_grad * grad, scaled, None, None, None, None


class TargetScores(torch.autograd.Function):
    """Each target's log-probability, and whether no token is more likely, in chunks.

    What multiplies a log-probability's gradient is known only after the forward pass, so backward
    computes the logits again.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, size: int
    ) -> Tensor:
        """Return the scores, `(2, N)` float32; see `score_targets`."""
        ctx.save_for_backward(x, weight, targets)
        ctx.size = size
        return score_targets(x, weight, targets, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, targets = ctx.saved_tensors
        if len(x) == 0:  # of a part of sequences
            return torch.zeros_like(x), torch.zeros_like(weight), None, None
        _, x_grad, weight_grad = cross_entropy_by_chunks(
            x, weight, targets, ctx.size, True, chunk_cross_entropy, factors=-grad[0]
        )
        return x_grad, weight_grad.to(weight.dtype), None, None


class ChunkedLoss:
    """The loss, or scores of targets, from few logits at once."""

    def __init__(self) -> None:
        self.chunk_cross_entropy: ChunkCrossEntropy = chunk_cross_entropy
        """or its compiled form"""
        self.logits_limit: int | None = None
        """most logits in memory at once; None = `find_logits_limit`"""

    def max_rows(self, weight: Tensor) -> int:
        """Return how many tokens' logits can be in memory at once."""
        limit = self.logits_limit
        if limit is None:
            limit = find_logits_limit(weight.device)
        return max(1, limit // len(weight))

    def score(self, x: Tensor, weight: Tensor, targets: Tensor, training: bool) -> Tensor:
        """Return the scores of targets, `(2, N)` float32; see `score_targets`."""
        size = even_chunk_size(max(1, len(x)), self.max_rows(weight))
        if not training:
            size = max(1, self.max_rows(weight) // 16)  # no slower without gradients
        return cast(Tensor, TargetScores.apply(x, weight, targets, size))

    def sum_losses(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of -log p(target) in nats, a float32 scalar; see `chunk_cross_entropy`."""
        if x.dtype == torch.float16:
            # It cannot hold a chunk's gradients before the loss scale is applied to them.
            logits = F.linear(x, weight).float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        size = even_chunk_size(len(x), self.max_rows(weight))
        needs_grad = torch.is_grad_enabled()
        loss_sum = LinearCrossEntropy.apply(
            x, weight, targets, size, needs_grad, self.chunk_cross_entropy
        )
        return cast(Tensor, loss_sum)


class Head(nn.Module):
    """Final norm and output matrix, and the loss, so that the logits never leave this module."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.output = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.loss = ChunkedLoss()

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
        if targets is None:
            return F.linear(x, weight)
        if queries is not None:
            return self.loss.score(x, weight, targets, self.training)
        return self.loss.sum_losses(x.flatten(0, 1), weight, targets.flatten())


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
        scores.append(score_logits(F.linear(x_chunk, weight), target_chunk))
    return torch.cat(scores, dim=1)


def score_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return what `score_targets` does, from `logits` `(N, V)`."""
    logits = logits.float()
    target_logits = logits.gather(-1, targets[:, None]).squeeze(-1)
    log_probs = target_logits - logits.logsumexp(dim=-1)
    is_greedy = target_logits >= logits.amax(dim=-1)
    return torch.stack([log_probs, is_greedy.float()])


# ---- the model


class InitRule(NamedTuple):
    """How to initialize a parameter."""

    kind: Literal["constant", "normal", "uniform"]
    value: float
    """the constant, the standard deviation, or the bound of -bound .. bound"""


class RoutedLoss(NamedTuple):
    """The loss of a mixture of experts in training."""

    loss_sum: Tensor
    """of the targets, as without experts"""
    routed: Routed
    """of all layers; its `balance_loss` is to be minimized, too"""


class Transformer(nn.Module):
    """Decoder-only language model."""

    router_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        router_bias = None
        if config.n_experts is not None and config.router_balance == "bias":
            router_bias = torch.zeros(config.n_layers, config.n_experts)
        self.register_buffer("router_bias", router_bias)
        """of each layer, see `RouterInputs`; moved between steps, and in every checkpoint"""
        self.head = Head(config)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        queries: Tensor | None = None,
        part: SequencePart | None = None,
    ) -> Tensor | RoutedLoss:
        """Return the loss, the scores of targets, the next token's logits, or all logits.

        Args:
            tokens: `(B, T)` token ids.
            targets: `(B, T)` token ids, or `IGNORE_INDEX` for tokens that are excluded from the
                loss.
            document_ids: `(B, T)`, equal for adjacent tokens of one document. Attention stays
                within a document. None = one document per sequence.
            cache: keys and values of the tokens before `tokens`; is extended by T.
            queries: `(N,)`, the tokens that `targets`, then `(N,)`, come after, as indices into
                the flattened `tokens`.
            part: where `tokens` are in longer sequences, and what they attend to there; then
                `document_ids`, which are needed, are those of the complete sequences, `(B, S)`.
                None = `tokens` are complete.

        Returns:
            With `queries`: of each target its log-probability in nats, which has a gradient, and
            1.0 if no token is more likely, else 0.0, `(2, N)` float32. With `targets` alone: the
            sum of -log p(target) in nats, a float32 scalar. It is a sum, so that ranks and
            micro-steps can be averaged exactly. While a mixture of experts trains, it is in a
            `RoutedLoss`. With `cache`: the logits after the last token, `(B, V)`. Otherwise all
            logits, `(B, T, V)`.

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
        if part is not None:
            assert document_ids is not None
            end = document_ids.shape[1]
        indices = torch.arange(start, end, device=tokens.device)  # T, in the sequence
        document_start = None
        position_ids = indices
        if document_ids is not None:
            document_start = find_document_starts(document_ids, indices)  # B T
            position_ids = indices - document_start  # restarts in each document

        if cache is None:
            mask = self._make_mask(tokens, document_start, part, is_task=queries is not None)
        else:
            mask = mask_cached(c.sliding_window, indices, end)
        if part is not None:
            position_ids = part.take(position_ids)
        x = self.embedding(tokens, position_ids)  # B T D
        inputs = self._attention_inputs(x, position_ids, mask, part)
        counted = None
        if self.training and queries is None:
            counted = targets
        router_inputs = self._router_inputs(counted, document_start, part, x.device)
        routed: list[Routed] = []  # by layer
        for block, router_inputs_here in zip(self.blocks, router_inputs, strict=True):
            x, routed_here = block(x, inputs, cache, router_inputs_here)
            if routed_here is not None:
                routed.append(routed_here)
        if cache is not None:
            cache.length = end
            x = x[:, -1]  # B D
        tied = None
        if c.tie_embeddings:
            tied = self.embedding.tokens.weight
        output = self.head(x, targets, tied, queries)
        if not routed:
            return output
        losses, counts = zip(*routed, strict=True)
        return RoutedLoss(output, Routed(torch.stack(losses).sum(), torch.stack(counts)))

    def _make_mask(
        self,
        tokens: Tensor,
        document_start: Tensor | None,
        part: SequencePart | None,
        is_task: bool,
    ) -> Mask | None:
        """Return the mask without a cache; None = each query attends to all keys before it.

        Args:
            tokens: `(B, T)`.
            document_start: of complete sequences, see `find_document_starts`; None = each is one
                document.
            part: None = `tokens` are complete sequences.
            is_task: whether the sequences are those of a task.
        """
        c = self.config
        is_one_document = document_start is None
        if document_start is None:
            if c.sliding_window is None or tokens.shape[1] <= c.sliding_window:
                return None
            document_start = torch.zeros_like(tokens)
        n_keys = document_start.shape[1]
        bounds = find_key_bounds(document_start, c.sliding_window)
        if part is not None:
            bounds = part.take(bounds)
        dropout = c.dropout if self.training else 0.0
        skips = skips_hidden_keys(tokens.device, c.head_width, dropout)
        if is_task and is_one_document and tokens.is_cuda:
            # Tasks compile nothing, as their lengths differ. FlexAttention is slow then.
            skips = False
        if skips:
            return make_mask(bounds, n_keys)
        return make_dense(bounds[:, None], n_keys)

    def _router_inputs(
        self,
        targets: Tensor | None,
        document_start: Tensor | None,
        part: SequencePart | None,
        device: torch.device,
    ) -> Sequence[RouterInputs | None]:
        """Return the inputs of each layer's router; None = it has none.

        Args:
            targets: `(B, T)`, whose tokens are counted unless they are ignored; None = none are.
            document_start: of complete sequences, see `find_document_starts`; None = each is one
                document.
            part: see `RouterInputs`.
        """
        if self.config.n_experts is None:
            return [None] * len(self.blocks)
        is_counted = None
        documents = None
        if targets is not None:
            is_counted = (targets != IGNORE_INDEX).flatten()
            if document_start is None:
                document_start = torch.zeros_like(targets)
            batch_size, length = document_start.shape
            documents = document_start + length * torch.arange(batch_size, device=device)[:, None]
        if self.router_bias is None:
            return [RouterInputs(None, is_counted, documents, part)] * len(self.blocks)
        biases = self.router_bias.to(device)  # with `cpu_offload` it is on the host
        return [RouterInputs(bias, is_counted, documents, part) for bias in biases.unbind()]

    def _attention_inputs(
        self, x: Tensor, position_ids: Tensor, mask: Mask | None, part: SequencePart | None
    ) -> AttentionInputs:
        """Return the inputs of attention that all layers share.

        Args:
            x: `(B, T, D)`, the input of the first layer.
            mask, part: see `AttentionInputs`.
        """
        c = self.config
        rope = None
        if c.positions == "rope":
            rope = rope_angles(c, position_ids)
        return AttentionInputs(
            rope=rope,
            mask=mask,
            is_causal=mask is None and x.shape[1] > 1,
            part=part,
        )

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for `capacity` tokens."""
        return KVCache(capacity)

    @property
    def loss(self) -> ChunkedLoss:
        """What computes the loss, in chunks of logits."""
        return self.head.loss

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules to shard separately, in forward order; the root holds the rest.

        A tied output matrix is used at both ends of the model, so embedding and head belong to the
        root.
        """
        if self.config.tie_embeddings:
            return list(self.blocks)
        return [self.embedding, *self.blocks, self.head]

    def kept_in_float32(self, _dtype: torch.dtype | None) -> set[nn.Parameter]:
        """Return the parameters that are computed with in float32, whatever the dtype is: none."""
        return set()

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
            return InitRule("constant", 1.0)
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
