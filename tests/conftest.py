"""Fixtures and options of all tests."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more threads, and the cores belong to many ranks

import pytest

ROOT = Path(__file__).parent.parent
MESSAGES = Path(__file__).parent / "messages.json"
"""What the program says, by test: the only place where tests hold sentences."""

Message = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write tests/messages.json instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with many slow tests first, so that no worker has a long file left when the others end."""
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -n_slow[item.path])


@pytest.fixture
def message(request: pytest.FixtureRequest, tmp_path: Path) -> Message:
    """Compare what the program says with tests/messages.json: `message(error)`, `message(result.stderr)`.

    Tests assert keys, values and exit codes themselves. `mask` is a regular expression for what differs from run to
    run; it becomes "...". Folders become <tmp> and <root>. `pytest --update-messages` writes the file.
    """
    name = request.node.nodeid.removeprefix("tests/")
    said: list[str] = []

    def check(text: object, mask: str = "") -> None:
        shown = str(text).replace(str(tmp_path), "<tmp>").replace(str(ROOT), "<root>")
        said.append(re.sub(mask, "...", shown) if mask else shown)
        golden = json.loads(MESSAGES.read_text()) if MESSAGES.exists() else {}
        if request.config.getoption("--update-messages"):
            golden[name] = said
            MESSAGES.write_text(json.dumps(dict(sorted(golden.items())), indent=1, ensure_ascii=False) + "\n")
        else:
            assert golden.get(name, [])[len(said) - 1 : len(said)] == [said[-1]], "pytest --update-messages writes it"

    return check
