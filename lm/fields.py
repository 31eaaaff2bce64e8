"""What a hyperparameter's field says besides its type, default and description.

Its type says what happens if the key is changed before a run resumes:

    Fixed[int]      the run is refused: with another value it would be a different run
    Logged[int]     the run resumes and logs the change
    Unlogged[int]   the run resumes; the change is not worth a line

`Varied[Logged[int]]`: often what tells runs apart, so that comparisons show it at its default, too.

`Annotated[Logged[int], Needs("other")]`: the key is refused if it is set without another one.

`json_schema_extra=elsewhere("NAME NAME")`: what other trainers call the key, and its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

T = TypeVar("T")

Fixed = Annotated[T, "fixed"]
Logged = Annotated[T, "logged"]
Unlogged = Annotated[T, "unlogged"]
Varied = Annotated[T, "varied"]

Change = Literal["fixed", "logged", "unlogged"]
CHANGES = get_args(Change)


@dataclass(frozen=True)
class Needs:
    """Marks the type of a key that is read only if `key`, of the same part, has one of `values`.

    Without values, if it is neither null nor false.
    """

    key: str
    values: tuple[str, ...] = ()

    def is_met_by(self, value: Any) -> bool:
        """Return whether the key is read if `value` is that of the other one."""
        if self.values:
            return value in self.values
        return bool(value)

    def __str__(self) -> str:
        if not self.values:
            return self.key
        return f"{self.key}: {' or '.join(self.values)}"


def need_of(field: FieldInfo) -> Needs | None:
    """Return what `field` needs to be read."""
    for mark in field.metadata:
        if isinstance(mark, Needs):
            return mark
    return None


class Config(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, str_min_length=1):
    """The hyperparameters of one part.

    Refuses what pydantic accepts but no key means: true as a number, inf, "", NUL, 2^63.
    """

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        parsed = validate(value)
        if isinstance(parsed, int | float) and abs(parsed) >= 2**63:
            raise ValueError(f"{value} is too large, 2^63 or more")
        if isinstance(value, bool) and not isinstance(parsed, bool):
            raise PydanticCustomError("not_accepted", "true and false are no numbers")
        if isinstance(parsed, str) and "\0" in parsed:
            raise PydanticCustomError("not_accepted", "contains NUL")
        return parsed


def keys_that_are(change: Change, fields: Mapping[str, FieldInfo]) -> set[str]:
    """Return the keys whose type is marked with `change`."""
    return {key for key, field in fields.items() if change in field.metadata}


def elsewhere(names: str, hints: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return what other trainers call a key and its values, as `json_schema_extra` of its field.

    Args:
        names: those of the key in transformers, TRL, nanoGPT and others, separated by spaces; an
            error about an unknown key suggests the key instead.
        hints: what to set instead of values that the key refuses, several separated by spaces.
    """
    by_value = {value: hint for values, hint in hints.items() for value in values.split()}
    return {"aliases": names.split(), "meanings": by_value}


def aliases_of(field: FieldInfo) -> list[str]:
    """Return the names of `field` elsewhere."""
    return cast(dict[str, Any], field.json_schema_extra or {}).get("aliases", [])


def meanings_of(field: FieldInfo) -> dict[str, str]:
    """Return hints by values that `field` refuses."""
    return cast(dict[str, Any], field.json_schema_extra or {}).get("meanings", {})
