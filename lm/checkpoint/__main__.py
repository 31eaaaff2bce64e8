"""Command: list and verify checkpoints.

    python -m lm.checkpoint list RUN
    python -m lm.checkpoint verify CHECKPOINT|RUN

RUN and CHECKPOINT are directories or URLs; of a RUN, `verify` reads all checkpoints. It checks what
loading checks before it compares the tensors with its own. `list` reads no tensors, and of a run in
object storage compares only the sizes of the files. Exit code 1 if a checkpoint is incomplete or
damaged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from lm.checkpoint.layout import find_tensors, require_sizes_of_model
from lm.checkpoint.locate import locate_checkpoint, store_at
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import (
    PARTS,
    CheckpointError,
    Manifest,
    NoManifestError,
)
from lm.checkpoint.store import CheckpointStore, SavedCheckpoint, find_best
from lm.errors import ConfigError, command, oserror_as_config_error
from lm.fileio import expand_home
from lm.units import format_bytes


def describe(name: str, manifest: Manifest, checked: str) -> str:
    """Return a line about the checkpoint `name`, which ends with how far it was checked."""
    size = sum(entry.bytes for entry in manifest.files.values())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    loss = ""
    if manifest.validation_loss is not None:
        loss = f"  validation loss {manifest.validation_loss:.4f}"
    world = f"{manifest.sharding} x {manifest.world_size}"
    return f"{name}  step {manifest.step}  {when}  {format_bytes(size)}  {world}{loss}  {checked}"


@oserror_as_config_error
def list_run(run: str) -> tuple[list[str], bool]:
    """Return a line for each checkpoint of the run at a path or URL; see `_describe_all`."""
    store = store_at(run)
    lines, all_complete = _describe_all(store, check_listed)
    if not lines:
        locate_checkpoint(run)  # raises what is wrong, unless it is one checkpoint
        remedy = "pass the directory or URL of a run that has saved one"
        raise ConfigError(f"{store}: no checkpoints; {remedy}")
    return lines, all_complete


def _describe_all(store: CheckpointStore, check: Check) -> tuple[list[str], bool]:
    """Return a line for each checkpoint of a run, and whether all are complete.

    What the run is saving now does not count.
    """
    saved, errors = store.list_saved()
    lines: dict[str, str] = {}
    intact: list[SavedCheckpoint] = []
    for entry in saved:
        location = store.locate(entry.name)
        try:
            lines[entry.name] = describe(
                entry.name, entry.manifest, check(location, entry.manifest)
            )
            intact.append(entry)
        except CheckpointError as error:
            errors[location] = error
    best = find_best(intact)
    if best is not None:
        lines[best.name] += "  best"
    found = list(lines.values())
    all_complete = True
    is_in_use = store.is_in_use()
    for where, error in errors.items():
        if is_in_use and isinstance(error, NoManifestError):
            found.append(f"{where.name}  is being saved, or was when a kill ended the run before")
        else:
            found.append(f"{where.name}  not complete: {error}")
            all_complete = False
    return found, all_complete


Check = Callable[[Location, Manifest], str]
"""Checks a checkpoint that has all files of its manifest; returns how far."""


def check_listed(location: Location, manifest: Manifest) -> str:
    """Read no tensors, and in object storage no headers."""
    require_sizes_of_model(str(location), manifest)
    if location.path is not None:
        find_tensors(location.path, manifest)
    return "all files present"


def verify_at(location: Location, manifest: Manifest) -> str:
    """Read all of a checkpoint."""
    from lm.checkpoint.contents import verify  # with PyTorch, which `list` does not need

    with location.fetch() as path:
        try:
            verify(path, manifest)
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(path), str(location))) from None
    return "complete"


@oserror_as_config_error
def verify_path(path: str) -> tuple[list[str], bool]:
    """Return what `list_run` does, of one checkpoint or of all of a run, which are read."""
    lines, all_complete = _describe_all(store_at(path), verify_at)
    if lines:
        return lines, all_complete
    location = locate_checkpoint(path)
    manifest = location.read_manifest(PARTS)
    return [describe(location.name, manifest, verify_at(location, manifest))], True


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.checkpoint", description="List and verify checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    list_parser = commands.add_parser("list", help="list a run's checkpoints")
    list_parser.add_argument("path", type=expand_home, metavar="RUN")
    verify_parser = commands.add_parser("verify", help="read one checkpoint, or all of a run")
    verify_parser.add_argument("path", type=expand_home, metavar="CHECKPOINT|RUN")
    args = parser.parse_args(arguments)
    report = list_run if args.command == "list" else verify_path
    lines, all_complete = report(args.path)
    print("\n".join(lines))
    return 0 if all_complete else CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main())
