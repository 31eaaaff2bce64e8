"""What the pages name exists, and documentation and code use the field's words."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs import rooms
from lm.config.hyperparameters import FIELDS
from tests.support import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
GENERATED = REPOSITORY / "docs" / "hyperparameters.md"
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
KEYS = set(FIELDS)

SPOKEN = [
    *PAGES,
    *REPOSITORY.glob("*.py"),
    *(REPOSITORY / "docs").glob("*.py"),
    *(
        path
        for folder in ("lm", "tests", "benchmarks")
        for path in (REPOSITORY / folder).rglob("*.py")
    ),
    *(path for folder in ("recipes", "launch") for path in (REPOSITORY / folder).iterdir()),
    REPOSITORY / "Makefile",
]
"""All files whose prose somebody reads."""

FORBIDDEN = (
    r"\bbehind (the )?(last )?(step|checkpoint|document)",
    r"\b(go|goes|going|went) on (from|with|behind|there)\b",
    r"\bgoes on\b",
    r"\bwhole (ones|checkpoint)",
    r"\bnobody knows\b",
    r"\bkeeps? the others waiting\b",
    r"\bon the way\b",
    r"\b(steps|gradients|many) in a row\b",
    r"\bfor want of\b",
    r"\bto mend\b",
    r"\bis there already\b",
    r"\bof (its|their|our) own\b",
    r"\bis an?other model's\b",
    r"\btold of\b",
)
"""Regular expressions of phrases for which PyTorch's or Slurm's documentation has a common word."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The fenced code blocks of a page: language and text, continued lines joined."""
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        yield language, text.replace("\\\n", " ")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_the_picture_shows_the_rooms_as_they_are() -> None:
    assert rooms.PICTURE.read_text() == rooms.draw(), "`make docs` draws it"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_pages_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target
    for name, file in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", page.read_text()):
        assert f"def {name}(" in (page.parent / file).read_text(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_modules_and_targets_of_pages_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\b(?:lm|docs|recipes|launch|tests|benchmarks)/[\w/.-]*\w", text):
        assert (REPOSITORY / name).exists() or "data/" in name, name
    for module in re.findall(r"python -m ((?:lm|docs|tests|benchmarks)[.\w]*\w)", text):
        assert importlib.util.find_spec(module), module
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in TARGETS, target


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != GENERATED], ids=lambda page: page.name
)
def test_hyperparameters_of_pages_exist(page: Path) -> None:
    for language, text in blocks(page):
        if language == "yaml":
            assert set(yaml.safe_load(text).get("hyperparameters", ())) <= KEYS
        for line in text.splitlines():
            if re.search(r"fsdp\.py|make (train|bench)|sbatch|qsub|det experiment", line):
                command = line.partition(" #")[0].replace("[key=value ...]", "")
                assert (
                    set(re.findall(r"(?<![-\w])(?:hyperparameters\.)?([a-z][a-z0-9_]*)=", command))
                    <= KEYS
                ), line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != GENERATED], ids=lambda page: page.name
)
def test_page_says_at_its_top_what_was_measured(page: Path) -> None:
    assert re.search("measured|tested", page.read_text()[:1500], re.IGNORECASE)


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_prose_uses_the_common_words(phrase: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in SPOKEN
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
