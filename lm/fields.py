"""What a hyperparameter's field says besides its type, default and description.

Its type says what happens if the key is changed before a run resumes:

    Fixed[int]      the run is refused: with another value it would be a different run
    Logged[int]     the run resumes and logs the change
    Unlogged[int]   the run resumes; the change is not worth a line

`Varied[Logged[int]]`: often what tells runs apart, so that comparisons show it at its default, too.

`json_schema_extra={"aliases": [...]}` lists the names of the key in transformers, TRL, nanoGPT and
others, which an error about an unknown key suggests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

T = TypeVar("T")

Fixed = Annotated[T, "fixed"]
Logged = Annotated[T, "logged"]
Unlogged = Annotated[T, "unlogged"]
Varied = Annotated[T, "varied"]

Change = Literal["fixed", "logged", "unlogged"]
CHANGES = get_args(Change)


def keys_that_are(change: Change, config: type[BaseModel]) -> set[str]:
    """Return the keys of `config` whose type is marked with `change`."""
    return {key for key, field in config.model_fields.items() if change in field.metadata}


def aliases_of(field: FieldInfo) -> list[str]:
    """Return the names of `field` elsewhere."""
    extra = cast(dict[str, Any], field.json_schema_extra or {})
    return extra.get("aliases", [])
