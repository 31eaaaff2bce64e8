"""Tensors in the files of a Hugging Face model, dequantized if they are in MXFP4 or blocks of FP8.

MXFP4 is what gpt-oss is published in, FP8 with a scale per block of a matrix what DeepSeek, Qwen,
MiniMax and Mistral publish. Their values are those that transformers dequantizes to in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.checkpoint.headers import TensorSlice, full_shape
from lm.checkpoint.tensor_files import Source, read_into, require_finite, torch_dtype
from lm.errors import ConfigError

DEQUANTIZED = "its quantized weights are dequantized; an export has them in 16 bits"
"""said where they are read"""

MXFP4 = "mxfp4"
FP8 = "fp8"
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""of MXFP4; the fourth bit is the sign"""
_GROUP = 32
"""values that share an exponent"""
_BIAS = 127
"""of the exponents"""
_SCALES = "_scale_inv"
"""what the name of the scales of FP8 ends with"""


@dataclass(frozen=True)
class Stored:
    """A tensor in files."""

    slices: Sequence[TensorSlice]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None = the slices do not cover it once."""
        return full_shape(self.slices)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.slices[0])

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows from `start` to `stop`, exclusive.

        Raises:
            CheckpointError: the file is damaged, or holds inf or NaN.
        """
        return _read_rows(self.slices, start, stop)

    def read_all(self) -> Tensor:
        """Return all rows; see `read`."""
        shape = self.shape
        assert shape is not None
        return self.read(0, shape[0] if shape else 1)


@dataclass(frozen=True)
class Quantized(Stored):
    """A tensor in files that has scales next to it; `slices` are of its quantized values."""

    scales: Sequence[TensorSlice]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it has in a model that is not quantized."""
        return torch.bfloat16


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """Matrices of experts, transposed: (experts, out, groups, 16) bytes of two values each.

    The scales are (experts, out, groups), bytes of exponents of 2. Values are exact in bfloat16.
    """

    @property
    def shape(self) -> tuple[int, ...] | None:
        shape = super().shape
        if shape is None:
            return None
        n_experts, n_out, n_groups, _ = shape
        return n_experts, n_groups * _GROUP, n_out

    def read(self, start: int, stop: int) -> Tensor:
        pairs_of_codes = _read_rows(self.slices, start, stop).int()
        exponents = _read_rows(self.scales, start, stop).int() - _BIAS
        scales = torch.ldexp(torch.ones_like(exponents, dtype=self.dtype), exponents)
        levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)], dtype=self.dtype)
        # The low bits are the first value.
        pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=-1)
        values = F.embedding(pairs_of_codes, pairs).flatten(-2) * scales[..., None]
        require_finite(values, self.slices[0].path)
        # PyTorch transposes one matrix several times as fast as those of a tensor.
        return torch.stack([matrix.T.contiguous() for matrix in values.flatten(-2)])


@dataclass(frozen=True)
class Fp8(Quantized):
    """A matrix, or one of each expert, with a scale for each block of `block` rows and columns.

    The last block of a row or column can be smaller.
    """

    block: tuple[int, int]

    def read(self, start: int, stop: int) -> Tensor:
        values = _read_rows(self.slices, start, stop).float()
        values *= self._read_scales(start, stop, values.shape)
        require_finite(values, self.slices[0].path)
        return values

    def _read_scales(self, start: int, stop: int, shape: torch.Size) -> Tensor:
        """Return what the values of `shape`, which are rows of the tensor, are multiplied by."""
        if len(self.scales[0].shape) < 2:  # one of the whole tensor
            return _read_scales(self.scales, 0, 1)
        n_rows, n_columns = self.block
        columns = torch.arange(shape[-1]) // n_columns
        if len(shape) > 2:  # the rows of the tensor are matrices
            rows = torch.arange(shape[-2]) // n_rows
            return _read_scales(self.scales, start, stop)[..., columns][..., rows, :]
        rows = torch.arange(start, stop) // n_rows
        first, last = start // n_rows, (stop - 1) // n_rows
        scales = _read_scales(self.scales, first, last + 1)
        return scales[:, columns][rows - first]


def _read_rows(slices: Sequence[TensorSlice], start: int, stop: int) -> Tensor:
    shape = slices[0].shape
    if shape:
        shape = (stop - start, *shape[1:])
    rows = torch.empty(shape, dtype=torch_dtype(slices[0]))
    read_into(rows, Source(slices, start))
    return rows


def _read_scales(slices: Sequence[TensorSlice], start: int, stop: int) -> Tensor:
    """Return rows of scales of FP8 in float32; bytes are exponents of 2, as in OCP's MX formats."""
    scales = _read_rows(slices, start, stop)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


# ---- which tensors are quantized


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


def find_tensors(
    slices: Mapping[str, Sequence[TensorSlice]], quantization: Mapping[str, Any] | None
) -> dict[str, Stored]:
    """Return the tensors in files, under the names that they have in a model of 16 bits.

    Args:
        slices: by name in the files.
        quantization: see `quantization_of`.

    Raises:
        ConfigError: quantized values and scales do not fit together.
    """
    tensors = {name: Stored(found) for name, found in slices.items()}
    if quantization is None:
        return tensors
    method = quantization["quant_method"]
    for name, stored in list(tensors.items()):
        if method == MXFP4 and name.endswith("_blocks"):
            place = name.removesuffix("_blocks")
            scales = tensors.pop(f"{place}_scales", None)
            tensors[place] = _open_mxfp4(name, tensors.pop(name), scales)
        elif method == FP8 and _is_fp8(stored) and not name.endswith(_SCALES):
            scales = tensors.pop(name + _SCALES, None)
            tensors.pop(f"{name.removesuffix('weight')}activation_scale", None)
            tensors[name] = _open_fp8(name, stored, scales, quantization)
    return tensors


def _is_fp8(stored: Stored) -> bool:
    return stored.slices[0].dtype.name.startswith("float8")


def _open_mxfp4(name: str, blocks: Stored, scales: Stored | None) -> Mxfp4:
    if scales is None:
        raise ConfigError(f"{name}: its scales are missing")
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    shape = blocks.shape
    if not are_bytes or shape is None or len(shape) != 4 or scales.shape != shape[:-1]:
        raise _misfit(name, blocks, scales)
    if 2 * shape[-1] != _GROUP:
        raise ConfigError(f"{name}: groups of {2 * shape[-1]} values, not of {_GROUP}")
    return Mxfp4(blocks.slices, scales.slices)


def _open_fp8(
    name: str, values: Stored, scales: Stored | None, quantization: Mapping[str, Any]
) -> Fp8:
    if scales is None:
        raise ConfigError(f"{name}: its scales are missing")
    shape = values.shape
    if shape is None or len(shape) < 2:
        raise _misfit(name, values, scales)
    block = quantization.get("weight_block_size") or shape[-2:]
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"quantization_config: weight_block_size: {block!r} is not two sizes")
    n_blocks = tuple(-(-size // of_block) for size, of_block in zip(shape[-2:], block, strict=True))
    is_known = scales.dtype.is_floating_point or scales.dtype == torch.uint8
    if not is_known or scales.shape not in ((), (1,), (*shape[:-2], *n_blocks)):
        raise _misfit(name, values, scales)
    return Fp8(values.slices, scales.slices, (block[0], block[1]))


def _misfit(name: str, values: Stored, scales: Stored) -> ConfigError:
    described = [f"{each.dtype} {list(each.shape or ())}" for each in (values, scales)]
    return ConfigError(f"{name}: its scales do not fit: {' and '.join(described)}")
