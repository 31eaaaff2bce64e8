"""Draw the rooms: what each verb of a run, in fsdp.py, uses of the parts of lm/.

    python -m docs.rooms

writes docs/rooms.svg. Everything in it is read from the sources: the verbs and what they use from
their code and imports, the order of the rooms from the floors in `lm`'s docstring, and what a room
is from its own docstring. A test compares the file with what this draws.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PICTURE = REPOSITORY / "docs" / "rooms.svg"

VERBS = {
    "preflight": ("lm/preflight.py", "preflight"),
    "build": ("fsdp.py", "Trainer.__init__"),
    "load": ("fsdp.py", "Trainer.load_state"),
    "prepare": ("fsdp.py", "Trainer.prepare_objective"),
    "train": ("fsdp.py", "Trainer.train"),
    "finish": ("fsdp.py", "Trainer.finish"),
}
"""The file and the function of each verb, in the order of a run."""

# Sizes in pixels.
LABEL_WIDTH = 230
COLUMN_WIDTH = 184
HEADER_HEIGHT = 54
LINE_HEIGHT = 17
PADDING = 10
DESCRIPTION_LETTERS = 36
"""of a room's description in a line: as many as fit into its label"""

COLORS = {
    "preflight": "#8250df",
    "build": "#0969da",
    "load": "#1a7f37",
    "prepare": "#9a6700",
    "train": "#bc4c00",
    "finish": "#57606a",
}


def room_of(module: str) -> str:
    """Return the room that `module` is in, e.g. "lm.data" for "lm.data.loader"."""
    return ".".join(module.split(".")[:2])


def source_of(room: str) -> Path:
    """Return the file that holds the docstring of `room`, a module or a package."""
    path = REPOSITORY / room.replace(".", "/")
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")


