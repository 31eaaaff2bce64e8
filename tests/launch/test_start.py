"""What answers from text does so without PyTorch, whose import takes seconds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lm.__main__ import main as list_commands
from tests.support import REPOSITORY
from tests.support.checkpoints import write_checkpoint
from tests.support.hyperparameters import TINY

FSDP = str(REPOSITORY / "fsdp.py")
QUICKSTART = str(REPOSITORY / "recipes" / "quickstart.yaml")
LORA = "lora_rank=3"
INIT = "init_from=models"


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run Python with `arguments`, and return which packages it imported."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    imported = set(re.findall(r"^import time: .*\| +(\w+)$", done.stderr, re.MULTILINE))
    return done, imported


@pytest.mark.parametrize(
    "arguments",
    [
        [FSDP, "--help"],
        ["-m", "lm"],
        ["-m", "lm.config"],
        ["-m", "lm.config", "lr"],
        ["-m", "lm.config", "--presets"],
        ["-m", "lm.search", "--help"],
        ["-m", "lm.prepare", "--help"],
        ["-m", "lm.report", "--help"],
        ["-m", "lm.launch", "--help"],
        ["-m", "lm.generate", "--help"],
        ["-m", "lm.evaluate", "--help"],
        ["-m", "lm.plan", "--help"],
        ["-m", "lm.hf", "--help"],
        ["-m", "lm.checkpoint", "--help"],
    ],
    ids=" ".join,
)
def test_answers_need_no_pytorch(arguments: list[str], tmp_path: Path) -> None:
    done, imported = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "torch" not in imported


def test_list_of_commands_has_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_commands() == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    commands = "checkpoint config evaluate generate hf launch plan prepare report search"
    assert sorted(names) == [f"lm.{name}" for name in commands.split()]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("lm.generate run --prompt a --top-k 0", "--top-k: 0 must be 1 or more"),
        ("lm.evaluate run --tasks a --limit 0", "--limit: 0 must be 1 or more"),
        ("lm.hf export run out --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("lm.config --keys", "unrecognized arguments: --keys"),
        ("lm.report", "the following arguments are required: RUN"),
        ("lm.plan --gpu h1000", "--gpu: invalid choice: 'h1000'"),
        (f"lm.plan --config {QUICKSTART} lrr=1", "argument lrr: no such hyperparameter"),
        ("lm.plan --config quick.yaml", "quick.yaml: No such file or directory"),
    ],
    ids=lambda value: value.split()[0],
)
def test_wrong_arguments_of_commands_are_refused_before_pytorch(
    command: str, problem: str, tmp_path: Path
) -> None:
    done, imported = run(tmp_path, "-m", *command.split())
    assert done.returncode == 2
    assert problem in done.stderr
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([QUICKSTART, "lrr=1"], "argument lrr: no such hyperparameter; did you mean lr?"),
        ([QUICKSTART, "lr=fast"], 'argument lr: "fast" is not a number > 0'),
        ([QUICKSTART, "n_heads=7"], "argument n_heads: 7 does not divide"),
        ([QUICKSTART, LORA, "optimizer=adamw"], "lora_rank: adapters of rank 3 need weights"),
        ([QUICKSTART, "lr=0", INIT], "argument lr: 0 is not a number > 0"),
        (["quick.yaml"], "No such file or directory"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_wrong_command_line_is_refused_before_pytorch(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    done, imported = run(tmp_path, FSDP, "--config", *arguments)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1
    assert problem in lines[0]
    assert "torch" not in imported


def test_checkpoints_are_listed_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_checkpoint(tmp_path / "checkpoints" / "18f2b7b9-8fae-4f32-a9f4-3a0d1b8d8f2c")
    done, imported = run(tmp_path, "-m", "lm.checkpoint", "list", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step " in done.stdout
    assert "torch" not in imported


def test_search_without_pytorch_finds_its_best_trial(tmp_path: Path) -> None:
    """Its trials are processes with PyTorch; it reads the hyperparameters, data and results."""
    experiment = {
        "searcher": {"name": "grid", "metric": "loss"},
        "hyperparameters": TINY
        | {
            "dataset": "text",
            "lr": {"type": "categorical", "vals": [1e-3, 0]},
            "max_steps": 1,
            "num_tokens": 0,
            "vocab_size": 257,
        },
    }
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(experiment))
    done, imported = run(tmp_path, "-m", "lm.search", "few.yaml", "validation_batches=1")
    assert done.returncode == 0, done.stderr
    assert "best: trial-" in done.stdout
    assert "failed: " in done.stdout
    assert "torch" not in imported


INTERRUPTED = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""
"""A sitecustomize.py that presses Ctrl-C when PyTorch is imported."""


@pytest.mark.parametrize(
    "arguments",
    [
        [FSDP, "--config", QUICKSTART],
        ["-m", "lm.generate", "runs/x", "--prompt", "a"],
        ["-m", "lm.evaluate", "runs/x", "--tasks", "a"],
        ["-m", "lm.plan", "--config", QUICKSTART],
        ["-m", "lm.hf", "export", "runs/x", "out"],
    ],
    ids=" ".join,
)
def test_ctrl_c_during_imports_prints_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert done.stderr == ""


PRINT_DUMP_SETTING = """
import os
from lm.launch.startup import setup_environment

setup_environment()
print(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"])
"""


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "0"), ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "1")]
)
def test_ranks_ask_others_for_no_dump_unless_the_user_does(
    given: dict[str, str], expected: str
) -> None:
    command = [sys.executable, "-c", PRINT_DUMP_SETTING]
    env = {"PYTHONPATH": str(REPOSITORY)} | given
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
