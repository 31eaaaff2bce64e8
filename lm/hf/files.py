"""Files of a Hugging Face model: found, read up to limits, their tensors listed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lm.checkpoint.headers import TensorSlice, read_headers
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, parse_json, read_bytes

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_FILE = "model.safetensors"
WEIGHT_SUFFIXES = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".index.json",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".pt",
    ".pth",
    ".safetensors",
)
"""of files of weights in all formats"""
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""in which models are loaded and exported"""
READ_DTYPES = (*WEIGHT_DTYPES, "float64")


@oserror_as_config_error
def find_slices(directory: Path) -> dict[str, list[TensorSlice]]:
    """Return where the tensors of the Hugging Face model in `directory` are, by name.

    Raises:
        ConfigError: see `list_weight_files`; or a file is missing.
        RunError: a file is damaged.
    """
    paths = list_weight_files(directory)
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: missing; download the directory again")
    # The Hub's cache consists of links, of which several can be to the same file.
    return read_headers({follow_links(path): None for path in paths})


def list_weight_files(directory: Path) -> list[Path]:
    """Return the paths of the weights of the Hugging Face model in `directory`.

    Raises:
        ConfigError: it has no safetensors files, or two sets of them, or its index is damaged.
    """
    index = directory / SAFETENSORS_INDEX
    single = directory / SAFETENSORS_FILE
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names: list[str] = []
        if isinstance(weight_map, dict):
            names = sorted(set(map(str, weight_map.values())))
        is_outside = any(name != Path(name).name or name in ("", "..") for name in names)
        if not names or is_outside:
            raise ConfigError(f"{index}: weight_map must contain file names in this directory")
        if SAFETENSORS_FILE not in names and single.is_file():
            problem = f"has two sets of weights, {SAFETENSORS_FILE} and those of {index.name}"
            raise ConfigError(f"{directory}: {problem}; use a copy of it with one of them")
        return [directory / name for name in names]
    if single.is_file():
        return [single]
    if any(path.name.endswith(WEIGHT_SUFFIXES) for path in directory.iterdir()):
        problem = f"has no {SAFETENSORS_FILE} or {SAFETENSORS_INDEX}; other formats are not read"
        remedy = "load it with transformers, and save_pretrained(DIRECTORY)"
        raise ConfigError(f"{directory}: {problem}: {remedy}")
    download = "`hf download OWNER/MODEL --local-dir DIRECTORY`, then init_from=DIRECTORY"
    random = "or to train from scratch write random ones (docs/transformers.md says how)"
    raise ConfigError(f"{directory}: has no weights; download them, {download}, {random}")


def follow_links(path: Path) -> Path:
    """Return where the links at `path` lead; to open a link to itself is an OSError."""
    return Path(os.path.realpath(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`."""
    try:
        content = parse_json(read_bytes(follow_links(path), MAX_JSON_BYTES))
    except FileNotFoundError as error:
        problem = f"{error.strerror}; a model directory needs one"
    except OSError as error:
        problem = str(error.strerror)
    except ValueError as error:
        problem = f"invalid JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        problem = "not a JSON object"
    raise ConfigError(f"{path}: {problem}")


def to_json(content: object) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()
