"""Command: text files, JSONL, CSV, Parquet, Arrow and HDF5 -> token files, which training reads without delay.

    python -m lm.prepare INPUT... --tokenizer T --out DIR
    python -m lm.prepare --verify DIR

An input is a file, a folder or a glob. DIR then holds train.bin, train.ends and train.json, with
--validation-fraction also validation.bin and so on, and the tokenizer's files. Worker processes read and tokenise
chunks of the input; this one puts what comes back in order and on disk. All files are drafts in DIR/.drafts until
everything is done, and train.json is put in place last: a DIR without it is no dataset.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lm.data.files import find_files, is_compressed
from lm.data.tokenizer import END_OF_TEXT, FILE, FileTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from lm.data.tokens import SourceRecord, read_index
from lm.errors import ConfigError, RunError
from lm.prepare.readers import FORMATS, Chunk, Cut, TokenChunk, format_of, read_chunks, read_ids
from lm.prepare.token_writer import (
    DRAFTS,
    LOCK,
    TRAIN,
    VALIDATION,
    DatasetWriter,
    clean_drafts,
    describe,
    install,
    is_output,
    remove_drafts,
    source,
    verify,
)
from lm.prepare.workers import ctrl_c_left_to_this_process, read_token_chunks, side_of, tokenise_into, worker_pool
from lm.runtime.run_dir import hold

IN_FLIGHT = 3
"""Chunks per worker that are being worked on or wait to be written."""

SPEAK_SECONDS = 30.0


class Progress:
    """A bar where someone looks on, otherwise a line now and then; both on stderr."""

    def __init__(self, work: str, total: int | None) -> None:
        self._work = work
        self._began = self._spoke = time.monotonic()
        self._bytes = self._tokens = 0
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=work, dynamic_ncols=True)

    def add(self, count: int, tokens: int) -> None:
        self._bytes += count
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._tokens / (now - self._began):,.0f} tokens/s", refresh=False)
            self._bar.update(count)
        elif now - self._spoke >= SPEAK_SECONDS:
            self._spoke = now
            print(f"{self._work}: {self.summary()}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        seconds = time.monotonic() - self._began
        return (
            f"{self._bytes / 1e6:,.1f} MB in {seconds:,.1f} s: {self._bytes / 1e6 / seconds:,.2f} MB/s,"
            f" {self._tokens / seconds:,.0f} tokens/s"
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Work(NamedTuple):
    """A chunk that a worker was given."""

    bytes: int
    place: Path
    """the file that its tokens go to"""
    sides: Future[list[bool]]


class Preparation:
    """One run of the command.

    Args:
        args: its command line, checked.
        files: its input, in order.
    """

    def __init__(self, args: argparse.Namespace, files: Sequence[Path]) -> None:
        self._args = args
        self._files = files
        self._out: Path = args.out
        self._fraction: float = args.validation_fraction
        self._formats = {path: format_of(path, args.format) for path in files}
        self._options: dict[str, str | int | float | None] = {
            key: getattr(args, key) for key in ("format", "text_field", "validation_fraction", "train_tokenizer")
        }

    def run(self) -> list[str]:
        """Write the dataset, unless it is there already.

        Returns:
            What there is to say of it.

        Raises:
            ConfigError: the input, or DIR.
            RunError: the disk is full, a worker was killed, or the input changed meanwhile.
        """
        named = self._args.tokenizer not in (None, "none")
        tokenizer = load_tokenizer(self._args.tokenizer) if named else None
        self._claim()
        pool = worker_pool(self._args.workers)
        try:
            install(self._out)  # what an earlier process had ready when it was killed
            seen = [path.stat() for path in self._files]
            with ctrl_c_left_to_this_process():
                sources: Iterable[SourceRecord] = pool.map(source, self._files, chunksize=1 + len(self._files) // 100)
            if (self._out / "train.json").exists() and not self._args.overwrite:
                sources = list(sources)
                return [self._same(sources, tokenizer)]
            drafts = clean_drafts(self._out)
            if self._args.train_tokenizer is not None:
                tokenizer = FileTokenizer({FILE: train_tokenizer(self._texts(), self._args.train_tokenizer)}, "trained")
            for name, content in (tokenizer.files if tokenizer else {}).items():
                (drafts / name).write_bytes(content)
            sides = (TRAIN, VALIDATION) if self._fraction else (TRAIN,)
            writer = DatasetWriter(self._out, self._vocab_size(tokenizer), sides)
            said = [self._fill(writer, self._work(pool, tokenizer))]
            if tokenizer and self._args.train_tokenizer not in (None, tokenizer.vocab_size):
                said.append(f"the tokenizer has {tokenizer.vocab_size} tokens: the text yields no more")
            self._refuse_empty(writer.documents())
            sources = list(sources)
            for path, before in zip(self._files, seen, strict=True):
                after = path.stat()
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    raise RunError(f"{path}: changed while it was read; start again")
            return [*said, *writer.commit(tokenizer, sources, self._options)]
        except BrokenProcessPool:
            raise RunError(
                "a worker process was killed, most likely for want of memory; nothing was kept: start again with fewer"
                f" --workers than {self._args.workers}"
            ) from None
        except OSError as error:
            free = f"; {shutil.disk_usage(self._out).free:,} bytes are free" if error.errno == errno.ENOSPC else ""
            raise RunError(f"{error.filename or self._out}: {error.strerror}{free}; nothing was kept") from None
        finally:
            pool.shutdown(cancel_futures=True)
            remove_drafts(self._out)

    def _claim(self) -> None:
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            holder = hold(self._out / LOCK)
        except OSError as error:
            raise ConfigError(f"--out: {self._out}: cannot be written and locked: {error.strerror}") from None
        if holder:
            raise RunError(f"--out: {self._out}: held by {holder}; wait for it, stop it, or choose another folder")

    def _same(self, sources: list[SourceRecord], tokenizer: Tokenizer | None) -> str:
        """What there is to say of the dataset in DIR, if it is the one asked for.

        Raises:
            ConfigError: it is another one, or broken.
        """
        path = self._out / "train.json"
        try:
            index = read_index(path)
        except ConfigError as error:
            raise ConfigError(f"{error}; --overwrite replaces it") from None
        changes = {key: index.options.get(key) != value for key, value in self._options.items()}
        changes["input"] = index.sources != sources
        if self._args.train_tokenizer is None:
            changes["tokenizer"] = index.tokenizer != (tokenizer and tokenizer.identity)
            changes["vocab_size"] = index.vocab_size != self._vocab_size(tokenizer)
        if any(changes.values()):
            differing = ", ".join(name for name, differs in changes.items() if differs)
            raise ConfigError(
                f"--out: {self._out}: holds a dataset that was made otherwise ({differing}); choose another folder, or"
                " give --overwrite to replace it"
            )
        return f"{describe(path, index)}: is there already"

    def _vocab_size(self, tokenizer: Tokenizer | None) -> int:
        return tokenizer.vocab_size if tokenizer else self._args.vocab_size

    def _chunks(self, files: Sequence[Path], cut: Cut) -> Iterator[Chunk]:
        return read_chunks(files, self._args.format, self._args.text_field, self._fraction, cut)

    def _texts(self) -> Iterator[str]:
        """The training side's documents, long ones in pieces."""
        with Progress("reading for the tokenizer", self._total()) as progress:
            for chunk in self._chunks(self._files, cut=lambda _before, _after: True):
                for text in chunk.read():
                    if text and not side_of(text, chunk, self._fraction):
                        yield text
                progress.add(chunk.bytes, 0)

    def _total(self) -> int | None:
        """Bytes to be read, where they can be told from the files' sizes."""
        if any(kind not in ("text", "jsonl") or is_compressed(path) for path, kind in self._formats.items()):
            return None
        return sum(path.stat().st_size for path in self._files)

    def _work(self, pool: ProcessPoolExecutor, tokenizer: Tokenizer | None) -> Iterator[Work | TokenChunk]:
        numbers = itertools.count()
        name = str(self._out / DRAFTS) if tokenizer and tokenizer.files else "bytes"
        for ids, paths in itertools.groupby(self._files, lambda path: self._formats[path] == "hdf5"):
            if ids:
                end = tokenizer.end_of_text if tokenizer else None
                for path in paths:
                    yield from read_ids(path, self._vocab_size(tokenizer), end, self._fraction)
            else:
                assert tokenizer is not None
                for chunk in self._chunks(list(paths), tokenizer.splits_at):
                    place = self._out / DRAFTS / f"{next(numbers)}.part"
                    with ctrl_c_left_to_this_process():
                        sides = pool.submit(tokenise_into, place, chunk, name, self._fraction)
                    yield Work(chunk.bytes, place, sides)

    def _fill(self, writer: DatasetWriter, work: Iterator[Work | TokenChunk]) -> str:
        """Write what is done, in order, as long as there is work. Returns how fast it was."""
        waiting: deque[Work | TokenChunk] = deque()
        with Progress("tokenising", self._total()) as progress:

            def write_first() -> None:
                done = waiting.popleft()
                parts = [done] if isinstance(done, TokenChunk) else read_token_chunks(done.place, done.sides.result())
                for part in parts:
                    writer.add(part)
                count = done.ids.nbytes if isinstance(done, TokenChunk) else done.bytes
                progress.add(count, sum(len(part.ids) for part in parts))

            for latest in work:
                waiting.append(latest)
                if len(waiting) > IN_FLIGHT * self._args.workers:
                    write_first()
            while waiting:
                write_first()
        return progress.summary()

    def _refuse_empty(self, documents: Mapping[str, int]) -> None:
        total = sum(documents.values())
        if not total:
            others = f" and {len(self._files) - 1} others" if len(self._files) > 1 else ""
            raise ConfigError(f"{self._files[0]}{others}: no text, nothing to make tokens of")
        for name, count in documents.items():
            if not count:
                raise ConfigError(
                    f"--validation-fraction: {self._fraction:g} of {total} document(s) leaves none for {name}; choose"
                    " another fraction, or prepare files of their own for validation in another folder"
                )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    parser = argparse.ArgumentParser(prog="python -m lm.prepare", description="Turn text into token files.")
    parser.add_argument("input", nargs="*", metavar="INPUT", help="a file, a folder or a glob")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the token files")
    parser.add_argument("--tokenizer", metavar="T", help="as in training; for HDF5 what its ids stand for, or none")
    parser.add_argument("--train-tokenizer", type=int, metavar="N", help="train one of N tokens on the input first")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="with --tokenizer none: ids are below it")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="column or key of the text (%(default)s)")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="documents to hold out, chosen by their content (0)",
    )
    formats = sorted(set(FORMATS.values()))
    parser.add_argument("--format", choices=formats, help="of all inputs, whatever their names")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, metavar="N", help="worker processes (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset in DIR")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="only compare a dataset with its checksums")
    args = parser.parse_args(arguments)
    if args.verify:
        return args
    problems = []
    if not args.input:
        problems.append("INPUT: is missing; give files, folders or globs")
    if args.out is None:
        problems.append("--out: is missing; give the folder to write to")
    if (args.tokenizer is None) == (args.train_tokenizer is None):
        problems.append("--tokenizer: give it, or --train-tokenizer, and not both")
    if args.train_tokenizer is not None and args.train_tokenizer < 257:
        problems.append(f"--train-tokenizer: {args.train_tokenizer} is less than 257, the bytes and {END_OF_TEXT}")
    if (args.tokenizer == "none") != (args.vocab_size is not None):
        problems.append("--vocab-size: goes with --tokenizer none, and that with it")
    elif args.vocab_size is not None and not 0 < args.vocab_size <= 2**32:
        problems.append(f"--vocab-size: {args.vocab_size} is not from 1 to 2^32")
    if not 0 <= args.validation_fraction < 1:
        problems.append(f"--validation-fraction: {args.validation_fraction:g} is not 0 or more and below 1")
    if args.workers < 1:
        problems.append(f"--workers: {args.workers} is less than 1")
    if problems:
        raise ConfigError(*problems)
    return args


