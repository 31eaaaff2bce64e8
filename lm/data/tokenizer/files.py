"""The files of a tokenizer: their names, and how they are read from a directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from lm.fileio import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_bytes

TOKENIZER_JSON = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
_COPIED_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Not read here, but by what converts an export: merge scores are in tokenizer.model only."""
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    *_COPIED_FILES,
)
"""of a tokenizer; only the first is required"""
MORE_TEMPLATES = "additional_chat_templates"
SOURCE_FILES = (*TOKENIZER_FILES, f"{MORE_TEMPLATES}/*.jinja")
"""of a model on the Hub"""
_CLASS_SETTINGS = ("model_type", "tokenizer_class", "transformers_version")
"""of a config.json, by which transformers chooses the class of a tokenizer"""
_CONTENT_HASH = re.compile("[0-9a-f]{30,64}")
"""name of a file in the caches of the Hub and of DVC, which nothing else has"""


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `directory`, by name.

    Checkpoints and exports get copies of them.

    Raises:
        ConfigError: one is a link that leaves `directory`, and not to a file of a cache.
    """
    more = sorted(path.name for path in directory.glob(f"{MORE_TEMPLATES}/*.jinja"))
    names = [*TOKENIZER_FILES, *(f"{MORE_TEMPLATES}/{name}" for name in more)]
    files = {name: _read_inside(directory, name) for name in names if (directory / name).is_file()}
    config = _read_settings(directory / MODEL_CONFIG)
    for part in (config, config.get("text_config")):  # of a text model in a wrapper
        if isinstance(part, dict) and part.get("eos_token_id") is not None:
            content = files.get(GENERATION_CONFIG, b"{}")
            files[GENERATION_CONFIG] = _add_stops(content, part["eos_token_id"])
    return files


def read_class_settings(directory: Path) -> dict[str, str]:
    """Return what the config.json of a model says of the class of its tokenizer."""
    config = _read_settings(directory / MODEL_CONFIG)
    return {key: config[key] for key in _CLASS_SETTINGS if isinstance(config.get(key), str)}


def _add_stops(content: bytes, stops: Any) -> bytes:
    """Return a generation_config.json with the `eos_token_id` of the model's config.json, too."""
    try:
        generation = parse_json(content)
    except ValueError:
        return content  # who reads it says why
    if not isinstance(generation, dict):
        return content
    known = as_list(generation.get("eos_token_id"))
    added = [stop for stop in as_list(stops) if stop not in known]
    if not added:
        return content
    merged = known + added
    if len(merged) == 1:
        (merged,) = merged
    return json.dumps(generation | {"eos_token_id": merged}, indent=2).encode()


def as_list(value: Any) -> list[Any]:
    """Return the ids of an `eos_token_id`, which is one, a list of them, or None."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _read_inside(directory: Path, name: str) -> bytes:
    path = directory / name
    target = path.resolve()
    if directory.resolve() not in target.parents and not _CONTENT_HASH.fullmatch(target.name):
        raise ConfigError(f"tokenizer: {path}: is a link to {target}; copy the file")
    return read_tokenizer_file(target, name)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, {} if there is none or no object in it."""
    if not path.is_file():
        return {}
    raw = parse_tokenizer_json(read_bytes(path.resolve(), MAX_JSON_BYTES), str(path))
    if not isinstance(raw, dict):
        return {}
    return raw


def parse_tokenizer_json(content: bytes, where: str) -> Any:
    """Return the value of a JSON file, which errors name by `where`."""
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(f"tokenizer: {where}: not valid JSON: {error}") from None


def read_tokenizer_file(path: Path, name: str) -> bytes:
    """Return the content of the file `name` of a tokenizer, of limited size."""
    limit = MAX_JSON_BYTES
    if name == TOKENIZER_JSON or name in _COPIED_FILES:
        limit = MAX_TOKENIZER_BYTES
    return read_bytes(path, limit)
