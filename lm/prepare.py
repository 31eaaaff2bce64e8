"""Command: convert text, JSONL, CSV, Parquet, Arrow and HDF5 files to token files.

    python -m lm.prepare INPUT... --tokenizer T --out DIR
    python -m lm.prepare NAME --split SPLIT [--hf-config NAME] --tokenizer T --out DIR
    python -m lm.prepare --config FILE [KEY=VALUE...] --out DIR
    python -m lm.prepare --verify DIR

With --config, the records of `train_data` are prepared as a run on `dataset: jsonl` reads them,
chats and pairs, too; DIR is then its `train_data`. Else an input is a file, a directory or a glob.
With --split, the input or `train_data` is a dataset of the Hugging Face Hub, which is read as a
stream, or with --split train, local files that `dataset: hf` reads.
DIR receives train.bin, train.ends and train.json, of records train.mask, with --validation-fraction
also validation.bin and so on, the tokenizer's files, and manifest.json with all checksums.
Documents are read and tokens are written in the order of the input; a thread on each core encodes
parts of 128 KB, which takes about 120 bytes of memory per byte. Text without spaces between words
is encoded in one piece.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lm.command_line import location_argument, path_argument
from lm.data import run_data
from lm.data.files import FORMATS, find_files, format_of
from lm.data.stream import open_documents
from lm.data.text import TextFiles
from lm.data.token_file import OUTPUT_FILES, find_token_files, read_index
from lm.data.tokenized import (
    Options,
    TextOptions,
    describe_making,
    describe_tokenizer,
    require_unchanged,
)
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT, FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import Tokenizer, load_tokenizer, train_tokenizer
from lm.errors import ConfigError, Parser, command
from lm.fileio import write_durably
from lm.launch.process import run_and_exit
from lm.model_config import MAX_SIZE
from lm.storage.cache import checksum, describe_files, file_states
from lm.storage.folder import drafted, read_manifest, write_manifest, writing
from lm.transformers_config import Kernels
from lm.units import format_count


@dataclass(frozen=True)
class _Input:
    """What is prepared."""

    files: Sequence[Path]
    """or the name of a dataset"""
    tokenizer: Tokenizer | None
    """None = it is trained on the text"""
    options: Options


def read_records_of_run(args: argparse.Namespace) -> _Input:
    """Return what a run on `dataset: jsonl` tokenizes of its `train_data`."""
    from lm.config.reading import load_hyperparameters  # imports PyTorch
    from lm.hf.weights import model_defaults

    def defaults(source: str, _kernels: Kernels | None) -> Mapping[str, Any]:
        return model_defaults(source, needs_weights=False)  # of kernels that may not be here

    hp = load_hyperparameters(args.config, args.input, defaults)
    if hp.data.dataset != "jsonl":
        problem = f"{hp.data.dataset}: --config prepares records, with dataset: jsonl"
        raise ConfigError(f"dataset: {problem}; for text pass INPUT and --tokenizer")
    where = hp.data.train_data
    assert not isinstance(where, dict)  # as only token files have weights
    if where is not None and args.split is not None:
        files = [Path(where)]
    else:
        files = run_data.find_record_files(where, "train_data")
    holds_out = hp.data.val_data is None
    options = run_data.record_options(hp.data, pairs=hp.objective.of_pairs, holds_out=holds_out)
    options = replace(options, split=args.split, hf_config=args.hf_config)
    tokenizer = run_data.load_run_tokenizer(hp.data, hp.model.vocab_size)
    return _Input(files, tokenizer, options)


def read_input(args: argparse.Namespace) -> _Input:
    """Return what the command line names as documents of text, or of ids."""
    files = find_inputs(args)
    tokenizer = None
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
    options = TextOptions(
        format=args.format,
        text_field=args.text_field,
        validation_fraction=args.validation_fraction,
        train_tokenizer=args.train_tokenizer,
        split=args.split,
        hf_config=args.hf_config,
    )
    return _Input(files, tokenizer, options)


def write_dataset(args: argparse.Namespace, found: _Input) -> list[str]:
    """Write the dataset, unless DIR already holds it. Return the lines to print."""
    _check_replaceable(args.out)
    with writing(args.out, remedy="nothing was written"):
        states = file_states(found.files)
        described = _describe_input(args, found.files)
        made_from = describe_making(found.tokenizer, found.options) | {"input": described}
        if args.out.exists() and any(args.out.iterdir()) and not args.overwrite:
            return [_check_existing(args.out, made_from)]
        tokenizer = found.tokenizer or _train_tokenizer(args, found)
        made_from |= describe_tokenizer(tokenizer)
        started_from = made_from | {"files": states}
        with drafted(args.out, if_exists="replace", made_from=started_from) as draft:
            for name, content in tokenizer.files.items():
                write_durably(draft / name, content)
            started = time.monotonic()
            import_module(found.options.maker).write(draft, found.files, tokenizer, found.options)
            seconds = time.monotonic() - started
            require_unchanged(states)
            write_manifest(draft, made_from)
    lines: list[str] = []
    n_tokens = 0
    for split in found.options.splits:
        index = read_index(args.out / f"{split}.json")
        n_documents = format_count(index.documents, "document")
        name = args.out / f"{split}.bin"
        lines.append(f"{name}: {index.tokens:,} tokens ({index.dtype}) in {n_documents}")
        n_tokens += index.tokens
    return [f"{seconds:,.1f} s, {n_tokens / seconds:,.0f} tokens/s", *lines]


def _describe_input(args: argparse.Namespace, files: Sequence[Path]) -> list[str]:
    """Return what identifies each file by its content, or a dataset of the Hub by its name."""
    if args.split is not None:
        _, fingerprint = open_documents(str(files[0]), "INPUT", args.split, args.hf_config)
        return [fingerprint]
    return describe_files(files)


def _check_replaceable(out: Path) -> None:
    """Raise ConfigError if a new directory at `out` would replace more than a dataset."""
    remedy = f"pass a new one, e.g. --out {out / 'tokens'}"
    if out.is_symlink() or out.is_mount() or out.name in ("", ".."):
        problem = "is a link, a mount point or relative, which cannot be replaced"
        raise ConfigError(f"--out: {out}: {problem}; {remedy}")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"--out: {out}: is not a directory; pass another one")
    others = sorted({path.name for path in out.iterdir()} - OUTPUT_FILES)
    if others:
        problem = f"has files that are not of a dataset, e.g. {others[0]}"
        raise ConfigError(f"--out: {out}: {problem}; {remedy}")


def _check_existing(out: Path, made_from: Mapping[str, Any]) -> str:
    """Return a line about the dataset in `out`, if it is that of this command."""
    remedy = "choose another directory, or replace it with --overwrite"
    try:
        found = read_manifest(out, checksum).made_from
    except ConfigError as error:
        raise ConfigError(f"--out: {error}; {remedy}") from None
    different = [
        key for key, value in made_from.items() if key != "program" and found.get(key) != value
    ]
    if different:
        problem = f"contains another dataset (different: {', '.join(different)})"
        raise ConfigError(f"--out: {out}: {problem}; {remedy}")
    return f"{out}: already exists"


def _train_tokenizer(args: argparse.Namespace, found: _Input) -> FileTokenizer:
    """Train a tokenizer on the documents that are not held out."""
    assert isinstance(found.options, TextOptions)
    texts = TextFiles(found.files, found.options)

    def read() -> Iterator[str]:
        for document, blocks in texts.read():
            if not document.held_out:
                yield from blocks()

    content = train_tokenizer(read(), args.train_tokenizer)
    return FileTokenizer({TOKENIZER_JSON: content}, TOKENIZER_JSON)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, or raise ConfigError with all problems."""
    description = "Convert text to token files."
    parser = Parser(prog="python -m lm.prepare", description=description)
    add = parser.add_argument
    input_help = "a file, a directory or a glob, or KEY=VALUE"
    add("input", nargs="*", type=location_argument, metavar="INPUT", help=input_help)
    add(
        "--config",
        type=path_argument,
        metavar="FILE",
        help="experiment file of a run on dataset: jsonl, whose train_data is prepared",
    )
    add("--out", type=path_argument, metavar="DIR", help="directory for the token files")
    add(
        "--tokenizer",
        type=location_argument,
        metavar="T",
        help="as in training; for HDF5 the one that made its ids",
    )
    add(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="train a tokenizer of N tokens on the input first",
    )
    add(
        "--text-field",
        default="text",
        metavar="NAME",
        help="column or key of the text (%(default)s)",
    )
    add(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="documents to hold out, by content (0)",
    )
    add("--split", metavar="NAME", help="the input is this split of a dataset of the Hub")
    add("--hf-config", metavar="NAME", help="configuration of the dataset, e.g. en for C4")
    add("--format", choices=sorted(FORMATS), help="format of all inputs (default: by suffix)")
    add("--overwrite", action="store_true", help="replace the dataset in DIR")
    add(
        "--verify",
        type=path_argument,
        metavar="DIR",
        help="only compare the dataset in DIR with its checksums",
    )
    args = parser.parse_intermixed_args(arguments)
    problems: list[str] = []
    if args.verify is not None:
        problems = _find_unread(parser, args, {"verify"}, "--verify")
    else:
        if not args.out:
            problems.append("--out: missing; pass the directory to write to")
        if args.split is None and args.hf_config is not None:
            problems.append("--hf-config: requires --split, e.g. --split train")
        if args.config is not None:
            read = {"input", "config", "out", "overwrite", "split", "hf_config"}
            problems += _find_unread(parser, args, read, "--config, whose keys say it")
        else:
            problems += _find_problems(args)
    if problems:
        raise ConfigError(*problems)
    return args


