"""The work that users do most, next to what they would use instead: one table, in ten minutes.

    python -m benchmarks.table [--rounds N] [--only WORD ...]

Each row has two contenders of `benchmarks.contender`, each in its own processes, that do the same
work in turns. `times as fast` is the median over the rounds of their time over ours, with the
lowest and the highest. The packed row counts records: of ours, a step has several per sequence.

Contenders: `ours`, fsdp.py, where `ours+key=value` changes hyperparameters; `loop-fsdp2` and
`loop-ddp`, our model in the loop of a tutorial; `fsdp1`, FullyShardedDataParallel; `transformers`,
Hugging Face's model with FSDP2; `trl`, its trainer with PEFT; `load` and `save`, a checkpoint as a
run does, and `load-dcp` and `save-dcp`, with torch.distributed.checkpoint; `generate` and
`generate-transformers`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import REPOSITORY, format_spread, launch_command, make_environment
from benchmarks.contender import MARK
from lm.config.reading import load_hyperparameters
from lm.data.run_data import open_data
from lm.hf import weights
from lm.launch.spawn import default_n_ranks

N_RECORDS = 512
MEDIUM = {"d_model": 512, "n_layers": 8, "n_heads": 8, "max_seq_len": 512, "vocab_size": 8192}
MEDIUM |= {"positions": "rope", "norm": "rmsnorm", "ffn": "swiglu", "bias": "none"}


ENDLESS = ["max_steps=1000000000", "checkpoint_rate=1000000000", "validation_rate=1000000000"]


class EndedError(Exception):
    """The processes of a contender exited, most often out of memory."""


class Contender:
    """The processes of one contender, which work on command.

    Raises:
        EndedError: of all methods.
    """

    def __init__(self, name: str, file: Path, overrides: Sequence[str], n_ranks: int) -> None:
        kind, *changes = name.split("+")
        self._directory = tempfile.TemporaryDirectory()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        settings = [*ENDLESS, "report_rate=2", *overrides, *changes]
        arguments = [kind, str(file.absolute()), *settings]
        self._process = subprocess.Popen(
            launch_command(n_ranks, "benchmarks/contender.py", *arguments),
            cwd=self._directory.name,
            env=make_environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self._read_seconds()  # of the first step
        except EndedError:
            self.close()
            raise

    def _read_seconds(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        self._errors.seek(0)
        raise EndedError("".join(self._errors.readlines()[-5:]))

    def run(self, n_steps: int) -> float:
        """Take `n_steps` steps. Return the seconds that one took."""
        assert self._process.stdin is not None
        try:
            print(n_steps, file=self._process.stdin, flush=True)
        except OSError as error:
            raise EndedError(str(error)) from None
        return self._read_seconds() / n_steps

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # already exited
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._directory.cleanup()


@dataclass(frozen=True)
class Row:
    """Work, and who does it."""

    work: str
    ours: str
    theirs: str
    file: Path
    settings: Sequence[str] = ()
    n_ranks: int = 1
    n_steps: int = 2
    """in a round"""
    share: float = 1.0
    """of one of their steps in one of ours"""


@dataclass
class Times:
    """Seconds of a step of theirs, in each round."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def make_rows(folder: Path) -> list[Row]:
    """Return the rows; what they read is written to `folder`."""
    n_ranks = default_n_ranks()
    quickstart = REPOSITORY / "recipes" / "quickstart.yaml"
    plain = ["optimizer=adamw", "grad_clip=1"]
    blocking = ["async_checkpoint=false"]
    shipped = REPOSITORY / "config.yaml"
    medium = _write_config(folder / "medium.yaml", MEDIUM)
    chats = _write_chats(folder)
    step = "a step of quickstart.yaml"
    return [
        Row(f"{step}, sharded", "ours", "loop-fsdp2", quickstart, plain, n_ranks, 10),
        Row(
            f"{step}, replicated",
            "ours+sharding=no-shard",
            "loop-ddp",
            quickstart,
            plain,
            n_ranks,
            10,
        ),
        Row("a step of config.yaml", "ours", "transformers", shipped, (), n_ranks),
        Row("the same, compiled", "ours+compile=true", "fsdp1", shipped, (), n_ranks),
        Row("LoRA, a record a row", "ours+packing=false", "trl", chats, (), 1, 1),
        Row("LoRA, packed", "ours", "trl", chats, (), 1, 1, _records_per_sequence(chats)),
        Row("loading a checkpoint", "load", "load-dcp", medium, (), n_ranks),
        Row("saving one, blocking", "save", "save-dcp", medium, blocking, n_ranks),
        Row("generation", "generate", "generate-transformers", medium),
    ]


def _write_config(file: Path, hyperparameters: Mapping[str, object]) -> Path:
    file.write_text(json.dumps({"name": "bench", "hyperparameters": hyperparameters}))
    return file


def _write_chats(folder: Path) -> Path:
    """Write a small Llama, and prompts with completions of 40 to 320 tokens. Return a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lm.data.tokenizer.loading import train_tokenizer

    model = folder / "model"
    shape = LlamaConfig(
        vocab_size=320,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(model)
    (model / "tokenizer.json").write_bytes(train_tokenizer(iter(["a"]), 257))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    generator = random.Random(0)
    lines: list[str] = []
    for _ in range(N_RECORDS):
        completion = "".join(generator.choices("abcdefgh", k=generator.randint(20, 300)))
        lines.append(json.dumps({"prompt": "What comes next? ", "completion": completion}))
    data = folder / "chats.jsonl"
    data.write_text("\n".join(lines) + "\n")
    hyperparameters = {
        "init_from": str(model),
        "dataset": "jsonl",
        "train_data": str(data),
        "val_data": str(data),
        "loss_on": "completion",
        "max_seq_len": 512,
        "batch_size": 8,
        "lora_rank": 16,
        "grad_clip": 1.0,
    }
    return _write_config(folder / "chats.yaml", hyperparameters)


def _records_per_sequence(file: Path) -> float:
    hp = load_hyperparameters(file, [], weights.model_defaults)
    data = open_data(hp.data, hp.model.vocab_size, hp.model.max_seq_len, hp.data.batch_size, 0)
    assert data.train.samples_per_epoch is not None
    return N_RECORDS / data.train.samples_per_epoch


def measure(row: Row, n_rounds: int) -> Times:
    """Measure a row; the first round, of both, is not counted."""
    times = Times()
    with (
        closing(Contender(row.ours, row.file, row.settings, row.n_ranks)) as ours,
        closing(Contender(row.theirs, row.file, row.settings, row.n_ranks)) as theirs,
    ):
        for turn in range(n_rounds + 1):
            for contender, its_times in ((ours, times.ours), (theirs, times.theirs)):
                seconds = contender.run(row.n_steps)
                if turn > 0:
                    its_times.append(seconds)
    times.ours = [seconds / row.share for seconds in times.ours]
    return times


def format_row(row: Row, times: Times) -> str:
    ratios = [theirs / ours for ours, theirs in zip(times.ours, times.theirs, strict=True)]
    cells = [row.work, row.theirs, format_spread(ratios, 2)]
    cells += [f"{statistics.median(each):.3f}" for each in (times.ours, times.theirs)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows with one of these words")
    args = parser.parse_args()
    print("| work | next to | times as fast | s | their s |", "|---|---|---|---|---|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for row in make_rows(Path(folder)):
            if args.only and not any(word in row.work for word in args.only):
                continue
            try:
                print(format_row(row, measure(row, args.rounds)), flush=True)
            except EndedError as error:
                print(f"{row.work}: failed: {str(error).strip()}", file=sys.stderr)


if __name__ == "__main__":
    main()
