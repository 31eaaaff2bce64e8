"""Memory of GPUs, and how many a node has."""

GPUS_PER_NODE = 8

CARDS = {
    "h100": 79.2,
    "h200": 139.8,
    "b200": 178.4,
    "a100-80": 79.2,
    "a100-40": 39.4,
    "l40s": 44.4,
    "a10g": 22.0,
    "l4": 22.0,
    "t4": 14.6,
    "3090": 23.6,
    "4090": 23.5,
    "5090": 31.3,
}
"""memory in GiB, as PyTorch reports it, by a short name"""
