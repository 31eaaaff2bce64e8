"""Command: list and verify checkpoints.

    python -m lm.checkpoint list CHECKPOINT|RUN
    python -m lm.checkpoint verify CHECKPOINT|RUN

RUN and CHECKPOINT are directories or URLs; a RUN stands for all its checkpoints. `verify` checks
what loading checks before it compares the tensors with its own. `list` reads no tensors, and in
object storage compares only the sizes of the files. Exit code 1 if a checkpoint is incomplete or
damaged.
"""

from __future__ import annotations

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
)
from lm.checkpoint.store import DraftError, SavedCheckpoint, find_best
from lm.command_line import location_argument
from lm.errors import Parser, command, oserror_as_config_error
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
def describe_at(where: str, check: Check) -> tuple[list[str], bool]:
    """Return a line for the checkpoint at a path or URL, or for each of the run there.

    Returns:
        Also whether all are complete. Drafts, and what the run deletes meanwhile, do not count.
    """
    store = store_at(where)
    saved, errors = store.list_saved()
    if not saved and not errors:
        location = locate_checkpoint(where)
        manifest = location.read_manifest(PARTS)
        return [describe(location.name, manifest, check(location, manifest))], True
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
    remaining = store.folders()
    for location, error in errors.items():
        if location.name not in remaining:
            continue
        found.append(f"{location.name}  not complete: {error}")
        if not isinstance(error, DraftError):
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


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(prog="python -m lm.checkpoint", description="List and verify checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    purposes = {"list": "compare the sizes of their files", "verify": "read their files"}
    for name, purpose in purposes.items():
        subparser = commands.add_parser(name, help=f"list checkpoints, and {purpose}")
        subparser.add_argument("path", type=location_argument, metavar="CHECKPOINT|RUN")
    args = parser.parse_args(arguments)
    check = check_listed if args.command == "list" else verify_at
    lines, all_complete = describe_at(args.path, check)
    print("\n".join(lines))
    return 0 if all_complete else CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main())
