"""Strict YAML for experiment files, with line numbers of the keys.

Keys are strings, duplicate keys are errors, 1e-4 is a number, and tags that would run code are
refused. All else is YAML 1.1, as Determined's master reads it: `on` is true and 010 is 8, but 1:30
is text and not 90.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from lm.errors import ConfigError, limit_problems, nearest_file

MAX_BYTES = 1 << 17
"""Of a file: experiments have some 2,000. The worst of this size takes PyYAML 1.5 s and 40 MB."""
MAX_VALUES = 100_000
"""In a file, counting an alias each time: a few lines of aliases of aliases are gigabytes."""

KEYS = {
    "": """bind_mounts checkpoint_policy checkpoint_storage data debug description entrypoint
        environment hyperparameters integrations internal labels log_pattern_policies log_policies
        max_restarts min_checkpoint_period min_validation_period name optimizations pbs
        perform_initial_validation preemption_timeout profiling project records_per_epoch
        reproducibility resources retention_policy scheduling_unit searcher security slurm
        tensorboard_storage workspace""",
    "resources": """agent_label devices is_single_node max_slots native_parallel priority
        resource_pool shm_size slots slots_per_trial weight""",
    "searcher": """bracket_rungs divisor max_concurrent_trials max_length max_rungs max_time
        max_trials metric mode name smaller_is_better source_checkpoint_uuid source_trial_id
        stop_once time_metric""",
}
"""Keys of an experiment and of two of its sections, by the reference of Determined 0.38.1, and
deprecated ones."""


def load_experiment(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the experiment in the file at `path` and the lines of its keys.

    The keys of the lines are e.g. "hyperparameters.lr".
    """
    accepted = "--config accepts a file such as config.yaml"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        advice = nearest_file(path) or f"; {accepted}"
        raise ConfigError(f"{path.absolute()}: {error.strerror}{advice}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_BYTES:,} bytes; {accepted}")
    try:
        source = content.decode()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8; save the file as UTF-8"
        raise ConfigError(f"{path}: {problem}") from None
    experiment, lines = parse_yaml(source, str(path))
    _refuse_misspelled(lines, str(path))
    if not isinstance(experiment, dict) or "hyperparameters" not in experiment:
        remedy = "write the keys below it and indented, as recipes/quickstart.yaml does"
        raise ConfigError(f"{path}: hyperparameters: is missing; {remedy}")
    return experiment, lines


def _refuse_misspelled(lines: Mapping[str, int], name: str) -> None:
    """Refuse keys that are nearly one of an experiment; others may be what YAML's aliases share.

    The master refuses every key that it does not know.
    """
    problems: list[str] = []
    for key, line in lines.items():
        section, _, inner = key.rpartition(".")
        known = KEYS.get(section, "").split()
        near = difflib.get_close_matches(inner, known, n=1, cutoff=0.85)
        if near and inner not in known:
            problems.append(f"{name}:{line}: {key}: no such key; did you mean {near[0]}?")
    if problems:
        raise ConfigError(*limit_problems(problems))


def parse_yaml(source: str, name: str) -> tuple[Any, dict[str, int]]:
    """Return the value of the YAML text `source` and the lines of its keys, two levels deep.

    In errors, the text is called `name`.
    """
    try:
        loader = _StrictLoader(source)
        loader.name = name
        root = loader.get_single_node()
        if root is None:
            return None, {}
        if loader.count_values(root, {}) > MAX_VALUES:
            problem = f"has more than {MAX_VALUES:,} values, counting an alias each time"
            raise ConfigError(f"{name}: {problem}")
        value = loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        line = source.count("\n", 0, error.position) + 1
        problem = f"the character U+{error.character:04X} is not allowed in YAML"
        raise ConfigError(f"{name}:{line}: {problem}") from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error) from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None
    return value, _key_lines(root)


def _key_lines(root: yaml.Node) -> dict[str, int]:
    """Return the line of each key, two levels deep."""
    lines: dict[str, int] = {}
    if not isinstance(root, yaml.MappingNode):
        return lines
    for key, section in root.value:
        lines[key.value] = key.start_mark.line + 1
        if isinstance(section, yaml.MappingNode):
            for inner_key, _ in section.value:
                lines[f"{key.value}.{inner_key.value}"] = inner_key.start_mark.line + 1
    return lines


class _StrictLoader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """Return the tag of a value; a number in base 60, e.g. 1:30, is text."""
        tag: str = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and value is not None and ":" in value and tag in _NUMBERS:
            return self.DEFAULT_SCALAR_TAG
        return tag

    def count_values(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Return the number of values in `node`; raise ConfigError where one is invalid."""
        if id(node) in known:
            return known[id(node)]
        known[id(node)] = 0  # an alias may be inside of the value that it names
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        if node.tag not in self.yaml_constructors:
            raise _node_error(f"the tag {tag} is not allowed; use plain values", node)
        children: list[yaml.Node] = []
        if isinstance(node, yaml.ScalarNode):
            try:
                self.construct_object(node)
            except (ValueError, LookupError, TypeError, AttributeError):  # for 2024-99-99, !!int x
                raise _node_error(f"{node.value[:60]!r} is not a valid {tag[2:]}", node) from None
        elif isinstance(node, yaml.MappingNode):
            self._check_mapping(node)
            children = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(self.count_values(child, known) for child in children)
        return known[id(node)]

    def _check_mapping(self, node: yaml.MappingNode) -> None:
        """Make each key a string; refuse those that are not names, and duplicates."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                raise _node_error("a key must be a name; put text with { or [ in quotes", key)
            if key.value in lines:
                raise _node_error(
                    f"{key.value}: duplicate key, first on line {lines[key.value]}", key
                )
            lines[key.value] = key.start_mark.line + 1
            if key.value != "<<":
                key.tag = "tag:yaml.org,2002:str"


def _read_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    value: int = loader.construct_yaml_int(node)
    if abs(value) >= 2**1023:
        raise _node_error(f"{node.value[:60]!r} is larger than any float64", node)
    return value


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _read_int)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


class _StrictDumper(yaml.SafeDumper):
    """Puts quotes around text that `_StrictLoader` alone reads as a number."""


_StrictDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def dump_yaml(value: Any) -> str:
    """Return the YAML text that `parse_yaml` reads as `value`."""
    return yaml.dump(value, Dumper=_StrictDumper, sort_keys=False)


def _node_error(problem: str, node: yaml.Node) -> ConfigError:
    mark = node.start_mark
    return ConfigError(f"{mark.name}:{mark.line + 1}: {problem}")


def _syntax_error(error: yaml.MarkedYAMLError) -> ConfigError:
    """Say what PyYAML was reading, from which line on, and what it found instead."""
    mark = error.problem_mark
    assert mark is not None
    problem = str(error.problem)
    if error.context_mark is not None:
        problem = f"{error.context} (from line {error.context_mark.line + 1}), {problem}"
    if "'\\t'" in problem:
        problem += "; use spaces, not tabs"
    elif isinstance(error, ScannerError | ParserError):
        problem += (
            "; check indentation, spaces after colons and quotes, here and on the line before"
        )
    return ConfigError(f"{mark.name}:{mark.line + 1}: {problem}")
