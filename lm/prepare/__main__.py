"""Command: convert text, JSONL, CSV, Parquet, Arrow and HDF5 files to token files.

    python -m lm.prepare INPUT... --tokenizer T --out DIR
    python -m lm.prepare --verify DIR

An input is a file, a directory or a glob. DIR receives train.bin, train.ends and train.json, with
--validation-fraction also validation.bin and so on, and the tokenizer's files. This process reads documents and
writes tokens in the order of the input; worker processes encode chunks of about 1 MB. A document is encoded in one
piece, which takes about 120 bytes of memory per byte of text: 7 GiB for 64 MB.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm.data.files import find_files, is_compressed, name_files
from lm.data.tokenizer import END_OF_TEXT, FILE, FileTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from lm.data.tokens import read_index
from lm.errors import ConfigError, RunError, command
from lm.fileio import write_durably
from lm.prepare import token_writer
from lm.prepare.readers import FORMATS, TokenChunk, format_of, hold_out, must_split, read_documents, read_ids
from lm.prepare.token_writer import DRAFTS, LOCK, OUTPUT, READY, TRAIN, SplitWriter, verify
from lm.prepare.workers import WorkerPool
from lm.runtime.run_dir import lock_file

LOG_SECONDS = 30.0
"""Time between progress lines if stderr is not a terminal."""


def prepare(args: argparse.Namespace, files: Sequence[Path]) -> list[str]:
    """Write the dataset, unless DIR already holds it. Return the lines to print."""
    tokenizer = None if args.tokenizer in (None, "none") else load_tokenizer(args.tokenizer)
    if args.out.is_symlink():
        raise ConfigError(f"--out: {args.out}: is a symbolic link; pass the directory that it leads to")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        holder = lock_file(args.out / LOCK)
    except OSError as error:
        raise ConfigError(f"--out: {args.out}: cannot be written and locked: {error.strerror}") from None
    if holder:
        raise RunError(f"--out: {args.out}: in use by {holder}; wait for it, stop it, or choose another directory")
    pool = WorkerPool(args.workers)
    try:
        token_writer.install(args.out)
        return _build(args, files, pool, tokenizer)
    except BrokenProcessPool:
        raise RunError(
            "a worker process was killed, most likely because memory ran out; nothing was written. Use fewer --workers"
            f" than {args.workers}, or split the longest documents: encoding one takes about 120 times its size"
        ) from None
    except OSError as error:
        free = f"; {shutil.disk_usage(args.out).free:,} bytes are free" if error.errno == errno.ENOSPC else ""
        raise RunError(f"{error.filename or args.out}: {error.strerror}{free}; nothing was written") from None
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(args.out / DRAFTS, ignore_errors=True)


def _build(args: argparse.Namespace, files: Sequence[Path], pool: WorkerPool, tokenizer: Tokenizer | None) -> list[str]:
    before = [path.stat().st_mtime_ns for path in files]
    options = {key: getattr(args, key) for key in ("format", "text_field", "validation_fraction", "train_tokenizer")}
    sources = pool.map(token_writer.source_record, files, chunksize=1 + len(files) // 100)
    if (args.out / f"{TRAIN}.json").exists() and not args.overwrite:
        wanted: dict[str, object] = {**options, "input": list(sources)}
        if args.train_tokenizer is None:
            wanted["tokenizer"] = tokenizer and tokenizer.identity
            wanted["vocab_size"] = tokenizer.vocab_size if tokenizer else args.vocab_size
        return [_check_existing(args.out / f"{TRAIN}.json", wanted)]
    drafts = args.out / DRAFTS
    shutil.rmtree(drafts, ignore_errors=True)
    drafts.mkdir()
    notes = []
    paths = [path for path in files if format_of(path, args.format) != "hdf5"]
    from_tail = must_split(read_documents(paths, args.format, args.text_field), args.validation_fraction)
    if from_tail:
        notes.append(f"too few documents: the last {100 * args.validation_fraction:g} % of each is held out")
    if args.train_tokenizer is not None:
        texts = _training_texts(args, files, from_tail)
        tokenizer = FileTokenizer({FILE: train_tokenizer(texts, args.train_tokenizer)}, FILE)
        if tokenizer.vocab_size != args.train_tokenizer:
            notes.append(f"the trained tokenizer has {tokenizer.vocab_size} tokens: the text contains no more")
    for name, content in (tokenizer.files if tokenizer else {}).items():
        write_durably(drafts / name, content)
    vocab_size = tokenizer.vocab_size if tokenizer else args.vocab_size
    splits = token_writer.SPLITS if args.validation_fraction else (TRAIN,)
    writers = [SplitWriter(args.out, name, vocab_size) for name in splits]
    n_tokens = 0
    with _progress("encoding", args, files) as progress:
        for size, chunk in _encode(args, files, pool, tokenizer, from_tail):
            writers[chunk.held_out].add(chunk)
            n_tokens += len(chunk.ids)
            progress.set_postfix_str(f"{n_tokens / progress.format_dict['elapsed']:,.0f} tokens/s", refresh=False)
            progress.update(size)
    counts = {name: writer.n_documents for name, writer in zip(splits, writers, strict=True)}
    if not any(counts.values()):
        raise ConfigError(f"{name_files(files)}: no text to encode")
    if empty := [name for name, count in counts.items() if not count]:
        problem = f"{args.validation_fraction:g} of {sum(counts.values())} document(s) leaves none for {empty[0]}"
        remedy = "choose another fraction, or prepare separate files for validation in another directory"
        raise ConfigError(f"--validation-fraction: {problem}; {remedy}")
    if changed := [path for path, time in zip(files, before, strict=True) if path.stat().st_mtime_ns != time]:
        raise RunError(f"{changed[0]}: changed while it was read; run the command again")
    identity, records = tokenizer and tokenizer.identity, list(sources)
    lines = [writer.finish(identity, records, options) for writer in writers]
    drafts.rename(args.out / READY)
    token_writer.install(args.out)
    seconds, megabytes = progress.format_dict["elapsed"], progress.n / 1e6
    speed = f"{megabytes / seconds:,.2f} MB/s, {n_tokens / seconds:,.0f} tokens/s"
    return [f"{megabytes:,.1f} MB in {seconds:,.1f} s: {speed}", *notes, *lines]


def _check_existing(path: Path, wanted: Mapping[str, object]) -> str:
    try:
        index = read_index(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; --overwrite replaces it") from None
    found = {**index.options, "input": index.sources, "tokenizer": index.tokenizer, "vocab_size": index.vocab_size}
    if different := [key for key, value in wanted.items() if found.get(key) != value]:
        problem = f"contains another dataset (different: {', '.join(different)})"
        raise ConfigError(f"--out: {path.parent}: {problem}; choose another directory, or replace it with --overwrite")
    return f"{token_writer.describe(path, index)}: already exists"


def _training_texts(args: argparse.Namespace, files: Sequence[Path], from_tail: bool) -> Iterator[str]:
    with _progress("reading for the tokenizer", args, files) as progress:
        documents = read_documents(files, args.format, args.text_field)
        for text, size, held_out in hold_out(documents, args.validation_fraction, from_tail):
            if not held_out:
                yield text
            progress.update(size)


def _encode(
    args: argparse.Namespace, files: Sequence[Path], pool: WorkerPool, tokenizer: Tokenizer | None, from_tail: bool
) -> Iterator[tuple[int, TokenChunk]]:
    """Yield the tokens of all files in order, with the bytes of input that they come from."""
    name, fraction = str(args.out / DRAFTS) if tokenizer and tokenizer.files else "bytes", args.validation_fraction
    for has_ids, paths in itertools.groupby(files, lambda path: format_of(path, args.format) == "hdf5"):
        if has_ids:
            vocab_size, eos_id = (tokenizer.vocab_size, tokenizer.eos_id) if tokenizer else (args.vocab_size, None)
            for path in paths:
                yield from ((c.ids.nbytes, c) for c in read_ids(path, vocab_size, eos_id, fraction))
        else:
            documents = hold_out(read_documents(paths, args.format, args.text_field), fraction, from_tail)
            yield from pool.encode(documents, name, args.out / DRAFTS)


def _progress(what: str, args: argparse.Namespace, files: Sequence[Path]) -> tqdm[Any]:
    """Return a bar on a terminal, or a line every `LOG_SECONDS`, on stderr."""
    is_known = all(format_of(path, args.format) in ("text", "jsonl") and not is_compressed(path) for path in files)
    total = sum(path.stat().st_size for path in files) if is_known else None
    seconds = 0.1 if sys.stderr.isatty() else LOG_SECONDS
    unit: Any = {"unit": "B", "unit_scale": True, "dynamic_ncols": True}
    return tqdm(desc=what, total=total, delay=seconds, mininterval=seconds, **unit)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, or raise ConfigError with all problems."""
    parser = argparse.ArgumentParser(prog="python -m lm.prepare", description="Convert text to token files.")
    add = parser.add_argument
    add("input", nargs="*", metavar="INPUT", help="a file, a directory or a glob")
    add("--out", type=Path, metavar="DIR", help="directory for the token files")
    add("--tokenizer", metavar="T", help="as in training; for HDF5 the one that made its ids, or none")
    add("--train-tokenizer", type=int, metavar="N", help="train a tokenizer of N tokens on the input first")
    add("--vocab-size", type=int, metavar="N", help="with --tokenizer none: all ids are below N")
    add("--text-field", default="text", metavar="NAME", help="column or key of the text (%(default)s)")
    add("--validation-fraction", type=float, default=0.0, metavar="F", help="documents to hold out, by content (0)")
    add("--format", choices=sorted(FORMATS), help="format of all inputs (default: by suffix)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--workers", type=int, default=cores, metavar="N", help="worker processes (%(default)s)")
    add("--overwrite", action="store_true", help="replace the dataset in DIR")
    add("--verify", type=Path, metavar="DIR", help="only compare the dataset in DIR with its checksums")
    args = parser.parse_args(arguments)
    if args.verify:
        return args
    n_tokens, fraction = args.train_tokenizer, args.validation_fraction
    size = args.vocab_size
    problems = {
        "INPUT: missing; pass files, directories or globs": not args.input,
        "--out: missing; pass the directory to write to": not args.out,
        "--tokenizer: pass either --tokenizer or --train-tokenizer": (args.tokenizer is None) == (n_tokens is None),
        f"--train-tokenizer: {n_tokens} is less than 257 (256 bytes and {END_OF_TEXT})": n_tokens is not None
        and n_tokens < 257,
        "--vocab-size: required with --tokenizer none, and only allowed with it": (args.tokenizer == "none")
        != (size is not None),
        f"--vocab-size: {size} is not between 1 and 2^32": size is not None and not 0 < size <= 2**32,
        f"--validation-fraction: {fraction:g} is not at least 0 and below 1": not 0 <= fraction < 1,
        f"--workers: {args.workers} is less than 1": args.workers < 1,
    }
    if any(problems.values()):
        raise ConfigError(*(problem for problem, is_found in problems.items() if is_found))
    return args


