"""Run directories: one run at a time, private to their owner, and never deleted."""

from __future__ import annotations

import errno
import os
import platform
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lm.checkpoint.store import LocalCheckpoints
from lm.config.reading import load_hyperparameters, read_hyperparameters
from lm.errors import ConfigError, RunError
from lm.fileio import print_once
from lm.runtime.run_dir import RunDir
from lm.runtime.run_state import RunState, begin_run, read_state
from lm.storage.lock import GRACE_SECONDS, hold_until_exit, require_held
from tests.support import PATIENCE, REPOSITORY
from tests.support.hyperparameters import named_keys
from tests.support.ranks import in_world
from tests.support.runs import checkpoints_by_step, run_fsdp


@pytest.fixture(autouse=True)
def _chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    print_once.cache_clear()


def start_python(script: str, **env: str) -> subprocess.Popen[str]:
    """Start `script` in another process, after some imports."""
    command = [
        sys.executable,
        "-c",
        "import os\nfrom pathlib import Path\nfrom lm.storage.lock import hold_until_exit\n"
        f"{script}",
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def started(name: str = "x") -> RunDir:
    """A locked run directory."""
    run_dir = RunDir(name)
    in_world(run_dir.lock)
    return run_dir


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "/tmp/x",
        "a/b/c",
        "a/",
        "a/../b",
        ".hidden",
        "-rf",
        "a b",
        "a\n",
        "a;b",
        "é",
        "~",
    ],
)
def test_run_name_outside_of_runs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^run_name: {re.escape(repr(name))} "):
        RunDir(name)


def test_run_name_of_a_group_resumes_there() -> None:
    run_dir = started("group/x")
    assert run_dir.path == Path("runs/group/x")
    run_dir.add_session({"lr": 1}, {})
    config = yaml.safe_load((run_dir.path / "config.yaml").read_text())
    assert config["hyperparameters"]["run_name"] == "group/x"


def test_run_dir_constructor_creates_nothing() -> None:
    RunDir("x")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("umask", "directory", "file"),
    [(0o077, 0o700, 0o600), (0o002, 0o775, 0o664), (0, 0o775, 0o666)],
)
def test_run_dir_modes_follow_the_umask(umask: int, directory: int, file: int) -> None:
    before = os.umask(umask)
    try:
        run_dir = started()
    finally:
        os.umask(before)
    for path in (run_dir.path, run_dir.checkpoints, run_dir.traces):
        assert stat.S_IMODE(path.stat().st_mode) == directory
    assert stat.S_IMODE((run_dir.path / "lock").stat().st_mode) == file


def test_run_dir_accepts_a_file_system_that_maps_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS for root, and at an access point of EFS: new files belong to another user."""
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert started().path.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_lock_names_the_process_that_holds_it(named: bool) -> None:
    Path("runs/x").mkdir(parents=True)
    flock = "import fcntl\nfile = open('runs/x/lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    lock = "hold_until_exit(Path('runs/x/lock'))\n" if named else flock
    with start_python(f"{lock}print('locked', flush=True)\ninput()") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        started_at = time.monotonic()
        with pytest.raises(RunError) as refused:
            in_world(RunDir("x").lock)
        assert time.monotonic() - started_at < GRACE_SECONDS + 60
        started("y")  # another run
        holder.kill()
    assert refused.value.exit_code == 1
    assert named_keys(refused.value) >= {"run_name"}
    assert (f"process {holder.pid} on " in str(refused.value)) == named


def test_run_in_the_directory_of_a_group_is_refused() -> None:
    started("x/trial-0")
    with pytest.raises(ConfigError, match=r"runs/x: is a group of runs, .*run_name=NAME"):
        started("x")
    assert [path.name for path in Path("runs/x").iterdir()] == ["trial-0"]
    started("y/other")
    Path("runs/y/config.yaml").touch()
    started("y")  # a run with a group in its directory is still a run
    with pytest.raises(ConfigError, match="runs/y: is a run, "):
        started("y/another")  # which `resume=fresh` of y would move aside


def test_lock_is_not_inherited_by_forked_processes() -> None:
    fork = "if os.fork() == 0:\n    os.close(1)\n    input()\n"
    with start_python(f"hold_until_exit(Path('x'))\n{fork}os.kill(os.getpid(), 9)") as holder:
        holder.wait()
        hold_until_exit(Path("x"))
        assert Path("x").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="uses the number of a system call of x86-64"
)
def test_lock_of_a_killed_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL in the middle of a write, the process is a zombie with a live thread."""
    script = (
        "import ctypes, threading\n"
        "hold_until_exit(Path('x'))\n"
        "threading.Thread(target=os.read, args=(0, 1)).start()\n"  # until stdin is closed
        "print('locked', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit of the main thread
    )
    with start_python(script) as holder, ThreadPoolExecutor(1) as pool:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        monkeypatch.setattr("lm.storage.lock.GRACE_SECONDS", PATIENCE)
        locked = pool.submit(hold_until_exit, Path("x"))
        with pytest.raises(TimeoutError):
            locked.result(timeout=0.5)
        holder.stdin.close()
        locked.result()


