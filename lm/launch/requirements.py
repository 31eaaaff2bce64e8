"""What commands need of a machine, and the lines that name what is missing.

PyTorch and NumPy are checked before they are imported. Of the other packages, a command needs those
that it imports.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import traceback
from types import TracebackType

from lm.errors import ConfigError
from lm.launch.console import print_error

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
_INSTALL = "pip install -r requirements.txt -c constraints.txt"
_OURS = ("lm", "model", "fsdp")


def check_requirements() -> None:
    """Exit with code 2 on Windows, or if Python is too old, or PyTorch missing or too old."""
    problem = _system_problem() or _torch_problem()
    if problem is not None:
        print_error(ConfigError(problem))
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
    remedy = f"install {oldest} or newer: {_INSTALL}"
    try:
        version = importlib.metadata.version("torch")
        importlib.metadata.version("numpy")  # without which the import of torch prints a warning
    except importlib.metadata.PackageNotFoundError as error:
        if error.name == "numpy":
            remedy = f"install it: {_INSTALL}"
        return f"{error.name}: not installed for {sys.executable}; {remedy}"
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if tuple(numbers[:2]) < OLDEST_TORCH:
        return f"torch: version {version} is too old; {remedy}"
    return None


def requires(package: str) -> str:
    """Return the end of an error: what lacks an optional package, and how to install it."""
    return f"requires a package: pip install {package} (for {sys.executable})"


def print_exception(error: Exception) -> int:
    """Print an exception that nothing has caught: a traceback, or if an import failed, one line.

    Returns:
        The exit code.
    """
    name = getattr(error, "name", None) or ""
    if not isinstance(error, ImportError) or name.partition(".")[0] in _OURS:
        traceback.print_exception(error)
        return 1
    problem = f"{name or error}: not installed for {sys.executable}"
    remedy = f"install it: {_INSTALL}"
    package = name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name != package:
        problem = f"{error}: a package for {sys.executable} is damaged, or of another version"
    print_error(ConfigError(f"{problem}; {remedy}"))
    return ConfigError.exit_code


def excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replace `sys.excepthook`: exit as `print_exception` says if an import failed.

    Nothing is printed after Ctrl-C during the imports, by which Python then ends.
    """
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, ImportError):
        sys.exit(print_exception(error))
    sys.__excepthook__(kind, error, trace)
