"""Special tokens that files next to `tokenizer.json` declare, added as transformers adds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken

_DECODER = "added_tokens_decoder"
_EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""in the order in which transformers adds them, before those that a model alone has"""
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""of a token"""


def merge_files(
    config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    added_tokens: Mapping[str, int],
    encoder: Any,
) -> dict[str, Any]:
    """Return tokenizer_config.json with what the two other files add to an old one."""
    if _DECODER in config:
        return dict(config)
    merged = {**config, **special_tokens_map}
    merged[_EXTRA] = _extra(config) or _extra(special_tokens_map)
    special = {token["content"] for token in _special(merged)}
    existing = encoder.get_added_tokens_decoder()
    known = {(token.content, str(i)) for i, token in existing.items()}  # with flags, which stay
    merged[_DECODER] = {
        str(i): {"content": text, "normalized": text not in special, "special": text in special}
        for text, i in added_tokens.items()
        if (text, str(i)) not in known
    }
    return merged


def find_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens, which chat templates can read, e.g. those of `eos_token`."""
    return {name: fields["content"] for name, fields in _named(config).items()}


def find_missing(config: Mapping[str, Any], encoder: Any) -> list[AddedToken]:
    """Return the tokens that `config` declares, and `encoder` does not have like that."""
    from tokenizers import AddedToken

    existing = encoder.get_added_tokens_decoder().values()
    as_declared = {repr(token) for token in existing}  # tokens are equal whatever their flags are
    named = find_named(config).values()
    missing: list[AddedToken] = []
    for _, fields in _declared(config):
        token = AddedToken(**fields)
        if repr(token) not in as_declared:
            token.special = token.special or token.content in named
            missing.append(token)
    texts = {token.content for token in [*existing, *missing]}
    for fields in _special(config):
        if fields["content"] not in texts:
            texts.add(fields["content"])
            missing.append(AddedToken(**{**fields, "special": True}))
    return missing


def describe_conflict(config: Mapping[str, Any], encoder: Any) -> str | None:
    """Return which token has another id in `encoder` than `config` declares, if any."""
    for i, fields in _declared(config):
        text = fields["content"]
        if encoder.token_to_id(text) != i:
            return (
                f"{json.dumps(text)} is id {i}, but {encoder.token_to_id(text)} in tokenizer.json"
            )
    return None


def _declared(config: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the tokens with ids, by id."""
    decoder: Mapping[Any, dict[str, Any]] = config.get(_DECODER) or {}
    return sorted(((int(i), fields) for i, fields in decoder.items()), key=lambda pair: pair[0])


def _special(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*_named(config).values(), *_fields_of(_extra(config))]


def _named(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    values = {name: config[name] for name in _NAMES if name in config}
    values |= {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(config.get(_EXTRA), dict):
        values |= config[_EXTRA]
    return {name: fields for name, value in values.items() for fields in _fields_of([value])}


def _extra(config: Mapping[str, Any]) -> Any:
    return config.get(_EXTRA) or config.get(_OLD_EXTRA) or []


def _fields_of(values: Any) -> Iterable[dict[str, Any]]:
    """Yield the fields of those of `values` that are tokens: texts, or objects with `content`."""
    if not isinstance(values, list):
        return
    for value in values:
        match value:
            case str(text) if text:
                yield {"content": text}
            case {"content": str(text)} if text:
                yield {key: value[key] for key in _FIELDS if key in value}
