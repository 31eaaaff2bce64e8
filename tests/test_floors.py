"""The rules of the house: who may import whom, where code may stand, and how long the story is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lm
from tests.support import ROOT

FILES = [*ROOT.glob("*.py"), *(ROOT / "lm").rglob("*.py")]
PARTS = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES if path.name != "__init__.py"}
"""Files by the name they are imported under, e.g. "lm.data.text"."""


def floors() -> dict[str, int]:
    """The map in `lm`'s docstring: floors by name. Errors are the ground that even floor 0 stands on."""
    table = {}
    for floor, names in re.findall(r"^(\d)  ([^\s,]+(?:, [^\s,]+)*)", lm.__doc__ or "", re.MULTILINE):
        for name in names.split(", "):
            table[name.removesuffix(".py") if name.endswith(".py") else f"lm.{name}"] = int(floor)
    return table | {"lm.errors": -1}


def imports(path: Path) -> Iterator[str]:
    """The files of ours that the one at `path` imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # a module's name, or one in a module
            names = [name if name in PARTS else name.rpartition(".")[0] for name in names]
        else:
            continue
        yield from (name for name in names if name in PARTS)


def test_every_file_has_a_floor() -> None:
    assert floors().keys() == PARTS.keys()


@pytest.mark.parametrize("name", PARTS)
def test_a_file_imports_only_from_lower_floors(name: str) -> None:
    table = floors()
    upwards = [other for other in imports(PARTS[name]) if table.get(other, 0) >= table.get(name, 9)]
    assert not upwards, f"floor {table.get(name)}"


def test_the_test_sees_imports() -> None:
    assert {"model", "lm.config", "lm.data.loader", "lm.mesh", "lm.launch"} <= set(imports(ROOT / "fsdp.py"))


def test_init_files_hold_a_docstring_and_no_code() -> None:
    for path in (ROOT / "lm").rglob("__init__.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        assert len(tree.body) == 1, path


def test_the_model_stands_alone() -> None:
    source = (ROOT / "model.py").read_text()
    modules = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert modules <= {"__future__", "math", "typing", "torch", "pydantic", "collections", "functools"}
    assert "distributed" not in modules


def test_the_run_reads_as_a_story() -> None:
    source = (ROOT / "fsdp.py").read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    loop = functions["train"]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 < 60
    assert len(source.splitlines()) <= 340
