"""LoRA: low-rank adapters on the linear layers of a frozen model (Hu et al., 2021).

An adapted layer computes `x W^T + b + (lora_alpha / lora_rank) dropout(x) A^T B^T`. W `(out, in)`,
b and all other weights of the model, the base, are frozen and have the compute dtype, or W
`base_dtype`; A `(lora_rank, in)` and B `(out, lora_rank)` are trained in float32. Base weights keep
their names; A and B of `q_proj.weight` are `q_proj.lora_A.weight` and `q_proj.lora_B.weight`, as in
PEFT. With `use_rslora`, the scale is `lora_alpha / sqrt(lora_rank)`, so that the output does not
shrink with the rank (Kalajdzievski, 2023).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lm.fields import Config, Fixed, Needs
from lm.training import nf4
from lm.training.nf4 import NF4Linear
from model import Block, InitRule, ModelConfig, Transformer

BLOCK_KEYS = ModelConfig.model_fields.keys() - {"model", "n_layers"}
"""hyperparameters that a block depends on"""


UNSUPPORTED = {
    "modules_to_save": "adapters are trained alone, without complete layers next to them",
    "use_dora": "DoRA is not supported; it needs the norms of the merged weights at each step",
}
"""keys of PEFT that are refused -> the reason"""


T = TypeVar("T")
OfAdapters = Annotated[T, Needs("lora_rank")]


class LoraConfig(Config, frozen=True):
    """Low-rank adapters, trained instead of the weights of `init_from`."""

    lora_rank: Fixed[int | None] = Field(
        None,
        gt=0,
        description="rank of the adapters; null = train all weights",
        json_schema_extra={"aliases": ["lora_r"]},
    )
    lora_alpha: OfAdapters[Fixed[float]] = Field(
        16.0, gt=0, description="the adapters' output is scaled by lora_alpha / lora_rank"
    )
    use_rslora: OfAdapters[Fixed[bool]] = Field(
        False, description="scale it by lora_alpha / sqrt(lora_rank) instead, for high ranks"
    )
    lora_dropout: OfAdapters[Fixed[float]] = Field(
        0.0, ge=0, lt=1, description="probability of zeroing an input of the adapters"
    )
    lora_targets: OfAdapters[Fixed[list[str] | None]] = Field(
        None,
        min_length=1,
        description="layers with adapters, e.g. [q_proj, v_proj]; null = the blocks' linear layers",
        json_schema_extra={"aliases": ["target_modules", "lora_target_modules"]},
    )
    base_dtype: OfAdapters[Fixed[Literal["nf4"] | None]] = Field(
        None,
        description="dtype of the blocks' frozen matrices; nf4 = 4.5 bits a weight, as in QLoRA;"
        " null = the compute dtype",
        json_schema_extra={"aliases": ["load_in_4bit", "bnb_4bit_quant_type"]},
    )

    @property
    def lora_scale(self) -> float:
        """By which the adapters' output is multiplied."""
        assert self.lora_rank is not None
        return self.lora_alpha / self.rank_divisor(self.lora_rank)

    def rank_divisor(self, rank: int) -> float:
        """Return what an alpha is divided by for adapters of `rank`."""
        if self.use_rslora:
            return math.sqrt(rank)
        return rank


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, base: nn.Linear | NF4Linear, config: LoraConfig) -> None:
        super().__init__()
        rank = config.lora_rank
        assert rank is not None
        self.weight = base.weight
        self.bias = base.bias
        self.product = nf4.linear if isinstance(base, NF4Linear) else F.linear
        self.scale = config.lora_scale
        self.dropout = config.lora_dropout
        options: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **options)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        low_rank = self.lora_A(F.dropout(x, self.dropout, self.training))
        low_rank = low_rank * self.scale  # the smallest tensor to scale
        return self.product(x, self.weight, self.bias) + self.lora_B(low_rank)


def add_adapters(model: Transformer, config: LoraConfig, dtype: torch.dtype | None) -> Transformer:
    """Freeze `model` in `dtype` (None = float32) and `base_dtype`, and add adapters, in place.

    Does nothing if `lora_rank` is null.
    """
    if config.lora_rank is None:
        return model
    for parameter in model.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype or torch.float32)
    for parent in list(model.blocks.modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, nn.Linear):
                continue
            frozen = NF4Linear(layer) if config.base_dtype == "nf4" else layer
            is_target = config.lora_targets is None or name in config.lora_targets
            parent.register_module(name, LoraLinear(frozen, config) if is_target else frozen)
    return model


