"""An invalid file name ends every command with one line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lm import generate
from lm.checkpoint.__main__ import main as checkpoint_main
from lm.checkpoint.checkpointer import CheckpointConfig
from lm.checkpoint.store import LocalCheckpoints
from lm.data.run_data import DataConfig, open_data
from lm.errors import ConfigError
from lm.hf import __main__ as hf_main
from lm.prepare.__main__ import main as prepare_main
from lm.resume import plan_resume

TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"dataset": "text", "train_data": TOO_LONG},
        {"dataset": "tokens", "train_data": TOO_LONG},
        {"dataset": "jsonl", "train_data": TOO_LONG, "val_data": TOO_LONG},
        {"dataset": "hf", "train_data": f"./{TOO_LONG}"},
        {"dataset": "text", "tokenizer": TOO_LONG},
        {"resume": TOO_LONG},
        {"init_from": TOO_LONG},
    ],
    ids=["text", "tokens", "jsonl", "hf", "tokenizer", "resume", "init_from"],
)
def test_invalid_file_name_in_a_hyperparameter_is_refused(
    hyperparameters: dict[str, str],
) -> None:
    def use() -> object:
        if "dataset" in hyperparameters:
            return open_data(DataConfig.model_validate(hyperparameters), 300, 8, 1, 0)
        nothing = LocalCheckpoints(Path("nothing"))
        return plan_resume(
            CheckpointConfig.model_validate(hyperparameters), nothing, restarted=False
        )

    with pytest.raises(ConfigError, match="File name too long") as refused:
        use()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (checkpoint_main, ["list", TOO_LONG]),
        (checkpoint_main, ["verify", TOO_LONG]),
        (generate.main, [TOO_LONG, "--prompt", "a"]),
        (prepare_main, [TOO_LONG, "--tokenizer", "bytes", "--out", "out"]),
        (hf_main.main, ["inspect", TOO_LONG]),
        (hf_main.main, ["export", TOO_LONG, "out"]),
    ],
    ids=["list", "verify", "generate", "prepare", "inspect", "export"],
)
def test_command_exits_with_2_and_one_line(
    main: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
