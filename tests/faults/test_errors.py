"""Every command ends with one line for an invalid file name, and well whatever its output is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import IO, Any

import pytest

import fsdp
from lm import evaluate, generate, report
from lm.checkpoint.__main__ import main as checkpoint_main
from lm.checkpoint.checkpointer import CheckpointConfig
from lm.checkpoint.store import LocalCheckpoints
from lm.data.run_data import DataConfig, open_data
from lm.errors import ConfigError
from lm.fileio import Line, read_records
from lm.hf import __main__ as hf_main
from lm.plan import __main__ as plan
from lm.prepare import main as prepare_main
from lm.resume import plan_resume
from lm.search import __main__ as search
from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import start_python
from tests.support.hyperparameters import TINY
from tests.support.runs import checkpoints_by_step, run_fsdp

TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"dataset": "text", "train_data": TOO_LONG},
        {"dataset": "hf", "train_data": f"./{TOO_LONG}"},
        {"dataset": "text", "tokenizer": TOO_LONG},
        {"resume": TOO_LONG},
        {"init_from": TOO_LONG},
    ],
    ids=["text", "hf", "tokenizer", "resume", "init_from"],
)
def test_invalid_file_name_in_a_hyperparameter_is_refused(
    hyperparameters: dict[str, str],
) -> None:
    def use() -> object:
        if "dataset" in hyperparameters:
            return open_data(DataConfig.model_validate(hyperparameters), 300, 8, 1, 0)
        nothing = LocalCheckpoints(Path("nothing"))
        config = CheckpointConfig.model_validate(hyperparameters)
        return plan_resume(config.resume, config.init_from, nothing, restarted={})

    with pytest.raises(ConfigError, match="File name too long") as refused:
        use()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (checkpoint_main, ["list", "~/a"]),
        (checkpoint_main, ["verify", "~/a"]),
        (generate.main, ["~/a", "--prompt", "x"]),
        (evaluate.main, ["~/a", "--tasks=a.jsonl"]),
        (evaluate.main, ["x", "--tasks", "~/a/b.jsonl"]),
        (prepare_main, ["~/a", "--tokenizer", "bytes", "--out", "out"]),
        (prepare_main, ["config.yaml", "--format=text", "--tokenizer", "bytes", "--out=~/a/b"]),
        (hf_main.main, ["examine", "~/a"]),
        (hf_main.main, ["export", "~/a", "out"]),
        (hf_main.main, ["export", "x", "~/a"]),
        (plan.main, ["--config=~/a"]),
        (report.main, ["~/a"]),
        (search.main, ["~/a"]),
        (fsdp.main, ["--config=~/a"]),
        (fsdp.main, ["dataset=text", "train_data=~/a/b"]),
        (fsdp.main, ["dataset=text", "val_data=~/a/b"]),
        (fsdp.main, ["dataset=hf", "train_data=~/a/b"]),
        (fsdp.main, ["dataset=jsonl", "train_data=~/a/b"]),
        (fsdp.main, ["dataset=tokens", "train_data=~/a"]),
        (fsdp.main, ["dataset=text", "eval_tasks=[~/a/b.jsonl]"]),
        (fsdp.main, ["init_from=~/a"]),
        (fsdp.main, ["resume=~/a"]),
    ],
    ids=lambda value: value.__module__ if callable(value) else str(value),
)
def test_paths_of_commands_can_start_with_the_home_directory(
    main: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a").write_text("")
    Path("a.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "gold": 0}')
    Path("config.yaml").write_text("hyperparameters: {batch_size: 1, max_steps: 1}")
    assert main(arguments) != 0
    errors = capsys.readouterr().err
    assert str(tmp_path / "home" / "a") in errors


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (checkpoint_main, ["list", TOO_LONG]),
        (checkpoint_main, ["verify", TOO_LONG]),
        (generate.main, [TOO_LONG, "--prompt", "a"]),
        (prepare_main, [TOO_LONG, "--tokenizer", "bytes", "--out", "out"]),
        (hf_main.main, ["examine", TOO_LONG]),
        (hf_main.main, ["export", TOO_LONG, "out"]),
        (generate.main, ["two\nlines", "--prompt", "a"]),
    ],
    ids=["list", "verify", "generate", "prepare", "examine", "export", "newline"],
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


def test_note_on_a_file_with_a_line_break_in_its_name_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two\nlines.jsonl"
    path.write_text("{}\n")
    assert list(read_records(path, Line)) == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "arguments", "name"),
    [
        (checkpoint_main, ["list", ""], "CHECKPOINT|RUN"),
        (evaluate.main, ["x", "--tasks", ""], "--tasks"),
        (evaluate.main, ["--tasks", "x", "--", ""], "MODEL"),
        (generate.main, ["", "--prompt", "a"], "CHECKPOINT"),
        (generate.main, ["x", "--prompt", "a", "--base="], "--base"),
        (hf_main.main, ["examine", ""], "MODEL"),
        (hf_main.main, ["export", "", "out"], "RUN"),
        (hf_main.main, ["export", "x", ""], "OUT"),
        (plan.main, ["--config="], "--config"),
        (prepare_main, ["", "--split", "train", "--tokenizer", "bytes", "--out", "o"], "INPUT"),
        (prepare_main, ["x", "--tokenizer=", "--out", "o"], "--tokenizer"),
        (prepare_main, ["--verify="], "--verify"),
        (report.main, [""], "RUN"),
        (search.main, [""], "FILE"),
        (fsdp.main, ["--config="], "--config"),
    ],
    ids=lambda value: value.__module__ if callable(value) else None,
)
def test_empty_path_is_not_the_current_directory(
    main: Callable[[list[str]], int],
    arguments: list[str],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"{name}: a path is empty")


@pytest.mark.parametrize("main", [checkpoint_main, hf_main.main, prepare_main, fsdp.main])
def test_unknown_option_is_one_line(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "x", "-x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- output that is not read, or whose encoding lacks characters

TEXT_RUN: dict[str, Any] = TINY | {
    "vocab_size": None,
    "dataset": "text",
    "train_data": "é.txt",
    "num_tokens": 20,
    "max_steps": 1,
}
"""A run that samples. Untrained, its model generates characters outside of ASCII."""
LC_POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run and a task."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "é.txt").write_text("Käse für alle. " * 200)
    run_fsdp(folder, config=TEXT_RUN | {"ffn": "gelu"}, code=0)
    question = {"context": "a", "choices": ["b", "c"], "gold": 0}
    (folder / "task.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def start(
    arguments: list[str],
    folder: Path,
    stdout: Any,
    env: Mapping[str, str] = {},
    *,
    fork: bool = False,
) -> tuple[int, str]:
    """Run a command in `folder`; return its exit code and what it printed to stderr."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), **env}
    process = start_python(
        arguments,
        variables,
        fork=fork,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


@contextmanager
def open_output(kind: str) -> Iterator[IO[bytes]]:
    """Open "/dev/full", or a "pipe" that nothing reads, as that of `| true`."""
    if kind == "/dev/full":
        with Path(kind).open("wb") as full:
            yield full
        return
    reading, pipe = os.pipe()
    os.close(reading)
    with os.fdopen(pipe, "wb") as out:
        yield out


COMMANDS = {
    "help": "lm.report --help",
    "list": "lm.checkpoint list runs/test",
    "generate": "lm.generate runs/test --prompt a --max-new-tokens 9",
    "evaluate": "lm.evaluate runs/test --tasks task.jsonl",
    "prepare": "lm.prepare é.txt --tokenizer bytes --out new",
    "export": "lm.hf export runs/test new",
}
FORKED = {"evaluate", "export"}
"""commands that import PyTorch; of `generate` the interpreter's end is tested, too"""
RUN_MODULE = """
import runpy, sys, warnings

warnings.simplefilter("ignore")
name = sys.argv.pop(1)
sys.modules.pop(name + ".__main__", None)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "name",
    ["list", *(pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS if each != "list")],
)
def test_command_whose_output_is_not_read_is_silent(
    name: str, folder: Path, tmp_path: Path
) -> None:
    command = COMMANDS[name].replace(" new", f" {tmp_path}/new")
    arguments = ["-W", "ignore", "-m", *command.split()]
    if name in FORKED:
        (tmp_path / "run.py").write_text(RUN_MODULE)
        arguments = [str(tmp_path / "run.py"), *command.split()]
    with open_output("pipe") as pipe:
        code, stderr = start(arguments, folder, pipe, fork=name in FORKED)
    lines = [line for line in stderr.splitlines() if "\r" not in line]  # of progress bars
    assert (code, lines) == (128 + signal.SIGPIPE, [])


@pytest.mark.slow
def test_command_whose_output_does_not_fit_says_so(folder: Path) -> None:
    with open_output("/dev/full") as full:
        code, stderr = start(["-m", "lm.checkpoint", "list", "runs/test"], folder, full)
    assert code == 1
    assert re.fullmatch(r"stdout: .*\n", stderr)


@pytest.mark.slow
def test_command_whose_stderr_is_not_read_ends_as_otherwise(folder: Path) -> None:
    command = f"{sys.executable} -m lm.checkpoint list nothing 2> /dev/full"
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=variables, check=False)
    assert done.returncode == 2


def test_command_says_that_another_pipe_broke() -> None:
    source = """
        from lm.errors import command
        @command
        def main():
            raise BrokenPipeError(32, "Broken pipe")
        raise SystemExit(main())
    """
    run = [sys.executable, "-c", dedent(source)]
    done = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Broken pipe" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "output"),
    [("", "/dev/full"), ("", "pipe"), ("-m lm.launch --nproc 1", "pipe")],
    ids=["full", "pipe", "launch"],
)
def test_run_whose_output_is_not_read_saves(launcher: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "é.txt").write_text("Käse für alle. " * 200)
    (tmp_path / "test.yaml").write_text(json.dumps({"hyperparameters": TEXT_RUN}))
    arguments = [*launcher.split(), str(REPOSITORY / "fsdp.py"), "--config", "test.yaml"]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with open_output(output) as out:
        # The launcher ends with its interpreter, a run without.
        process = start_python(
            arguments, variables, fork=not launcher, cwd=tmp_path, stdout=out, stderr=out
        )
        assert process.wait(PATIENCE) == 0
    assert list(checkpoints_by_step(tmp_path)) == [1]


@pytest.mark.slow
def test_run_prints_samples_to_any_encoding(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("Käse für alle. " * 200)
    (tmp_path / "test.yaml").write_text(
        json.dumps({"hyperparameters": TEXT_RUN | {"train_data": "t"}})
    )
    arguments = [str(REPOSITORY / "fsdp.py"), "--config", "test.yaml"]
    assert start(arguments, tmp_path, subprocess.DEVNULL, LC_POSIX) == (0, "")
    assert list(checkpoints_by_step(tmp_path)) == [1]


@pytest.mark.slow
def test_generate_prints_to_any_encoding(folder: Path) -> None:
    arguments = ["-m", "lm.generate", "runs/test", "--prompt", "é"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    assert start(arguments, folder, subprocess.DEVNULL, ascii_only) == (0, "")


@pytest.mark.slow
def test_argument_outside_of_the_encoding_is_named(folder: Path) -> None:
    arguments = [str(REPOSITORY / "fsdp.py"), "--config", "test.yaml", "train_data=é.txt"]
    code, stderr = start(arguments, folder, subprocess.DEVNULL, LC_POSIX)
    assert code == 2
    assert re.fullmatch(r"argument train_data: .* ascii; .*LC_ALL=C.UTF-8\n", stderr)
