"""Speed of `python -m lm.prepare` beside the `tokenizers` library's own `encode_batch`, turn by turn on one machine.

    python -m benchmarks.prepare [--megabytes 50] [--rounds 3] [--workers 1 2]

The text is the Python standard library's source, tests included, as JSONL; the tokenizer a byte-level BPE of 8,192
tokens trained on it. The library is timed on texts in memory, without the ids ever being fetched; the command from
its start to its end, reading and writing files. MB/s are of elapsed time, and of processor time over all processes
and cores.
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
from lm.data.tokenizer import FILE, train_tokenizer

LIBRARY = """
import json, resource, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
began, used = time.perf_counter(), time.process_time()
for at in range(0, len(texts), 64):
    tokenizer.encode_batch(texts[at:at + 64])
print(time.perf_counter() - began, time.process_time() - used)
"""


def write_corpus(path: Path, size: int) -> list[str]:
    """Write `size` bytes of text (about) to `path`. Returns the different documents in it."""
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts:
            try:
                texts.append(file.read_text("utf-8"))
            except UnicodeDecodeError:
                continue  # the standard library tests what bad files do
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
    """Seconds elapsed and of processors."""
    variables = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", LIBRARY, str(tokenizer), str(corpus)]
    done = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True)
    elapsed, used = map(float, done.stdout.split())
    return elapsed, used


def ours(tokenizer: Path, corpus: Path, workers: int, out: Path) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "lm.prepare", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out)]
    subprocess.run([*command, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
    elapsed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, tokenizer = folder / "corpus.jsonl", folder / FILE
        texts = write_corpus(corpus, args.megabytes * 1_000_000)
        tokenizer.write_bytes(train_tokenizer(iter(texts), 8192))
        size = sum(len(json.loads(line)["text"].encode()) for line in corpus.open()) / 1e6
        print("| workers | of time | library MB/s | lm.prepare MB/s | ratio |\n|---|---|---|---|---|")
        for workers in args.workers:
            pairs = [
                (library(tokenizer, corpus, workers), ours(tokenizer, corpus, workers, folder / f"{workers}-{turn}"))
                for turn in range(args.rounds)
            ]
            for index, name in enumerate(("elapsed", "processor")):
                theirs, mine = ([size / run[side][index] for run in pairs] for side in (0, 1))
                ratios = [b / a for a, b in zip(theirs, mine, strict=True)]
                print(
                    f"| {workers} | {name} | {spread(theirs, 2)} | {spread(mine, 2)} | {spread(ratios, 2)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
