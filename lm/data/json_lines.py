"""Records of files of JSON Lines, or of one JSON array."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.blocks import read_line_blocks
from lm.data.signatures import advise_encoding
from lm.errors import ConfigError


class RawLine(NamedTuple):
    """A line of a JSON Lines file, or an element of a JSON array."""

    place: str
    """file and line number, for errors"""
    content: Any
    """the bytes of a line, or the value of an element"""
    size: int
    """of the line (bytes)"""


class Record(NamedTuple):
    """A record of a file."""

    place: str
    """file, and line if it has several, for errors"""
    fields: dict[str, Any]
    size: int
    """about its bytes"""


def read_json_lines(path: Path) -> Iterator[Record]:
    """Yield the lines of a JSON Lines file, or the elements of a file that is one JSON array.

    Empty lines are skipped. An array is parsed in memory.

    Raises:
        ConfigError: a line or an element is not a JSON object, or the file cannot be read.
    """
    for line in read_raw_lines(path):
        yield parse_line(line, path)


def parse_line(line: RawLine, path: Path) -> Record:
    """Return the record of a line of the file `path`."""
    fields = line.content
    if isinstance(fields, bytes):
        fields = _parse_json(fields, line.place, path)
    if not isinstance(fields, dict):
        raise ConfigError(f"{line.place}: not a JSON object: {json.dumps(fields)[:60]}")
    return Record(line.place, fields, line.size)


def read_raw_lines(path: Path) -> Iterator[RawLine]:
    """Yield what `read_json_lines` parses."""
    blocks = read_line_blocks(path)
    first_block = next(blocks, b"")
    if first_block.lstrip().startswith(b"["):
        yield from _read_json_array(path, b"".join([first_block, *blocks]))
        return
    number = 0
    for block in itertools.chain([first_block], blocks):
        if block.isspace():  # a small compressed file can have hundreds of millions of lines
            number += block.count(b"\n")
            continue
        for line in io.BytesIO(block):
            number += 1
            if line.strip():
                yield RawLine(f"{path}:{number}", line, len(line))


def _read_json_array(path: Path, content: bytes) -> Iterator[RawLine]:
    records = _parse_json(content, str(path), path)
    for i, record in enumerate(records):
        yield RawLine(f"{path}[{i}]", record, len(content) // len(records))


def _parse_json(content: bytes, place: str, path: Path) -> Any:
    try:
        return load_json(content.decode())
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
        raise ConfigError(f"{place}: {problem}; {advise_encoding(path, content)}") from None
    except json.JSONDecodeError as error:  # whose line number is that within `content`
        problem = f"{error.msg} at character {error.pos + 1}"
        raise ConfigError(f"{place}: not valid JSON: {problem}; {_advise_json(path)}") from None
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


def _advise_json(path: Path) -> str:
    """Return what to do with a file that is not JSON Lines."""
    suffixes = set(path.suffixes)
    if suffixes & {".csv", ".tsv"}:
        command = "read_csv(OLD).to_json(NEW, orient='records', lines=True)"
        return f"convert it, e.g. with pandas: {command}"
    if ".json" in suffixes:
        return "write its records one a line, e.g. jq -c '.KEY[]' OLD.json > NEW.jsonl"
    if suffixes & {".jsonl", ".ndjson"}:
        return "each line must be one JSON object"
    glob_of_lines = "'DIRECTORY/**/*.jsonl'"
    return f"choose JSON Lines by a glob, e.g. {glob_of_lines}; dataset: text reads text"


def get_text(record: Mapping[str, Any], key: str, setting: str = "text_field") -> str:
    """Return the text in the field `key` of a record.

    Raises:
        ConfigError: there is no text. It says to change `setting`; the caller adds the place.
    """
    if key not in record:
        fields = ", ".join(repr(field) for field in record) or "nothing"
        problem = f"has no {key!r}, only {fields}"
        if "messages" in record:
            raise ConfigError(f"{problem}; train on chats with dataset: jsonl")
        raise ConfigError(f"{problem}; set {setting} to one of them")
    text = record[key]
    advice = "remove or correct the record"
    if not isinstance(text, str):
        shown = json.dumps(text, default=str)[:60]
        raise ConfigError(f"{key!r} is {shown}, not text; {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{key!r} is not valid Unicode: character {error.start} is an unpaired surrogate"
        raise ConfigError(f"{problem}; {advice}") from None
    return text
