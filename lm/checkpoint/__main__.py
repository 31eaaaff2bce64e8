"""Command: list and verify checkpoints.

    python -m lm.checkpoint list RUN
    python -m lm.checkpoint verify CHECKPOINT

Exit code 1 if a checkpoint is incomplete or damaged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.checkpoint.manifest import CheckpointError, read_manifest, verify
from lm.checkpoint.resume import find_checkpoint
from lm.checkpoint.retention import SavedCheckpoint, find_best, list_saved
from lm.errors import ConfigError, command, oserror_as_config_error


def describe(directory: Path) -> str:
    """Return a line about the checkpoint in `directory`; raise CheckpointError if a file is missing or damaged."""
    manifest = read_manifest(directory)
    verify(directory, manifest)
    size = sum(entry.bytes for entry in manifest.files.values())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    loss = "" if manifest.validation_loss is None else f"  validation loss {manifest.validation_loss:.4f}"
    world = f"{manifest.sharding} x {manifest.world_size}"
    return f"{directory.name}  step {manifest.step}  {when}  {size / 1e6:,.1f} MB  {world}{loss}  complete"


@oserror_as_config_error
def list_run(run: Path) -> bool:
    """Print a line for each checkpoint of a run directory; return whether all are complete."""
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        raise ConfigError(f"{run.absolute()}: is not a run directory: it has no checkpoints/")
    saved, errors = list_saved(checkpoints)
    lines: dict[SavedCheckpoint, str] = {}
    for entry in saved:
        try:
            lines[entry] = describe(checkpoints / entry.name)
        except CheckpointError as error:
            errors[checkpoints / entry.name] = error
    best = find_best(list(lines))
    for entry, line in lines.items():
        print(line + "  best" * (entry is best))
    for path, error in errors.items():
        print(f"{path.name}  not complete: {error}")
    return not errors


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lm.checkpoint", description="List and verify checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list a run's checkpoints").add_argument("path", type=Path, metavar="RUN")
    commands.add_parser("verify", help="verify all checksums").add_argument("path", type=Path, metavar="CHECKPOINT")
    args = parser.parse_args(arguments)
    if args.command == "verify":
        print(describe(find_checkpoint(args.path)))
        return 0
    return 0 if list_run(args.path) else CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main())
