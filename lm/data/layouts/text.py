"""The text in a field of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lm.data.layouts.advice import advise_field
from lm.errors import ConfigError


def get_text(record: Mapping[str, Any], key: str, setting: str = "text_field") -> str:
    """Return the text in the field `key` of a record.

    Raises:
        ConfigError: there is no text. It says to change `setting`; the caller adds the place.
    """
    if key not in record:
        fields = ", ".join(repr(field) for field in record) or "nothing"
        problem = f"has no {key!r}, only {fields}"
        raise ConfigError(f"{problem}; {advise_field(record, key, setting)}")
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
