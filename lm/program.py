"""What identifies the code that computes a result: sources and versions of packages."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any


def _read_sources() -> dict[str, bytes]:
    repository = Path(__file__).parent.parent
    sources: dict[str, bytes] = {}
    for path in [repository / "model.py", *Path(__file__).parent.rglob("*.py")]:
        name = ".".join(path.relative_to(repository).with_suffix("").parts)
        sources[name] = path.read_bytes()
    return sources


_SOURCES = _read_sources()
"""of `lm` and model.py by module, when this one is imported: what is edited later does not run"""


def describe_program(module: str, packages: Iterable[str]) -> dict[str, Any]:
    """Return what identifies what `module` computes.

    These are the sources of `module` and of all modules of ours that it imports, directly or not,
    and the versions of `packages`.
    """
    return {"sources": _hash_sources(module), "packages": describe_packages(packages)}


@functools.cache
def _hash_sources(module: str) -> dict[str, str]:
    names = {module}
    to_read = [module]
    while to_read:
        imported = _find_imports(to_read.pop())
        to_read += imported - names
        names |= imported
    return {name: sha256(_SOURCES[name]).hexdigest() for name in sorted(names)}


@functools.cache
def _find_imports(module: str) -> set[str]:
    """Return the modules of ours that `module` imports, anywhere in its source."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(_SOURCES[module])):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            named.add(str(node.module))
            named.update(f"{node.module}.{alias.name}" for alias in node.names)
    return named & _SOURCES.keys()


def describe_packages(names: Iterable[str]) -> list[str]:
    """Return the installed version of each package."""
    described: list[str] = []
    for name in names:
        try:
            described.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            described.append(f"no {name}")
    return described
