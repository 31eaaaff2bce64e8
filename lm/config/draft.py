"""What the config and the command line set: each key, where, and what is wrong with it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from lm.config.hyperparameters import FIELDS
from lm.config.wording import show
from lm.errors import ConfigError
from lm.fields import need_of
from lm.fileio import expand_home
from lm.model_config import ModelConfig
from lm.presets import PRESETS
from lm.transformers_config import TransformersConfig


@dataclass
class Draft:
    """Hyperparameters that are being read: what is set, where, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """where each key is set, as errors name it: `exp.yaml:12: lr`, or `argument lr`"""
    arguments: set[str] = field(default_factory=set)
    """keys that are set on the command line"""
    errors: dict[tuple[str, ...], ConfigError] = field(default_factory=dict)
    """by key, e.g. ("lr",) or ("rope_scaling", "factor")"""
    warnings: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, label: str) -> None:
        self.values[key] = value
        self.labels[key] = label

    def label(self, key: str, problem: str = "") -> str:
        """Return where `key` is set, or else where the first key is set that `problem` names."""
        if key in self.labels:
            return self.labels[key]
        for word in re.findall(r"\w+", problem):
            if word in self.labels:
                return f"{self.labels[word]}: {key}"
        return key

    def refuse(self, key: str, problem: str, label: str | None = None) -> None:
        """Add an error of `key`; `label` names what is wrong if it is not where the key is set."""
        path = (key,)
        self.errors[path] = ConfigError(f"{label or self.label(key)}: {problem}")

    def raise_errors(self) -> None:
        """Raise the errors, if any, in the order of the keys."""
        if not self.errors:
            return
        position = {key: index for index, key in enumerate(self.values)}
        paths = sorted(self.errors, key=lambda path: position.get(path[0], -1))
        raise ConfigError.merge(self.errors[path] for path in paths)

    @property
    def preset(self) -> Mapping[str, Any]:
        """The keys that `model` sets."""
        return PRESETS.get(str(self.values.get("model")), {})


def read_draft(
    contents: Mapping[str, Any], overrides: Sequence[str], name: str, lines: Mapping[str, int]
) -> Draft:
    """Return what the config and the command line set."""
    draft = _read_section(contents, name, lines)
    for override in overrides:
        _apply_override(draft, override)
    _drop_replaced(draft, name)
    _drop_unread(draft, name)
    _refuse_keys_of_transformers(draft)
    _resolve_search(draft)
    _apply_max_length(draft, contents, name, lines)
    if draft.values.get("vocab_size") is None:
        draft.values.pop("vocab_size", None)  # null lets the preset, or the tokenizer, set it
    for key in ("init_from", "resume"):
        value = draft.values.get(key)
        if value and isinstance(value, str):
            draft.values[key] = expand_home(value)
    return draft


def _location(name: str, lines: Mapping[str, int], key: str) -> str:
    """Return where `key`, e.g. "hyperparameters.lr", is set: "exp.yaml:12"."""
    return f"{name}:{lines[key]}" if key in lines else name


def _read_section(contents: Mapping[str, Any], name: str, lines: Mapping[str, int]) -> Draft:
    """Return what `hyperparameters:` sets; keys of it outside of it are errors."""
    section = contents.get("hyperparameters")
    if section is None:
        section = {}
    if not isinstance(section, dict):
        where = _location(name, lines, "hyperparameters")
        problem = f"{show(section)} is not a mapping of keys to values"
        raise ConfigError(f"{where}: hyperparameters: {problem}")
    draft = Draft()
    for key, value in section.items():
        where = _location(name, lines, f"hyperparameters.{key}")
        draft.set(key, value, f"{where}: {key}")
    misplaced = FIELDS.keys() & lines.keys()
    misplaced -= {"checkpoint_storage"}  # also a section of Determined's
    for key in sorted(misplaced, key=lines.__getitem__):
        problem = "is not part of hyperparameters; indent it below that line"
        draft.refuse(key, problem, label=f"{_location(name, lines, key)}: {key}")
    return draft


