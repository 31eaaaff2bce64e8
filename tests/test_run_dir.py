"""A run's folder: one run at a time, its owner's alone, and nothing in it is ever deleted."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from lm import config
from lm.errors import ConfigError, RunError
from lm.runtime.run_dir import RunDir
from tests.support import ROOT


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def elsewhere(script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in another process, here."""
    command = [sys.executable, "-c", f"from lm.runtime.run_dir import RunFolder\n{script}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("name", ["", "..", "../x", "/tmp/x", "a/b", ".hidden", "-rf", "a b", "a\n", "a;b", "é", "~"])
def test_a_name_that_could_lead_out_of_runs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunDir(name)
    assert str(refused.value) == (
        f"run_name: {name!r} is not a folder name: letters, digits, '.', '_' and '-', a letter or digit first;"
        " give one with run_name=NAME"
    )


def test_naming_a_run_makes_nothing() -> None:
    RunDir("x")
    assert not list(Path().iterdir())


def test_the_folder_is_its_owners_alone() -> None:
    folder = RunDir("x")
    folder.acquire()
    for path in (folder.path, folder.checkpoints, folder.tensorboard):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "lock").stat().st_mode) == 0o600


def test_a_run_that_another_process_holds_is_refused_with_the_holder() -> None:
    folder = RunDir("x")
    folder.acquire()
    said = elsewhere("try: RunFolder('x').acquire()\nexcept Exception as error: print(error, error.exit_code)")
    assert said.stdout.startswith(f"runs/x: held by process {os.getpid()} on ")
    assert said.stdout.endswith("; wait for it, stop it, or choose another run_name 1\n")


def test_another_run_beside_it_is_free() -> None:
    RunDir("x").acquire()
    elsewhere("RunFolder('y').acquire()")
    assert Path("runs/y/lock").exists()


def test_the_lock_ends_with_its_holder_however_it_ends() -> None:
    elsewhere("import os\nRunFolder('x').acquire()\nif os.fork() == 0: os._exit(1)\nos.wait()")
    holder = Path("runs/x/lock").read_text()
    RunDir("x").acquire()
    assert Path("runs/x/lock").read_text() != holder


@pytest.mark.parametrize(
    ("in_the_way", "why"),
    [("runs", "File exists"), ("runs/x", "File exists"), ("runs/x/tensorboard", "File exists")],
)
def test_a_folder_that_cannot_be_written_is_named(in_the_way: str, why: str) -> None:
    Path(in_the_way).parent.mkdir(parents=True, exist_ok=True)
    Path(in_the_way).write_text("")
    with pytest.raises(ConfigError) as refused:
        RunDir("x").acquire()
    assert str(refused.value) == (
        f"runs/x: cannot be written and locked ({why});"
        f" give this user write access to {Path.cwd()}/runs, or start from another folder"
    )


def test_fresh_moves_what_was_there_aside() -> None:
    first = RunDir("x")
    first.acquire()
    (first.checkpoints / "one").mkdir()
    first.metrics.write_text("{}")
    first.begin({"lr": 1}, fresh=False)
    RunDir("x").begin({"lr": 2}, fresh=True)
    (aside,) = first.path.glob("before-*")
    assert "lr: 1" in (aside / "config.yaml").read_text()
    assert "lr: 2" in first.config.read_text()
    assert sorted(path.name for path in aside.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert (aside / "checkpoints" / "one").is_dir()
    assert not list(first.checkpoints.iterdir())
    assert not first.metrics.exists()


def test_two_fresh_starts_within_a_second_keep_what_was_there_apart() -> None:
    folder = RunDir("x")
    folder.acquire()
    for number in range(3):
        folder.metrics.write_text(str(number))
        folder.begin({}, fresh=True)
    kept = [(aside / "metrics.jsonl").read_text() for aside in sorted(folder.path.glob("before-*"))]
    assert sorted(kept) == ["0", "1", "2"]


def test_fresh_leaves_an_untouched_folder_as_it_is() -> None:
    folder = RunDir("x")
    folder.acquire()
    folder.begin({}, fresh=True)
    assert not list(Path("runs/x").glob("before-*"))


def test_the_config_that_is_kept_starts_the_same_run_again() -> None:
    folder = RunDir("x")
    folder.acquire()
    hp = config.read({"hyperparameters": {"model": "llama3.2-1b", "lr": "1e-4", "prompt": "é: #"}}, [], "test")
    folder.begin(hp.model_dump(mode="json") | {"resume": "fresh"}, fresh=True)
    assert config.load(folder.config, []) == hp.model_copy(update={"run_name": "x"})
    assert yaml.safe_load(folder.config.read_text())["hyperparameters"]["d_model"] == 2048


def test_a_holder_that_left_no_name_is_another_process() -> None:
    Path("runs/x").mkdir(parents=True)
    script = """
import fcntl, time
lock = open("runs/x/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="runs/x: held by another process"):
            RunDir("x").acquire()
        holder.kill()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call is that of x86-64")
def test_a_lock_of_a_process_that_is_dying_is_waited_for() -> None:
    """A zombie whose other thread still lives, as SIGKILL leaves one in the middle of a write."""
    source = (
        "import ctypes, os, threading\n"
        "from lm.runtime.run_dir import RunFolder\n"
        "RunFolder('a').acquire()\n"
        "threading.Thread(target=os.read, args=(0, 1)).start()\n"  # until its standard input ends
        "print('held', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit, of this thread alone
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", source]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder,
        ThreadPoolExecutor(1) as pool,
    ):
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        acquired = pool.submit(RunDir("a").acquire)
        with pytest.raises(TimeoutError):
            acquired.result(timeout=0.5)
        holder.stdin.close()
        acquired.result()