LOCK = """
from lm.runtime.run_dir import RunDir
try:
    RunDir('x')._create_and_lock()
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("error", [errno.ENOLCK, 0])
def test_file_system_without_locks_is_refused(tmp_path: Path, library: str, error: int) -> None:
    """Also one on which every process receives the lock."""
    process = start_python(LOCK, LD_PRELOAD=library, FLOCK=str(error))
    output, _ = process.communicate()
    assert output.startswith(f"{tmp_path}/runs/x/lock: the file system has no locks")
    assert "mount -o flock" in output


def test_lock_that_another_machine_received_too_is_noticed() -> None:
    """As on file systems on which machines have separate locks."""
    path = Path("runs/x/lock")
    path.parent.mkdir(parents=True)
    hold_until_exit(path)
    require_held(path)
    path.write_text("process 1 on elsewhere\n")
    with pytest.raises(RunError, match=r"^runs/x: in use by process 1 on elsewhere; "):
        require_held(path)


NO_DIRECTORY_FSYNC = [errno.EINVAL, errno.EPERM]


@pytest.mark.parametrize("error", NO_DIRECTORY_FSYNC)
def test_directory_that_cannot_be_flushed_costs_nothing(library: str, error: int) -> None:
    script = """
from lm.fileio import sync_directory
before = os.listdir('/proc/self/fd')
sync_directory(Path('.'))
print(os.listdir('/proc/self/fd') == before)
"""
    process = start_python(script, LD_PRELOAD=library, DIRECTORY_FSYNC=str(error))
    assert process.communicate()[0] == "True\n"


def test_directory_whose_flush_fails_is_an_error(library: str) -> None:
    script = """
from lm.fileio import sync_directory
before = os.listdir('/proc/self/fd')
try:
    sync_directory(Path('.'))
except OSError as error:
    print(error.errno, os.listdir('/proc/self/fd') == before)
"""
    process = start_python(script, LD_PRELOAD=library, DIRECTORY_FSYNC=str(errno.EIO))
    assert process.communicate()[0] == f"{errno.EIO} True\n"


@pytest.mark.slow
def test_run_on_a_file_system_without_flushes_of_directories(tmp_path: Path, library: str) -> None:
    env: dict[str, Any] = {"LD_PRELOAD": library, "DIRECTORY_FSYNC": str(errno.EINVAL)}
    run_fsdp(tmp_path, "max_steps=2", "checkpoint_rate=1", code=0, **env)
    assert list(checkpoints_by_step(tmp_path)) == [1, 2]


@pytest.mark.parametrize("name", ["runs", "runs/x/traces", "runs/x/checkpoints"])
def test_directory_writable_by_all_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).mkdir(parents=True)
    Path(name).chmod(0o707)
    in_world(RunDir("x").lock)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: writable by all users")
    assert line.endswith(f": chmod o-w {name}")


@pytest.mark.slow
def test_run_on_a_file_system_that_cannot_save_is_refused(tmp_path: Path, library: str) -> None:
    env: dict[str, Any] = {"LD_PRELOAD": library, "RENAME": str(errno.EPERM)}
    result = run_fsdp(tmp_path, code=2, **env)
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith(f"{tmp_path}/runs/test/checkpoints: a test of what saving needs ")
    assert "Operation not permitted" in line
    assert not (tmp_path / "runs").exists()


def test_directory_of_a_run_that_has_started_stays() -> None:
    run_dir = RunDir("started")
    run_dir.remove_unused()  # which it has not locked
    in_world(run_dir.lock)
    run_dir.add_session({}, {"step": 0})
    run_dir.remove_unused()
    assert run_dir.checkpoints.is_dir()


def test_failed_start_remembers_where_its_checkpoint_was_moved() -> None:
    """E.g. on a disk that is full when config.yaml is written."""
    run_dir = RunDir("moved")
    in_world(run_dir.lock)
    checkpoint = run_dir.checkpoints.absolute() / "uuid"
    checkpoint.mkdir()
    (checkpoint / "file").touch()
    store = LocalCheckpoints(run_dir.checkpoints)
    begin_run(store.places, RunState(resumed_from=str(checkpoint)), fresh=True)
    run_dir.remove_unused()
    start = read_state(store.places).resumed_from
    assert start is not None
    assert Path(start, "file").exists()


@pytest.mark.parametrize("mode", [0o777, 0o2777])
def test_mount_writable_by_all_is_one_warning(
    mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every directory of some mounts is, whatever chmod says."""
    for name in ("runs", "runs/x", "runs/x/checkpoints"):
        Path(name).mkdir()
        Path(name).chmod(mode)
    in_world(RunDir("x").lock)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runs: writable by all users")


