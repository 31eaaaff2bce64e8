"""Strict YAML for experiment files, with line numbers of the keys.

Keys are strings, duplicate keys are errors, 1e-4 is a number, and tags that would run code are refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from lm.errors import ConfigError

MAX_VALUES = 100_000
"""in a file; a few lines of aliases of aliases are gigabytes"""


def load(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the experiment in the file at `path` and the lines of its keys, e.g. `{"hyperparameters.lr": 12}`."""
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.absolute()}: {error.strerror}; --config accepts a file such as config.yaml") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    experiment, lines = parse(source, str(path))
    if not isinstance(experiment, dict) or "hyperparameters" not in experiment:
        raise ConfigError(f"{path}: hyperparameters: is missing; see config.yaml for an example")
    return experiment, lines


def parse(source: str, name: str) -> tuple[Any, dict[str, int]]:
    """Return the value of the YAML text `source`, named `name`, and the lines of its keys, two levels deep."""
    try:
        loader = _StrictLoader(source)
        node = loader.get_single_node()
        if node and _n_values(node, {}) > MAX_VALUES:
            raise ConfigError(f"{name}: aliases make it more than {MAX_VALUES:,} values; write them out")
        value = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = source.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: the character U+{error.character:04X} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        advice = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"{name}{line}: {str(error.problem).removeprefix('but ')}{advice}") from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    lines: dict[str, int] = {}
    for outer, section in node.value if isinstance(node, yaml.MappingNode) else ():
        lines[outer.value] = outer.start_mark.line + 1
        if isinstance(section, yaml.MappingNode):
            lines |= {f"{outer.value}.{inner.value}": inner.start_mark.line + 1 for inner, _ in section.value}
    return value, lines


def _n_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in `node`, those of an alias each time that it is used."""
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 0  # of an alias inside of the value that it names, which the constructor refuses
        flat = itertools.chain.from_iterable(child if isinstance(child, tuple) else (child,) for child in children)
        known[id(node)] = 1 + sum(_n_values(child, known) for child in flat)
    return known[id(node)]


class _StrictLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                raise _problem("a key must be a name", key)
            if key.value in first:
                raise _problem(f"{key.value}: duplicate key, first on line {first[key.value]}", key)
            first[key.value] = key.start_mark.line + 1
            if key.value != "<<":
                key.tag = "tag:yaml.org,2002:str"
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Hashable:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        if node.tag not in self.yaml_constructors:
            raise _problem(f"the tag {tag} is not allowed; use plain values", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError):  # PyYAML's errors for 2024-99-99 or !!int x
            raise _problem(f"{str(node.value)[:60]!r} is not a valid {tag[2:]}", node) from None


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def _problem(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
