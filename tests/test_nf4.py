"""NF4 has the bits of bitsandbytes; adapters on it train as PEFT's, and as one process does."""

from __future__ import annotations

import shutil
import struct

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lm.training import nf4

# ---- the arithmetic


def split_rows(packed: Tensor) -> tuple[bytes, list[float]]:
    """The indices and the scales in the bytes of all rows."""
    n_pairs = packed.shape[1] * 8 // 9
    indices = bytes(packed[:, :n_pairs].flatten().tolist())
    scales = bytes(packed[:, n_pairs:].flatten().tolist())
    return indices, list(struct.unpack(f"<{len(scales) // 4}f", scales))


def exact_weight() -> Tensor:
    """Two rows of two blocks, one of them of zeros, whose values are exact in every dtype."""
    weight = ((torch.arange(256) * 37) % 101 - 50) / 64
    weight[64:128] = 0
    weight[192:] *= 3
    return weight.reshape(2, 128)


INDICES = "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1" + 64 * "7"
INDICES += "e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af"
INDICES += "4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05"
SCALES = [0.78125, 0.0, 0.78125, 2.34375]
"""Those of bitsandbytes 0.50.2 for `exact_weight`."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantized_bytes_are_those_recorded_from_bitsandbytes(dtype: torch.dtype) -> None:
    indices, scales = split_rows(nf4.quantize(exact_weight().to(dtype)))
    assert indices.hex() == INDICES
    assert scales == SCALES


def test_dequantized_weight_is_the_nearest_level_times_the_scale() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    packed = nf4.quantize(weight)
    assert packed.numel() * 8 == 4.5 * weight.numel()
    found = nf4.dequantize(packed, torch.float32)
    for block, values in zip(weight.view(-1, 64), found.view(-1, 64), strict=True):
        scale = block.abs().max().item()
        for value, dequantized in zip(block.tolist(), values.tolist(), strict=True):
            nearest = min(nf4.LEVELS, key=lambda level: abs(level - value / scale))
            assert dequantized == torch.tensor(nearest).mul(scale).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    weight = torch.randn(97, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-30
    weight[4] = 0
    weight[5, 7] = 1e4
    weight = weight.to(dtype)
    expected, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    packed = nf4.quantize(weight)
    indices, scales = split_rows(packed)
    assert indices == bytes(expected.flatten().tolist())
    assert scales == state.absmax.tolist()
    dequantized = functional.dequantize_4bit(expected, state)
    assert nf4.dequantize(packed, dtype).equal(dequantized)


def test_blocks_of_rows_dequantize_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = nf4.quantize(torch.randn(7, 128, generator=torch.Generator().manual_seed(0)))
    expected = nf4.dequantize(packed, torch.bfloat16)
    monkeypatch.setattr(nf4, "BLOCK_BYTES", 2 * 4 * 128)
    assert nf4.dequantize(packed, torch.bfloat16).equal(expected)


# ---- a layer


def make_layer(n_out: int, inner: int, dtype: torch.dtype, bias: bool = True) -> nf4.NF4Linear:
    torch.manual_seed(0)
    base = nn.Linear(inner, n_out, bias=bias)
    layer = nf4.NF4Linear(base).requires_grad_(False).to(dtype)
    layer.weight.copy_(nf4.quantize(base.weight.detach()))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_computes_with_the_dequantized_weight(dtype: torch.dtype) -> None:
    layer = make_layer(97, 128, dtype)
    assert layer.weight.dtype == torch.uint8
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    y = layer(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    expected = F.linear(x, nf4.dequantize(layer.weight, dtype), layer.bias)
    assert y.equal(expected)
    assert grad.equal(torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.*script_method")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_backward_needs_no_dense_weight(is_compiled: bool) -> None:
    first = make_layer(256, 128, torch.bfloat16)
    second = make_layer(128, 256, torch.bfloat16)

    def compute(x: Tensor) -> Tensor:
        return second(F.silu(first(x)))

    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(compute, fullgraph=True) if is_compiled else compute
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert first.weight.shape in saved
    assert max(shape.numel() for shape in saved) == first.weight.numel()
    torch.testing.assert_close(y, compute(x), atol=2e-2, rtol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(compute(x).sum(), x)[0], atol=2e-2, rtol=0)
