"""Command: convert text, JSONL, CSV, Parquet, Arrow and HDF5 files to token files.

    python -m lm.prepare INPUT... --tokenizer T --out DIR
    python -m lm.prepare --config FILE [KEY=VALUE...] --out DIR
    python -m lm.prepare --verify DIR

With --config, the records of `train_data` are prepared as a run on `dataset: jsonl` reads them,
chats and pairs, too; DIR is then its `train_data`. Else an input is a file, a directory or a glob.
DIR receives train.bin, train.ends and train.json, of records train.mask, with --validation-fraction
also validation.bin and so on, and the tokenizer's files. Documents are read and tokens are written
in the order of the input; threads encode parts of 128 KB, which takes about 120 bytes of memory per
byte. Text without spaces between words is encoded in one piece.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.data import run_data, token_file
from lm.data.documents import FORMATS, bar_of_files, format_of
from lm.data.encoder import encode_in_threads, split_document
from lm.data.files import find_files, name_files
from lm.data.readers import (
    Text,
    cut_between_words,
    hold_out,
    must_split,
    read_documents,
    read_ids,
)
from lm.data.records import write_records
from lm.data.token_file import (
    OUTPUT_FILES,
    TRAIN,
    VALIDATION,
    SourceRecord,
    TokenChunk,
    TokenFileWriter,
    read_index,
)
from lm.data.tokenized import RecordOptions, describe_records
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT, FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import Tokenizer, load_tokenizer, train_tokenizer
from lm.errors import ConfigError, RunError, command
from lm.fileio import home_path, write_durably
from lm.launch.machine import usable_cores
from lm.launch.spawn import run_and_exit
from lm.storage.folder import drafted, writing
from lm.units import format_bytes, format_count


@dataclass(frozen=True)
class _Records:
    """The records of `train_data`, as a run reads them."""

    files: Sequence[Path]
    tokenizer: Tokenizer
    options: RecordOptions


def read_records_of_run(config: Path, overrides: Sequence[str]) -> _Records:
    """Return what a run on `dataset: jsonl` tokenizes of its `train_data`."""
    from lm.config.reading import load_hyperparameters  # imports PyTorch
    from lm.hf.weights import model_defaults

    defaults = functools.partial(model_defaults, needs_weights=False)
    hp = load_hyperparameters(config, overrides, defaults)
    if hp.data.dataset != "jsonl":
        problem = f"{hp.data.dataset}: --config prepares records, with dataset: jsonl"
        raise ConfigError(f"dataset: {problem}; for text pass INPUT and --tokenizer")
    where = hp.data.train_data
    assert not isinstance(where, dict)  # as only token files have weights
    return _Records(
        run_data.find_record_files(where, "train_data"),
        run_data.load_record_tokenizer(hp.data, hp.model.vocab_size),
        run_data.record_options(
            hp.data, pairs=hp.objective.of_pairs, holds_out=hp.data.val_data is None
        ),
    )


def write_dataset(
    args: argparse.Namespace, files: Sequence[Path], records: _Records | None = None
) -> list[str]:
    """Write the dataset, unless DIR already holds it. Return the lines to print."""
    tokenizer = None
    if records is not None:
        tokenizer = records.tokenizer
    elif args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
    index = args.out / f"{TRAIN}.json"
    _check_replaceable(args.out)
    with writing(args.out, remedy="nothing was written"):
        modified = [path.stat().st_mtime_ns for path in files]
        sources = [token_file.make_source_record(path) for path in files]
        if index.exists() and not args.overwrite:
            return [_check_existing(args, index, sources, tokenizer, records)]
        with drafted(args.out, if_exists="replace") as draft:
            if records is not None:
                lines = _write_records(draft, args.out, sources, records)
            else:
                lines = _write_files(draft, args, files, sources, tokenizer)
            for path, before in zip(files, modified, strict=True):
                if path.stat().st_mtime_ns != before:
                    raise RunError(f"{path}: changed while it was read; run the command again")
        return lines


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


def _index_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that the tokens depend on."""
    names = ("format", "text_field", "validation_fraction", "train_tokenizer")
    return {name: getattr(args, name) for name in names}


