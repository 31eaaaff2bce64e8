"""Fixtures and options of all tests."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more threads, and the cores belong to many ranks

import pytest

ROOT = Path(__file__).parent.parent
MESSAGES = Path(__file__).parent / "messages.json"
"""What the program says, by test: the only place where tests hold sentences."""
STALE = pytest.StashKey[set[str]]()
"""The keys of `MESSAGES` whose test does not exist."""


def read_messages() -> dict[str, list[str]]:
    return json.loads(MESSAGES.read_text())


def write_messages(messages: dict[str, list[str]]) -> None:
    MESSAGES.write_text(json.dumps(dict(sorted(messages.items())), indent=1, ensure_ascii=False) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write tests/messages.json instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-messages") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-messages: processes would overwrite each other's messages; use -n 0")


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with many slow tests first, so that no worker has a long file left when the others end.

    Also find messages of tests that do not exist, unless a file's tests are collected in part.
    """
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -n_slow[item.path])
    config.stash[STALE] = set()
    if config.getoption("lf", False) or any("::" in argument for argument in config.args):
        return
    messages, tests = read_messages(), {message_key(item) for item in items}
    files = {key.partition("::")[0] for key in tests}
    for key in messages.keys() - tests:
        file = key.partition("::")[0]
        if file in files or not (MESSAGES.parent / file).exists():
            config.stash[STALE].add(key)
    if config.getoption("--update-messages"):
        write_messages({key: said for key, said in messages.items() if key not in config.stash[STALE]})
        config.stash[STALE].clear()


def message_key(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


class Message:
    """What the program says, compared with tests/messages.json: `message(error)`, `message(result.stderr)`.

    Tests assert keys, values and exit codes themselves. `pytest --update-messages` writes the file.
    """

    def __init__(self, key: str, tmp_path: Path, is_update: bool) -> None:
        self._key, self._tmp_path, self._said = key, tmp_path, list[str]()
        self._expected = None if is_update else read_messages().get(key, [])

    def __call__(self, text: object, mask: str = "") -> None:
        """Compare `text`, in which directories become <tmp> and <root>.

        Args:
            mask: regular expression for what differs from run to run; it becomes "...".
        """
        shown = str(text).replace(str(self._tmp_path), "<tmp>").replace(str(ROOT), "<root>")
        self._said.append(re.sub(mask, "...", shown) if mask else shown)
        if self._expected is not None:
            assert self._said == self._expected[: len(self._said)], "pytest --update-messages writes it"

    def finish(self) -> None:
        """After a test that has passed, write its messages, or check that no more are expected."""
        if self._expected is None:
            write_messages(read_messages() | {self._key: self._said})
        else:
            assert self._said == self._expected, "pytest --update-messages writes it"


@pytest.fixture
def message(request: pytest.FixtureRequest, tmp_path: Path) -> Message:
    return Message(message_key(request.node), tmp_path, bool(request.config.getoption("--update-messages")))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    result = yield
    if isinstance(message := pyfuncitem.funcargs.get("message"), Message):
        message.finish()
    return result
