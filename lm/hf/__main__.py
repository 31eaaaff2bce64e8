"""Command: export to Hugging Face, and examine classes of transformers.

    python -m lm.hf export RUN OUT [--dtype float32|bfloat16|float16] [--base DIRECTORY]
                           [--adapter]
    python -m lm.hf examine MODEL|MODEL_TYPE

RUN is the directory or URL of a checkpoint or run. LoRA adapters are merged into their base, which
is read from where it was in training, or from DIRECTORY, and has the values that training computed
with: dequantized ones, if it was in base_dtype. With --adapter they are written alone, in PEFT's
format. Of a class of transformers, the other files are copied from where the run started, or from
DIRECTORY. MODEL is a directory of Hugging Face, or a name on the Hub.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from lm.command_line import location_argument, path_argument
from lm.errors import Parser, command
from lm.fileio import choose_compiler_cache
from lm.hf.files import WEIGHT_DTYPES
from lm.units import format_bytes


def _export(args: argparse.Namespace) -> int:
    from lm.hf.export import export_model  # imports PyTorch, which takes seconds

    started = time.monotonic()
    n_bytes = export_model(args.checkpoint, args.out, args.dtype, args.base, args.adapter)
    seconds = time.monotonic() - started
    in_dtype = f" in {args.dtype}" if args.dtype is not None else ""
    print(f"{args.out}: {format_bytes(n_bytes)}{in_dtype} in {seconds:.0f} s")
    return 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = Parser(
        prog="python -m lm.hf",
        description="Export to Hugging Face, and examine classes of transformers.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    export = commands.add_parser("export", help="convert a checkpoint to a Hugging Face model")
    add = export.add_argument
    add(
        "checkpoint",
        type=location_argument,
        metavar="RUN",
        help="directory or URL of a checkpoint or run",
    )
    add("out", type=path_argument, metavar="OUT", help="directory to create")
    dtypes = WEIGHT_DTYPES
    add(
        "--dtype",
        choices=dtypes,
        help="of the weights (float32; of a class of transformers: as in its files)",
    )
    base_help = "a copy of the base of adapters; of a class of transformers: the original model"
    add("--base", type=path_argument, metavar="DIRECTORY", help=base_help)
    add("--adapter", action="store_true", help="write LoRA adapters alone, in PEFT's format")

    examine_help = "print what of a class of transformers can be trained exactly here"
    examined = commands.add_parser("examine", help=examine_help)
    class_help = "a directory, OWNER/MODEL[@REVISION] on the Hub, or a model_type, e.g. lfm2"
    examined.add_argument("source", type=location_argument, metavar="MODEL", help=class_help)

    args = parser.parse_args(arguments)
    choose_compiler_cache()
    if args.command == "export":
        return _export(args)

    from lm.hf import describe  # imports PyTorch, which takes seconds

    text, code = describe.describe_examination(args.source)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