def _find_unread(
    parser: argparse.ArgumentParser, args: argparse.Namespace, read: Collection[str], option: str
) -> list[str]:
    """Return a line for each argument that is set but not in `read`, which `option` allows."""
    problems: list[str] = []
    for name, value in vars(args).items():
        if name not in read and value not in (parser.get_default(name), []):
            unread = "INPUT" if name == "input" else f"--{name.replace('_', '-')}"
            problems.append(f"{unread}: is not read with {option}; remove it")
    return problems


def _find_problems(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with the arguments that name documents."""
    n_tokens = args.train_tokenizer
    fraction = args.validation_fraction
    problems: list[str] = []
    if not args.input:
        problems.append("INPUT: missing; pass files, directories or globs")
    if (args.tokenizer is None) == (n_tokens is None):
        problems.append("--tokenizer: pass either --tokenizer or --train-tokenizer")
    if n_tokens is not None and not 257 <= n_tokens <= MAX_SIZE:
        allowed = f"from 257 (256 bytes and {END_OF_TEXT}) to {MAX_SIZE}"
        problems.append(f"--train-tokenizer: {n_tokens} is not {allowed}")
    if not 0 <= fraction < 1:
        problems.append(f"--validation-fraction: {fraction:g} is not at least 0 and below 1")
    if args.split is not None and len(args.input) != 1:
        problems.append("--split: pass one INPUT, the name of a dataset")
    if args.split is not None and args.format is not None:
        problems.append("--format: is not read with --split; remove it")
    return problems


def find_inputs(args: argparse.Namespace) -> list[Path]:
    """Return the input files in the order of the command line, without those in --out.

    A file that is found under several names is returned once.
    """
    if args.split is not None:
        return [Path(args.input[0])]
    targets: dict[Path, Path] = {}
    for where in args.input:
        for path in find_files(where, "INPUT"):
            targets.setdefault(path.resolve(), path)
    out = args.out.resolve()
    files = [path for target, path in targets.items() if target.parent != out]
    if not files:
        problem = f"contains only the files of --out, {args.out}"
        raise ConfigError(f"INPUT: {problem}; pass the files to encode")
    with_ids: list[Path] = []
    for path in files:
        name = format_of(path, args.format)
        if name is None:
            known = ", ".join(itertools.chain.from_iterable(FORMATS.values()))
            problem = f"{path}: has not the suffix of a format that is read ({known})"
            raise ConfigError(f"{problem}; choose files by a glob, or their format with --format")
        if name == "hdf5":
            with_ids.append(path)
    if with_ids:
        others = len(with_ids) < len(files)
        if others or args.train_tokenizer is not None or args.validation_fraction > 0:
            problem = f"{with_ids[0]}: has ids: prepare HDF5 files without others,"
            raise ConfigError(f"{problem} --train-tokenizer and --validation-fraction")
    return files


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_arguments(arguments)
    if args.verify:
        n_files = len(read_manifest(find_token_files(args.verify)).files)
        lines = [f"{args.verify}: {format_count(n_files, 'file')}: verified"]
    elif args.config:
        lines = write_dataset(args, read_records_of_run(args))
    else:
        lines = write_dataset(args, read_input(args))
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    run_and_exit(main)  # at once after Ctrl-C, although a thread may be encoding a long document
