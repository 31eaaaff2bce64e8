"""A name that is none, and a folder that may not be looked at, are a person's to mend: one line, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm import generate
from lm.checkpoint.__main__ import main
from lm.checkpoint.checkpointer import CheckpointConfig
from lm.checkpoint.manifest import CheckpointError, read_manifest
from lm.checkpoint.resume import find_checkpoint, plan_resume
from lm.data import stream
from lm.data.files import find_files
from lm.data.loader import DataConfig, open_data
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.hf import __main__ as hf_main
from lm.hf.weights import find_source
from lm.prepare import command

LONG = "x" * 300


def open_tokens(where: str) -> Any:
    return open_data(DataConfig.model_validate({"dataset": "tokens", "train_data": where}), 10, 8, 1, 0)


def plan(**settings: str) -> Any:
    return plan_resume(CheckpointConfig.model_validate(settings), None, Path("none"), restarted=False)


ACTIONS: dict[str, Callable[[str], Any]] = {
    "files": lambda name: find_files(name, "train_data"),
    "stream": lambda name: stream.open_documents(f"./{name}", "train_data", "train", None),
    "tokens": open_tokens,
    "tokenizer": load_tokenizer,
    "source": find_source,
    "init_from": lambda name: plan(init_from=name),
    "resume": lambda name: plan(resume=name),
    "checkpoint": lambda name: find_checkpoint(Path(name)),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_name_that_no_file_can_have_is_said(action: str) -> None:
    with pytest.raises(ConfigError, match="File name too long") as refused:
        ACTIONS[action](LONG)
    assert "\n" not in str(refused.value)


def test_a_manifest_that_cannot_be_looked_at_is_no_checkpoints() -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        read_manifest(Path(LONG))


@pytest.mark.parametrize(
    "command",
    [
        (main, ["list", LONG]),
        (main, ["verify", LONG]),
        (generate.main, [LONG, "--prompt", "a"]),
        (command.main, [LONG, "--tokenizer", "bytes", "--out", "out"]),
        (hf_main.main, ["import", LONG, "out"]),
        (hf_main.main, ["export", LONG, "out"]),
    ],
    ids=["list", "verify", "generate", "prepare", "import", "export"],
)
def test_every_command_ends_with_2_and_a_line(
    command: tuple[Callable[[list[str]], int], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run, arguments = command
    assert run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
