"""The files of a tokenizer: their names, and how they are read from a directory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
_MORE_TEMPLATES = "additional_chat_templates"
SOURCE_FILES = (*TOKENIZER_FILES, f"{_MORE_TEMPLATES}/*.jinja")
"""of a model on the Hub"""
_CLASS_SETTINGS = ("model_type", "tokenizer_class", "transformers_version")
"""of a config.json, by which transformers chooses the class of a tokenizer"""
_CONTENT_HASH = re.compile("[0-9a-f]{30,64}")
"""name of a file in the caches of the Hub and of DVC, which nothing else has"""


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `directory`, by name.

    Checkpoints and exports get copies of them. A generation_config.json without an `eos_token_id`
    gets that of the model's config.json, which neither has.

    Raises:
        ConfigError: one is a link that leaves `directory`, and not to a file of a cache.
    """
    found = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    files = {name: _read_inside(directory, name) for name in found}
    more = sorted(path.name for path in directory.glob(f"{_MORE_TEMPLATES}/*.jinja"))
    if more:
        _join_templates(files, directory, more)
    generation = parse_object(
        files.get(GENERATION_CONFIG, b"{}"), str(directory / GENERATION_CONFIG)
    )
    config = _read_model_config(directory)
    text_config = config.get("text_config")  # of a text model in a wrapper
    stops = config.get("eos_token_id")
    if stops is None and isinstance(text_config, dict):
        stops = text_config.get("eos_token_id")
    if stops is not None and generation.get("eos_token_id") is None:
        generation["eos_token_id"] = stops
        files[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
    return files


def _join_templates(files: dict[str, bytes], directory: Path, more: Sequence[str]) -> None:
    """Move the chat templates in separate files to tokenizer_config.json."""
    templates = {name: _read_inside(directory, f"{_MORE_TEMPLATES}/{name}") for name in more}
    if CHAT_TEMPLATE in files:
        templates["default.jinja"] = files.pop(CHAT_TEMPLATE)
    joined: list[dict[str, str]] = []
    for name, template in templates.items():
        try:
            joined.append({"name": name.removesuffix(".jinja"), "template": template.decode()})
        except UnicodeDecodeError as error:
            problem = f"{directory}: {name}: byte {error.start} is not UTF-8"
            raise ConfigError(f"tokenizer: {problem}; correct it") from None
    config = parse_object(files.get(TOKENIZER_CONFIG, b"{}"), str(directory / TOKENIZER_CONFIG))
    config["chat_template"] = joined
    files[TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode()


def read_class_settings(directory: Path) -> dict[str, str]:
    """Return what the config.json of a model says of the class of its tokenizer."""
    config = _read_model_config(directory)
    return {key: config[key] for key in _CLASS_SETTINGS if isinstance(config.get(key), str)}


def _read_model_config(directory: Path) -> dict[str, Any]:
    path = directory / MODEL_CONFIG
    if not path.is_file():
        return {}
    return parse_object(read_bytes(path.resolve(), MAX_JSON_BYTES), str(path))


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


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Return the object in a JSON file, which errors name by `where`."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"tokenizer: {where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"tokenizer: {where}: is not a JSON object")
    return value


def read_tokenizer_file(path: Path, name: str) -> bytes:
    """Return the content of the file `name` of a tokenizer, of limited size."""
    limit = MAX_JSON_BYTES
    if name == TOKENIZER_JSON or name in _COPIED_FILES:
        limit = MAX_TOKENIZER_BYTES
    return read_bytes(path, limit)
