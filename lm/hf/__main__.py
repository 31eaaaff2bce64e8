"""Command line of the Hugging Face import and export."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.errors import RunError
from lm.hf.export import export_model, import_model
from lm.hf.weights import DTYPES
from model import ModelConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lm.hf", description="Import and export Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="convert a Hugging Face model to a checkpoint")
    into.add_argument("source", metavar="SOURCE", help="a directory, or a name on the Hugging Face Hub")
    into.add_argument("out", type=Path, metavar="OUT", help="checkpoint directory to create")
    into.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub (default: main)")
    back = commands.add_parser("export", help="convert a checkpoint to a Hugging Face model")
    back.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint or run directory")
    back.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    back.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    args = parser.parse_args(arguments)
    os.umask(0o077)
    started = time.monotonic()
    try:
        if args.command == "import":
            notes: list[str] = []
            manifest = import_model(args.source, args.out, args.revision, notes.append)
            size = sum(entry.bytes for entry in manifest.files.values())
            print(f"{args.out}: {size / 1e9:,.2f} GB in {time.monotonic() - started:.0f} s; hyperparameters to use:")
            defaults = ModelConfig.model_validate({}).model_dump(mode="json")
            for key, value in {"init_from": str(args.out), **manifest.model}.items():
                if value != defaults.get(key):
                    print(f"  {key}: {json.dumps(value)}")
            print(*notes, sep="\n", end="\n" if notes else "")
        else:
            size = export_model(args.checkpoint, args.out, args.dtype)
            print(f"{args.out}: {size / 1e9:,.2f} GB in {args.dtype} in {time.monotonic() - started:.0f} s")
        return 0
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