def find_inputs(args: argparse.Namespace) -> list[Path]:
    """Return the input files in the order of the command line, each once, without those of the dataset in --out."""
    targets: dict[Path, Path] = {}
    problems: list[str] = []
    for where in args.input:
        try:
            for path in find_files(where, "INPUT"):
                targets.setdefault(path.resolve(), path)
        except ConfigError as error:
            problems += error.problems
    out = args.out.resolve()
    files = [path for target, path in targets.items() if target.parent != out or target.name not in OUTPUT]
    if targets and not files:
        problems.append(f"INPUT: contains only the files of --out, {args.out}; pass the files to encode")
    known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
    for path in files:
        name = format_of(path, args.format)
        if name is None:
            problems.append(f"{path}: has no suffix of a known format ({known}); choose one with --format")
        elif name != "hdf5" and args.tokenizer == "none":
            problems.append(f"{path}: is text, but --tokenizer none is for HDF5 only; pass a tokenizer")
        elif name == "hdf5" and args.train_tokenizer is not None:
            problems.append(f"{path}: contains ids, no text to train a tokenizer on; pass --tokenizer")
    if problems:
        raise ConfigError(*problems[:20])
    return files


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    args = parse(arguments)
    print(*(verify(args.verify) if args.verify else prepare(args, find_inputs(args))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
