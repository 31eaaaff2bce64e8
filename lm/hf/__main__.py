"""Command: Hugging Face weights in and out."""

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
    parser = argparse.ArgumentParser(prog="python -m lm.hf", description="Hugging Face weights in and out.")
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="make a checkpoint of a Hugging Face model")
    into.add_argument("source", metavar="SOURCE", help="a folder, or a name on the Hugging Face hub")
    into.add_argument("out", type=Path, metavar="OUT", help="the checkpoint to make")
    into.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub (the newest)")
    back = commands.add_parser("export", help="make a Hugging Face model of a checkpoint")
    back.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint's or a run's folder")
    back.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    back.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    args = parser.parse_args(arguments)
    os.umask(0o077)
    started = time.monotonic()
    try:
        if args.command == "import":
            notes: list[str] = []
            manifest = import_model(args.source, args.out, args.revision, notes.append)
            size = sum(entry.bytes for entry in manifest.files.values())
            print(f"{args.out}: {size / 1e9:,.2f} GB in {time.monotonic() - started:.0f} s; a run from it needs:")
            defaults = ModelConfig.model_validate({}).model_dump(mode="json")
            for key, value in {"init_from": str(args.out), **manifest.model}.items():
                if value != defaults.get(key):
                    print(f"  {key}: {json.dumps(value)}")
            print(*notes, sep="\n", end="\n" if notes else "")
        else:
            size = export_model(args.checkpoint, args.out, args.dtype)
            print(f"{args.out}: {size / 1e9:,.2f} GB of {args.dtype} in {time.monotonic() - started:.0f} s")
        return 0
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
