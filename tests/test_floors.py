"""Who may import whom, and where code may stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lm
from tests.support import REPOSITORY

FILES = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "lm").rglob("*.py")]
MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
    for path in FILES
    if path.name != "__init__.py"
}
"""Files by the name they are imported under, e.g. "lm.data.text"."""


def floors() -> dict[str, int]:
    """The floors in `lm`'s docstring by part, a module or a package; below them the ground."""
    table = {}
    for floor, names in re.findall(
        r"^ ?(\d+)  ([^\s,]+(?:, [^\s,]+)*)", lm.__doc__ or "", re.MULTILINE
    ):
        table |= {name.removesuffix(".py"): int(floor) for name in names.split(", ")}
    return table | {"lm.errors": -1, "lm.examined": -1, "lm.fields": -1, "lm.presets": -1}


def part(module: str) -> str:
    """The part that `module` belongs to, e.g. "lm.data" for "lm.data.text"."""
    return ".".join(module.split(".")[:2])


def imports(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """The modules of ours that the one at `path` imports, anywhere in it or `at_start`."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [
                f"{node.module}.{alias.name}" for alias in node.names
            ]  # a module's name, or one in a module
            names = [name if name in MODULES else name.rpartition(".")[0] for name in names]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def test_page_lists_every_file_of_the_rooms_of_which_it_lists_files() -> None:
    page = (REPOSITORY / "docs" / "internals.md").read_text()
    listed = re.findall(r"^(lm/\w+)/(.*\n(?: .*\n)+)", page, re.MULTILINE)
    files = [(room, text) for room, text in listed if re.search(r"^  \w", text, re.MULTILINE)]
    assert len(files) > 5
    for room, text in files:
        names = {path.name for path in (REPOSITORY / room).glob("[!_]*.py")} - {"config.py"}
        assert {name for name in names if name not in text} == set(), room


def test_floors_list_every_part() -> None:
    assert floors().keys() == {part(module) for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_to_lower_floors(module: str) -> None:
    table, here = floors(), part(module)
    others = {other for other in imports(MODULES[module]) if part(other) != here}
    assert not {other for other in others if table[part(other)] >= table[here]}, (
        f"floor {table[here]}"
    )


def test_imports_have_no_circle() -> None:
    graph = {module: set(imports(path)) for module, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


ROOMS_OF_A_RUN = """
fsdp lm.any_model lm.attention lm.checkpoint lm.command_line lm.config lm.context lm.data
lm.determined lm.errors lm.examined lm.fields lm.fileio lm.flops lm.grouped_mm lm.initial_weights
lm.inputs lm.launch lm.memory lm.metrics lm.model_config lm.objectives lm.preflight lm.presets
lm.program lm.report lm.resume lm.runtime lm.sampling lm.seeds lm.shards lm.storage lm.tasks
lm.training lm.transformers_config lm.units model
"""
MAKERS_OF_DATA = """
lm.prepare lm.data.blocks lm.data.documents lm.data.encoder lm.data.examples lm.data.json_lines
lm.data.messages lm.data.parallel lm.data.readers lm.data.record_fields lm.data.records
lm.data.rendering lm.data.stream lm.data.text lm.data.unwritten
"""
DOORS = {
    "lm.transformers_model": {"lm.any_model", "lm.flops"},  # a model that is of transformers
    "lm.hf": {"lm.initial_weights", "lm.inputs", "lm.preflight"},  # init_from; exports; searches
    "lm.tasks": {"fsdp", "lm.preflight"},  # eval_tasks
    "lm.metrics.trackers": {"lm.metrics.logger"},  # tracker
    "lm.training.experts": {"lm.training.lora"},  # of a class, next to adapters
}
"""what some runs import, by the modules whose functions import it then"""


def test_run_imports_its_rooms_and_nothing_that_makes_data() -> None:
    reached: set[str] = set()
    to_read = ["fsdp"]
    while to_read:
        module = to_read.pop()
        if module not in reached:
            reached.add(module)
            to_read += imports(MODULES[module], at_start=True)
    assert {part(module) for module in reached} == set(ROOMS_OF_A_RUN.split())
    makers = set(MAKERS_OF_DATA.split())
    assert makers <= MODULES.keys()
    assert not reached & makers
    for room, doors in DOORS.items():
        behind = {module for module in MODULES if f"{module}.".startswith(f"{room}.")} - reached
        assert behind
        assert {module for module in reached if behind & {*imports(MODULES[module])}} == doors


def test_init_files_hold_only_a_docstring() -> None:
    for path in (REPOSITORY / "lm").rglob("__init__.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        if path.parent.name != "lm":  # which checks what a machine has before all imports
            assert len(tree.body) == 1, path


def test_model_imports_nothing_of_ours() -> None:
    source = (REPOSITORY / "model.py").read_text()
    modules = set(re.findall(r"^(?:from|import) (lm\.\w+|\w+)", source, re.MULTILINE))
    assert modules <= {
        "__future__",
        "math",
        "typing",
        "torch",
        "collections",
        "lm.attention",
        "lm.grouped_mm",
        "lm.model_config",
    }
    assert "distributed" not in modules


def test_no_module_imports_a_test_file() -> None:
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not [name for name in names if re.match(r"tests\..*\btest_", name)], path
