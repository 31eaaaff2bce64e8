"""Numbers for people: bytes and parameters in a unit with few digits, and things counted."""

from __future__ import annotations

_UNITS = {"GiB": (2**30, 2), "MiB": (2**20, 1), "KiB": (2**10, 1)}
"""Bytes, and decimal places."""


def format_bytes(n: float) -> str:
    """Return e.g. "59.14 GiB", "40.9 MiB" or "12 bytes"."""
    for unit, (size, places) in _UNITS.items():
        if n >= size:
            return f"{n / size:,.{places}f} {unit}"
    return f"{n:.0f} bytes"


def format_count(n: int, noun: str) -> str:
    """Return e.g. "1 step" or "1,000 steps"."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}s"


def format_parameters(n: int) -> str:
    """Return e.g. "6,738.4M", "34.2K" or "96", of parameters."""
    if n >= 1e6:
        return f"{n / 1e6:,.1f}M"
    if n >= 1000:
        return f"{n / 1000:.1f}K"
    return str(n)


def format_number(value: float) -> str:
    """Return e.g. "2.5", and "2,634" where the fraction says little."""
    if value < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"
