"""LoRA: low-rank adapters of the matrices of a frozen model (Hu et al., 2021).

An adapted layer computes `x W^T + b + (lora_alpha / lora_rank) dropout(x) A^T B^T`. W `(out, in)`,
b and all other weights of the model, the base, are frozen and have the compute dtype, or W
`base_dtype`; A `(lora_rank, in)` and B `(out, lora_rank)` are trained in float32. Base weights keep
their names; A and B of `q_proj.weight` are `q_proj.lora_A.weight` and `q_proj.lora_B.weight`, as in
PEFT; those of `experts.down_proj`, which has a matrix of each expert, `experts.lora_A.down_proj`
and `experts.lora_B.down_proj` (lm/training/experts.py). With `use_rslora`, the scale is
`lora_alpha / sqrt(lora_rank)`, so that the output does not shrink with the rank (Kalajdzievski,
2023).
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.any_model import AnyModel, new_structure
from lm.training import four_bits
from lm.training.config import LoraConfig
from lm.training.four_bits import FORMATS, NF4, NF4Linear
from lm.training.roles import (
    describe_rest,
    find_expert_matrices,
    find_linear_layers,
    find_roundable,
)
from lm.transformers_config import AnyModelConfig
from model import InitRule

AdaptedModel = TypeVar("AdaptedModel", bound=AnyModel)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, base: nn.Linear | NF4Linear, config: LoraConfig) -> None:
        super().__init__()
        rank = config.lora_rank
        assert rank is not None
        self.weight = base.weight
        self.bias = base.bias
        self.product = four_bits.linear if isinstance(base, NF4Linear) else F.linear
        self.scale = config.lora_scale
        self.dropout = config.lora_dropout
        options: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **options)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        low_rank = self.lora_A(F.dropout(x, self.dropout, self.training))
        low_rank = low_rank * self.scale  # the smallest tensor to scale
        return self.product(x, self.weight, self.bias) + self.lora_B(low_rank)


def add_adapters(
    model: AdaptedModel, config: LoraConfig, dtype: torch.dtype | None
) -> AdaptedModel:
    """Freeze `model` in `dtype` (None = float32) and `base_dtype`, and add adapters, in place.

    Does nothing if `lora_rank` is null.
    """
    if config.lora_rank is None:
        return model
    kept = model.kept_in_float32(dtype)
    for parameter in model.requires_grad_(False).parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(dtype or torch.float32)
    roundable: set[nn.Linear] = set()
    if config.base_dtype == "nf4":
        roundable = {layer.module for layer in find_roundable(model)}
    layers = find_linear_layers(model, model.blocks)
    if model.config.examined.experts:
        from lm.training.experts import convert_experts  # of classes of transformers

        ever_kept = model.kept_in_float32(torch.float16)  # in any dtype, as of `find_roundable`
        for block in model.blocks:
            for path, module in list(block.named_modules()):
                convert_experts(module, path.rpartition(".")[2], config, ever_kept)
    for layer in layers:
        frozen: nn.Linear | NF4Linear = layer.module
        if layer.module in roundable and NF4.has_complete_blocks(layer.weight):
            frozen = NF4Linear(layer.module)
        adapted: nn.Module = frozen
        if layer.is_called and config.adapts(layer.kind, frozen.out_features, frozen.in_features):
            adapted = LoraLinear(frozen, config)
        layer.parent.register_module(layer.kind, adapted)
    return model


def notes(config: LoraConfig, model: AnyModel) -> list[str]:
    """Return lines on which weights of the blocks adapters and `base_dtype` leave as they are."""

    def count_weights(parameter: Tensor) -> int:
        if config.base_dtype is not None and parameter.dtype == torch.uint8:
            return FORMATS[config.base_dtype].count_weights(parameter)
        return parameter.numel()

    notes: list[str | None] = []
    if config.lora_rank is not None:
        notes.append(describe_rest("adapters change", model, _find_adapted(model), count_weights))
    if config.base_dtype is not None:
        what = f"base_dtype: {config.base_dtype} holds"
        held = {parameter for parameter in model.parameters() if parameter.dtype == torch.uint8}
        notes.append(describe_rest(what, model, held, count_weights))
    return [note for note in notes if note is not None]


def _find_adapted(model: AnyModel) -> set[nn.Parameter]:
    """Return the weights of the base that have adapters."""
    named = dict(model.named_parameters())
    adapted: set[nn.Parameter] = set()
    for name, parameter in named.items():
        parent, _, leaf = name.rpartition(".")
        if f"{parent}.lora_A.{leaf}" in named:
            adapted.add(parameter)
    return adapted


def adapter_init_rule(name: str, parameter: Tensor) -> InitRule | None:
    """Return how to initialize the adapter `name`; None if it is not an adapter.

    PEFT's values: B is 0, and A is `kaiming_uniform_(a=sqrt(5))`, whose bound is 1 / sqrt(in).
    """
    module = name.split(".")[-2]
    if module == "lora_A":
        return InitRule("uniform", 1 / math.sqrt(parameter.shape[-1]))
    if module == "lora_B":
        return InitRule("constant", 0.0)
    return None


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the live tensors that a checkpoint holds: the adapters, or all, each once.

    All are those of a complete model: also what a class of transformers has besides trained
    parameters, e.g. biases that no gradient changes.
    """
    state = model.state_dict(keep_vars=True)  # FSDP reshards first
    has_adapters = any(".lora_A." in name for name in state)
    found: dict[Tensor, str] = {}
    for name, tensor in state.items():
        if tensor.requires_grad or not has_adapters:
            found.setdefault(tensor, name)
    return {name: tensor.detach() for tensor, name in found.items()}


class Adapters(dict[str, Tensor]):
    """Adapters in one process, to be loaded and then merged into the weights of their base."""

    def __init__(self, config: LoraConfig, model: AnyModelConfig) -> None:
        with torch.device("meta"):
            adapted = add_adapters(new_structure(model), config, None)
        super().__init__()
        for name, tensor in trained_parameters(adapted).items():
            self[name] = torch.empty(tensor.shape)
        self.config = config
        self._in_nf4: set[str] = set()
        """names of weights of the base"""
        if config.base_dtype == "nf4":
            for name, parameter in adapted.named_parameters(remove_duplicate=False):
                if parameter.dtype == torch.uint8:
                    self._in_nf4.add(name)
        self._transposed: set[str] = set()
        """names of tensors of experts that are `(E, in, out)`"""
        for path, module in adapted.named_modules():
            for matrix in find_expert_matrices(module):
                if module.is_transposed:
                    self._transposed.add(f"{path}.{matrix.name}")

    def merge(self, name: str, weight: Tensor) -> None:
        """Give the base weight `name` the values that training computes with, in place.

        They are those in `base_dtype`, plus what the adapter of the weight, if any, contributes.
        Weights in MXFP4 are read with the values that they have in it.
        """
        if name in self._in_nf4:
            four_bits.round_to_nf4(weight)
        parent, _, leaf = name.rpartition(".")
        a = self.get(f"{parent}.lora_A.{leaf}")
        b = self.get(f"{parent}.lora_B.{leaf}")
        if a is None or b is None:
            return
        if name in self._transposed:
            weight = weight.mT
        if a.dim() == 2:
            weight += self._multiply(b, a).to(weight.device)
            return
        for matrix, of_a, of_b in zip(weight, a, b, strict=True):  # each of an expert
            matrix += self._multiply(of_b, of_a).to(weight.device)

    def _multiply(self, b: Tensor, a: Tensor) -> Tensor:
        return self.config.lora_scale * (b @ a)
