"""Speed of `python -m lm.prepare` next to the `tokenizers` library's own `encode_batch_fast`, in turns on one machine.

    python -m benchmarks.prepare [--megabytes 50] [--rounds 3] [--workers 1 2]
    python -m benchmarks.prepare --document [--megabytes 50]

The text is the source of the Python standard library, tests included, as JSONL; the tokenizer is a
byte-level BPE of 8,192 tokens trained on it. The library encodes texts in memory and discards the
ids; the command is timed from start to end, with its reading and writing. MB/s are of elapsed time,
and of processor time over all threads and cores. --document writes the text as one document instead
and reports the peak memory of the command.
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
from pathlib import Path

from benchmarks.common import spread
from lm.data.tokenizer import TOKENIZER_JSON, train_tokenizer

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


def write_corpus(path: Path, size: int) -> list[str]:
    """Write about `size` bytes of text to `path`. Return the distinct documents."""
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts:
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


def library(tokenizer: Path, corpus: Path, threads: int) -> tuple[float, float]:
    """Return elapsed and processor seconds."""
    variables = {
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "RAYON_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-c", LIBRARY, str(tokenizer), str(corpus)]
    done = subprocess.run(
        command, env=os.environ | variables, check=True, capture_output=True, text=True
    )
    elapsed, used = map(float, done.stdout.split())
    return elapsed, used


def command(tokenizer: Path, corpus: Path, workers: int, out: Path) -> tuple[float, float]:
    """Return elapsed and processor seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    arguments = [
        sys.executable,
        "-m",
        "lm.prepare",
        str(corpus),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(out),
    ]
    subprocess.run([*arguments, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--document", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        corpus, tokenizer = directory / "corpus.jsonl", directory / TOKENIZER_JSON
        texts = write_corpus(corpus, args.megabytes * 1_000_000)
        tokenizer.write_bytes(train_tokenizer(iter(texts), 8192))
        size = sum(len(json.loads(line)["text"].encode()) for line in corpus.open()) / 1e6
        if args.document:
            document = directory / "document.txt"
            document.write_text("".join(json.loads(line)["text"] for line in corpus.open()))
            elapsed, _ = command(tokenizer, document, 1, directory / "document")
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            print(f"one document of {size:,.1f} MB: {elapsed:,.1f} s, peak memory {peak:,.2f} GiB")
            return
        print(
            "| workers | of time | library MB/s | lm.prepare MB/s | ratio |\n|---|---|---|---|---|"
        )
        for workers in args.workers:
            pairs = [
                (
                    library(tokenizer, corpus, workers),
                    command(tokenizer, corpus, workers, directory / f"{workers}-{turn}"),
                )
                for turn in range(args.rounds)
            ]
            for index, name in enumerate(("elapsed", "processor")):
                theirs, mine = ([size / run[side][index] for run in pairs] for side in (0, 1))
                ratios = [b / a for a, b in zip(theirs, mine, strict=True)]
                cells = " | ".join(spread(values, 2) for values in (theirs, mine, ratios))
                print(f"| {workers} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
