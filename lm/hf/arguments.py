"""Arguments of the commands that load a model."""

from __future__ import annotations

import argparse

from lm.command_line import path_argument
from lm.hf.files import WEIGHT_DTYPES


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --base and --dtype, as `lm.hf.base.open_model` takes them."""
    add = parser.add_argument
    add(
        "--base",
        type=path_argument,
        metavar="DIRECTORY",
        help="a copy of the base of LoRA adapters",
    )
    dtype_help = "dtype of the weights and of all computations (%(default)s)"
    add("--dtype", choices=WEIGHT_DTYPES, default="float32", help=dtype_help)
