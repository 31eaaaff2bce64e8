"""The peak of a device in FLOP/s, the most memory that a process has used, and its shortage."""

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
    "H200": 989,
    "H200 NVL": 835,
    "H100( 80GB HBM3)?": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H800": 989,
    "H800 PCIe": 756,
    "H20": 148,
    # Ada
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165.2,
    # Ampere
    "A100(-SXM4?-[48]0GB|-PCIE-40GB| 80GB PCIe)?": 312,
    # Volta and Turing
    "V100-PCIE-(16|32)GB": 112,
    "V100-SXM[23]-(16|32)GB": 125,
    "T4": 65,
}
"""Dense 16-bit peak (TFLOP/s, without sparsity) by the GPU's whole name, from data sheets.

A name with another word is another chip, e.g. an RTX 4090 D, or a part of one. bfloat16, where
supported, is as fast as float16. GeForce cards accumulate at this rate in float32.
"""


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the dense peak of `device` for products in `dtype` (FLOP/s); None = unknown."""
    if device.type != "cuda" or dtype is None:
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """Return the dense 16-bit peak of the GPU called `name` (FLOP/s); None = unknown."""
    chip = re.sub("^(NVIDIA |GeForce |Tesla )+", "", name)
    for known, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(known, chip):
            return tflops * 1e12
    return None


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on the GPU, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # which counts bytes, all others KiB
        peak *= 1024
    return peak / GIB


def allocation_retries(device: torch.device) -> int:
    """Return how often the GPU was full, and PyTorch freed what it keeps for reuse; 0 on a CPU.

    The GPU computes nothing meanwhile: in steps of Llama 3 8B with 122 of 140 GiB allocated, for a
    third of the time.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats(device)["num_alloc_retries"]
