"""A run's folder off the cluster: `runs/<run_name>/`, owned by one run at a time.

config.yaml     what the run was started with, every hyperparameter spelled out
metrics.jsonl   a line per report
tensorboard/    scalars and traces
checkpoints/    a folder per checkpoint
lock            names the process that holds the run
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lm.errors import ConfigError, RunError
from lm.launch.environment import process_fields

ROOT = Path("runs")
DYING_SECONDS = 30.0


class RunDir:
    """The folder of the run `name`; making the object changes nothing on disk.

    Raises:
        ConfigError: a name that is no plain folder name (it must not lead out of `runs/`).
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,199}", name):
            raise ConfigError(
                f"run_name: {name!r} is not a folder name: letters, digits, '.', '_' and '-', a letter or digit first;"
                " give one with run_name=NAME"
            )
        self.path = ROOT / name
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"

    def hold(self, first: Callable[[Callable[[], str]], str], together: Callable[[Callable[[], None]], None]) -> None:
        """`acquire` on rank 0 for all ranks, and see on each that it is the same folder.

        Args:
            first: runs an action on rank 0 alone and gives all ranks what it returned.
            together: runs an action on every rank, and fails on all where one fails.

        Raises:
            ConfigError: a machine has another folder in this place; and as `acquire`.
        """
        holder = first(self.acquire)
        together(lambda: self._refuse_another(holder))

    def _refuse_another(self, holder: str) -> None:
        try:
            found = (self.path / "lock").read_text()
        except OSError as error:
            found = f"no lock ({error.strerror})\n"
        if found != holder:
            raise ConfigError(
                f"{self.path.absolute()}: held by {holder.strip()}, but {socket.gethostname()} has another folder"
                f" there, with {found.strip()}; start from a folder that all machines share"
            )

    def acquire(self) -> str:
        """Make the folder, readable by its owner alone, and hold it until this process ends.

        Returns:
            What the lock says of its holder.

        Raises:
            ConfigError: the folder cannot be written, or others can: what is in it could be anyone's.
            RunError: another process holds it; says which.
        """
        try:
            for path in (ROOT, self.path, self.checkpoints, self.tensorboard):
                path.mkdir(mode=0o700, exist_ok=True)
            for path in (self.path, self.checkpoints):
                _refuse_others(path)
            holder = hold(self.path / "lock")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written and locked ({error.strerror}); give this user write access to"
                f" {ROOT.absolute()}, or start from another folder"
            ) from None
        if holder:
            raise RunError(f"{self.path}: held by {holder}; wait for it, stop it, or choose another run_name")
        return (self.path / "lock").read_text()

    def begin(self, hyperparameters: Mapping[str, Any], fresh: bool) -> None:
        """Keep what the run was started with, as an experiment file that goes on with it.

        Args:
            fresh: first move what an earlier run left to `before-<time>/` inside the folder.

        Raises:
            RunError: it cannot be written.
        """
        again = {"run_name": self.path.name, "resume": "auto"}
        draft = self.config.with_suffix(".draft")
        try:
            if fresh:
                self._set_aside()
            draft.write_text(yaml.safe_dump({"hyperparameters": dict(hyperparameters) | again}, sort_keys=False))
            draft.replace(self.config)
        except OSError as error:
            raise RunError(f"{error.filename or self.path}: cannot be written ({error.strerror})") from None

    def _set_aside(self) -> None:
        left = [path for path in (self.checkpoints, self.tensorboard, self.config, self.metrics) if path.exists()]
        if not any(path.is_file() or any(path.iterdir()) for path in left):
            return
        aside = self.path / time.strftime("before-%Y%m%d-%H%M%S")
        while aside.exists():  # two within a second
            aside = aside.with_name(f"{aside.name}-again")
        aside.mkdir(mode=0o700)
        for path in left:
            path.rename(aside / path.name)
        self.checkpoints.mkdir(mode=0o700)
        self.tensorboard.mkdir(mode=0o700)


def hold(path: Path) -> str | None:
    """Lock the file `path` until this process ends and return None, or say who has locked it.

    A process that was killed keeps its lock until the kernel is done with its last write, which takes
    a moment; a run that is started again at once waits for that.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # never closed: held to the end
    deadline = time.monotonic() + DYING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
            if not _is_dying(holder) or time.monotonic() > deadline:
                return holder
            time.sleep(0.05)
    os.ftruncate(lock, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)
    os.fsync(lock)  # other machines may be about to look at it
    return None


def _is_dying(holder: str) -> bool:
    """Whether the process on this machine that `holder` names has ended but for its last writes."""
    found = re.match(r"process (\d+) on (\S+) since", holder)
    if not found or found[2] != socket.gethostname() or not Path("/proc/self").exists():
        return False
    try:
        return process_fields(int(found[1]))[0] in "ZX"
    except OSError:
        return True


def _refuse_others(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"{path}: belongs to user {status.st_uid}, not to you ({os.getuid()}); choose another run_name"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{path}: anyone can write to it; look at what is in it, then: chmod o-w {path}")