def rooms_by_floor() -> list[str]:
    """Return the rooms from the highest floor to the lowest, as `lm`'s docstring lists them."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / "lm" / "__init__.py").read_text())) or ""
    rooms: list[str] = []
    for names in re.findall(r"^\d  ([^\s,]+(?:, [^\s,]+)*)", docstring, re.MULTILINE):
        rooms += [name.removesuffix(".py") for name in names.split(", ")]
    return rooms


def description_of(room: str) -> str:
    """Return the first line of the docstring of `room`."""
    docstring = ast.get_docstring(ast.parse(source_of(room).read_text())) or ""
    return docstring.partition("\n")[0].removesuffix(".")


class SourceFile:
    """A file, with what its functions use of other files of this project.

    An attribute, such as `self.loader`, counts as the class of which it is made, or as the module
    of that class: what `__init__` assigns to it is a parameter of that class, or a call of it.
    """

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.imports = dict(self._imports())
        """name in this file -> the room that it is imported from"""
        self.functions = dict(self._functions())
        """functions by name, methods as CLASS.METHOD"""
        self.attributes = dict(self._attributes())
        """attribute -> the imported name that it counts as"""

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for alias in node.names:
                module = node.module
                if module == "lm":  # from lm import config
                    module = f"lm.{alias.name}"
                if module == "model" or module.startswith("lm."):
                    yield alias.asname or alias.name, room_of(module)

    def _functions(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                yield node.name, node
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        yield f"{node.name}.{method.name}", method

    def _attributes(self) -> Iterator[tuple[str, str]]:
        for name, function in self.functions.items():
            if not name.endswith(".__init__"):
                continue
            variables = self._classes_of_parameters(function)
            assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            for node in sorted(assignments, key=lambda node: node.lineno):
                made_of = self._made_of(node.value, variables)
                if made_of is None:
                    continue
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    variables[target.id] = made_of
                elif isinstance(target, ast.Attribute):
                    yield target.attr, made_of

    def _classes_of_parameters(self, function: ast.FunctionDef) -> dict[str, str]:
        """Return the imported classes of the parameters of `function`, by parameter."""
        classes: dict[str, str] = {}
        for parameter in function.args.args:
            annotation = parameter.annotation
            if isinstance(annotation, ast.Name) and annotation.id in self.imports:
                classes[parameter.arg] = annotation.id
        return classes

    def _made_of(self, value: ast.expr, variables: Mapping[str, str]) -> str | None:
        """Return the imported class, or module of a class, of which `value` is made."""
        if isinstance(value, ast.Name):
            return variables.get(value.id)
        if not isinstance(value, ast.Call):
            return None
        names = ast.unparse(value.func).split(".")  # e.g. ["optim", "Optimizer"]
        is_class = names[-1][0].isupper()
        if is_class and names[0] in self.imports:
            return names[0]
        if is_class or not value.args:
            return None
        # A function, e.g. parallelize(model, ...): it changes its first argument.
        return self._made_of(value.args[0], variables)

    def used_by(self, name: str) -> set[str]:
        """Return the imported names that the function `name` uses, itself or through others."""
        used: set[str] = set()
        self._collect(name, used, set())
        return used

    def _collect(self, name: str, used: set[str], seen: set[str]) -> None:
        if name in seen:
            return
        seen.add(name)
        class_name = name.rpartition(".")[0]
        function = self.functions[name]
        parameters = self._classes_of_parameters(function)
        for statement in function.body:
            for node in ast.walk(statement):
                called = ""
                found = ""
                if isinstance(node, ast.Name):
                    found = parameters.get(node.id, node.id)
                    called = node.id
                elif isinstance(node, ast.Attribute):
                    found = self.attributes.get(node.attr, "")
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        called = f"{class_name}.{node.attr}"
                if found in self.imports and not found.isupper():  # constants are left out
                    used.add(found)
                if called in self.functions:
                    self._collect(called, used, seen)


def used_by_verbs() -> dict[str, dict[str, list[str]]]:
    """Return for each room what each verb uses of it; rooms that none uses are left out."""
    table: dict[str, dict[str, list[str]]] = {room: {} for room in rooms_by_floor()}
    for verb, (path, function) in VERBS.items():
        file = SourceFile(REPOSITORY / path)
        own_room = path.removesuffix(".py").replace("/", ".")
        if own_room in table:
            table[own_room][verb] = [function]
        for name in sorted(file.used_by(function), key=str.lower):
            cells = table.setdefault(file.imports[name], {})  # last: what all floors may import
            cells.setdefault(verb, []).append(name)
    return {room: cells for room, cells in table.items() if cells}


def text(x: int, y: int, content: str, style: str) -> str:
    """Return an SVG text whose baseline starts at (x, y)."""
    return f'<text x="{x}" y="{y}" {style}>{escape(content, quote=False)}</text>'


def draw_header() -> Iterator[str]:
    """Yield an arrow for each verb."""
    for column, verb in enumerate(VERBS):
        left = LABEL_WIDTH + column * COLUMN_WIDTH
        right = left + COLUMN_WIDTH - PADDING
        bottom = HEADER_HEIGHT - PADDING
        tip = f"{right + PADDING},{HEADER_HEIGHT / 2:g}"
        corners = f"{left},{PADDING} {right},{PADDING} {tip} {right},{bottom} {left},{bottom}"
        yield f'<polygon points="{corners}" fill="{COLORS[verb]}"/>'
        yield text(left + PADDING, 32, verb, 'fill="white" font-weight="bold"')


def draw_row(
    room: str, description: list[str], cells: Mapping[str, list[str]], y: int
) -> Iterator[str]:
    """Yield a room below `y`: its label, and a cell for each verb that uses it."""
    height = row_height(description, cells)
    label = source_of(room).relative_to(REPOSITORY).as_posix().removesuffix("__init__.py")
    yield text(PADDING, y + LINE_HEIGHT, label, 'font-weight="bold"')
    for i, line in enumerate(description, 2):
        yield text(PADDING, y + i * LINE_HEIGHT, line, 'font-size="11" fill="#57606a"')
    for column, verb in enumerate(VERBS):
        if verb not in cells:
            continue
        left = LABEL_WIDTH + column * COLUMN_WIDTH
        color = f'fill="{COLORS[verb]}"'
        size = f'width="{COLUMN_WIDTH - 2}" height="{height - 2}"'
        yield f'<rect x="{left + 1}" y="{y + 1}" {size} {color} fill-opacity="0.08"/>'
        for i, name in enumerate(cells[verb], 1):
            yield text(left + PADDING, y + i * LINE_HEIGHT, name, color)


def row_height(description: list[str], cells: Mapping[str, list[str]]) -> int:
    """Return the height of a row, in which the label has one line more than `description`."""
    n_lines = max(1 + len(description), *(len(names) for names in cells.values()))
    return n_lines * LINE_HEIGHT + PADDING


def draw() -> str:
    """Return the picture as SVG: a column for each verb, a row for each room."""
    width = LABEL_WIDTH + COLUMN_WIDTH * len(VERBS)
    y = HEADER_HEIGHT
    elements = list(draw_header())
    for room, cells in used_by_verbs().items():
        description = textwrap.wrap(description_of(room), DESCRIPTION_LETTERS)
        elements += draw_row(room, description, cells, y)
        y += row_height(description, cells)
        elements.append(f'<line x2="{width}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
    frame = f'viewBox="0 0 {width} {y}" width="{width}" height="{y}"'
    font = 'font-family="sans-serif" font-size="13" fill="#1f2328"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {font}>',
        "<title>What each verb of a run uses of the rooms</title>",
        f'<rect width="{width}" height="{y}" fill="white"/>',
        *elements,
        "</svg>",
    ]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PICTURE.write_text(draw())