@pytest.mark.parametrize("in_the_way", ["runs", "runs/x", "runs/x/traces"])
def test_run_dir_that_cannot_be_created_is_named(in_the_way: str) -> None:
    Path(in_the_way).parent.mkdir(parents=True, exist_ok=True)
    Path(in_the_way).write_text("")
    expected = f"^runs/x: .*{in_the_way}: File exists.* {Path('runs').absolute()} rename"
    with pytest.raises(ConfigError, match=expected):
        in_world(RunDir("x").lock)


def test_lock_that_fails_is_named_with_its_cause(library: str) -> None:
    process = start_python(LOCK, LD_PRELOAD=library, FLOCK=str(errno.EIO))
    output, _ = process.communicate()
    assert "(Input/output error); start in another directory" in output


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_lock_that_is_no_file_is_named(make: Callable[[Path], None]) -> None:
    Path("runs/x").mkdir(parents=True)
    make(Path("runs/x/lock"))
    with pytest.raises(ConfigError, match=r"^runs/x: .*\(.*runs/x/lock: .*\); .* rename"):
        in_world(RunDir("x").lock)


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        Path.touch,
        lambda path: path.write_text('{"resume": 1}'),
        lambda path: path.write_text('{"moving_to": "../other"}'),
        lambda path: path.write_bytes(b" " * 100_000),
        lambda path: path.symlink_to("/etc/hostname"),
    ],
    ids=["directory", "FIFO", "empty", "wrong type", "outside", "too long", "link"],
)
def test_state_that_cannot_be_read_is_named_at_the_start(
    make: Callable[[Path], None],
) -> None:
    """Saving would notice it after many steps."""
    path = Path("runs/x/state.json")
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(ConfigError, match=f"^{path}: .*; move it"):
        started()


def test_move_aside_moves_the_files_of_every_previous_run() -> None:
    run_dir = started()
    checkpoints = LocalCheckpoints(run_dir.checkpoints)
    begin_run(checkpoints.places, RunState(), fresh=True)
    assert not list(run_dir.path.glob("before-*")), "nothing to move"
    run_dir.add_session({"lr": 0}, {"step": 0})
    for lr in (1, 2):  # within a second
        (run_dir.checkpoints / f"of-{lr - 1}").mkdir()
        run_dir.metrics.write_text(str(lr - 1))
        os.mkfifo(run_dir.path / "fifo")
        (run_dir.path / "link").symlink_to("nowhere")
        begin_run(checkpoints.places, RunState(), fresh=True)
        run_dir.add_session({"lr": lr}, {"step": lr})
        assert f"lr: {lr}\n" in run_dir.config.read_text()
        assert not list(run_dir.checkpoints.iterdir())
        assert not run_dir.metrics.exists()
    moved = {(path / "metrics.jsonl").read_text(): path for path in run_dir.path.glob("before-*")}
    assert sorted(moved) == ["0", "1"]
    for lr, path in moved.items():
        files = {"config.yaml", "metrics.jsonl", "sessions.jsonl", "fifo", "link", "state.json"}
        assert {each.name for each in path.iterdir()} == files | {"checkpoints"}
        assert f"lr: {lr}\n" in (path / "config.yaml").read_text()
        assert (path / "checkpoints" / f"of-{lr}").is_dir()


def test_run_dirs_config_yaml_resumes_the_run() -> None:
    run_dir = started("1e-4")
    hp = read_hyperparameters(
        {"hyperparameters": {"model": "llama3.2-1b", "lr": "1e-4", "prompt": "é: #"}}, [], "test"
    )
    run_dir.add_session(hp.to_flat() | {"resume": "fresh"}, {"step": 0})
    assert load_hyperparameters(run_dir.config, []) == hp.replace(run_name="1e-4")
    assert yaml.safe_load(run_dir.config.read_text())["hyperparameters"]["d_model"] == 2048
