"""The container of a trial: Determined's entrypoint in private namespaces.

    python -m tests.support.cluster.container CHECKPOINT_STORAGE

An agent has set the environment. All processes end with the container.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

STORAGE = "/run/checkpoints"
"""The checkpoint storage inside a container."""
NEW_MOUNTS, NEW_USERS, NEW_PIDS = 0x20000, 0x10000000, 0x20000000
"""of unshare, as in linux/sched.h"""
RECURSIVE, PRIVATE = 0x4000, 0x40000
"""of mount, as in linux/mount.h"""
PR_SET_PDEATHSIG = 1
"""of prctl, as in linux/prctl.h"""

PREPARE = ("python3", "-m", "determined.exec.prep_container")
HOOK = "set -ex; test -f startup-hook.sh && source startup-hook.sh; env -0 > /run/environment"


def enter_namespaces() -> None:
    """Give this process private mounts, and its children private process IDs.

    Raises:
        OSError: this machine does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    flags = NEW_MOUNTS | NEW_PIDS
    if user:
        flags |= NEW_USERS
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount")


def run(*command: str) -> None:
    """Run a command; exit with its code if it fails."""
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def run_entrypoint(storage: str) -> None:
    """Run the commands of Determined's container entrypoint, in order."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for folder in ("info", "train", "workdir"):
        Path("/run/determined", folder).mkdir(parents=True)
    Path(STORAGE).mkdir()
    run("mount", "--bind", storage, STORAGE)
    os.chdir("/run/determined/workdir")
    run(*PREPARE, "--download_context_directory", "--resources", "--proxy")
    subprocess.run(["bash", "-c", HOOK], check=True)
    lines = Path("/run/environment").read_text().split("\0")
    os.environ.update(dict(line.split("=", 1) for line in lines if line))
    run(*PREPARE, "--rendezvous")
    run("python3", "-m", "determined.exec.launch")


def main() -> int:
    """Run the command. Return its exit code."""
    enter_namespaces()
    context = multiprocessing.get_context("fork")
    first = context.Process(target=run_entrypoint, args=sys.argv[1:])
    first.start()
    first.join()
    assert first.exitcode is not None
    return first.exitcode


if __name__ == "__main__":
    sys.exit(main())
