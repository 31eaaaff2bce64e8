"""Which quantized weights are read: MXFP4, and FP8 in equal blocks, which transformers dequantizes.

MXFP4 is what gpt-oss is published in, FP8 with a scale per block of a matrix what DeepSeek, Qwen,
MiniMax and Mistral publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lm.errors import ConfigError

DEQUANTIZED = "its quantized weights are dequantized; an export has them in 16 bits"
"""said where they are read"""

MXFP4 = "mxfp4"
FP8 = "fp8"
_GROUP = 32
"""values of MXFP4 that share an exponent"""
BLOCKS = "_blocks"
SCALES = "_scales"
"""what the names of the indices and the exponents of MXFP4 end with"""
LARGEST_EXPONENT = 252
"""of MXFP4, plus 127, with which its largest value, 6, is in float32"""
_SCALES_OF_FP8 = "_scale_inv"
"""what the name of the scales of FP8 ends with"""
_BYTES_OF_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the weights of the model with this config.json are quantized; None = not.

    Raises:
        ConfigError: in a way that is not read here.
    """
    for part in (raw, raw.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and part.get(key):
                return _require_known(key, part[key])
    return None


def _require_known(key: str, value: Any) -> Mapping[str, Any]:
    method = ""
    if isinstance(value, dict):
        if value.get("quant_method") in (MXFP4, FP8):
            return value
        method = f" ({value.get('quant_method')} here)"
    raise ConfigError(
        f"{key}: quantized models{method} are not supported, but {MXFP4} and {FP8}; use the"
        " original model in 16 bits, of which a run can quantize the weights (lora_rank with"
        " base_dtype: nf4), or load this one with transformers, dequantize() and save_pretrained()"
        " it"
    )


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the same model in 16 bits."""
    values = {key: value for key, value in raw.items() if key != "quantization_config"}
    if isinstance(raw.get("text_config"), dict):
        values["text_config"] = without_quantization(raw["text_config"])
    return values


def dequantizing(quantization: Mapping[str, Any]) -> Any:
    """Return the config with which transformers dequantizes weights while it loads them."""
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    if quantization["quant_method"] == MXFP4:
        return Mxfp4Config(dequantize=True)
    return FineGrainedFP8Config(dequantize=True)


def as_dequantized(
    stored: Mapping[str, Tensor], quantization: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """Return what tensors on the meta device are when they are dequantized, without their scales.

    Args:
        stored: by name in the files.
        quantization: see `quantization_of`.

    Raises:
        ConfigError: quantized values and scales do not fit together.
    """
    tensors = dict(stored)
    if quantization is None:
        return tensors
    method = quantization["quant_method"]
    for name, values in stored.items():
        if method == MXFP4 and name.endswith(BLOCKS):
            place = name.removesuffix(BLOCKS)
            del tensors[name]
            tensors[place] = _of_mxfp4(name, values, tensors.pop(place + SCALES, None))
        elif method == FP8 and _is_fp8(values) and not name.endswith(_SCALES_OF_FP8):
            scales = tensors.pop(name + _SCALES_OF_FP8, None)
            tensors.pop(f"{name.removesuffix('weight')}activation_scale", None)
            tensors[name] = _of_fp8(name, values, scales, quantization)
    return tensors


def _is_fp8(values: Tensor) -> bool:
    return str(values.dtype).startswith("torch.float8")


def _of_mxfp4(name: str, blocks: Tensor, scales: Tensor | None) -> Tensor:
    """Return a tensor like the matrices of experts, `(experts, in, out)`, in bfloat16.

    Args:
        blocks: (experts, out, groups, 16), bytes of two values each.
        scales: (experts, out, groups), bytes of exponents of 2.
    """
    if scales is None:
        raise ConfigError(f"{name}: its scales are missing")
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not are_bytes or blocks.dim() != 4 or scales.shape != blocks.shape[:-1]:
        raise _misfit(name, blocks, scales)
    n_experts, n_out, n_groups, n_bytes = blocks.shape
    if 2 * n_bytes != _GROUP:
        raise ConfigError(f"{name}: groups of {2 * n_bytes} values, not of {_GROUP}")
    return blocks.new_empty(n_experts, n_groups * _GROUP, n_out, dtype=torch.bfloat16)


def _of_fp8(
    name: str, values: Tensor, scales: Tensor | None, quantization: Mapping[str, Any]
) -> Tensor:
    """Return a tensor like `values`: in float32, or in bfloat16 if the scales are powers of 2."""
    if scales is None:
        raise ConfigError(f"{name}: its scales are missing")
    if values.dim() < 2:
        raise _misfit(name, values, scales)
    if not scales.dtype.is_floating_point and scales.dtype != torch.uint8:
        raise _misfit(name, values, scales)
    if scales.shape not in ((), (1,)):
        block = quantization.get("weight_block_size") or ()
        is_pair = isinstance(block, list | tuple) and len(block) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in block):
            raise ConfigError(f"quantization_config: weight_block_size: {block!r} is not two sizes")
        n_blocks: list[int] = []
        for size, of_block in zip(values.shape[-2:], block, strict=True):
            if size % of_block:  # transformers takes the size of a block from the number of scales
                problem = f"{size} rows or columns are no blocks of {of_block} (weight_block_size)"
                raise ConfigError(f"{name}: {problem}; use the model in 16 bits")
            n_blocks.append(size // of_block)
        if scales.shape != (*values.shape[:-2], *n_blocks):
            raise _misfit(name, values, scales)
    dtype = torch.float32
    if scales.dtype in _BYTES_OF_EXPONENTS:
        dtype = torch.bfloat16
    return values.to(dtype)


def _misfit(name: str, values: Tensor, scales: Tensor) -> ConfigError:
    described = [f"{each.dtype} {list(each.shape)}" for each in (values, scales)]
    return ConfigError(f"{name}: its scales do not fit: {' and '.join(described)}")
