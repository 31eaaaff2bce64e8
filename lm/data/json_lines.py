"""Records of files of JSON Lines, or of one JSON array."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.blocks import TO_UTF8, read_line_blocks
from lm.errors import ConfigError

_RULE = "each line must be one JSON object, or the file an array of them"


class Record(NamedTuple):
    """A record of a file."""

    place: str
    """file, and line if it has several, for errors"""
    fields: Any
    """its values by key; of a raw line, its bytes, or the value of an element of an array"""
    size: int
    """about its bytes"""


def read_json_lines(path: Path) -> Iterator[Record]:
    """Yield the lines of a JSON Lines file, or the elements of a file that is one JSON array.

    Empty lines are skipped. An array is parsed in memory.

    Raises:
        ConfigError: a line or an element is not a JSON object, or the file cannot be read.
    """
    for line in read_raw_lines(path):
        yield parse_line(line)


def parse_line(line: Record) -> Record:
    """Return the record of a raw line."""
    fields = line.fields
    if isinstance(fields, bytes):
        fields = _parse_json(fields, line.place)
    if not isinstance(fields, dict):
        raise ConfigError(f"{line.place}: not a JSON object: {json.dumps(fields)[:60]}")
    return line._replace(fields=fields)


def read_raw_lines(path: Path) -> Iterator[Record]:
    """Yield the raw lines that `read_json_lines` parses."""
    blocks = read_line_blocks(path)
    first_block = next(blocks, b"")
    if first_block.lstrip().startswith(b"["):
        yield from _read_json_array(path, b"".join([first_block, *blocks]))
        return
    number = 0
    for block in itertools.chain([first_block], blocks):
        for line in io.BytesIO(block):
            number += 1
            if line.strip():
                yield Record(f"{path}:{number}", line, len(line))


def _read_json_array(path: Path, content: bytes) -> Iterator[Record]:
    records = _parse_json(content, str(path))
    for i, record in enumerate(records):
        yield Record(f"{path}[{i}]", record, len(content) // len(records))


def _parse_json(content: bytes, place: str) -> Any:
    try:
        return load_json(content.decode().rstrip())
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
        raise ConfigError(f"{place}: {problem}; {TO_UTF8}") from None
    except json.JSONDecodeError as error:  # whose line number is that within `content`
        where = f"character {error.pos + 1}"
        if error.lineno > 1:  # of an array
            where = f"line {error.lineno}, character {error.colno}"
        problem = f"not valid JSON: {error.msg} at {where}"
        raise ConfigError(f"{place}: {problem}; {_RULE}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def load_json(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
        ConfigError: an object has a key twice, of which one value would be lost.
    """
    return json.loads(text, object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        (key, _), *_ = counts.most_common(1)
        raise ConfigError(f"an object has the key {key!r} twice; remove or rename one")
    return made