def _check_existing(
    args: argparse.Namespace,
    path: Path,
    sources: Sequence[SourceRecord],
    tokenizer: Tokenizer | None,
    records: _Records | None,
) -> str:
    """Return a line about the dataset with the index `path`, if it is that of this command."""
    try:
        index = read_index(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; --overwrite replaces it") from None
    found: dict[str, Any] = {**index.options, "input": index.sources}
    expected: dict[str, Any] = {"input": list(sources)}
    if records is None:
        expected |= _index_options(args)
    else:
        expected |= describe_records(records.tokenizer, records.options)
        expected["val_data"] = records.options.holds_out
        found["val_data"] = path.with_name(f"{VALIDATION}.json").exists()
    if tokenizer is not None:  # else it is trained on the input
        found |= {"tokenizer": index.tokenizer, "vocab_size": index.vocab_size}
        expected |= {"tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size}
    different = [key for key, value in expected.items() if found.get(key) != value]
    if different:
        problem = f"contains another dataset (different: {', '.join(different)})"
        remedy = "choose another directory, or replace it with --overwrite"
        raise ConfigError(f"--out: {path.parent}: {problem}; {remedy}")
    return f"{token_file.describe_split(path, index)}: already exists"


def _write_records(
    draft: Path, out: Path, sources: Sequence[SourceRecord], records: _Records
) -> list[str]:
    """Write all files of a dataset of records to `draft`. Return the lines to print."""
    for name, content in records.tokenizer.files.items():
        write_durably(draft / name, content)
    indexes = write_records(draft, records.files, records.tokenizer, records.options, sources)
    lines: list[str] = []
    for split, index in zip(records.options.splits, indexes, strict=True):
        lines.append(token_file.describe_split(out / f"{split}.json", index))
    return lines


def _write_files(
    draft: Path,
    args: argparse.Namespace,
    files: Sequence[Path],
    sources: Sequence[SourceRecord],
    tokenizer: Tokenizer | None,
) -> list[str]:
    """Write all files of the dataset to `draft`. Return the lines to print."""
    fraction = args.validation_fraction
    notes: list[str] = []
    text_files = [path for path in files if format_of(path, args.format) != "hdf5"]
    for path in text_files:  # before hours of encoding, what is wrong with the start of any
        next(read_documents([path], args.format, args.text_field), None)
    texts = read_documents(text_files, args.format, args.text_field)
    from_tail = must_split(texts, fraction)
    if from_tail:
        notes.append(f"too few documents: the last {100 * fraction:g} % of each is held out")
    if tokenizer is None:
        content = train_tokenizer(
            _read_training_texts(args, files, from_tail), args.train_tokenizer
        )
        tokenizer = FileTokenizer({TOKENIZER_JSON: content}, TOKENIZER_JSON)
        if tokenizer.vocab_size != args.train_tokenizer:
            size = f"{tokenizer.vocab_size} tokens"
            notes.append(f"the trained tokenizer has {size}: the text contains no more")
    for name, content in tokenizer.files.items():
        write_durably(draft / name, content)
    splits = token_file.SPLITS if fraction else (TRAIN,)
    writers = [TokenFileWriter(draft, name, tokenizer.vocab_size) for name in splits]
    n_tokens = 0
    n_bytes = 0
    started = time.monotonic()
    with bar_of_files("encoding", files, args.format) as progress:
        for chunk in _read_tokens(args, files, tokenizer, from_tail):
            writers[chunk.held_out].add(chunk)
            n_tokens += len(chunk.ids)
            n_bytes += chunk.size
            speed = n_tokens / (time.monotonic() - started)
            progress.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            progress.update(chunk.size)
    _check_not_empty(files, writers, fraction)
    lines: list[str] = []
    for writer in writers:
        index = writer.finish(tokenizer.identity, sources, _index_options(args))
        notes += token_file.describe_unread_ends(index)
        lines.append(token_file.describe_split(args.out / f"{writer.name}.json", index))
    seconds = time.monotonic() - started
    speed = f"{format_bytes(n_bytes / seconds)}/s, {n_tokens / seconds:,.0f} tokens/s"
    return [f"{format_bytes(n_bytes)} in {seconds:,.1f} s: {speed}", *notes, *lines]


def _check_not_empty(
    files: Sequence[Path], writers: Sequence[TokenFileWriter], fraction: float
) -> None:
    n_documents = sum(writer.n_documents for writer in writers)
    if n_documents == 0:
        raise ConfigError(f"{name_files(files)}: no text to encode")
    for writer in writers:
        if writer.n_documents == 0:
            share = f"{fraction:g} of {format_count(n_documents, 'document')}"
            problem = f"{share} leaves none for {writer.name}"
            separate = "prepare separate files for validation in another directory"
            remedy = f"choose another fraction, or {separate}"
            raise ConfigError(f"--validation-fraction: {problem}; {remedy}")


def _read_split_documents(
    args: argparse.Namespace, files: Sequence[Path], from_tail: bool
) -> Iterator[Text]:
    texts = read_documents(files, args.format, args.text_field)
    return hold_out(texts, args.validation_fraction, from_tail)


def _read_training_texts(
    args: argparse.Namespace, files: Sequence[Path], from_tail: bool
) -> Iterator[str]:
    with bar_of_files("reading for the tokenizer", files, args.format) as progress:
        for document, blocks in _read_split_documents(args, files, from_tail):
            for part in cut_between_words(blocks()):
                if not document.held_out:
                    yield part
                if document.size is None:
                    progress.update(len(part.encode()))
            progress.update(document.size or 0)


def _read_tokens(
    args: argparse.Namespace,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    from_tail: bool,
) -> Iterator[TokenChunk]:
    """Yield the tokens of all files in order."""
    fraction = args.validation_fraction
    by_kind = itertools.groupby(files, lambda path: format_of(path, args.format) == "hdf5")
    for has_ids, group in by_kind:
        paths = list(group)
        if has_ids:
            for path in paths:
                yield from read_ids(path, tokenizer.vocab_size, tokenizer.eos_id, fraction)
        else:
            texts = _read_split_documents(args, paths, from_tail)
            split = (split_document(each.document, each.blocks(), tokenizer) for each in texts)
            parts = itertools.chain.from_iterable(split)
            yield from encode_in_threads(parts, tokenizer, args.workers)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, or raise ConfigError with all problems."""
    description = "Convert text to token files."
    parser = argparse.ArgumentParser(prog="python -m lm.prepare", description=description)
    add = parser.add_argument
    add("input", nargs="*", metavar="INPUT", help="a file, a directory or a glob, or KEY=VALUE")
    add(
        "--config",
        type=home_path,
        metavar="FILE",
        help="experiment file of a run on dataset: jsonl, whose train_data is prepared",
    )
    add("--out", type=home_path, metavar="DIR", help="directory for the token files")
    add(
        "--tokenizer",
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
    add("--format", choices=sorted(FORMATS), help="format of all inputs (default: by suffix)")
    add(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="threads that encode (%(default)s)",
    )
    add("--overwrite", action="store_true", help="replace the dataset in DIR")
    add(
        "--verify",
        type=home_path,
        metavar="DIR",
        help="only compare the dataset in DIR with its checksums",
    )
    args = parser.parse_intermixed_args(arguments)
    if args.config is not None:
        _check_arguments_with_config(parser, args)
    elif args.verify is None:
        _check_arguments(args)
    return args


def _check_arguments_with_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    problems: list[str] = []
    if not args.out:
        problems.append("--out: missing; pass the directory to write to")
    allowed = {"input", "config", "out", "overwrite"}
    for name, value in vars(args).items():
        if name not in allowed and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            problems.append(f"{option}: is not read with --config, whose keys say it; remove it")
    if problems:
        raise ConfigError(*problems)


def _check_arguments(args: argparse.Namespace) -> None:
    n_tokens = args.train_tokenizer
    fraction = args.validation_fraction
    problems: list[str] = []
    if not args.input:
        problems.append("INPUT: missing; pass files, directories or globs")
    if not args.out:
        problems.append("--out: missing; pass the directory to write to")
    if (args.tokenizer is None) == (n_tokens is None):
        problems.append("--tokenizer: pass either --tokenizer or --train-tokenizer")
    if n_tokens is not None and n_tokens < 257:
        least = f"257 (256 bytes and {END_OF_TEXT})"
        problems.append(f"--train-tokenizer: {n_tokens} is less than {least}")
    if not 0 <= fraction < 1:
        problems.append(f"--validation-fraction: {fraction:g} is not at least 0 and below 1")
    if args.workers < 1:
        problems.append(f"--workers: {args.workers} is less than 1")
    if problems:
        raise ConfigError(*problems)


def find_inputs(args: argparse.Namespace) -> list[Path]:
    """Return the input files in the order of the command line, without those in --out.

    A file that is found under several names is returned once.
    """
    targets: dict[Path, Path] = {}
    problems: list[str] = []
    for where in args.input:
        try:
            for path in find_files(where, "INPUT"):
                targets.setdefault(path.resolve(), path)
        except ConfigError as error:
            problems += error.problems
    out = args.out.resolve()
    files: list[Path] = []
    for target, path in targets.items():
        if target.parent != out:
            files.append(path)
    if targets and not files:
        remedy = "pass the files to encode"
        problems.append(f"INPUT: contains only the files of --out, {args.out}; {remedy}")
    unknown: list[Path] = []
    for path in files:
        name = format_of(path, args.format)
        if name is None:
            unknown.append(path)
            continue
        problem = _format_problem(args, name)
        if problem is not None:
            problems.append(f"{path}: {problem}")
    if unknown:
        known = ", ".join(itertools.chain.from_iterable(FORMATS.values()))
        share = f"{len(unknown)} of {format_count(len(files), 'file')}"
        share = f"{share} without a suffix of a known format ({known})"
        examples = ", ".join(map(str, unknown[:3]))
        known_suffixes = sorted({path.suffix for path in files} - {path.suffix for path in unknown})
        globs = " ".join(f"'DIRECTORY/**/*{suffix}'" for suffix in known_suffixes or [".txt"])
        remedy = f"choose files by globs, e.g. {globs}, or their format with --format"
        problems.append(f"INPUT: {share}, e.g. {examples}; {remedy}")
    if problems:
        raise ConfigError(*problems[:20])
    return files


def _format_problem(args: argparse.Namespace, name: str) -> str | None:
    """Return why a file of the format `name` cannot be encoded as `args` say, if it cannot."""
    if name == "hdf5" and args.train_tokenizer is not None:
        return "contains ids, no text to train a tokenizer on; pass --tokenizer"
    return None


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse_arguments(arguments)
    if args.verify:
        lines = token_file.verify_dataset(args.verify)
    elif args.config:
        records = read_records_of_run(args.config, args.input)
        lines = write_dataset(args, records.files, records)
    else:
        lines = write_dataset(args, find_inputs(args))
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    run_and_exit(main)  # at once after Ctrl-C, although a thread may be encoding a long document