def adapter_init_rule(name: str, parameter: Tensor) -> InitRule | None:
    """Return how to initialize the adapter `name`; None if it is not an adapter.

    PEFT's values: B is 0, and A is `kaiming_uniform_(a=sqrt(5))`, whose bound is 1 / sqrt(in).
    """
    module = name.split(".")[-2]
    if module == "lora_A":
        return InitRule("uniform", 1 / math.sqrt(parameter.shape[1]))
    if module == "lora_B":
        return InitRule("constant", 0.0)
    return None


def layer_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return `(out, in)` of the linear layers of a block, by name."""
    return _layer_shapes(model.model_dump_json(include=BLOCK_KEYS))


@functools.lru_cache(maxsize=256)
def _layer_shapes(config: str) -> dict[str, tuple[int, int]]:
    with torch.device("meta"):
        block = Block(ModelConfig.model_validate_json(config), 0)
    shapes = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear):
            name = path.rpartition(".")[2]
            shapes[name] = (module.out_features, module.in_features)
    return shapes


def adapter_problems(config: LoraConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values do not fit the model, with the reason and the remedy."""
    shapes = layer_shapes(model)
    if config.base_dtype == "nf4":
        for name, (out, inner) in shapes.items():
            if inner % nf4.BLOCK:
                problem = f"{inner} inputs of {name} ({out} x {inner}) are not a multiple of"
                yield "base_dtype", f"nf4: {problem} {nf4.BLOCK}; remove base_dtype"
    targets = list(dict.fromkeys(config.lora_targets or shapes))
    for name in targets:
        if name not in shapes:
            yield "lora_targets", f"this model has no layer {name}; choose from {', '.join(shapes)}"
    known = [name for name in targets if name in shapes]
    if not known or config.lora_rank is None:
        return
    smallest = min(known, key=lambda name: min(shapes[name]))
    out, inner = shapes[smallest]
    limit = min(out, inner)
    if config.lora_rank > limit:
        side = f"the smaller side of {smallest} ({out} x {inner})"
        yield "lora_rank", f"{config.lora_rank} exceeds {side}; use at most {limit}"


def structure(config: LoraConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the keys on which the meaning of adapters depends, with what null stands for."""
    targets = set(config.lora_targets or layer_shapes(model))
    keys = ("lora_rank", "lora_alpha", "use_rslora")
    return {**config.model_dump(include=set(keys)), "lora_targets": sorted(targets)}


def n_trained_parameters(config: LoraConfig, model: ModelConfig) -> int:
    """Return the number of trained parameters: those of the adapters, or all."""
    if config.lora_rank is None:
        return model.n_parameters
    shapes = layer_shapes(model)
    targets = set(config.lora_targets or shapes)
    # An adapter of a layer (out, in) has A (rank, in) and B (out, rank).
    n_per_rank = sum(sum(shapes[name]) for name in targets)
    return model.n_layers * config.lora_rank * n_per_rank


def training_flops_per_token(config: LoraConfig, model: ModelConfig) -> float:
    """Return the FLOPs per token of forward and backward at `max_seq_len`, adapters included.

    Of the six per weight of a matrix product (two each for the output, the gradient of the input
    and the gradient of the weight), frozen weights need four, and adapters add six per weight.
    """
    flops = model.flops_per_token(model.max_seq_len)
    if config.lora_rank is None:
        return flops
    n_in_block = sum(out * inner for out, inner in layer_shapes(model).values())
    n_in_head = model.vocab_size * model.d_model
    n_frozen = model.n_layers * n_in_block + n_in_head
    return flops - 2 * n_frozen + 6 * n_trained_parameters(config, model)


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters that are trained; those of a checkpoint."""
    state = model.state_dict(keep_vars=True)  # FSDP reshards first
    return {name: tensor.detach() for name, tensor in state.items() if tensor.requires_grad}


class Adapters(dict[str, Tensor]):
    """Adapters in one process, to be loaded and then merged into the weights of their base."""

    def __init__(self, config: LoraConfig, model: ModelConfig) -> None:
        with torch.device("meta"):
            adapted = add_adapters(Transformer(model), config, None)
        super().__init__()
        for name, tensor in trained_parameters(adapted).items():
            self[name] = torch.empty(tensor.shape)
        self.config = config

    def merge(self, name: str, weight: Tensor) -> None:
        """Add what the adapter of the base weight `name`, if any, contributes, in place."""
        layer = name.removesuffix(".weight")
        a = self.get(f"{layer}.lora_A.weight")
        b = self.get(f"{layer}.lora_B.weight")
        if a is not None and b is not None:
            weight += (self.config.lora_scale * (b @ a)).to(weight.device)
