"""Speed of `python -m lm.prepare` next to that of the `tokenizers` library, in turns.

    python -m benchmarks.prepare [--megabytes 50] [--rounds 3] [--workers 1 2]
    python -m benchmarks.prepare --document [--megabytes 50]

The text is the source of the Python standard library, tests included, as JSONL; the tokenizer is a
byte-level BPE of 8,192 tokens trained on it. The library's `encode_batch_fast` encodes texts in
memory and discards the ids; the command is timed from start to end, with its reading and writing.
MB/s are of elapsed time, and of processor time over all threads and cores. --document writes the
text as one document instead and reports the peak memory of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import format_spread
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import train_tokenizer

LIBRARY = """
import json, resource, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
start, used = time.perf_counter(), time.process_time()
for at in range(0, len(texts), 64):
    tokenizer.encode_batch_fast(texts[at:at + 64])
print(time.perf_counter() - start, time.process_time() - used)
"""


@dataclass(frozen=True)
class Seconds:
    """Time that a process took."""

    elapsed: float
    processor: float
    """over all threads and cores"""


def write_corpus(path: Path, size: int) -> list[str]:
    """Write about `size` bytes of text to `path`. Return the distinct documents."""
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for file in sorted(standard_library.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            texts.append(file.read_text("utf-8"))
        except UnicodeDecodeError:
            continue  # tests of the standard library include invalid files
    written = 0
    with path.open("w") as out:
        while written < size:
            for text in texts:
                out.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= size:
                    break
    return texts


def time_library(tokenizer: Path, corpus: Path, threads: int) -> Seconds:
    """Return the seconds that the library takes to encode."""
    variables = {
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "RAYON_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-c", LIBRARY, str(tokenizer), str(corpus)]
    done = subprocess.run(
        command, env=os.environ | variables, check=True, capture_output=True, text=True
    )
    elapsed, processor = done.stdout.split()
    return Seconds(float(elapsed), float(processor))


def time_prepare(tokenizer: Path, corpus: Path, workers: int, out: Path) -> Seconds:
    """Return the seconds of the command."""
    command = [sys.executable, "-m", "lm.prepare", str(corpus), "--tokenizer", str(tokenizer)]
    command += ["--out", str(out), "--workers", str(workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    elapsed = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return Seconds(elapsed, user + system)


def measure_document(tokenizer: Path, documents: list[str], directory: Path, size: float) -> None:
    """Print the seconds and the peak memory of the command for one document of `size` MB."""
    document = directory / "document.txt"
    document.write_text("".join(documents))
    seconds = time_prepare(tokenizer, document, 1, directory / "document")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    took = f"{seconds.elapsed:,.1f} s, peak memory {peak:,.2f} GiB"
    print(f"one document of {size:,.1f} MB: {took}")


def print_rows(workers: int, size: float, theirs: list[Seconds], ours: list[Seconds]) -> None:
    """Print MB/s of the rounds of the library and of the command, for a text of `size` MB."""
    for kind in ("elapsed", "processor"):
        their_rates = [size / getattr(seconds, kind) for seconds in theirs]
        our_rates = [size / getattr(seconds, kind) for seconds in ours]
        ratios = [our / their for our, their in zip(our_rates, their_rates, strict=True)]
        columns = (their_rates, our_rates, ratios)
        cells = " | ".join(format_spread(values, 2) for values in columns)
        print(f"| {workers} | {kind} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--document", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        corpus = directory / "corpus.jsonl"
        tokenizer = directory / TOKENIZER_JSON
        texts = write_corpus(corpus, args.megabytes * 1_000_000)
        tokenizer.write_bytes(train_tokenizer(iter(texts), 8192))
        documents = [json.loads(line)["text"] for line in corpus.open()]
        size = sum(len(document.encode()) for document in documents) / 1e6
        if args.document:
            measure_document(tokenizer, documents, directory, size)
            return
        header = "| workers | of time | library MB/s | lm.prepare MB/s | ratio |"
        print(f"{header}\n|---|---|---|---|---|")
        for workers in args.workers:
            theirs: list[Seconds] = []
            ours: list[Seconds] = []
            for turn in range(args.rounds):
                out = directory / f"{workers}-{turn}"
                theirs.append(time_library(tokenizer, corpus, workers))
                ours.append(time_prepare(tokenizer, corpus, workers, out))
            print_rows(workers, size, theirs, ours)


if __name__ == "__main__":
    main()
