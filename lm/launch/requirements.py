"""What commands need of a machine, checked before anything is imported that may be missing."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from lm.errors import ConfigError
from lm.launch.launch import is_rank0

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def check_requirements() -> None:
    """Exit with code 2 on Windows, or if Python is too old, or PyTorch missing or too old."""
    problem = _system_problem() or _torch_problem()
    if problem is None:
        return
    if is_rank0():
        print(problem, file=sys.stderr)
    sys.exit(ConfigError.exit_code)


def _system_problem() -> str | None:
    if sys.platform == "win32":
        return "Windows: only Linux and macOS are supported; use WSL 2: wsl --install"
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = sys.version.split()[0]
        oldest = "{}.{}".format(*OLDEST_PYTHON)
        return f"Python: {sys.executable} is {found}; use {oldest} or newer"
    return None


def _torch_problem() -> str | None:
    oldest = "{}.{}".format(*OLDEST_TORCH)
    remedy = f"install {oldest} or newer: pip install -r requirements.txt -c constraints.txt"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"torch: not installed for {sys.executable}; {remedy}"
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if tuple(numbers[:2]) < OLDEST_TORCH:
        return f"torch: version {version} is too old; {remedy}"
    return None