def _apply_override(draft: Draft, override: str) -> None:
    """Set what the argument `key=value` says."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if key and key.isprintable() and equals:
        draft.set(key, _parse_override(key, text), f"argument {key}")
        if re.search("[\ud800-\udfff]", text):  # how Python decodes other bytes
            encoding = sys.getfilesystemencoding()
            problem = f"{show(text)} is not valid in the encoding of this locale, {encoding}"
            draft.refuse(key, f"{problem}; use UTF-8, and set LC_ALL=C.UTF-8")
        draft.arguments.add(key)
        return
    problem = 'is not key=value, without spaces around "="; put quotes around a value with spaces'
    if override.endswith((".yaml", ".yml")):
        problem += f"; did you mean --config {shlex.quote(override)}?"
    draft.refuse(override, problem, label=f"argument {show(override)}")


def _parse_override(key: str, text: str) -> Any:
    """Return the value that `text` spells: YAML, or the text itself if `key` accepts a string."""
    types: list[Any] = []
    if key in FIELDS:
        annotation = FIELDS[key].annotation
        types = [annotation, *get_args(annotation)]
    accepts_mapping = any(get_origin(kind) is dict for kind in types)
    is_mapping = accepts_mapping and text.startswith("{")
    if str not in types or is_mapping:
        return _parse_yaml(text)
    if re.fullmatch(r"\"[^\"\\]*\"|'[^']*'", text):
        return text[1:-1]
    if text == "null" and type(None) in types:
        return None
    return text


def _parse_yaml(text: str) -> Any:
    """Return the value of the YAML `text`, or if it is none, the text itself."""
    if not text.strip():
        return ""
    from lm import strict_yaml

    try:
        value, _ = strict_yaml.parse_yaml(text.strip(), "")
    except ConfigError:
        return text
    return value


def _drop_replaced(draft: Draft, name: str) -> None:
    """Drop what the config sets and a key on the command line replaces."""
    if "model" in draft.arguments:
        replaced = set(draft.preset)
        if "d_model" in draft.preset:  # of one size, so nothing of another shape may remain
            replaced |= ModelConfig.model_fields.keys() - {"dropout"}
        if draft.preset.get("positions") == "rope":  # else it is the size of a table
            replaced.discard("max_seq_len")
        _drop(draft, replaced, "model", name)
    for key, other in (("max_steps", "max_epochs"), ("max_epochs", "max_steps")):
        says_length = key in draft.arguments and draft.values[key] is not None
        if says_length and draft.values.get(other) is not None:
            _drop(draft, {other}, key, name)


def _drop_unread(draft: Draft, name: str) -> None:
    """Drop what the config sets and is not read with the value of a key on the command line."""
    for cause in sorted(draft.arguments):
        unread: list[str] = []
        for key, info in FIELDS.items():
            need = need_of(info)
            if need is not None and need.key == cause and not need.is_met_by(draft.values[cause]):
                unread.append(key)
        _drop(draft, unread, cause, name)


def _drop(draft: Draft, keys: Collection[str], cause: str, name: str) -> None:
    """Drop those of `keys` that the config sets, and warn of it."""
    shown: list[str] = []
    for key in list(draft.values):
        if key in keys and key not in draft.arguments:
            value = draft.values.pop(key)
            shown.append(f"{key}: {show(value)}")
    if shown:
        value = show(draft.values[cause]).strip('"')
        draft.warnings.append(f"{cause}={value} overrides {', '.join(shown)} of {name}")


def _refuse_keys_of_transformers(draft: Draft) -> None:
    """Refuse what only a model of transformers itself can set."""
    for key in TransformersConfig.model_fields.keys() - FIELDS.keys():
        if key in draft.values:
            draft.refuse(key, f"no hyperparameter: it is read from init_from; remove {key}")
            del draft.values[key]


def _resolve_search(draft: Draft) -> None:
    """Resolve what Determined writes for keys of a search: a mapping with a `type`."""
    for key, value in draft.values.items():
        match value:
            case {"type": "const", "val": constant}:
                draft.values[key] = constant
            case {"type": "int" | "double" | "log" | "categorical"}:
                advice = f"python -m lm.search FILE, or for one run set one value: {key}=VALUE"
                draft.refuse(key, f"a range is for a search; use {advice}")


def _apply_max_length(
    draft: Draft, contents: Mapping[str, Any], name: str, lines: Mapping[str, int]
) -> None:
    """Let `searcher.max_length` be `max_steps` if nothing else says how long the run is."""
    if draft.values.get("max_steps") is not None or draft.values.get("max_epochs") is not None:
        return
    match contents.get("searcher"):
        case {"max_length": {"batches": length}} | {"max_length": length} if length is not None:
            where = _location(name, lines, "searcher.max_length")
            draft.set("max_steps", length, f"{where}: searcher.max_length")
