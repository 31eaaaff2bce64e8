"""Command: list and verify checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.checkpoint.manifest import (
    DELETED,
    CheckpointError,
    read_manifest,
    verify,
)
from lm.checkpoint.resume import find_checkpoint
from lm.errors import ConfigError, RunError, oserror_as_config_error


def describe(folder: Path) -> str:
    """One line on the checkpoint in `folder`, after a look at every byte of it.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    manifest = read_manifest(folder)
    verify(folder, manifest)
    size = sum(entry.bytes for entry in manifest.files.values())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    loss = "" if manifest.validation_loss is None else f"  validation loss {manifest.validation_loss:.4f}"
    world = f"{manifest.sharding} x {manifest.world_size}"
    return f"{folder.name}  step {manifest.step}  {when}  {size / 1e6:,.1f} MB  {world}{loss}  whole"


@oserror_as_config_error
def list_run(folder: Path) -> bool:
    """Print a line on each checkpoint of the run in `folder`. Returns whether all are whole.

    Raises:
        ConfigError: it is no run's folder.
    """
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        raise ConfigError(f"{folder}: is no run's folder, it has no checkpoints/")
    paths = [path for path in checkpoints.iterdir() if path.is_dir() and not path.name.startswith(DELETED)]
    all_complete = True
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            print(describe(path))
        except CheckpointError as error:
            print(f"{path.name}  not whole: {error}")
            all_complete = False
    return all_complete


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all checkpoints of a run").add_argument("folder", type=Path, metavar="RUN")
    commands.add_parser("verify", help="compare every file with its checksum").add_argument(
        "folder", type=Path, metavar="CHECKPOINT"
    )
    args = parser.parse_args(arguments)
    try:
        if args.command == "verify":
            print(describe(find_checkpoint(args.folder)))
            return 0
        return 0 if list_run(args.folder) else CheckpointError.exit_code
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
