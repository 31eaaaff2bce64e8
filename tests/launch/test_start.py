"""What answers from text does so without PyTorch, whose import takes seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Answer:
    """What a command has printed, its exit code, and whether it has imported PyTorch."""

    code: int
    stdout: str
    stderr: str
    has_torch: bool


FORK_EACH = """
import json
import os
import runpy
import sys
from pathlib import Path

import lm.config.reading  # which most commands import

for number, (program, *arguments) in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = [program, *arguments]
        os._exit = sys.exit  # which some commands call: "finally" is reached
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        finally:
            if "torch" in sys.modules:
                Path(f"{number}.torch").touch()
    status = os.wait()[1]
    Path(f"{number}.code").write_text(str(os.waitstatus_to_exitcode(status)))
"""
"""Runs commands one after the other, each in a fork of this process."""


def answers_to(folder: Path, commands: Sequence[Sequence[str]]) -> list[Answer]:
    """Run commands in `folder`: modules or Python files with their arguments."""
    subprocess.run(
        [sys.executable, "-c", FORK_EACH, json.dumps(commands)],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "HOME": str(folder)},
        check=True,
    )
    answers: list[Answer] = []
    for number in range(len(commands)):
        code = int((folder / f"{number}.code").read_text())
        stdout, stderr = [(folder / f"{number}.{stream}").read_text() for stream in (1, 2)]
        answers.append(Answer(code, stdout, stderr, (folder / f"{number}.torch").exists()))
    return answers


def test_answers_need_no_pytorch(tmp_path: Path) -> None:
    names = "report search prepare launch generate evaluate plan hf checkpoint"
    commands = [[f"lm.{name}", "--help"] for name in names.split()]
    commands += [[FSDP, "--help"], ["lm"], ["lm.config"], ["lm.config", "--presets"]]
    for command, answer in zip(commands, answers_to(tmp_path, commands), strict=True):
        assert (answer.code, answer.stderr, answer.has_torch) == (0, "", False), command
        assert answer.stdout, command


def test_list_of_commands_has_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_commands() == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    commands = "checkpoint config evaluate generate hf launch plan prepare report search"
    assert sorted(names) == [f"lm.{name}" for name in commands.split()]


def test_wrong_arguments_of_commands_are_refused_before_pytorch(tmp_path: Path) -> None:
    problems = {
        "lm.generate run --prompt a --top-k 0": "--top-k: 0 must be 1 or more",
        "lm.evaluate run --tasks a --limit 0": "--limit: 0 must be 1 or more",
        "lm.hf export run out --dtype int8": "--dtype: invalid choice: 'int8'",
        "lm.config --keys": "unrecognized arguments: --keys",
        "lm.report": "the following arguments are required: RUN",
        "lm.plan --gpu h1000": "--gpu: invalid choice: 'h1000'",
        f"lm.plan --config {QUICKSTART} lrr=1": "argument lrr: no such hyperparameter",
        "lm.plan --config quick.yaml": "quick.yaml: No such file or directory",
    }
    answers = answers_to(tmp_path, [command.split() for command in problems])
    for answer, problem in zip(answers, problems.values(), strict=True):
        assert (answer.code, answer.has_torch) == (2, False), answer
        assert problem in answer.stderr


def test_wrong_command_line_is_refused_before_pytorch(tmp_path: Path) -> None:
    problems = {
        f"{QUICKSTART} lrr=1": "argument lrr: no such hyperparameter; did you mean lr?",
        f"{QUICKSTART} n_heads=7": "argument n_heads: 7 does not divide",
        f"{QUICKSTART} {LORA} optimizer=adamw": "lora_rank: adapters of rank 3 need weights",
        f"{QUICKSTART} lr=0 {INIT}": "argument lr: 0 is not a number > 0",
        "quick.yaml": "No such file or directory",
    }
    commands = [[FSDP, "--config", *arguments.split()] for arguments in problems]
    for answer, problem in zip(answers_to(tmp_path, commands), problems.values(), strict=True):
        assert (answer.code, answer.has_torch) == (2, False), answer
        (line,) = answer.stderr.splitlines()
        assert problem in line


def test_checkpoints_are_listed_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_checkpoint(tmp_path / "checkpoints" / "18f2b7b9-8fae-4f32-a9f4-3a0d1b8d8f2c")
    (answer,) = answers_to(tmp_path, [["lm.checkpoint", "list", str(tmp_path)]])
    assert (answer.code, answer.stderr, answer.has_torch) == (0, "", False)
    assert "step " in answer.stdout


@pytest.mark.slow
def test_search_without_pytorch_finds_its_best_trial(tmp_path: Path) -> None:
    """Its trial is a process with PyTorch; it reads the hyperparameters, data and results."""
    text = {"dataset": "text", "max_steps": 1, "num_tokens": 0, "vocab_size": 257}
    experiment = {
        "searcher": {"name": "single", "metric": "loss"},
        "hyperparameters": TINY | text | {"validation_batches": 1},
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(experiment))
    (tmp_path / "runs" / "one").mkdir(parents=True)  # so it has had its dry run
    of_dry_run = ["lm.search", "one.yaml", "run_name=two", "n_heads=7"]
    answer, refused = answers_to(tmp_path, [["lm.search", "one.yaml"], of_dry_run])
    assert (answer.code, answer.has_torch) == (0, False), answer
    assert "best: trial-0" in answer.stdout
    assert (refused.code, refused.has_torch) == (2, False), refused
    assert "n_heads: 7" in refused.stderr


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
