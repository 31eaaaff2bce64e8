"""The peak of a device in FLOP/s, and the most memory that a process has used on it."""

from __future__ import annotations

import re
import resource
import sys

import torch

GIB = 2**30

PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
}
PEAK_TFLOPS |= {
    "GB200": 2500,
    "H800": 989,
    "H20": 148,
    "L40S": 362,
    "L4": 121,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
}
PEAK_TFLOPS |= {"V100-PCIE": 112, "V100": 125, "T4": 65}
"""Dense 16-bit peak (TFLOP/s, without sparsity) by a part of the GPU's name, from the vendors' data sheets; the first
match counts; of GeForce cards with accumulation in float32. bfloat16, where supported, is as fast as float16."""


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the dense peak of `device` for matrix products in `dtype` (FLOP/s), or None if unknown."""
    known = device.type == "cuda" and dtype is not None
    return peak_flops_by_name(torch.cuda.get_device_name(device)) if known else None


def peak_flops_by_name(name: str) -> float | None:
    """Return the dense 16-bit peak of the GPU called `name` (FLOP/s), or None if unknown."""
    if re.search("MIG|Laptop", name):  # a slice, or a smaller chip than the desktop card's
        return None
    return next(
        (peak * 1e12 for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None
    )


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on the GPU, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