def find_inputs(args: argparse.Namespace) -> list[Path]:
    """The files that the command line names, in its order.

    Raises:
        ConfigError: something names no file, or a file of an unknown or unfitting format.
    """
    files, problems = [], []
    for where in args.input:
        try:
            files += find_files(where, "INPUT")
        except ConfigError as error:
            problems += error.problems
    out = args.out.resolve()
    position_ids: dict[Path, Path] = {}
    for path in files:
        position_ids.setdefault(path.resolve(), path)
    files = [path for place, path in position_ids.items() if not is_output(place, out)]
    if position_ids and not files:
        problems.append(f"INPUT: holds nothing but the files of --out, {args.out}; give what to make them of")
    for path in files:
        kind = format_of(path, args.format)
        if kind is None:
            known = ", ".join(FORMATS)
            problems.append(f"{path}: its suffix names no format that can be read ({known}); name one with --format")
        elif kind != "hdf5" and args.tokenizer == "none":
            problems.append(f"{path}: is text, but --tokenizer is none, which goes with HDF5 alone")
        elif kind == "hdf5" and args.train_tokenizer is not None:
            problems.append(f"{path}: holds ids, no text to train a tokenizer on; give --tokenizer")
    if problems:
        raise ConfigError(*problems[:20])
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        args = parse(arguments)
        if args.verify:
            print(*verify(args.verify), sep="\n")
        else:
            print(*Preparation(args, find_inputs(args)).run(), sep="\n")
        return 0
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
