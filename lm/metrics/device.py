"""The peak of a device in FLOP/s, and the most memory that a process has used on it."""

from __future__ import annotations

import re
import resource
import sys

import torch

GIB = 2**30

PEAK_TFLOPS = {
    # Blackwell
    "GB200": 2500,
    "B200": 2250,
    "RTX 5090": 209.5,
    # Hopper
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    # Ada
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165.2,
    # Ampere
    "A100": 312,
    # Volta and Turing
    "V100-PCIE": 112,
    "V100": 125,
    "T4": 65,
}
"""Dense 16-bit peak (TFLOP/s, without sparsity) by words of the GPU's name, from data sheets.

bfloat16, where supported, is as fast as float16. GeForce cards accumulate at this rate in float32.
"""


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the dense peak of `device` for products in `dtype` (FLOP/s); None = unknown."""
    if device.type != "cuda" or dtype is None:
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """Return the dense 16-bit peak of the GPU called `name` (FLOP/s); None = unknown."""
    if re.search("MIG|Laptop", name):  # a slice, or a smaller chip than the desktop card's
        return None
    known = [words for words in PEAK_TFLOPS if re.search(rf"\b{words}\b", name)]
    if not known:
        return None
    most_specific = max(known, key=len)  # an "H100 PCIe" is an "H100", too
    return PEAK_TFLOPS[most_specific] * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on the GPU, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # which counts bytes, all others KiB
        peak *= 1024
    return peak / GIB
